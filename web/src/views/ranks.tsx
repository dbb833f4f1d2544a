/** All ranks of a job over its steps: where each loses time, and which one the others wait for. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, duration, sentence, share, short } from "../format";
import { useDocument } from "../document";
import type { Ranks as Document } from "../documents";
import type { Session } from "../schema";
import { causeOf } from "../parts/causes";
import { Code, Empty, Shown } from "../parts/controls";
import { Hover, type Spot } from "../parts/hover";
import { useWidth } from "../parts/size";
import { Table, type Column } from "../parts/table";
import { change, parameter } from "../state";
import { theme } from "../theme";
import { isToCome, usePolled } from "../polled";
import { Exchanges } from "./exchanges";
import { binned, cellOf, extent, firstOf, mean } from "./heat";
import "../parts/further.css";
import "./findings.css";
import "./ranks.css";

const FEW = 3;
const MOST_NAMED = 100;
const MANY = 32; // ranks; of more the slowest come first in the table
const TALLEST = 620;
const ROW = 22;
const LABELS = 76;
const WIDEST = 120; // cell

export function Ranks() {
  const cause = parameter("ranks-cause");
  const step = parameter("ranks-step");
  const ranks = usePolled("ranks", { ...(cause ? { cause } : {}), ...(step ? { step } : {}) }, isToCome);
  return (
    <Shown of={ranks} height={640}>
      {(document) => <All document={document} isOld={ranks.isOld} />}
    </Shown>
  );
}

/** Look at one rank: every view is then of it. */
const openRank = (document: Document, place: number) => {
  const { rank, path } = document.ranks[place]!;
  change({ rank: rank === null ? path : String(rank), view: "overview", range: null, choose: null });
};

/** The findings about the ranks together, each with its change. */
export function JobFindings({ document: { findings, ranks } }: { document: Document }) {
  const step = Math.max(...ranks.map(({ step_ns }) => step_ns ?? 0));
  return (
    <>
      {findings.map((finding) => (
        <article class={`finding ${finding.severity}`} aria-label={finding.rule}>
          <header>
            <h3>{sentence(short(finding.title, 600))}</h3>
            {finding.saving_ns_per_step > 0 && (
              <span>
                <span class="gain">
                  {duration(finding.saving_share * step)} <span class="part">{share(finding.saving_share)}</span>
                </span>
                <span class="muted small"> of the job's step</span>
              </span>
            )}
          </header>
          <p>{finding.remedy.text}</p>
          {finding.remedy.code && <Code text={finding.remedy.code} />}
          <p class="muted small">
            Confidence {finding.confidence}; {finding.saving_basis}.
          </p>
        </article>
      ))}
    </>
  );
}

/** Where the finding is that saves the job most, once that is known. */
export function Best({ document }: { document: Document }) {
  const { ranks, saves_ns } = document;
  if (saves_ns === null) return null;
  const most = Math.max(...saves_ns);
  const place = saves_ns.indexOf(most);
  if (most <= 0) return null;
  return (
    <>
      Of the ranks' own findings, one of{" "}
      <button type="button" class="link" onClick={() => openRank(document, place)}>
        {short(ranks[place]!.name, 60)}
      </button>{" "}
      saves the job most: {duration(most)} a step.
    </>
  );
}

const FIGURES: Record<string, string> = { late: "arrival after the first rank", step: "step time" };
const labelOf = (session: Session | undefined, figure: string) => FIGURES[figure] ?? causeOf(session, figure).label;

/** What a cell of strong colour means. */
function strength(cause: string, word: string): string {
  if (cause === "late") return "Strong colour: the rank comes later to the step's collectives than the first one.";
  if (cause === "step") return "Strong colour: a longer step.";
  return `Strong colour: the rank loses more time to ${word}${cause === "communication" ? ", waiting for others: those ranks are not the slow ones" : ""}.`;
}

function All({ document, isOld }: { document: Document; isOld: boolean }) {
  const session = useDocument("session").value;
  const { ranks, steps, causes, cause, sentences, unreadable, read, of } = document;
  const word = labelOf(session, cause);
  const opened = parameter("rank");
  const isReading = read < of;
  return (
    <div class="stack" aria-busy={isOld}>
      <div class="toolbar">
        <h2>Ranks</h2>
        <select aria-label="Figure" value={cause} onChange={(event) => change({ "ranks-cause": event.currentTarget.value })}>
          {causes.map((each) => (
            <option value={each}>{labelOf(session, each)}</option>
          ))}
        </select>
        <span class="muted small">
          {count(ranks.length)} ranks, {steps.length === 1 ? "1 step" : `${count(steps.length)} steps`}. Click a rank to open it.
        </span>
        {opened !== null && (
          <button type="button" onClick={() => change({ rank: null })}>
            Close rank {opened}
          </button>
        )}
      </div>
      {isReading && (
        <p class="small muted reading" role="status">
          <progress value={read} max={of} aria-label="Ranks that were read" />
          {count(read)} of {count(of)} ranks are read; the others follow.
        </p>
      )}
      <JobFindings document={document} />
      {sentences.map((text) => (
        <p>{sentence(text)}</p>
      ))}
      <p>
        <Best document={document} />
      </p>
      {unreadable.length > 0 && (
        <details class="missing" open={unreadable.length <= FEW}>
          <summary>{unreadable.length === 1 ? "1 trace is not among them: it cannot be read" : `${count(unreadable.length)} traces are not among them: they cannot be read`}</summary>
          <ul>
            {unreadable.slice(0, MOST_NAMED).map((text) => (
              <li class="small">{short(text, 300)}</li>
            ))}
          </ul>
        </details>
      )}
      {steps.length > 0 && <Heat document={document} word={word} onOpen={(place) => openRank(document, place)} />}
      {!steps.length && !isReading && <Empty title="No complete steps were found.">The heat map needs steps that are marked or repeat; a rank opens from the table.</Empty>}
      {ranks.length > 0 && <RankTable document={document} word={word} />}
      <Exchanges document={document} />
    </div>
  );
}

