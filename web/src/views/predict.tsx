/** How long the recorded steps would take on other devices, with the range of each figure. */

import { useState } from "preact/hooks";
import { count, duration, share, size } from "../format";
import type { Predict as Document, Prediction } from "../documents";
import { Failed, Loading } from "../parts/controls";
import { Ranged } from "../parts/ranged";
import { CommandLine, optionWords, Sentences } from "../parts/said";
import { Scroll } from "../parts/scroll";
import { change, parameter } from "../state";
import { useSteady } from "../steady";
import "../parts/further.css";

const OPTIONS = ["to", "precision", "batch", "recorded-batch", "from", "host-factor"];
const PRECISIONS = ["", "fp32", "tf32", "fp16", "bf16", "fp8"];

export function Predict() {
  const options = asked(OPTIONS);
  const answer = useSteady("predict", options, 250);
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Predict</h2>
      </div>
      <div class="asked">
        <Field name="to" label="Devices" placeholder="H100-SXM,L4 or all" />
        <Field name="batch" label="Batch size of each" placeholder={answer.value?.recorded_batch ? count(answer.value.recorded_batch) : "as recorded"} />
        <label class="field">
          <span>Precision</span>
          <select value={parameter("precision") ?? ""} onChange={(event) => change({ precision: event.currentTarget.value || null })}>
            {PRECISIONS.map((each) => (
              <option value={each}>{each || "as recorded"}</option>
            ))}
          </select>
        </label>
        <Field name="host-factor" label="Host’s time ×" placeholder="1" />
        <Field name="from" label="Recorded on" placeholder={answer.value?.device ?? "if the trace does not say"} />
        {answer.value && answer.value.recorded_batch === null && <Field name="recorded-batch" label="Recorded batch" placeholder="if the trace does not say" />}
      </div>
      {answer.error !== undefined ? (
        <Failed>{answer.error}</Failed>
      ) : answer.value ? (
        <div aria-busy={answer.isOld} class="answer">
          <Predictions document={answer.value} />
          <Sentences said={answer.value.sentences ?? []} />
          <CommandLine words={["predict", answer.value.trace.path, ...optionWords(options)]} />
        </div>
      ) : (
        <Loading height={420} />
      )}
    </div>
  );
}

/** Options of a command, from the address. */
export function asked(names: readonly string[]): Record<string, string> {
  return Object.fromEntries(names.flatMap((name) => (parameter(name) ? [[name, parameter(name)!]] : [])));
}

export function Field({ name, label, placeholder, unit }: { name: string; label: string; placeholder: string; unit?: string }) {
  const [text, write] = useState(parameter(name) ?? "");
  return (
    <label class="field">
      <span>{label}</span>
      <input
        type="text"
        value={text}
        placeholder={placeholder}
        onInput={(event) => {
          write(event.currentTarget.value);
          change({ [name]: event.currentTarget.value.trim() || null }, true);
        }}
      />
      {unit && <span class="muted">{unit}</span>}
    </label>
  );
}

const LIMITS: Record<string, string> = { host: "the host", compute: "computation", memory: "memory", communication: "communication", copy: "copies" };

function Predictions({ document }: { document: Document }) {
  const rows = document.predictions;
  const most = Math.max(document.step_ns, ...rows.map((row) => row.high_ns ?? 0), 1);
  return (
    <Scroll label="Predicted steps">
      <table class="plain-table ranged-table">
        <caption>
          A step, with the range that it is in
          <span class="muted"> on the recorded device {duration(document.step_ns)}</span>
        </caption>
        <thead>
          <tr>
            <th scope="col">Device</th>
            <th scope="col" class="wide">
              <span class="hidden-text">Range</span>
            </th>
            <th scope="col" class="number">Step</th>
            <th scope="col" class="number">Range</th>
            <th scope="col" class="number">Times as fast</th>
            {rows.some((row) => row.samples_per_s !== null) && <th scope="col" class="number">Samples/s</th>}
            <th scope="col" class="number">Busy</th>
            <th scope="col">Limit</th>
            <th scope="col">Memory</th>
            <th scope="col">Rests on</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr>
              <th scope="row">{row.device}</th>
              <td class="wide">
                <Ranged value={row.step_ns} low={row.low_ns} high={row.high_ns} most={most} mark={document.step_ns} />
              </td>
              <td class="number">{row.step_ns === null ? "" : duration(row.step_ns)}</td>
              <td class="number muted">{rangeWords(row)}</td>
              <td class="number">{row.speed_up === null ? "" : count(row.speed_up)}</td>
              {rows.some((each) => each.samples_per_s !== null) && <td class="number">{row.samples_per_s === null ? "" : count(row.samples_per_s)}</td>}
              <td class="number">{row.busy_share === null ? "" : share(row.busy_share)}</td>
              <td>{row.limit === null ? "" : `${LIMITS[row.limit] ?? row.limit}${row.limit_share === null ? "" : ` ${share(row.limit_share)}`}`}</td>
              <td data-tip={row.memory_bytes === null || row.device_memory_bytes === null ? undefined : `${size(row.memory_bytes)} of ${size(row.device_memory_bytes)}`}>
                {row.fits === null ? "unknown" : row.fits ? "fits" : "does not fit"}
              </td>
              <td>{restsOn(row)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

/** What most of the device's time rests on: "learned 97.0 %". */
function restsOn({ knowledge }: Prediction): string {
  const [most] = Object.entries(knowledge).sort((one, other) => other[1] - one[1]);
  return most === undefined ? "" : `${most[0]} ${share(most[1])}`;
}

const EXACT = 0.0005; // a narrower range, as a share of the step, is not shown

function rangeWords({ step_ns, low_ns, high_ns }: Prediction): string {
  if (step_ns === null || low_ns === null || high_ns === null || high_ns - low_ns < EXACT * step_ns) return "";
  return duration(low_ns) === duration(high_ns) ? "" : `${duration(low_ns)} to ${duration(high_ns)}`;
}
