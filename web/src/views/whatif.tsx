/** What the step would take with something different: findings fixed, causes gone, parts faster. */

import { useMemo, useState } from "preact/hooks";
import { count, duration, sentence, share, short } from "../format";
import { useDocument, useOptional } from "../document";
import type { Resource, WhatIf as Answer } from "../documents";
import { Swatch } from "../parts/causes";
import { Failed, Loading, Shown } from "../parts/controls";
import { evenStops, roundStops, Slider } from "../parts/options";
import { CommandLine, optionWords, Sentences } from "../parts/said";
import { resourceOf } from "../resources";
import type { Diagnosis, Session } from "../schema";
import { change, parameter, selection } from "../state";
import { useSteady } from "../steady";
import "../parts/further.css";
import "./whatif.css";

const OPTIONS = ["remove", "scale", "launch-overhead", "graphs", "overlap", "bucket-size", "loader-workers", "sync-every"];
const FLAGS = ["graphs"];
const NO_REMEDY = ["compute", "untraced", "unknown"];

/** The options that are chosen, from the address. */
function chosen(): Record<string, string> {
  const found: Record<string, string> = {};
  for (const name of OPTIONS) {
    const value = parameter(name);
    if (value) found[name] = value;
  }
  return found;
}

const listOf = (name: string) => (parameter(name) ?? "").split("\n").filter(Boolean);
const setList = (name: string, values: readonly string[], replace = false) => change({ [name]: values.join("\n") || null }, replace);
const toggled = (name: string, value: string) => {
  const values = listOf(name);
  setList(name, values.includes(value) ? values.filter((each) => each !== value) : [...values, value]);
};

export function WhatIf() {
  const session = useDocument("session");
  const measured = useDocument("whatif");
  const diagnosis = useDocument("diagnosis");
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>What if</h2>
        <span class="muted small">The recorded steps are replayed with what you choose; everything begins when what it waited for is done.</span>
        <span class="spring" />
        <button type="button" disabled={!Object.keys(chosen()).length} onClick={() => change(Object.fromEntries(OPTIONS.map((name) => [name, null])))}>
          Reset
        </button>
      </div>
      <Shown of={measured} height={480}>
        {(value) => (
          <div class="whatif">
            <div class="choices">
              <Findings diagnosis={diagnosis.value} />
              <Causes measured={value} session={session.value} />
              <Scales />
              <More />
            </div>
            <Result measured={value} session={session.value} />
          </div>
        )}
      </Shown>
    </div>
  );
}

function Findings({ diagnosis }: { diagnosis: Diagnosis | undefined }) {
  if (!diagnosis) return <Loading height={120} />;
  const rules = [...new Set(diagnosis.findings.filter((each) => each.severity !== "note").map((each) => each.rule))];
  if (!rules.length) return null;
  const removed = listOf("remove");
  return (
    <fieldset>
      <legend>Findings, fixed</legend>
      {rules.map((rule) => {
        const [first, ...others] = diagnosis.findings.filter((each) => each.rule === rule && each.severity !== "note");
        const isReplayed = [first!, ...others].some((each) => each.saving_from === "replayed");
        return (
          <label class={isReplayed ? "choice" : "choice muted"} data-tip={isReplayed ? undefined : "No change of the recorded steps expresses its remedy."}>
            <input type="checkbox" disabled={!isReplayed} checked={removed.includes(rule)} onChange={() => toggled("remove", rule)} />
            <span>
              {sentence(short(first!.title, 200))}
              {others.length > 0 && <span class="muted"> and {count(others.length)} more of {rule}</span>}
            </span>
            <span class="number">{share(first!.saving_share)}</span>
          </label>
        );
      })}
    </fieldset>
  );
}

function Causes({ measured, session }: { measured: Answer; session: Session | undefined }) {
  const removed = listOf("remove");
  const causes = measured.causes?.filter(({ cause, saving_ns }) => !NO_REMEDY.includes(cause) && (saving_ns > 0 || removed.includes(cause))) ?? [];
  if (!causes.length) return null;
  return (
    <fieldset>
      <legend>Causes, gone</legend>
      {causes.map(({ cause, saving_share }) => {
        const { label, meaning, ...look } = resourceOf(session, "host", cause);
        return (
          <label class="choice" data-tip={meaning}>
            <input type="checkbox" checked={removed.includes(cause)} onChange={() => toggled("remove", cause)} />
            <span>
              <Swatch cause={{ label, meaning, ...look }} /> {label.replace("host: ", "")}
            </span>
            <span class="number">{share(saving_share)}</span>
          </label>
        );
      })}
    </fieldset>
  );
}

/** "aten::mm=0.5" as its pattern and factor. */
export function parsedScale(text: string): [pattern: string, factor: number] {
  const at = text.lastIndexOf("=");
  return [text.slice(0, at), Number(text.slice(at + 1))];
}

