import { expect, it } from "vitest";
import { ancestors, laidOut, neighbour, placed, search, type Node } from "./tree";

const node = (name: string, parent: number, value: number): Node => ({ name, parent, value, kind: 0 });
// model 60 (block 40 (linear 30, norm 10), head 15), loss 40
const NODES = [node("model", -1, 60), node("block", 0, 40), node("linear", 1, 30), node("norm", 1, 10), node("head", 0, 15), node("loss", -1, 40)];

it("places siblings side by side, and children inside their parents", () => {
  const { left, depth, whole } = placed(NODES);
  expect(whole).toBe(100);
  expect([...left]).toEqual([0, 0, 0, 30, 40, 60]);
  expect([...depth]).toEqual([0, 1, 2, 2, 1, 0]);
});

it("children stay within their parents on any tree", () => {
  let seed = 7;
  const random = () => (seed = (seed * 1103515245 + 12345) % 2 ** 31) / 2 ** 31;
  const nodes: Node[] = [];
  const room: number[] = [];
  for (let at = 0; at < 400; at++) {
    const parent = at ? Math.floor(random() * (at + 1)) - 1 : -1;
    const value = parent < 0 ? 1000 : Math.floor(room[parent]! * random() * 0.7);
    if (parent >= 0) room[parent]! -= value;
    room.push(value);
    nodes.push(node(String(at), parent, value));
  }
  const { left } = placed(nodes);
  nodes.forEach(({ parent, value }, at) => {
    if (parent < 0) return;
    expect(left[at]!).toBeGreaterThanOrEqual(left[parent]!);
    expect(left[at]! + value).toBeLessThanOrEqual(left[parent]! + nodes[parent]!.value);
  });
});

it("the node that is looked at is as wide as the picture, with what is around it above", () => {
  const { boxes, rows } = laidOut(NODES, 1, 0);
  expect(rows).toBe(3);
  expect(boxes.map((box) => [NODES[box.node]!.name, box.left, box.width, box.isAround])).toEqual([
    ["model", 0, 1, true],
    ["block", 0, 1, false],
    ["linear", 0, 0.75, false],
    ["norm", 0.75, 0.25, false],
  ]);
});

it("leaves out what is too narrow to see, and draws nothing of nothing", () => {
  expect(laidOut(NODES, -1, 0.12).boxes.map((box) => NODES[box.node]!.name)).toEqual(["model", "block", "linear", "head", "loss"]);
  expect(laidOut([], -1, 0)).toEqual({ boxes: [], rows: 0, whole: 0 });
  expect(laidOut([node("a", -1, 0)], -1, 0).boxes[0]!.width).toBe(0);
});

it("counts what is found inside another found one once", () => {
  expect(search(NODES, "L")).toEqual({ found: new Set([0, 1, 2, 5]), value: 100 });
  expect(search(NODES, "norm")).toEqual({ found: new Set([3]), value: 10 });
  expect(search(NODES, "  ").found.size).toBe(0);
});

it("arrows lead to the parent, the widest child and the siblings", () => {
  const layout = laidOut(NODES, -1, 0);
  expect(neighbour(layout, NODES, 1, "ArrowUp")).toBe(0);
  expect(neighbour(layout, NODES, 0, "ArrowUp")).toBe(0);
  expect(neighbour(layout, NODES, 1, "ArrowDown")).toBe(2);
  expect(neighbour(layout, NODES, 2, "ArrowDown")).toBe(2);
  expect(neighbour(layout, NODES, 1, "ArrowRight")).toBe(4);
  expect(neighbour(layout, NODES, 1, "ArrowLeft")).toBe(1);
  expect(neighbour(layout, NODES, 2, "End")).toBe(3);
  expect(neighbour(layout, NODES, 99, "ArrowDown")).toBe(0);
  expect(ancestors(NODES, 3)).toEqual([3, 1, 0]);
});
