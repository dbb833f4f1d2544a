/** What is related to a choice: a row of any view is shown if it is related, or if nothing says that it is not. */

import type { Diagnosis, Finding, Links, Place, Step, Stretch } from "./schema";
import type { Range, Selection } from "./state";

type Kind = Selection["kind"];
type Column = "line" | "module" | "operator" | "kernel";

/** By kind, what is related and how many nanoseconds of it; a kind is absent where nothing is known of it. */
export type Related = Partial<Record<Kind, Map<string, number>>>;

const LONGEST = 400;
const SMALL = 0.02; // a line with less of a cause is not what the cause is about

/** A name as a value of the address; names of megabytes become their beginning and a hash. */
export function valueOf(name: string): string {
  if (name.length <= LONGEST) return name;
  let hash = 5381 ^ name.length;
  for (let at = 0; at < Math.min(name.length, 10_000); at++) hash = ((hash * 33) ^ name.charCodeAt(at)) >>> 0;
  return `${name.slice(0, 100)}…${hash.toString(36)}`;
}

export const lineOf = (place: { file: string; line: number }) => valueOf(`${place.file}:${place.line}`);

/** Names of findings that stay the same when the recording is read again: the rule, numbered where it fires twice. */
export function findingValues(findings: readonly Finding[]): string[] {
  const seen = new Map<string, number>();
  return findings.map(({ rule }) => {
    const number = (seen.get(rule) ?? 0) + 1;
    seen.set(rule, number);
    return number === 1 ? rule : `${rule}-${number}`;
  });
}

export function findingOf(value: string, findings: readonly Finding[]): Finding | undefined {
  return findings[findingValues(findings).indexOf(value)];
}

/** Everything related to the choice; null without one. */
export function relatedTo(selection: Selection | null, diagnosis?: Diagnosis, links?: Links): Related | null {
  if (!selection) return null;
  const findings = diagnosis?.findings ?? [];
  const related = expanded(selection, findings, diagnosis?.steps.list ?? [], links);
  related[selection.kind] = new Map([[selection.value, related[selection.kind]?.get(selection.value) ?? 0]]);
  if (selection.kind !== "finding" && related.line) {
    const values = findingValues(findings);
    const about = findings.flatMap((each, place) => (each.where.some((at) => related.line!.has(lineOf(at))) ? [values[place]!] : []));
    related.finding = new Map(about.map((value) => [value, 0]));
  }
  return related;
}

/** Whether a row is related: true without a choice, and where nothing is known of its kind. */
export function isRelated(related: Related | null, kind: Kind, value: string | null): boolean {
  const those = related?.[kind];
  return !those || (value !== null && those.has(value));
}

/** What is chosen, as far as it ran in a stretch of time; either may be absent. */
export function within(related: Related | null, stretch?: Stretch): Related | null {
  if (!stretch) return related;
  const ran = ofStretch(stretch);
  if (!related) return ran;
  const both: Related = { ...ran, ...related };
  for (const kind of Object.keys(both) as Kind[]) {
    const [here, there] = [related[kind], ran[kind]];
    if (here && there) both[kind] = new Map([...here].filter(([value]) => there.has(value)).map(([value]) => [value, 0]));
  }
  return both;
}

/** What filters the rows of a kind: what is related, but not the choice of one of them, which is only marked. */
export const filterOf = (related: Related | null, selection: Selection | null, kind: Kind) => (selection?.kind === kind ? undefined : related?.[kind]);

/** Steps that a stretch of time touches. */
export function stepsIn(range: Range, steps: readonly Step[]): Step[] {
  return steps.filter((step) => step.start_ns < range.end && step.start_ns + step.duration_ns > range.start);
}

/** The stretch of time to look at for a finding: its longest interval. */
export function rangeOf(finding: Finding): Range | null {
  const longest = [...finding.evidence.intervals].sort((a, b) => b.duration_ns - a.duration_ns)[0];
  return longest ? { start: longest.start_ns, end: longest.start_ns + longest.duration_ns } : null;
}

