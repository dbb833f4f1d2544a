/** Windows of the timeline as they are fetched: the best one there is for a range, and the next one to ask for. */

import { fetchDocument, isFile, type Parameters } from "../data";
import type { Timeline } from "../schema";
import type { Range } from "../state";
import { type Model, modelOf } from "./model";

const MARGIN = 0.5; // of the range, on both sides
const KEPT = 6;
const WIDEST = 4096;
const COARSE = 1.6; // pixels of a window may be this much longer than those of the screen

/** The finest window that holds a range; else the longest one. */
export function bestOf(models: readonly Model[], range: Range): Model | null {
  const holding = models.filter((each) => each.range.start <= range.start && each.range.end >= range.end);
  const finest = (a: Model, b: Model) => resolution(a) - resolution(b);
  return holding.sort(finest)[0] ?? [...models].sort((a, b) => b.range.end - b.range.start - (a.range.end - a.range.start))[0] ?? null;
}

const resolution = (model: Model) => (model.document.whole ? 0 : model.pixel);

/** The window to ask for, or null if the best one serves: it has all, or is fine enough and reaches a little further. */
export function wanted(best: Model | null, range: Range, bounds: Range | null, width: number): Range | null {
  const length = range.end - range.start;
  const clip = (by: number): Range =>
    bounds
      ? { start: Math.max(range.start - by * length, bounds.start), end: Math.min(range.end + by * length, bounds.end) }
      : range;
  const near = clip(MARGIN / 4);
  const holds = best && best.range.start <= near.start && best.range.end >= near.end;
  if (holds && (best.document.whole || best.pixel <= COARSE * (length / width))) return null;
  const next = clip(MARGIN);
  return { start: Math.floor(next.start), end: Math.ceil(next.end) };
}

/** Asks for windows, one at a time, and keeps the last ones. */
export class Windows {
  models: Model[] = [];
  error: string | null = null;
  private asked: { range: Range; abort: AbortController } | null = null;
  private before: Model[] = []; // of other parameters, shown until there are new ones
  private extra: Parameters = {};

  /** `of`: parameters that every window is asked with, also in a report file. */
  constructor(
    private readonly changed: () => void,
    private readonly of: Parameters = {},
  ) {}

  /** Ask with these parameters from now on; returns whether they are others. */
  askWith(extra: Parameters): boolean {
    if (isFile || JSON.stringify(extra) === JSON.stringify(this.extra)) return false;
    this.extra = extra;
    this.stop();
    this.before = this.models.length ? this.models : this.before;
    this.models = [];
    return true;
  }

  get bounds(): Range | null {
    const model = this.models[0] ?? this.before[0];
    if (!model) return null;
    return isFile ? model.range : { start: model.document.first, end: model.document.last };
  }

  best(range: Range): Model | null {
    const inside = this.inside(range);
    return bestOf(this.models, inside) ?? bestOf(this.before, inside);
  }

  /** What was recorded of a range; all if that is nothing. */
  private inside(range: Range): Range {
    const { bounds } = this;
    if (!bounds || range.start >= bounds.end || range.end <= bounds.start) return bounds ?? range;
    return { start: Math.max(range.start, bounds.start), end: Math.min(range.end, bounds.end) };
  }

  /** Ask for what a range needs, if it is not there and not on its way; then perhaps for the whole recording. */
  need(sight: Range | null, width: number, all = false): void {
    const range = sight && this.inside(sight);
    const needed = range ? wanted(bestOf(this.models, range), range, this.bounds, width) : this.models.length ? null : { start: NaN, end: NaN };
    const next = needed ?? (all && !this.asked ? this.unknown() : null);
    if (!next || this.error || (isFile && this.models.length)) return;
    if (this.asked) {
      const { range: on } = this.asked;
      const serves = range === null || (on.start <= range.start && on.end >= range.end && on.end - on.start < 4 * (range.end - range.start));
      if (serves) return;
      this.asked.abort.abort();
    }
    void this.ask(next, width);
  }

  /** The whole recording, if no window spans it. */
  private unknown(): Range | null {
    const { bounds } = this;
    return bounds && !this.models.some((each) => each.range.start <= bounds.start && each.range.end >= bounds.end) ? bounds : null;
  }

  stop(): void {
    this.asked?.abort.abort();
    this.asked = null;
  }

  private async ask(range: Range, width: number): Promise<void> {
    const abort = new AbortController();
    this.asked = { range, abort };
    const part: Parameters = isFile || Number.isNaN(range.start) ? {} : { start: range.start, end: range.end };
    const size: Parameters = isFile ? {} : { width: Math.min(Math.round(width * (1 + 2 * MARGIN)), WIDEST) };
    try {
      const document: Timeline = await fetchDocument("timeline", { ...this.of, ...part, ...size, ...(isFile ? {} : this.extra) }, abort.signal);
      if (abort.signal.aborted) return;
      this.keep(modelOf(document));
    } catch (error) {
      if (abort.signal.aborted) return;
      // What is there stays; the next move asks again.
      if (!this.models.length) this.error = error instanceof Error ? error.message : String(error);
    }
    this.asked = null;
    this.changed();
  }

  /** The longest window stays, so that there is always something to show. */
  private keep(model: Model): void {
    if (this.before.length && this.models.length) this.before = [];
    const longest = [...this.models, model].reduce((a, b) => (b.range.end - b.range.start > a.range.end - a.range.start ? b : a));
    this.models = [model, ...this.models].filter((each, at) => at < KEPT || each === longest);
  }
}
