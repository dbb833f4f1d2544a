/** Drawing of the timeline on a canvas, in device pixels. */

import type { Cause, Lane, Values } from "../schema";
import type { Range } from "../state";
import { axisOf } from "./axis";
import { type Channels, channelsOf, inkOn, luminance, mixed, packed } from "./colours";
import { type Covered, type Detail, detail, firstTouching, lowerBound, type Slices } from "./detail";
import type { DrawnGap, DrawnRow, Layout, Model, Track } from "./model";

export interface Colours {
  card: string;
  soft: string;
  ink: string;
  muted: string;
  line: string;
  accent: string;
}

/** Ends of an arrow: times on rows. */
export interface Arrow {
  kind: string;
  from: { lane: string; depth: number; time: number };
  to: { lane: string; depth: number; time: number };
}

export interface Scene {
  model: Model;
  layout: Layout;
  shown: Range;
  scroll: number; // CSS pixels
  causes: Record<string, Cause>;
  kinds: Record<string, Cause>;
  colours: Colours;
  frames: Range[]; // of the chosen finding
  marked: Range | null;
  chosen: { table: string; row: number } | null;
  arrows: Arrow[];
  /** Whether a slice belongs to what is chosen; null if nothing is, so that all are. */
  matches: ((name: string, kind: string) => boolean) | null;
  matchesCause: ((cause: string) => boolean) | null;
  origin: number; // what the axis counts from
}

const UNKNOWN: Cause = { label: "", meaning: "", colour: "#8a94a0", hatched: false };
const DIM = 0.22;
const LABELLED = 26; // CSS pixels of a slice with room for a name
const FONT = "11px system-ui, sans-serif";

/** Time of each pixel in one colour. */
interface Series {
  colour: string;
  hatched: boolean;
  alpha: number;
  busy: Float64Array;
}

export class Painter {
  private readonly context: CanvasRenderingContext2D;
  private readonly patterns = new Map<string, CanvasPattern>();
  private readonly widths = new Map<string, number>();
  private readonly rgb = new Map<string, Channels>();
  private strip: ImageData | null = null;
  private kept: { of: unknown[]; image: HTMLCanvasElement } | null = null; // the whole recording, for the minimap
  private ratio = 1;
  private edges = new Float64Array(0);

  constructor(readonly canvas: HTMLCanvasElement) {
    this.context = canvas.getContext("2d", { alpha: false })!;
  }

  /** Fit the canvas to a size in CSS pixels. */
  fit(width: number, height: number): void {
    this.ratio = globalThis.devicePixelRatio || 1;
    const [across, down] = [Math.max(Math.round(width * this.ratio), 1), Math.max(Math.round(height * this.ratio), 1)];
    if (this.canvas.width !== across || this.canvas.height !== down) {
      this.canvas.width = across;
      this.canvas.height = down;
      this.strip = null;
    }
  }

  /** All lanes that are in sight. */
  lanes(scene: Scene): void {
    const { context, canvas, ratio } = this;
    const { layout, shown, scroll, colours } = scene;
    this.begin(colours.card);
    this.measure(shown);
    for (const track of layout.tracks) {
      const top = Math.round((track.top - scroll) * ratio);
      const height = Math.round(track.height * ratio);
      if (top + height < 0 || top > canvas.height) continue;
      if (track.kind === "row") this.row(scene, track, top, height - 1);
      else if (track.kind === "gaps") this.gaps(scene, track.gap, top, height);
      else this.values(scene, track, top, height);
    }
    this.steps(scene);
    for (const range of scene.frames) this.framed(range, shown, colours.accent);
    if (scene.marked) this.framed(scene.marked, shown, colours.accent);
    for (const arrow of scene.arrows) this.arrow(scene, arrow);
    context.globalAlpha = 1;
  }

