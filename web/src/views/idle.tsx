import { useDocument } from "../document";
import { duration, short } from "../format";
import { metered, number, text } from "../parts/columns";
import { causeOf, Swatch, toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { StepBar } from "../parts/step-bar";
import { Table, type Column } from "../parts/table";
import { useRelated } from "../related";
import type { Links, Session, TableRow } from "../schema";
import { isRelated, valueOf } from "../selection";
import { choose, selection } from "../state";

export function Idle() {
  const session = useDocument("session").value;
  const diagnosis = useDocument("diagnosis");
  const idle = useDocument("idle");
  const links = useDocument("links").value;
  const related = useRelated();
  return (
    <Shown of={diagnosis} height={640}>
      {(value) => (
        <>
          <StepBar diagnosis={value} session={session} related={related} />
          <section class="section">
            <Shown of={idle}>
              {(rows) => {
                const onDevice = rows.length > 0;
                const shown = onDevice ? rows : (value.host as unknown as TableRow[]);
                if (!shown.length) return <Empty title="The trace shows no idle time." />;
                return <Causes rows={shown} onDevice={onDevice} session={session} links={links} related={related} />;
              }}
            </Shown>
          </section>
          {links && <Places links={links} session={session} />}
        </>
      )}
    </Shown>
  );
}

function Causes({ rows, onDevice, session, links, related }: { rows: TableRow[]; onDevice: boolean; session?: Session; links?: Links; related: ReturnType<typeof useRelated> }) {
  const share = onDevice ? "idle_share" : "share";
  const top = links && topLines(links);
  const columns: Column<TableRow>[] = [
    text("cause", "Cause", { width: 190, show: (row) => <Cause session={session} cause={String(row.cause)} /> }),
    { name: "meaning", title: "Meaning", value: (row) => causeOf(session, String(row.cause)).meaning },
    ...(onDevice ? [text("trigger", "After", { width: 190, tip: "What drained the queue before: the wait that this idle time follows" }), text("device", "Device", { width: 72 }), number("count", "Gaps", 72)] : []),
    number("ns", "Time", 100),
    metered(number(share, "Share", 90, { tip: onDevice ? "Of the device’s idle time" : "Of the launching thread’s time" }), rows),
    ...(top ? [{ name: "line", title: "Most at", value: (row: TableRow) => top.get(String(row.cause)), width: 190 }] : []),
  ];
  return (
    <Table
      name="idle"
      label={onDevice ? "causes of idle time" : "causes of host time"}
      rows={rows}
      columns={columns}
      sort="-ns"
      keep={related?.cause && ((row) => isRelated(related, "cause", String(row.cause)))}
      isChosen={(row) => selection.value?.kind === "cause" && selection.value.value === row.cause}
      onChoose={(row) => toggle("cause", String(row.cause))}
    />
  );
}

const Cause = ({ session, cause }: { session?: Session; cause: string }) => (
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
function Places({ links, session }: { links: Links; session?: Session }) {
  const chosen = selection.value;
  const rows = placesOf(links).filter((row) => (chosen?.kind === "cause" ? row.cause === chosen.value : chosen?.kind === "line" ? valueOf(row.line) === chosen.value : true));
  if (!rows.length) return null;
  const largest = Math.max(...rows.map((row) => row.ns));
  const columns: Column<Place>[] = [
    { name: "line", title: "Line", value: (row) => row.line, show: (row) => <span class="name">{short(row.line, 160)}</span> },
    { name: "cause", title: "Cause", value: (row) => row.cause, width: 190, show: (row) => <Cause session={session} cause={row.cause} /> },
    { name: "ns", title: "Idle", value: (row) => row.ns, show: (row) => duration(row.ns), meter: (row) => row.ns / largest, isNumber: true, width: 110 },
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
  return new Map([...top].map(([cause, { line }]) => [cause, line]));
}
