/** What energy a step uses, where it goes, what it emits, and what each finding would save. */

import type { ComponentChildren } from "preact";
import { count, duration, sentence, short } from "../format";
import type { Energy as Document, EnergyPart } from "../documents";
import { Failed, Loading } from "../parts/controls";
import { asked, evenStops, Field, roundStops, Slider } from "../parts/options";
import { Ranged } from "../parts/ranged";
import { CommandLine, optionWords, Sentences } from "../parts/said";
import { Scroll } from "../parts/scroll";
import { useSteady } from "../steady";
import { parameter } from "../state";
import { dollars, electricity, energy, mass, money, plain } from "../units";
import "../parts/further.css";

const OPTIONS = ["iterations", "region", "pue", "device-watts", "idle-watts", "cpu-watts"];
const MOST = 20;
const PUES = evenStops(1, 2, 0.05);
const PRICES = [null, ...evenStops(0.02, 0.6, 0.02)];
const WATTS = [null, ...roundStops(5, 1000)];
const JOULES_PER_KWH = 3.6e6;

const wattsWords = (each: number | null) => (each === null ? "unknown" : `${each} W`);

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
        <Slider name="pue" label="PUE" placeholder="1" stops={PUES} usual={1} words={(each) => String(each)} />
        <Slider name="kwh" label="US$ a kWh" placeholder="unknown" stops={PRICES} usual={null} words={(each) => (each === null ? "unknown" : dollars(each))} />
        <Slider name="cpu-watts" label="Processors, watts" placeholder="unknown" stops={WATTS} usual={null} words={wattsWords} />
        <Slider name="idle-watts" label="Idle device, watts" placeholder="as known" stops={WATTS} usual={null} words={wattsWords} />
        <Field name="device-watts" label="A device’s limit" placeholder="watts" />
      </div>
      {answer.error !== undefined ? (
        <Failed>{answer.error}</Failed>
      ) : value ? (
        <div class="answer" aria-busy={answer.isOld}>
          <Figures document={value} />
          <Sentences said={value.sentences ?? []} />
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
  const price = Number.parseFloat(parameter("kwh") ?? "");
  if (run.joules && !Number.isNaN(price)) rows.push([`at ${dollars(price)} a kWh`, costWords(run.joules, price)]);
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

/** What the run's energy costs: "$1.10 to $2.33". */
function costWords(joules: readonly number[], price: number): string {
  const [low, high] = [Math.min(...joules), Math.max(...joules)].map((each) => money((each / JOULES_PER_KWH) * price));
  return low === high ? low! : `${low} to ${high}`;
}

interface Row {
  name: ComponentChildren;
  tip?: string;
  joules: readonly number[] | null;
  ns: number;
}

function Parts({ title, parts }: { title: string; parts: readonly EnergyPart[] }) {
  const rows = parts.map(({ kind, name, joules, ns }) => ({
    name: kind === "operator" ? <span class="name">{short(name ?? "", 100)}</span> : `${kind}${name ? `: ${name.replaceAll("_", " ")}` : ""}`,
    joules,
    ns,
  }));
  return <Joules caption={title} label={title} of="What" rows={rows} most={MOST} />;
}

function Savings({ trace }: { trace: Document["traces"][number] }) {
  const known = trace.findings.filter((each) => each.joules !== null);
  const rows = known.map(({ title, joules, saving_ns: ns }) => ({ name: sentence(short(title, 90)), tip: short(title, 300), joules, ns }));
  return <Joules caption="What the findings would save, a step" label="What the findings would save" of="Finding" rows={rows} most={rows.length} />;
}

/** Energies with their ranges on one scale, and times; at most so many rows. */
function Joules({ caption, label, of, rows, most }: { caption: string; label: string; of: string; rows: Row[]; most: number }) {
  if (!rows.length) return null;
  const scale = Math.max(...rows.map((row) => row.joules?.[1] ?? 0), 1e-12);
  return (
    <Scroll label={label}>
      <table class="plain-table ranged-table">
        <caption>{caption}</caption>
        <thead>
          <tr>
            <th scope="col">{of}</th>
            <th scope="col" class="wide">
              <span class="hidden-text">Range</span>
            </th>
            <th scope="col" class="number">Energy</th>
            <th scope="col" class="number">Time</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, most).map(({ name, tip, joules, ns }) => (
            <tr>
              <th scope="row" data-tip={tip}>
                {name}
              </th>
              <td class="wide">
                <Ranged value={null} low={joules?.[0] ?? null} high={joules?.[1] ?? null} most={scale} />
              </td>
              <td class="number">{energy(joules)}</td>
              <td class="number">{duration(ns)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > most && <p class="muted small">showing {most} of {count(rows.length)}</p>}
    </Scroll>
  );
}
