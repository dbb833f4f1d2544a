/** The timeline: lanes of slices on a canvas, for the whole view and, with `compact`, as a strip of the first screen. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useDocument } from "../document";
import { duration as durationText } from "../format";
import { theme } from "../theme";
import { AXIS, Controller, EMPTY, NOTHING, type TimelineProps } from "./controller";
import type { Arrangement, Layout } from "./model";
import "./timeline.css";

export function Timeline(props: TimelineProps) {
  const { compact = false } = props;
  const session = useDocument("session");
  const root = useRef<HTMLElement>(null);
  const view = useRef<Controller | null>(null);
  const [, redraw] = useState(0);
  const [tip, setTip] = useState<{ x: number; y: number; text: string[] } | null>(null);
  const [arrangement, arrange] = useState<Arrangement>({ folded: EMPTY, opened: EMPTY, pinned: NOTHING, room: compact ? (props.height ?? 280) - AXIS - 2 : null });

  const controller = (view.current ??= new Controller(() => redraw((n) => n + 1), setTip, props.of));
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
      {!model && <p class="timeline-state">{controller.windows.error ?? "Reading the timeline…"}</p>}
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

