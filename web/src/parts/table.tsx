/** A table that sorts, filters and draws only the rows in sight. Sort order and filter live in the address. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { cell, count, short } from "../format";
import { change, parameter } from "../state";

export interface Column<Row> {
  name: string; // of the value; numbers are formatted by it
  title: string;
  value: (row: Row) => string | number | boolean | null | undefined;
  show?: (row: Row) => ComponentChildren; // in place of the formatted value
  meter?: (row: Row) => number; // 0 to 1, drawn as a bar in the cell
  width?: number; // pixels; without it, what is left
  spare?: number; // left out where there is no room, the largest number first
  isNumber?: boolean; // right-aligned; largest first
  tip?: string;
}

export interface TableProps<Row> {
  name: string; // of its parameters in the address
  label: string; // what the rows are: "operators"
  columns: Column<Row>[];
  rows: readonly Row[];
  sort: string; // column that is sorted by at first
  keep?: (row: Row) => boolean; // false hides the row: what is chosen filters it
  isChosen?: (row: Row) => boolean;
  onChoose?: (row: Row) => void;
  tools?: ComponentChildren; // beside the filter
}

const HEIGHT = 28;
const LEAST = 280; // pixels of a column without a width
const LEAST_OF_PHONE = 110;
const BEYOND = 12;

export function Table<Row>({ name, label, columns, rows, sort, keep, isChosen, onChoose, tools }: TableProps<Row>) {
  const find = parameter(`${name}-find`) ?? "";
  const order = parameter(`${name}-sort`) ?? sort;
  const [all, setAll] = useState(false);
  const [wide, setWide] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const fitting = useMemo(() => (wide ? columns : fittingColumns(columns, width)), [columns, width, wide]);
  const kept = useMemo(() => (keep && !all ? rows.filter(keep) : rows), [rows, keep, all]);
  const shown = useMemo(() => sorted(found(kept, columns, find), columns, order), [kept, find, order]);
  const hidden = rows.length - kept.length;
  return (
    <div ref={box}>
      <div class="toolbar">
        <Filter name={name} label={label} value={find} />
        {tools}
        <span class="spring" />
        <span class="muted small" role="status">
          {shown.length === rows.length ? `${count(rows.length)} ${rows.length === 1 ? label.replace(/^(\w+)s$/, "$1") : label}` : `${count(shown.length)} of ${count(rows.length)} ${label}`}
        </span>
        {(wide || fitting.length < columns.length) && (
          <button type="button" aria-pressed={wide} onClick={() => setWide(!wide)}>
            {wide ? "Fewer columns" : more(columns.length - fitting.length)}
          </button>
        )}
        {keep && (hidden > 0 || all) && (
          <button type="button" aria-pressed={all} onClick={() => setAll(!all)}>
            {all ? "Only what is chosen" : "Show all"}
          </button>
        )}
      </div>
      {shown.length ? (
        <Rows {...{ name, label, order, sort, isChosen, onChoose }} columns={fitting} rows={shown} />
      ) : (
        <div class="notice">
          <b>No {label} here.</b>
          <span>{find ? "Nothing contains the filter's words." : rows.length ? "None belongs to what is chosen." : "The trace has none."}</span>
        </div>
      )}
    </div>
  );
}

function useWidth(box: { current: HTMLElement | null }): number {
  const [width, setWidth] = useState(1000);
  useLayoutEffect(() => {
    const look = () => setWidth(box.current!.clientWidth);
    look();
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  return width;
}

const more = (columns: number) => (columns === 1 ? "1 more column" : `${columns} more columns`);

const widthOf = <Row,>(columns: readonly Column<Row>[], least: number) => columns.reduce((sum, column) => sum + (column.width ?? least), 0);

/** The columns for which there is room, in their order. */
export function fittingColumns<Row>(columns: Column<Row>[], width: number): Column<Row>[] {
  const least = width < 560 ? LEAST_OF_PHONE : LEAST;
  const fitting = new Set(columns);
  for (const column of columns.filter((each) => each.spare).sort((a, b) => b.spare! - a.spare!)) {
    if (widthOf([...fitting], least) <= width) break;
    fitting.delete(column);
  }
  return columns.filter((column) => fitting.has(column));
}

function Filter({ name, label, value }: { name: string; label: string; value: string }) {
  const write = (text: string) => change({ [`${name}-find`]: text || null }, true);
  return (
    <input
      type="search"
      data-filter
      placeholder={`Filter ${label}`}
      aria-label={`Filter ${label}`}
      value={value}
      onInput={(event) => write(event.currentTarget.value)}
      onKeyDown={(event) => event.key === "Escape" && write("")}
    />
  );
}

type RowsProps<Row> = Pick<TableProps<Row>, "name" | "label" | "columns" | "rows" | "sort" | "isChosen" | "onChoose"> & { order: string };

