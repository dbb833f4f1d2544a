/** What energy a step uses, where it goes, what it emits, and what each finding would save. */

import { count, duration, sentence, short } from "../format";
import type { Energy as Document, EnergyPart } from "../documents";
import { Failed, Loading } from "../parts/controls";
import { Ranged } from "../parts/ranged";
import { CommandLine, optionWords, Sentences } from "../parts/said";
import { Scroll } from "../parts/scroll";
import { useSteady } from "../steady";
import { electricity, energy, mass, plain } from "../units";
import { asked, Field } from "./predict";
import "../parts/further.css";

const OPTIONS = ["iterations", "region", "pue", "device-watts", "idle-watts", "cpu-watts"];
const SHOWN = ["Where the energy goes, per step", "The work's energy, by operator"];
const MOST = 20;

export function Energy() {
  const options = asked(OPTIONS);
  const answer = useSteady("energy", options, 250);
  const value = answer.value;
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Energy</h2>
      </div>
      <div class="asked">
        <Field name="iterations" label="Iterations" placeholder={value ? count(value.run.iterations) : "as recorded"} />
        <Field name="region" label="Electricity of" placeholder="FRA, US-CA, SE3" />
        <Field name="pue" label="PUE" placeholder="1" />
        <Field name="device-watts" label="A device’s limit" placeholder="watts" />
        <Field name="idle-watts" label="Idle device" placeholder="watts" />
        <Field name="cpu-watts" label="Processors" placeholder="watts" />
      </div>
      {answer.error !== undefined ? (
        <Failed>{answer.error}</Failed>
      ) : value ? (
        <div class="answer" aria-busy={answer.isOld}>
          <Figures document={value} />
          <Sentences said={value.sentences ?? []} leave={SHOWN} />
          {value.traces.map((trace) => (
            <>
              {trace.devices.map((device) => (
                <Parts title={`Where the energy of device ${device.device} goes, a step`} parts={device.parts} />
              ))}
              {trace.devices.map((device) => (
                <Parts title="The work’s energy, by operator" parts={device.operators} />
              ))}
              <Savings trace={trace} />
            </>
          ))}
          <CommandLine words={["energy", value.traces[0]?.path ?? "TRACE", ...optionWords(options)]} />
        </div>
      ) : (
        <Loading height={420} />
      )}
    </div>
  );
}

function Figures({ document: { total, run, carbon } }: { document: Document }) {
  if (total.joules === null) return null;
  const rows: [string, string][] = [
    ["a step", `${energy(total.joules)}${total.is_estimate ? ", an estimate" : ""}`],
    [`${count(run.iterations)} iterations`, electricity(run.joules)],
  ];
  if (carbon && run.kilograms) rows.push([`CO₂ in ${carbon.name}`, mass(run.kilograms)]);
  for (const { value, unit } of run.equivalences) rows.push(["as much as", plain(value, unit)]);
  return (
    <dl class="facts-list">
      {rows.map(([name, text]) => (
        <div>
          <dt>{name}</dt>
          <dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}

function Parts({ title, parts }: { title: string; parts: readonly EnergyPart[] }) {
  if (!parts.length) return null;
  const most = Math.max(...parts.map((part) => part.joules?.[1] ?? 0), 1e-12);
  return (
    <Scroll label={title}>
      <table class="plain-table ranged-table">
        <caption>{title}</caption>
        <thead>
          <tr>
            <th scope="col">What</th>
            <th scope="col" class="wide">
              <span class="hidden-text">Range</span>
            </th>
            <th scope="col" class="number">Energy</th>
            <th scope="col" class="number">Time</th>
          </tr>
        </thead>
        <tbody>
          {parts.slice(0, MOST).map((part) => (
            <tr>
              <th scope="row">
                {part.kind === "operator" ? <span class="name">{short(part.name ?? "", 100)}</span> : `${part.kind}${part.name ? `: ${part.name.replaceAll("_", " ")}` : ""}`}
              </th>
              <td class="wide">
                <Ranged value={null} low={part.joules?.[0] ?? null} high={part.joules?.[1] ?? null} most={most} />
              </td>
              <td class="number">{energy(part.joules)}</td>
              <td class="number">{duration(part.ns)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {parts.length > MOST && <p class="muted small">showing {MOST} of {count(parts.length)}</p>}
    </Scroll>
  );
}

function Savings({ trace }: { trace: Document["traces"][number] }) {
  const known = trace.findings.filter((each) => each.joules !== null);
  if (!known.length) return null;
  const most = Math.max(...known.map((each) => each.joules![1] ?? 0), 1e-12);
  return (
    <Scroll label="What the findings would save">
      <table class="plain-table ranged-table">
        <caption>What the findings would save, a step</caption>
        <thead>
          <tr>
            <th scope="col">Finding</th>
            <th scope="col" class="wide">
              <span class="hidden-text">Range</span>
            </th>
            <th scope="col" class="number">Energy</th>
            <th scope="col" class="number">Time</th>
          </tr>
        </thead>
        <tbody>
          {known.map((each) => (
            <tr>
              <th scope="row" data-tip={short(each.title, 300)}>
                {sentence(short(each.title, 90))}
              </th>
              <td class="wide">
                <Ranged value={null} low={each.joules![0] ?? null} high={each.joules![1] ?? null} most={most} />
              </td>
              <td class="number">{energy(each.joules)}</td>
              <td class="number">{duration(each.saving_ns)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
