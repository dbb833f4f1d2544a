import { describe, expect, test } from "vitest";
import type { Lane, Row, Timeline } from "../schema";
import { spreadOf } from "./draw";
import { hitAt } from "./hit";
import { type Arrangement, GAPS, layoutOf, modelOf, ROW } from "./model";
import { bestOf, wanted } from "./windows";

const names = ["operator", "compute", "operators", "device_work", "frame", "frames", "input", "aten::mm", "gemm", "run"];
const row = (slices: [number, number][], name = 7, kind = 0, table = 2, busy: number[] = []): Row => ({
  start: slices.map(([start]) => start),
  duration: slices.map(([, duration]) => duration),
  name: slices.map(() => name),
  kind: slices.map(() => kind),
  table: slices.map(() => table),
  row: slices.map((_, at) => at),
  busy,
});
const lane = (id: string, kind: Lane["kind"], rows: Row[], device = ""): Lane => ({ id, label: id, kind, device, rows });
const document: Timeline = {
  start: 0, end: 1000, first: 0, last: 1000, width: 10, whole: false, names,
  lanes: [
    lane("0.0", "host", [row([[0, 1000]], 9, 4, 5), row([[100, 300], [500, 100]]), row([[100, 2]])]),
    lane("1.0", "queue", [row([[200, 200]], 8, 1, 3, [0, 0, 0, 0, 0, 50, 0, 0, 0, 0])], "0"),
  ],
  steps: { index: [], start: [], duration: [] },
  gaps: [{ device: "0", start: [0], duration: [200], cause: [6], trigger: [-1], busy: { input: [0, 0, 0, 0, 0, 0, 20, 0, 0, 0] } }],
};
const all: Arrangement = { folded: new Set(), opened: new Set(), pinned: [], room: null };
const whole = { start: 0, end: 1000 };

describe("the layout", () => {
  const model = modelOf(document);
  const ids = (arrangement: Partial<Arrangement>) => layoutOf(model, { ...all, ...arrangement }, whole).headings.map(({ id }) => id);

  test("has a device's idle time before its queues, and both before the threads", () => {
    expect(ids({})).toEqual(["gaps.0", "1.0", "0.0"]);
    const { tracks, height } = layoutOf(model, all, whole);
    expect(tracks.map(({ height: each }) => each)).toEqual([GAPS, ROW, ROW, ROW, ROW]);
    expect(height).toBe(tracks.at(-1)!.top + ROW);
  });

  test("has pinned lanes first", () => expect(ids({ pinned: ["0.0"] })).toEqual(["0.0", "gaps.0", "1.0"]));

  test("shows one row of a folded lane", () => {
    const rows = layoutOf(model, { ...all, folded: new Set(["0.0"]) }, whole).tracks.filter(({ lane }) => lane === "0.0");
    expect(rows.length).toBe(1);
  });

  test("leaves out on the first screen what fills the window or hardly anything of it", () => {
    const { tracks, headings } = layoutOf(model, { ...all, room: 200 }, whole);
    expect(tracks.filter(({ lane }) => lane === "0.0").map(({ depth }) => depth)).toEqual([1]);
    expect(headings.find(({ id }) => id === "0.0")!.around).toEqual(["run"]);
  });
});

describe("a place of the drawing", () => {
  const layout = layoutOf(modelOf(document), all, whole);
  const top = (id: string, depth = 0) => layout.tracks.find((track) => track.lane === id && track.depth === depth)!.top + 1;
  const at = (x: number, y: number) => hitAt(layout, x, y, 100, whole);

  test("is a slice, or the share that narrower ones cover, or nothing", () => {
    expect(at(30, top("1.0"))).toMatchObject({ kind: "slice", at: 0 });
    expect(at(55, top("1.0"))).toMatchObject({ kind: "busy", share: expect.closeTo(0.5) });
    expect(at(80, top("1.0"))).toBeNull();
    expect(at(45, top("0.0", 1))).toBeNull();
    expect(at(11, top("0.0", 2))).toMatchObject({ kind: "slice", at: 0 });
  });

  test("is a gap, or causes of several", () => {
    expect(at(10, top("gaps.0"))).toMatchObject({ kind: "gap", at: 0 });
    expect(at(65, top("gaps.0"))).toMatchObject({ kind: "gaps", shares: [["input", expect.closeTo(0.2)]] });
    expect(at(90, top("gaps.0"))).toBeNull();
  });
});

describe("the next window", () => {
  const model = modelOf(document);
  test("is not asked for where the best one is fine enough", () => {
    expect(wanted(model, whole, whole, 10)).toBeNull();
    expect(wanted(model, { start: 400, end: 600 }, whole, 10)).toEqual({ start: 300, end: 700 });
    expect(wanted(null, { start: 400, end: 600 }, null, 10)).toEqual({ start: 400, end: 600 });
  });

  test("is the finest that holds a range, else the longest", () => {
    const fine = modelOf({ ...document, start: 400, end: 600 });
    expect(bestOf([model, fine], { start: 450, end: 500 })).toBe(fine);
    expect(bestOf([fine, model], { start: 300, end: 500 })).toBe(model);
    expect(bestOf([fine], { start: 300, end: 500 })).toBe(fine);
    expect(bestOf([], whole)).toBeNull();
  });
});

test("values over time have a least and a largest one in each pixel", () => {
  const values = { unit: "", least: 0, most: 9, start: [10, 14, 15, 30], value: [1, 9, 2, 5], low: [], high: [] };
  const { low, high } = spreadOf(values, whole, 50, [0, 10, 20, 30, 40, 50]);
  expect([...low]).toEqual([NaN, 1, 2, 5, 5]);
  expect([...high]).toEqual([NaN, 9, 2, 5, 5]);
  const few = spreadOf({ ...values, start: [], value: [], low: [1, 2], high: [3, 4] }, { start: 0, end: 20 }, 50, [5, 10, 15, 20, 25]);
  expect([...few.low]).toEqual([1, 2, 2, NaN]);
});
