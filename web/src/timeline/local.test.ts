import { expect, test } from "vitest";
import type { Row, Timeline } from "../schema";
import { placesIn, sliceIn, stretchIn } from "./local";

const names = ["operator", "compute", "operators", "device_work", "aten::mm", "gemm", "input", "aten::addmm"];
const row = (slices: [number, number, number][], kind: number, table: number): Row => ({
  start: slices.map(([start]) => start),
  duration: slices.map(([, duration]) => duration),
  name: slices.map(([, , name]) => name),
  kind: slices.map(() => kind),
  table: slices.map(() => table),
  row: slices.map((_, at) => at),
  busy: [],
});
const document: Timeline = {
  start: 0, end: 100, first: 0, last: 100, width: 10, whole: true, names,
  lanes: [
    { id: "0.0", label: "main", kind: "host", device: "", rows: [row([[0, 50, 7]], 0, 2), row([[10, 20, 4]], 0, 2)] },
    { id: "1.0", label: "stream 7", kind: "queue", device: "0", rows: [row([[20, 30, 5], [60, 40, 5]], 1, 3)] },
  ],
  steps: { index: [], start: [], duration: [] },
  gaps: [{ device: "0", start: [0, 50], duration: [20, 10], cause: [6, 6], trigger: [-1, -1], busy: {} }],
};

test("a stretch has the time of each name, and busy and idle fill the device's time", () => {
  const stretch = stretchIn(document, { start: 5, end: 55 });
  expect(Object.fromEntries(stretch.slices.map((each) => [each.name, [each.count, each.ns, each.self_ns]]))).toEqual({
    "aten::addmm": [1, 45, 25],
    "aten::mm": [1, 20, 20],
    gemm: [1, 30, null],
  });
  expect(stretch.devices).toEqual([{ device: "0", busy_ns: 30, idle: [{ cause: "input", ns: 20 }] }]);
});

test("a text is found in names, in order of time", () => {
  const places = placesIn(document, "MM");
  expect(places.places.map(({ name, start }) => [name, start])).toEqual([["aten::addmm", 0], ["aten::mm", 10], ["gemm", 20], ["gemm", 60]]);
  expect([places.count, places.names]).toEqual([4, 3]);
  expect(placesIn(document, "").count).toBe(0);
});

test("a slice is found by its table and row", () => {
  expect(sliceIn(document, "device_work", 1)).toMatchObject({ lane: "1.0", depth: 0, name: "gemm", start: 60, duration: 40 });
  expect(sliceIn(document, "frames", 1)).toBeNull();
});
