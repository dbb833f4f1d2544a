/** What was recorded: the runs, those that record now with their progress, and recording anew. */

import { useEffect, useRef, useState } from "preact/hooks";
import { count, seconds, sentence, short, size } from "../format";
import { act } from "../data";
import { useDocument } from "../document";
import type { Progress, Run } from "../documents";
import { Empty, Shown } from "../parts/controls";
import { Table, type Column } from "../parts/table";
import { usePolled } from "../polled";
import { change, parameter } from "../state";
import "./runs.css";

const NOT_ENDED = "not ended";
const MOST_SHOWN = 3;
const HOW_TO_RECORD = location.pathname.includes("/plugin/stepscope/")
  ? "torch.profiler.tensorboard_trace_handler writes them below the log folder, as does stepscope run --folder LOGS train.py; then reload the page."
  : "stepscope run train.py records one; it appears here while it runs.";
const QUIET_S = 3600; // a run that wrote nothing for so long was probably killed

const goesOn = (run: Run) => run.state === NOT_ENDED && (run.quiet_s ?? 0) < QUIET_S;

export function Runs() {
  const runs = usePolled("runs", {}, (rows) => rows.some(goesOn));
  const seen = useRef(new Set<string>()); // runs that had not ended while the reader looked
  for (const run of runs.value ?? []) if (goesOn(run) || (run.state === NOT_ENDED && run.name === parameter("run"))) seen.current.add(run.path);
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Runs</h2>
        {parameter("run") !== null && (
          <button type="button" onClick={() => change({ run: null, traces: null, rank: null, choose: null, range: null })}>
            Close run {short(parameter("run")!, 60)}
          </button>
        )}
      </div>
      <Shown of={runs} height={480}>
        {(rows) =>
          rows.length ? (
            <>
              {rows
                .filter((run) => seen.current.has(run.path))
                .slice(0, MOST_SHOWN)
                .map((run) => (
                  <Recording key={run.path} run={run} />
                ))}
              <Table name="runs" label="runs" columns={COLUMNS} rows={rows} sort="-started_unix_s" isChosen={(row) => row.name === parameter("run")} onChoose={(run) => (run.traces || run.state === NOT_ENDED) && run.state !== "gone" && open(run)} />
            </>
          ) : (
            <Empty title="There are no runs yet.">{HOW_TO_RECORD}</Empty>
          )
        }
      </Shown>
    </div>
  );
}

/** Look at a run: at its answer, or, until there is one, at its progress. */
function open(run: { name: string; traces: number }): void {
  change({ run: run.name, traces: String(run.traces), rank: null, view: run.traces ? "overview" : "runs", choose: null, range: null });
}

/** A run that records or recorded while the reader looked. */
function Recording({ run }: { run: Run }) {
  const [asked, ask] = useState<string | null>(null); // why the button did nothing; "" while a recording is awaited
  const progress = usePolled("progress", { run: run.name }, (now) => !now.has_ended);
  const now = progress.value;
  const traces = now?.traces ?? run.traces;
  const diagnosis = useDocument(traces ? "diagnosis" : null, { run: run.name, traces }).value;
  const session = useDocument("session").value;
  const isOpened = (parameter("run") ?? session?.title) === run.name;
  const first = useRef(run.traces);
  useEffect(() => {
    if (isOpened && traces && !first.current) open({ name: run.name, traces });
    first.current = traces;
  }, [isOpened, traces]);
  useEffect(() => {
    if (asked !== "" || !now?.capture?.is_over) return;
    ask(now.capture.problem);
    if (now.capture.problem === null) open({ name: run.name, traces: now.traces });
  }, [asked, now]);
  const capture = async () => {
    try {
      await act("capture", { run: run.name });
      ask("");
      progress.again();
    } catch (error) {
      ask(error instanceof Error ? error.message : String(error));
    }
  };
  const isCapturing = asked === "" || now?.capture?.is_over === false;
  return (
    <section class="recording" aria-label={`Run ${run.name}`}>
      <div class="plot-head">
        <h3>{short(run.name, 80)}</h3>
        <span class="muted small">{now?.has_ended || run.state !== NOT_ENDED ? `${run.state}, took ${seconds(took(run) ?? 0)}` : since(run)}</span>
        <span class="spring" />
        {now?.can_capture && run.state === NOT_ENDED && (
          <button type="button" disabled={isCapturing} onClick={capture} data-tip="Five steps, as stepscope attach does">
            {isCapturing ? "Recording…" : "Record now"}
          </button>
        )}
        <button type="button" disabled={!traces} onClick={() => open({ name: run.name, traces })}>
          {traces ? "Open" : "No trace yet"}
        </button>
      </div>
      <p class="small" role="status">
        {now ? words(now, isCapturing) : (progress.error ?? "Looking at what it does…")}
      </p>
      {diagnosis && <p>{diagnosis.headline}</p>}
      {asked && (
        <p class="small problem" role="alert">
          {sentence(asked)}
        </p>
      )}
      {now && !now.can_capture && !now.has_ended && <p class="small muted">{sentence(now.why_not)}.</p>}
    </section>
  );
}

function words(now: Progress, isCapturing: boolean): string {
  const steps = now.steps_seen === null ? "" : ` ${now.steps_seen === 1 ? "1 step was" : `${count(now.steps_seen)} steps were`} seen.`;
  return `${sentence(isCapturing && !now.sentence.startsWith("recording") ? "the next steps are awaited" : now.sentence)}.${steps}`;
}

function since(run: Run): string {
  const ago = Math.max(Math.round(Date.now() / 1000 - run.started_unix_s), 1);
  return `runs since ${started(run.started_unix_s)}, for ${ago < 120 ? `${ago} s` : seconds(ago)}`;
}

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
