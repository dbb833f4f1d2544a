/** A step by cause, as parts in whole nanoseconds that add up to it. */

import { apportion, count, duration, share } from "../format";
import type { Diagnosis, Session } from "../schema";
import type { Related } from "../selection";
import { change, parameter } from "../state";
import { causeOf, CauseBar, Legend, type Part } from "./causes";

export interface StepTime {
  device: string | null; // null: the host, in a trace without a device
  whole: number;
  parts: Part[];
}

/** The time of a step of each device, the busiest first; of the host where there is no device. */
export function stepTimes(diagnosis: Diagnosis, session?: Session): StepTime[] {
  const { steps, accounting, host } = diagnosis;
  const cause = (key: string, ns: number): Part => ({ ...causeOf(session, key), key, ns });
  const scaled = (device: string | null, parts: Part[]): StepTime => {
    const sum = parts.reduce((all, part) => all + part.ns, 0);
    const once = parts.find((part) => part.key === ONCE)?.ns ?? 0; // no part of a step, but of the time that is shown
    const isStep = steps.source !== "none" && steps.step_ns > 0;
    const whole = isStep ? steps.step_ns + Math.round(once / Math.max(steps.count, 1)) : sum;
    const exact = apportion(parts.map((part) => part.ns), whole);
    return { device, whole, parts: parts.map((part, place) => ({ ...part, ns: exact[place]! })).filter((part) => part.ns > 0) };
  };
  if (!accounting.length) return host.length ? [scaled(null, host.map(({ cause: key, ns }) => cause(key, ns)))] : [];
  return [...accounting]
    .sort((a, b) => b.busy_ns - a.busy_ns || (a.device < b.device ? -1 : 1))
    .map(({ device, busy_ns, idle }) => {
      const sums = new Map<string, number>();
      for (const { cause: key, ns } of idle) sums.set(key, (sums.get(key) ?? 0) + ns);
      const causes = [...sums].sort((a, b) => b[1] - a[1]).map(([key, ns]) => cause(key, ns));
      const busy = { key: "busy", label: "busy", meaning: "the device worked", colour: "var(--busy)", hatched: false, ns: busy_ns };
      return scaled(device, [busy, ...causes]);
    });
}

const ONCE = "once";
const SHOWN = 8;
const SMALL = 0.002;

export function StepBar({ diagnosis, session, related }: { diagnosis: Diagnosis; session?: Session; related: Related | null }) {
  const times = stepTimes(diagnosis, session);
  const wanted = parameter("device");
  const shown = times.find((time) => time.device === wanted) ?? times[0];
  if (!shown) return null;
  const { source, count: steps } = diagnosis.steps;
  const what = source === "none" ? "The recording" : steps > 1 ? `A step (mean of ${count(steps)})` : "The step";
  const once = source === "none" ? undefined : shown.parts.find((part) => part.key === ONCE);
  return (
    <section aria-label="Time by cause">
      <div class="bar-head">
        <h2>
          {what}: {duration(shown.whole)}
        </h2>
        {diagnosis.steps.unrecorded_ns !== null && <span class="muted">while recorded, {duration(diagnosis.steps.unrecorded_ns)} without</span>}
        {once && <span class="muted">with {duration(once.ns)} done once</span>}
        {times.length === 1 && <span class="muted">{shown.device === null ? "of the launching thread" : `of device ${shown.device}`}</span>}
        {times.length > 1 && (
          <label class="muted">
            of device{" "}
            <select value={shown.device ?? ""} onChange={(event) => change({ device: event.currentTarget.value })}>
              {times.map(({ device }) => (
                <option value={device ?? ""}>{device}</option>
              ))}
            </select>
          </label>
        )}
        {diagnosis.contention && (
          <span class="muted" data-tip={diagnosis.contention.sentence}>
            of which {duration(diagnosis.contention.ns_per_step)} ({share(diagnosis.contention.share)}){" "}
            {diagnosis.contention.by_quota ? "stopped by the container’s quota" : "waiting for processors that other programs used"}
          </span>
        )}
      </div>
      <CauseBar parts={shown.parts} related={related} />
      <Legend parts={summed(shown.parts)} related={related} />
    </section>
  );
}

/** At most eight parts, none too small to see; the rest become one, so that the legend adds up too. */
function summed(parts: Part[]): Part[] {
  const whole = parts.reduce((sum, part) => sum + part.ns, 0);
  const seen = parts.filter((part, place) => place < SHOWN - 1 && part.ns >= SMALL * whole);
  const rest = parts.slice(seen.length);
  if (rest.length < 2) return parts;
  const ns = rest.reduce((sum, part) => sum + part.ns, 0);
  const meaning = rest.map((part) => `${part.label}: ${duration(part.ns)}`).join("\n");
  return [...seen, { key: "others", label: `${rest.length} others`, meaning, colour: "var(--edge)", hatched: true, ns }];
}
