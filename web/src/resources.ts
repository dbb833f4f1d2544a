/** Parts of the critical path by their names and colours: those of causes for the host, those of work for the device. */

import type { Cause, Session } from "./schema";

const DEVICE: Record<string, [label: string, kind: string]> = {
  compute: ["device: computation", "compute"],
  communication: ["communication", "communication"],
  copy: ["device: copies", "copy_in"],
  launch_latency: ["launch latency", "launch_latency"],
  wait: ["unexplained", "unknown"],
};
const UNKNOWN: Cause = { label: "", meaning: "", colour: "#5f6670", hatched: true };

export function resourceOf(session: Session | undefined, kind: string, cause: string | null): Cause {
  const look = (name: string) => session?.causes[name] ?? session?.kinds[name] ?? UNKNOWN;
  if (kind === "host") {
    const name = cause ?? "unknown";
    const found = name === "compute" ? (session?.kinds.compute ?? look(name)) : look(name);
    return { ...found, label: `host: ${name.replaceAll("_", " ")}` };
  }
  const [label, name] = DEVICE[kind] ?? [kind.replaceAll("_", " "), kind];
  return { ...(session?.kinds[name] ?? look(name)), label };
}
