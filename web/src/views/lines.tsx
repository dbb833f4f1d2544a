/** The source with what each line costs; a table where the source cannot be read. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import { type Loaded, useDocument, useOptional } from "../document";
import { count, duration, share, short, size } from "../format";
import { toggle } from "../parts/causes";
import { Empty, Loading, Shown } from "../parts/controls";
import { lastPart } from "../parts/finding";
import { Table, type Column } from "../parts/table";
import { useRelated } from "../related";
import type { LineCost, Lines as LinesDocument, Source } from "../schema";
import { filterOf, findingValues, isRelated, lineOf, type Related } from "../selection";
import { change, choose, parameter, selection } from "../state";
import "./lines.css";

const TABLE = "all";

export function Lines() {
  const lines = useDocument("lines");
  return <Shown of={lines} height={640}>{(value) => <Costs costs={value} />}</Shown>;
}

function Costs({ costs }: { costs: LinesDocument }) {
  const session = useDocument("session").value;
  const related = useRelated();
  const files = useMemo(() => filesOf(costs.lines), [costs]);
  if (!files.length) {
    return (
      <Empty title="The trace names no line of your code.">
        Record with the lines of the host’s calls: stepscope run does it always, torch.profiler with with_stack=True.
      </Empty>
    );
  }
  const wanted = parameter("file") ?? fileOfChoice(files);
  const hasSource = session?.documents.includes("source") ?? false;
  const file = files.find((each) => each.file === wanted)?.file ?? (hasSource ? files[0]!.file : TABLE);
  const isTable = wanted === TABLE || file === TABLE;
  return (
    <div class="lines">
      <nav class="files" aria-label="Files">
        <FileLink isHere={isTable} title="All lines" ns={null} onClick={() => change({ file: TABLE })} />
        {files.map((each) => (
          <FileLink isHere={!isTable && each.file === file} title={each.file} ns={each.ns / stepsOf(costs)} onClick={() => change({ file: each.file })} />
        ))}
      </nav>
      <div class="lines-main">{isTable ? <LineTable costs={costs} rows={costs.lines} related={related} /> : <SourceOf key={file} file={file} costs={costs} related={related} />}</div>
    </div>
  );
}

/** What sums are divided by: the steps, or one recording. */
const stepsOf = (costs: LinesDocument) => Math.max(costs.steps, 1);

function FileLink({ isHere, title, ns, onClick }: { isHere: boolean; title: string; ns: number | null; onClick: () => void }) {
  return (
    <button type="button" class="plain" aria-current={isHere || undefined} onClick={onClick} title={short(title)}>
      <span>{short(lastPart(title), 60)}</span>
      {ns !== null && <span class="muted">{duration(ns)}</span>}
    </button>
  );
}

function filesOf(lines: readonly LineCost[]): { file: string; ns: number }[] {
  const sums = new Map<string, number>();
  for (const line of lines) if (line.file !== null) sums.set(line.file, (sums.get(line.file) ?? 0) + line.total_ns);
  return [...sums].map(([file, ns]) => ({ file, ns })).sort((a, b) => b.ns - a.ns);
}

function fileOfChoice(files: { file: string }[]): string | undefined {
  const chosen = selection.value;
  return chosen?.kind === "line" ? files.find(({ file }) => chosen.value.startsWith(`${file}:`))?.file : undefined;
}

function SourceOf({ file, costs, related }: { file: string; costs: LinesDocument; related: Related | null }) {
  const source = useDocument("source", { file }) as Loaded<Source>;
  const rows = costs.lines.filter((line) => line.file === file);
  if (source.error === undefined && !source.value) return <Loading height={640} />;
  const text = source.value?.text ?? null;
  return (
    <>
      {(source.error ?? source.value?.note) && <p class="warning note">{source.error ?? source.value?.note}</p>}
      {text === null ? <LineTable costs={costs} rows={rows} related={related} /> : <SourceLines file={file} text={text} rows={rows} costs={costs} related={related} />}
    </>
  );
}

function SourceLines({ file, text, rows, costs, related }: { file: string; text: string; rows: LineCost[]; costs: LinesDocument; related: Related | null }) {
  const steps = stepsOf(costs);
  const byLine = useMemo(() => new Map(rows.map((row) => [row.line, row])), [rows]);
  const findings = useFindingsByLine();
  const box = useRef<HTMLDivElement>(null);
  const largest = Math.max(...rows.map((row) => row.total_ns), 1);
  useEffect(() => {
    const target = box.current?.querySelector<HTMLElement>(".chosen") ?? box.current?.querySelector<HTMLElement>(".hottest");
    if (target) box.current!.scrollTop = target.offsetTop - box.current!.clientHeight / 2;
  }, [text]);
  return (
    <div class="source" ref={box} tabIndex={0} role="table" aria-label={`Source of ${lastPart(file)}`}>
      <div class="source-head" role="row">
        {["Line", steps > 1 ? "A step" : "Time", "Forward", "Backward", "Memory", "Source"].map((title) => (
          <span role="columnheader" data-tip={title === "A step" ? `Mean of ${count(steps)} steps` : undefined}>
            {title}
          </span>
        ))}
      </div>
      {text.split("\n").map((code, place) => {
        const value = lineOf({ file, line: place + 1 });
        const row = byLine.get(place + 1);
        const isDim = row !== undefined && filterOf(related, selection.value, "line") !== undefined && !isRelated(related, "line", value);
        return <SourceLine {...{ line: place + 1, code, value, row, largest, steps, isDim }} findings={findings.get(value) ?? []} />;
      })}
    </div>
  );
}

