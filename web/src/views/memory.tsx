/** A device's memory over time, by category or place; and what is alive at a moment. */

import { useMemo, useState } from "preact/hooks";
import type uPlot from "uplot";
import { count, moment, short, size } from "../format";
import { useDocument } from "../document";
import type { AliveBlock, DeviceMemory, MemoryLevels } from "../documents";
import { toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Plot, timeMark, type Series } from "../parts/plot";
import { Table, type Column } from "../parts/table";
import { lineOf, valueOf } from "../selection";
import { change, parameter, selection } from "../state";
import "../parts/further.css";

export function Memory() {
  return (
    <Shown of={useDocument("memory")} height={640}>
      {({ devices }) =>
        devices.length ? (
          <Device devices={devices} />
        ) : (
          <Empty title="No allocations were recorded.">Record them with stepscope run, or with profile_memory=True of the PyTorch profiler.</Empty>
        )
      }
    </Shown>
  );
}

function Device({ devices }: { devices: DeviceMemory[] }) {
  const shown = devices.find((each) => each.device === parameter("memory-device")) ?? devices[0]!;
  const by = parameter("memory-by") ?? "category";
  const levels = useDocument("memory-levels", { device: shown.device, by });
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Memory</h2>
        {devices.length > 1 && (
          <select
            aria-label="Device"
            value={shown.device}
            onChange={(event) => change({ "memory-device": event.currentTarget.value, "memory-at": null })}
          >
            {devices.map((each) => (
              <option value={each.device}>{deviceName(each)}</option>
            ))}
          </select>
        )}
        {levels.value && levels.value.by.length > 1 && (
          <div role="group" aria-label="Divide by">
            {levels.value.by.map((each) => (
              <button type="button" aria-pressed={each === by} onClick={() => change({ "memory-by": each === "category" ? null : each })}>
                by {each}
              </button>
            ))}
          </div>
        )}
      </div>
      <Shown of={levels} height={420}>
        {(value) => <Levels levels={value} memory={shown} />}
      </Shown>
    </div>
  );
}

const deviceName = (memory: { device: string; name: string | null }) =>
  memory.device === "cpu" ? "The host’s memory" : `Device ${memory.device}${memory.name ? ` (${memory.name})` : ""}`;

