/** Slices as they are drawn, and those next to them. */

import type { Range } from "../state";
import { firstTouching } from "./detail";
import type { Layout, Track } from "./model";

type RowTrack = Track & { kind: "row" };

export interface DrawnSlice {
  track: RowTrack;
  at: number; // of the track's row
}

export const spanOf = ({ track: { row }, at }: DrawnSlice): Range => ({ start: row.start[at]!, end: row.start[at]! + row.duration[at]! });

/** Where a slice is drawn, if it is. */
export function sliceIn(layout: Layout, names: readonly string[], wanted: { table: string; row: number }): DrawnSlice | null {
  for (const track of rowsOf(layout)) {
    const at = track.row.row.findIndex((each, place) => each === wanted.row && names[track.row.table[place]!] === wanted.table);
    if (at >= 0) return { track, at };
  }
  return null;
}

export function firstSlice(layout: Layout, time: number): DrawnSlice | null {
  const track = rowsOf(layout).find(({ row }) => firstTouching(row, time) < row.start.length);
  return track ? { track, at: firstTouching(track.row, time) } : null;
}

/** Left and right: the next slice of its row; up and down: that of another row at the same time. */
export function neighbour(layout: Layout, slice: DrawnSlice, key: string): DrawnSlice | null {
  const { track, at } = slice;
  const next = at + (key === "ArrowLeft" ? -1 : 1);
  if (key === "ArrowLeft" || key === "ArrowRight") return next >= 0 && next < track.row.start.length ? { track, at: next } : null;
  const rows = rowsOf(layout);
  const down = key === "ArrowUp" ? -1 : 1;
  const span = spanOf(slice);
  for (let place = rows.indexOf(track) + down; place >= 0 && place < rows.length; place += down) {
    const { row } = rows[place]!;
    const here = firstTouching(row, (span.start + span.end) / 2);
    if (here < row.start.length && row.start[here]! < span.end) return { track: rows[place]!, at: here };
  }
  return null;
}

const rowsOf = ({ tracks }: Layout): RowTrack[] => tracks.filter((track) => track.kind === "row");
