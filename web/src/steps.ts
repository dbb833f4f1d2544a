/** What differs in slow steps. */

import type { Links, Step, TableRow } from "./schema";

export interface StepRow {
  index: number;
  start_ns: number;
  duration_ns: number;
  complete: boolean;
  busy_share: number | null;
  parts: Map<string, number>; // nanoseconds by cause, and "busy"; empty where they are not known
  more_ns: number; // than the median
  differs: string; // cause with the largest part of that; "" in a step that is no slower
  differs_ns: number;
}

const NOTICEABLE = 0.02;

export function stepRows(steps: readonly Step[], table: readonly TableRow[] = [], links?: Links): StepRow[] {
  const parts = partsOf(links);
  const middle = median(steps.filter((step) => step.complete).map((step) => step.duration_ns));
  const usual = usualParts(steps, parts);
  const busy = new Map(table.map((row) => [row.index, busyOf(row)]));
  return steps.map((step) => {
    const own = parts.get(step.index) ?? new Map<string, number>();
    const more_ns = step.duration_ns - middle;
    const [differs, differs_ns] = more_ns > NOTICEABLE * middle ? largestExcess(own, usual) : ["", 0];
    return { ...step, busy_share: busy.get(step.index) ?? null, parts: own, more_ns, differs, differs_ns };
  });
}

/** The complete step whose duration is nearest to this one; null without steps. */
export function nearestStep<Each extends Pick<Step, "duration_ns" | "complete">>(steps: readonly Each[], duration_ns: number): Each | null {
  const off = (step: Each) => Math.abs(step.duration_ns - duration_ns);
  const complete = steps.filter((step) => step.complete);
  const known = complete.length ? complete : steps;
  return known.length ? known.reduce((nearest, step) => (off(step) < off(nearest) ? step : nearest)) : null;
}

export function median(values: readonly number[]): number {
  const ordered = [...values].sort((a, b) => a - b);
  const half = ordered.length >> 1;
  if (!ordered.length) return 0;
  return ordered.length % 2 ? ordered[half]! : (ordered[half - 1]! + ordered[half]!) / 2;
}

/** At most `most` bars: of several steps in a bar, the slowest is shown. */
export function bars(rows: readonly StepRow[], most: number): StepRow[] {
  if (rows.length <= most) return [...rows];
  return Array.from({ length: most }, (_, bar) => {
    const those = rows.slice(Math.floor((bar * rows.length) / most), Math.floor(((bar + 1) * rows.length) / most));
    return those.reduce((slowest, row) => (row.duration_ns > slowest.duration_ns ? row : slowest));
  });
}

function partsOf(links?: Links): Map<number, Map<string, number>> {
  const parts = new Map<number, Map<string, number>>();
  links?.steps.step.forEach((step, row) => {
    const own = parts.get(step) ?? new Map<string, number>();
    own.set(links.names[links.steps.cause[row]!]!, links.steps.ns[row]!);
    parts.set(step, own);
  });
  return parts;
}

function usualParts(steps: readonly Step[], parts: Map<number, Map<string, number>>): Map<string, number> {
  const names = new Set([...parts.values()].flatMap((own) => [...own.keys()]));
  const complete = steps.filter((step) => step.complete && parts.has(step.index));
  return new Map([...names].map((name) => [name, median(complete.map((step) => parts.get(step.index)!.get(name) ?? 0))]));
}

function largestExcess(own: Map<string, number>, usual: Map<string, number>): [string, number] {
  let found: [string, number] = ["", 0];
  for (const [name, ns] of own) {
    const excess = ns - (usual.get(name) ?? 0);
    if (excess > found[1]) found = [name, excess];
  }
  return found;
}

/** Mean of the devices' busy shares. */
function busyOf(row: TableRow): number | null {
  const shares = Object.entries(row).flatMap(([name, value]) => (/^device_.*_busy_share$/.test(name) && typeof value === "number" ? [value] : []));
  return shares.length ? shares.reduce((a, b) => a + b) / shares.length : null;
}
