/** Documents of the page. All but the session and the timeline are those of `stepscope COMMAND --json`. */

import type { FurtherDocuments } from "./documents";

export interface Cause {
  label: string;
  meaning: string;
  colour: string;
  hatched: boolean;
}

export interface Session {
  title: string; // name of the trace, run or folder
  path?: string; // of the folder of ranks, to name it in a command
  kind: "trace" | "run" | "ranks" | "runs";
  version: string;
  documents: string[]; // names of the documents that can be had
  others: string[]; // names of what it can be compared with
  left_out: string[]; // sentences about what a report file does not have
  causes: Record<string, Cause>; // palette of idle causes and host activities
  kinds: Record<string, Cause>; // palette of device work and slices
  series: string[]; // colours of lines beside each other
}

/** A window of the timeline: `timeline?start&end&width&path&mark`. Times are integer nanoseconds from the start of the trace. */
export interface Timeline {
  start: number;
  end: number;
  first: number; // start of the whole recording
  last: number; // end of the whole recording
  width: number; // pixels; pixel i begins at start + floor((end - start) * i / width)
  whole: boolean; // every slice is here, one by one
  lanes: Lane[];
  steps: { index: number[]; start: number[]; duration: number[] };
  gaps: Gap[]; // idle time of each device by cause; without a device, the main thread's time
  names: string[]; // slices refer to names by number
}

export interface Lane {
  id: string;
  label: string;
  kind: "host" | "worker" | "queue" | "path" | "memory" | "counter" | "other";
  device: string;
  around?: string[]; // frames open during the whole lane, outermost first; they have no row
  rows: Row[]; // by depth
  values?: Values; // of memory and counters
}

/** Slices at least as wide as a pixel, one by one; of all others the time that they cover, so that nothing is sampled. */
export interface Row {
  start: number[];
  duration: number[];
  name: number[];
  kind: number[]; // number of a name; on the critical path, of a cause for host time
  table: number[]; // number of a name
  row: number[]; // row of the table, for details; -1 for none
  busy: number[]; // nanoseconds of each pixel that narrower slices cover; empty where there are none
  marked?: number[]; // with `mark`: 1 for slices that are pointed out
  marked_busy?: number[]; // of each pixel, the part of `busy` that they cover
}

/** Values over time, each until the next; or, where there are too many, the least and the largest of each pixel. */
export interface Values {
  unit: string; // "bytes" or ""
  least: number; // of the whole recording
  most: number;
  start: number[];
  value: number[];
  low: number[];
  high: number[];
}

export interface Gap {
  device: string; // "" for the main thread's time
  start: number[];
  duration: number[];
  cause: number[]; // number of a name
  trigger: number[]; // number of a name, -1 for none
  busy: Record<string, number[]>; // by cause, nanoseconds of each pixel covered by narrower gaps
}

/** What ran between two moments, all times cut at them: `stretch?start&end`. */
export interface Stretch {
  start: number;
  end: number;
  devices: { device: string; busy_ns: number; idle: { cause: string; ns: number }[] }[]; // busy and idle fill the device's time
  slices: { kind: string; name: string; count: number; ns: number; self_ns: number | null }[]; // self: innermost of its thread
  slices_in_all: number; // of which the largest are here
  lines: (Omit<Place, "share"> & { host_ns: number; device_ns: number })[]; // host: of the main thread
  lines_in_all: number;
  modules: { module: string; host_ns: number; device_ns: number }[];
  modules_in_all: number;
}

/** Where a slice of the timeline is. */
export interface SlicePlace {
  lane: string; // "" for a slice without a lane of its own
  depth: number;
  table: string;
  row: number;
  kind: string;
  name: string;
  start: number;
  duration: number;
}

/** Slices whose name contains a text: `places?text&near`. */
export interface Places {
  text: string;
  count: number;
  names: number;
  lanes: { id: string; count: number; ns: number }[];
  first: number; // number of the first one listed
  places: SlicePlace[]; // those around the time `near`
}

/** One slice: `slice?table&row`. */
export interface Slice extends SlicePlace {
  about: Record<string, string | number | boolean>; // shapes, bytes and so on, as the tables have them
  where: Omit<Place, "share"> | null;
  module: string | null;
  links: (SlicePlace & { link: "launch" | "forward_backward" | "event" | "wait"; outgoing: boolean })[];
}

