/** What a run logged and sampled: losses, norms, use of devices and machine, over the time of the run. */

import { useMemo, useState } from "preact/hooks";
import uPlot from "uplot";
import { count, measured, seconds } from "../format";
import { useDocument } from "../document";
import type { TelemetryPlot, TelemetryPlots } from "../documents";
import { Empty, Shown } from "../parts/controls";
import { Plot, type Series } from "../parts/plot";
import { change, parameter } from "../state";
import "./telemetry.css";

const OTHER = "#9aa0a6"; // lines beyond the palette's are thin and grey, since more colours cannot be told apart
const FROM_ZERO = ["share", "bytes", "bytes/s", "cores", "W", "MHz"];

/** Units that stand at the axis; longer ones stand beside the title. */
const isShort = (unit: string) => unit.length <= 5 || FROM_ZERO.includes(unit);

type Rank = TelemetryPlots["ranks"][number];

export function Telemetry() {
  return (
    <Shown of={useDocument("telemetry")} height={640}>
      {({ ranks }) => <Ranks ranks={ranks} />}
    </Shown>
  );
}

function Ranks({ ranks }: { ranks: Rank[] }) {
  const wanted = parameter("telemetry-rank");
  const shown = ranks.find((each) => String(each.rank) === wanted) ?? ranks[0];
  if (!shown) return <Empty title="Nothing was logged or sampled.">stepscope run records both, unless told --no-telemetry; stepscope.log adds values of your own.</Empty>;
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Telemetry</h2>
        {ranks.length > 1 && (
          <select aria-label="Rank" value={String(shown.rank)} onChange={(event) => change({ "telemetry-rank": event.currentTarget.value })}>
            {ranks.map((each) => (
              <option value={String(each.rank)}>rank {each.rank}</option>
            ))}
          </select>
        )}
        <span class="muted small">
          {seconds(shown.duration_s)} of the run{shown.recorded_s && "; the trace was recorded in the shaded part"}
        </span>
      </div>
      <Plots key={String(shown.rank)} shown={shown} />
    </div>
  );
}

function Plots({ shown }: { shown: Rank }) {
  const [range, zoom] = useState<[number, number] | null>(null);
  const groups = [...new Set(shown.plots.map((plot) => plot.group))];
  const look = (to: [number, number] | null) => {
    if (!to) return zoom(null);
    const [low, high] = [Math.max(to[0], 0), Math.min(to[1], shown.duration_s)];
    zoom(high - low >= shown.duration_s * 0.999 ? null : [low, high]);
  };
  return (
    <>
      <div class="toolbar">
        <span class="muted small">Drag over a plot to zoom all of them.</span>
        <button type="button" disabled={!range} onClick={() => zoom(null)}>
          The whole run
        </button>
        {shown.recorded_s && (
          <button type="button" onClick={() => look(around(shown.recorded_s!, shown.duration_s))}>
            The recording
          </button>
        )}
      </div>
      {shown.notes.map((note) => (
        <p class="warning small">{note}</p>
      ))}
      {groups.map((group) => (
        <section class="section">
          <header>
            <h2>{group}</h2>
          </header>
          <div class="plots">
            {shown.plots.filter((plot) => plot.group === group).map((plot) => (
              <One key={plot.title} plot={plot} shown={shown} range={range} onZoom={look} />
            ))}
          </div>
        </section>
      ))}
      {shown.plots_left_out > 0 && <p class="muted small">{count(shown.plots_left_out)} more plots are not drawn.</p>}
    </>
  );
}

function One({ plot, shown, range, onZoom }: { plot: TelemetryPlot; shown: Rank; range: [number, number] | null; onZoom: (to: [number, number] | null) => void }) {
  const data = useMemo(() => aligned(plot, shown.duration_s), [plot, shown]);
  const colours = useDocument("session").value?.series ?? NONE;
  const series = useMemo(() => plot.lines.map(({ label }, number) => styled(label, colours[number])), [plot, colours]);
  const steps = useMemo(() => stepsAt(plot), [plot]);
  const ticks = useMemo(() => [...steps.keys()], [steps]);
  const odd = useMemo(() => plot.lines.flatMap((line) => line.not_finite_s.map((x) => ({ x, label: "not finite" }))), [plot]);
  const words = (at: number) => {
    const x = data[0][at]!;
    const step = steps.get(x);
    const values = plot.lines.flatMap((line, number) => {
      const value = data[number + 1]![at];
      return value == null ? [] : [`${line.label ? `${line.label}: ` : ""}${measured(value, plot.unit)}`];
    });
    const more = values.length > 12 ? [...values.slice(0, 12), `and ${values.length - 12} more`] : values;
    return [`${seconds(x)}${step === undefined ? "" : `, step ${step}`}`, ...more].join("\n");
  };
  const only = plot.lines.length === 1 ? plot.lines[0]!.value.findLast((value) => value !== null) : undefined;
  return (
    <figure class="panel" aria-label={plot.title}>
      <figcaption class="plot-head">
        <h3>{plot.title}</h3>
        <span class="muted small">{isShort(plot.unit) ? "" : plot.unit}</span>
        <span class="spring" />
        {only != null && <span class="small">last {measured(only, plot.unit)}</span>}
      </figcaption>
      <Plot
        label={plot.title}
        data={data}
        series={series}
        showX={seconds}
        showY={(y) => measured(y, isShort(plot.unit) ? plot.unit : "")}
        from={FROM_ZERO.includes(plot.unit) ? 0 : undefined}
        to={plot.unit === "share" ? 1 : undefined}
        base={plot.unit.startsWith("bytes") ? 2 : 10}
        height={150}
        range={range ?? [0, shown.duration_s]}
        onZoom={onZoom}
        words={words}
        ticks={ticks}
        marks={odd}
        band={shown.recorded_s}
      />
      {plot.lines.length > 1 && (
        <div class="plot-legend">
          {plot.lines.slice(0, colours.length).map((line, number) => (
            <span>
              <i class="line" style={{ "--c": colours[number] }} aria-hidden="true" />
              {line.label || "whole"}
            </span>
          ))}
          {plot.lines.length > colours.length && <span>in grey {count(plot.lines.length - colours.length)} smaller ones</span>}
          {plot.left_out > 0 && <span>{count(plot.left_out)} more are not drawn</span>}
        </div>
      )}
    </figure>
  );
}

const NONE: string[] = [];

const styled = (label: string, colour: string | undefined): Series => (colour ? { label, colour } : { label, colour: OTHER, width: 1 });

/** All lines on the times of all of them. Where a line has no sample it goes on; where its value is null it breaks. */
export function aligned(plot: Pick<TelemetryPlot, "lines">, whole: number): uPlot.AlignedData {
  const tables = plot.lines.map((line): uPlot.AlignedData => [line.time_s, line.value]);
  if (!tables.length) return [[0, whole]];
  return tables.length === 1 ? tables[0]! : uPlot.join(tables);
}

/** Numbers of steps by the time of their samples. */
export function stepsAt(plot: Pick<TelemetryPlot, "lines">): Map<number, number> {
  const found = new Map<number, number>();
  for (const { time_s, step } of plot.lines) {
    step?.forEach((number, at) => number !== null && found.set(time_s[at]!, number));
  }
  return found;
}

/** A stretch with a tenth of it, and of the whole a little, on both sides. */
function around([begin, end]: [number, number], whole: number): [number, number] {
  const more = Math.max((end - begin) / 2, whole / 200);
  return [begin - more, end + more];
}
