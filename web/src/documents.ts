/** Documents of the further views. Those of a command are what `stepscope COMMAND --json` (or `--format json`) writes. */

import type { Finding } from "./schema";

export interface FurtherDocuments {
  modules: Modules;
  flame: Flame;
  memory: Memory;
  "memory-levels": MemoryLevels;
  "memory-alive": MemoryAlive;
  input: InputFunction[];
  loading: Loading;
  telemetry: TelemetryPlots;
  roofline: Roofline;
  whatif: WhatIf;
  compare: Compare;
  predict: Predict;
  plan: Plan;
  energy: Energy;
  runs: Run[];
  ranks: Ranks;
  progress: Progress;
  watch: WatchedJob;
}

/** `watch?job`: the recordings of a watched job, the earliest first. */
export interface WatchedJob {
  jobs: { name: string; unix_s: number }[]; // the latest first
  shown: string;
  lines: string[]; // the latest recording that succeeded, and the latest
  basis: "device" | "host"; // of the causes: the device's idle time, or the main thread's time
  recordings: Watched[];
}

export interface Watched {
  unix_s: number;
  problem: string | null;
  first_step: number | null;
  ranks: number;
  step_ns: number | null;
  recorded_step_ns: number | null;
  causes: Record<string, number>; // ns per step
  communication_ns: number | null;
  late_rank: string | null;
  wait_ns: number | null;
  memory_bytes: number | null;
  device_bytes: number | null;
  cost_s: number | null;
  finding: string | null;
  events: { state: "firing" | "recovered"; sentence: string }[];
}

export interface Modules {
  basis: "device" | "host";
  steps: number; // 0: of the whole recording
  total_ns: number;
  modules: ModuleCost[]; // in the order of the tree
}

export interface ModuleCost {
  module: string | null; // null: outside of modules
  name: string | null;
  depth: number;
  forward_ns: number;
  backward_ns: number;
  total_ns: number;
  host_ns: number;
  idle_ns: number | null;
  calls: number;
  bytes_allocated: number;
  self_ns: number;
  share: number;
}

export interface Flame {
  basis: "device" | "host";
  total_ns: number;
  dropped: number; // frames too small to draw
  names: string[];
  kinds: number[]; // of the names: 0 line, 1 phase, 2 operator, 3 other
  frames: [name: number, parent: number, ns: number][]; // each after the one below it
}

export interface Memory {
  devices: DeviceMemory[];
}

export interface DeviceMemory {
  device: string;
  name: string | null;
  capacity_bytes: number | null;
  reserved_bytes: number | null;
  peak: { start_ns: number; bytes: number; step: number | null };
  unused_reserved_bytes: number | null;
  unused_reserved_share: number | null;
  growth: { bytes_per_step: number; slope_bytes: number; level_bytes: number[] } | null;
  categories: { category: string; bytes: number; share: number; blocks: number }[];
  lines: { file: string | null; line: number | null; function: string | null; bytes: number; share: number; blocks: number }[];
  operators: Record<string, string | number | null>[];
  allocator: Record<string, string | number | null>[];
}

/** `memory-levels?device&by`, by "category" or "line". */
export interface MemoryLevels {
  device: string;
  name: string | null;
  start_ns: number;
  end_ns: number;
  times: number[]; // each level holds until the next time
  bands: { name: string; label: string; meaning: string; colour: string; hatched: boolean; bytes: number[] }[]; // from the bottom
  reserved: number[] | null;
  capacity_bytes: number | null;
  peak_ns: number;
  peak_bytes: number;
  steps: [number: number, start_ns: number][];
  by: string[]; // what else it can be divided by
  facts: [name: string, text: string][]; // as `stepscope memory` prints them
}

/** `memory-alive?device&time`: what is alive at a moment, the largest first. */
export interface MemoryAlive {
  time_ns: number;
  bytes: number;
  count: number; // of all blocks; the list has the largest
  blocks: AliveBlock[];
}

export interface AliveBlock {
  bytes: number;
  category: string;
  file: string | null;
  line: number | null;
  function: string | null;
  module: string | null;
  operator_name: string | null;
  start_ns: number | null; // null: from before the recording
  end_ns: number | null; // null: until its end
}

export interface InputFunction {
  stage: string;
  function: string;
  file: string | null;
  line: number | null;
  calls: number;
  total_ns: number;
  self_ns: number;
  share: number;
  mean_ns: number;
  runs_in: "main process" | "workers";
  processor_ns: number | null;
}

