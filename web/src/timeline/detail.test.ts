import { describe, expect, test } from "vitest";
import { Covered, detail, edgesOf, sliceAt } from "./detail";

/** A generator of numbers that is the same every time. */
function numbers(seed: number) {
  let state = seed;
  return (below: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

function randomRow(random: (below: number) => number) {
  const start: number[] = [];
  const duration: number[] = [];
  let now = 0;
  for (let left = random(60); left > 0; left--) {
    now += random(20) + (duration.at(-1) === 0 ? 1 : 0);
    start.push(now);
    duration.push(random(20));
    now += duration.at(-1)!;
  }
  return { start, duration };
}

const overlap = (a: number, b: number, from: number, to: number) => Math.max(Math.min(b, to) - Math.max(a, from), 0);

describe("detail", () => {
  test.each(Array.from({ length: 300 }, (_, seed) => seed))("agrees with a plain computation, case %i", (seed) => {
    const random = numbers(seed + 1);
    const row = randomRow(random);
    const begin = random(430) - 30;
    const edges = edgesOf(begin, begin + 1 + random(900), 1 + random(60));
    const pixel = Math.max(...Array.from(edges.slice(1), (edge, at) => edge - edges[at]!), 0);

    const { rows, busy } = detail(row, edges);

    const all = row.start.map((_, at) => at);
    const alone = all.filter((at) => row.duration[at]! >= pixel && row.start[at]! < edges.at(-1)! && row.start[at]! + row.duration[at]! > begin);
    expect(rows).toEqual(alone.filter((at) => row.duration[at]! > 0));
    const others = all.filter((at) => !alone.includes(at));
    const expected = Array.from(edges.slice(1), (edge, at) =>
      others.reduce((sum, each) => sum + overlap(row.start[each]!, row.start[each]! + row.duration[each]!, edges[at]!, edge), 0),
    );
    expect(Array.from(busy ?? new Float64Array(edges.length - 1))).toEqual(expected);
  });

  test("an empty row shows nothing", () => {
    expect(detail({ start: [], duration: [] }, [0, 5, 10])).toEqual({ rows: [], busy: null });
  });
});

test("the covered time of other pixels adds up", () => {
  const covered = new Covered(100, 140, [10, 0, 5, 10]);
  const whole = new Float64Array(1);
  expect(covered.addTo(whole, [0, 1000])).toBe(true);
  expect(whole[0]).toBe(25);
  const halves = new Float64Array(2);
  covered.addTo(halves, [100, 105, 120]);
  expect([...halves]).toEqual([5, 5]);
  expect(covered.addTo(new Float64Array(1), [110, 120])).toBe(false);
});

test("a slice is found at its time", () => {
  const row = { start: [0, 10, 20], duration: [5, 10, 0] };
  expect([0, 4.9, 5, 10, 19.9, 20].map((time) => sliceAt(row, time))).toEqual([0, 0, -1, 1, 1, -1]);
});
