/** The timeline behind its canvases: pointer, keyboard, windows, and what is drawn when. */

import type { Parameters } from "../data";
import { duration as durationText, moment } from "../format";
import type { Cause } from "../schema";
import type { Range } from "../state";
import { type DrawnSlice, firstSlice, neighbour, sliceIn, spanOf } from "./chosen";
import { type Arrow, type Colours, Painter, type Scene } from "./draw";
import { firstTouching } from "./detail";
import { type Hit, hitAt, tipOf } from "./hit";
import { type Arrangement, type Layout, layoutOf, type Model, type Track } from "./model";
import { approach, between, framed, keyed, moved, within, zoomed } from "./moves";
import { Windows } from "./windows";

/** A slice that was chosen. */
export interface Chosen {
  table: string;
  row: number;
  name: string;
  kind: string;
  start: number;
  duration: number;
}

export interface TimelineProps {
  start?: number; // the range to begin with, in nanoseconds; all if absent
  end?: number;
  compact?: boolean; // few rows, no minimap
  height?: number; // CSS pixels at most; the room there is if absent
  path?: boolean; // with the lane of the critical path
  chosen?: { table: string; row: number } | null;
  arrows?: Arrow[];
  frames?: Range[]; // intervals to point out
  mark?: string; // what the server is to point out, such as "line:train.py:12"; all else is dim
  marked?: Range | null; // a stretch that was measured
  matches?: Scene["matches"];
  matchesCause?: Scene["matchesCause"];
  onSelect?: (slice: Chosen | null) => void;
  onCause?: (cause: string) => void;
  onRange?: (shown: Range | null) => void; // when it rests; null if it is the whole recording
  onMark?: (marked: Range | null) => void;
  onSearch?: () => void; // the slash key
  origin?: number; // what the times of the axis are counted from
  bounds?: Range; // how far one can move; the recording if absent
  linked?: Set<Controller>; // timelines that move together, each from its own origin
  of?: Parameters; // of another trace than the page's
}

export const NOTHING: readonly never[] = [];
export const AXIS = 34;
const MINIMAP = 22;
export const EMPTY: ReadonlySet<string> = new Set();

/** What happens between the pointer, the keyboard, the windows and the canvases. */
export class Controller {
  props: TimelineProps = {};
  arrangement: Arrangement = { folded: EMPTY, opened: EMPTY, pinned: NOTHING, room: null };
  causes: Record<string, Cause> = {};
  kinds: Record<string, Cause> = {};
  layout: Layout | null = null;
  model: Model | null = null;
  shown: Range | null = null;
  private target: Range | null = null;
  private pending: Range | null = null;
  readonly windows: Windows;
  private root: HTMLElement | null = null;
  private lanes: Painter | null = null;
  private axis: Painter | null = null;
  private map: Painter | null = null;
  private colours: Colours | null = null;
  private isPainted = false;
  private seenChosen = "";
  private frame = 0;
  private last = 0;
  private resting = 0;
  private reported: Range | null = null; // the last range that the address had
  private width = 0;
  private pointer: { x: number; y: number } | null = null;
  private laidOut: unknown[] = [];
  private readonly undo: (() => void)[] = [];

  constructor(
    private readonly changed: () => void,
    private readonly tip: (tip: { x: number; y: number; text: string[] } | null) => void,
    of: Parameters = {},
  ) {
    this.windows = new Windows(() => this.arrived(), of);
  }

  private get bounds(): Range | null {
    return this.windows.bounds && (this.props.bounds ?? this.windows.bounds);
  }

  /** Parameters of the windows to ask for. */
  askWith(extra: Parameters): void {
    if (this.windows.askWith(extra) && this.width) this.windows.need(this.target, this.width);
  }

  said(): string {
    if (!this.shown || !this.model) return "not yet read";
    return `${durationText(this.shown.end - this.shown.start)} from ${moment(this.shown.start)}, ${this.model.document.lanes.length} lanes`;
  }

