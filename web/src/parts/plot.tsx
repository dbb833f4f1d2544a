/** Values over an axis, drawn by uPlot: zoom by dragging, values beside the pointer, and all of it by keyboard. */

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { theme } from "../theme";
import { Hover, type Spot } from "./hover";
import { useWidth } from "./size";
import "./plot.css";

export interface Series {
  label: string;
  colour: string;
  isFilled?: boolean;
  isStepped?: boolean; // holds until the next value
  isDashed?: boolean;
  isBars?: boolean;
  width?: number;
}

export interface PlotProps {
  label: string;
  data: uPlot.AlignedData;
  series: Series[]; // those drawn first lie below
  showX: (x: number, step: number) => string; // `step` is the distance of the axis's marks
  showY: (y: number) => string;
  height?: number;
  from?: number; // least of the y axis, at most
  to?: number; // largest of the y axis, at least
  base?: 2 | 10; // of the steps of the y axis
  range?: [number, number] | null; // of x; null for all
  onZoom?: (range: [number, number] | null) => void;
  words: (at: number) => string; // what the data are at this index
  onPick?: (at: number) => void; // click, or Enter
  marks?: { x: number; label?: string }[]; // lines from the bottom to the top
  ticks?: number[]; // short lines at the bottom
  band?: [number, number] | null; // a stretch of x that is shaded
  picked?: number | null; // x that is marked
}

export function Plot(props: PlotProps) {
  const { label, data, range = null, height = 180, onZoom, onPick, words } = props;
  const [box, width] = useWidth();
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [at, setAt] = useState<number | null>(null);
  const [spot, setSpot] = useState<Spot | null>(null);
  const now = theme.value;
  useEffect(() => {
    if (!width || !place.current) return;
    const made = new uPlot(options(latest, width, height, setAt, setSpot), data, place.current);
    plot.current = made;
    return () => made.destroy();
  }, [data, now, width > 0, height, props.series]);
  useEffect(() => plot.current?.setSize({ width, height }), [width, height]);
  useEffect(() => {
    const all = data[0];
    const [min, max] = range ?? [all[0] ?? 0, all[all.length - 1] ?? 1];
    plot.current?.setScale("x", { min, max: max > min ? max : min + 1 });
  }, [range?.[0], range?.[1], data, now, width > 0, props.series]);
  useEffect(() => plot.current?.redraw(false, false), [props.picked, props.marks, props.band]);
  const key = (event: KeyboardEvent) => {
    const xs = data[0];
    const last = xs.length - 1;
    if (event.ctrlKey || event.metaKey || event.altKey || last < 0) return;
    const [min, max] = range ?? [xs[0]!, xs[last]!];
    const here = at ?? 0;
    const page = Math.max(1, Math.round(last / 20));
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - page, PageDown: here + page, Home: 0, End: last }[event.key];
    if (next !== undefined) setAt(Math.min(Math.max(next, 0), last));
    else if (event.key === "Enter" && onPick && at !== null) onPick(at);
    else if (onZoom && (event.key === "+" || event.key === "=")) {
      const middle = Math.min(Math.max(xs[here]!, min), max);
      onZoom([middle - (middle - min) / 2, middle + (max - middle) / 2]);
    } else if (onZoom && event.key === "-" && range) onZoom([min - (max - min) / 2, max + (max - min) / 2]);
    else if (onZoom && (event.key === "0" || event.key === "Escape") && range) onZoom(null);
    else return;
    setSpot(null);
    event.preventDefault();
  };
  return (
    <div class="plot" ref={box}>
      <div
        ref={place}
        class={onPick ? "pickable" : undefined}
        style={{ height: `${height}px` }}
        tabIndex={0}
        role="application"
        aria-roledescription="plot"
        aria-label={`${label}. Left and right read values${onPick ? ", Enter chooses" : ""}${onZoom ? ", plus and minus zoom" : ""}.`}
        onKeyDown={key}
        onBlur={() => setAt(null)}
      />
      <Hover at={spot} text={at === null ? "" : words(at)} />
      <p class="said" aria-live="polite">
        {spot || at === null ? "" : words(at).replaceAll("\n", " · ")}
      </p>
    </div>
  );
}

