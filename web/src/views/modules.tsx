/** What each module of the network costs: an icicle, and the same as a table. */

import { useMemo } from "preact/hooks";
import { count, duration, short, size } from "../format";
import { useDocument } from "../document";
import { toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Icicle } from "../parts/icicle";
import { Table, type Column } from "../parts/table";
import type { Node } from "../parts/tree";
import type { ModuleCost, Modules as Document } from "../documents";
import { valueOf } from "../selection";
import { change, parameter, selection } from "../state";

const OUTSIDE = "outside of modules";
const nameOf = (row: ModuleCost) => row.module ?? OUTSIDE;
const isChosen = (row: ModuleCost) => selection.value?.kind === "module" && selection.value.value === valueOf(nameOf(row));

export function Modules() {
  return (
    <Shown of={useDocument("modules")} height={480}>
      {(document) => <Tree document={document} />}
    </Shown>
  );
}

function Tree({ document }: { document: Document }) {
  const { modules, steps, basis } = document;
  const nodes = useMemo(() => moduleNodes(modules), [modules]);
  const most = Math.max(...modules.map((row) => (row.module === null ? 0 : row.self_ns)), 1);
  if (!modules.some((row) => row.module !== null)) {
    return <Empty title="No modules were recorded.">Record them with stepscope run --modules, or with_modules=True of the PyTorch profiler.</Empty>;
  }
  const focus = Math.min(Number(parameter("module") ?? -1), nodes.length - 1);
  const per = steps || 1;
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Modules</h2>
        <span class="muted small">
          {basis === "device" ? "Device time" : "Operators’ own time"}, forward and backward, {steps ? `of ${steps === 1 ? "1 step" : `${count(steps)} steps`}` : "of the recording"}:{" "}
          {duration(document.total_ns)}. The warmer, the more time a module takes itself.
        </span>
      </div>
      <Icicle
        nodes={nodes}
        label="Modules"
        show={duration}
        focus={focus}
        onFocus={(node) => change({ module: node < 0 ? null : String(node) })}
        onChoose={(node) => modules[node]!.module !== null && toggle("module", valueOf(nameOf(modules[node]!)))}
        isChosen={(node) => isChosen(modules[node]!)}
        heat={(node) => (modules[node]!.module === null ? 0 : Math.sqrt(modules[node]!.self_ns / most))}
        details={(node) => described(modules[node]!, per)}
      />
      <Table
        name="modules"
        label="modules"
        columns={COLUMNS.filter(({ value }) => modules.some((row) => value(row) !== null))}
        rows={modules}
        sort="place"
        isChosen={isChosen}
        onChoose={(row) => row.module !== null && toggle("module", valueOf(row.module))}
      />
    </div>
  );
}

/** Rows come in the order of the tree, each with its depth. */
export function moduleNodes(rows: readonly Pick<ModuleCost, "module" | "name" | "depth" | "total_ns">[]): Node[] {
  const open: number[] = []; // by depth, the module that is open
  return rows.map((row, at) => {
    open.length = row.depth;
    const parent = row.depth > 0 ? (open[row.depth - 1] ?? -1) : -1;
    open[row.depth] = at;
    return { name: row.name ?? OUTSIDE, parent, value: row.total_ns, kind: 3 };
  });
}

function described(row: ModuleCost, steps: number): string {
  const parts = [
    `forward ${duration(row.forward_ns)}, backward ${duration(row.backward_ns)}, itself ${duration(row.self_ns)}`,
    `${count(row.calls / steps)} calls${steps > 1 ? " a step" : ""}`,
  ];
  if (row.bytes_allocated > 0) parts.push(`${size(row.bytes_allocated)} allocated`);
  return [row.module ?? "", ...parts].filter(Boolean).join("\n");
}

const COLUMNS: Column<ModuleCost>[] = [
  {
    name: "module",
    title: "Module",
    value: nameOf,
    show: (row) => (
      <span class="name" style={{ paddingLeft: `${Math.min(row.depth, 12) * 12}px` }}>
        {short(row.name ?? OUTSIDE, 120)}
      </span>
    ),
  },
  { name: "share", title: "Share", value: (row) => row.share, meter: (row) => row.share, isNumber: true, width: 90 },
  { name: "total_ns", title: "Total", value: (row) => row.total_ns, isNumber: true, width: 100 },
  { name: "self_ns", title: "Itself", value: (row) => row.self_ns, isNumber: true, width: 100 },
  { name: "forward_ns", title: "Forward", value: (row) => row.forward_ns, isNumber: true, width: 100 },
  { name: "backward_ns", title: "Backward", value: (row) => row.backward_ns, isNumber: true, width: 100 },
  { name: "idle_ns", title: "Idle", value: (row) => row.idle_ns, isNumber: true, width: 90 },
  { name: "calls", title: "Calls", value: (row) => row.calls, isNumber: true, width: 80 },
  { name: "bytes_allocated", title: "Allocated", value: (row) => row.bytes_allocated, isNumber: true, width: 100, show: (row) => size(row.bytes_allocated) },
];
