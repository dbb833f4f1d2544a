/** A watched job: its recordings over the last hours, step time, causes stacked, communication, memory, and what was told. */

import { useMemo, useState } from "preact/hooks";
import type uPlot from "uplot";
import { duration, seconds, share, short, size } from "../format";
import { useDocument } from "../document";
import type { Watched, WatchedJob } from "../documents";
import { causeOf } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Plot, type Series } from "../parts/plot";
import { Table, type Column } from "../parts/table";
import { usePolled } from "../polled";
import type { Session } from "../schema";
import { change, parameter } from "../state";
import { started } from "./runs";
import "./telemetry.css";

const EVERY_MS = 30_000;
const MOST_CAUSES = 8;

export function Watch() {
  const job = parameter("job");
  const watched = usePolled("watch", job === null ? {} : { job }, () => true, EVERY_MS);
  return (
    <Shown of={watched} height={640}>
      {(value) => <Job value={value} />}
    </Shown>
  );
}

function Job({ value }: { value: WatchedJob }) {
  const whole = useMemo(() => value.recordings.filter((each) => each.problem === null), [value]);
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Watch</h2>
        <select aria-label="Job" value={value.shown} onChange={(event) => change({ job: event.currentTarget.value })}>
          {value.jobs.map(({ name }) => (
            <option value={name}>{short(name, 80)}</option>
          ))}
        </select>
      </div>
      {value.lines.map((line) => (
        <p>{line}</p>
      ))}
      {whole.length ? <Curves value={value} whole={whole} /> : <Empty title="No recording has succeeded yet.">The table says why.</Empty>}
      <Table name="recordings" label="recordings" columns={COLUMNS} rows={value.recordings} sort="-unix_s" />
    </div>
  );
}

const stepOf = (each: Watched) => each.step_ns ?? each.recorded_step_ns;

function Curves({ value, whole }: { value: WatchedJob; whole: Watched[] }) {
  const [range, zoom] = useState<[number, number] | null>(null);
  const session = useDocument("session").value;
  const times = useMemo(() => whole.map((each) => each.unix_s), [whole]);
  const stack = useMemo(() => stacked(whole, session), [whole, session]);
  const marks = useMemo(() => value.recordings.flatMap((each) => each.events.map((event) => ({ x: each.unix_s, label: event.state }))), [value]);
  const curves = useMemo(() => curvesOf(whole), [whole]);
  const common = { showX: clock, from: 0, height: 150, range, onZoom: zoom, marks };
  const causes = (at: number) =>
    [started(times[at]!), ...stack.causes.map((cause) => `${cause.label}: ${share(ofStep(whole[at]!, cause.ns(whole[at]!)) ?? 0)}`)].join("\n");
  return (
    <div class="plots">
      <figure class="panel" aria-label="Causes">
        <figcaption class="plot-head">
          <h3>{value.basis === "device" ? "Idle time by cause, of the step" : "The step by cause"}</h3>
          <span class="spring" />
          {range && (
            <button type="button" onClick={() => zoom(null)}>
              All of the time
            </button>
          )}
        </figcaption>
        <Plot label="Causes" data={stack.data} series={stack.series} showY={share} words={causes} {...common} />
        <div class="plot-legend">
          {stack.causes.map(({ label, colour }) => (
            <span>
              <i class="swatch" style={{ "--c": colour }} aria-hidden="true" /> {label}
            </span>
          ))}
        </div>
      </figure>
      {curves.map(({ title, data, last, show, base, words }) => (
        <figure class="panel" aria-label={title}>
          <figcaption class="plot-head">
            <h3>{title}</h3>
            <span class="spring" />
            <span class="small">last {show(last)}</span>
          </figcaption>
          <Plot label={title} data={data} series={LINE} showY={show} base={base} words={words} {...common} />
        </figure>
      ))}
    </div>
  );
}

const LINE: Series[] = [{ label: "", colour: "#0072b2" }];

type Values = (number | null)[];

