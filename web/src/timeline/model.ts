/** A window of the timeline made ready to draw, and where each of its rows is. */

import type { Gap, Lane, Row, Timeline, Values } from "../schema";
import type { Range } from "../state";
import { Covered, firstTouching, type Slices } from "./detail";

export interface DrawnRow extends Row {
  covered: Covered | null; // by slices that are not in it
  marks: { slices: Slices; covered: Covered | null } | null; // of what is pointed out
}

export interface DrawnGap extends Gap {
  covered: [string, Covered][]; // by cause
}

export interface Model {
  document: Timeline;
  lanes: { lane: Lane; rows: DrawnRow[] }[];
  gaps: DrawnGap[];
  range: Range;
  pixel: number; // nanoseconds
}

export function modelOf(document: Timeline): Model {
  const { start, end, width } = document;
  const covered = (busy: number[]) => (busy.length ? new Covered(start, end, busy) : null);
  const drawn = (row: Row): DrawnRow => {
    const marks = row.marked ? { slices: subset(row, row.marked), covered: covered(row.marked_busy ?? []) } : null;
    return { ...row, covered: covered(row.busy), marks };
  };
  return {
    document,
    lanes: document.lanes.map((lane) => ({ lane, rows: lane.rows.map(drawn) })),
    gaps: document.gaps.map((gap) => ({
      ...gap,
      covered: Object.entries(gap.busy).map(([cause, busy]) => [cause, new Covered(start, end, busy)]),
    })),
    range: { start, end },
    pixel: (end - start) / width,
  };
}

function subset({ start, duration }: Row, marked: number[]): Slices {
  const those = marked.flatMap((each, at) => (each ? [at] : []));
  return { start: those.map((at) => start[at]!), duration: those.map((at) => duration[at]!) };
}

/** A strip of the drawing. */
export type Track = { lane: string; top: number; height: number; depth: number } & (
  | { kind: "row"; row: DrawnRow; of: Lane }
  | { kind: "gaps"; gap: DrawnGap }
  | { kind: "values"; values: Values; of: Lane }
);

/** A label beside the strips of a lane. */
export interface Heading {
  id: string;
  label: string;
  around: string[];
  top: number;
  height: number;
  folds: boolean; // whether it has anything to fold
  folded: boolean;
  pinned: boolean;
}

export interface Layout {
  tracks: Track[];
  headings: Heading[];
  height: number;
}

export interface Arrangement {
  folded: ReadonlySet<string>;
  opened: ReadonlySet<string>;
  pinned: readonly string[];
  room: number | null; // on the first screen: the height that there is, in CSS pixels; all rows otherwise
}

export const ROW = 17;
export const GAPS = 20;
const VALUES = 40;
const BETWEEN = 7;
const QUEUES_OPEN = 12; // further queues are folded until they are opened, and stand below the threads
const THREADS_OPEN = 4;
const MOST_ROWS = 24;
const LITTLE = 0.01; // of the window: rows with less are left out where there is little room

export const gapLane = (device: string) => `gaps.${device}`;

/** Place every lane: pinned ones, then idle time with the queues or, where there are many, before the threads; the rest. */
export function layoutOf(model: Model, arrangement: Arrangement, shown: Range): Layout {
  if (arrangement.room === null) return placed(model, arrangement, shown, Infinity, Infinity);
  // As many rows of each lane as there is room for, then of the first one.
  let best = placed(model, arrangement, shown, 1, 1);
  let all = 1;
  for (let rows = 2; rows <= MOST_ROWS; rows++) {
    const more = placed(model, arrangement, shown, rows, rows);
    if (more.height > arrangement.room) break;
    best = more;
    all = rows;
  }
  for (let rows = all + 1; rows <= MOST_ROWS; rows++) {
    const more = placed(model, arrangement, shown, rows, all);
    if (more.height > arrangement.room) break;
    best = more;
  }
  return best;
}

