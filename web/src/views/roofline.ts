/** The roofline plot's geometry: work per byte against rates, both logarithmic. */

import type { RooflineRow, Roofline } from "../documents";

export type DeviceRoof = Roofline["roofs"][number];

export interface Point {
  row: RooflineRow;
  x: number; // log10 of operations per byte
  y: number; // log10 of TFLOP/s
  radius: number; // pixels; its area is the share of the time
}

export interface Roof {
  label: string;
  from: [x: number, y: number]; // log10
  bend: [x: number, y: number];
  to: [x: number, y: number];
}

export interface Axes {
  x: [number, number]; // log10, whole decades
  y: [number, number];
}

const SMALLEST = 3;
const LARGEST = 26;

/** Operators of a device whose work is known, the largest first, so that small ones lie above. */
export function pointsOf(rows: readonly RooflineRow[], device: string): Point[] {
  const known = rows.filter((row) => row.device === device && row.flops && row.bytes && row.tflop_per_s);
  const most = Math.max(...known.map((row) => row.device_ns), 1);
  return known
    .map((row) => ({
      row,
      x: Math.log10(row.flops! / row.bytes!),
      y: Math.log10(row.tflop_per_s!),
      radius: Math.max(SMALLEST, LARGEST * Math.sqrt(row.device_ns / most)),
    }))
    .sort((a, b) => b.radius - a.radius);
}

/** The roof with the peaks of those number types only that operators computed with; with all of them if none is known. */
export function usedRoof(roof: DeviceRoof, points: readonly Point[]): DeviceRoof {
  const used = Object.entries(roof.tflop_per_s).filter(([type]) => points.some(({ row }) => row.number_type === type));
  return used.length ? { ...roof, tflop_per_s: Object.fromEntries(used) } : roof;
}

/** What is drawn: all points, and where roofs bend. */
export function axesOf(points: readonly Point[], roofs: readonly DeviceRoof[]): Axes {
  const peaks = roofs.flatMap((roof) => Object.values(roof.tflop_per_s));
  const bends = roofs.flatMap((roof) => (roof.gb_per_s ? Object.values(roof.tflop_per_s).map((peak) => bendAt(roof.gb_per_s!, peak)) : []));
  const xs = [...points.map(({ x }) => x), ...bends];
  const ys = [...points.map(({ y }) => y), ...peaks.map(Math.log10)];
  return { x: decades(xs, 0.3), y: decades(ys, 0.3) };
}

const bendAt = (gb_per_s: number, tflop_per_s: number) => Math.log10((tflop_per_s * 1e3) / gb_per_s);

function decades(values: readonly number[], beyond: number): [number, number] {
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return [-1, 2];
  const [low, high] = [Math.floor(Math.min(...finite) - beyond), Math.ceil(Math.max(...finite) + beyond)];
  return [low, Math.max(high, low + 2)];
}

/** The memory's slope up to a number type's peak, within the axes; number types with equal peaks share a roof. */
export function roofsOf(roof: DeviceRoof, { x, y }: Axes): Roof[] {
  const bandwidth = roof.gb_per_s;
  if (!bandwidth) return [];
  const names = new Map<number, string[]>();
  for (const [name, peak] of Object.entries(roof.tflop_per_s)) {
    names.set(peak, [...(names.get(peak) ?? []), name]);
  }
  return [...names].map(([peak, types]) => {
    const bend = bendAt(bandwidth, peak);
    const at = (left: number) => left + Math.log10(bandwidth / 1e3);
    const begin = Math.max(x[0], y[0] - Math.log10(bandwidth / 1e3));
    return { label: types.join(", "), from: [begin, at(begin)], bend: [bend, Math.log10(peak)], to: [x[1], Math.log10(peak)] };
  });
}

/** The point under the pointer, the smallest of several; null for none. Places are in pixels. */
export function pointAt(points: readonly Point[], place: (point: Point) => [number, number], x: number, y: number): number | null {
  for (let at = points.length - 1; at >= 0; at--) {
    const [left, top] = place(points[at]!);
    if (Math.hypot(left - x, top - y) <= points[at]!.radius + 2) return at;
  }
  return null;
}