/** What was measured at all, each as a curve. */
function curvesOf(whole: Watched[]) {
  const times = whole.map((each) => each.unix_s);
  const all: [title: string, values: Values, show: (y: number) => string, base: 2 | 10][] = [
    ["Step time", whole.map(stepOf), duration, 10],
    ["Communication, of the step", whole.map((each) => ofStep(each, each.communication_ns)), share, 10],
    ["Waits for the last rank, per step", whole.map((each) => each.wait_ns), duration, 10],
    ["Memory of the largest process", whole.map((each) => each.memory_bytes), size, 2],
    ["Allocated device memory", whole.map((each) => each.device_bytes), size, 2],
  ];
  return all
    .filter(([, values]) => values.some(Boolean))
    .map(([title, values, show, base]) => ({
      title,
      show,
      base,
      data: [times, values] as uPlot.AlignedData,
      last: values.findLast((y) => y !== null)!,
      words: (at: number) => `${started(times[at]!)}\n${values[at] === null ? "unknown" : show(values[at]!)}`,
    }));
}

/** The largest causes as areas on each other, the sum of all first, so that the smaller ones lie before it. */
function stacked(whole: Watched[], session: Session | undefined) {
  const total = new Map<string, number>();
  for (const each of whole) for (const [cause, ns] of Object.entries(each.causes)) total.set(cause, (total.get(cause) ?? 0) + ns);
  const order = [...total].sort((a, b) => b[1] - a[1]).map(([cause]) => cause);
  const shown = order.slice(0, MOST_CAUSES).map((cause) => ({ ...causeOf(session, cause), ns: (each: Watched) => each.causes[cause] ?? 0 }));
  const rest = order.slice(MOST_CAUSES);
  const others = { ...causeOf(session, "others"), ns: (each: Watched) => rest.reduce((sum, cause) => sum + (each.causes[cause] ?? 0), 0) };
  const causes = rest.length ? [...shown, others] : shown;
  const sums = causes.map((_, upTo) => whole.map((each) => causes.slice(0, upTo + 1).reduce((sum, cause) => sum + cause.ns(each), 0) / (each.recorded_step_ns || 1)));
  const data = [whole.map((each) => each.unix_s), ...sums.reverse()] as uPlot.AlignedData;
  const series = [...causes].reverse().map(({ label, colour }): Series => ({ label, colour, isFilled: true, width: 0 }));
  return { causes, data, series };
}

const clock = (unix_s: number, step: number) => (step >= 86_400 ? started(unix_s).slice(5, 10) : started(unix_s).slice(11));

const ofStep = (row: Watched, ns: number | null) => (ns === null || !row.recorded_step_ns ? null : ns / row.recorded_step_ns);
const told = (row: Watched) => row.problem ?? (row.events.map((event) => `${event.state}: ${event.sentence}`).join("; ") || row.finding);

const COLUMNS: Column<Watched>[] = [
  { name: "unix_s", title: "Time", value: (row) => row.unix_s, show: (row) => started(row.unix_s), isNumber: true, width: 150 },
  { name: "step_ns", title: "Step", value: stepOf, show: (row) => (stepOf(row) === null ? "" : duration(stepOf(row)!)), isNumber: true, width: 96 },
  { name: "communication_ns", title: "Communication", value: (row) => ofStep(row, row.communication_ns), show: (row) => (ofStep(row, row.communication_ns) === null ? "" : share(ofStep(row, row.communication_ns)!)), isNumber: true, width: 120 },
  { name: "late_rank", title: "Late rank", value: (row) => row.late_rank, width: 110 },
  { name: "memory_bytes", title: "Memory", value: (row) => row.memory_bytes, show: (row) => (row.memory_bytes === null ? "" : size(row.memory_bytes)), isNumber: true, width: 96 },
  { name: "cost_s", title: "Cost", value: (row) => row.cost_s, show: (row) => (row.cost_s === null ? "" : seconds(Math.max(row.cost_s, 0))), isNumber: true, width: 84 },
  { name: "told", title: "Told", value: told, show: (row) => <span class="name">{short(told(row) ?? "", 200)}</span> },
];
