/** Time by stack, from your code down to operators and kernels. */

import { useMemo } from "preact/hooks";
import { count, duration, share } from "../format";
import { useDocument } from "../document";
import { Empty, Shown } from "../parts/controls";
import { Icicle } from "../parts/icicle";
import { Table, type Column } from "../parts/table";
import { search, type Node } from "../parts/tree";
import type { Flame } from "../documents";
import { change, parameter } from "../state";

const KINDS = ["lines", "phases", "operators", "other frames"];

export function FlameGraph() {
  return (
    <Shown of={useDocument("flame")} height={480}>
      {(flame) => <Graph flame={flame} />}
    </Shown>
  );
}

function Graph({ flame }: { flame: Flame }) {
  const nodes = useMemo(() => nodesOf(flame), [flame]);
  const text = parameter("flame-search") ?? "";
  const { found, value } = useMemo(() => search(nodes, text), [nodes, text]);
  if (!nodes.length) return <Empty title="There is nothing to draw.">The trace has no device work, and no operators.</Empty>;
  const focus = Math.min(Number(parameter("frame") ?? -1), nodes.length - 1);
  const kinds = [...new Set(nodes.map(({ kind }) => kind))].sort();
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Flame graph</h2>
        <input
          type="search"
          data-filter
          placeholder="Search frames"
          aria-label="Search frames"
          value={text}
          onInput={(event) => change({ "flame-search": event.currentTarget.value || null }, true)}
        />
        <span class="muted small" role="status">
          {text ? `${count(found.size)} frames, ${share(value / (flame.total_ns || 1))} of the time` : ""}
        </span>
        <span class="spring" />
        <span class="icicle-legend">
          {kinds.map((kind) => (
            <span>
              <i class="swatch" style={{ "--c": `var(--kind-${kind})` }} aria-hidden="true" /> {KINDS[kind]}
            </span>
          ))}
        </span>
      </div>
      <p class="muted small">
        Widths are {flame.basis === "device" ? "device time" : "operators’ own time"}, {duration(flame.total_ns)} in all.
        {flame.dropped > 0 && ` ${count(flame.dropped)} smaller frames are left out.`}
      </p>
      <Icicle
        nodes={nodes}
        label="Flame graph"
        show={duration}
        focus={focus}
        onFocus={(node) => change({ frame: node < 0 ? null : String(node) })}
        found={text ? found : null}
      />
      <details>
        <summary>The same as a table</summary>
        <Frames nodes={nodes} focus={focus} whole={flame.total_ns} />
      </details>
    </div>
  );
}

interface FrameRow {
  name: string;
  total_ns: number;
  self_ns: number;
  total_share: number;
  node: number;
}

/** Frames by name and line, those inside the focus; a function that calls itself counts once. */
export function byName(nodes: readonly Node[], focus: number): Omit<FrameRow, "total_share">[] {
  const self = nodes.map(({ value }) => value);
  nodes.forEach(({ parent, value }) => parent >= 0 && (self[parent]! -= value));
  const rows = new Map<string, Omit<FrameRow, "total_share">>();
  nodes.forEach(({ name, value }, at) => {
    let isInside = focus < 0;
    let isRepeated = false;
    for (let above = at; above >= 0; above = nodes[above]!.parent) {
      if (above !== at && nodes[above]!.name === name) isRepeated = true;
      if (above === focus) {
        isInside = true;
        break;
      }
    }
    if (!isInside) return;
    const row = rows.get(name) ?? { name, total_ns: 0, self_ns: 0, node: at };
    row.self_ns += self[at]!;
    if (!isRepeated) row.total_ns += value;
    if (value > nodes[row.node]!.value) row.node = at;
    rows.set(name, row);
  });
  return [...rows.values()];
}

const COLUMNS: Column<FrameRow>[] = [
  { name: "name", title: "Frame", value: (row) => row.name },
  { name: "total_ns", title: "With what it calls", value: (row) => row.total_ns, isNumber: true, width: 150 },
  { name: "total_share", title: "Share", value: (row) => row.total_share, meter: (row) => row.total_share, isNumber: true, width: 90 },
  { name: "self_ns", title: "Itself", value: (row) => row.self_ns, isNumber: true, width: 110 },
];

function Frames({ nodes, focus, whole }: { nodes: readonly Node[]; focus: number; whole: number }) {
  const rows = useMemo(
    () => byName(nodes, focus).map((row) => ({ ...row, total_share: row.total_ns / (whole || 1) })),
    [nodes, focus, whole],
  );
  return (
    <Table
      name="frames"
      label="frames"
      columns={COLUMNS}
      rows={rows}
      sort="-total_ns"
      onChoose={(row) => change({ frame: String(row.node) })}
    />
  );
}

const nodesOf = ({ frames, names, kinds }: Flame): Node[] =>
  frames.map(([name, parent, value]) => ({ name: names[name]!, parent, value, kind: kinds[name]! }));