  attach(root: HTMLElement): void {
    this.root = root;
    this.props.linked?.add(this);
    const canvas = (name: string) => root.querySelector<HTMLCanvasElement>(`.timeline-${name}`);
    this.lanes = new Painter(canvas("lanes")!);
    this.axis = new Painter(canvas("axis")!);
    const map = canvas("minimap");
    this.map = map && new Painter(map);
    const observer = new ResizeObserver(() => this.resized());
    observer.observe(root);
    observer.observe(this.lanes.canvas); // which a scroll bar makes narrower
    this.undo.push(() => observer.disconnect());
    const on = <Name extends keyof HTMLElementEventMap>(target: HTMLElement | Document, name: Name, handle: (event: HTMLElementEventMap[Name]) => void, passive = true) => {
      target.addEventListener(name, handle as EventListener, { passive });
      this.undo.push(() => target.removeEventListener(name, handle as EventListener));
    };
    on(this.arrangement.room === null ? document : root, "keydown", (event) => this.key(event), false);
    on(root.querySelector<HTMLElement>(".timeline-scroll")!, "scroll", () => this.draw());
    on(this.lanes.canvas, "wheel", (event) => this.wheel(event), false);
    on(this.axis.canvas, "wheel", (event) => this.wheel(event, true), false);
    on(this.lanes.canvas, "pointerdown", (event) => this.down(event, event.shiftKey ? "mark" : "move"));
    on(this.axis.canvas, "pointerdown", (event) => this.down(event, "mark"));
    if (map) on(map, "pointerdown", (event) => this.down(event, "map"));
    on(this.lanes.canvas, "pointermove", (event) => this.hover(event));
    on(this.lanes.canvas, "pointerleave", () => {
      this.pointer = null;
      this.tip(null);
    });
    on(this.lanes.canvas, "dblclick", (event) => this.double(event));
    on(this.axis.canvas, "dblclick", () => this.props.onMark?.(null));
    this.resized();
  }

