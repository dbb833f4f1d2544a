/** A finding as a card of the first screen, and in full. */

import { useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import type { Diagnosis, Finding, Place } from "../schema";
import { duration, figure, moment, sentence, share, short } from "../format";
import { lineOf, rangeOf } from "../selection";
import { change, choose, look, selection } from "../state";
import { Code, Tabs, type Tab } from "./controls";

export const CONFIDENCE = {
  high: "Promises of this rule were measured: off by at most 10 % in the median.",
  medium: "Worked out from this recording: measure it after the change.",
  low: "Promises of this kind were far off where they were measured: try it first.",
};

const AROUND = 0.15;

/** Choose a finding and open the timeline where it costs most, with a little of what is around. */
export function showFinding(value: string, finding: Finding): void {
  const found = rangeOf(finding);
  const more = found ? Math.ceil(AROUND * (found.end - found.start)) : 0;
  const range = found && { start: Math.max(found.start - more, 0), end: found.end + more };
  change({
    view: "timeline",
    choose: `finding:${value}`,
    range: range && `${range.start}-${range.end}`,
  });
}

/** Ways to act on a finding: its code, its diff, the command that tries it. */
export function remedyTabs(finding: Finding, program?: string): Tab[] {
  const { code, diff, apply } = finding.remedy;
  const tabs: Tab[] = [];
  if (code) tabs.push({ name: "code", title: "Code", content: () => <Code text={code} /> });
  if (diff) tabs.push({ name: "diff", title: "Diff", content: () => <Diff text={diff} /> });
  if (apply.length) tabs.push({ name: "try", title: "Try", content: () => <Try apply={apply} program={program} /> });
  return tabs;
}

function Diff({ text }: { text: string }) {
  return (
    <div class="stack">
      <Code text={text} diff />
      <p class="muted small">Save it as fix.diff and apply it in the folder of your program:</p>
      <Code text="git apply fix.diff" />
    </div>
  );
}

function Try({ apply, program }: { apply: string[]; program: string | undefined }) {
  const chosen = apply.join(",");
  const command = program ?? "PROGRAM";
  const asOne = command.includes(" ") ? `"${command.replace(/["\\$`]/g, "\\$&")}"` : command;
  return (
    <div class="stack">
      <p class="muted small">Run your program with this change, without editing it{!program && "; PROGRAM is your script and its arguments"}:</p>
      <Code text={`stepscope run --apply ${chosen} ${command}`} />
      <p class="muted small">Measure whether it is faster, against the program as it is:</p>
      <Code text={`stepscope bench ${asOne} ${asOne} --apply B=${chosen}`} />
    </div>
  );
}

/** Nanoseconds of a step that a share of it would save: of an unrecorded one, if its time is known. */
export const saved = (part: number, { steps }: Diagnosis) => Math.round(part * (steps.unrecorded_ns ?? steps.job_step_ns ?? steps.step_ns));

/** Whose time a saving is a share of. */
export function ofWhat({ steps, trace }: Diagnosis): string {
  const alone = (trace.world_size ?? 1) > 1 && steps.job_step_ns === null && steps.unrecorded_ns === null ? ", by this rank's trace alone" : "";
  if (steps.source === "none") return `of the recording${alone}`;
  return steps.unrecorded_ns !== null ? "of a step that is not recorded" : steps.job_step_ns !== null ? "of the job's step" : steps.count > 1 ? `of a mean step${alone}` : `of the step${alone}`;
}

export const Saving = ({ finding, diagnosis }: { finding: Finding; diagnosis: Diagnosis }) =>
  finding.saving_ns_per_step > 0 ? (
    <>
      <span class="gain">
        {duration(saved(finding.saving_share, diagnosis))} <span class="part">{share(finding.saving_share)}</span>
      </span>
      <span class="muted small"> {ofWhat(diagnosis)}</span>
    </>
  ) : (
    <span class="muted">{finding.ends_run_in_ns === null ? "No saving promised" : `Ends the run in ${duration(finding.ends_run_in_ns)}`}</span>
  );

export function LineLink({ place }: { place: Place }) {
  const value = lineOf(place);
  return (
    <button type="button" class="link place" data-tip={`Choose ${short(`${place.file}:${place.line}`)}`} onClick={() => choose({ kind: "line", value })}>
      {short(lastPart(place.file), 60)}:{place.line}
    </button>
  );
}

