/** What a report file can tell without a server, from the window that it has: all slices of one step, by name. */

import type { Lane, Places, Row, Slice, SlicePlace, Stretch, Timeline } from "../schema";
import type { Range } from "../state";
import { firstTouching } from "./detail";

const DEVICE = ["compute", "copy_in", "copy_out", "copy_on_device", "set", "communication", "other", "wait"];

/** What ran in a stretch of time: names and idle time; lines and modules of slices are not in the file. */
export function stretchIn(document: Timeline, range: Range | null): Stretch {
  const start = Math.max(range?.start ?? document.start, document.start);
  const end = Math.max(Math.min(range?.end ?? document.end, document.end), start);
  const slices = new Map<string, Stretch["slices"][number]>();
  for (const { lane, rows } of rowsOf(document)) {
    rows.forEach((row, depth) => {
      for (const at of inside(row, start, end)) {
        const [name, kind] = [document.names[row.name[at]!]!, document.names[row.kind[at]!]!];
        const key = `${kind} ${name}`;
        const found = slices.get(key) ?? { kind, name, count: 0, ns: 0, self_ns: DEVICE.includes(kind) ? null : 0 };
        const [from, to] = [Math.max(row.start[at]!, start), Math.min(row.start[at]! + row.duration[at]!, end)];
        found.count += 1;
        found.ns += Math.max(to - from, 0);
        if (found.self_ns !== null) found.self_ns += Math.max(to - from, 0) - coveredBy(lane.rows[depth + 1], from, to);
        slices.set(key, found);
      }
    });
  }
  const sorted = [...slices.values()].sort((a, b) => b.ns - a.ns);
  const devices = document.gaps.map((gap) => {
    const idle = new Map<string, number>();
    let first = Infinity;
    let last = -Infinity;
    for (const at of inside(gap, start, end)) {
      const cause = document.names[gap.cause[at]!]!;
      idle.set(cause, (idle.get(cause) ?? 0) + overlap(gap.start[at]!, gap.duration[at]!, start, end));
    }
    for (const { lane, rows } of rowsOf(document)) {
      if (lane.kind !== "queue" || lane.device !== gap.device || !rows[0]?.start.length) continue;
      first = Math.min(first, rows[0].start[0]!);
      last = Math.max(last, rows[0].start.at(-1)! + rows[0].duration.at(-1)!);
    }
    const told = [...idle.values()].reduce((a, b) => a + b, 0);
    const recorded = gap.device ? Math.max(Math.min(Math.max(last, document.end), end) - Math.max(Math.min(first, document.start), start), 0) : 0;
    return { device: gap.device, busy_ns: Math.max(recorded - told, 0), idle: [...idle].map(([cause, ns]) => ({ cause, ns })).sort((a, b) => b.ns - a.ns) };
  });
  return { start, end, devices, slices: sorted.slice(0, 300), slices_in_all: sorted.length, lines: [], lines_in_all: 0, modules: [], modules_in_all: 0 };
}

/** Slices whose name contains a text, ignoring case. */
export function placesIn(document: Timeline, text: string): Places {
  const wanted = text.toLowerCase();
  const names = new Set(document.names.flatMap((name, number) => (name.toLowerCase().includes(wanted) ? [number] : [])));
  const places: SlicePlace[] = [];
  const lanes: Places["lanes"] = [];
  const found = new Set<number>();
  for (const { lane, rows } of rowsOf(document)) {
    const before = places.length;
    rows.forEach((row, depth) =>
      row.name.forEach((name, at) => {
        if (!text || !names.has(name)) return;
        found.add(name);
        places.push(placeOf(document, lane, row, depth, at));
      }),
    );
    const own = places.slice(before);
    if (own.length) lanes.push({ id: lane.id, count: own.length, ns: own.reduce((sum, { duration }) => sum + duration, 0) });
  }
  places.sort((a, b) => a.start - b.start);
  return { text, count: places.length, names: found.size, lanes, first: 0, places };
}

/** One slice, without what the recording knows beyond its name and times. */
export function sliceIn(document: Timeline, table: string, number: number): Slice | null {
  for (const { lane, rows } of rowsOf(document)) {
    for (const [depth, row] of rows.entries()) {
      const at = row.row.findIndex((each, place) => each === number && document.names[row.table[place]!] === table);
      if (at >= 0) return { ...placeOf(document, lane, row, depth, at), about: {}, where: null, module: null, links: [] };
    }
  }
  return null;
}

const rowsOf = (document: Timeline) => document.lanes.filter((lane) => lane.kind !== "path").map((lane) => ({ lane, rows: lane.rows }));

const overlap = (from: number, length: number, start: number, end: number) => Math.max(Math.min(from + length, end) - Math.max(from, start), 0);

function* inside(row: { start: number[]; duration: number[] }, start: number, end: number): Generator<number> {
  for (let at = firstTouching(row, start); at < row.start.length && row.start[at]! < end; at++) yield at;
}

function coveredBy(row: Row | undefined, start: number, end: number): number {
  let sum = 0;
  if (row) for (const at of inside(row, start, end)) sum += overlap(row.start[at]!, row.duration[at]!, start, end);
  return sum;
}

function placeOf({ names }: Timeline, lane: Lane, row: Row, depth: number, at: number): SlicePlace {
  return {
    lane: lane.id, depth, table: names[row.table[at]!]!, row: row.row[at]!, kind: names[row.kind[at]!]!, name: names[row.name[at]!]!,
    start: row.start[at]!, duration: row.duration[at]!,
  };
}
