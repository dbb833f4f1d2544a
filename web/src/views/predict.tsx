/** How long the recorded steps would take on other devices, with the range of each figure. */

import { count, duration, share, size } from "../format";
import type { Predict as Document, Prediction } from "../documents";
import { Failed, Loading } from "../parts/controls";
import { Ranged } from "../parts/ranged";
import { asked, batchStops, evenStops, Field, roundStops, Slider } from "../parts/options";
import { CommandLine, optionWords, Sentences } from "../parts/said";
import { type Column, Table } from "../parts/table";
import { change, parameter } from "../state";
import { useSteady } from "../steady";
import { band, dollars, span } from "../units";
import "../parts/further.css";

const OPTIONS = ["to", "precision", "batch", "recorded-batch", "from", "host-factor"];
const FACTORS = evenStops(0.1, 3, 0.05);
const PRICES = [null, ...roundStops(0.1, 50)];
const PRECISIONS = ["", "fp32", "tf32", "fp16", "bf16", "fp8"];

export function Predict() {
  const options = asked(OPTIONS);
  const answer = useSteady("predict", options, 250);
  const recorded = answer.value?.recorded_batch ?? null;
  return (
    <div class="stack">
      <div class="toolbar">
        <h2>Predict</h2>
      </div>
      <div class="asked">
        <Field name="to" label="Devices" placeholder="H100-SXM,L4 or all" />
        {recorded === null ? (
          <Field name="batch" label="Batch size of each" placeholder="as recorded" />
        ) : (
          <Slider name="batch" label="Batch size of each" placeholder={count(recorded)} stops={batchStops(recorded)} usual={recorded} words={(each) => count(each ?? recorded)} />
        )}
        <label class="field">
          <span>Precision</span>
          <select value={parameter("precision") ?? ""} onChange={(event) => change({ precision: event.currentTarget.value || null })}>
            {PRECISIONS.map((each) => (
              <option value={each}>{each || "as recorded"}</option>
            ))}
          </select>
        </label>
        <Slider name="host-factor" label="Host’s time ×" placeholder="1" stops={FACTORS} usual={1} words={(each) => `${each} times`} />
        <Slider name="price" label="US$ an hour of the recorded device" placeholder="unknown" stops={PRICES} usual={null} words={(each) => (each === null ? "unknown" : dollars(each))} />
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

const LIMITS: Record<string, string> = { host: "the host", compute: "computation", memory: "memory", communication: "communication", copy: "copies" };

function Predictions({ document }: { document: Document }) {
  const { predictions, step_ns, steady_step_ns } = document;
  const price = Number.parseFloat(parameter("price") ?? "");
  const most = Math.max(steady_step_ns, ...predictions.map((row) => row.high_ns ?? 0), 1);
  const columns: Column<Prediction>[] = [
    { name: "device", title: "Device", value: (row) => row.device, width: 150 },
    {
      name: "range",
      title: "A step on one scale",
      value: () => null,
      show: (row) => <Ranged value={row.step_ns} low={row.low_ns} high={row.high_ns} most={most} mark={steady_step_ns} />,
      width: 160,
      tip: "The thin line is the recorded device",
    },
    { name: "step_ns", title: "Step", value: (row) => row.step_ns, isNumber: true, width: 84 },
    { name: "low_ns", title: "Range", value: (row) => row.low_ns, show: rangeWords, isNumber: true, width: 144 },
    { name: "speed_up", title: "Times as fast", value: (row) => row.speed_up, isNumber: true, width: 108 },
    {
      name: "pays_off",
      title: "Pays off below",
      value: (row) => (Number.isNaN(price) || row.speed_up === null ? null : price * row.speed_up),
      show: (row) => paysOff(row, price),
      isNumber: true,
      width: 168,
      tip: "The price of an hour at which a step costs as much as on the recorded device",
    },
    { name: "samples_per_s", title: "Samples/s", value: (row) => row.samples_per_s, isNumber: true, width: 92, spare: 3 },
    { name: "busy_share", title: "Busy", value: (row) => row.busy_share, isNumber: true, width: 72, spare: 4 },
    { name: "limit", title: "Limit", value: (row) => row.limit, show: limitWords, width: 136, spare: 1 },
    {
      name: "fits",
      title: "Memory",
      value: (row) => (row.fits === null ? "unknown" : row.fits ? "fits" : "does not fit"),
      show: (row) => (
        <span data-tip={row.memory_bytes === null || row.device_memory_bytes === null ? undefined : `${size(row.memory_bytes)} of ${size(row.device_memory_bytes)}`}>
          {row.fits === null ? "unknown" : row.fits ? "fits" : "does not fit"}
        </span>
      ),
      width: 96,
      spare: 2,
    },
    { name: "rests_on", title: "Rests on", value: restsOn, width: 130, spare: 5, tip: "What most of the device’s time is known by" },
  ];
  const known = columns.filter((column) => column.name === "range" || predictions.some((row) => column.value(row) != null));
  return (
    <>
      <p>
        A step takes <b>{duration(step_ns)}</b> as recorded{steady_step_ns < step_ns && <>, {duration(steady_step_ns)} without what predictions leave out</>}. <span class="muted">On others, {document.range_holds == null ? "between which bounds" : `with the range that ${share(document.range_holds)} of steps should lie in`}:</span>
      </p>
      <Table name="predicted" label="devices" columns={known} rows={predictions} sort="place" />
    </>
  );
}

const limitWords = ({ limit, limit_share }: Prediction) => (limit === null ? "" : `${LIMITS[limit] ?? limit}${limit_share === null ? "" : ` ${share(limit_share)}`}`);

function paysOff({ step_ns, low_ns, high_ns, speed_up }: Prediction, price: number): string {
  if (step_ns === null || speed_up === null || Number.isNaN(price)) return "";
  const of_step = price * speed_up * step_ns;
  return band(of_step / step_ns, of_step / (high_ns ?? step_ns), of_step / (low_ns ?? step_ns), dollars);
}

/** What most of the device's time rests on: "learned 97.0 %". */
function restsOn({ knowledge }: Prediction): string {
  const [most] = Object.entries(knowledge).sort((one, other) => other[1] - one[1]);
  return most === undefined ? "" : `${most[0]} ${share(most[1])}`;
}

const EXACT = 0.0005; // a narrower range, as a share of the step, is not shown

function rangeWords({ step_ns, low_ns, high_ns }: Prediction): string {
  if (step_ns === null || low_ns === null || high_ns === null || high_ns - low_ns < EXACT * step_ns) return "";
  return span(duration(low_ns), duration(high_ns));
}
