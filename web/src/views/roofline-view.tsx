/** Operators between their device's roofs: how fast they compute for how much work a byte. */

import { useMemo, useState } from "preact/hooks";
import { count, duration, share, short } from "../format";
import { useDocument } from "../document";
import type { Roofline as Document, RooflineRow } from "../documents";
import { toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Hover, type Spot } from "../parts/hover";
import { useWidth } from "../parts/size";
import { Table, type Column } from "../parts/table";
import { valueOf } from "../selection";
import { change, parameter, selection } from "../state";
import { axesOf, pointAt, pointsOf, roofsOf, usedRoof, type Axes, type DeviceRoof, type Point } from "./roofline";
import "./roofline.css";

const HEIGHT = 420;
const EDGE = { left: 64, right: 16, top: 12, bottom: 44 };
const LIMITS = ["compute", "memory", "cache"];

export function Roofline() {
  return (
    <Shown of={useDocument("roofline")} height={640}>
      {(document) => <Devices document={document} />}
    </Shown>
  );
}

function Devices({ document }: { document: Document }) {
  const { operators, roofs } = document;
  const devices = useMemo(() => [...new Set(operators.map((row) => row.device))], [operators]);
  const device = devices.find((each) => each === parameter("roofline-device")) ?? devices[0];
  const points = useMemo(() => pointsOf(operators, device ?? ""), [operators, device]);
  if (device === undefined) return <Empty title="No operator with work on a device was recorded.">Record with the device’s activities, such as ProfilerActivity.CUDA.</Empty>;
  const roof = roofs.find((each) => each.device === device);
  const rows = operators.filter((row) => row.device === device);
  const drawn = points.reduce((sum, { row }) => sum + row.device_share, 0);
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Roofline</h2>
        {devices.length > 1 && (
          <select aria-label="Device" value={device} onChange={(event) => change({ "roofline-device": event.currentTarget.value })}>
            {devices.map((each) => (
              <option value={each}>device {each}</option>
            ))}
          </select>
        )}
        <span class="muted small">
          {points.length > 0 && roofWords(roof)}{" "}
          {points.length ? `${count(points.length)} operators with ${share(drawn)} of the device time; areas are their times.` : ""}
        </span>
      </div>
      {points.length ? (
        <Picture points={points} roof={roof} />
      ) : (
        <Empty title="No operator’s work is known.">Record input shapes: stepscope run does, and so does record_shapes=True of the PyTorch profiler.</Empty>
      )}
      <Table
        name="roofline"
        label="operators"
        columns={COLUMNS.filter((column) => rows.some((row) => column.value(row) != null))}
        rows={rows}
        sort="-device_ns"
        isChosen={isChosen}
        onChoose={(row) => toggle("operator", valueOf(row.operator))}
      />
    </div>
  );
}

function roofWords(roof: DeviceRoof | undefined): string {
  if (!roof) return "Nothing tells what the device is, so there are no roofs.";
  return roof.is_least ? `The trace does not name its device: the roofs are the lowest of ${roof.name}.` : `Roofs of ${roof.name}.`;
}

const isChosen = (row: RooflineRow) => selection.value?.kind === "operator" && selection.value.value === valueOf(row.operator);

