/** Light or dark: as the system has it until the reader chooses; `data-theme` of the root element tells the styles. */

import { computed, effect, signal } from "@preact/signals";

export type Theme = "light" | "dark";

const KEY = "stepscope-theme";
const preferred = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
const given = globalThis.document?.documentElement.dataset.theme as Theme | undefined; // by a notebook
const system = signal<Theme>(given ?? (preferred?.matches ? "dark" : "light"));
const chosen = signal<Theme | null>(remembered());

export const theme = computed<Theme>(() => chosen.value ?? system.value);

export function switchTheme(): void {
  const next = theme.value === "dark" ? "light" : "dark";
  chosen.value = next === system.value ? null : next;
  try {
    if (chosen.value) localStorage.setItem(KEY, next);
    else localStorage.removeItem(KEY);
  } catch {
    // a page that may store nothing forgets the choice
  }
}

function remembered(): Theme | null {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "light" || kept === "dark" ? kept : null;
  } catch {
    return null;
  }
}

preferred?.addEventListener("change", (event) => {
  system.value = event.matches ? "dark" : "light";
});

effect(() => {
  if (globalThis.document) document.documentElement.dataset.theme = theme.value;
});
