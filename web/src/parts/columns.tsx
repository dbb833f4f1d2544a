/** Tables whose rows are those of `--format json`, and their columns. */

import { duration, short } from "../format";
import type { TableRow } from "../schema";
import { useRelated } from "../related";
import { filterOf, isRelated, type Related, valueOf } from "../selection";
import { selection } from "../state";
import { toggle } from "./causes";
import { type Column, Table } from "./table";

type Kind = "operator" | "kernel" | "module" | "line";

export const text = (name: string, title: string, more: Partial<Column<TableRow>> = {}): Column<TableRow> => ({
  name,
  title,
  value: (row) => row[name],
  ...more,
});

export const number = (name: string, title: string, width: number, more: Partial<Column<TableRow>> = {}): Column<TableRow> =>
  text(name, title, { isNumber: true, width, ...more });

/** A share, with a bar as long as the share of the largest. */
export function metered(column: Column<TableRow>, rows: readonly TableRow[]): Column<TableRow> {
  const largest = Math.max(...rows.map((row) => Number(row[column.name]) || 0), 0);
  return { ...column, meter: (row) => (largest ? Number(row[column.name]) / largest : 0) };
}

export const named = (title: string): Column<TableRow> =>
  text("name", title, { show: (row) => <span class="name">{short(String(row.name), 200)}</span> });

interface LinkedProps {
  kind: "operator" | "kernel";
  rows: readonly TableRow[];
  columns: Column<TableRow>[];
  sort: string;
}

/** Rows by name, which filter the other views and are filtered by them. */
export function LinkedTable({ kind, rows, columns, sort }: LinkedProps) {
  const related = useRelated();
  const of = (row: TableRow) => valueOf(String(row.name));
  const chosen = selection.value;
  return (
    <Table
      name={`${kind}s`}
      label={`${kind}s`}
      rows={rows}
      columns={present(columns, rows, related, kind)}
      sort={sort}
      keep={filterOf(related, chosen, kind) && ((row) => isRelated(related, kind, of(row)))}
      isChosen={(row) => chosen?.kind === kind && chosen.value === of(row)}
      onChoose={(row) => toggle(kind, of(row))}
    />
  );
}

/** Without columns that are unknown in every row, and with the time that belongs to what is chosen. */
export function present(columns: Column<TableRow>[], rows: readonly TableRow[], related: Related | null, kind: Kind): Column<TableRow>[] {
  const known = columns.filter((column) => rows.some((row) => row[column.name] !== null && row[column.name] !== undefined));
  const times = related?.[kind];
  if (!times || ![...times.values()].some((ns) => ns > 0)) return known;
  const of = (row: TableRow) => times.get(valueOf(String(row.name)));
  const chosen: Column<TableRow> = { name: "chosen_ns", title: "Of the choice", value: of, show: (row) => duration(of(row) ?? 0), isNumber: true, width: 110, spare: 1, tip: "Device time that belongs to what is chosen; operators’ own time without a device" };
  return [...known.slice(0, 1), chosen, ...known.slice(1)];
}