  /** Round times, and where the steps are. */
  axis(scene: Scene, height: number): void {
    const { context, canvas, ratio } = this;
    const { shown, colours, model } = scene;
    this.begin(colours.card);
    this.measure(shown);
    const { origin } = scene;
    const { ticks, base } = axisOf(shown.start - origin, shown.end - origin, canvas.width / ratio);
    const low = (height - 5) * ratio;
    context.fillStyle = colours.line;
    for (const { time } of ticks) context.fillRect(this.x(time + origin, shown), (height - 14) * ratio, ratio, 14 * ratio);
    context.fillStyle = colours.muted;
    context.textBaseline = "alphabetic";
    for (const { time, label } of ticks) context.fillText(label, this.x(time + origin, shown) + 4 * ratio, low);
    const { steps } = model.document;
    for (let at = 0; at < steps.start.length; at++) {
      const left = Math.max(this.x(steps.start[at]!, shown), 0);
      const right = Math.min(this.x(steps.start[at]! + steps.duration[at]!, shown), canvas.width);
      if (right <= left) continue;
      context.fillStyle = at % 2 ? colours.line : colours.soft;
      context.fillRect(left, 0, Math.max(right - left - ratio, 1), (height - 16) * ratio);
      context.fillStyle = colours.ink;
      const label = `step ${steps.index[at]}`;
      if (right - left > this.textWidth(label) + 8 * ratio) context.fillText(label, left + 4 * ratio, (height - 20) * ratio);
    }
    if (base) {
      context.fillStyle = colours.card;
      context.fillRect(0, (height - 16) * ratio, this.textWidth(base) + 10 * ratio, 15 * ratio);
      context.fillStyle = colours.ink;
      context.fillText(base, 2 * ratio, low);
    }
    if (scene.marked) this.band(scene.marked, shown, colours.accent, 0.3);
  }

  /** The whole recording with the window in it. */
  minimap(scene: Scene, whole: Range): void {
    const { context, canvas, ratio } = this;
    const { model, colours, shown } = scene;
    // It stays the same while the window moves over it.
    const of = [model, colours, scene.causes, canvas.width, canvas.height];
    if (!this.kept || this.kept.of.some((each, at) => each !== of[at])) {
      this.begin(colours.soft);
      this.measure(whole);
      const gap = model.gaps[0];
      const busiest = model.lanes.find(({ rows }) => rows.length);
      if (gap) this.gaps({ ...scene, shown: whole, matchesCause: null }, gap, 0, canvas.height, false);
      else if (busiest) this.busyStrip(busiest.rows[0]!, 0, canvas.height, this.kind(scene, "operator").colour, colours.soft, false);
      this.kept = { of, image: copyOf(canvas) };
    } else {
      context.globalAlpha = 1;
      context.drawImage(this.kept.image, 0, 0);
    }
    context.globalAlpha = 0.55;
    context.fillStyle = colours.card;
    const [left, right] = [this.x(shown.start, whole), this.x(shown.end, whole)];
    context.fillRect(0, 0, left, canvas.height);
    context.fillRect(right, 0, canvas.width - right, canvas.height);
    context.globalAlpha = 1;
    context.strokeStyle = colours.accent;
    context.lineWidth = 1.5 * ratio;
    context.strokeRect(Math.max(left, ratio), ratio, Math.max(Math.min(right, canvas.width - ratio) - Math.max(left, ratio), 3 * ratio), canvas.height - 2 * ratio);
  }

  private begin(background: string): void {
    const { context, canvas, ratio } = this;
    context.globalAlpha = 1;
    context.fillStyle = background;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.font = ratio === 1 ? FONT : FONT.replace("11px", `${11 * ratio}px`);
  }

  private measure({ start, end }: Range): void {
    const width = this.canvas.width;
    if (this.edges.length !== width + 1) this.edges = new Float64Array(width + 1);
    for (let at = 0; at <= width; at++) this.edges[at] = start + ((end - start) * at) / width;
  }

  private x(time: number, { start, end }: Range): number {
    return Math.round(((time - start) / (end - start)) * this.canvas.width);
  }

