/** Documents of the page. All but the session and the timeline are those of `stepscope COMMAND --json`. */

export interface Cause {
  label: string;
  meaning: string;
  colour: string;
  hatched: boolean;
}

export interface Session {
  title: string; // name of the trace, run or folder
  kind: "trace" | "run" | "ranks" | "runs";
  version: string;
  documents: string[]; // names of the documents that can be had
  headline: string; // one sentence: what a step takes, busy, idle, why
  causes: Record<string, Cause>; // palette of idle causes and host activities
  kinds: Record<string, Cause>; // palette of device work and slices
}

/** A window of the timeline: `timeline?start&end&width&path`. Times are integer nanoseconds from the start of the trace. */
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

export interface Finding {
  rule: string;
  title: string;
  severity: string;
  saving_ns_per_step: number | null;
  saving_share: number | null;
  saving_basis: string | null;
  saving_from: string | null;
  confidence: string;
  evidence: { figures: unknown[]; intervals: unknown[] };
  where: Place[];
  remedy: { text: string; code: string; apply: unknown[]; diff: string };
}

export interface Place {
  file: string;
  line: number;
  function: string;
  share: number;
  exact_line: boolean;
}

export interface Diagnosis {
  trace: { path: string; format: string; events: number; warnings: unknown[] };
  steps: { source: string; step_ns: number | null; count: number; list: unknown[] };
  accounting: { device: string; window_ns: number; busy_ns: number; idle: { cause: string; ns: number }[] }[];
  findings: Finding[];
}

export interface Documents {
  session: Session;
  diagnosis: Diagnosis;
  timeline: Timeline;
  [name: string]: unknown;
}
