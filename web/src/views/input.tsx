/** The input pipeline: what its functions cost, how steps wait for batches, and what other numbers of workers would do. */

import { useMemo } from "preact/hooks";
import { count, duration, moment, share, short } from "../format";
import { useDocument } from "../document";
import type { InputFunction, Loading } from "../documents";
import { toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Plot, timeMark } from "../parts/plot";
import { Table, type Column } from "../parts/table";
import { lineOf } from "../selection";
import { look, selection, show } from "../state";
import "../parts/further.css";
import "./input.css";

export function Input() {
  const functions = useDocument("input");
  const loading = useDocument("loading");
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Input pipeline</h2>
      </div>
      <Shown of={loading} height={280}>
        {(value) => <Waits loading={value} />}
      </Shown>
      <section class="section">
        <header>
          <h2>What making batches costs</h2>
        </header>
        <Shown of={functions} height={240}>
          {(rows) =>
            rows.length ? (
              <Functions rows={rows} />
            ) : (
              <Empty title="No function of the input pipeline was recorded.">stepscope run measures them, in the program and in its workers.</Empty>
            )
          }
        </Shown>
      </section>
    </div>
  );
}

function Waits({ loading }: { loading: Loading }) {
  if (!loading.calls) return <Empty title="No loader was asked for batches.">The recording shows no data loader, so nobody waited for one.</Empty>;
  return (
    <>
      <dl class="facts-list">
        {loading.facts.map(([name, text]) => (
          <div>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <div class="input-plots">
        {loading.waits.start_ns.length > 1 && <Requests loading={loading} />}
        {loading.with_workers.length > 0 && <Workers loading={loading} />}
      </div>
    </>
  );
}

const ACCENT = "#e69f00"; // the colour of the cause "input"

function Requests({ loading }: { loading: Loading }) {
  const { start_ns, wait_ns } = loading.waits;
  const data = useMemo((): [number[], number[]] => [start_ns, wait_ns], [loading]);
  const beyond = (start_ns.at(-1)! - start_ns[0]!) / start_ns.length / 2;
  const series = useMemo(() => [{ label: "wait", colour: ACCENT, isBars: true }], []);
  return (
    <figure aria-label="Waits for batches">
      <figcaption class="plot-head">
        <h3>Wait for each batch</h3>
        <span class="muted small">{count(loading.calls)} batches asked for; click one for the timeline</span>
      </figcaption>
      <Plot
        label={`Wait for each of ${count(loading.calls)} batches`}
        data={data}
        series={series}
        showX={timeMark}
        showY={duration}
        from={0}
        height={160}
        range={[start_ns[0]! - beyond, start_ns.at(-1)! + beyond]}
        words={(at) => `${moment(start_ns[at]!)}\nwaited ${duration(wait_ns[at]!)}`}
        onPick={(at) => {
          show("timeline");
          look({ start: start_ns[at]! - wait_ns[at]!, end: start_ns[at]! + 2 * Math.max(wait_ns[at]!, 1000) }, true);
        }}
      />
    </figure>
  );
}

function Workers({ loading }: { loading: Loading }) {
  const most = Math.max(...loading.with_workers.map((each) => each.step_ns), loading.step_ns);
  return (
    <figure aria-label="Step with other numbers of workers">
      <figcaption class="plot-head">
        <h3>A step with other numbers of workers</h3>
        <span class="muted small">predicted from the time to make a batch; a step took {duration(loading.step_ns)}</span>
      </figcaption>
      <ul class="bars">
        {loading.with_workers.map(({ workers, step_ns }) => (
          <li aria-current={workers === loading.workers ? "true" : undefined}>
            <span class="what">{workers === loading.workers ? `${workers}, as recorded` : workers}</span>
            <span class="bar">
              <i style={{ width: `${(100 * step_ns) / most}%` }} />
            </span>
            <span class="number">{duration(step_ns)}</span>
            <span class="number muted">{workers === loading.workers ? "" : changed(step_ns / loading.step_ns - 1)}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}

const changed = (by: number) => (Math.abs(by) < 0.0005 ? "the same" : `${share(Math.abs(by))} ${by > 0 ? "more" : "less"}`);

const COLUMNS: Column<InputFunction>[] = [
  { name: "function", title: "Function", value: (row) => row.function, show: (row) => <span class="name">{short(row.function, 160)}</span> },
  { name: "stage", title: "Stage", value: (row) => row.stage.replaceAll("_", " "), width: 100 },
  { name: "share", title: "Share", value: (row) => row.share, meter: (row) => row.share, isNumber: true, width: 84 },
  { name: "self_ns", title: "Itself", value: (row) => row.self_ns, isNumber: true, width: 92 },
  { name: "total_ns", title: "Total", value: (row) => row.total_ns, isNumber: true, width: 92, tip: "With the functions that it calls" },
  { name: "mean_ns", title: "A call", value: (row) => row.mean_ns, isNumber: true, width: 92 },
  { name: "calls", title: "Calls", value: (row) => row.calls, isNumber: true, width: 76 },
  { name: "processor_ns", title: "Processor", value: (row) => row.processor_ns, isNumber: true, width: 96, tip: "Processor time in the total; the rest is waiting" },
  { name: "runs_in", title: "Runs in", value: (row) => row.runs_in, width: 110 },
  { name: "place", title: "Where", value: (row) => (row.file === null ? null : `${row.file}:${row.line}`), show: (row) => <span class="name">{row.file === null ? "" : `${row.file.split("/").at(-1)}:${row.line}`}</span>, width: 190 },
];

function Functions({ rows }: { rows: InputFunction[] }) {
  return (
    <Table
      name="input"
      label="functions"
      columns={COLUMNS.filter((column) => rows.some((row) => column.value(row) != null))}
      rows={rows}
      sort="-self_ns"
      isChosen={(row) => row.file !== null && selection.value?.kind === "line" && selection.value.value === lineOf({ file: row.file, line: row.line ?? 0 })}
      onChoose={(row) => row.file !== null && row.line !== null && toggle("line", lineOf({ file: row.file, line: row.line }))}
    />
  );
}
