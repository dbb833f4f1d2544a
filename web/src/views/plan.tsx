/** Where a whole training could run: time and price of machines, each with its range. */

import { useMemo, useState } from "preact/hooks";
import { count, duration } from "../format";
import type { Machine, Plan as Document } from "../documents";
import { Failed, Loading } from "../parts/controls";
import { Hover, type Spot } from "../parts/hover";
import { roundStep } from "../parts/plot";
import { asked, Field, roundStops, Slider } from "../parts/options";
import { CommandLine, optionWords, Sentences } from "../parts/said";
import { useWidth } from "../parts/size";
import { Table, type Column } from "../parts/table";
import { change, parameter } from "../state";
import { useSteady } from "../steady";
import { band, dollars, hours, money } from "../units";
import "../parts/further.css";
import "./plan.css";

const OPTIONS = ["iterations", "deadline", "budget", "providers", "gpus", "spot", "precision", "batch", "host-factor"];
const FLAGS = ["spot"];
const DEADLINES = [1, 2, 3, 4, 6, 8, 12, 18, 24, 36, 48, 72, 96, 120, 168, 240, 336, 504, 720, null];
const BUDGETS = [...roundStops(1, 1e6), null];
const PRICES = [...roundStops(0.1, 500), null];

export function Plan() {
  const options = asked(OPTIONS);
  const answer = useSteady("plan", options, 250);
  const value = answer.value;
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Plan</h2>
      </div>
      <div class="asked">
        <Field name="iterations" label="Iterations" placeholder={value ? count(value.asked.iterations) : ""} />
        <Slider name="deadline" label="Deadline" placeholder="none" stops={DEADLINES} usual={null} unit="h" words={(each) => (each === null ? "none" : hours(each))} />
        <Slider name="budget" label="Budget, US$" placeholder="none" stops={BUDGETS} usual={null} words={(each) => (each === null ? "none" : money(each))} />
        <Field name="gpus" label="Accelerators" placeholder="such as 1,2,4,8" />
        <Field name="providers" label="Providers" placeholder="all" />
        <label class="field">
          <input type="checkbox" checked={parameter("spot") === "1"} onChange={(event) => change({ spot: event.currentTarget.checked ? "1" : null })} />
          <span>at spot prices</span>
        </label>
      </div>
      {answer.error !== undefined ? (
        <Failed>{answer.error}</Failed>
      ) : value ? (
        <div class="answer" aria-busy={answer.isOld}>
          {value.recommendation.map((text) => (
            <p>{text}</p>
          ))}
          <Machines plan={affordable(value)} of={value.machines.length} />
          <Sentences said={(value.sentences ?? []).filter(({ texts }) => !texts.some((text) => value.recommendation.includes(text)))} />
          <CommandLine words={["plan", value.trace.path, ...optionWords({ iterations: String(value.asked.iterations), ...options }, FLAGS)]} />
        </div>
      ) : (
        <Loading height={480} />
      )}
    </div>
  );
}

const nameOf = (machine: Machine) => `${count(machine.devices)} x ${machine.device}, ${machine.provider} ${machine.instance}`;
const hoursBand = (machine: Machine) => band(machine.hours, machine.hours_low, machine.hours_high, (each) => hours(each, machine.hours_high));
const costBand = (machine: Machine) => band(machine.usd, machine.usd_low, machine.usd_high, money);

/** Without the machines that cost more an hour than the reader chose. */
function affordable(plan: Document): Document {
  const most = Number.parseFloat(parameter("price") ?? "");
  return Number.isNaN(most) ? plan : { ...plan, machines: plan.machines.filter((each) => each.usd_h <= most) };
}

const Most = () => (
  <span class="asked">
    <Slider name="price" label="US$ an hour, at most" placeholder="any" stops={PRICES} usual={null} words={(each) => (each === null ? "any" : dollars(each))} />
  </span>
);

function Machines({ plan, of }: { plan: Document; of: number }) {
  const columns = useMemo((): Column<Machine>[] => {
    const found: Column<Machine>[] = [
      { name: "machine", title: "Machine", value: nameOf, show: (row) => <span>{row.on_front && <b aria-label="nothing is both cheaper and faster">★ </b>}{nameOf(row)}</span> },
      { name: "hours", title: "Time", value: (row) => row.hours, show: hoursBand, isNumber: true, width: 200 },
      { name: "usd", title: "Cost", value: (row) => row.usd, show: costBand, isNumber: true, width: 224 },
      { name: "usd_h", title: "An hour", value: (row) => row.usd_h, show: (row) => dollars(row.usd_h), isNumber: true, width: 84, spare: 1 },
      { name: "price_as_of", title: "Price of", value: (row) => row.price_as_of, show: (row) => (row.price_is_old ? `${row.price_as_of}, old` : row.price_as_of), width: 124, spare: 4 },
      { name: "step_ns", title: "Step", value: (row) => row.step_ns, isNumber: true, width: 90, spare: 2 },
      { name: "limit", title: "Limit", value: (row) => row.limit, width: 110, spare: 3 },
      { name: "fits", title: "Memory", value: (row) => (row.fits === null ? "unknown" : row.fits ? "fits" : "does not fit"), width: 96, spare: 5 },
      { name: "region", title: "Region", value: (row) => row.region, width: 110, spare: 6 },
    ];
    return found.filter((column) => plan.machines.some((row) => column.value(row) != null));
  }, [plan]);
  if (!of) return null;
  return (
    <>
      <Picture plan={plan} />
      <Table name="machines" label="machines" columns={columns} rows={plan.machines} sort="place" tools={<Most />} />
    </>
  );
}

