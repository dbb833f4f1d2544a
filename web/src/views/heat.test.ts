import { expect, it } from "vitest";
import { binned, cellOf, extent, firstOf, mean } from "./heat";

it("without need for fewer cells, each figure has its own", () => {
  const { rows, columns, value } = binned([[1, 2], [3, null]], 10, 10);
  expect([rows, columns]).toEqual([2, 2]);
  expect([...value]).toEqual([1, 2, 3, NaN]);
});

it("a cell of several figures shows the largest, so that a slow rank is seen among 1,024", () => {
  const figures = Array.from({ length: 1024 }, (_, rank) => [rank === 777 ? 99 : 1, null]);
  const { rows, columns, value } = binned(figures, 300, 1);
  expect([rows, columns]).toEqual([300, 1]);
  expect(value[cellOf(777, 1024, 300)]).toBe(99);
  expect(value.filter((each) => each === 99)).toHaveLength(1);
});

it("every figure is in the cell that its place says, and the largest is never lost", () => {
  let seed = 3;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  for (const [rows, columns] of [[7, 3], [1, 1], [40, 9]] as const) {
    const figures = Array.from({ length: 40 }, () => Array.from({ length: 9 }, () => (random() < 0.2 ? null : random())));
    const cells = binned(figures, rows, columns);
    figures.forEach((row, y) =>
      row.forEach((each, x) => each !== null && expect(cells.value[cellOf(y, 40, cells.rows) * cells.columns + cellOf(x, 9, cells.columns)]).toBeGreaterThanOrEqual(each)),
    );
    expect(Math.max(...[...cells.value].filter((each) => !Number.isNaN(each)))).toBe(extent(figures)[1]);
    for (let cell = 0; cell < cells.rows; cell++) expect(cellOf(firstOf(cell, 40, cells.rows), 40, cells.rows)).toBe(cell);
  }
});

it("nothing has no extent and no mean", () => {
  expect(extent([[null]])).toEqual([0, 0]);
  expect(mean([null])).toBe(null);
  expect(mean([1, null, 3])).toBe(2);
  expect(binned([], 5, 5).rows).toBe(0);
});
