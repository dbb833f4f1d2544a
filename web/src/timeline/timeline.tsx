/** The timeline: lanes of slices on a canvas, for the whole view and, with `compact`, as a strip of the first screen. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Parameters } from "../data";
import { useDocument } from "../document";
import { duration as durationText, moment, share, size } from "../format";
import type { Cause } from "../schema";
import type { Range } from "../state";
import { theme } from "../theme";
import { type Arrow, type Colours, Painter, type Scene } from "./draw";
import { firstTouching } from "./detail";
import { type Hit, hitAt } from "./hit";
import { type Arrangement, type Layout, layoutOf, type Model, type Track } from "./model";
import { approach, framed, keyed, moved, within, zoomed } from "./moves";
import "./timeline.css";
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
}

const NOTHING: readonly never[] = [];
const AXIS = 34;
const MINIMAP = 22;
const EMPTY: ReadonlySet<string> = new Set();

export function Timeline(props: TimelineProps) {
  const { compact = false } = props;
  const session = useDocument("session");
  const root = useRef<HTMLElement>(null);
  const view = useRef<Controller | null>(null);
  const [, redraw] = useState(0);
  const [tip, setTip] = useState<{ x: number; y: number; text: string[] } | null>(null);
  const [arrangement, arrange] = useState<Arrangement>({ folded: EMPTY, opened: EMPTY, pinned: NOTHING, room: compact ? (props.height ?? 280) - AXIS - 2 : null });

  const controller = (view.current ??= new Controller(() => redraw((n) => n + 1), setTip));
  controller.props = props;
  controller.arrangement = arrangement;
  controller.causes = session.value?.causes ?? {};
  controller.kinds = session.value?.kinds ?? {};
  controller.askWith({ ...(props.path ? { path: 1 } : {}), ...(props.mark ? { mark: props.mark } : {}) });

  useLayoutEffect(() => {
    controller.attach(root.current!);
    return () => controller.detach();
  }, []);
  // A range from outside, such as a finding's, is gone to; one that comes from here is already shown.
  useEffect(() => {
    if (props.start !== undefined && props.end !== undefined) controller.goTo({ start: props.start, end: props.end });
    else controller.goTo(null);
  }, [props.start, props.end]);
  const colour = theme.value;
  useEffect(() => controller.recolour(), [colour]);
  useEffect(() => controller.draw());

  const layout = controller.layout;
  const model = controller.model;
  const height = layout?.height ?? (props.height ?? 300) - AXIS - 2;
  const toggle = (id: string, folded: boolean) =>
    arrange((now) => {
      const next = { ...now, folded: new Set(now.folded), opened: new Set(now.opened) };
      (folded ? next.opened : next.folded).add(id);
      (folded ? next.folded : next.opened).delete(id);
      return next;
    });
  const pin = (id: string) =>
    arrange((now) => ({ ...now, pinned: now.pinned.includes(id) ? now.pinned.filter((each) => each !== id) : [...now.pinned, id] }));

  return (
    <section
      ref={root}
      class={compact ? "timeline compact" : "timeline"}
      tabIndex={0}
      aria-label={`Timeline, ${controller.said()}. W and S zoom, A and D move, F shows the chosen slice, arrow keys choose slices, M measures, slash searches.`}
    >
      <div class="timeline-corner" aria-live="off">
        <span class="timeline-length">{controller.shown ? durationText(controller.shown.end - controller.shown.start) : ""}</span>
      </div>
      <div class="timeline-top">
        {!compact && <canvas class="timeline-minimap" aria-hidden="true" />}
        <canvas class="timeline-axis" aria-hidden="true" />
      </div>
      <div class="timeline-scroll" style={props.height ? { maxHeight: `${props.height - AXIS - 2}px` } : {}}>
        <div class="timeline-body" style={{ height: `${height}px` }}>
          <div class="timeline-labels">
            {layout?.headings.map((each) => (
              <div key={each.id} class="timeline-lane" style={{ top: `${each.top}px`, height: `${each.height}px` }} title={titleOf(each)}>
                {each.folds && !compact ? (
                  <button type="button" aria-expanded={!each.folded} aria-label={`rows of ${each.label}`} onClick={() => toggle(each.id, each.folded)}>
                    {each.folded ? "▸" : "▾"}
                  </button>
                ) : (
                  !compact && <span style={{ width: "16px", flex: "none" }} />
                )}
                <span class="name">{each.label}</span>
                {!compact && (
                  <button type="button" class="pin" aria-pressed={each.pinned} aria-label={`pin ${each.label}`} onClick={() => pin(each.id)}>
                    ⌃
                  </button>
                )}
              </div>
            ))}
          </div>
          <canvas class="timeline-lanes" role="img" aria-label={`Slices, ${controller.said()}`} />
        </div>
      </div>
      {!model && <p class="timeline-state">{controller.error ?? "Reading the timeline…"}</p>}
      {tip && <Tip {...tip} />}
    </section>
  );
}

function Tip({ x, y, text }: { x: number; y: number; text: string[] }) {
  const [first, ...rest] = text;
  const right = x > innerWidth / 2;
  const place = right ? { right: `${innerWidth - x + 12}px` } : { left: `${x + 14}px` };
  const low = y > innerHeight - 140;
  return (
    <div class="timeline-tip" role="tooltip" style={{ ...place, ...(low ? { bottom: `${innerHeight - y + 12}px` } : { top: `${y + 16}px` }) }}>
      <b>{first}</b>
      {rest.map((line) => `\n${line}`)}
    </div>
  );
}

const titleOf = ({ label, around }: Layout["headings"][number]) => (around.length ? `${label}\ninside ${around.join("\n  ")}` : label);

/** What happens between the pointer, the keyboard, the windows and the canvases. */
class Controller {
  props: TimelineProps = {};
  arrangement: Arrangement = { folded: EMPTY, opened: EMPTY, pinned: NOTHING, room: null };
  causes: Record<string, Cause> = {};
  kinds: Record<string, Cause> = {};
  layout: Layout | null = null;
  model: Model | null = null;
  shown: Range | null = null;
  private target: Range | null = null;
  private pending: Range | null = null;
  private readonly windows: Windows;
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
  ) {
    this.windows = new Windows(() => this.arrived());
  }

  /** Parameters of the windows to ask for. */
  askWith(extra: Parameters): void {
    if (this.windows.askWith(extra) && this.width) this.windows.need(this.target, this.width);
  }

  get error(): string | null {
    return this.windows.error;
  }

  said(): string {
    if (!this.shown || !this.model) return "not yet read";
    return `${durationText(this.shown.end - this.shown.start)} from ${moment(this.shown.start)}, ${this.model.document.lanes.length} lanes`;
  }

  attach(root: HTMLElement): void {
    this.root = root;
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
    const { bounds } = this.windows;
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
    this.target = range;
    this.windows.need(range, this.width);
    if (!this.shown || matchMedia("(prefers-reduced-motion: reduce)").matches) this.shown = range;
    this.last = performance.now();
    this.draw();
    clearTimeout(this.resting);
    if (!quiet) this.resting = window.setTimeout(() => this.rest(), 350);
  }

  private rest(): void {
    const { target, windows } = this;
    if (!target || !windows.bounds) return;
    const isWhole = target.start <= windows.bounds.start && target.end >= windows.bounds.end;
    this.reported = isWhole ? null : { start: Math.floor(target.start), end: Math.ceil(target.end) };
    this.props.onRange?.(this.reported);
  }

  private arrived(): void {
    const { bounds } = this.windows;
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
      matches: matches ?? null, matchesCause: matchesCause ?? null,
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
    const { bounds } = this.windows;
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
    const { bounds } = this.windows;
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
      } else if (does === "mark") this.props.onMark?.(ordered(this.timeAt(from.x), this.timeAt(at.x), bounds));
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
    this.shown = range;
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
    if (hit?.kind === "slice") this.choose(hit.track, hit.at);
    else if (hit?.kind === "gap") this.props.onCause?.(this.model!.document.names[hit.gap.cause[hit.at]!]!);
    else if (hit?.kind === "gaps") this.props.onCause?.(hit.shares[0]![0]);
    else this.props.onSelect?.(null);
  }

  private choose({ row }: Track & { kind: "row" }, at: number): void {
    const { names } = this.model!.document;
    this.props.onSelect?.({
      table: names[row.table[at]!]!, row: row.row[at]!, name: names[row.name[at]!]!, kind: names[row.kind[at]!]!,
      start: row.start[at]!, duration: row.duration[at]!,
    });
  }

  private double(event: MouseEvent): void {
    const { bounds } = this.windows;
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
    this.tip(hit && this.model ? { x, y, text: this.told(hit, this.model.document.names) } : null);
  }

  private told(hit: Hit, names: string[]): string[] {
    switch (hit.kind) {
      case "slice": {
        const { row, of } = hit.track;
        const [start, length] = [row.start[hit.at]!, row.duration[hit.at]!];
        const kind = names[row.kind[hit.at]!]!;
        const { label } = this.kinds[kind] ?? this.causes[kind] ?? { label: kind.replaceAll("_", " ") };
        return [names[row.name[hit.at]!] || label, `${durationText(length)} · ${label || kind}`, `${of.label}, from ${moment(start)}`];
      }
      case "busy":
        return [`${share(hit.share)} busy`, "many slices narrower than a pixel; zoom in to see them"];
      case "gap": {
        const { gap, at } = hit;
        const cause = names[gap.cause[at]!]!;
        const told = this.causes[cause];
        const trigger = gap.trigger[at]! >= 0 ? [`after ${names[gap.trigger[at]!]} drained the queue`] : [];
        const what = gap.device ? "idle" : "";
        return [`${what} ${durationText(gap.duration[at]!)}: ${told?.label ?? cause}`.trim(), ...(told?.meaning ? [told.meaning] : []), ...trigger];
      }
      case "gaps": {
        const idle = hit.shares.reduce((sum, [, each]) => sum + each, 0);
        return [`${share(Math.min(idle, 1))} ${hit.gap.device ? "idle" : "by cause"}`, ...hit.shares.map(([cause, each]) => `${this.causes[cause]?.label ?? cause} ${share(each)}`)];
      }
      case "value": {
        const { values, of } = hit.track;
        return [values.unit === "bytes" ? size(hit.value) : String(hit.value), of.label];
      }
    }
  }

  private key(event: KeyboardEvent): void {
    const { bounds } = this.windows;
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

  /** The chosen slice as it is drawn. */
  private chosenSlice(): { track: Track & { kind: "row" }; at: number } | null {
    const { chosen } = this.props;
    if (!chosen || !this.layout || !this.model) return null;
    const { names } = this.model.document;
    for (const track of this.layout.tracks) {
      if (track.kind !== "row") continue;
      const { row } = track.row;
      const at = row.findIndex((each, place) => each === chosen.row && names[track.row.table[place]!] === chosen.table);
      if (at >= 0) return { track, at };
    }
    return null;
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

  /** Left and right choose the next slice of a row, up and down that of another row at the same time. */
  private step(key: string, bounds: Range): boolean {
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[key];
    if ((!sideways && !down) || !this.layout) return false;
    const found = this.chosenSlice();
    const rows = this.layout.tracks.filter((track) => track.kind === "row");
    if (!found) {
      const first = rows.find(({ row }) => firstTouching(row, this.shown!.start) < row.start.length);
      if (first) this.choose(first, firstTouching(first.row, this.shown!.start));
      return true;
    }
    if (sideways) {
      const at = found.at + sideways;
      if (at >= 0 && at < found.track.row.start.length) this.seen(found.track, at, bounds);
      return true;
    }
    const span = spanOf(found);
    for (let place = rows.indexOf(found.track) + down!; place >= 0 && place < rows.length; place += down!) {
      const { row } = rows[place]!;
      const at = firstTouching(row, (span.start + span.end) / 2);
      if (at < row.start.length && row.start[at]! < span.end) {
        this.seen(rows[place]!, at, bounds);
        break;
      }
    }
    return true;
  }

  private seen(track: Track & { kind: "row" }, at: number, bounds: Range): void {
    this.choose(track, at);
    const { start, end } = spanOf({ track, at });
    const shown = this.target!;
    const length = shown.end - shown.start;
    if (end < shown.start + 0.05 * length || start > shown.end - 0.05 * length) this.aim(moved(shown, (start + end) / 2 - (shown.start + shown.end) / 2, bounds));
    this.reveal(track);
  }
}

const spanOf = ({ track, at }: { track: Track & { kind: "row" }; at: number }): Range => ({
  start: track.row.start[at]!,
  end: track.row.start[at]! + track.row.duration[at]!,
});

function ordered(a: number, b: number, bounds: Range): Range {
  const clip = (time: number) => Math.round(Math.min(Math.max(time, bounds.start), bounds.end));
  const [start, end] = [clip(Math.min(a, b)), clip(Math.max(a, b))];
  return { start, end: Math.max(end, start + 1) };
}