const HEIGHT = 300;
const EDGE = { left: 64, right: 20, top: 14, bottom: 42 };

/** Cost over time, both logarithmic; machines on the front are filled and named. */
function Picture({ plan }: { plan: Document }) {
  const [box, width] = useWidth();
  const [active, setActive] = useState<Machine | null>(null);
  const [spot, setSpot] = useState<Spot | null>(null);
  const shown = plan.machines.filter((each) => each.hours > 0 && each.usd > 0);
  if (!shown.length) return null;
  const range = (low: number[], high: number[]): [number, number] => [Math.log10(Math.min(...low)) - 0.08, Math.log10(Math.max(...high)) + 0.08];
  const xs = range(shown.map((each) => each.hours_low), shown.map((each) => each.hours_high));
  const ys = range(shown.map((each) => each.usd_low), shown.map((each) => each.usd_high));
  const right = Math.max(width - EDGE.right, EDGE.left + 10);
  const left = (x: number) => EDGE.left + ((Math.log10(x) - xs[0]) / (xs[1] - xs[0])) * (right - EDGE.left);
  const top = (y: number) => HEIGHT - EDGE.bottom - ((Math.log10(y) - ys[0]) / (ys[1] - ys[0])) * (HEIGHT - EDGE.top - EDGE.bottom);
  const point = (event: MouseEvent) => {
    const { left: x, top: y } = (event.currentTarget as Element).getBoundingClientRect();
    const far = (each: Machine) => Math.hypot(left(each.hours) - event.clientX + x, top(each.usd) - event.clientY + y);
    const near = shown.reduce((best, each) => (far(each) < far(best) ? each : best));
    const found = far(near) < 24 ? near : null;
    setActive(found);
    setSpot(found && { x: event.clientX, y: event.clientY });
  };
  return (
    <figure class="plan-plot" ref={box}>
      <svg
        width={width || undefined}
        height={HEIGHT}
        role="img"
        aria-label={`Cost over time of ${count(shown.length)} machines; the table below has the figures.`}
        onPointerMove={point}
        onPointerLeave={() => {
          setActive(null);
          setSpot(null);
        }}
      >
        {marks(xs, width / 130).map((x) => (
          <g class="grid">
            <line x1={left(x)} x2={left(x)} y1={EDGE.top} y2={HEIGHT - EDGE.bottom} />
            <text x={left(x)} y={HEIGHT - EDGE.bottom + 16} text-anchor="middle">{hours(x)}</text>
          </g>
        ))}
        {marks(ys, 5).map((y) => (
          <g class="grid">
            <line x1={EDGE.left} x2={right} y1={top(y)} y2={top(y)} />
            <text x={EDGE.left - 8} y={top(y) + 4} text-anchor="end">{money(y)}</text>
          </g>
        ))}
        <text class="axis" x={(EDGE.left + right) / 2} y={HEIGHT - 6} text-anchor="middle">time</text>
        {shown.map((each) => (
          <g class={`machine${each.on_front ? " front" : ""}${each === active ? " active" : ""}`}>
            <line x1={left(each.hours_low)} x2={left(each.hours_high)} y1={top(each.usd)} y2={top(each.usd)} />
            <circle cx={left(each.hours)} cy={top(each.usd)} r={each.on_front ? 5 : 3.5} />
          </g>
        ))}
      </svg>
      <Hover at={spot} text={active ? `${nameOf(active)}\n${hoursBand(active)}\n${costBand(active)}\na step ${duration(active.step_ns)}` : ""} />
      <figcaption class="muted small">Filled: nothing is both cheaper and faster. Lines are ranges of the time.</figcaption>
    </figure>
  );
}

/** Round values of a logarithmic axis, about as many as there is room for. */
export function marks([low, high]: readonly [number, number], most: number): number[] {
  if (high - low >= 1.5) {
    const found: number[] = [];
    for (let power = Math.floor(low); power <= high; power++) {
      for (const each of [1, 3]) if (Math.log10(each) + power >= low && Math.log10(each) + power <= high) found.push(each * 10 ** power);
    }
    return found;
  }
  const [from, to] = [10 ** low, 10 ** high];
  const step = roundStep((to - from) / Math.max(most, 2), 10);
  const found: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}
