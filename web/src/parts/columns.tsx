/** Columns of tables whose rows are those of `--format json`. */

import { duration, short } from "../format";
import type { TableRow } from "../schema";
import type { Related } from "../selection";
import { valueOf } from "../selection";
import type { Column } from "./table";

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

/** Without columns that are unknown in every row, and with the time that belongs to what is chosen. */
export function present(columns: Column<TableRow>[], rows: readonly TableRow[], related: Related | null, kind: Kind): Column<TableRow>[] {
  const known = columns.filter((column) => rows.some((row) => row[column.name] !== null && row[column.name] !== undefined));
  const times = related?.[kind];
  if (!times || ![...times.values()].some((ns) => ns > 0)) return known;
  const of = (row: TableRow) => times.get(valueOf(String(row.name)));
  const chosen: Column<TableRow> = { name: "chosen_ns", title: "Of the choice", value: of, show: (row) => duration(of(row) ?? 0), isNumber: true, width: 110, spare: 1, tip: "Device time that belongs to what is chosen; operators’ own time without a device" };
  return [...known.slice(0, 1), chosen, ...known.slice(1)];
}
