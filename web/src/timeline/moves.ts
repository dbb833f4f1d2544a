/** Zooming and moving: pure functions of the range that is shown. */

import type { Range } from "../state";

export const SHORTEST = 40; // nanoseconds across the whole width

/** The range inside these bounds, as long as it was if it fits. */
export function within(range: Range, bounds: Range): Range {
  const length = Math.min(Math.max(range.end - range.start, SHORTEST), Math.max(bounds.end - bounds.start, SHORTEST));
  const middle = (range.start + range.end) / 2;
  const start = Math.min(Math.max(range.end - range.start < SHORTEST ? middle - length / 2 : range.start, bounds.start), bounds.end - length);
  return { start, end: start + length };
}

/** Longer by this factor around a time, which keeps its place. */
export function zoomed(range: Range, factor: number, around: number, bounds: Range): Range {
  const length = range.end - range.start;
  const next = Math.min(Math.max(length * factor, SHORTEST), bounds.end - bounds.start);
  const share = (around - range.start) / length;
  const start = around - next * share;
  return within({ start, end: start + next }, bounds);
}

export function moved(range: Range, by: number, bounds: Range): Range {
  return within({ start: range.start + by, end: range.end + by }, bounds);
}

/** The range from one time to another, in whole nanoseconds. */
export function between(a: number, b: number, bounds: Range): Range {
  const clip = (time: number) => Math.round(Math.min(Math.max(time, bounds.start), bounds.end));
  const [start, end] = [clip(Math.min(a, b)), clip(Math.max(a, b))];
  return { start, end: Math.max(end, start + 1) };
}

/** A range with room on both sides. */
export function framed(range: Range, bounds: Range, room = 0.1): Range {
  const length = Math.max(range.end - range.start, SHORTEST);
  return within({ start: range.start - room * length, end: range.end + room * length }, bounds);
}

/** What a key of Perfetto's does to the range: W and S zoom around the pointer, A and D move; null for all others. */
export function keyed(range: Range, key: string, around: number, bounds: Range): Range | null {
  const length = range.end - range.start;
  switch (key.toLowerCase()) {
    case "w":
    case "+":
    case "=":
      return zoomed(range, 0.6, around, bounds);
    case "s":
    case "-":
      return zoomed(range, 1 / 0.6, around, bounds);
    case "a":
      return moved(range, -0.25 * length, bounds);
    case "d":
      return moved(range, 0.25 * length, bounds);
    case "0":
    case "home":
      return bounds;
    default:
      return null;
  }
}

/** A range on its way to another one after some milliseconds: what is left of the way halves every 35. */
export function approach(from: Range, to: Range, milliseconds: number): Range {
  const left = 0.5 ** (milliseconds / 35);
  const near = { start: to.start + (from.start - to.start) * left, end: to.end + (from.end - to.end) * left };
  const close = Math.max(Math.abs(near.start - to.start), Math.abs(near.end - to.end)) < (to.end - to.start) / 5000;
  return close ? to : near;
}