function Picture({ points, roof: whole }: { points: Point[]; roof: DeviceRoof | undefined }) {
  const [box, width] = useWidth();
  const [active, setActive] = useState<number | null>(null);
  const [spot, setSpot] = useState<Spot | null>(null);
  const roof = whole && usedRoof(whole, points);
  const axes = axesOf(points, roof ? [roof] : []);
  const right = Math.max(width - EDGE.right, EDGE.left + 10);
  const left = (x: number) => EDGE.left + ((x - axes.x[0]) / (axes.x[1] - axes.x[0])) * (right - EDGE.left);
  const top = (y: number) => HEIGHT - EDGE.bottom - ((y - axes.y[0]) / (axes.y[1] - axes.y[0])) * (HEIGHT - EDGE.top - EDGE.bottom);
  const place = ({ x, y }: Point): [number, number] => [left(x), top(y)];
  const key = (event: KeyboardEvent) => {
    const last = points.length - 1;
    const next = { ArrowRight: (active ?? -1) + 1, ArrowDown: (active ?? -1) + 1, ArrowLeft: (active ?? 1) - 1, ArrowUp: (active ?? 1) - 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter" && active !== null) toggle("operator", valueOf(points[active]!.row.operator));
    else if (next === undefined) return;
    else setActive(Math.min(Math.max(next, 0), last));
    setSpot(null);
    event.preventDefault();
  };
  const at = (event: MouseEvent) => {
    const { left: x, top: y } = (event.currentTarget as Element).getBoundingClientRect();
    return pointAt(points, place, event.clientX - x, event.clientY - y);
  };
  const text = active === null ? "" : words(points[active]!.row);
  const anyChosen = points.some(({ row }) => isChosen(row));
  return (
    <figure class="roofline" ref={box}>
      <svg
        width={width || undefined}
        height={HEIGHT}
        tabIndex={0}
        role="application"
        aria-roledescription="plot"
        aria-label="Operators by operations a byte and TFLOP/s, the one with the most time first. Arrows move, Enter chooses."
        onKeyDown={key}
        onBlur={() => setActive(null)}
        onPointerMove={(event) => {
          const found = at(event);
          setActive(found);
          setSpot(found === null ? null : { x: event.clientX, y: event.clientY });
        }}
        onPointerLeave={() => {
          setSpot(null);
          setActive(null);
        }}
        onClick={(event) => {
          const found = at(event);
          if (found !== null) toggle("operator", valueOf(points[found]!.row.operator));
        }}
      >
        <Grid axes={axes} left={left} top={top} right={right} />
        {roof &&
          roofsOf(roof, axes).map(({ label, from, bend, to }) => (
            <g class="roof">
              <polyline points={[from, bend, to].map(([x, y]) => `${left(Math.min(Math.max(x, axes.x[0]), axes.x[1]))},${top(y)}`).join(" ")} />
              <text x={right - 4} y={top(to[1]) - 5} text-anchor="end">
                {label}
              </text>
            </g>
          ))}
        {points.map(({ row, radius, x, y }, number) => (
          <circle
            class={`point ${row.limit ?? "unknown"}${number === active ? " active" : ""}${isChosen(row) ? " chosen" : anyChosen ? " other" : ""}`}
            cx={left(x)}
            cy={top(y)}
            r={radius}
          />
        ))}
      </svg>
      <Hover at={spot} text={text} />
      <div class="plot-legend">
        {LIMITS.filter((limit) => points.some(({ row }) => row.limit === limit)).map((limit) => (
          <span>
            <i class={`dot ${limit}`} aria-hidden="true" /> limited by {limit}
          </span>
        ))}
        {points.some(({ row }) => row.limit === null) && (
          <span>
            <i class="dot unknown" aria-hidden="true" /> limit unknown
          </span>
        )}
      </div>
      <p class="said small muted" aria-live="polite">
        {spot ? "" : text.replaceAll("\n", " · ")}
      </p>
    </figure>
  );
}

function Grid({ axes, left, top, right }: { axes: Axes; left: (x: number) => number; top: (y: number) => number; right: number }) {
  const decades = ([low, high]: [number, number]) => Array.from({ length: high - low + 1 }, (_, each) => low + each);
  return (
    <g class="grid">
      {decades(axes.x).map((x) => (
        <g>
          <line x1={left(x)} x2={left(x)} y1={EDGE.top} y2={HEIGHT - EDGE.bottom} />
          <text x={left(x)} y={HEIGHT - EDGE.bottom + 16} text-anchor="middle">
            {power(x)}
          </text>
        </g>
      ))}
      {decades(axes.y).map((y) => (
        <g>
          <line x1={EDGE.left} x2={right} y1={top(y)} y2={top(y)} />
          <text x={EDGE.left - 8} y={top(y) + 4} text-anchor="end">
            {power(y)}
          </text>
        </g>
      ))}
      <text class="axis" x={(EDGE.left + right) / 2} y={HEIGHT - 8} text-anchor="middle">
        operations a byte
      </text>
      <text class="axis" transform={`translate(14 ${(HEIGHT - EDGE.bottom + EDGE.top) / 2}) rotate(-90)`} text-anchor="middle">
        TFLOP/s
      </text>
    </g>
  );
}

const power = (x: number) => (x >= 0 && x < 4 ? count(10 ** x) : x < 0 && x > -4 ? (10 ** x).toFixed(-x) : `1e${x}`);

function words(row: RooflineRow): string {
  const parts = [
    short(row.operator, 200),
    short(row.input_shapes, 200),
    `${duration(row.device_ns)}, ${share(row.device_share)}, ${count(row.calls)} calls`,
    `${count(row.tflop_per_s ?? 0)} TFLOP/s, ${count(row.gb_per_s ?? 0)} GB/s${row.number_type ? `, ${row.number_type}` : ""}`,
  ];
  if (row.limit) parts.push(`limited by ${row.limit}${row.share === null ? "" : `, ${share(row.share)} of its peak`}`);
  if (row.why) parts.push(row.why);
  if (row.better) parts.push(`better: ${row.better}`);
  return parts.join("\n");
}

const COLUMNS: Column<RooflineRow>[] = [
  { name: "operator", title: "Operator", value: (row) => row.operator, show: (row) => <span class="name">{short(row.operator, 160)}</span> },
  { name: "input_shapes", title: "Shapes", value: (row) => row.input_shapes, show: (row) => <span class="name muted">{short(row.input_shapes, 120)}</span> },
  { name: "device_share", title: "Share", value: (row) => row.device_share, meter: (row) => row.device_share, isNumber: true, width: 84 },
  { name: "device_ns", title: "Device", value: (row) => row.device_ns, isNumber: true, width: 92 },
  { name: "calls", title: "Calls", value: (row) => row.calls, isNumber: true, width: 72, spare: 3 },
  { name: "tflop_per_s", title: "TFLOP/s", value: (row) => row.tflop_per_s, isNumber: true, width: 90 },
  { name: "gb_per_s", title: "GB/s", value: (row) => row.gb_per_s, isNumber: true, width: 84 },
  { name: "limit", title: "Limit", value: (row) => row.limit, width: 92 },
  { name: "share", title: "Of peak", value: (row) => row.share, isNumber: true, width: 90, tip: "Share of the limiting peak" },
  { name: "number_type", title: "Type", value: (row) => row.number_type, width: 70, spare: 1 },
  { name: "why", title: "Why", value: (row) => row.why, width: 260, spare: 2 },
];
