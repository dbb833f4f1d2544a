/** A figure with its range, as a bar on a scale that starts at zero. */

interface RangedProps {
  value: number | null;
  low: number | null;
  high: number | null;
  most: number; // of the scale
  mark?: number; // another figure to compare with
}

export function Ranged({ value, low, high, most, mark }: RangedProps) {
  const at = (x: number) => `${Math.min(Math.max((100 * x) / most, 0), 100)}%`;
  return (
    <span class="ranged" aria-hidden="true">
      {low !== null && high !== null && <i class="range" style={{ left: at(low), width: `calc(${at(high)} - ${at(low)})` }} />}
      {value !== null && <i class="value" style={{ left: at(value) }} />}
      {mark !== undefined && <i class="mark" style={{ left: at(mark) }} />}
    </span>
  );
}