function options(
  latest: { current: PlotProps },
  width: number,
  height: number,
  setAt: (at: number | null) => void,
  setSpot: (spot: Spot | null) => void,
): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const token = (name: string) => style.getPropertyValue(name).trim();
  const { series, showX, showY, from, to, base = 10 } = latest.current;
  const axis: uPlot.Axis = {
    stroke: token("--muted"),
    font: "11px " + token("--sans"),
    grid: { stroke: token("--line"), width: 1 },
    ticks: { stroke: token("--line"), width: 1, size: 4 },
  };
  return {
    width,
    height,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    scales: {
      x: { time: false, range: (_, min, max) => [min, max] },
      y: {
        range: (_, min, max) => {
          let [low, high] = [Math.min(min ?? 0, from ?? Infinity), Math.max(max ?? 1, to ?? -Infinity)];
          if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high), 1e-300)) [low, high] = [low - (from === undefined ? 1 : 0), high + (Math.abs(high) || 1)];
          const step = roundStep((high - low) / 4, base);
          return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
        },
      },
    },
    axes: [
      { ...axis, values: (_, splits) => splits.map((x) => showX(x, (splits[1] ?? x) - (splits[0] ?? 0))), size: 26, space: 90 },
      {
        ...axis,
        splits: (_plot, _axis, min, max) => {
          const step = roundStep((max - min) / 5, base);
          const count = Math.round((max - min) / step);
          return Array.from({ length: count + 1 }, (_each, number) => min + number * step);
        },
        values: (_, splits) => splits.map(showY),
        size: 68,
      },
    ],
    series: [
      {},
      ...series.map(
        (each): uPlot.Series => ({
          label: each.label,
          stroke: each.colour,
          width: each.width ?? 1.5,
          ...(each.isFilled && { fill: each.colour }),
          ...(each.isDashed && { dash: [4, 3] }),
          ...(each.isStepped && { paths: uPlot.paths.stepped!({ align: 1 }) }),
          ...(each.isBars && { fill: each.colour, width: 0, paths: uPlot.paths.bars!({ size: [0.6, 12, 2] }) }),
          points: { show: !each.isBars && !each.isFilled && !each.isStepped && undefined },
        }),
      ),
    ],
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: false },
      points: { show: !series.some((each) => each.isFilled) },
      bind: {
        dblclick: () => () => {
          latest.current.onZoom?.(null);
          return null;
        },
      },
    },
    hooks: {
      setSelect: [
        (self) => {
          const { left, width: wide } = self.select;
          if (wide >= 4) latest.current.onZoom?.([self.posToVal(left, "x"), self.posToVal(left + wide, "x")]);
          self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
      setCursor: [
        (self) => {
          const { left = -1, top = -1, idx } = self.cursor;
          if (left < 0) {
            setSpot(null);
            if (document.activeElement !== self.root.parentElement) setAt(null);
            return;
          }
          const over = self.over.getBoundingClientRect();
          setAt(idx ?? null);
          setSpot({ x: over.left + left, y: over.top + top });
        },
      ],
      ready: [
        (self) => {
          let down = 0;
          self.over.addEventListener("pointerdown", (event) => (down = event.clientX));
          self.over.addEventListener("click", (event) => {
            if (Math.abs(event.clientX - down) < 4 && self.cursor.idx != null) latest.current.onPick?.(self.cursor.idx);
          });
        },
      ],
      drawClear: [(self) => shade(self, latest.current, token("--accent-soft"))],
      draw: [(self) => mark(self, latest.current, token)],
    },
  };
}

function shade(self: uPlot, { band }: PlotProps, colour: string): void {
  if (!band) return;
  const [left, right] = band.map((x) => self.valToPos(x, "x", true)) as [number, number];
  const { ctx, bbox } = self;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = colour;
  ctx.fillRect(left, bbox.top, Math.max(right - left, 2), bbox.height);
  ctx.restore();
}

function mark(self: uPlot, { marks = [], ticks = [], picked = null }: PlotProps, token: (name: string) => string): void {
  const { ctx, bbox } = self;
  const ratio = devicePixelRatio || 1;
  const line = (x: number, length: number, colour: string, width: number) => {
    const left = Math.round(self.valToPos(x, "x", true));
    if (left < bbox.left || left > bbox.left + bbox.width) return null;
    ctx.fillStyle = colour;
    ctx.fillRect(left, bbox.top + bbox.height - length, width * ratio, length);
    return left;
  };
  ctx.save();
  for (const x of ticks) line(x, 5 * ratio, token("--muted"), 1);
  ctx.font = `${11 * ratio}px ${token("--sans")}`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  let free = -Infinity; // labels do not overlap
  for (const { x, label } of marks) {
    const left = line(x, bbox.height, token("--edge"), 1);
    if (left === null || !label || left < free) continue;
    ctx.fillStyle = token("--muted");
    ctx.fillText(label, left + 4 * ratio, bbox.top + 2 * ratio);
    free = left + ctx.measureText(label).width + 12 * ratio;
  }
  if (picked !== null) line(picked, bbox.height, token("--ink"), 2);
  ctx.restore();
}

/** Nanoseconds at an axis whose marks are `step` apart: as many digits as tell them apart, such as "1.25 ms". */
export function timeMark(ns: number, step: number): string {
  if (!ns) return "0";
  const [unit, word] = ([[1e9, "s"], [1e6, "ms"], [1e3, "us"]] as const).find(([each]) => Math.abs(ns) >= each) ?? [1, "ns"];
  const digits = step > 0 ? Math.min(Math.max(Math.ceil(1 - Math.log10(step / unit)), 0), 6) : 0; // two of the step
  return `${Number((ns / unit).toFixed(digits))} ${word}`;
}

/** The next larger round step: 1, 2 or 5 times a power of ten; for bytes, a power of two. */
export function roundStep(step: number, base: 2 | 10): number {
  if (!(step > 0) || !Number.isFinite(step) || (base === 2 && step < 1)) return 1;
  const power = base ** Math.floor(Math.log(step) / Math.log(base) + 1e-9);
  const steps = base === 2 ? [1, 2] : [1, 2, 5, 10];
  return power * steps.find((each) => each * power >= step * (1 - 1e-9))!;
}
