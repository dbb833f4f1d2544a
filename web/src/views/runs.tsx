/** What was recorded: the runs, the one that records now, and the answer once it is there. */

import { useEffect, useRef, useState } from "preact/hooks";
import { seconds, short, size } from "../format";
import { fetchDocument } from "../data";
import { useDocument, type Loaded } from "../document";
import type { Run } from "../documents";
import { Empty, Shown } from "../parts/controls";
import { Table, type Column } from "../parts/table";
import { change, parameter } from "../state";
import "./runs.css";

const EVERY_MS = 2000;
const NOT_ENDED = "not ended";

export function Runs() {
  const runs = usePolled();
  const seen = useRef(new Set<string>()); // runs that had not ended while the reader looked
  for (const run of runs.value ?? []) if (run.state === NOT_ENDED) seen.current.add(run.path);
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Runs</h2>
      </div>
      <Shown of={runs} height={480}>
        {(rows) =>
          rows.length ? (
            <>
              {rows.filter((run) => seen.current.has(run.path)).slice(0, 3).map((run) => (
                <Recording key={run.path} run={run} />
              ))}
              <Table name="runs" label="runs" columns={COLUMNS} rows={rows} sort="-started_unix_s" isChosen={(row) => row.name === parameter("run")} onChoose={open} />
            </>
          ) : (
            <Empty title="There are no runs yet.">stepscope run train.py records one; it appears here while it runs.</Empty>
          )
        }
      </Shown>
    </div>
  );
}

function open(run: Run): void {
  if (run.traces && run.state !== "gone") change({ run: run.name, rank: null, view: "overview", choose: null, range: null });
}

/** The list of runs, asked for again while one of them has not ended. */
function usePolled(): Loaded<Run[]> {
  const [runs, set] = useState<Loaded<Run[]>>({});
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        const value = await fetchDocument("runs", {}, abort.signal);
        set({ value });
        if (value.some((run) => run.state === NOT_ENDED)) timer = window.setTimeout(() => (document.hidden ? wait() : ask()), EVERY_MS);
      } catch (error) {
        if (!abort.signal.aborted) set((last) => (last.value ? last : { error: error instanceof Error ? error.message : String(error) }));
      }
    };
    const wait = () => document.addEventListener("visibilitychange", ask, { once: true, signal: abort.signal });
    void ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, []);
  return runs;
}

function Recording({ run }: { run: Run }) {
  const diagnosis = useDocument(run.traces ? "diagnosis" : null, { run: run.name, traces: run.traces }).value as { headline?: string } | undefined;
  return (
    <section class="recording" aria-label={`Run ${run.name}`}>
      <div class="plot-head">
        <h3>{short(run.name, 80)}</h3>
        <span class="muted small">{run.state === NOT_ENDED ? since(run) : `${run.state}, took ${seconds(took(run) ?? 0)}`}</span>
        <span class="spring" />
        <button type="button" disabled={!run.traces} onClick={() => open(run)}>
          {run.traces ? "Open" : "No trace yet"}
        </button>
      </div>
      <p class="small" role="status">
        {diagnosis?.headline ?? progress(run)}
      </p>
    </section>
  );
}

function progress(run: Run): string {
  if (run.traces) return "Its steps are recorded; working out why they are slow…";
  return run.state === NOT_ENDED ? "It runs; its steps are not recorded yet." : "It ended without a recording.";
}

const since = (run: Run) => `runs since ${started(run.started_unix_s)}, for ${seconds(Math.max(Math.round(Date.now() / 1000 - run.started_unix_s), 1))}`;

/** A wall-clock time to the minute, as `stepscope runs` writes it. */
export function started(unix_s: number): string {
  const at = new Date(unix_s * 1000);
  const two = (each: number) => String(each).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

const took = (run: Run) => (run.ended_unix_s === null ? null : run.ended_unix_s - run.started_unix_s);

const COLUMNS: Column<Run>[] = [
  { name: "name", title: "Run", value: (row) => row.name, show: (row) => (row.traces && row.state !== "gone" ? <span class="accent">{short(row.name, 100)}</span> : short(row.name, 100)), width: 240 },
  { name: "started_unix_s", title: "Started", value: (row) => row.started_unix_s, show: (row) => started(row.started_unix_s), isNumber: true, width: 150 },
  { name: "took", title: "Took", value: took, show: (row) => (took(row) === null ? "" : seconds(took(row)!)), isNumber: true, width: 100 },
  { name: "state", title: "State", value: (row) => row.state, width: 100 },
  { name: "traces", title: "Traces", value: (row) => row.traces, isNumber: true, width: 76 },
  { name: "bytes", title: "Size", value: (row) => row.bytes, show: (row) => size(row.bytes), isNumber: true, width: 96 },
  { name: "command", title: "Command", value: (row) => row.command, show: (row) => <span class="name">{short(row.command, 200)}</span> },
];
