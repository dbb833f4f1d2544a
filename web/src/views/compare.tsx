/** Two programs side by side: whether one is faster, and what makes the difference. */

import { useMemo } from "preact/hooks";
import { count, duration, sentence, share, short } from "../format";
import { useDocument } from "../document";
import type { Compare as Document, Compared, Comparison, Difference } from "../documents";
import { causeOf, Swatch, toggle } from "../parts/causes";
import { Shown, Tabs } from "../parts/controls";
import { CommandLine } from "../parts/said";
import { Scroll } from "../parts/scroll";
import { Table, type Column } from "../parts/table";
import type { Cause, Session } from "../schema";
import { valueOf } from "../selection";
import { change, parameter, selection } from "../state";
import { TwoTimelines } from "./two-timelines";
import "../parts/further.css";
import "./compare.css";

const BUSY: Cause = { label: "", meaning: "the device worked", colour: "var(--busy)", hatched: false };

export function Compare() {
  const session = useDocument("session");
  const others = (session.value as { others?: string[] } | undefined)?.others ?? [];
  const number = Math.min(Number(parameter("with") ?? 0), Math.max(others.length - 1, 0));
  const compare = useDocument("compare", number ? { with: number } : {});
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Compare</h2>
        {others.length > 1 && (
          <select aria-label="With" value={String(number)} onChange={(event) => change({ with: event.currentTarget.value })}>
            {others.map((name, place) => (
              <option value={String(place)}>{short(name, 80)}</option>
            ))}
          </select>
        )}
      </div>
      <Shown of={compare} height={640}>
        {(document: Document) => document.comparisons[0] && <Both comparison={document.comparisons[0]} session={session.value} other={number} />}
      </Shown>
    </div>
  );
}

function Both({ comparison, session, other }: { comparison: Comparison; session: Session | undefined; other: number }) {
  const { before, after, verdict, sentences, notes, samples } = comparison;
  const [first, ...more] = sentences;
  return (
    <>
      <p class={`verdict ${verdict.replaceAll(" ", "-")}`} role="status">
        {sentence(first ?? verdict)}
      </p>
      {more.map((text) => (
        <p>{sentence(text)}</p>
      ))}
      <div class="compare-first">
        <div class="stack">
          <Bars comparison={comparison} session={session} />
          <TwoTimelines key={other} comparison={comparison} other={other} />
        </div>
        <Changes causes={comparison.causes} step_ns={before.step_ns} session={session} />
      </div>
      {[...notes, ...samples.caveats].map((note) => (
        <p class="muted small">{note}</p>
      ))}
      <Differences comparison={comparison} session={session} />
      <CommandLine words={["compare", before.name, after.name]} />
    </>
  );
}

/** Both steps by cause on one scale. */
function Bars({ comparison, session }: { comparison: Comparison; session: Session | undefined }) {
  const { before, after, causes } = comparison;
  const most = Math.max(before.step_ns, after.step_ns, 1);
  return (
    <div class="two-steps">
      <StepBar title="Before" side={before} most={most} causes={causes} of={(row) => row.before_ns} session={session} />
      <StepBar title="After" side={after} most={most} causes={causes} of={(row) => row.after_ns} session={session} />
    </div>
  );
}

interface BarProps {
  title: string;
  side: Compared;
  most: number;
  causes: readonly Difference[];
  of: (row: Difference) => number;
  session: Session | undefined;
}

function StepBar({ title, side, most, causes, of, session }: BarProps) {
  const parts = causes.filter((row) => of(row) > 0);
  return (
    <div class="two-step">
      <div class="plot-head">
        <h3>{title}</h3>
        <span class="muted small name">{short(side.name, 160)}</span>
        <span class="spring" />
        <span>
          {duration(side.step_ns)} <span class="muted small">{side.step_count === 1 ? "1 step" : `mean of ${count(side.step_count)} steps`}</span>
        </span>
      </div>
      <div class="cause-bar" style={{ width: `${(100 * side.step_ns) / most}%` }} role="img" aria-label={`${title}: ${parts.map((row) => `${lookOf(session, row).label} ${duration(of(row))}`).join(", ")}`}>
        {parts.map((row) => {
          const look = lookOf(session, row);
          return (
            <i
              class={look.hatched ? "hatched" : undefined}
              style={{ "--c": look.colour, width: `${(100 * of(row)) / Math.max(side.step_ns, 1)}%` }}
              data-tip={`${look.label}: ${duration(of(row))}\n${look.meaning}`}
            />
          );
        })}
      </div>
    </div>
  );
}