/** Place at most so many rows of the first lane, and of each other one. */
function placed(model: Model, { folded, opened, pinned, room }: Arrangement, shown: Range, ofFirst: number, ofOthers: number): Layout {
  const compact = room !== null;
  const tracks: Track[] = [];
  const headings: Heading[] = [];
  let top = 0;
  let isFirst = true;
  const open = (id: string, usually: boolean) => (opened.has(id) ? true : folded.has(id) ? false : usually);

  const heading = (id: string, label: string, height: number, folds: boolean, isOpen: boolean, around: string[] = []) => {
    headings.push({ id, label, around, top, height, folds, folded: folds && !isOpen, pinned: pinned.includes(id) });
    top += height + BETWEEN;
  };
  const addGap = (gap: DrawnGap) => {
    tracks.push({ kind: "gaps", gap, lane: gapLane(gap.device), top, height: GAPS, depth: 0 });
    heading(gapLane(gap.device), gap.device ? `device ${gap.device}: idle` : "main thread: by cause", GAPS, false, true);
  };
  const addLane = ({ lane, rows }: Model["lanes"][number], usually: boolean) => {
    if (lane.values) {
      tracks.push({ kind: "values", values: lane.values, of: lane, lane: lane.id, top, height: VALUES, depth: 0 });
      return heading(lane.id, lane.label, VALUES, false, true);
    }
    const isOpen = open(lane.id, usually);
    let visible = rows.map((row, depth) => ({ row, depth }));
    const around = [...(lane.around ?? [])];
    if (compact) {
      visible = visible.filter(({ row }) => covers(row, shown) >= LITTLE);
      while (visible.length > 1 && only(visible[0]!.row, model, shown)) around.push(model.document.names[nameOf(visible.shift()!.row, shown)]!);
      visible = visible.slice(0, isFirst ? ofFirst : ofOthers);
      isFirst = false;
    }
    if (!isOpen) visible = visible.slice(0, 1);
    visible.forEach(({ row, depth }, at) => tracks.push({ kind: "row", row, of: lane, lane: lane.id, top: top + at * ROW, height: ROW, depth }));
    heading(lane.id, lane.label, Math.max(visible.length, 1) * ROW, rows.length > 1, isOpen, around);
  };

  const lanes = compact ? model.lanes.filter((each) => isWorthIts(each, shown)) : model.lanes;
  const done = new Set<string>();
  const counts: Record<string, number> = {};
  const draw = (each: Model["lanes"][number]) => {
    if (done.has(each.lane.id)) return;
    done.add(each.lane.id);
    const number = (counts[each.lane.kind] = (counts[each.lane.kind] ?? 0) + 1);
    addLane(each, compact || number <= (each.lane.kind === "queue" ? QUEUES_OPEN : THREADS_OPEN));
  };
  const drawGap = (gap: DrawnGap | undefined) => {
    if (!gap || done.has(gapLane(gap.device))) return;
    done.add(gapLane(gap.device));
    addGap(gap);
  };
  for (const id of pinned) {
    const each = lanes.find(({ lane }) => lane.id === id);
    if (each) draw(each);
    else drawGap(model.gaps.find((gap) => gapLane(gap.device) === id));
  }
  // What the device does comes first: a thread may have a hundred rows of frames.
  const isQueue = ({ lane }: Model["lanes"][number]) => lane.kind === "queue" || lane.kind === "path";
  const queuesFirst = !compact && lanes.filter(isQueue).length <= QUEUES_OPEN;
  const ordered = queuesFirst ? [...lanes.filter(isQueue), ...lanes.filter((each) => !isQueue(each))] : lanes;
  if (!queuesFirst) model.gaps.forEach(drawGap);
  for (const each of ordered) {
    if (each.lane.kind === "host") drawGap(model.gaps.find((gap) => gap.device === ""));
    if (each.lane.kind === "queue") drawGap(model.gaps.find((gap) => gap.device === each.lane.device));
    draw(each);
  }
  model.gaps.forEach(drawGap);
  return { tracks, headings, height: Math.max(top - BETWEEN, ROW) };
}

/** The share of a window that a row covers. */
function covers(row: DrawnRow, { start, end }: Range): number {
  const sum = new Float64Array(1);
  row.covered?.addTo(sum, [start, end]);
  for (let at = firstTouching(row, start); at < row.start.length && row.start[at]! < end; at++)
    sum[0]! += Math.min(row.start[at]! + row.duration[at]!, end) - Math.max(row.start[at]!, start);
  return sum[0]! / (end - start);
}

/** Whether a row shows one Python frame that fills the window, which says nothing of what happens in it. */
function only(row: DrawnRow, { document }: Model, { start, end }: Range): boolean {
  const first = firstTouching(row, start);
  if (first >= row.start.length || row.start[first]! > start || row.start[first]! + row.duration[first]! < end) return false;
  return document.names[row.kind[first]!] === "frame";
}

const nameOf = (row: DrawnRow, { start }: Range) => row.name[firstTouching(row, start)]!;

/** On the first screen: the threads that work and the queues, without marks, waits and counters. */
function isWorthIts({ lane, rows }: Model["lanes"][number], shown: Range): boolean {
  return ["host", "worker", "queue", "path"].includes(lane.kind) && (lane.kind === "path" || lane.id.endsWith(".0")) && rows.some((row) => covers(row, shown) >= LITTLE / 10);
}