interface Cell {
  rank: number; // places
  step: number;
}

function Heat({ document, word, onOpen }: { document: Document; word: string; onOpen: (place: number) => void }) {
  const { ranks, steps, ns, slowest, cause } = document;
  const [box, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [active, setActive] = useState<Cell | null>(null);
  const [spot, setSpot] = useState<Spot | null>(null);
  const height = Math.min(ranks.length * ROW, TALLEST);
  const across = Math.max(Math.min(width - LABELS, steps.length * WIDEST), 10);
  const cells = useMemo(() => binned(ns, height, across), [ns, height, across]);
  const [low, high] = useMemo(() => extent(ns), [ns]);
  const now = theme.value;
  const words = ({ rank, step }: Cell) => {
    const value = ns[rank]![step];
    const text = [`${ranks[rank]!.name}, step ${steps[step]}`, `${word}: ${value == null ? "unknown" : duration(value)}`];
    if (slowest[step] === rank) text.push("slowest of this step: the others wait for it");
    return text.join("\n");
  };
  useEffect(() => {
    const frame = requestAnimationFrame(() => canvas.current && paint(canvas.current));
    return () => cancelAnimationFrame(frame);
  }, [cells, active, now, width, low, high]);

  function paint(element: HTMLCanvasElement): void {
    const ratio = devicePixelRatio || 1;
    element.width = Math.round(width * ratio);
    element.height = Math.round((height + 22) * ratio);
    const context = element.getContext("2d");
    if (!context) return;
    const style = getComputedStyle(element);
    const token = (name: string) => style.getPropertyValue(name).trim();
    const heat = token("--heat");
    context.scale(ratio, ratio);
    const [wide, tall] = [across / cells.columns, height / cells.rows];
    const gap = wide > 6 && tall > 6 ? 1 : 0;
    for (let row = 0; row < cells.rows; row++) {
      for (let column = 0; column < cells.columns; column++) {
        const value = cells.value[row * cells.columns + column]!;
        const [x, y] = [LABELS + column * wide, row * tall];
        context.fillStyle = token("--soft");
        context.fillRect(x, y, Math.max(wide - gap, 0.5), Math.max(tall - gap, 0.5));
        if (Number.isNaN(value)) continue;
        context.fillStyle = `rgb(${heat} / ${(0.04 + 0.96 * ((value - low) / (high - low || 1))).toFixed(3)})`;
        context.fillRect(x, y, Math.max(wide - gap, 0.5), Math.max(tall - gap, 0.5));
      }
    }
    slowest.forEach((rank, step) => {
      if (rank === null) return;
      const x = LABELS + (cellOf(step, steps.length, cells.columns) + 0.5) * wide - gap / 2;
      const y = (cellOf(rank, ranks.length, cells.rows) + 0.5) * tall - gap / 2;
      const size = Math.min(Math.max(Math.min(wide, tall) / 4, 3.5), 6);
      context.beginPath();
      context.moveTo(x, y - size);
      context.lineTo(x + size, y);
      context.lineTo(x, y + size);
      context.lineTo(x - size, y);
      context.closePath();
      context.lineWidth = 2.5;
      context.strokeStyle = token("--page");
      context.stroke();
      context.fillStyle = token("--accent");
      context.fill();
    });
    context.fillStyle = token("--muted");
    context.font = `11px ${token("--sans")}`;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(16 / tall));
    for (let row = 0, below = 0; row < cells.rows; row += every) {
      const y = Math.max((row + 0.5) * tall, 6);
      if (y < below) continue;
      context.fillText(short(ranks[firstOf(row, ranks.length, cells.rows)]!.name.split("/").at(-1)!, 12), 0, y);
      below = y + 12;
    }
    context.textBaseline = "top";
    const apart = Math.max(1, Math.ceil(56 / wide));
    for (let column = 0; column < cells.columns; column += apart) {
      context.fillText(`${steps[firstOf(column, steps.length, cells.columns)]}`, LABELS + column * wide, height + 6);
    }
    if (active) {
      context.strokeStyle = token("--ink");
      context.lineWidth = 2;
      const [x, y] = [LABELS + cellOf(active.step, steps.length, cells.columns) * wide, cellOf(active.rank, ranks.length, cells.rows) * tall];
      context.strokeRect(x, y, Math.max(wide - gap, 3), Math.max(tall - gap, 3));
    }
  }

  /** The cell under the pointer: of several ranks or steps in one cell, the one with the largest figure. */
  const at = (event: MouseEvent): Cell | null => {
    const place = canvas.current!.getBoundingClientRect();
    const [x, y] = [event.clientX - place.left - LABELS, event.clientY - place.top];
    if (y < 0 || y >= height || x >= across) return null;
    const row = Math.floor((y * cells.rows) / height);
    const column = Math.max(Math.floor((x * cells.columns) / across), 0);
    let best: Cell | null = null;
    for (let rank = firstOf(row, ranks.length, cells.rows); rank < ranks.length && cellOf(rank, ranks.length, cells.rows) === row; rank++) {
      for (let step = firstOf(column, steps.length, cells.columns); step < steps.length && cellOf(step, steps.length, cells.columns) === column; step++) {
        if (!best || (ns[rank]![step] ?? -1) > (ns[best.rank]![best.step] ?? -1)) best = { rank, step };
      }
    }
    return best;
  };
  const key = (event: KeyboardEvent) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0] }[event.key];
    const here = active ?? { rank: 0, step: 0 };
    if (event.key === "Enter" && active) onOpen(active.rank);
    else if (move) {
      const bounded = (value: number, most: number) => Math.min(Math.max(value, 0), most);
      setActive(active ? { rank: bounded(here.rank + move[0]!, ranks.length - 1), step: bounded(here.step + move[1]!, steps.length - 1) } : here);
    } else return;
    setSpot(null);
    event.preventDefault();
  };
  return (
    <div class="heat" ref={box}>
      <p class="scale-of small muted">
        <span>
          {duration(low)} <span class="ramp" aria-hidden="true" /> {duration(high)}
        </span>
        <span>{strength(cause, word)}</span>
        <span>
          <span class="diamond" aria-hidden="true">◆</span> The slowest rank of a step: the others wait for it.
        </span>
      </p>
      <canvas
        ref={canvas}
        style={{ height: `${height + 22}px` }}
        tabIndex={0}
        role="application"
        aria-roledescription="heat map"
        aria-label={`${word} of ${count(ranks.length)} ranks over ${count(steps.length)} steps. Arrows move, Enter opens the rank.`}
        onKeyDown={key}
        onBlur={() => setActive(null)}
        onPointerMove={(event) => {
          const found = at(event);
          setActive(found);
          setSpot(found && { x: event.clientX, y: event.clientY });
        }}
        onPointerLeave={() => {
          setActive(null);
          setSpot(null);
        }}
        onClick={(event) => {
          const found = at(event);
          if (found) onOpen(found.rank);
        }}
      />
      <Hover at={spot} text={active ? words(active) : ""} />
      <p class="hidden-text" aria-live="polite">
        {!spot && active ? words(active).replaceAll("\n", ", ") : ""}
      </p>
    </div>
  );
}

