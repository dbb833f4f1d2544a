/** A matrix of figures as the cells of a picture that may have fewer of them. */

export interface Cells {
  rows: number;
  columns: number;
  value: Float64Array; // the largest of each cell, NaN where nothing is known
}

/** Cells of a picture with at most so many rows and columns; each shows the largest of its figures, so that none is lost. */
export function binned(figures: readonly (readonly (number | null)[])[], mostRows: number, mostColumns: number): Cells {
  const wide = Math.max(0, ...figures.map((row) => row.length));
  const rows = Math.min(figures.length, Math.max(mostRows, 1));
  const columns = Math.min(wide, Math.max(mostColumns, 1));
  const value = new Float64Array(rows * columns).fill(NaN);
  figures.forEach((figure, y) => {
    const row = cellOf(y, figures.length, rows) * columns;
    figure.forEach((each, x) => {
      if (each === null) return;
      const at = row + cellOf(x, wide, columns);
      if (!(value[at]! >= each)) value[at] = each;
    });
  });
  return { rows, columns, value };
}

/** The cell of one of `count` things that stand in `cells` cells. */
export const cellOf = (at: number, count: number, cells: number) => Math.min(Math.floor((at * cells) / Math.max(count, 1)), cells - 1);

/** The first thing of a cell. */
export const firstOf = (cell: number, count: number, cells: number) => Math.ceil((cell * count) / Math.max(cells, 1));

/** Least and largest figure; [0, 0] where there is none. */
export function extent(figures: readonly (readonly (number | null)[])[]): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const row of figures) {
    for (const each of row) {
      if (each === null) continue;
      if (each < low) low = each;
      if (each > high) high = each;
    }
  }
  return low <= high ? [low, high] : [0, 0];
}

/** Mean of what is known; null where nothing is. */
export function mean(row: readonly (number | null)[]): number | null {
  const known = row.filter((each) => each !== null);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}
