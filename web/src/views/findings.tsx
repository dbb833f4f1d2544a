/** All findings, what they save together, and what makes the recording doubtful. */

import { useDocument } from "../document";
import { count, duration, sentence, share, short } from "../format";
import { Empty, Shown } from "../parts/controls";
import { FindingDetail, ofWhat, saved } from "../parts/finding";
import { useRelated } from "../related";
import type { Diagnosis } from "../schema";
import { findingValues, isRelated, type Related } from "../selection";
import { choose } from "../state";
import "./findings.css";

export function Findings() {
  const diagnosis = useDocument("diagnosis");
  const related = useRelated();
  return (
    <Shown of={diagnosis} height={640}>
      {(value) => (
        <>
          <Doubts diagnosis={value} />
          <AllFindings diagnosis={value} related={related} />
        </>
      )}
    </Shown>
  );
}

/** Rules about the recording itself: what they find makes all other numbers doubtful. */
const OF_THE_RECORDING = new Set(["host-contention", "profiler-overhead", "trace-health"]);

/** Share from which savings are all of the step, in words: some of it is left, however little of that was recorded. */
const NEARLY_ALL = 0.995;

/** What to know before believing the numbers: damage, other programs, and work that belongs to no typical step. */
export function Doubts({ diagnosis }: { diagnosis: Diagnosis }) {
  const { trace, steps, accounting, contention } = diagnosis;
  const sentences = contention ? [contention.sentence] : [];
  sentences.push(...trace.warnings.map((each) => `${count(each.count)} x ${each.kind}: ${each.detail}`));
  const said = diagnosis.findings.filter(({ rule }) => OF_THE_RECORDING.has(rule) && !(contention && rule === "host-contention"));
  sentences.push(...said.map(({ title }) => `${sentence(title)}.`));
  if (steps.source === "none") sentences.push("No steps were found: times are those of the whole recording.");
  if (steps.source === "inferred") sentences.push("The steps are inferred from what repeats; nothing in the recording marks them.");
  if (steps.set_apart.length) {
    const which = steps.set_apart.map((step) => `${step.index} (${duration(step.duration_ns)})`).join(", ");
    sentences.push(`Set apart as no typical step, and in no figure: step ${which}.`);
  }
  for (const { device, backlog_ns, window_ns } of accounting) {
    if (backlog_ns > 0.01 * window_ns) sentences.push(`Device ${device} also worked ${duration(backlog_ns)} on work launched before the steps.`);
  }
  if (!sentences.length) return null;
  return (
    <section class="section" aria-label="About the recording">
      {sentences.map((each) => (
        <p class="warning">{short(each, 600)}</p>
      ))}
    </section>
  );
}

export function AllFindings({ diagnosis, related }: { diagnosis: Diagnosis; related: Related | null }) {
  const { findings } = diagnosis;
  const values = findingValues(findings);
  const shown = findings.map((finding, place) => ({ finding, value: values[place]!, number: place + 1 })).filter(({ value }) => isRelated(related, "finding", value));
  return (
    <section class="section" aria-label="All findings">
      <header>
        <h2>Findings</h2>
        {shown.length < findings.length && (
          <>
            <span class="muted">
              {shown.length} of {findings.length} belong to what is chosen
            </span>
            <button type="button" class="link" onClick={() => choose(null)}>
              Show all
            </button>
          </>
        )}
        <Together diagnosis={diagnosis} />
      </header>
      {!findings.length && (
        <Empty title={`Nothing was found that would save a noticeable part of ${diagnosis.steps.source === "none" ? "the recording" : "the step"}.`}>
          {diagnosis.not_answered.length > 0 && "Questions that the trace leaves open follow below."}
        </Empty>
      )}
      {shown.map(({ finding, value, number }) => (
        <FindingDetail key={value} finding={finding} value={value} number={number} diagnosis={diagnosis} />
      ))}
      <Further diagnosis={diagnosis} />
    </section>
  );
}

function Together({ diagnosis }: { diagnosis: Diagnosis }) {
  const { together } = diagnosis;
  if (!together) return null;
  const isSum = Math.abs(together.share - together.sum_share) < 0.01;
  const against = isSum ? "they add up" : together.share < together.sum_share ? `${together.sum_share < NEARLY_ALL ? `not ${share(together.sum_share)}` : "less than their sum"}: they overlap` : `more than their sum of ${share(together.sum_share)}`;
  return (
    <span class="together">
      {count(together.count)} of them together save{" "}
      <span class="gain">
        {duration(saved(together.share, diagnosis))} ({together.share < NEARLY_ALL ? share(together.share) : "nearly all"})
      </span>
      <span class="muted">
        {" "}
        {ofWhat(diagnosis)}, {against}
      </span>
    </span>
  );
}

/** What the findings leave: small ones, costly lines, work done once, questions without an answer. */
function Further({ diagnosis }: { diagnosis: Diagnosis }) {
  const { findings_hidden, afterwards, lines, once, not_answered } = diagnosis;
  return (
    <>
      {findings_hidden > 0 && <p class="muted more">{count(findings_hidden)} more would save less than 1 % each: stepscope diagnose --all shows them.</p>}
      {afterwards.length > 0 && (
        <p class="muted more">
          Once these are gone: {afterwards.map((each) => `${each.rule} ${share(each.saving_share)}`).join(", ")}.
        </p>
      )}
      <List title="Costly lines that the findings do not explain" items={lines.map((line) => ({ head: `${short(line.file, 120)}:${line.line}`, text: `${share(line.share)} of the step, ${share(line.backward_share)} of that backward${line.faster_share >= 0.005 ? `; twice as fast it would save ${share(line.faster_share)}` : ""}` }))} />
      <List title="Work done once, in no saving" items={once.map((each) => ({ head: short(each.name, 120), text: `${each.what}, ${duration(each.ns)}${each.count > 1 ? ` in ${count(each.count)} calls` : ""}` }))} />
      <List title="What this trace cannot answer" items={not_answered.map(({ question, why, how }) => ({ head: question, text: `${sentence(why)}. To know: ${how}` }))} />
    </>
  );
}

function List({ title, items }: { title: string; items: { head: string; text: string }[] }) {
  if (!items.length) return null;
  return (
    <section class="section">
      <header>
        <h2>{title}</h2>
      </header>
      <dl class="list">
        {items.map(({ head, text }) => (
          <div>
            <dt>{head}</dt>
            <dd class="muted">{short(text, 600)}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
