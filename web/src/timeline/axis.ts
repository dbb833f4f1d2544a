/** The time axis: where its marks are and what they say. */

export interface Tick {
  time: number;
  label: string;
}

export interface Axis {
  ticks: Tick[];
  base: string; // what the labels are counted from; "" if from the start of the recording
}

const UNITS: [number, string][] = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];

/** The smallest of 1, 2, 5, 10, 20, ... that is no less than this. */
export function roundStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least - 1e-9) ?? 10 * power;
}

/** Marks at round times, at least `apart` pixels from each other. */
export function axisOf(start: number, end: number, width: number, apart = 90): Axis {
  const step = roundStep(((end - start) * apart) / Math.max(width, 1));
  const [unit, word] = UNITS.find(([each]) => step >= each) ?? UNITS[3]!;
  // A label has at most five digits before its point; what exceeds them is said once.
  const group = unit * 1000;
  const base = end / unit >= 1e4 ? Math.floor(start / group) * group : 0;
  const ticks: Tick[] = [];
  for (let time = Math.ceil(start / step) * step; time <= end; time += step) {
    const label = `${trimmed((time - base) / unit)} ${word}`;
    ticks.push({ time, label: base ? `+${label}` : label });
  }
  return { ticks, base: base ? said(base) : "" };
}

/** A moment with all of its digits down to the unit that divides it: "1.234567 s". */
function said(time: number): string {
  const [unit, word] = UNITS.find(([each]) => time >= each) ?? UNITS[3]!;
  return `${trimmed(time / unit)} ${word}`;
}

const trimmed = (value: number) => String(Number(value.toFixed(9)));
