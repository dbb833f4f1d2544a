import { expect, it } from "vitest";
import type { Links } from "./schema";
import { bars, median, stepRows } from "./steps";

const step = (index: number, duration_ns: number) => ({ index, start_ns: 1000 * index, duration_ns, complete: true });
const steps = [step(1, 100), step(2, 102), step(3, 150)];
const links: Links = {
  names: ["busy", "input"],
  work: { line: [], module: [], operator: [], kernel: [], ns: [] },
  idle: { cause: [], line: [], ns: [] },
  steps: { step: [1, 1, 2, 2, 3, 3], cause: [0, 1, 0, 1, 0, 1], ns: [90, 10, 90, 12, 95, 55] },
};

it("a slow step differs by what grew most", () => {
  const rows = stepRows(steps, [{ index: 3, device_0_busy_share: 0.5, device_1_busy_share: 0.7 }], links);
  expect(rows.map((row) => [row.differs, row.differs_ns])).toEqual([["", 0], ["", 0], ["input", 43]]);
  expect(rows[2]!.more_ns).toBe(48);
  expect(rows[2]!.busy_share).toBeCloseTo(0.6);
  expect(rows[0]!.busy_share).toBeNull();
});

it("without causes by step, nothing is said of them", () => {
  expect(stepRows(steps).map((row) => row.differs)).toEqual(["", "", ""]);
  expect(stepRows([])).toEqual([]);
  expect(median([])).toBe(0);
});

it("steps that share a bar show the slowest", () => {
  const many = stepRows(Array.from({ length: 1000 }, (_, index) => step(index, index === 503 ? 900 : 100)));
  const shown = bars(many, 300);
  expect(shown.length).toBe(300);
  expect(shown.filter((row) => row.duration_ns === 900).map((row) => row.index)).toEqual([503]);
});
