/** What is at a place of the drawing. */

import { duration as durationText, moment, share, size } from "../format";
import type { Cause } from "../schema";
import type { Range } from "../state";
import { sliceAt } from "./detail";
import type { DrawnGap, DrawnRow, Layout, Track } from "./model";

export type Hit =
  | { kind: "slice"; track: Track & { kind: "row" }; at: number }
  | { kind: "busy"; track: Track & { kind: "row" }; share: number }
  | { kind: "gap"; gap: DrawnGap; at: number }
  | { kind: "gaps"; gap: DrawnGap; shares: [string, number][] } // several narrow ones, by cause
  | { kind: "value"; track: Track & { kind: "values" }; value: number };

/** The strip at a height, or null between strips. */
export function trackAt({ tracks }: Layout, y: number): Track | null {
  return tracks.find(({ top, height }) => y >= top && y < top + height) ?? null;
}

/** What is at a place; `shown` is the range across `width` pixels. A slice narrower than a pixel is found within two. */
export function hitAt(layout: Layout, x: number, y: number, width: number, shown: Range): Hit | null {
  const track = trackAt(layout, y);
  if (!track) return null;
  const pixel = (shown.end - shown.start) / width;
  const time = shown.start + x * pixel;
  if (track.kind === "row") {
    const at = nearest(track.row, time, pixel);
    if (at >= 0) return { kind: "slice", track, at };
    const busy = new Float64Array(1);
    const found = track.row.covered?.addTo(busy, [time - pixel / 2, time + pixel / 2]);
    return found ? { kind: "busy", track, share: Math.min(busy[0]! / pixel, 1) } : null;
  }
  if (track.kind === "gaps") {
    const at = nearest(track.gap, time, pixel);
    if (at >= 0) return { kind: "gap", gap: track.gap, at };
    const shares = track.gap.covered.flatMap(([cause, covered]): [string, number][] => {
      const busy = new Float64Array(1);
      return covered.addTo(busy, [time - pixel / 2, time + pixel / 2]) ? [[cause, busy[0]! / pixel]] : [];
    });
    return shares.length ? { kind: "gaps", gap: track.gap, shares: shares.sort((a, b) => b[1] - a[1]) } : null;
  }
  const value = valueAt(track, time);
  return value === null ? null : { kind: "value", track, value };
}

function nearest(row: DrawnRow | DrawnGap, time: number, pixel: number): number {
  for (const by of [0, -1, 1, -2, 2]) {
    const at = sliceAt(row, time + by * pixel);
    if (at >= 0) return at;
  }
  return -1;
}

function valueAt({ values }: Track & { kind: "values" }, time: number): number | null {
  const { start, value } = values;
  let found: number | null = null;
  for (let at = 0; at < start.length && start[at]! <= time; at++) found = value[at]!;
  return found;
}

/** What a tip says of it, as lines. */
export function tipOf(hit: Hit, names: string[], causes: Record<string, Cause>, kinds: Record<string, Cause>): string[] {
  switch (hit.kind) {
    case "slice": {
      const { row, of } = hit.track;
      const [start, length] = [row.start[hit.at]!, row.duration[hit.at]!];
      const kind = names[row.kind[hit.at]!]!;
      const { label } = kinds[kind] ?? causes[kind] ?? { label: kind.replaceAll("_", " ") };
      return [names[row.name[hit.at]!] || label, `${durationText(length)} · ${label || kind}`, `${of.label}, from ${moment(start)}`];
    }
    case "busy":
      return [`${share(hit.share)} busy`, "many slices narrower than a pixel; zoom in to see them"];
    case "gap": {
      const { gap, at } = hit;
      const cause = names[gap.cause[at]!]!;
      const told = causes[cause];
      const trigger = gap.trigger[at]! >= 0 ? [`after ${names[gap.trigger[at]!]} drained the queue`] : [];
      const what = gap.device ? "idle" : "";
      return [`${what} ${durationText(gap.duration[at]!)}: ${told?.label ?? cause}`.trim(), ...(told?.meaning ? [told.meaning] : []), ...trigger];
    }
    case "gaps": {
      const idle = hit.shares.reduce((sum, [, each]) => sum + each, 0);
      return [`${share(Math.min(idle, 1))} ${hit.gap.device ? "idle" : "by cause"}`, ...hit.shares.map(([cause, each]) => `${causes[cause]?.label ?? cause} ${share(each)}`)];
    }
    case "value": {
      const { values, of } = hit.track;
      return [values.unit === "bytes" ? size(hit.value) : String(hit.value), of.label];
    }
  }
}
