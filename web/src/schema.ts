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

/** A window of the timeline. Times are nanoseconds from the start of the trace. */
export interface Timeline {
  start: number;
  end: number;
  first: number; // start of the whole recording
  last: number; // end of the whole recording
  lanes: Lane[];
  steps: { index: number[]; start: number[]; duration: number[] };
  gaps: Gap[]; // idle time of each device by cause
  names: string[]; // slices refer to names by number
}

export interface Lane {
  id: string;
  label: string;
  kind: "host" | "worker" | "queue" | "path" | "memory" | "counter";
  device: string;
  rows: Row[]; // by depth
}

/** Slices as wide as a pixel one by one; all others as the busy fraction of each pixel, so that nothing is sampled. */
export interface Row {
  start: number[];
  duration: number[];
  name: number[];
  kind: number[]; // number of a name
  row: number[]; // row of the table, for details
  busy: number[]; // fraction of each pixel covered by narrower slices; empty where there are none
}

export interface Gap {
  device: string;
  start: number[];
  duration: number[];
  cause: number[]; // number of a name
  trigger: number[];
  busy: Record<string, number[]>; // by cause, fraction of each pixel covered by narrower gaps
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
