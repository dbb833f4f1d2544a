/** Options of a command as fields and sliders; they stand in the address by the option's name. */

import { useEffect, useId, useState } from "preact/hooks";
import { change, parameter } from "../state";

/** Those that are chosen. */
export function asked(names: readonly string[]): Record<string, string> {
  return Object.fromEntries(names.flatMap((name) => (parameter(name) ? [[name, parameter(name)!]] : [])));
}

interface FieldProps {
  name: string;
  label: string;
  placeholder: string;
}

export const Field = ({ name, label, placeholder }: FieldProps) => (
  <label class="field">
    <span>{label}</span>
    <Value name={name} placeholder={placeholder} />
  </label>
);

function Value({ name, placeholder, label }: { name: string; placeholder: string; label?: string }) {
  const value = parameter(name) ?? "";
  const [text, write] = useState(value);
  useEffect(() => {
    if (text.trim() !== value) write(value);
  }, [value]);
  return (
    <input
      type="text"
      value={text}
      placeholder={placeholder}
      aria-label={label}
      onInput={(event) => {
        write(event.currentTarget.value);
        change({ [name]: event.currentTarget.value.trim() || null }, true);
      }}
    />
  );
}

interface SliderProps extends FieldProps {
  stops: readonly (number | null)[]; // null: no choice
  usual: number | null; // where it stands without a choice
  words: (value: number | null) => string;
  unit?: string; // that the option has after its number
}

/** A number by a slider or, any number, in the field beside it. */
export function Slider({ name, label, placeholder, stops, usual, words, unit = "" }: SliderProps) {
  const id = useId();
  const chosen = parameter(name);
  const at = nearest(stops, chosen === null ? usual : Number.parseFloat(chosen));
  return (
    <div class="field slider">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="range"
        min="0"
        max={stops.length - 1}
        step="1"
        value={at}
        aria-valuetext={words(stops[at]!)}
        onInput={(event) => {
          const stop = stops[Number(event.currentTarget.value)]!;
          change({ [name]: stop === usual || stop === null ? null : `${stop}${unit}` }, true);
        }}
      />
      <Value name={name} placeholder={placeholder} label={`${label}, as a number`} />
    </div>
  );
}

/** The place of the stop next to a value, as a ratio. */
export function nearest(stops: readonly (number | null)[], value: number | null): number {
  const off = (stop: number | null) => {
    if (stop === null || value === null || Number.isNaN(value)) return stop === value ? 0 : Infinity;
    return stop === value ? 0 : stop > 0 && value > 0 ? Math.abs(Math.log(stop / value)) : Number.MAX_VALUE;
  };
  return stops.reduce<number>((best, stop, place) => (off(stop) < off(stops[best]!) ? place : best), 0);
}

/** Round numbers from one to another, some in each power of ten. */
export function roundStops(low: number, high: number, of = [1, 1.5, 2, 3, 5, 7]): number[] {
  const found: number[] = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const each of of) {
      const stop = Number((each * 10 ** power).toPrecision(3));
      if (stop >= low * 0.999 && stop <= high * 1.001) found.push(stop);
    }
  }
  return found;
}

/** Evenly spaced numbers. */
export const evenStops = (low: number, high: number, step: number): number[] =>
  Array.from({ length: Math.round((high - low) / step) + 1 }, (_, place) => Number((low + place * step).toFixed(6)));

/** Halves and doubles of a batch size, and what lies between. */
export function batchStops(recorded: number): number[] {
  const stops = new Set([recorded]);
  for (let size = 1; size <= 16 * recorded; size *= 2) for (const each of [size, 1.5 * size]) if (Number.isInteger(each) && each <= 16 * recorded) stops.add(each);
  return [...stops].sort((a, b) => a - b);
}
