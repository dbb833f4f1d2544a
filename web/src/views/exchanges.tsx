/** What ranks exchange: one step's exchanges across them, on one clock, and all of them by kind, size and group. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { DrawnStep, Exchange, Ranks } from "../documents";
import { isFile } from "../data";
import { count, duration, short, size } from "../format";
import { Hover, type Spot } from "../parts/hover";
import { useWidth } from "../parts/size";
import { Table, type Column } from "../parts/table";
import { change } from "../state";
import { theme } from "../theme";

const TALLEST = 480;
const ROW = 18;
const LABELS = 76;
const AXIS = 20;

export function Exchanges({ document }: { document: Ranks }) {
  const { exchanges, drawn, steps, clocks } = document;
  if (!exchanges.length) return null;
  return (
    <section class="stack exchanges">
      <h3>What ranks exchange</h3>
      {drawn && (
        <>
          <p class="scale-of small muted">
            {isFile || steps.length < 2 ? (
              <span>Step {drawn.step}</span>
            ) : (
              <label>
                Step{" "}
                <select value={drawn.step} onChange={(event) => change({ "ranks-step": event.currentTarget.value })}>
                  {steps.map((each) => (
                    <option value={each}>{each}</option>
                  ))}
                </select>
              </label>
            )}
            <span>
              <span class="waiting" aria-hidden="true" /> waiting for the last rank
            </span>
            <span>
              <span class="transfer" aria-hidden="true" /> transfer
            </span>
            {drawn.left_out > 0 && <span>{count(drawn.left_out)} later exchanges are not drawn</span>}
          </p>
          <Across document={document} drawn={drawn} />
        </>
      )}
      <Table name="exchanges" label="exchanges" columns={COLUMNS} rows={exchanges} sort="-wait_ns" />
      <p class="small muted">{clocks}</p>
    </section>
  );
}

const COLUMNS: Column<Exchange>[] = [
  { name: "kind", title: "Exchange", value: (row) => nameOf(row.kind) },
  { name: "bytes", title: "Message", value: (row) => row.bytes, isNumber: true, width: 110, spare: 2, tip: "Of one rank; of an all-gather, of all ranks" },
  { name: "group", title: "Group", value: (row) => row.group, width: 130, spare: 3, tip: "What the program calls it" },
  { name: "parallel", title: "Parallel", value: (row) => row.parallel, width: 110, spare: 3, tip: "What the groups are for, where names or exchanges tell" },
  { name: "ranks", title: "Ranks", value: (row) => row.ranks, isNumber: true, width: 80, spare: 2, tip: "In a group" },
  { name: "groups", title: "Groups", value: (row) => row.groups, isNumber: true, width: 80, spare: 4, tip: "Of so many ranks, that exchange this" },
  { name: "per_step", title: "A step", value: (row) => row.per_step, isNumber: true, width: 90 },
  { name: "wait_ns", title: "Waiting", value: (row) => row.wait_ns, isNumber: true, width: 120, tip: "For the last rank, a step, in the mean of the ranks" },
  { name: "transfer_ns", title: "Transfer", value: (row) => row.transfer_ns, isNumber: true, width: 120, tip: "From the last rank's arrival to the end, a step" },
  { name: "bus_gb_per_s", title: "Bus GB/s", value: (row) => row.bus_gb_per_s, isNumber: true, width: 100, spare: 1, tip: "On each link during transfers, as nccl-tests counts" },
  { name: "link_share", title: "Of the link", value: (row) => row.link_share, isNumber: true, width: 110, spare: 4, tip: "Of the peak of the device's links to others of its machine" },
  { name: "algorithm_gb_per_s", title: "Algorithm GB/s", value: (row) => row.algorithm_gb_per_s, isNumber: true, width: 130, spare: 5, tip: "Message by transfer" },
  { name: "algorithm", title: "Algorithm", value: (row) => row.algorithm, width: 120, spare: 5, tip: "By the kernels' names" },
  { name: "exposed_ns", title: "Exposed", value: (row) => row.exposed_ns, isNumber: true, width: 120, spare: 2, tip: "Time in it without computation, a step, in the mean of the ranks" },
  { name: "overlapped_share", title: "Overlapped", value: (row) => row.overlapped_share, isNumber: true, width: 110, spare: 4, tip: "Of the time in it, computed meanwhile" },
  { name: "most_exposed", title: "Most exposed", value: (row) => row.most_exposed, width: 130, spare: 5, tip: "The rank with most time in it without computation" },
  { name: "last", title: "Most often last", value: (row) => row.last, width: 150, spare: 3 },
  { name: "last_share", title: "How often", value: (row) => row.last_share, isNumber: true, width: 110, spare: 4 },
];

const nameOf = (kind: string) => kind.replaceAll("_", "-");

/** Rows of ranks, in which each exchange lasts from the rank's arrival to the common end. */
function Across({ document, drawn }: { document: Ranks; drawn: DrawnStep }) {
  const { ranks } = document;
  const { arrivals_ns: arrivals, ends_ns: ends } = drawn;
  const [box, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [spot, setSpot] = useState<(Spot & { text: string }) | null>(null);
  const lasts = useMemo(() => arrivals.map((each) => Math.max(...each.filter((one) => one !== null))), [arrivals]);
  const length = Math.max(...ends, 1);
  const tall = Math.min(ROW, TALLEST / ranks.length);
  const height = tall * ranks.length;
  const scale = Math.max(width - LABELS, 10) / length;
  const now = theme.value;
  useEffect(() => {
    const frame = requestAnimationFrame(() => canvas.current && paint(canvas.current));
    return () => cancelAnimationFrame(frame);
  }, [drawn, width, now]);

  function paint(element: HTMLCanvasElement): void {
    const ratio = devicePixelRatio || 1;
    element.width = Math.round(width * ratio);
    element.height = Math.round((height + AXIS) * ratio);
    const context = element.getContext("2d");
    if (!context) return;
    const style = getComputedStyle(element);
    const token = (name: string) => style.getPropertyValue(name).trim();
    context.scale(ratio, ratio);
    const gap = tall > 6 ? 2 : 0;
    context.fillStyle = token("--soft");
    ranks.forEach((_, rank) => context.fillRect(LABELS, rank * tall, width - LABELS, Math.max(tall - gap, 0.5)));
    arrivals.forEach((each, number) => {
      const last = lasts[number]!;
      each.forEach((arrival, rank) => {
        if (arrival === null) return;
        const [y, high] = [rank * tall, Math.max(tall - gap, 0.5)];
        context.fillStyle = `rgb(${token("--heat")} / .45)`;
        context.fillRect(LABELS + arrival * scale, y, (last - arrival) * scale, high);
        context.fillStyle = token("--accent");
        context.fillRect(LABELS + last * scale, y, Math.max((ends[number]! - last) * scale, 1), high);
      });
    });
    context.fillStyle = token("--muted");
    context.font = `11px ${token("--sans")}`;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(14 / tall));
    for (let rank = 0; rank < ranks.length; rank += every) {
      context.fillText(short(ranks[rank]!.name.split("/").at(-1)!, 12), 0, Math.max((rank + 0.5) * tall, 6));
    }
    context.textBaseline = "top";
    for (const part of [0, 0.25, 0.5, 0.75]) context.fillText(duration(length * part), LABELS + (width - LABELS) * part, height + 6);
  }

  /** The exchange that a rank is in, or the next one. */
  const at = (event: MouseEvent): string | null => {
    const place = canvas.current!.getBoundingClientRect();
    const rank = Math.floor((event.clientY - place.top) / tall);
    const time = (event.clientX - place.left - LABELS) / scale;
    if (rank < 0 || rank >= ranks.length || time < 0) return null;
    const number = ends.findIndex((end, place) => arrivals[place]![rank] !== null && time <= end + 2 / scale);
    if (number < 0) return null;
    const [arrival, last, bytes] = [arrivals[number]![rank]!, lasts[number]!, drawn.bytes[number]];
    const what = `${ranks[rank]!.name}: ${nameOf(drawn.kinds[number]!)}${bytes === null ? "" : `, ${size(bytes!)}`}`;
    const whom = ranks[arrivals[number]!.indexOf(last)]!.name;
    return [what, arrival === last ? "comes last" : `waits ${duration(last - arrival)} for ${whom}`, `transfer ${duration(ends[number]! - last)}`].join("\n");
  };
  return (
    <div ref={box}>
      <canvas
        ref={canvas}
        style={{ height: `${height + AXIS}px` }}
        role="img"
        aria-label={`The ${count(arrivals.length)} exchanges of step ${drawn.step} across ${count(ranks.length)} ranks, over ${duration(length)}; the table below has their sums.`}
        onPointerMove={(event) => {
          const text = at(event);
          setSpot(text === null ? null : { x: event.clientX, y: event.clientY, text });
        }}
        onPointerLeave={() => setSpot(null)}
      />
      <Hover at={spot} text={spot?.text ?? ""} />
    </div>
  );
}
