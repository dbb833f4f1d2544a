import { expect, it } from "vitest";
import type { RooflineRow } from "../documents";
import { axesOf, pointAt, pointsOf, roofsOf, usedRoof } from "./roofline";

const row = (operator: string, device_ns: number, flops: number | null, bytes: number | null, tflop_per_s: number | null) =>
  ({ operator, device: "0", device_ns, flops, bytes, tflop_per_s }) as RooflineRow;
const ROOF = { device: "0", name: "A100", is_least: false, gb_per_s: 2000, tflop_per_s: { fp32: 20, bf16: 200, fp16: 200 } };

it("draws what is known, the part with the largest time largest and below the others", () => {
  const points = pointsOf([row("small", 1, 100, 10, 1), row("mm", 100, 1000, 10, 100), row("unknown", 999, null, 10, null)], "0");
  expect(points.map(({ row, x, y }) => [row.operator, x, y])).toEqual([["mm", 2, 2], ["small", 1, 0]]);
  expect(points[0]!.radius).toBe(26);
  expect(points[1]!.radius).toBe(3);
});

it("a roof bends where memory's rate meets the peak", () => {
  const axes = axesOf(pointsOf([row("mm", 1, 1000, 10, 100)], "0"), [ROOF]);
  expect(axes).toEqual({ x: [0, 3], y: [1, 3] });
  const roofs = roofsOf(ROOF, axes);
  expect(roofs.map(({ label }) => label)).toEqual(["fp32", "bf16, fp16"]);
  expect(roofs[1]!.bend[0]).toBeCloseTo(2); // 200 TFLOP/s over 2 TB/s are 100 operations a byte
  expect(roofs[1]!.to).toEqual([3, Math.log10(200)]);
  expect(roofs[1]!.from[1]).toBeCloseTo(1); // where the slope comes into the picture
  const single = pointsOf([{ ...row("mm", 1, 1000, 10, 100), number_type: "fp32" }], "0");
  expect(usedRoof(ROOF, single).tflop_per_s).toEqual({ fp32: 20 });
  expect(usedRoof(ROOF, [])).toBe(ROOF);
  expect(axesOf([], [])).toEqual({ x: [-1, 2], y: [-1, 2] });
});

it("finds the smallest point under the pointer", () => {
  const points = pointsOf([row("mm", 100, 1000, 10, 100), row("small", 1, 1000, 10, 100)], "0");
  const place = () => [50, 50] as [number, number];
  expect(pointAt(points, place, 51, 50)).toBe(1);
  expect(pointAt(points, place, 70, 50)).toBe(0);
  expect(pointAt(points, place, 90, 50)).toBe(null);
});
