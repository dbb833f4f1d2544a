/** What is shown and chosen. It lives in the address, so that links can be shared and back and forward work; in a frame of a notebook or an editor, which has no address of its own, in the page. */

import { computed, effect, signal } from "@preact/signals";

/** What the reader chose; every view filters by it. */
export interface Selection {
  kind: "finding" | "cause" | "line" | "module" | "operator" | "kernel" | "step" | "device";
  value: string;
}

export interface Range {
  start: number;
  end: number;
}

/** Whether the page is in a frame of a notebook or an editor. */
export const isFramed = globalThis.location?.protocol === "about:";

const first = isFramed ? document.documentElement.dataset.address : globalThis.location?.hash.slice(1);
const address = signal(new URLSearchParams(first ?? ""));

export const view = computed(() => address.value.get("view")); // null for the first
export const selection = computed<Selection | null>(() => {
  const [kind, ...value] = (address.value.get("choose") ?? "").split(":");
  return kind && value.length ? { kind: kind as Selection["kind"], value: value.join(":") } : null;
});
export const range = computed<Range | null>(() => {
  const [start, end] = (address.value.get("range") ?? "").split("-").map(Number);
  return start !== undefined && end !== undefined && end > start ? { start, end } : null;
});
/** A parameter of one view, such as "sort" or "device". */
export const parameter = (name: string) => address.value.get(name);

/** The address with these changes, for links. */
export function href(changes: Record<string, string | null>): string {
  return `#${changed(changes)}`;
}

export const show = (name: string) => change({ view: name });
export const choose = (chosen: Selection | null) => change({ choose: chosen && `${chosen.kind}:${chosen.value}` });
export const look = (at: Range | null, replace = false) =>
  change({ range: at && `${Math.round(at.start)}-${Math.round(at.end)}` }, replace);

/** Change the address; null removes. `replace` leaves no entry in the history, for what changes at each frame. */
export function change(changes: Record<string, string | null>, replace = false): void {
  const next = changed(changes);
  if (next.toString() === address.value.toString()) return;
  if (!isFramed) history[replace ? "replaceState" : "pushState"](null, "", `#${next}`);
  address.value = next;
}

function changed(changes: Record<string, string | null>): URLSearchParams {
  const next = new URLSearchParams(address.value);
  for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
  return next;
}

globalThis.addEventListener?.("popstate", () => {
  address.value = new URLSearchParams(location.hash.slice(1));
});
globalThis.addEventListener?.("hashchange", () => {
  address.value = new URLSearchParams(location.hash.slice(1));
});

if (isFramed) {
  addEventListener("click", (event) => {
    const link = (event.target as Element).closest?.("a[href^='#']");
    if (!link || event.defaultPrevented) return;
    event.preventDefault();
    address.value = new URLSearchParams(link.getAttribute("href")!.slice(1));
  });
}

effect(() => {
  if (globalThis.document) document.body?.setAttribute("data-view", view.value ?? "");
});
