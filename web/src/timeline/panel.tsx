/** Beside the timeline: the chosen slice, and what ran in a stretch of time, as text and tables. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { causeOf, CauseBar, Legend, Swatch, toggle } from "../parts/causes";
import { Shown, Tabs } from "../parts/controls";
import { type Column, Table } from "../parts/table";
import { cell, count, duration, moment, short } from "../format";
import type { Session, Slice, SlicePlace, Stretch } from "../schema";
import { lineOf, valueOf } from "../selection";
import { choose, selection } from "../state";
import type { Loaded } from "../document";

type Named = Stretch["slices"][number];
type Line = Stretch["lines"][number];
type Module = Stretch["modules"][number];

export function StretchPanel({ of, isMarked, session }: { of: Loaded<Stretch>; isMarked: boolean; session?: Session }) {
  const [tab, show] = useState("names");
  return (
    <section class="section" aria-label="What ran in this stretch of time">
      <Shown of={of} height={220}>
        {(stretch) => (
          <>
            <header>
              <h2>
                {isMarked ? "Measured" : "In sight"}: {duration(stretch.end - stretch.start)}
              </h2>
              <span class="muted small">
                {moment(stretch.start)} to {moment(stretch.end)}
              </span>
            </header>
            {stretch.devices.map((each) => (
              <Device key={each.device} device={each} length={stretch.end - stretch.start} session={session} />
            ))}
            <Tabs
              label="What ran"
              shown={tab}
              onShow={show}
              tabs={[
                { name: "names", title: `Names ${count(stretch.slices_in_all)}`, content: () => <Names stretch={stretch} session={session} /> },
                { name: "lines", title: `Lines ${count(stretch.lines_in_all)}`, content: () => <Lines stretch={stretch} /> },
                { name: "modules", title: `Modules ${count(stretch.modules_in_all)}`, content: () => <Modules stretch={stretch} /> },
              ]}
            />
          </>
        )}
      </Shown>
    </section>
  );
}

function Device({ device: { device, busy_ns, idle }, length, session }: { device: Stretch["devices"][number]; length: number; session?: Session }) {
  const part = (key: string, ns: number) => ({ ...causeOf(session, key), key, ns });
  const told = idle.reduce((sum, each) => sum + each.ns, 0) + busy_ns;
  const outside = length - told;
  const parts = idle.map(({ cause, ns }) => part(cause, ns));
  const work = device ? { ...part("busy", busy_ns), label: "busy", colour: "var(--busy)", hatched: false } : { ...part("compute", Math.max(outside, 0)), label: "computing", hatched: false };
  const all = [work, ...parts].filter(({ ns }) => ns > 0);
  return (
    <div class="timeline-device">
      <span class="small">{device ? `Device ${device}` : "Main thread"}</span>
      <CauseBar parts={all} thin />
      <Legend parts={all} />
    </div>
  );
}

const timeColumn = <Row,>(name: string, title: string, value: (row: Row) => number | null, most: number, tip?: string): Column<Row> => ({
  name, title, value, width: 110, isNumber: true,
  meter: (row) => (value(row) ?? 0) / Math.max(most, 1),
  ...(tip ? { tip } : {}),
});

function Names({ stretch, session }: { stretch: Stretch; session?: Session }) {
  const most = Math.max(...stretch.slices.map(({ ns }) => ns), 1);
  const columns: Column<Named>[] = [
    { name: "name", title: "Name", value: ({ name }) => name, show: ({ name }) => <span class="name">{short(name, 160)}</span> },
    {
      name: "kind", title: "Kind", value: ({ kind }) => kindView(session, kind).label, width: 150,
      show: ({ kind }) => (
        <>
          <Swatch cause={kindView(session, kind)} /> {kindView(session, kind).label}
        </>
      ),
    },
    { name: "count", title: "Count", value: (row) => row.count, width: 90, isNumber: true },
    timeColumn("ns", "Time", ({ ns }) => ns, most, "Summed over all of them, cut at the ends of the stretch"),
    timeColumn("self_ns", "Self", ({ self_ns }) => self_ns, most, "In which it is the innermost of its thread"),
  ];
  const chosen = selection.value;
  return (
    <Table
      name="stretch" label="names" columns={columns} rows={stretch.slices} sort="-ns"
      isChosen={(row) => chosen?.kind === kindOf(row.kind) && chosen.value === valueOf(row.name)}
      onChoose={(row) => chooseNamed(row.kind, row.name)}
    />
  );
}

function Lines({ stretch }: { stretch: Stretch }) {
  const most = Math.max(...stretch.lines.map((row) => Math.max(row.host_ns, row.device_ns)), 1);
  const columns: Column<Line>[] = [
    { name: "line", title: "Line", value: ({ file, line }) => `${file}:${line}`, show: ({ file, line }) => <span class="name">{short(`${file}:${line}`, 120)}</span> },
    { name: "function", title: "Function", value: (row) => row.function, width: 200 },
    timeColumn("host_ns", "Main thread", (row) => row.host_ns, most),
    timeColumn("device_ns", "Device work", (row) => row.device_ns, most, "Summed over all queues"),
  ];
  const chosen = selection.value;
  return (
    <Table
      name="stretch-lines" label="lines" columns={columns} rows={stretch.lines} sort="-host_ns"
      isChosen={(row) => chosen?.kind === "line" && chosen.value === lineOf(row)}
      onChoose={(row) => toggle("line", lineOf(row))}
    />
  );
}

function Modules({ stretch }: { stretch: Stretch }) {
  const most = Math.max(...stretch.modules.map((row) => Math.max(row.host_ns, row.device_ns)), 1);
  const columns: Column<Module>[] = [
    { name: "module", title: "Module", value: ({ module }) => module, show: ({ module }) => <span class="name">{short(module, 160)}</span> },
    timeColumn("host_ns", "Main thread", (row) => row.host_ns, most),
    timeColumn("device_ns", "Device work", (row) => row.device_ns, most, "Summed over all queues"),
  ];
  const chosen = selection.value;
  return (
    <Table
      name="stretch-modules" label="modules" columns={columns} rows={stretch.modules} sort="-device_ns"
      isChosen={(row) => chosen?.kind === "module" && chosen.value === valueOf(row.module)}
      onChoose={(row) => toggle("module", valueOf(row.module))}
    />
  );
}

/** The chosen slice: what it is, where it stands in the code, what it launched or waited for. */
export function SlicePanel({ of, session, onGo, onClose }: { of: Loaded<Slice>; session?: Session; onGo: (place: SlicePlace) => void; onClose: () => void }) {
  return (
    <section class="section timeline-slice" aria-label="The chosen slice">
      <Shown of={of} height={90}>
        {(slice) => (
          <>
            <header>
              <Swatch cause={kindView(session, slice.kind)} />
              <h2 class="place">{short(slice.name || kindView(session, slice.kind).label, 240)}</h2>
              <span class="spring" />
              <button type="button" onClick={() => onGo(slice)}>
                Zoom to it (F)
              </button>
              <button type="button" onClick={onClose}>
                Close
              </button>
            </header>
            <dl class="timeline-facts">
              <Fact name={kindView(session, slice.kind).label}>
                {duration(slice.duration)} from {moment(slice.start)}
              </Fact>
              {slice.where && (
                <Fact name="line">
                  <button type="button" class="link" onClick={() => choose({ kind: "line", value: lineOf(slice.where!) })}>
                    {short(`${slice.where.file}:${slice.where.line}`, 120)}
                  </button>{" "}
                  {slice.where.function}
                </Fact>
              )}
              {slice.module && (
                <Fact name="module">
                  <button type="button" class="link" onClick={() => choose({ kind: "module", value: valueOf(slice.module!) })}>
                    {short(slice.module, 120)}
                  </button>
                </Fact>
              )}
              {kindOf(slice.kind) && (
                <Fact name="all of it">
                  <button type="button" class="link" onClick={() => chooseNamed(slice.kind, slice.name)}>
                    every one with this name
                  </button>
                </Fact>
              )}
              {slice.links.map((each) => (
                <Fact name={saidOf(each)}>
                  <button type="button" class="link" onClick={() => onGo(each)}>
                    {short(each.name, 100)}
                  </button>{" "}
                  {duration(each.duration)}, {apartFrom(slice, each)}
                </Fact>
              ))}
              {Object.entries(slice.about).map(([name, value]) => (
                <Fact name={name.replaceAll("_", " ")}>{short(cell(name, value), 200)}</Fact>
              ))}
            </dl>
          </>
        )}
      </Shown>
    </section>
  );
}

