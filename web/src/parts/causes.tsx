/** Time by cause as one bar that adds up, and its legend. */

import type { Cause, Session } from "../schema";
import { duration, share } from "../format";
import { isRelated, type Related } from "../selection";
import { choose, selection } from "../state";

export interface Part extends Cause {
  key: string; // cause, or "busy"
  ns: number;
}

const UNKNOWN: Cause = { label: "", meaning: "", colour: "#5f6670", hatched: true };

export const causeOf = (session: Session | undefined, key: string): Cause =>
  session?.causes[key] ?? session?.kinds[key] ?? { ...UNKNOWN, label: key.replaceAll("_", " ") };

export const Swatch = ({ cause }: { cause: Cause }) => (
  <i class={cause.hatched ? "swatch hatched" : "swatch"} style={{ "--c": cause.colour }} aria-hidden="true" />
);

/** Choose this, or nothing if it is chosen already. */
export function toggle(kind: "cause" | "device" | "step" | "operator" | "kernel" | "module" | "line" | "finding", value: string): void {
  const now = selection.value;
  choose(now?.kind === kind && now.value === value ? null : { kind, value });
}

const isChoosable = (part: Part) => !["busy", "compute", "others"].includes(part.key);

export function CauseBar({ parts, related = null, thin = false }: { parts: Part[]; related?: Related | null; thin?: boolean }) {
  const whole = parts.reduce((sum, part) => sum + part.ns, 0);
  return (
    <div class={thin ? "cause-bar thin" : "cause-bar"} aria-hidden="true">
      {parts.map((part) => (
        <i
          class={[part.hatched && "hatched", !isRelated(related, "cause", part.key) && "other"].filter(Boolean).join(" ")}
          style={{ "--c": part.colour, width: `${(100 * part.ns) / (whole || 1)}%` }}
          data-tip={`${part.label}: ${duration(part.ns)}, ${share(part.ns / (whole || 1))}\n${part.meaning}`}
          onClick={() => isChoosable(part) && toggle("cause", part.key)}
        />
      ))}
    </div>
  );
}

export function Legend({ parts, related = null }: { parts: Part[]; related?: Related | null }) {
  const whole = parts.reduce((sum, part) => sum + part.ns, 0);
  const chosen = selection.value;
  return (
    <div class="legend" role="group" aria-label="Causes">
      {parts.map((part) => (
        <button
          type="button"
          class={isRelated(related, "cause", part.key) ? undefined : "other"}
          disabled={!isChoosable(part)}
          aria-pressed={isChoosable(part) ? chosen?.kind === "cause" && chosen.value === part.key : undefined}
          data-tip={part.meaning || undefined}
          onClick={() => toggle("cause", part.key)}
        >
          <Swatch cause={part} />
          {part.label} <b>{duration(part.ns)}</b> <span>{share(part.ns / (whole || 1))}</span>
        </button>
      ))}
    </div>
  );
}
