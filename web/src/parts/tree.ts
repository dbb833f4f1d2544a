/** Layout of a tree whose widths are times: modules, flame graphs. */

export interface Node {
  name: string;
  parent: number; // -1 at the top; a node comes after its parent
  value: number; // including everything inside it
  kind: number; // colour
}

export interface Box {
  node: number;
  left: number; // of the width, 0 to 1
  width: number;
  row: number;
  isAround: boolean; // holds the node that is looked at, and is as wide as the picture
}

export interface Layout {
  boxes: Box[]; // in the order of the nodes
  rows: number;
  whole: number; // value of the width
}

/** Where each node begins, in the unit of the values, and its depth. Siblings stand side by side in their order. */
export function placed(nodes: readonly Node[]): { left: Float64Array; depth: Int32Array; whole: number } {
  const left = new Float64Array(nodes.length);
  const depth = new Int32Array(nodes.length);
  const next = new Float64Array(nodes.length); // where the next child begins
  let whole = 0;
  nodes.forEach(({ parent, value }, at) => {
    if (parent < 0) {
      left[at] = whole;
      whole += value;
    } else {
      left[at] = next[parent]!;
      next[parent]! += value;
      depth[at] = depth[parent]! + 1;
    }
    next[at] = left[at]!;
  });
  return { left, depth, whole };
}

/** What is drawn if `focus` (-1 for all) is as wide as the picture: it, what is around it, and what is inside it. */
export function laidOut(nodes: readonly Node[], focus: number, least: number): Layout {
  const { left, depth, whole } = placed(nodes);
  const from = focus < 0 ? 0 : left[focus]!;
  const width = (focus < 0 ? whole : nodes[focus]!.value) || 1;
  const around = new Set(ancestors(nodes, focus));
  const inside = new Uint8Array(nodes.length);
  const boxes: Box[] = [];
  let rows = 0;
  nodes.forEach(({ parent, value }, at) => {
    inside[at] = focus < 0 || at === focus || (parent >= 0 && inside[parent]) ? 1 : 0;
    const isAround = around.has(at) && at !== focus;
    const share = value / width;
    if (!isAround && (!inside[at] || share < least)) return;
    rows = Math.max(rows, depth[at]! + 1);
    boxes.push({ node: at, row: depth[at]!, isAround, left: isAround ? 0 : (left[at]! - from) / width, width: isAround ? 1 : share });
  });
  return { boxes, rows, whole };
}

/** A node and what is around it, from the inside. */
export function ancestors(nodes: readonly Node[], node: number): number[] {
  const found: number[] = [];
  for (let at = node; at >= 0; at = nodes[at]!.parent) found.push(at);
  return found;
}

/** Nodes whose names contain every word, and the time that they take; what is inside another found one counts once. */
export function search(nodes: readonly Node[], text: string): { found: Set<number>; value: number } {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Set<number>();
  const covered = new Uint8Array(nodes.length);
  let sum = 0;
  if (!words.length) return { found, value: 0 };
  nodes.forEach(({ name, parent, value }, at) => {
    const lower = name.toLowerCase();
    const isFound = words.every((word) => lower.includes(word));
    if (isFound) found.add(at);
    if (isFound && !(parent >= 0 && covered[parent])) sum += value;
    covered[at] = isFound || (parent >= 0 && covered[parent]) ? 1 : 0;
  });
  return { found, value: sum };
}

/** The node that an arrow leads to: down into the widest one inside, up to what is around, or to the next beside. */
export function neighbour(layout: Layout, nodes: readonly Node[], from: number, key: string): number {
  const at = layout.boxes.findIndex((box) => box.node === from);
  const here = layout.boxes[at];
  if (!here) return layout.boxes[0]?.node ?? -1;
  if (key === "ArrowUp") return Math.max(nodes[from]!.parent, -1) < 0 ? from : nodes[from]!.parent;
  if (key === "ArrowDown") {
    const inside = layout.boxes.filter((box) => nodes[box.node]!.parent === from);
    return inside.reduce<Box | null>((best, box) => (best && best.width >= box.width ? best : box), null)?.node ?? from;
  }
  const row = layout.boxes.filter((box) => box.row === here.row).sort((a, b) => a.left - b.left);
  const place = row.indexOf(here);
  const next = key === "ArrowLeft" ? row[place - 1] : key === "ArrowRight" ? row[place + 1] : key === "Home" ? row[0] : row.at(-1);
  return next?.node ?? from;
}