  private steps({ model, shown, colours }: Scene): void {
    const { context, canvas, ratio } = this;
    const { start } = model.document.steps;
    const first = firstTouching({ start, duration: model.document.steps.duration }, shown.start);
    context.fillStyle = colours.line;
    if ((start.length / (model.range.end - model.range.start)) * (shown.end - shown.start) > canvas.width / (8 * ratio)) return;
    for (let at = first; at < start.length && start[at]! < shown.end; at++) context.fillRect(this.x(start[at]!, shown), 0, ratio, canvas.height);
  }

  private row(scene: Scene, { row, of }: Track & { kind: "row" }, top: number, height: number): void {
    const { context, ratio, canvas } = this;
    const { shown, model, matches, chosen } = scene;
    const { names } = model.document;
    const rows = this.busyStrip(row, top, height, this.narrow(scene, of), scene.colours.card, matches !== null);
    context.textBaseline = "middle";
    let fill = "";
    for (const at of rows) {
      const left = Math.max(this.x(row.start[at]!, shown), -2);
      const right = Math.min(this.x(row.start[at]! + row.duration[at]!, shown), canvas.width + 2);
      const width = Math.max(right - left - (right - left > 3 * ratio ? ratio : 0), 1);
      const kind = names[row.kind[at]!]!;
      const table = names[row.table[at]!]!;
      const { colour, hatched } = of.kind === "path" ? (scene.causes[kind] ?? this.kind(scene, kind)) : this.kind(scene, kind);
      const isShown = row.marked ? row.marked[at] === 1 : !matches || matches(names[row.name[at]!]!, kind);
      context.globalAlpha = isShown ? 1 : DIM;
      if (hatched && width > 3) {
        context.fillStyle = this.hatch(colour);
        fill = "";
      } else if (fill !== colour) context.fillStyle = fill = colour;
      context.fillRect(left, top, width, height);
      if (width > LABELLED * ratio) {
        this.text(names[row.name[at]!]!, left, top, width, height, inkOn(this.channels(colour)), hatched ? colour : "");
        fill = "";
      }
      if (chosen && row.row[at] === chosen.row && table === chosen.table) {
        context.globalAlpha = 1;
        context.strokeStyle = scene.colours.ink;
        context.lineWidth = 2 * ratio;
        context.strokeRect(left + ratio, top + ratio, Math.max(width - 2 * ratio, 1), height - 2 * ratio);
      }
    }
    context.globalAlpha = 1;
  }

  /** What is narrower than a pixel: each column as high as the share of the pixel that it covers; returns what is wider. */
  private busyStrip(row: DrawnRow, top: number, height: number, colour: string, background: string, isDim: boolean): number[] {
    const { rows, busy } = this.busyOf(row, row.covered);
    if (!busy) return rows;
    const marked = row.marks && this.busyOf(row.marks.slices, row.marks.covered).busy;
    const series: Series[] = [];
    if (marked) {
      series.push({ colour, hatched: false, alpha: 1, busy: marked });
      for (let x = 0; x < busy.length; x++) busy[x] = Math.max(busy[x]! - marked[x]!, 0);
    }
    series.push({ colour, hatched: false, alpha: row.marks || isDim ? DIM : 1, busy });
    this.columns(top, height, background, series);
    return rows;
  }

  private busyOf(slices: Slices, covered: Covered | null): Detail {
    const { rows, busy } = detail(slices, this.edges);
    if (!covered) return { rows, busy };
    const sum = busy ?? new Float64Array(this.edges.length - 1);
    const any = covered.addTo(sum, this.edges);
    return { rows, busy: any ? sum : busy };
  }