function Scales() {
  const [text, write] = useState("");
  const operators = useOptional("operators");
  const kernels = useOptional("kernels");
  const lines = useOptional("lines");
  const names = useMemo(() => {
    const those = [...(operators ?? []).slice(0, 200), ...(kernels ?? []).slice(0, 100)].map((row) => String(row.name));
    const places = (lines?.lines ?? []).slice(0, 100).flatMap((row) => (row.file === null ? [] : [`${row.file}:${row.line}`]));
    return [...new Set([...places, ...those])].filter((name) => name.length < 300);
  }, [operators, kernels, lines]);
  const scales = listOf("scale");
  const now = selection.value;
  const suggested = now && ["operator", "kernel", "line", "module"].includes(now.kind) && !scales.some((each) => parsedScale(each)[0] === now.value) ? now.value : null;
  const add = (pattern: string) => {
    if (!pattern.trim() || scales.some((each) => parsedScale(each)[0] === pattern.trim())) return;
    setList("scale", [...scales, `${pattern.trim()}=0.5`]);
    write("");
  };
  return (
    <fieldset>
      <legend>Faster or slower</legend>
      {scales.map((scale) => {
        const [pattern, factor] = parsedScale(scale);
        const set = (value: string) => setList("scale", scales.map((each) => (each === scale ? `${pattern}=${value}` : each)), true);
        return (
          <div class="scale">
            <span class="name" title={short(pattern)}>
              {short(pattern, 80)}
            </span>
            <input
              type="range"
              min="0"
              max="2"
              step="0.05"
              value={factor}
              aria-label={`Factor on the time of ${short(pattern, 80)}`}
              aria-valuetext={factorWords(factor)}
              onInput={(event) => set(event.currentTarget.value)}
            />
            <output>{factorWords(factor)}</output>
            <button type="button" class="icon" aria-label={`Leave ${short(pattern, 80)} as it is`} onClick={() => setList("scale", scales.filter((each) => each !== scale))}>
              ×
            </button>
          </div>
        );
      })}
      <form
        class="add"
        onSubmit={(event) => {
          event.preventDefault();
          add(text);
        }}
      >
        <input
          type="text"
          list="whatif-names"
          placeholder="Operator, kernel, module or FILE:LINE"
          aria-label="Operator, kernel, module or FILE:LINE; * and ? as in file names"
          value={text}
          onInput={(event) => write(event.currentTarget.value)}
        />
        <datalist id="whatif-names">
          {names.map((name) => (
            <option value={name} />
          ))}
        </datalist>
        <button type="submit" disabled={!text.trim()}>
          Add
        </button>
      </form>
      {suggested && (
        <button type="button" class="link" onClick={() => add(suggested)}>
          Add what is chosen: {short(suggested, 60)}
        </button>
      )}
    </fieldset>
  );
}

const factorWords = (factor: number) => (factor === 0 ? "gone" : factor === 1 ? "as it is" : `${Number(factor.toFixed(2))} × the time`);

function More() {
  const set = (name: string, value: string) => change({ [name]: value || null }, true);
  const field = (name: string, label: string, placeholder: string) => (
    <label class="field">
      <span>{label}</span>
      <input type="text" value={parameter(name) ?? ""} placeholder={placeholder} onChange={(event) => set(name, event.currentTarget.value.trim())} />
    </label>
  );
  const box = (name: string, value: string, label: string) => (
    <label class="choice">
      <input type="checkbox" checked={parameter(name) === value} onChange={(event) => set(name, event.currentTarget.checked ? value : "")} />
      <span>{label}</span>
    </label>
  );
  const isOpen = OPTIONS.slice(2).some((name) => parameter(name));
  return (
    <details open={isOpen}>
      <summary>More</summary>
      <fieldset>
        <legend class="hidden-text">More changes</legend>
        {box("graphs", "1", "One launch a step: its kernels as a recorded graph")}
        {box("overlap", "communication", "Communication runs beside all computation")}
        {field("launch-overhead", "Each launch takes", "such as 2us")}
        <Slider name="loader-workers" label="Loader workers" placeholder="as is" stops={[null, ...evenStops(0, 16, 1)]} usual={null} words={recordedOr} />
        <Slider name="sync-every" label="The host waits every … steps" placeholder="as is" stops={[null, ...roundStops(1, 1000, [1, 2, 5])]} usual={null} words={recordedOr} />
        {field("bucket-size", "Gradients in buckets of … MB", "such as 25")}
      </fieldset>
    </details>
  );
}

const stepWords = (steps: number) => (steps > 1 ? `mean of ${count(steps)} steps` : "1 step");

const recordedOr = (each: number | null) => (each === null ? "as recorded" : String(each));

