import { useMemo } from "preact/hooks";
import { useDocument, useOptional } from "../document";
import { count, duration, moment, share } from "../format";
import { causeOf, Swatch } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Table, type Column } from "../parts/table";
import { useRelated } from "../related";
import type { Session, Step } from "../schema";
import { isRelated, stepsIn } from "../selection";
import { bars, median, stepRows, type StepRow } from "../steps";
import { change, range, selection } from "../state";
import "./steps.css";

const BARS = 300;

export function Steps() {
  const session = useDocument("session").value;
  const diagnosis = useDocument("diagnosis");
  return <Shown of={diagnosis}>{(value) => (value.steps.list.length ? <All steps={value.steps.list} session={session} /> : <None />)}</Shown>;
}

const None = () => (
  <Empty title="No steps were found.">
    Mark them while recording: call profiler.step() after each, or run the program with stepscope run, which finds the optimizer’s steps.
  </Empty>
);

function All({ steps, session }: { steps: Step[]; session?: Session }) {
  const table = useOptional("steps");
  const links = useOptional("links");
  const related = useRelated();
  const rows = useMemo(() => stepRows(steps, table, links), [steps, table, links]);
  const isOwn = selection.value?.kind === "step"; // chosen here: marked, and all others stay
  const within = !isOwn && range.value && new Set(stepsIn(range.value, steps).map((step) => step.index));
  const isShown = (row: StepRow) => isOwn || (isRelated(related, "step", String(row.index)) && (!within || within.has(row.index)));
  return (
    <>
      <Chart rows={rows} session={session} isShown={isShown} />
      <div class="section">
        <StepTable rows={rows} session={session} keep={(related?.step && !isOwn) || within ? isShown : undefined} />
      </div>
    </>
  );
}

/** Choose a step, and its time as the range that other views show. */
function chooseStep(row: StepRow): void {
  const isChosen = isChosenStep(row);
  change({ choose: isChosen ? null : `step:${row.index}`, range: isChosen ? null : `${row.start_ns}-${row.start_ns + row.duration_ns}` });
}

const isChosenStep = (row: StepRow) => selection.value?.kind === "step" && selection.value.value === String(row.index);

function Chart({ rows, session, isShown }: { rows: StepRow[]; session?: Session; isShown: (row: StepRow) => boolean }) {
  const shown = bars(rows, BARS);
  const reached = Math.max(0, shown.findIndex(isChosenStep)); // by the tab key
  const largest = Math.max(...rows.map((row) => row.duration_ns), 1);
  const middle = median(rows.filter((row) => row.complete).map((row) => row.duration_ns));
  return (
    <section aria-label="Time of each step">
      <div class="bar-head">
        <h2>Time of each step</h2>
        <span class="muted">
          median {duration(middle)}
          {shown.length < rows.length && `; ${count(shown.length)} bars for ${count(rows.length)} steps, each its slowest`}
        </span>
      </div>
      <div class="steps-chart" role="group" aria-label="Steps" onKeyDown={neighbour}>
        <div class="median" style={{ bottom: `${(100 * middle) / largest}%` }} />
        {shown.map((row, place) => (
          <button
            type="button"
            tabIndex={place === reached ? 0 : -1}
            class={isShown(row) ? undefined : "dim"}
            aria-pressed={isChosenStep(row)}
            aria-label={`Step ${row.index}: ${duration(row.duration_ns)}`}
            data-tip={tipOf(row, session)}
            style={{ height: `${(100 * row.duration_ns) / largest}%` }}
            onClick={() => chooseStep(row)}
          >
            {partsOf(row, session).map(({ colour, hatched, ns }) => (
              <i class={hatched ? "hatched" : undefined} style={{ "--c": colour, flexGrow: ns }} />
            ))}
          </button>
        ))}
      </div>
    </section>
  );
}

/** Arrows move along the bars, of which the tab key reaches one. */
function neighbour(event: KeyboardEvent): void {
  const here = event.target as HTMLElement;
  const next = { ArrowRight: here.nextElementSibling, ArrowLeft: here.previousElementSibling }[event.key];
  if (!(next instanceof HTMLButtonElement)) return;
  event.preventDefault();
  next.focus();
}

function partsOf(row: StepRow, session?: Session) {
  if (!row.parts.size) return [{ colour: "var(--busy)", hatched: false, ns: row.duration_ns }];
  return [...row.parts].map(([key, ns]) => (key === "busy" ? { colour: "var(--busy)", hatched: false, ns } : { ...causeOf(session, key), ns }));
}

function tipOf(row: StepRow, session?: Session): string {
  const parts = [...row.parts].sort((a, b) => b[1] - a[1]).slice(0, 6);
  const lines = parts.map(([key, ns]) => `${key === "busy" ? "busy" : causeOf(session, key).label}: ${duration(ns)}`);
  return [`Step ${row.index}: ${duration(row.duration_ns)}${row.complete ? "" : ", cut off"}`, ...lines].join("\n");
}

function StepTable({ rows, session, keep }: { rows: StepRow[]; session?: Session; keep?: (row: StepRow) => boolean }) {
  const largest = Math.max(...rows.map((row) => row.duration_ns), 1);
  const columns: Column<StepRow>[] = [
    { name: "index", title: "Step", value: (row) => row.index, isNumber: true, width: 80 },
    { name: "start_ns", spare: 3, title: "Start", value: (row) => row.start_ns, show: (row) => moment(row.start_ns), isNumber: true, width: 130 },
    { name: "duration_ns", title: "Time", value: (row) => row.duration_ns, meter: (row) => row.duration_ns / largest, isNumber: true, width: 110 },
    { name: "more_ns", spare: 1, title: "vs. median", value: (row) => row.more_ns, show: (row) => signed(row.more_ns), isNumber: true, width: 120 },
    ...(rows.some((row) => row.busy_share !== null) ? [busyColumn] : []),
    { name: "differs", title: "What differs", value: (row) => row.differs || null, show: (row) => <Differs row={row} session={session} /> },
  ];
  return <Table name="steps" label="steps" rows={rows} columns={columns} sort="index" keep={keep} isChosen={isChosenStep} onChoose={chooseStep} />;
}

const busyColumn: Column<StepRow> = {
  name: "busy_share",
  spare: 2,
  title: "Busy",
  value: (row) => row.busy_share,
  show: (row) => (row.busy_share === null ? "" : share(row.busy_share)),
  meter: (row) => row.busy_share ?? 0,
  isNumber: true,
  width: 90,
};

const signed = (ns: number) => (ns > 0 ? `+${duration(ns)}` : duration(ns));

function Differs({ row, session }: { row: StepRow; session?: Session }) {
  if (!row.complete) return <span class="muted">cut off by the recording</span>;
  if (!row.differs) return null;
  const label = row.differs === "busy" ? "the device worked longer" : causeOf(session, row.differs).label;
  return (
    <>
      {row.differs !== "busy" && <Swatch cause={causeOf(session, row.differs)} />} {label} <span class="muted">+{duration(row.differs_ns)}</span>
    </>
  );
}
