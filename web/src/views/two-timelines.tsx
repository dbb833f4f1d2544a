/** The typical step of two recordings on one scale, both from the step's start; they zoom and move together. */

import { useRef } from "preact/hooks";
import type { Parameters } from "../data";
import { useDocument } from "../document";
import type { Comparison, Compared } from "../documents";
import { duration, short } from "../format";
import { Failed } from "../parts/controls";
import { toggle } from "../parts/causes";
import { useRelated } from "../related";
import type { TableRow } from "../schema";
import { isRelated } from "../selection";
import { change, parameter, type Range } from "../state";
import { nearestStep } from "../steps";
import type { Controller } from "../timeline/controller";
import { Timeline } from "../timeline/timeline";

const HEIGHT = 252;
const BEYOND = 2; // steps before and after, as far as one can move
const ALONE: Parameters = {};

/** The step that is drawn: the one nearest to the mean of the side. */
interface Drawn {
  index: number | null; // null: a recording without steps, from its beginning
  start: number;
  length: number;
}

export function TwoTimelines({ comparison: { before, after }, other }: { comparison: Comparison; other: number }) {
  const of = useRef<Parameters>({ other }).current;
  const first = useDocument("steps");
  const second = useDocument("steps", of);
  const linked = useRef(new Set<Controller>()).current;
  const failed = first.error ?? second.error;
  if (failed !== undefined) return <Failed>{failed}</Failed>;
  if (!first.value || !second.value) return <div class="loading" style={{ minHeight: `${2 * HEIGHT + 60}px` }} role="status">Loading…</div>;
  const steps = [drawnOf(first.value, before), drawnOf(second.value, after)] as const;
  const longest = Math.max(...steps.map(({ length }) => length), 1);
  const shown = rangeIn(parameter("beside")) ?? { start: 0, end: longest };
  const side = (title: string, about: Compared, step: Drawn, from: Parameters, isFirst: boolean) => (
    <OneTimeline
      {...{ title, about, step, from, linked }}
      shown={shown}
      bounds={{ start: -BEYOND * longest, end: (1 + BEYOND) * longest }}
      onRange={
        isFirst ? (range) => change({ beside: range && (range.start || range.end !== longest) ? `${range.start}..${range.end}` : null }, true) : undefined
      }
    />
  );
  return (
    <div class="two-timelines">
      {side("Before", before, steps[0], ALONE, true)}
      {side("After", after, steps[1], of, false)}
      <p class="muted small">
        Both begin at their step’s start and have one scale; they zoom and move together: Ctrl and wheel, drag, or <kbd>W</kbd> <kbd>S</kbd> <kbd>A</kbd> <kbd>D</kbd>.
      </p>
    </div>
  );
}

interface OneProps {
  title: string;
  about: Compared;
  step: Drawn;
  from: Parameters;
  linked: Set<Controller>;
  shown: Range; // from the step's start, as the bounds
  bounds: Range;
  onRange?: (shown: Range | null) => void;
}

function OneTimeline({ title, about, step, from, linked, shown, bounds, onRange }: OneProps) {
  const related = useRelated();
  const at = (range: Range): Range => ({ start: step.start + range.start, end: step.start + range.end });
  return (
    <section aria-label={`${title}: ${short(about.name, 160)}`}>
      <div class="plot-head">
        <h3>{title}</h3>
        <span class="muted small">
          {step.index === null ? "from the beginning, without steps" : `step ${step.index}, ${duration(step.length)}: the nearest to the mean of ${duration(about.step_ns)}`}
        </span>
      </div>
      <div class="timeline-place">
        <Timeline
          compact
          {...at(shown)}
          height={HEIGHT}
          origin={step.start}
          bounds={at(bounds)}
          linked={linked}
          of={from}
          onCause={(cause) => toggle("cause", cause)}
          matchesCause={related && (related.cause ? (cause) => isRelated(related, "cause", cause) : null)}
          onRange={onRange && ((range) => onRange(range && { start: range.start - step.start, end: range.end - step.start }))}
        />
      </div>
    </section>
  );
}

function drawnOf(rows: readonly TableRow[], { step_ns }: Compared): Drawn {
  const steps = rows.map((row) => ({ index: Number(row.index), start_ns: Number(row.start_ns), duration_ns: Number(row.duration_ns), complete: row.complete === true }));
  const step = nearestStep(steps, step_ns);
  return step ? { index: step.index, start: step.start_ns, length: step.duration_ns } : { index: null, start: 0, length: step_ns };
}

function rangeIn(text: string | null): Range | null {
  const [start, end] = (text ?? "").split("..").map(Number);
  return start !== undefined && end !== undefined && end > start ? { start, end } : null;
}
