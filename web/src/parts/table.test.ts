import { expect, it } from "vitest";
import { fittingColumns, found, sorted, type Column } from "./table";

interface Row {
  name: string;
  ns: number | null;
}
const columns: Column<Row>[] = [
  { name: "name", title: "Name", value: (row) => row.name },
  { name: "ns", title: "Time", value: (row) => row.ns },
];
const rows: Row[] = [{ name: "b", ns: 900 }, { name: "a", ns: 2_000 }, { name: "c", ns: 30 }, { name: "d", ns: null }];
const names = (those: readonly Row[]) => those.map((row) => row.name).join("");

it("sorts by number and by name, what is unknown last", () => {
  expect(names(sorted(rows, columns, "-ns"))).toBe("abcd");
  expect(names(sorted(rows, columns, "ns"))).toBe("cbad");
  expect(names(sorted(rows, columns, "name"))).toBe("abcd");
  expect(names(sorted(rows, columns, "-name"))).toBe("dcba");
  expect(names(sorted(rows, columns, "gone"))).toBe("bacd");
});

it("equal rows keep their order", () => {
  const equal = [..."hgfedcba"].map((name) => ({ name, ns: 1 }));
  expect(names(sorted(equal, columns, "-ns"))).toBe("hgfedcba");
});

it("filters by every word, without regard to case", () => {
  const kernels = [{ name: "void Gemm<float>", ns: 1 }, { name: "void add<float>", ns: 2 }];
  expect(names(found(kernels, columns, "FLOAT gemm"))).toBe("void Gemm<float>");
  expect(found(kernels, columns, "  ")).toBe(kernels);
});

it("where there is no room, spare columns go first, and the others keep their order", () => {
  const wide: Column<Row>[] = [columns[0]!, { ...columns[1]!, width: 100 }, { name: "a", title: "", value: () => 0, width: 100, spare: 1 }, { name: "b", title: "", value: () => 0, width: 100, spare: 2 }];
  const names = (width: number) => fittingColumns(wide, width).map((column) => column.name);
  expect(names(580)).toEqual(["name", "ns", "a", "b"]);
  expect(names(579)).toEqual(["name", "ns", "a"]);
  expect(names(100)).toEqual(["name", "ns"]);
});
