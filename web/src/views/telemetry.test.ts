import { expect, it } from "vitest";
import { measured, seconds } from "../format";
import { roundStep, timeMark } from "../parts/plot";
import { stacked } from "./memory";
import { aligned, stepsAt } from "./telemetry";

const line = (time_s: number[], value: (number | null)[], step: (number | null)[] | null = null) => ({ label: "", time_s, value, step, not_finite_s: [] });

it("lines share one axis: undefined where a line has no sample, null where its value is missing", () => {
  const [xs, first, second] = aligned({ lines: [line([0, 2], [1, 3]), line([1, 2], [null, 5])] }, 2);
  expect([...xs]).toEqual([0, 1, 2]);
  expect([...first!]).toEqual([1, undefined, 3]);
  expect([...second!]).toEqual([undefined, null, 5]);
  expect(aligned({ lines: [] }, 7)).toEqual([[0, 7]]);
});

it("finds the steps of samples", () => {
  expect([...stepsAt({ lines: [line([0, 1], [1, 2], [10, null]), line([3], [1], [12])] })]).toEqual([[0, 10], [3, 12]]);
});

it("bands add up, the topmost first", () => {
  const band = (name: string, bytes: number[]) => ({ name, label: name, meaning: "", colour: "", hatched: false, bytes });
  const levels = { times: [0, 5], bands: [band("a", [1, 2]), band("b", [10, 0])], reserved: [20, 20], end_ns: 9 };
  expect(stacked(levels)).toEqual([[0, 5], [11, 2], [1, 2], [20, 20]]);
});

it("steps of an axis are round", () => {
  expect([0.7, 3, 12, 99].map((step) => roundStep(step, 10))).toEqual([1, 5, 20, 100]);
  expect([3, 1024, 1500].map((step) => roundStep(step, 2))).toEqual([4, 1024, 2048]);
  expect(roundStep(0, 10)).toBe(1);
  expect(roundStep(0.2, 10)).toBeCloseTo(0.2);
});

it("values have their units", () => {
  expect([seconds(0), seconds(1.5), seconds(150), seconds(3700)]).toEqual(["0 s", "1.50 s", "2 min 30 s", "1 h 1 min"]);
  expect([measured(2048, "bytes"), measured(0.5, "share"), measured(2.30259, ""), measured(1500, "W")]).toEqual(["2.0 KiB", "50.0 %", "2.303", "1,500 W"]);
});

it("marks of an axis are told apart", () => {
  expect([1.25e6, 1.5e6, 1.75e6].map((ns) => timeMark(ns, 0.25e6))).toEqual(["1.25 ms", "1.5 ms", "1.75 ms"]);
  expect([0, 1e8, 1e9].map((ns) => timeMark(ns, 1e8))).toEqual(["0", "100 ms", "1 s"]);
  expect(timeMark(750_000, 250_000)).toBe("750 us");
});