function Result({ measured, session }: { measured: Answer; session: Session | undefined }) {
  const options = chosen();
  const answer = useSteady("whatif", options);
  if (answer.error !== undefined) {
    return (
      <div class="result">
        <Failed>{answer.error}</Failed>
      </div>
    );
  }
  const value = answer.value ?? measured;
  const then = value.together;
  const most = Math.max(measured.step_ns, then?.step_ns ?? 0, 1);
  return (
    <div class="result" aria-busy={answer.isOld}>
      <p class="headline" role="status">
        {then ? (
          <>
            <b>{duration(then.step_ns)}</b> instead of {duration(value.step_ns)} {value.steps.source !== "none" && <span class="muted small">({stepWords(value.steps.count)})</span>}{" "}
            <span class={then.saving_ns > 0 ? "gain" : "muted"}>
              {duration(Math.abs(then.saving_ns))} ({share(Math.abs(then.saving_share))}) {then.saving_ns >= 0 ? "less" : "more"}
            </span>
          </>
        ) : (
          <>
            <b>{duration(value.step_ns)}</b> <span class="muted">as recorded{value.steps.source === "none" ? ", without steps" : `, ${stepWords(value.steps.count)}`}</span>
          </>
        )}
      </p>
      <Path title="Now" resources={value.resources} step_ns={value.step_ns} most={most} session={session} />
      {then && value.resources_then && <Path title="Then" resources={value.resources_then} step_ns={then.step_ns} most={most} session={session} />}
      <PathTable now={value.resources} then={value.resources_then} value={value} session={session} />
      {value.changes.length > 1 && <Alone value={value} />}
      {value.why_not !== null && <p class="warning small">{value.why_not}</p>}
      <Sentences said={value.sentences ?? []} />
      <CommandLine words={["whatif", session?.path ?? value.trace.path, ...optionWords(options, FLAGS)]} />
    </div>
  );
}

interface PathProps {
  title: string;
  resources: readonly Resource[];
  step_ns: number;
  most: number;
  session: Session | undefined;
}

/** The critical path of a step as one bar; both bars have one scale. */
function Path({ title, resources, step_ns, most, session }: PathProps) {
  return (
    <div class="path-bar">
      <span class="muted">{title}</span>
      <div class="cause-bar" style={{ width: `${(100 * step_ns) / most}%` }} role="img" aria-label={`${title}: ${duration(step_ns)}; ${resources.map((each) => `${resourceOf(session, each.kind, each.cause).label} ${share(each.share)}`).join(", ")}`}>
        {resources.map((each) => {
          const look = resourceOf(session, each.kind, each.cause);
          return (
            <i
              class={look.hatched ? "hatched" : undefined}
              style={{ "--c": look.colour, width: `${100 * each.share}%` }}
              data-tip={`${look.label}: ${share(each.share)} of the critical path\n${look.meaning}`}
            />
          );
        })}
      </div>
      <span class="number">{duration(step_ns)}</span>
    </div>
  );
}

function PathTable({ now, then, value, session }: { now: readonly Resource[]; then: readonly Resource[] | null; value: Answer; session: Session | undefined }) {
  const steps = Math.max(value.steps.count, 1);
  const rows = joined(now, then ?? []);
  return (
    <table class="plain-table">
      <caption>The critical path, a step</caption>
      <thead>
        <tr>
          <th scope="col">Waits for</th>
          <th scope="col" class="number">Now</th>
          <th scope="col" class="number">Share</th>
          {then && <th scope="col" class="number">Then</th>}
          {then && <th scope="col" class="number">Share</th>}
        </tr>
      </thead>
      <tbody>
        {rows.map(([kind, cause, before, after]) => {
          const look = resourceOf(session, kind, cause);
          return (
            <tr>
              <th scope="row">
                <Swatch cause={look} /> {look.label}
              </th>
              <td class="number">{duration((before?.ns ?? 0) / steps)}</td>
              <td class="number">{share(before?.share ?? 0)}</td>
              {then && <td class="number">{duration((after?.ns ?? 0) / steps)}</td>}
              {then && <td class="number">{share(after?.share ?? 0)}</td>}
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

type Joined = [kind: string, cause: string | null, now: Resource | undefined, then: Resource | undefined];

/** Parts of both paths, the largest share first. */
export function joined(now: readonly Resource[], then: readonly Resource[]): Joined[] {
  const rows = new Map<string, Joined>();
  for (const each of [...now, ...then]) {
    const key = `${each.kind}:${each.cause}`;
    const row = rows.get(key) ?? [each.kind, each.cause, undefined, undefined];
    row[now.includes(each) ? 2 : 3] = each;
    rows.set(key, row);
  }
  const largest = (row: Joined) => Math.max(row[2]?.share ?? 0, row[3]?.share ?? 0);
  return [...rows.values()].sort((a, b) => largest(b) - largest(a));
}

function Alone({ value }: { value: Answer }) {
  return (
    <table class="plain-table">
      <caption>Alone and together</caption>
      <thead>
        <tr>
          <th scope="col">Change</th>
          <th scope="col" class="number">Step</th>
          <th scope="col" class="number">Saves</th>
          <th scope="col" class="number">Share</th>
        </tr>
      </thead>
      <tbody>
        {[...value.changes, ...(value.together ? [value.together] : [])].map((each) => (
          <tr>
            <th scope="row" class="name">
              {short(each.change, 120)}
            </th>
            <td class="number">{duration(each.step_ns)}</td>
            <td class="number">{duration(each.saving_ns)}</td>
            <td class="number">{share(each.saving_share)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
