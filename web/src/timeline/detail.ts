/** The exact level of detail of a row of disjoint slices: what view/timeline.py does for a server, for what is already here. */

export interface Slices {
  start: ArrayLike<number>;
  duration: ArrayLike<number>;
}

export interface Detail {
  rows: number[]; // slices at least as wide as the widest pixel, which are drawn one by one
  busy: Float64Array | null; // of each pixel, the time that narrower ones cover; null if there are none
}

/** Boundaries of the pixels of a window, as the server has them; `width + 1` of them. */
export function edgesOf(start: number, end: number, width: number): Float64Array {
  const edges = new Float64Array(width + 1);
  for (let at = 0; at <= width; at++) edges[at] = start + Math.floor(((end - start) * at) / width);
  return edges;
}

/** The number of values in `sorted` that are less than `value`. */
export function lowerBound(sorted: ArrayLike<number>, value: number): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The first slice that reaches into a window that begins here. */
export function firstTouching({ start, duration }: Slices, time: number): number {
  const first = lowerBound(start, time);
  return first > 0 && start[first - 1]! + duration[first - 1]! > time ? first - 1 : first;
}

/** The slice at a time, -1 for none. */
export function sliceAt({ start, duration }: Slices, time: number): number {
  const at = lowerBound(start, time + 1e-9) - 1;
  return at >= 0 && time < start[at]! + duration[at]! ? at : -1;
}

export function detail(slices: Slices, edges: ArrayLike<number>): Detail {
  const { start, duration } = slices;
  const width = edges.length - 1;
  const [begin, end] = [edges[0]!, edges[width]!];
  let pixel = 0;
  for (let at = 0; at < width; at++) pixel = Math.max(pixel, edges[at + 1]! - edges[at]!);
  pixel = Math.max(pixel, Number.MIN_VALUE);
  const scale = width / (end - begin);
  const rows: number[] = [];
  let busy: Float64Array | null = null;
  for (let at = firstTouching(slices, begin); at < start.length && start[at]! < end; at++) {
    const from = start[at]!;
    const length = duration[at]!;
    if (length >= pixel) {
      if (from + length > begin) rows.push(at);
      continue;
    }
    if (!length) continue;
    busy ??= new Float64Array(width);
    let place = Math.min(Math.max(Math.floor((from - begin) * scale), 0), width - 1);
    while (place > 0 && edges[place]! > from) place--;
    while (place < width - 1 && edges[place + 1]! <= from) place++;
    for (; place < width && edges[place]! < from + length; place++) {
      busy[place]! += Math.max(Math.min(from + length, edges[place + 1]!) - Math.max(from, edges[place]!), 0);
    }
  }
  return { rows, busy };
}

/** Time covered until each boundary of other pixels, from the time covered in each pixel; so it is spread evenly in each. */
export class Covered {
  private readonly until: Float64Array;

  constructor(private readonly begin: number, private readonly end: number, busy: ArrayLike<number>) {
    this.until = new Float64Array(busy.length + 1);
    for (let at = 0; at < busy.length; at++) this.until[at + 1] = this.until[at]! + busy[at]!;
  }

  /** Add the time covered in each of these pixels; returns whether there was any. */
  addTo(busy: Float64Array, edges: ArrayLike<number>): boolean {
    let any = false;
    let last = this.at(edges[0]!);
    for (let place = 0; place < busy.length; place++) {
      const next = this.at(edges[place + 1]!);
      if (next > last) {
        busy[place]! += next - last;
        any = true;
      }
      last = next;
    }
    return any;
  }

  private at(time: number): number {
    const width = this.until.length - 1;
    const place = ((time - this.begin) / (this.end - this.begin)) * width;
    if (place <= 0) return 0;
    if (place >= width) return this.until[width]!;
    const whole = Math.floor(place);
    const before = this.until[whole]!;
    return before + (this.until[whole + 1]! - before) * (place - whole);
  }
}