const MOST_CHANGES = 14;

/** What each cause adds or saves, on one scale, the largest first. */
function Changes({ causes, step_ns, session }: { causes: readonly Difference[]; step_ns: number; session: Session | undefined }) {
  const rows = causes.filter((row) => Math.abs(row.difference_ns) >= 0.001 * step_ns).sort((a, b) => Math.abs(b.difference_ns) - Math.abs(a.difference_ns));
  const most = Math.max(...rows.map((row) => Math.abs(row.difference_ns)), 1);
  return (
    <section class="changes" aria-label="Differences by cause, a step">
      <h3>Differences by cause, a step</h3>
      {!rows.length && <p class="muted small">No cause differs by 0.1 % of the step.</p>}
      <ul>
        {rows.slice(0, MOST_CHANGES).map((row) => {
          const look = lookOf(session, row);
          const isIdle = row.kind === "idle";
          const content = (
            <>
              <span class="what">
                <Swatch cause={look} /> {look.label}
              </span>
              <span class="diverging" aria-hidden="true">
                <i
                  class={[row.difference_ns < 0 ? "fall" : "rise", look.hatched && "hatched"].filter(Boolean).join(" ")}
                  style={{ "--c": look.colour, width: `${(50 * Math.abs(row.difference_ns)) / most}%` }}
                />
              </span>
              <span class={row.difference_ns < 0 ? "number gain" : "number"}>{signed(row.difference_ns)}</span>
            </>
          );
          const tip = `${look.label}: ${duration(row.before_ns)} before, ${duration(row.after_ns)} after\n${look.meaning}`;
          return (
            <li data-tip={tip}>
              {isIdle ? (
                <button type="button" aria-pressed={isChosenCause(row)} onClick={() => toggle("cause", row.name ?? "")}>
                  {content}
                </button>
              ) : (
                <div>{content}</div>
              )}
            </li>
          );
        })}
      </ul>
      {rows.length > MOST_CHANGES && <p class="muted small">{count(rows.length - MOST_CHANGES)} smaller ones are in the table below.</p>}
    </section>
  );
}

const isChosenCause = (row: Difference) => selection.value?.kind === "cause" && selection.value.value === row.name;

const WORK: Record<string, string> = { computing: "compute", communication: "communication", copies: "copy_in" };

function lookOf(session: Session | undefined, row: Difference): Cause {
  const name = row.name ?? "";
  if (row.kind === "idle" || (row.kind === "host" && name !== "compute")) return causeOf(session, name);
  const look = session?.kinds[WORK[name] ?? name] ?? BUSY;
  return { ...look, label: name.replaceAll("_", " ") };
}

const PARTS = ["causes", "operators", "kernels", "lines", "modules", "communication", "memory", "settings"] as const;

function Differences({ comparison, session }: { comparison: Comparison; session: Session | undefined }) {
  const there = PARTS.filter((part) => (comparison[part] as unknown[] | undefined)?.length && part !== "memory" && part !== "communication");
  const shown = there.find((part) => part === parameter("difference")) ?? there[0];
  if (!shown) return null;
  return (
    <section class="section compare-tabs">
      <Tabs
        label="What makes the difference"
        shown={shown}
        onShow={(part) => change({ difference: part }, true)}
        tabs={there.map((part) => ({
          name: part,
          title: (
            <>
              {sentence(part)} <span class="muted">{count((comparison[part] as unknown[]).length)}</span>
            </>
          ),
          content: () => (part === "settings" ? <Settings rows={comparison.settings} /> : <Rows part={part} comparison={comparison} session={session} />),
        }))}
      />
    </section>
  );
}