  detach(): void {
    this.props.linked?.delete(this);
    this.windows.stop();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.resting);
    for (const each of this.undo.splice(0)) each();
  }

  recolour(): void {
    this.colours = null;
    this.draw();
  }

  /** Show a range, or the whole recording, on the way there if something is shown already. */
  goTo(range: Range | null): void {
    const { bounds } = this;
    if (!bounds) {
      this.pending = range;
      if (this.width) this.windows.need(range, this.width);
      return;
    }
    if (range?.start === this.reported?.start && range?.end === this.reported?.end) return;
    this.reported = range;
    const next = within(range ?? bounds, bounds);
    if (this.target && Math.abs(next.start - this.target.start) + Math.abs(next.end - this.target.end) < 4) return;
    this.aim(next, true);
  }

  /** Draw at the next frame. */
  draw(): void {
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.tick(now));
  }

  private aim(range: Range, quiet = false): void {
    this.turn(range);
    clearTimeout(this.resting);
    if (quiet) return;
    this.resting = window.setTimeout(() => this.rest(), 350);
    this.lead(range);
  }

  private turn(range: Range): void {
    this.target = range;
    this.windows.need(range, this.width);
    if (!this.shown || matchMedia("(prefers-reduced-motion: reduce)").matches) this.shown = range;
    this.last = performance.now();
    this.draw();
  }

  /** Take the linked timelines along. */
  private lead({ start, end }: Range): void {
    for (const other of this.props.linked ?? []) {
      const by = (other.props.origin ?? 0) - (this.props.origin ?? 0);
      if (other === this || !other.target) continue;
      if (this.shown === this.target) other.shown = { start: start + by, end: end + by };
      other.turn({ start: start + by, end: end + by });
    }
  }

  private rest(): void {
    const { target, bounds } = this;
    if (!target || !bounds) return;
    const isWhole = target.start <= bounds.start && target.end >= bounds.end;
    this.reported = isWhole ? null : { start: Math.floor(target.start), end: Math.ceil(target.end) };
    this.props.onRange?.(this.reported);
  }

  private arrived(): void {
    const { bounds } = this;
    if (bounds && !this.shown) {
      this.shown = this.target = within(this.pending ?? bounds, bounds);
      this.reported = this.pending;
    }
    if (this.target) this.windows.need(this.target, this.width, this.map !== null);
    this.changed();
  }

  private resized(): void {
    if (!this.root) return;
    const width = this.lanes!.canvas.clientWidth;
    if (width && width !== this.width) {
      this.width = width;
      for (const each of [this.axis, this.map]) if (each) each.canvas.style.width = `${width}px`;
      const { start, end } = this.props;
      const begin = this.target ?? (start !== undefined && end !== undefined ? { start, end } : null);
      this.pending ??= begin;
      this.windows.need(begin, width);
    }
    this.draw();
  }

  private tick(now: number): void {
    this.frame = 0;
    const { target } = this;
    if (!this.root || !this.shown || !target) return;
    if (this.shown.start !== target.start || this.shown.end !== target.end) {
      this.shown = approach(this.shown, target, Math.min(now - this.last, 60));
      this.last = now;
      if (this.shown !== target) this.draw();
      else this.changed();
      this.root.querySelector(".timeline-length")!.textContent = durationText(this.shown.end - this.shown.start);
    }
    this.paint(this.shown);
    if (this.pointer) this.point(this.pointer);
  }

  private paint(shown: Range): void {
    const model = this.windows.best(shown);
    if (!model || !this.lanes || !this.axis || !this.root) return;
    if (this.model !== model || !this.layout || this.laidOut[0] !== this.arrangement || (this.arrangement.room !== null && this.laidOut[1] !== this.target)) {
      this.model = model;
      this.laidOut = [this.arrangement, this.target];
      const before = this.layout;
      this.layout = layoutOf(model, this.arrangement, this.target ?? shown);
      if (JSON.stringify(before?.headings) !== JSON.stringify(this.layout.headings)) this.changed();
    }
    const scroll = this.root.querySelector<HTMLElement>(".timeline-scroll")!;
    const visible = Math.min(scroll.clientHeight || this.layout.height, this.layout.height);
    const { canvas } = this.lanes;
    if (canvas.style.height !== `${visible}px`) canvas.style.height = `${visible}px`;
    this.showChosen();
    const scene = this.scene(model, shown, scroll.scrollTop);
    if (!this.isPainted) performance.mark("timeline-painted");
    this.isPainted = true;
    this.lanes.fit(this.width, visible);
    this.lanes.lanes(scene);
    this.axis.fit(this.width, AXIS);
    this.axis.axis(scene, AXIS);
    const { bounds } = this.windows;
    if (this.map && bounds) {
      this.map.fit(this.width, MINIMAP);
      this.map.minimap({ ...scene, model: this.windows.best(bounds)! }, bounds);
    }
  }

  private scene(model: Model, shown: Range, scroll: number): Scene {
    if (!this.colours) {
      const style = getComputedStyle(this.root!);
      const read = (name: string, otherwise: string) => style.getPropertyValue(name).trim() || otherwise;
      this.colours = {
        card: read("--page", "#fff"),
        soft: read("--soft", "#eef0f2"),
        ink: read("--ink", "#111"),
        muted: read("--muted", "#667"),
        line: read("--line", "#dde"),
        accent: read("--accent", "#1f5fbf"),
      };
    }
    const { frames, marked, chosen, arrows, matches, matchesCause } = this.props;
    return {
      model, shown, scroll, layout: this.layout!, causes: this.causes, kinds: this.kinds, colours: this.colours,
      frames: frames ?? [], marked: marked ?? null, chosen: chosen ?? null, arrows: arrows ?? [],
      matches: matches ?? null, matchesCause: matchesCause ?? null, origin: this.props.origin ?? 0,
    };
  }

  private place(event: { clientX: number; clientY: number }): { x: number; y: number } {
    const box = this.lanes!.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  private timeAt(x: number, range = this.shown!): number {
    return range.start + (x / this.width) * (range.end - range.start);
  }

  private hit(at: { x: number; y: number }): Hit | null {
    if (!this.layout || !this.shown) return null;
    const scroll = this.root!.querySelector(".timeline-scroll")!.scrollTop;
    return hitAt(this.layout, at.x, at.y + scroll, this.width, this.shown);
  }

  private wheel(event: WheelEvent, onAxis = false): void {
    const { bounds } = this;
    if (!bounds || !this.target) return;
    const unit = event.deltaMode === 1 ? 16 : 1;
    const x = this.place(event).x;
    const length = this.target.end - this.target.start;
    if (event.ctrlKey || event.metaKey || onAxis) {
      event.preventDefault();
      const factor = Math.exp(Math.max(Math.min(event.deltaY * unit, 120), -120) * 0.005);
      this.aim(zoomed(this.target, factor, this.timeAt(x, this.target), bounds));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.aim(moved(this.target, (((event.deltaX || event.deltaY) * unit) / this.width) * length, bounds));
    }
  }

  private readonly touches = new Map<number, number>();

  private down(event: PointerEvent, does: "move" | "mark" | "map"): void {
    const { bounds } = this;
    if (event.button !== 0 || !bounds || !this.target) return;
    const canvas = event.currentTarget as HTMLCanvasElement;
    canvas.setPointerCapture(event.pointerId);
    this.root!.focus({ preventScroll: true });
    const from = this.place(event);
    const begin = { ...this.target };
    let travelled = false;
    this.touches.set(event.pointerId, from.x);
    const pinch = this.touches.size === 2 ? { apart: this.apart(), range: begin } : null;
    if (does === "map") this.mapTo(from.x, bounds);

    const move = (next: PointerEvent) => {
      const at = this.place(next);
      this.touches.set(next.pointerId, at.x);
      travelled ||= Math.abs(at.x - from.x) > 3;
      if (this.touches.size === 2) {
        if (!pinch) return;
        const [a, b] = [...this.touches.values()] as [number, number];
        this.show(zoomed(pinch.range, pinch.apart / Math.max(this.apart(), 8), this.timeAt((a + b) / 2, pinch.range), bounds));
      } else if (!travelled) return;
      else if (does === "move") {
        this.root!.classList.add("dragging");
        this.tip(null);
        this.show(moved(begin, ((from.x - at.x) / this.width) * (begin.end - begin.start), bounds));
      } else if (does === "mark") this.props.onMark?.(between(this.timeAt(from.x), this.timeAt(at.x), bounds));
      else this.mapTo(at.x, bounds);
    };
    const up = (last: PointerEvent) => {
      this.touches.delete(last.pointerId);
      canvas.removeEventListener("pointermove", move);
      canvas.removeEventListener("pointerup", up);
      canvas.removeEventListener("pointercancel", up);
      this.root?.classList.remove("dragging");
      if (!travelled && does === "move" && last.type === "pointerup") this.click(this.hit(this.place(last)));
    };
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
  }

  /** Follow the pointer at once. */
  private show(range: Range): void {
    this.target = this.shown = range;
    this.aim(range);
  }

  private mapTo(x: number, bounds: Range): void {
    const length = this.target!.end - this.target!.start;
    const middle = this.timeAt(x, bounds);
    this.show(within({ start: middle - length / 2, end: middle + length / 2 }, bounds));
  }

  private apart(): number {
    const [a = 0, b = 0] = [...this.touches.values()];
    return Math.abs(a - b);
  }

  private click(hit: Hit | null): void {
    if (hit?.kind === "slice") this.choose(hit);
    else if (hit?.kind === "gap") this.props.onCause?.(this.model!.document.names[hit.gap.cause[hit.at]!]!);
    else if (hit?.kind === "gaps") this.props.onCause?.(hit.shares[0]![0]);
    else this.props.onSelect?.(null);
  }

  private choose({ track: { row }, at }: DrawnSlice): void {
    const { names } = this.model!.document;
    this.props.onSelect?.({
      table: names[row.table[at]!]!, row: row.row[at]!, name: names[row.name[at]!]!, kind: names[row.kind[at]!]!,
      start: row.start[at]!, duration: row.duration[at]!,
    });
  }

  private double(event: MouseEvent): void {
    const { bounds } = this;
    const at = this.place(event);
    const hit = this.hit(at);
    if (!bounds || !this.shown) return;
    if (hit?.kind === "slice" || hit?.kind === "gap") {
      const row = hit.kind === "slice" ? hit.track.row : hit.gap;
      this.aim(framed({ start: row.start[hit.at]!, end: row.start[hit.at]! + row.duration[hit.at]! }, bounds));
      return;
    }
    const { steps } = this.model!.document;
    const step = firstTouching(steps, this.timeAt(at.x));
    if (step < steps.start.length && steps.start[step]! <= this.timeAt(at.x))
      this.aim(framed({ start: steps.start[step]!, end: steps.start[step]! + steps.duration[step]! }, bounds, 0.03));
  }

  private hover(event: PointerEvent): void {
    if (this.touches.size) return;
    this.pointer = { x: event.clientX, y: event.clientY };
    this.point(this.pointer);
  }

  private point({ x, y }: { x: number; y: number }): void {
    const hit = this.hit(this.place({ clientX: x, clientY: y }));
    this.tip(hit && this.model ? { x, y, text: tipOf(hit, this.model.document.names, this.causes, this.kinds) } : null);
  }

  private key(event: KeyboardEvent): void {
    const { bounds } = this;
    // Where nothing has the focus, all keys but arrows are the view's.
    const isNobodys = event.target === document.body || (event.target as Element).id === "main";
    if (event.target !== this.root && (!isNobodys || event.key.startsWith("Arrow"))) return;
    if (!bounds || !this.target || event.ctrlKey || event.metaKey || event.altKey) return;
    const x = this.pointer ? this.place({ clientX: this.pointer.x, clientY: this.pointer.y }).x : this.width / 2;
    const next = keyed(this.target, event.key, this.timeAt(x, this.target), bounds);
    if (next) this.aim(next);
    else if (event.key === "/") this.props.onSearch?.();
    else if (event.key.toLowerCase() === "f") this.focusChosen(bounds);
    else if (event.key.toLowerCase() === "m") this.mark();
    else if (event.key === "Escape") {
      this.props.onMark?.(null);
      this.props.onSelect?.(null);
    } else if (!this.step(event.key, bounds)) return;
    event.preventDefault();
  }

  private chosenSlice(): DrawnSlice | null {
    const { chosen } = this.props;
    return chosen && this.layout && this.model ? sliceIn(this.layout, this.model.document.names, chosen) : null;
  }

  /** Bring the row of a slice that was just chosen into sight. */
  private showChosen(): void {
    const { chosen } = this.props;
    const key = chosen ? `${chosen.table}:${chosen.row}` : "";
    if (key === this.seenChosen) return;
    const found = this.chosenSlice();
    // The lanes may not have their new height yet; then the next drawing brings it into sight.
    if (!key || (found && this.reveal(found.track))) this.seenChosen = key;
  }

  private reveal({ top, height }: Track): boolean {
    const scroll = this.root!.querySelector(".timeline-scroll")!;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top + height > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + height - scroll.clientHeight;
    return top >= scroll.scrollTop - 1 && top + height <= scroll.scrollTop + scroll.clientHeight + 1;
  }

  private focusChosen(bounds: Range): void {
    const found = this.chosenSlice();
    const range = found ? spanOf(found) : this.props.marked;
    if (range) this.aim(framed(range, bounds));
  }

  private mark(): void {
    const found = this.chosenSlice();
    if (found) this.props.onMark?.(spanOf(found));
    else if (this.target) this.props.onMark?.(this.props.marked ? null : this.target);
  }

  private step(key: string, bounds: Range): boolean {
    if (!key.startsWith("Arrow") || !this.layout || !this.shown) return false;
    const found = this.chosenSlice();
    const next = found ? neighbour(this.layout, found, key) : firstSlice(this.layout, this.shown.start);
    if (next && found) this.seen(next, bounds);
    else if (next) this.choose(next);
    return true;
  }

  private seen(slice: DrawnSlice, bounds: Range): void {
    this.choose(slice);
    const { start, end } = spanOf(slice);
    const shown = this.target!;
    const length = shown.end - shown.start;
    if (end < shown.start + 0.05 * length || start > shown.end - 0.05 * length) this.aim(moved(shown, (start + end) / 2 - (shown.start + shown.end) / 2, bounds));
    this.reveal(slice.track);
  }
}
