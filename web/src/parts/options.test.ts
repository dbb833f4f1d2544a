import { describe, expect, it } from "vitest";
import { batchStops, evenStops, nearest, roundStops } from "./options";

describe("stops of a slider", () => {
  it("are round, in order, and hold the recorded batch", () => {
    expect(roundStops(0.1, 1)).toEqual([0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1]);
    expect(evenStops(1, 1.2, 0.05)).toEqual([1, 1.05, 1.1, 1.15, 1.2]);
    expect(batchStops(7)).toEqual([1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96]);
  });

  it("are found by ratio, no choice by null", () => {
    expect(nearest([1, 2, 4, null], 2.9)).toBe(2);
    expect(nearest([1, 2, 4, null], null)).toBe(3);
    expect(nearest([0, 1], 0)).toBe(0);
    expect(nearest([1, 2], Number.NaN)).toBe(0);
  });
});
