import { describe, expect, it } from "vitest";
import type { Diagnosis, Finding, Links, Stretch } from "./schema";
import { findingValues, isRelated, lineOf, rangeOf, relatedTo, valueOf, within } from "./selection";

const place = (line: number) => ({ file: "train.py", line, function: "main", share: 1, exact_line: true, call_path: [], inside: [] });
const finding = (rule: string, lines: number[], intervals: [number, number][] = []) =>
  ({
    rule,
    where: lines.map(place),
    evidence: { figures: [], intervals: intervals.map(([start_ns, duration_ns]) => ({ start_ns, duration_ns, what: "" })) },
  }) as unknown as Finding;
const diagnosis = {
  findings: [finding("input-bound", [42], [[5, 10], [120, 20]]), finding("loop", [46]), finding("loop", [])],
  steps: { list: [{ index: 7, start_ns: 0, duration_ns: 100 }, { index: 8, start_ns: 100, duration_ns: 100 }, { index: 9, start_ns: 200, duration_ns: 50 }] },
} as unknown as Diagnosis;
const NAMES = ["train.py:42", "train.py:46", "aten::mm", "gemm", "aten::add", "add", "input", "Net.0"];
const links: Links = {
  names: NAMES,
  work: { line: [1, 1, 0], module: [7, -1, -1], operator: [2, 4, 4], kernel: [3, 5, 5], ns: [100, 10, 1] },
  idle: { cause: [6, 6], line: [0, 1], ns: [1000, 1] },
  steps: { step: [], cause: [], ns: [] },
};
const keys = (related: ReturnType<typeof relatedTo>, kind: "line" | "operator" | "kernel" | "module" | "cause" | "finding" | "step") =>
  related?.[kind] && [...related[kind]!.keys()].sort();

it("findings are named by their rule, and numbered where it fires twice", () => {
  expect(findingValues(diagnosis.findings)).toEqual(["input-bound", "loop", "loop-2"]);
});

it("without a choice everything is related", () => {
  expect(relatedTo(null, diagnosis, links)).toBeNull();
  expect(isRelated(null, "kernel", "gemm")).toBe(true);
});

describe("a choice relates to what ran with it", () => {
  it("a line", () => {
    const related = relatedTo({ kind: "line", value: "train.py:46" }, diagnosis, links);
    expect(keys(related, "kernel")).toEqual(["add", "gemm"]);
    expect(keys(related, "module")).toEqual(["Net.0"]);
    expect(related?.operator?.get("aten::mm")).toBe(100);
    expect(keys(related, "finding")).toEqual(["loop"]);
    expect(keys(related, "line")).toEqual(["train.py:46"]);
  });
  it("a kernel", () => {
    const related = relatedTo({ kind: "kernel", value: "add" }, diagnosis, links);
    expect(keys(related, "line")).toEqual(["train.py:42", "train.py:46"]);
    expect(keys(related, "operator")).toEqual(["aten::add"]);
    expect(isRelated(related, "kernel", "gemm")).toBe(false);
  });
  it("a cause, without lines that have next to nothing of it", () => {
    const related = relatedTo({ kind: "cause", value: "input" }, diagnosis, links);
    expect(keys(related, "line")).toEqual(["train.py:42"]);
    expect(keys(related, "finding")).toEqual(["input-bound"]);
  });
  it("a finding: its lines, what ran there, and the steps of its intervals", () => {
    const related = relatedTo({ kind: "finding", value: "input-bound" }, diagnosis, links);
    expect(keys(related, "line")).toEqual(["train.py:42"]);
    expect(keys(related, "kernel")).toEqual(["add"]);
    expect(keys(related, "cause")).toEqual(["input"]);
    expect(keys(related, "step")).toEqual(["7", "8"]);
  });
});

it("of what nothing is known, nothing is hidden", () => {
  const unknown = relatedTo({ kind: "finding", value: "loop-2" }, diagnosis, links);
  expect(isRelated(unknown, "kernel", "gemm")).toBe(true);
  const alone = relatedTo({ kind: "operator", value: "aten::mm" }, diagnosis);
  expect(isRelated(alone, "kernel", "gemm")).toBe(true);
  expect(isRelated(alone, "operator", "aten::add")).toBe(false);
});

it("names of megabytes have a short value, the same each time", () => {
  const name = "x".repeat(10_000_000);
  expect(valueOf(name).length).toBeLessThan(120);
  expect(valueOf(name)).toBe(valueOf(`${name}`));
  expect(valueOf(`${name}y`)).not.toBe(valueOf(name));
  expect(lineOf({ file: "a.py", line: 3 })).toBe("a.py:3");
});

it("a finding is looked at where it cost most", () => {
  expect(rangeOf(diagnosis.findings[0]!)).toEqual({ start: 120, end: 140 });
  expect(rangeOf(diagnosis.findings[1]!)).toBeNull();
});

describe("a stretch of time", () => {
  const slice = (kind: string, name: string, ns: number, self_ns: number | null) => ({ kind, name, count: 1, ns, self_ns });
  const stretch = {
    devices: [{ device: "0", busy_ns: 5, idle: [{ cause: "input", ns: 7 }] }],
    slices: [slice("operator", "aten::mm", 9, 4), slice("compute", "gemm", 5, null), slice("annotation", "step", 9, 0)],
    slices_in_all: 3,
    lines: [],
    lines_in_all: 0,
    modules: [],
    modules_in_all: 0,
  } as unknown as Stretch;

  it("relates to what ran in it", () => {
    const related = within(null, stretch);
    expect([...related!.operator!]).toEqual([["aten::mm", 4]]);
    expect([...related!.kernel!]).toEqual([["gemm", 5]]);
    expect(keys(related, "cause")).toEqual(["input"]);
    expect(related!.line).toBeUndefined();
  });
  it("narrows what is chosen", () => {
    const related = within(relatedTo({ kind: "line", value: "train.py:46" }, diagnosis, links), stretch);
    expect(keys(related, "kernel")).toEqual(["gemm"]);
    expect(keys(related, "line")).toEqual(["train.py:46"]);
  });
  it("hides nothing of a list that is cut", () => {
    expect(within(null, { ...stretch, slices_in_all: 4 })!.operator).toBeUndefined();
    expect(within(null, undefined)).toBeNull();
  });
});