interface RankRow {
  place: number;
  name: string;
  step_ns: number | null;
  figure_ns: number | null;
  most_ns: number | null;
  slowest: number;
}

function RankTable({ document, word }: { document: Document; word: string }) {
  const { ranks, ns, slowest, cause } = document;
  const rows = useMemo(
    () =>
      ranks.map(({ name, step_ns }, place): RankRow => {
        const known = ns[place]!.filter((each) => each !== null);
        return { place, name, step_ns, figure_ns: mean(ns[place]!), most_ns: known.length ? Math.max(...known) : null, slowest: slowest.filter((each) => each === place).length };
      }),
    [document],
  );
  const most = Math.max(...rows.map((row) => row.figure_ns ?? 0), 1);
  const columns: Column<RankRow>[] = [
    { name: "name", title: "Rank", value: (row) => row.name },
    { name: "step_ns", title: "Step", value: (row) => row.step_ns, isNumber: true, width: 110 },
    ...(cause !== "step" ? [{ name: "figure_ns", title: cause === "late" ? "Comes later" : word, value: (row: RankRow) => row.figure_ns, meter: (row: RankRow) => (row.figure_ns ?? 0) / most, isNumber: true, width: 150, tip: "Mean over the steps" }] : []),
    { name: "most_ns", title: "At most", value: (row) => row.most_ns, isNumber: true, width: 110, tip: "In its worst step" },
    { name: "slowest", title: "◆ Slowest", value: (row) => row.slowest, isNumber: true, width: 120, tip: "Steps in which the others wait for this rank" },
  ];
  return <Table name="ranks" label="ranks" columns={columns} rows={rows} sort={ranks.length > MANY ? "-slowest" : "place"} onChoose={(row) => openRank(document, row.place)} />;
}