function expanded(selection: Selection, findings: readonly Finding[], steps: readonly Step[], links?: Links): Related {
  if (selection.kind === "finding") {
    const finding = findingOf(selection.value, findings);
    return finding ? ofFinding(finding, steps, links) : {};
  }
  if (selection.kind === "cause") return links ? withLines(ofCause(selection.value, links)) : {};
  if (selection.kind === "line" || selection.kind === "module" || selection.kind === "operator" || selection.kind === "kernel") {
    const known = selection.kind === "line" ? { line: new Map([[selection.value, 0]]) } : {};
    return links ? { ...known, ...working(selection.kind, new Set([selection.value]), links) } : known;
  }
  return {};

  function withLines(related: Related): Related {
    const lines = related.line;
    return lines?.size ? { ...working("line", new Set(lines.keys()), links!), ...related } : related;
  }
}

function ofFinding(finding: Finding, steps: readonly Step[], links?: Links): Related {
  const places = new Set(finding.where.map((place: Place) => lineOf(place)));
  const related: Related = places.size && links ? working("line", places, links) : {};
  if (places.size) related.line = new Map([...places].map((place) => [place, related.line?.get(place) ?? 0]));
  const { intervals } = finding.evidence;
  if (intervals.length) {
    const touched = intervals.flatMap(({ start_ns, duration_ns }) => stepsIn({ start: start_ns, end: start_ns + duration_ns }, steps));
    related.step = new Map(touched.map((step) => [String(step.index), 0]));
  }
  return related;
}

function ofCause(cause: string, { names, idle }: Links): Related {
  const lines = new Map<string, number>();
  let whole = 0;
  idle.cause.forEach((number, row) => {
    if (names[number] !== cause) return;
    whole += idle.ns[row]!;
    const line = names[idle.line[row]!];
    if (line !== undefined) add(lines, valueOf(line), idle.ns[row]!);
  });
  for (const [line, ns] of lines) if (ns < SMALL * whole) lines.delete(line);
  return lines.size ? { line: lines } : {};
}

/** Work in which the column has one of these values, by every column; and the causes that stand at its lines. */
function working(column: Column, values: ReadonlySet<string>, { names, work, idle }: Links): Related {
  const keys = names.map(valueOf);
  const wanted = new Set(keys.flatMap((key, number) => (values.has(key) ? [number] : [])));
  const found = { line: new Map(), module: new Map(), operator: new Map(), kernel: new Map() } as Record<Column, Map<string, number>>;
  work[column].forEach((number, row) => {
    if (!wanted.has(number)) return;
    for (const other of Object.keys(found) as Column[]) {
      const key = keys[work[other][row]!];
      if (key !== undefined) add(found[other], key, work.ns[row]!);
    }
  });
  const related: Related = { ...found };
  if (column === "line") {
    const causes = new Map<string, number>();
    idle.line.forEach((number, row) => wanted.has(number) && add(causes, keys[idle.cause[row]!]!, idle.ns[row]!));
    related.cause = causes;
  }
  return related;
}

function add(sums: Map<string, number>, key: string, ns: number): void {
  sums.set(key, (sums.get(key) ?? 0) + ns);
}

const HOST_KINDS = new Set(["annotation", "module", "frame", "operator", "launch", "wait", "line"]);

/** What ran in a stretch; of a list that is cut, nothing is known. */
function ofStretch({ slices, slices_in_all, lines, lines_in_all, modules, modules_in_all, devices }: Stretch): Related {
  const related: Related = { cause: sums(devices.flatMap(({ idle }) => idle.map(({ cause, ns }) => [cause, ns]))) };
  if (slices.length === slices_in_all) {
    related.operator = sums(slices.filter(({ kind }) => kind === "operator").map(({ name, ns, self_ns }) => [valueOf(name), self_ns ?? ns]));
    related.kernel = sums(slices.filter(({ kind }) => !HOST_KINDS.has(kind)).map(({ name, ns }) => [valueOf(name), ns]));
  }
  if (lines.length && lines.length === lines_in_all) related.line = sums(lines.map((line) => [lineOf(line), line.device_ns || line.host_ns]));
  if (modules.length && modules.length === modules_in_all) related.module = sums(modules.map((each) => [valueOf(each.module), each.device_ns || each.host_ns]));
  return related;
}

function sums(pairs: [string, number][]): Map<string, number> {
  const found = new Map<string, number>();
  for (const [key, ns] of pairs) add(found, key, ns);
  return found;
}