/** How steps wait for batches, and how long a step would take with other numbers of workers. */
export interface Loading {
  workers: number | null;
  processors: number | null;
  step_ns: number;
  wait_ns: number; // a step
  calls: number; // batches asked for
  batch_ns: number | null; // time to make one
  waits: { start_ns: number[]; wait_ns: number[] };
  with_workers: { workers: number; step_ns: number }[]; // empty where the time to make a batch is unknown
  facts: [name: string, text: string][];
}

export interface TelemetryPlots {
  ranks: {
    rank: number | null;
    duration_s: number;
    recorded_s: [number, number] | null;
    notes: string[];
    plots_left_out: number;
    plots: TelemetryPlot[];
  }[];
}

export interface TelemetryPlot {
  group: string;
  title: string;
  unit: string;
  left_out: number; // lines
  lines: { label: string; time_s: number[]; value: (number | null)[]; step: (number | null)[] | null; not_finite_s: number[] }[];
}

export interface Roofline {
  // is_least: of several devices that it may be, such as "A to B"
  roofs: { device: string; name: string; is_least: boolean; gb_per_s: number | null; tflop_per_s: Record<string, number> }[]; // by number type
  operators: RooflineRow[];
}

export interface RooflineRow {
  operator: string;
  input_shapes: string;
  calls: number;
  device_ns: number;
  limit: string | null;
  share: number | null;
  tflop_per_s: number | null;
  gb_per_s: number | null;
  number_type: string | null;
  device_share: number;
  flops: number | null;
  bytes: number | null;
  device: string;
  kernel: string | null;
  compute_share: number | null;
  bandwidth_share: number | null;
  peaks: string | null;
  why: string | null;
  better: string | null;
}

/** What the command prints as prose, by section. */
export interface Said {
  title: string;
  about_table: boolean; // it stands beside a table
  texts: string[];
}

/** `whatif?remove&scale&launch-overhead&loader-workers&sync-every&graphs&overlap`; several values one a line. */
export interface WhatIf {
  trace: { path: string };
  steps: { source: string; count: number };
  step_ns: number;
  replayed_step_ns: number;
  device: string | null;
  unexplained_share: number;
  why_not: string | null;
  resources: Resource[];
  causes: { cause: string; attributed_ns: number; attributed_share: number; saving_ns: number; saving_share: number }[] | null;
  changes: Prospect[];
  together: Prospect | null;
  resources_then: Resource[] | null;
  ranks: { name: string; measured_step_ns: number; step_ns: number; alone_step_ns: number }[];
  sentences: Said[];
}

export interface Resource {
  kind: string;
  cause: string | null;
  ns: number; // of all steps
  share: number;
}

export interface Prospect {
  change: string;
  step_ns: number;
  saving_ns: number;
  saving_share: number;
}

export interface Compare {
  comparisons: Comparison[];
}

export interface Comparison {
  before: Compared;
  after: Compared;
  verdict: string;
  sentences: string[];
  samples: { change: number; change_low: number; change_high: number; confidence: number; caveats: string[]; [more: string]: unknown };
  basis: "device" | "host";
  difference_ns: number;
  notes: string[];
  causes: Difference[];
  lines: Difference[];
  operators: Difference[];
  kernels: Difference[];
  modules: Difference[];
  settings: Record<string, unknown>[];
  [more: string]: unknown;
}

export interface Compared {
  name: string;
  paths: string[];
  devices: string[];
  step_count: number;
  step_ns: number;
}

export interface Difference {
  kind?: string;
  name?: string | null;
  module?: string | null;
  file?: string | null;
  line?: number | null;
  function?: string | null;
  input_shapes?: string | null;
  match: string;
  before_ns: number;
  after_ns: number;
  before_calls?: number;
  after_calls?: number;
  difference_ns: number;
  share: number | null;
}

export interface Predict {
  step_ns: number;
  steady_step_ns: number; // without what predictions leave out of it
  device: string | null;
  why_not: string | null;
  precision: string | null;
  batch: number | null;
  recorded_batch: number | null;
  memory: { bytes: number | null; note: string } | null;
  range_holds: number | null;
  predictions: Prediction[];
  trace: { path: string };
  sentences: Said[];
}

export interface Prediction {
  device: string;
  step_ns: number | null;
  low_ns: number | null;
  high_ns: number | null;
  speed_up: number | null;
  samples_per_s: number | null;
  busy_share: number | null;
  limit: string | null;
  limit_share: number | null;
  limit_cause: string | null;
  memory_bytes: number | null;
  device_memory_bytes: number | null;
  fits: boolean | null;
  knowledge: Record<string, number>;
  notes: string[];
}