  /** Columns stacked from the bottom, each series as high as its share of the pixel. */
  private columns(top: number, height: number, background: string, series: Series[]): void {
    const width = this.canvas.width;
    if (!this.strip || this.strip.width !== width || this.strip.height !== height) this.strip = this.context.createImageData(width, height);
    const data = new Uint32Array(this.strip.data.buffer);
    const under = this.channels(background);
    data.fill(packed(under));
    const pixel = this.edges[1]! - this.edges[0]!;
    const filled = series.length > 1 ? new Float64Array(width) : null;
    for (const { colour, hatched, alpha, busy } of series) {
      const plain = packed(mixed(this.channels(colour), under, alpha));
      const dark = hatched ? packed(mixed(mixed(this.channels(colour), [0, 0, 0], 0.45), under, alpha)) : plain;
      for (let x = 0; x < width; x++) {
        if (!busy[x]) continue;
        const from = filled ? filled[x]! : 0;
        const to = Math.min(from + (busy[x]! / pixel) * height, height);
        if (filled) filled[x] = to;
        // At least one row of pixels, so that nothing is invisible.
        const low = Math.min(Math.round(from), height - 1);
        const high = Math.max(Math.round(to), low + 1);
        for (let y = low; y < high; y++) data[(height - 1 - y) * width + x] = hatched && (x + y) % 6 < 2 ? dark : plain;
      }
    }
    this.context.putImageData(this.strip, 0, top);
  }

  private gaps(scene: Scene, gap: DrawnGap, top: number, height: number, isNamed = true): void {
    const { context, ratio, canvas, edges } = this;
    const { shown, model, causes, matchesCause, colours } = scene;
    const { names } = model.document;
    const { rows, busy } = detail(gap, edges);
    const byCause = new Map<string, Float64Array>();
    const of = (cause: string) => byCause.get(cause) ?? byCause.set(cause, new Float64Array(canvas.width)).get(cause)!;
    if (busy) narrowByCause(gap, names, edges, of);
    for (const [cause, covered] of gap.covered) covered.addTo(of(cause), edges);
    const shade = (cause: string) => (matchesCause && !matchesCause(cause) ? colours.line : (causes[cause] ?? UNKNOWN).colour);
    const series = [...byCause].map(([cause, sums]) => ({ colour: shade(cause), hatched: (causes[cause] ?? UNKNOWN).hatched, alpha: 1, busy: sums }));
    if (series.length) this.columns(top, height, colours.soft, series);
    else {
      context.fillStyle = colours.soft;
      context.fillRect(0, top, canvas.width, height);
    }
    context.textBaseline = "middle";
    for (const at of rows) {
      const left = Math.max(this.x(gap.start[at]!, shown), -2);
      const right = Math.min(this.x(gap.start[at]! + gap.duration[at]!, shown), canvas.width + 2);
      const width = Math.max(right - left, 1);
      const cause = names[gap.cause[at]!]!;
      const { colour, hatched, label } = causes[cause] ?? { ...UNKNOWN, label: cause };
      context.globalAlpha = matchesCause && !matchesCause(cause) ? DIM : 1;
      context.fillStyle = hatched && width > 3 ? this.hatch(colour) : colour;
      context.fillRect(left, top, width, height);
      if (isNamed && width > LABELLED * ratio) this.text(label, left, top, width, height, inkOn(this.channels(colour)), hatched ? colour : "");
    }
    context.globalAlpha = 1;
  }

  private values(scene: Scene, { values, of }: Track & { kind: "values" }, top: number, height: number): void {
    const { context, ratio, canvas, edges } = this;
    const { colour } = this.kind(scene, of.kind === "memory" ? "memory" : "counter");
    const least = Math.min(values.least, 0);
    const scale = (height - 2 * ratio) / Math.max(values.most - least, 1e-30);
    const y = (value: number) => top + height - (value - least) * scale;
    context.fillStyle = colour;
    const { low, high } = spreadOf(values, scene.model.range, scene.model.document.last, edges);
    for (let x = 0; x < canvas.width; x++) {
      if (Number.isNaN(low[x]!)) continue;
      const [bottom, peak] = [y(low[x]!), y(high[x]!)];
      context.globalAlpha = 0.45;
      context.fillRect(x, bottom, 1, top + height - bottom);
      context.globalAlpha = 1;
      context.fillRect(x, peak, 1, Math.max(bottom - peak, ratio));
    }
  }

