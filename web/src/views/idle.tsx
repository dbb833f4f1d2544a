import { useDocument, useOptional } from "../document";
import { duration, short } from "../format";
import { causeOf, Swatch, toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { StepBar } from "../parts/step-bar";
import { Table, type Column } from "../parts/table";
import { useRelated } from "../related";
import type { CauseTime, Diagnosis, Links, Session } from "../schema";
import { filterOf, isRelated, valueOf, type Related } from "../selection";
import { choose, selection } from "../state";

export function Idle() {
  const session = useDocument("session").value;
  const diagnosis = useDocument("diagnosis");
  const links = useOptional("links");
  const related = useRelated();
  return (
    <Shown of={diagnosis} height={640}>
      {(value) => (
        <>
          <StepBar diagnosis={value} session={session} related={related} />
          <section class="section">
            <Causes diagnosis={value} session={session} links={links} related={related} />
          </section>
          {links && <Places links={links} steps={stepsOf(value)} session={session} />}
        </>
      )}
    </Shown>
  );
}

interface Row extends CauseTime {
  device: string;
}

/** What sums are divided by: the steps, or one recording. */
const stepsOf = ({ steps }: Diagnosis) => (steps.source === "none" ? 1 : Math.max(steps.count, 1));

function Causes({ diagnosis, session, links, related }: { diagnosis: Diagnosis; session?: Session; links?: Links; related: Related | null }) {
  const onDevice = diagnosis.accounting.length > 0;
  const rows: Row[] = onDevice
    ? diagnosis.accounting.flatMap(({ device, idle }) => idle.map((each) => ({ ...each, device })))
    : diagnosis.host.map((each) => ({ ...each, device: "" }));
  if (!rows.length) return <Empty title="The trace shows no idle time." />;
  const top = links && topLines(links);
  const largest = Math.max(...rows.map((row) => row.share));
  const steps = stepsOf(diagnosis);
  const columns: Column<Row>[] = [
    { name: "cause", title: "Cause", value: (row) => row.cause, width: 180, show: (row) => <CauseName session={session} cause={row.cause} /> },
    { name: "meaning", spare: 5, title: "Meaning", value: (row) => causeOf(session, row.cause).meaning },
    ...(rows.some((row) => row.trigger) ? [{ name: "trigger", spare: 3, title: "After", value: (row: Row) => row.trigger, width: 180, tip: "The wait that drained the queue before, which this idle time follows" }] : []),
    ...(diagnosis.accounting.length > 1 ? [{ name: "device", title: "Device", value: (row: Row) => row.device, width: 72 }] : []),
    ...(steps > 1 ? [{ name: "step_ns", spare: 1, title: "A step", value: (row: Row) => row.ns / steps, isNumber: true, width: 92 }] : []),
    { name: "share", title: "Share", value: (row) => row.share, meter: (row) => row.share / largest, isNumber: true, width: 86, tip: onDevice ? "Of the time that the steps took" : "Of the launching thread’s time" },
    { name: "ns", spare: 2, title: "In all", value: (row) => row.ns, isNumber: true, width: 92 },
    ...(top ? [{ name: "line", spare: 4, title: "Most at", value: (row: Row) => top.get(row.cause), width: 210 }] : []),
  ];
  return (
    <Table
      name="idle"
      label={onDevice ? "causes of idle time" : "causes of host time"}
      rows={rows}
      columns={columns}
      sort="-ns"
      keep={filterOf(related, selection.value, "cause") && ((row) => isRelated(related, "cause", row.cause))}
      isChosen={(row) => selection.value?.kind === "cause" && selection.value.value === row.cause}
      onChoose={(row) => toggle("cause", row.cause)}
    />
  );
}

const CauseName = ({ session, cause }: { session?: Session; cause: string }) => (
  <>
    <Swatch cause={causeOf(session, cause)} /> {short(causeOf(session, cause).label, 60)}
  </>
);

interface Place {
  line: string;
  cause: string;
  ns: number;
}

/** Which lines the host was at while the device was idle, by cause. */
function Places({ links, steps, session }: { links: Links; steps: number; session?: Session }) {
  const chosen = selection.value;
  const rows = placesOf(links).filter((row) => (chosen?.kind === "cause" ? row.cause === chosen.value : chosen?.kind === "line" ? valueOf(row.line) === chosen.value : true));
  if (!rows.length) return null;
  const largest = Math.max(...rows.map((row) => row.ns));
  const columns: Column<Place>[] = [
    { name: "line", title: "Line", value: (row) => row.line, show: (row) => <span class="name">{short(row.line, 160)}</span> },
    { name: "cause", title: "Cause", value: (row) => row.cause, width: 190, show: (row) => <CauseName session={session} cause={row.cause} /> },
    { name: "ns", title: steps > 1 ? "A step" : "Time", value: (row) => row.ns, show: (row) => duration(row.ns / steps), meter: (row) => row.ns / largest, isNumber: true, width: 110 },
  ];
  return (
    <section class="section">
      <header>
        <h2>Lines the host was at meanwhile</h2>
      </header>
      <Table name="places" label="lines" rows={rows} columns={columns} sort="-ns" onChoose={(row) => choose({ kind: "line", value: valueOf(row.line) })} />
    </section>
  );
}

const placesOf = ({ names, idle }: Links): Place[] =>
  idle.ns.flatMap((ns, row) => {
    const line = names[idle.line[row]!];
    return line === undefined ? [] : [{ line, cause: names[idle.cause[row]!]!, ns }];
  });

function topLines(links: Links): Map<string, string> {
  const top = new Map<string, Place>();
  for (const place of placesOf(links)) if (place.ns > (top.get(place.cause)?.ns ?? 0)) top.set(place.cause, place);
  return new Map([...top].map(([cause, { line }]) => [cause, line.split("/").at(-1)!]));
}