const Fact = ({ name, children }: { name: string; children: ComponentChildren }) => (
  <div>
    <dt>{name}</dt>
    <dd>{children}</dd>
  </div>
);

function saidOf({ link, outgoing }: Slice["links"][number]): string {
  if (link === "launch") return outgoing ? "launched" : "launched by";
  if (link === "forward_backward") return outgoing ? "backward" : "forward";
  if (link === "event") return outgoing ? "waited for by" : "waits for";
  return "the device's wait";
}

function apartFrom(slice: SlicePlace, other: SlicePlace): string {
  const by = other.start - slice.start;
  return by >= 0 ? `${duration(by)} later` : `${duration(-by)} earlier`;
}

/** Label and colour of a kind of slice. */
const kindView = (session: Session | undefined, kind: string) => session?.kinds[kind] ?? causeOf(session, kind);

/** The kind of choice that a kind of slice makes; null for those that no other view knows. */
export function kindOf(kind: string): "operator" | "module" | "kernel" | null {
  if (kind === "operator" || kind === "module") return kind;
  return ["compute", "copy_in", "copy_out", "copy_on_device", "set", "communication"].includes(kind) ? "kernel" : null;
}

export function chooseNamed(kind: string, name: string): void {
  const by = kindOf(kind);
  if (by) toggle(by, valueOf(name));
}
