/** Numbers as the terminal prints them; see report/format.py, which this follows digit by digit. */

type Units = readonly (readonly [number, string, number])[];
const DURATIONS: Units = [[1e9, "s", 2], [1e6, "ms", 1], [1e3, "us", 1], [1, "ns", 0]];
const SIZES: Units = [[2 ** 40, "TiB", 2], [2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1], [1, "B", 0]];
const UNKNOWN = "-";

/** Nanoseconds as "1.23 s", "54.1 ms", "8.3 us" or "540 ns". */
export const duration = (ns: number) => scaled(ns, DURATIONS);

/** Bytes as "1.50 GiB", "23.4 MiB", "1.5 KiB" or "512 B". */
export const size = (bytes: number) => scaled(bytes, SIZES);

/** A share (0 to 1) as "47.2 %"; what would round to zero is "<0.1 %". */
export function share(x: number): string {
  if (!Number.isFinite(x)) return UNKNOWN;
  if (x !== 0 && Math.abs(x) < 0.0005) return x > 0 ? "<0.1 %" : ">-0.1 %";
  return `${grouped(x * 100 + 0, 1)} %`;
}

/** A count as "1,234,567"; fractions keep up to three digits. */
export function count(n: number): string {
  if (!Number.isFinite(n)) return UNKNOWN;
  if (Number.isInteger(n) || Math.abs(n) >= 1000) return grouped(n, 0);
  return String(Number(n.toPrecision(3)));
}

/** A moment in the trace, in milliseconds with microseconds, so that it can be found again. */
export const moment = (ns: number) => `${grouped(ns / 1e6, 3)} ms`;

/** A figure of a finding by its unit: "ns", "bytes", "share", "count" or none. */
export function figure(value: number, unit: string): string {
  if (unit === "ns") return duration(value);
  if (unit === "bytes") return size(value);
  return unit === "share" ? share(value) : count(value);
}

/** Seconds within a run, with minutes and hours if there are any. */
export function seconds(s: number): string {
  if (s < 120) return s ? duration(s * 1e9) : "0 s";
  const minutes = Math.floor(Math.round(s) / 60);
  const hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(s) % 60} s`;
}

/** A logged or sampled value with its unit, such as "bytes", "share" or "W". */
export function measured(value: number, unit: string): string {
  if (unit === "bytes") return size(value);
  if (unit === "bytes/s") return `${size(value)}/s`;
  if (unit === "share") return share(value);
  const number = Math.abs(value) >= 1000 ? count(value) : String(Number(value.toPrecision(4)));
  return unit ? `${number} ${unit}` : number;
}

/** The value of a table's cell with the unit that the column's name implies. */
export function cell(column: string, value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return Array.isArray(value) ? value.map((each) => cell(column, each)).join(", ") : short(String(value));
  if (["index", "step", "rank", "line", "device", "queue", "row"].includes(column)) return String(value);
  if (column === "start_ns") return moment(value);
  if (column.endsWith("_ns") || column === "ns") return duration(value);
  if (column.endsWith("bytes") || column === "bytes_allocated") return size(value);
  return /(share|occupancy|utilisation)$/.test(column) ? share(value) : count(value);
}

/** A text of at most `length` characters, its middle left out: names of a trace may have megabytes. */
export function short(text: string, length = 300): string {
  if (text.length <= length) return text;
  const half = (length - 1) >> 1;
  return `${text.slice(0, half)}…${text.slice(-half)}`;
}

/** A text as a sentence begins, unless it begins with a name such as aten::mm. */
export const sentence = (text: string) => (/^[a-z]+[ ,.]/.test(text) ? text[0]!.toUpperCase() + text.slice(1) : text);

/** Integers in proportion to `parts` that add up exactly to `whole` (an integer): those with the largest rests are rounded up. */
export function apportion(parts: readonly number[], whole: number): number[] {
  const sum = parts.reduce((a, b) => a + b, 0);
  if (!sum) return parts.map(() => 0);
  const exact = parts.map((part) => (part / sum) * whole);
  const result = exact.map(Math.floor);
  const left = whole - result.reduce((a, b) => a + b, 0);
  const order = exact.map((value, place) => [value - Math.floor(value), place] as const).sort((a, b) => b[0] - a[0]);
  for (const [, place] of order.slice(0, left)) result[place]! += 1;
  return result;
}

function scaled(value: number, units: Units): string {
  if (!Number.isFinite(value)) return UNKNOWN;
  for (const [place, [unit, word, digits]] of units.entries()) {
    // The larger unit where the smaller one would round up to it: 999.96 ms is "1.00 s".
    const [smaller, , precision] = units[Math.min(place + 1, units.length - 1)]!;
    const rounded = Number(fixed(Math.abs(value) / smaller, precision)) * smaller;
    if (rounded >= unit || place === units.length - 1) return `${grouped(value / unit, digits)} ${word}`;
  }
  return UNKNOWN;
}

/** As `toFixed`, but a value exactly between two goes to the even one, as in Python. */
function fixed(value: number, digits: number): string {
  const text = value.toFixed(digits);
  const isTie = (value * 2 * 10 ** digits) % 2 === 1 || (value * 2 * 10 ** digits) % 2 === -1;
  if (!isTie || !/[13579]$/.test(text) || !/^50*$/.test(value.toFixed(digits + 30).slice(digits ? text.length : text.length + 1))) return text;
  return (value - Math.sign(value) * 10 ** -digits * 0.6).toFixed(digits);
}

function grouped(value: number, digits: number): string {
  const [whole = "", fraction] = fixed(value, digits).split(".");
  const text = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (fraction ? `.${fraction}` : "");
  return /^-[0.]+$/.test(text) ? text.slice(1) : text;
}