interface SourceLineProps {
  line: number;
  code: string;
  value: string;
  row?: LineCost;
  largest: number;
  steps: number;
  isDim: boolean;
  findings: string[];
}

function SourceLine({ line, code, value, row, largest, steps, isDim, findings }: SourceLineProps) {
  const chosen = selection.value;
  const isChosen = chosen?.kind === "line" && chosen.value === value;
  const heat = row ? row.total_ns / largest : 0;
  const per = (ns = 0) => (ns > 0 ? duration(ns / steps) : "");
  const within = (act: () => void) => (event: Event) => {
    event.stopPropagation();
    act();
  };
  return (
    <div role="row" class={[row && "costs", isChosen && "chosen", heat === 1 && "hottest", isDim && "dim"].filter(Boolean).join(" ")} onClick={() => row && toggle("line", value)}>
      <span role="cell" class="line-number">
        {row ? (
          <button type="button" class="link" aria-pressed={isChosen} aria-label={`Choose line ${line}`} onClick={within(() => toggle("line", value))}>
            {line}
          </button>
        ) : (
          line
        )}
      </span>
      <span role="cell" class="heat" style={{ "--heat-of": Math.sqrt(heat) * 0.45 }}>
        {per(row?.total_ns)}
      </span>
      <span role="cell">{per(row?.forward_ns)}</span>
      <span role="cell">{per(row?.backward_ns)}</span>
      <span role="cell">{row && row.bytes_allocated > 0 ? size(row.bytes_allocated / steps) : ""}</span>
      <code role="cell">
        {short(code, 400) || " "}
        {row && !row.exact_line && <span class="note-of-line">the whole function</span>}
        {findings.map((finding) => (
          <button type="button" class="flag" onClick={within(() => choose({ kind: "finding", value: finding }))}>
            {finding}
          </button>
        ))}
      </code>
    </div>
  );
}

function useFindingsByLine(): Map<string, string[]> {
  const diagnosis = useOptional("diagnosis");
  return useMemo(() => {
    const found = new Map<string, string[]>();
    const values = findingValues(diagnosis?.findings ?? []);
    diagnosis?.findings.forEach(({ where }, place) => {
      for (const at of where) found.set(lineOf(at), [...(found.get(lineOf(at)) ?? []), values[place]!]);
    });
    return found;
  }, [diagnosis]);
}

function LineTable({ costs, rows, related }: { costs: LinesDocument; rows: readonly LineCost[]; related: Related | null }) {
  const steps = stepsOf(costs);
  const findings = useFindingsByLine();
  const known = rows.filter((row) => row.file !== null && row.line !== null);
  const valueOfRow = (row: LineCost) => lineOf({ file: row.file ?? "", line: row.line ?? 0 });
  const isOne = new Set(known.map((row) => row.file)).size === 1;
  const largest = Math.max(...known.map((row) => row.total_ns), 1);
  const time = (name: "forward_ns" | "backward_ns" | "optimizer_ns" | "input_ns" | "idle_ns", title: string, spare: number, tip?: string): Column<LineCost>[] =>
    known.some((row) => row[name]) ? [{ name, title, value: (row) => (row[name] ?? 0) / steps, show: (row) => (row[name] ? duration(row[name] / steps) : ""), isNumber: true, width: 92, spare, tip }] : [];
  const columns: Column<LineCost>[] = [
    { name: "place", title: "Line", value: (row) => `${row.file}:${row.line}`, show: (row) => <span class="name">{isOne ? row.line : `${short(lastPart(row.file ?? ""), 24)}:${row.line}`}</span> },
    { name: "function", spare: 7, title: "Function", value: (row) => row.function, width: 160 },
    { name: "total_ns", title: "A step", value: (row) => row.total_ns / steps, meter: (row) => row.total_ns / largest, isNumber: true, width: 92, tip: `${costs.basis === "device" ? "Time of the device’s work" : "Operators’ own time on the host"}${steps > 1 ? `, mean of ${count(steps)} steps` : ""}` },
    { name: "share", spare: 1, title: "Share", value: (row) => row.share, show: (row) => share(row.share), isNumber: true, width: 80 },
    ...time("forward_ns", "Forward", 3),
    ...time("backward_ns", "Backward", 3),
    ...time("optimizer_ns", "Optimizer", 6),
    ...time("input_ns", "Input", 6),
    ...time("idle_ns", "Idle", 4, "Time in which the device was idle while the host was here"),
    { name: "bytes_allocated", spare: 2, title: "Memory", value: (row) => row.bytes_allocated / steps, show: (row) => (row.bytes_allocated ? size(row.bytes_allocated / steps) : ""), isNumber: true, width: 92 },
    { name: "findings", spare: 5, title: "Findings", value: (row) => findings.get(valueOfRow(row))?.join(", "), width: 150 },
  ];
  return (
    <Table
      name="lines"
      label="lines"
      rows={known}
      columns={columns}
      sort="-total_ns"
      keep={filterOf(related, selection.value, "line") && ((row) => isRelated(related, "line", valueOfRow(row)))}
      isChosen={(row) => selection.value?.kind === "line" && selection.value.value === valueOfRow(row)}
      onChoose={(row) => toggle("line", valueOfRow(row))}
    />
  );
}
