/** A tree as an icicle on a canvas: modules, flame graphs. Keyboard: arrows move, Enter looks closer, Escape further away. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { share, short } from "../format";
import { theme } from "../theme";
import { Hover, type Spot } from "./hover";
import { useWidth } from "./size";
import { ancestors, laidOut, neighbour, type Layout, type Node } from "./tree";
import "./icicle.css";

const ROW = 20;
const FONT = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

export interface IcicleProps {
  nodes: readonly Node[];
  label: string; // what this is, for those who do not see it
  show: (value: number) => string; // values are times, mostly
  focus: number; // the node that is as wide as the picture, -1 for all
  onFocus: (node: number) => void;
  found?: ReadonlySet<number> | null; // the others are pale
  isChosen?: (node: number) => boolean;
  onChoose?: (node: number) => void; // on a click, before it looks closer
  details?: (node: number) => string; // further lines of the tooltip
  heat?: (node: number) => number; // 0 to 1, instead of a colour by kind
}

export function Icicle(props: IcicleProps) {
  const { nodes, label, show, focus, onFocus, found = null, isChosen, onChoose, details } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const [box, width] = useWidth();
  const [active, setActive] = useState(-1); // what the keyboard or the pointer is at
  const [spot, setSpot] = useState<Spot | null>(null);
  const layout = useMemo(() => laidOut(nodes, focus, 0.5 / Math.max(width, 1)), [nodes, focus, width]);
  const now = theme.value;
  useEffect(() => {
    const frame = requestAnimationFrame(() => canvas.current && draw(canvas.current, layout, props, active, width));
    return () => cancelAnimationFrame(frame);
  }, [layout, found, active, width, now, isChosen]);
  const words = (node: number) =>
    `${short(nodes[node]!.name, 400)}\n${show(nodes[node]!.value)}, ${share(nodes[node]!.value / (layout.whole || 1))}${details ? `\n${details(node)}` : ""}`;
  const at = (event: PointerEvent | MouseEvent) => {
    const place = canvas.current!.getBoundingClientRect();
    const x = (event.clientX - place.left) / place.width;
    const row = Math.floor((event.clientY - place.top) / ROW);
    return layout.boxes.find((each) => each.row === row && x >= each.left && x < each.left + each.width)?.node ?? -1;
  };
  const press = (node: number) => {
    if (node < 0) return;
    onChoose?.(node);
    onFocus(node === focus ? nodes[node]!.parent : node);
  };
  const key = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") press(active);
    else if (event.key === "Escape") {
      if (focus < 0) return;
      onFocus(nodes[focus]!.parent);
    } else if (["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
      setSpot(null);
      setActive(neighbour(layout, nodes, active < 0 ? (layout.boxes[0]?.node ?? -1) : active, event.key));
    } else return;
    event.preventDefault();
  };
  const way = ancestors(nodes, focus).reverse();
  return (
    <div class="icicle" ref={box}>
      <nav class="way" aria-label="Around what is shown">
        <button type="button" class="link" disabled={focus < 0} onClick={() => onFocus(-1)}>
          All
        </button>
        {way.map((node) => (
          <>
            <span aria-hidden="true">›</span>
            <button type="button" class="link" disabled={node === focus} onClick={() => onFocus(node)}>
              {short(nodes[node]!.name, 60)}
            </button>
          </>
        ))}
      </nav>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="application"
        aria-roledescription="icicle"
        aria-label={`${label}. Arrows move, Enter looks closer, Escape further away.`}
        style={{ height: `${layout.rows * ROW}px` }}
        onPointerMove={(event) => {
          setSpot({ x: event.clientX, y: event.clientY });
          setActive(at(event));
        }}
        onPointerLeave={() => {
          setSpot(null);
          setActive(-1);
        }}
        onClick={(event) => press(at(event))}
        onKeyDown={key}
        onFocus={() => active < 0 && setActive(focus >= 0 ? focus : (layout.boxes[0]?.node ?? -1))}
      />
      <Hover at={spot} text={active >= 0 ? words(active) : ""} />
      <p class="said" aria-live="polite">
        {spot || active < 0 ? "" : words(active).replaceAll("\n", " · ")}
      </p>
    </div>
  );
}

function draw(canvas: HTMLCanvasElement, layout: Layout, props: IcicleProps, active: number, width: number): void {
  const { nodes, found = null, isChosen, heat } = props;
  const ratio = devicePixelRatio || 1;
  const height = layout.rows * ROW;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  if (!context) return;
  const style = getComputedStyle(canvas);
  const token = (name: string) => style.getPropertyValue(name).trim();
  const fills = [0, 1, 2, 3].map((kind) => token(`--kind-${kind}`));
  const [ink, accent, cool, hot] = [token("--box-ink"), token("--accent"), token("--kind-3"), token("--heat")];
  context.scale(ratio, ratio);
  context.font = FONT;
  context.textBaseline = "middle";
  const letter = context.measureText("m").width;
  for (const { node, left, width: part, row, isAround } of layout.boxes) {
    const x = left * width;
    const wide = Math.max(part * width - (part * width > 3 ? 1 : 0), 0.5);
    const y = row * ROW;
    context.globalAlpha = found && !found.has(node) ? 0.28 : isAround ? 0.6 : 1;
    context.fillStyle = heat ? cool : fills[nodes[node]!.kind]!;
    context.fillRect(x, y, wide, ROW - 1);
    if (heat) {
      context.fillStyle = `rgb(${hot} / ${(0.75 * heat(node)).toFixed(3)})`;
      context.fillRect(x, y, wide, ROW - 1);
    }
    const room = Math.floor((wide - 8) / letter);
    if (room >= 2) {
      const text = beginning(nodes[node]!.name, room);
      context.fillStyle = ink;
      context.fillText(text, x + 4, y + ROW / 2);
    }
    context.globalAlpha = 1;
    if (node === active || isChosen?.(node)) {
      context.strokeStyle = node === active ? ink : accent;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, Math.max(wide - 2, 1), ROW - 3);
    }
  }
}

/** As much of a name as fits; of a path, its end: "gpt.py:12 forward". */
export function beginning(name: string, room: number): string {
  const path = /^(.*\/)([^/]+:\d+ .*)$/s.exec(name.slice(0, 2000));
  const text = path && name.length > room ? path[2]! : name;
  return text.length <= room ? text : `${text.slice(0, room - 1)}…`;
}