const KINDS = { operators: "operator", kernels: "kernel", lines: "line", modules: "module", causes: "cause" } as const;

function Rows({ part, comparison, session }: { part: (typeof PARTS)[number]; comparison: Comparison; session: Session | undefined }) {
  const rows = comparison[part] as Difference[];
  const columns = useMemo(() => columnsOf(part, rows, session), [part, rows, session]);
  const kind = KINDS[part as keyof typeof KINDS];
  return (
    <Table
      name={`compare-${part}`}
      label={part}
      columns={columns}
      rows={rows}
      sort="place"
      onChoose={(row) => kind && toggle(kind, valueOf(kind === "line" ? `${row.file}:${row.line}` : (row.name ?? row.module ?? "")))}
    />
  );
}

function columnsOf(part: string, rows: readonly Difference[], session: Session | undefined): Column<Difference>[] {
  const most = Math.max(...rows.map((row) => Math.abs(row.difference_ns)), 1);
  const name: Column<Difference> =
    part === "lines"
      ? { name: "line", title: "Line", value: (row) => (row.file ? `${row.file}:${row.line} ${row.function ?? ""}` : "no line of yours"), show: (row) => <span class="name">{row.file ? short(`${row.file.split("/").at(-1)}:${row.line} ${row.function ?? ""}`, 160) : "no line of yours"}</span> }
      : part === "causes"
        ? {
            name: "name",
            title: "Cause",
            value: (row) => row.name ?? "",
            show: (row) => (
              <span>
                <Swatch cause={lookOf(session, row)} /> {row.kind === "idle" ? `idle: ${lookOf(session, row).label}` : lookOf(session, row).label}
              </span>
            ),
          }
        : { name: "name", title: sentence(part), value: (row) => row.name ?? row.module ?? "outside of modules", show: (row) => <span class="name">{short(row.name ?? row.module ?? "outside of modules", 160)}</span> };
  const columns: Column<Difference>[] = [
    name,
    { name: "before_ns", title: "Before", value: (row) => row.before_ns, isNumber: true, width: 96, tip: "A step" },
    { name: "after_ns", title: "After", value: (row) => row.after_ns, isNumber: true, width: 96, tip: "A step" },
    {
      name: "difference_ns",
      title: "Difference",
      value: (row) => row.difference_ns,
      show: (row) => <span class={row.difference_ns < 0 ? "gain" : undefined}>{signed(row.difference_ns)}</span>,
      meter: (row) => Math.abs(row.difference_ns) / most,
      isNumber: true,
      width: 110,
    },
    { name: "share", title: "Of the step", value: (row) => row.share, show: (row) => (row.share === null ? "" : `${row.share >= 0.0005 ? "+" : ""}${share(row.share)}`), isNumber: true, width: 96, tip: "Of the step before" },
    { name: "before_calls", title: "Calls before", value: (row) => row.before_calls, isNumber: true, width: 104 },
    { name: "after_calls", title: "Calls after", value: (row) => row.after_calls, isNumber: true, width: 96 },
    { name: "match", title: "Found", value: (row) => row.match, width: 110 },
    { name: "input_shapes", title: "Shapes", value: (row) => row.input_shapes, width: 200 },
  ];
  return columns.filter((column) => column === name || rows.some((row) => column.value(row) != null));
}

/** "+1.2 ms" or "-1.2 ms". */
const signed = (ns: number) => (ns > 0 ? `+${duration(ns)}` : ns < 0 ? `-${duration(-ns)}` : duration(0));

function Settings({ rows }: { rows: readonly Record<string, unknown>[] }) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return (
    <Scroll label="Settings">
      <table class="plain-table">
        <thead>
          <tr>
            {names.map((name) => (
              <th scope="col">{sentence(name.replaceAll("_", " "))}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr>
              {names.map((name) => (
                <td>{short(row[name] == null ? "" : String(row[name]), 300)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