export interface Plan {
  trace: { path: string; step_ns: number; steps: number; device: string | null };
  asked: { iterations: number; spot: boolean; deadline_h: number | null; budget_usd: number | null };
  recommendation: string[];
  machines: Machine[];
  sentences: Said[];
  left_out: { what: string; reason: string; machines: number }[];
  without_price: string[];
  notes: string[];
}

export interface Machine {
  provider: string;
  instance: string;
  region: string | null;
  device: string;
  devices: number;
  on_front: boolean;
  meets: boolean;
  hours: number;
  hours_low: number;
  hours_high: number;
  usd: number;
  usd_low: number;
  usd_high: number;
  usd_h: number;
  step_ns: number;
  price_as_of: string;
  price_is_old: boolean;
  limit: string | null;
  fits: boolean | null;
}

export interface Energy {
  traces: {
    path: string;
    rank: number | null;
    step_ns: number;
    devices: { device: string; name: string | null; parts: EnergyPart[]; operators: EnergyPart[] }[];
    findings: { rule: string; title: string; saving_ns: number; joules: number[] | null }[];
  }[];
  total: { joules: number[] | null; is_estimate: boolean };
  run: { iterations: number; joules: number[] | null; kilograms: number[] | null; equivalences: { value: number[]; unit: string }[] };
  carbon: { name: string } | null;
  sentences: Said[];
}

/** Energy is a range in joules: the least and the most that it can be. */
export interface EnergyPart {
  kind: string;
  name: string | null;
  ns: number;
  joules: number[] | null;
}

export interface Run {
  name: string;
  path: string;
  command: string;
  started_unix_s: number;
  ended_unix_s: number | null;
  state: string; // as `stepscope runs` says it: "done", "not ended", "exit 1", "gone"
  traces: number;
  bytes: number;
  quiet_s: number | null; // since it wrote anything; null where it has ended
}

/** `progress?run`: how far the recording of a run is. */
export interface Progress {
  name: string;
  has_ended: boolean;
  is_complete: boolean; // every rank has recorded and timed what was asked for
  sentence: string; // what it does, or what is awaited
  steps_seen: number | null;
  traces: number;
  can_capture: boolean;
  why_not: string;
  capture: { is_over: boolean; problem: string | null } | null; // the last one that this page asked for
}

/** `ranks?cause&step`: a figure of each rank and step; without a cause, the first of `causes`. */
export interface Ranks {
  ranks: { rank: number | null; name: string; path: string; step_ns: number }[];
  steps: number[]; // numbers
  causes: string[]; // that can be asked for: "late" (to collectives, after the first rank), "step", causes by size
  cause: string;
  ns: (number | null)[][]; // by rank, then by step
  slowest: (number | null)[]; // by step, the place of the rank in `ranks` that the others wait for
  findings: Finding[]; // about the ranks together, once all are read
  sentences: string[]; // what a step of the job waits for
  saves_ns: number[] | null; // by rank, what the job saves by its best finding; null until the ranks are diagnosed
  diagnosing?: boolean; // and that is still to come
  unreadable: string[]; // why traces are not among them
  read: number; // of all traces, those that were read by now
  of: number;
  exchanges: Exchange[]; // the longest first
  clocks: string; // how their clocks were aligned; "" without exchanges
  drawn: DrawnStep | null; // the step that is asked for, else the one in which ranks wait longest
}

/** The exchanges of a step, in order; times are the first rank's, from the first arrival. */
export interface DrawnStep {
  step: number;
  kinds: string[];
  bytes: (number | null)[];
  arrivals_ns: (number | null)[][]; // by exchange, then by rank; null where it took no part
  ends_ns: number[];
  left_out: number; // later exchanges
}

/** Exchanges of a kind, a size and alike groups, per step: the mean wait of a rank for the last one, and the transfer after it. */
export interface Exchange {
  kind: string;
  bytes: number | null;
  group: string; // what the program calls the groups; "" where unknown
  parallel: string; // what they are for, such as "tensor"; "" where nothing tells
  ranks: number; // in a group
  groups: number;
  per_step: number;
  wait_ns: number;
  transfer_ns: number;
  algorithm: string; // by the kernels' names; "" where they do not tell
  algorithm_gb_per_s: number | null;
  bus_gb_per_s: number | null;
  link_share: number | null; // of the peak of the device's links to others of its machine
  exposed_ns: number;
  overlapped_share: number;
  most_exposed: string; // the rank with most time in it without computation
  last: string; // the rank that most often comes last
  last_share: number;
}