export const lastPart = (path: string) => path.replaceAll("\\", "/").replace(/\/+$/, "").split("/").at(-1) ?? path;

export function FindingDetail({ finding, value, number, diagnosis }: { finding: Finding; value: string; number: number; diagnosis: Diagnosis }) {
  const tabs = remedyTabs(finding, diagnosis.program);
  const [shown, show] = useState(tabs[0]?.name ?? "");
  const isChosen = selection.value?.kind === "finding" && selection.value.value === value;
  return (
    <article class={`finding ${finding.severity}`} id={`finding-${number}`} aria-label={`Finding ${number}`} data-chosen={isChosen}>
      <header>
        <span class="rank">{number}</span>
        <h3>{sentence(short(finding.title, 600))}</h3>
        <Saving finding={finding} diagnosis={diagnosis} />
      </header>
      <div class="facts">
        <span data-tip={`Severity: ${finding.severity}`}>
          <i class="severity" aria-hidden="true" /> {finding.severity}
        </span>
        <span data-tip={CONFIDENCE[finding.confidence]}>confidence {finding.confidence}</span>
        <span class="place">{finding.rule}</span>
        <span class="spring" />
        <button type="button" onClick={() => showFinding(value, finding)}>
          Show
        </button>
        <button type="button" aria-pressed={isChosen} onClick={() => choose(isChosen ? null : { kind: "finding", value })}>
          Filter by it
        </button>
      </div>
      <div class="columns">
        <div class="stack">
          <Block title="Change">
            <p>{finding.remedy.text}</p>
          </Block>
          {tabs.length > 0 && <Tabs label={`How to change it: finding ${number}`} tabs={tabs} shown={shown} onShow={show} />}
        </div>
        <div class="stack">
          {finding.where.length > 0 && (
            <Block title="Where">
              {finding.where.map((place) => (
                <Where place={place} isOnly={finding.where.length === 1} />
              ))}
            </Block>
          )}
          <Block title="Computed from">
            <p class="muted">
              {finding.saving_basis}
              {finding.saving_ns_per_step > 0 && (finding.saving_from === "replayed" ? "; replayed" : "; attributed, not replayed")}
            </p>
            <Figures finding={finding} />
          </Block>
          {finding.evidence.intervals.length > 0 && (
            <Block title="Seen at">
              <Intervals finding={finding} value={value} diagnosis={diagnosis} />
            </Block>
          )}
        </div>
      </div>
    </article>
  );
}

const Block = ({ title, children }: { title: string; children: ComponentChildren }) => (
  <section class="block">
    <h4>{title}</h4>
    {children}
  </section>
);

function Where({ place, isOnly }: { place: Place; isOnly: boolean }) {
  return (
    <div class="where">
      <LineLink place={place} /> <span class="place muted">{short(place.function, 80)}</span>
      {!isOnly && <span class="muted"> {share(place.share)}</span>}
      {[...place.call_path.map((frame) => `from ${frame}`), ...place.inside.map((frame) => `inside ${frame}`)].map((frame) => (
        <div class="place muted frame">{short(frame, 200)}</div>
      ))}
    </div>
  );
}

function Figures({ finding }: { finding: Finding }) {
  return (
    <dl class="figures">
      {finding.evidence.figures.map(({ name, value, unit, threshold }) => (
        <div>
          <dt>{short(name, 200)}</dt>
          <dd>
            {figure(value, unit)}
            {threshold !== null && <span class="muted"> (limit {figure(threshold, unit)})</span>}
          </dd>
        </div>
      ))}
    </dl>
  );
}

function Intervals({ finding, value, diagnosis }: { finding: Finding; value: string; diagnosis: Diagnosis }) {
  const stepAt = (ns: number) => diagnosis.steps.list.find((step) => step.start_ns <= ns && ns < step.start_ns + step.duration_ns);
  return (
    <ul>
      {finding.evidence.intervals.map(({ start_ns, duration_ns, what }) => (
        <li>
          <button
            type="button"
            class="link"
            onClick={() => {
              change({ choose: `finding:${value}`, view: "timeline" });
              look({ start: start_ns, end: start_ns + Math.max(duration_ns, 1) }, true);
            }}
          >
            {moment(start_ns)}
          </button>{" "}
          <span class="muted">
            {duration(duration_ns)} {short(what, 120)}
            {stepAt(start_ns) && `, step ${stepAt(start_ns)!.index}`}
          </span>
        </li>
      ))}
    </ul>
  );
}