export interface Finding {
  rule: string;
  title: string;
  severity: "high" | "medium" | "low" | "note";
  saving_ns_per_step: number;
  saving_share: number;
  saving_basis: string;
  saving_from: "replayed" | "attributed";
  confidence: "high" | "medium" | "low";
  ends_run_in_ns: number | null;
  evidence: { figures: Figure[]; intervals: Interval[] };
  where: Place[];
  remedy: { text: string; code: string; apply: string[]; diff: string };
}

export interface Figure {
  name: string;
  value: number;
  unit: string; // "ns", "bytes", "share", "count" or ""
  threshold: number | null;
}

export interface Interval {
  start_ns: number;
  duration_ns: number;
  what: string;
}

export interface Place {
  file: string;
  line: number;
  function: string;
  share: number;
  exact_line: boolean;
  call_path: string[];
  inside: string[];
}

export interface CauseTime {
  cause: string;
  trigger?: string | null;
  ns: number;
  share: number;
}

export interface Accounting {
  device: string;
  window: "steps" | "recording";
  window_ns: number;
  busy_ns: number;
  backlog_ns: number;
  idle: CauseTime[]; // with busy_ns they add up to window_ns
}

export interface Step {
  index: number;
  start_ns: number;
  duration_ns: number;
  complete: boolean;
}

export interface NotAnswered {
  question: string;
  why: string;
  how: string;
  rule: string;
  rules: string[];
}

export interface Diagnosis {
  headline: string; // one sentence: what a step takes, busy, idle, why
  trace: {
    path: string;
    format: string;
    events: number;
    rank: number | null;
    world_size: number | null;
    host: string | null;
    warnings: { kind: string; count: number; detail: string }[];
  };
  devices: { device: string; name: string; window_ns: number; busy_ns: number; idle_ns: number }[];
  steps: {
    source: "annotation" | "inferred" | "none";
    step_ns: number;
    unrecorded_ns: number | null; // of a step that was not recorded, which savings are shares of
    job_step_ns: number | null; // of the rank that takes longest, which savings of a job are shares of
    count: number;
    set_apart: { index: number; duration_ns: number; [more: string]: unknown }[];
    list: Step[];
  };
  accounting: Accounting[];
  host: CauseTime[]; // of the launching thread
  once: { what: string; name: string; ns: number; count: number; where: Place[] }[];
  operators: TableRow[];
  kernels: TableRow[];
  findings: Finding[];
  findings_hidden: number;
  program?: string; // the recorded script and its arguments
  contention?: { share: number; ns_per_step: number; calm_step_ns: number; sentence: string; by_quota: boolean; [more: string]: unknown }; // on a busy machine
  together: { count: number; saving_ns_per_step: number; share: number; sum_share: number } | null;
  afterwards: { rule: string; title: string; saving_ns_per_step: number; saving_share: number }[];
  lines: { file: string; line: number; function: string; share: number; backward_share: number; runs: number | null; faster_share: number }[];
  not_answered: NotAnswered[];
}

/** A row of a table as `--format json` writes it. */
export type TableRow = Record<string, string | number | boolean | null>;

export interface Lines {
  basis: "device" | "host";
  steps: number;
  total_ns: number;
  lines: LineCost[];
}

export interface LineCost {
  file: string | null;
  line: number | null;
  function: string | null;
  exact_line: boolean | null;
  forward_ns: number;
  backward_ns: number;
  optimizer_ns: number;
  input_ns: number;
  other_ns: number;
  total_ns: number;
  host_ns: number;
  idle_ns: number | null;
  calls: number;
  bytes_allocated: number;
  share: number;
}

/** What ran together, so that choosing one filters the others. Columns refer to names by number, -1 for none. */
export interface Links {
  names: string[]; // lines are "file:line"
  work: { line: number[]; module: number[]; operator: number[]; kernel: number[]; ns: number[] }; // device time, or operators' own without a device
  idle: { cause: number[]; line: number[]; ns: number[] };
  steps: { step: number[]; cause: number[]; ns: number[] }; // each step's time on the busiest device, "busy" or by cause; the host's without one
}

/** A file of the user's code: no text where it cannot be read; the note says why, or that it may have changed since. */
export interface Source {
  file: string;
  text: string | null;
  note: string;
}

export interface Documents extends FurtherDocuments {
  session: Session;
  diagnosis: Diagnosis;
  steps: TableRow[];
  idle: TableRow[];
  operators: TableRow[];
  kernels: TableRow[];
  lines: Lines;
  links: Links;
  timeline: Timeline;
  stretch: Stretch;
  places: Places;
  slice: Slice;
  [name: string]: unknown;
}