  private framed(range: Range, shown: Range, colour: string): void {
    this.band(range, shown, colour, 0.1);
    const { context, canvas, ratio } = this;
    context.fillStyle = colour;
    for (const time of [range.start, range.end]) context.fillRect(this.x(time, shown), 0, 1.5 * ratio, canvas.height);
  }

  private band(range: Range, shown: Range, colour: string, alpha: number): void {
    const { context, canvas } = this;
    const [left, right] = [Math.max(this.x(range.start, shown), 0), Math.min(this.x(range.end, shown), canvas.width)];
    if (right < 0 || left > canvas.width) return;
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.fillRect(left, 0, Math.max(right - left, 1), canvas.height);
    context.globalAlpha = 1;
  }

  private arrow(scene: Scene, { from, to, kind }: Arrow): void {
    const { context, ratio } = this;
    const ends = [from, to].map(({ lane, depth, time }) => {
      const rows = scene.layout.tracks.filter((track) => track.kind === "row" && track.lane === lane);
      const track = rows.find((each) => each.depth === depth) ?? rows[0];
      return track ? { x: this.x(time, scene.shown), y: (track.top + track.height / 2 - scene.scroll) * ratio } : null;
    });
    const [begin, end] = ends;
    if (!begin || !end) return;
    const bend = Math.max(Math.abs(end.x - begin.x) / 2, 24 * ratio);
    context.strokeStyle = context.fillStyle = kind === "forward_backward" ? (scene.causes["compilation"]?.colour ?? scene.colours.accent) : scene.colours.accent;
    context.lineWidth = 1.5 * ratio;
    context.beginPath();
    context.moveTo(begin.x, begin.y);
    context.bezierCurveTo(begin.x + bend, begin.y, end.x - bend, end.y, end.x, end.y);
    context.stroke();
    context.beginPath();
    context.moveTo(end.x, end.y);
    context.lineTo(end.x - 7 * ratio, end.y - 4 * ratio);
    context.lineTo(end.x - 7 * ratio, end.y + 4 * ratio);
    context.fill();
  }

  /** A kind in the theme's light: in the dark, its colour mixed with the background. */
  private kind({ kinds, colours }: Scene, name: string): Cause {
    const found = kinds[name] ?? UNKNOWN;
    const under = this.channels(colours.card);
    if (luminance(under) > 128) return found;
    const [red, green, blue] = mixed(this.channels(found.colour), under, 0.62);
    return { ...found, colour: `rgb(${red} ${green} ${blue})` };
  }

  /** Colour of slices too narrow to be told apart, by what the lane holds. */
  private narrow(scene: Scene, lane: Lane): string {
    return this.kind(scene, lane.kind === "queue" ? "compute" : lane.kind === "path" ? "other" : "operator").colour;
  }

  /** A name as far as it fits. */
  private text(text: string, left: number, top: number, width: number, height: number, ink: string, behind: string): void {
    const { context, ratio, canvas } = this;
    const from = Math.max(left, 0) + 4 * ratio;
    const room = Math.min(left + width, canvas.width) - from - 3 * ratio;
    if (room < 14 * ratio) return;
    const whole = this.textWidth(text);
    let shownText = text;
    if (whole > room) {
      const fits = Math.floor((text.length * room) / whole) - 2;
      if (fits < 2) return;
      shownText = `${text.slice(0, fits)}…`;
    }
    if (behind) {
      context.fillStyle = behind;
      context.fillRect(from - 2 * ratio, top + 2, Math.min(whole, room) + 4 * ratio, height - 4);
    }
    context.fillStyle = ink;
    context.fillText(shownText, from, top + height / 2 + 0.5);
  }

