import { useEffect, useRef, useState } from "preact/hooks";
import { LineLink, remedyTabs, Saving, CONFIDENCE, showFinding } from "../parts/finding";
import { Shown, Tabs } from "../parts/controls";
import { StepBar } from "../parts/step-bar";
import { useDocument } from "../document";
import { isToCome, usePolled } from "../polled";
import { sentence, short } from "../format";
import { useRelated } from "../related";
import type { Diagnosis, Finding, Session } from "../schema";
import { nearestStep } from "../steps";
import { findingValues, isRelated } from "../selection";
import { choose, selection, show } from "../state";
import { toggle } from "../parts/causes";
import { Timeline } from "../timeline/timeline";
import { AllFindings, Doubts } from "./findings";
import { Best, JobFindings } from "./ranks";
import "./findings.css";

const FIRST = 3;
const STRIP = 278; // pixels inside the border of its place

export function Overview() {
  const session = useDocument("session");
  const diagnosis = useDocument("diagnosis");
  const ofRanks = session.value?.documents.includes("ranks") ?? false;
  const rank = diagnosis.value?.trace.rank ?? null;
  return (
    <>
      {ofRanks && <Together />}
      {ofRanks && rank !== null && <h2>Rank {rank}</h2>}
      <p class="headline">{diagnosis.value?.headline}</p>
      <Shown of={diagnosis} height={640}>
        {(value) => <First diagnosis={value} session={session.value} />}
      </Shown>
    </>
  );
}

/** What the ranks tell together; its place is there before they have been read. */
function Together() {
  const ranks = usePolled("ranks", {}, isToCome).value;
  const said = ranks?.sentences.map(sentence).join(" ");
  const isRead = ranks !== undefined && ranks.read >= ranks.of;
  return (
    <section class="stack" aria-label="The ranks together">
      <h2>The ranks together</h2>
      {ranks && <JobFindings document={ranks} />}
      <p class="together">
        {isRead ? said || (ranks.findings.length ? "" : "The ranks together tell nothing that one of them does not.") : "Reading the other ranks…"}{" "}
        {ranks && <Best document={ranks} />}{" "}
        <button type="button" class="link" onClick={() => show("ranks")}>
          All ranks
        </button>
      </p>
    </section>
  );
}

function First({ diagnosis, session }: { diagnosis: Diagnosis; session?: Session }) {
  const related = useRelated();
  const values = findingValues(diagnosis.findings);
  return (
    <>
      <StepBar diagnosis={diagnosis} session={session} related={related} />
      <div class="timeline-place">
        <Strip diagnosis={diagnosis} />
      </div>
      <Cards findings={diagnosis.findings.slice(0, FIRST)} diagnosis={diagnosis} values={values} isShown={(value) => isRelated(related, "finding", value)} />
      <Doubts diagnosis={diagnosis} />
      <AllFindings diagnosis={diagnosis} related={related} />
    </>
  );
}

/** The timeline of the step that is nearest to the typical one; of all, without steps. */
function Strip({ diagnosis: { steps } }: { diagnosis: Diagnosis }) {
  const typical = nearestStep(steps.list, steps.step_ns);
  const length = steps.list.length === 1 ? Math.max(steps.step_ns, steps.list[0]!.duration_ns) : typical?.duration_ns; // the device may need longer
  const place = typical && length ? { start: typical.start_ns, end: typical.start_ns + length } : {};
  return <Timeline compact {...place} height={STRIP} onCause={(cause) => toggle("cause", cause)} />;
}

function Cards({ findings, diagnosis, values, isShown }: { findings: Finding[]; diagnosis: Diagnosis; values: string[]; isShown: (value: string) => boolean }) {
  const [open, setOpen] = useState<{ value: string; tab: string } | null>(null);
  const panel = useRef<HTMLDivElement>(null);
  useEffect(() => panel.current?.scrollIntoView({ block: "nearest" }), [open]);
  const opened = findings.find((_, place) => values[place] === open?.value);
  return (
    <section aria-label="First findings">
      <div class="cards">
        {findings.map((finding, place) => (
          <Card finding={finding} diagnosis={diagnosis} value={values[place]!} isDim={!isShown(values[place]!)} open={open} onOpen={setOpen} />
        ))}
      </div>
      {open && opened && (
        <div class="opened" id="opened" ref={panel}>
          <Tabs label="How to change it" tabs={remedyTabs(opened, diagnosis.program)} shown={open.tab} onShow={(tab) => setOpen({ ...open, tab })} />
        </div>
      )}
    </section>
  );
}

type Open = { value: string; tab: string } | null;

function Card({ finding, diagnosis, value, isDim, open, onOpen }: { finding: Finding; diagnosis: Diagnosis; value: string; isDim: boolean; open: Open; onOpen: (open: Open) => void }) {
  const chosen = selection.value;
  const isChosen = chosen?.kind === "finding" && chosen.value === value;
  const place = finding.where[0];
  return (
    <article class={`card ${finding.severity}${isDim ? " dim" : ""}`} data-chosen={isChosen}>
      <div class="card-head">
        <i class="severity" data-tip={`Severity: ${finding.severity}`} />
        <Saving finding={finding} diagnosis={diagnosis} />
        <span class="spring" />
        <span class="muted small" data-tip={CONFIDENCE[finding.confidence]}>
          confidence {finding.confidence}
        </span>
      </div>
      <h3>
        <button type="button" class="link" aria-pressed={isChosen} onClick={() => choose(isChosen ? null : { kind: "finding", value })} title={short(finding.title)}>
          {sentence(short(finding.title))}
        </button>
      </h3>
      <div class="card-place">{place ? <LineLink place={place} /> : <span class="muted small">not at a line of your code</span>}</div>
      <div class="card-actions">
        <button type="button" onClick={() => showFinding(value, finding)}>
          Show
        </button>
        {remedyTabs(finding, diagnosis.program).map(({ name, title }) => {
          const isOpen = open?.value === value && open.tab === name;
          return (
            <button type="button" aria-expanded={isOpen} aria-controls={isOpen ? "opened" : undefined} onClick={() => onOpen(isOpen ? null : { value, tab: name })}>
              {title}
            </button>
          );
        })}
      </div>
    </article>
  );
}