function Rows<Row>({ name, label, columns, rows, order, sort, isChosen, onChoose }: RowsProps<Row>) {
  const id = useId();
  const box = useRef<HTMLDivElement>(null);
  const [[top, height], setSight] = useState([0, 900]);
  const [active, setActive] = useState(0);
  useEffect(() => {
    const look = () => box.current && setSight([box.current.scrollTop, box.current.clientHeight]);
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  useEffect(() => setActive((at) => Math.min(at, rows.length - 1)), [rows.length]);
  useLayoutEffect(() => {
    const chosen = isChosen ? rows.findIndex(isChosen) : -1;
    if (chosen < 0) return;
    setActive(chosen);
    box.current!.scrollTop = chosen * HEIGHT - box.current!.clientHeight / 2;
  }, []);
  const first = Math.max(0, Math.floor(top / HEIGHT) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((top + height) / HEIGHT) + BEYOND);
  const go = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(height / HEIGHT) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[event.key];
    if (event.key === "Enter" && event.target === event.currentTarget) return onChoose?.(rows[active]!);
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.min(rows.length - 1, Math.max(0, active + by));
    setActive(next);
    const at = next * HEIGHT;
    const element = box.current!;
    if (at < element.scrollTop) element.scrollTop = at;
    else if (at + 2 * HEIGHT + 4 > element.scrollTop + element.clientHeight) element.scrollTop = at + 2 * HEIGHT + 4 - element.clientHeight;
  };
  return (
    <div class="table-box" ref={box} onScroll={(event) => setSight([event.currentTarget.scrollTop, event.currentTarget.clientHeight])}>
      <table
        class="table"
        role="grid"
        aria-label={label}
        aria-rowcount={rows.length + 1}
        aria-activedescendant={active >= first && active < last ? `${id}-${active}` : undefined}
        tabIndex={0}
        onKeyDown={go}
        style={{ minWidth: `${widthOf(columns, LEAST_OF_PHONE)}px` }}
      >
        <colgroup>
          {columns.map((column) => (
            <col style={{ width: column.width ? `${column.width}px` : undefined }} />
          ))}
        </colgroup>
        <thead>
          <tr aria-rowindex={1}>
            {columns.map((column) => (
              <Heading name={name} column={column} order={order} sort={sort} />
            ))}
          </tr>
        </thead>
        <tbody>
          <Space rows={first} columns={columns.length} />
          {rows.slice(first, last).map((row, place) => (
            <tr
              key={first + place}
              id={`${id}-${first + place}`}
              aria-rowindex={first + place + 2}
              aria-selected={isChosen?.(row) ?? false}
              class={first + place === active ? "active" : undefined}
              onClick={() => {
                setActive(first + place);
                onChoose?.(row);
              }}
            >
              {columns.map((column) => (
                <Cell column={column} row={row} />
              ))}
            </tr>
          ))}
          <Space rows={rows.length - last} columns={columns.length} />
        </tbody>
      </table>
    </div>
  );
}

function Heading<Row>({ name, column, order, sort }: { name: string; column: Column<Row>; order: string; sort: string }) {
  const [by, isDown] = direction(order);
  const here = by === column.name;
  const press = () => {
    const next = here ? (isDown ? column.name : `-${column.name}`) : column.isNumber ? `-${column.name}` : column.name;
    change({ [`${name}-sort`]: next === sort ? null : next });
  };
  const arrow = here && <span aria-hidden="true">{isDown ? "↓" : "↑"}</span>;
  return (
    <th scope="col" class={column.isNumber ? "number" : undefined} aria-sort={here ? (isDown ? "descending" : "ascending") : undefined}>
      <button type="button" onClick={press} data-tip={column.tip}>
        {column.isNumber && arrow}
        {column.title}
        {!column.isNumber && arrow}
      </button>
    </th>
  );
}

function Cell<Row>({ column, row }: { column: Column<Row>; row: Row }) {
  const value = column.value(row);
  const text = cell(column.name, value);
  const share = column.meter?.(row);
  return (
    <td class={column.isNumber ? "number" : undefined} title={column.isNumber ? undefined : short(typeof value === "string" ? value : text)}>
      {column.show ? column.show(row) : text}
      {share !== undefined && share > 0 && <span class="meter" style={{ width: `calc((100% - 10px) * ${Math.min(1, share)})` }} />}
    </td>
  );
}

const Space = ({ rows, columns }: { rows: number; columns: number }) =>
  rows > 0 ? (
    <tr class="space" aria-hidden="true">
      <td colSpan={columns} style={{ height: `${rows * HEIGHT}px` }} />
    </tr>
  ) : null;

function direction(order: string): [string, boolean] {
  return order.startsWith("-") ? [order.slice(1), true] : [order, false];
}

/** Rows of which some text contains every word of the filter. */
export function found<Row>(rows: readonly Row[], columns: readonly Column<Row>[], find: string): readonly Row[] {
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return rows;
  return rows.filter((row) => {
    const text = columns.map((column) => column.value(row)).filter((value) => typeof value === "string").join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** Rows in the order of a column ("-name" for the largest first); what is unknown comes last. */
export function sorted<Row>(rows: readonly Row[], columns: readonly Column<Row>[], order: string): readonly Row[] {
  const [name, isDown] = direction(order);
  const column = columns.find((each) => each.name === name);
  if (!column) return rows;
  const sign = isDown ? -1 : 1;
  const isUnknown = (value: unknown) => value === null || value === undefined;
  const keyed = rows.map((row) => [column.value(row), row] as const);
  keyed.sort(([a], [b]) => {
    if (isUnknown(a) || isUnknown(b)) return Number(isUnknown(a)) - Number(isUnknown(b));
    return sign * (typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : Number(a) - Number(b));
  });
  return keyed.map(([, row]) => row);
}
