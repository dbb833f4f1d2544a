import { expect, it } from "vitest";
import type { Diagnosis } from "../schema";
import { stepTimes } from "./step-bar";

const diagnosis = (more: object) =>
  ({ steps: { source: "annotation", step_ns: 100, count: 2, list: [] }, accounting: [], host: [], ...more }) as unknown as Diagnosis;
const times = (more: object) => stepTimes(diagnosis(more)).map(({ device, whole, parts }) => [device, whole, parts.map((part) => [part.key, part.ns])]);

it("a step of each device adds up, the busiest first, triggers joined; what is done once comes on top", () => {
  const accounting = [
    { device: "0", window_ns: 230, busy_ns: 50, idle: [{ cause: "once", ns: 30 }, { cause: "input", ns: 100 }, { cause: "input", trigger: "x", ns: 50 }] },
    { device: "1", window_ns: 200, busy_ns: 199, idle: [{ cause: "python", ns: 1 }] },
  ];
  expect(times({ accounting })).toEqual([
    ["1", 100, [["busy", 100]]],
    ["0", 115, [["busy", 25], ["input", 75], ["once", 15]]],
  ]);
});

it("without a device it is the host's time, without steps that of the recording", () => {
  const host = [{ cause: "compute", ns: 150 }, { cause: "once", ns: 50 }];
  expect(times({ host, steps: { source: "none", step_ns: 150, count: 1, list: [] } })).toEqual([[null, 200, [["compute", 150], ["once", 50]]]]);
  expect(times({})).toEqual([]);
});