function Levels({ levels, memory }: { levels: MemoryLevels; memory: DeviceMemory }) {
  const [range, zoom] = useState<[number, number] | null>(null);
  const data = useMemo(() => stacked(levels), [levels]);
  const series = useMemo(() => seriesOf(levels), [levels]);
  const marks = useMemo(() => levels.steps.map(([number, x]) => ({ x, label: `step ${number}` })), [levels]);
  const at = Number(parameter("memory-at") ?? levels.peak_ns);
  const level = (band: MemoryLevels["bands"][number], place: number) => `${band.label}: ${size(band.bytes[place]!)}`;
  const words = (place: number) =>
    [
      moment(levels.times[place]!),
      `allocated: ${size(levels.bands.reduce((sum, band) => sum + band.bytes[place]!, 0))}`,
      ...(levels.reserved ? [`reserved: ${size(levels.reserved[place]!)}`] : []),
      ...(levels.bands.length > 1 ? [...levels.bands].reverse().filter((band) => band.bytes[place]! > 0).map((band) => level(band, place)) : []),
    ].join("\n");
  return (
    <>
      <dl class="facts-list">
        {levels.facts.map(([name, text]) => (
          <div>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <div class="plot-legend" role="list" aria-label="Categories">
        {[...levels.bands].reverse().map((band) => (
          <span role="listitem" data-tip={band.meaning || undefined}>
            <i class="swatch" style={{ "--c": band.colour }} aria-hidden="true" /> {short(band.label, 60)}
          </span>
        ))}
        {levels.reserved && (
          <span role="listitem">
            <i class="line" style={{ "--c": "var(--ink)" }} aria-hidden="true" /> reserved
          </span>
        )}
      </div>
      <Plot
        label={`${deviceName(memory)} over time, at most ${size(levels.peak_bytes)} at ${moment(levels.peak_ns)}`}
        data={data}
        series={series}
        showX={timeMark}
        showY={size}
        from={0}
        base={2}
        height={300}
        range={range ?? [levels.start_ns, levels.end_ns]}
        onZoom={zoom}
        words={words}
        onPick={(place) => change({ "memory-at": String(levels.times[place]!) })}
        marks={marks}
        picked={at}
      />
      <div class="toolbar">
        <button type="button" aria-pressed={at === levels.peak_ns} onClick={() => change({ "memory-at": null })}>
          At the peak
        </button>
        <button type="button" disabled={!range} onClick={() => zoom(null)}>
          All of the time
        </button>
        <span class="muted small">Click a moment for what is alive then; drag to zoom.</span>
      </div>
      <Alive device={levels.device} at={at} isPeak={at === levels.peak_ns} />
    </>
  );
}

const COLUMNS: Column<AliveBlock>[] = [
  { name: "bytes", title: "Size", value: (row) => row.bytes, isNumber: true, width: 96 },
  { name: "category", title: "What it is", value: (row) => row.category.replaceAll("_", " "), width: 130 },
  { name: "start_ns", title: "Since", value: (row) => row.start_ns, show: (row) => (row.start_ns === null ? "before" : moment(row.start_ns)), isNumber: true, width: 120 },
  { name: "end_ns", title: "Until", value: (row) => row.end_ns, show: (row) => (row.end_ns === null ? "the end" : moment(row.end_ns)), isNumber: true, width: 120 },
  { name: "line", title: "Line", value: (row) => (row.file === null ? null : `${row.file}:${row.line} ${row.function ?? ""}`), show: (row) => <span class="name">{row.file === null ? "" : short(`${row.file.split("/").at(-1)}:${row.line} ${row.function ?? ""}`, 120)}</span> },
  { name: "operator_name", title: "Operator", value: (row) => row.operator_name, width: 200 },
  { name: "module", title: "Module", value: (row) => row.module, width: 200 },
];

function Alive({ device, at, isPeak }: { device: string; at: number; isPeak: boolean }) {
  const alive = useDocument("memory-alive", { device, time: at });
  return (
    <section class="section">
      <Shown of={alive} height={320}>
        {(value) => (
          <>
            <header>
              <h2>Alive {isPeak ? "at the peak" : `at ${moment(value.time_ns)}`}</h2>
              <span class="muted small">
                {size(value.bytes)}
                {value.count > 0 && ` in ${value.count === 1 ? "1 block" : `${count(value.count)} blocks`}`}
                {value.blocks.length < value.count && `; showing the largest ${count(value.blocks.length)}`}
              </span>
            </header>
            {value.blocks.length ? (
              <Table
                name="alive"
                label="blocks"
                columns={COLUMNS.filter((column) => value.blocks.some((row) => column.value(row) != null))}
                rows={value.blocks}
                sort="-bytes"
                isChosen={(row) => row.file !== null && selection.value?.kind === "line" && selection.value.value === lineOf({ file: row.file, line: row.line ?? 0 })}
                onChoose={(row) => {
                  if (row.file !== null && row.line !== null) toggle("line", lineOf({ file: row.file, line: row.line }));
                  else if (row.operator_name !== null) toggle("operator", valueOf(row.operator_name));
                }}
              />
            ) : (
              <Empty title="Nothing is known of single blocks.">The recording has no addresses, so nobody knows when a block was freed.</Empty>
            )}
          </>
        )}
      </Shown>
    </section>
  );
}

/** Upper edges of the bands, the topmost first, so that those below are drawn over it; then what is reserved. */
export function stacked(levels: Pick<MemoryLevels, "times" | "bands" | "reserved" | "end_ns">): uPlot.AlignedData {
  const edges: number[][] = [];
  let below = levels.times.map(() => 0);
  for (const band of levels.bands) {
    below = below.map((bytes, place) => bytes + band.bytes[place]!);
    edges.unshift(below);
  }
  return [levels.times, ...edges, ...(levels.reserved ? [levels.reserved] : [])];
}

function seriesOf(levels: MemoryLevels): Series[] {
  const bands = [...levels.bands].reverse().map(({ label, colour }): Series => ({ label, colour, isFilled: true, isStepped: true, width: 0 }));
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--muted").trim();
  return levels.reserved ? [...bands, { label: "reserved", colour: ink, isStepped: true, isDashed: true }] : bands;
}