  private textWidth(text: string): number {
    const key = `${this.ratio} ${text}`;
    let width = this.widths.get(key);
    if (width === undefined) {
      if (this.widths.size > 20_000) this.widths.clear();
      this.widths.set(key, (width = this.context.measureText(text).width));
    }
    return width;
  }

  private hatch(colour: string): CanvasPattern {
    const key = `${colour} ${this.ratio}`;
    let pattern = this.patterns.get(key);
    if (!pattern) {
      const size = Math.round(6 * this.ratio);
      const tile = document.createElement("canvas");
      tile.width = tile.height = size;
      const context = tile.getContext("2d")!;
      context.fillStyle = colour;
      context.fillRect(0, 0, size, size);
      context.strokeStyle = "rgb(0 0 0 / 50%)";
      context.lineWidth = 1.5 * this.ratio;
      for (const by of [-size, 0, size]) {
        context.moveTo(by, size);
        context.lineTo(by + size, 0);
      }
      context.stroke();
      pattern = this.context.createPattern(tile, "repeat")!;
      this.patterns.set(key, pattern);
    }
    return pattern;
  }

  private channels(colour: string): Channels {
    let found = this.rgb.get(colour);
    if (!found) this.rgb.set(colour, (found = channelsOf(colour, this.context)));
    return found;
  }
}

/** The least and the largest value in each pixel, NaN where none is known. */
export function spreadOf(values: Values, window: Range, last: number, edges: ArrayLike<number>): { low: Float64Array; high: Float64Array } {
  const width = edges.length - 1;
  const low = new Float64Array(width).fill(NaN);
  const high = new Float64Array(width).fill(NaN);
  const widen = (x: number, least: number, most: number) => {
    if (!(low[x]! <= least)) low[x] = least;
    if (!(high[x]! >= most)) high[x] = most;
  };
  if (values.low.length) {
    for (let x = 0; x < width; x++) {
      const place = Math.floor(((edges[x]! - window.start) / (window.end - window.start)) * values.low.length);
      if (values.low[place] !== undefined) widen(x, values.low[place]!, values.high[place]!);
    }
    return { low, high };
  }
  const scale = width / (edges[width]! - edges[0]!);
  const { start, value } = values;
  for (let at = Math.max(lowerBound(start, edges[0]!) - 1, 0); at < start.length && start[at]! < edges[width]!; at++) {
    const from = Math.max(Math.floor((start[at]! - edges[0]!) * scale), 0);
    const to = Math.min(Math.ceil(((start[at + 1] ?? last) - edges[0]!) * scale), width);
    for (let x = from; x < Math.max(to, from + 1) && x < width; x++) widen(x, value[at]!, value[at]!);
  }
  return { low, high };
}

/** The time of each pixel that narrow gaps cover, by cause. */
function narrowByCause(gap: DrawnGap, names: string[], edges: Float64Array, of: (cause: string) => Float64Array): void {
  const parts = new Map<number, { start: number[]; duration: number[] }>();
  for (let at = firstTouching(gap, edges[0]!); at < gap.start.length && gap.start[at]! < edges[edges.length - 1]!; at++) {
    const part = parts.get(gap.cause[at]!) ?? parts.set(gap.cause[at]!, { start: [], duration: [] }).get(gap.cause[at]!)!;
    part.start.push(gap.start[at]!);
    part.duration.push(gap.duration[at]!);
  }
  for (const [cause, slices] of parts) {
    const { busy } = detail(slices, edges);
    const sums = busy && of(names[cause]!);
    if (sums && busy) for (let x = 0; x < sums.length; x++) sums[x]! += busy[x]!;
  }
}

function copyOf(canvas: HTMLCanvasElement): HTMLCanvasElement {
  const copy = document.createElement("canvas");
  copy.width = canvas.width;
  copy.height = canvas.height;
  copy.getContext("2d")!.drawImage(canvas, 0, 0);
  return copy;
}
