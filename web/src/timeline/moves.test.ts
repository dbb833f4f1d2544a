import { describe, expect, test } from "vitest";
import { axisOf, roundStep } from "./axis";
import { approach, framed, keyed, moved, SHORTEST, within, zoomed } from "./moves";

const bounds = { start: 0, end: 1000 };

describe("moving", () => {
  test("stays inside the recording and keeps its length", () => {
    expect(moved({ start: 100, end: 300 }, -500, bounds)).toEqual({ start: 0, end: 200 });
    expect(moved({ start: 100, end: 300 }, 5000, bounds)).toEqual({ start: 800, end: 1000 });
    expect(within({ start: -5000, end: 5000 }, bounds)).toEqual(bounds);
  });

  test("zooms around a time, which keeps its place", () => {
    const next = zoomed({ start: 200, end: 600 }, 0.5, 300, bounds);
    expect(next).toEqual({ start: 250, end: 450 });
    expect(zoomed(next, 1e-9, 300, bounds).end - zoomed(next, 1e-9, 300, bounds).start).toBe(SHORTEST);
    expect(zoomed(next, 1e9, 300, bounds)).toEqual(bounds);
  });

  test.each([["w", 0.6], ["W", 0.6], ["+", 0.6], ["s", 1 / 0.6], ["-", 1 / 0.6], ["a", 1], ["d", 1]])("%s changes the length by %f", (key, factor) => {
    const next = keyed({ start: 400, end: 600 }, key, 500, bounds)!;
    expect(next.end - next.start).toBeCloseTo(200 * factor);
  });

  test("A and D move a quarter; 0 shows all; other keys do nothing", () => {
    expect(keyed({ start: 400, end: 600 }, "a", 500, bounds)).toEqual({ start: 350, end: 550 });
    expect(keyed({ start: 400, end: 600 }, "d", 500, bounds)).toEqual({ start: 450, end: 650 });
    expect(keyed({ start: 400, end: 600 }, "0", 500, bounds)).toEqual(bounds);
    expect(keyed({ start: 400, end: 600 }, "x", 500, bounds)).toBeNull();
  });

  test("a way ends where it leads", () => {
    let at = { start: 0, end: 1000 };
    const to = { start: 400, end: 500 };
    for (let frame = 0; frame < 60 && at !== to; frame++) at = approach(at, to, 16);
    expect(at).toBe(to);
  });

  test("what is framed has room", () => {
    expect(framed({ start: 400, end: 600 }, bounds)).toEqual({ start: 380, end: 620 });
  });
});

describe("the axis", () => {
  test.each([[0.2, 1], [1, 1], [1.1, 2], [3, 5], [7, 10], [1234, 2000]])("rounds %f up to %d", (least, step) => {
    expect(roundStep(least)).toBe(step);
  });

  test.each([[0, 1e9], [5e6, 5e6 + 800], [3_000_000_000, 3_000_000_050], [0, 3.6e12], [1_234_567_890_123, 1_234_567_899_000]])(
    "from %d to %d has a few labels, all different and short",
    (start, end) => {
      const { ticks, base } = axisOf(start, end, 1000);
      expect(ticks.length).toBeGreaterThan(3);
      expect(ticks.length).toBeLessThan(13);
      expect(new Set(ticks.map(({ label }) => label)).size).toBe(ticks.length);
      expect(Math.max(...ticks.map(({ label }) => label.length))).toBeLessThan(13);
      expect(Boolean(base)).toBe(ticks.every(({ label }) => label.startsWith("+")));
    },
  );
});
