/** Energy, money, hours and grams, as the terminal prints them; see report/energy.py and report/plan.py. */

type Units = readonly (readonly [number, string])[];
export type Bounds = number | readonly number[] | null; // a figure, or the least and the most that it can be

const JOULES: Units = [[1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"], [1e-6, "uJ"]];
const WATT_HOURS: Units = [[3.6e9, "MWh"], [3.6e6, "kWh"], [3.6e3, "Wh"], [3.6, "mWh"], [3.6e-3, "uWh"]];
const KILOGRAMS: Units = [[1e3, "t"], [1, "kg"], [1e-3, "g"], [1e-6, "mg"], [1e-9, "ug"]];
const SAME = 1e-6;
const DAYS_FROM_HOURS = 100.0;

/** Joules as "21.3 J", "812 mJ" or "21.3 to 52.5 J". */
export const energy = (joules: Bounds) => bounds(joules, JOULES);
/** Joules as what an electricity meter counts: "1.2 kWh", "340 to 820 Wh". */
export const electricity = (joules: Bounds) => bounds(joules, WATT_HOURS);
export const mass = (kilograms: Bounds) => bounds(kilograms, KILOGRAMS);
export const plain = (value: Bounds, unit: string) => bounds(value, [[1, unit]]);

/** Shares as "31.2 %" or "5.0 to 31.2 %". */
export function shares(values: readonly number[]): string {
  const [low, high] = [Math.min(...values), Math.max(...values)].map((value) => (100 * value).toFixed(1));
  return low === high ? `${high} %` : `${low} to ${high} %`;
}

function bounds(value: Bounds, units: Units): string {
  if (value === null || (typeof value !== "number" && !value.length)) return "unknown";
  const [low, high] = typeof value === "number" ? [value, value] : [Math.min(...value), Math.max(...value)];
  const [scale, word] = units.find(([unit]) => high >= unit * 0.9995) ?? units[units.length - 1]!;
  if (high - low <= SAME * Math.abs(high)) return `${digits(high / scale)} ${word}`;
  if (low > 0 && low < scale / 100) return `${bounds(low, units)} to ${digits(high / scale)} ${word}`;
  const [first, second] = [digits(low / scale), digits(high / scale)];
  return first === second ? `${second} ${word}` : `${first} to ${second} ${word}`;
}

function digits(value: number): string {
  if (value === 0) return "0";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-US");
  if (Math.abs(value) >= 0.1) return value.toFixed(Math.abs(value) < 10 ? 2 : 1);
  return value.toPrecision(2).includes("e") ? value.toFixed(6).replace(/\.?0+$/, "") : String(Number(value.toPrecision(2)));
}

/** US dollars as "$1,234.56", "$0.74" or "$0.0031"; without cents above a hundred thousand. */
export function dollars(usd: number): string {
  const grouped = (places: number) => usd.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  if (Math.abs(usd) >= 100_000) return `$${grouped(0)}`;
  return Math.abs(usd) >= 0.095 || !usd ? `$${grouped(2)}` : `$${Number(usd.toPrecision(2))}`;
}

/** "12.3 h (10.1 to 15.0 h)"; without the range where it reads the same. */
export function band(value: number, low: number, high: number, words: (value: number) => string): string {
  const [at, least, most] = [words(value), words(low), words(high)];
  if (least === most) return at;
  return `${at} (${span(least, most)})`;
}

/** "10.1 to 15.0 h", with the unit once where it is the same. */
export function span(least: string, most: string): string {
  const [number, unit] = least.split(" ");
  return least === most ? "" : `${unit && most.endsWith(` ${unit}`) ? number : least} to ${most}`;
}

/** A cost, from a hundred dollars on without cents. */
export const money = (usd: number) => (usd >= 99.995 ? `$${Math.round(usd).toLocaleString("en-US")}` : dollars(usd));

/** Hours as "42 min", "12.3 h" or "5.1 days", in the unit that suits `like`. */
export function hours(h: number, like = h): string {
  if (like < 1 / 60) return `${Number((h * 3600).toPrecision(2))} s`;
  if (like < 1) return `${Math.round(h * 60)} min`;
  if (like < DAYS_FROM_HOURS) return `${h.toFixed(1)} h`;
  return h / 24 < 1000 ? `${(h / 24).toFixed(1)} days` : `${Math.round(h / 24).toLocaleString("en-US")} days`;
}
