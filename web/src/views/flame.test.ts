import { expect, it } from "vitest";
import type { Node } from "../parts/tree";
import { byName } from "./flame";
import { moduleNodes } from "./modules";

const node = (name: string, parent: number, value: number): Node => ({ name, parent, value, kind: 0 });

it("counts a function that calls itself once, and its own time everywhere", () => {
  const nodes = [node("walk", -1, 100), node("walk", 0, 60), node("mm", 1, 50), node("mm", 0, 30)];
  const rows = Object.fromEntries(byName(nodes, -1).map(({ name, total_ns, self_ns }) => [name, [total_ns, self_ns]]));
  expect(rows).toEqual({ walk: [100, 20], mm: [80, 80] });
  expect(byName(nodes, 1).map(({ name, total_ns }) => [name, total_ns])).toEqual([["walk", 60], ["mm", 50]]);
});

it("modules in the order of the tree become its nodes", () => {
  const row = (module: string | null, depth: number, total_ns: number) => ({ module, name: module, depth, total_ns });
  const nodes = moduleNodes([row("a", 0, 9), row("a.b", 1, 5), row("a.b.c", 2, 5), row("a.d", 1, 4), row(null, 0, 3)]);
  expect(nodes.map(({ parent }) => parent)).toEqual([-1, 0, 1, 0, -1]);
  expect(nodes.at(-1)!.name).toBe("outside of modules");
});
