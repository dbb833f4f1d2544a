/** What surrounds every view: tabs, what is chosen, theme, shortcuts. */

import { useEffect, useRef } from "preact/hooks";
import { useDocument, useOptional } from "../document";
import { duration, moment, short } from "../format";
import { findingOf } from "../selection";
import { change, choose, href, look, range, selection, show } from "../state";
import { switchTheme, theme } from "../theme";
import type { View } from "../views";
import { causeOf } from "./causes";
import { Dialog } from "./controls";

export function Top({ title, onHelp }: { title: string; onHelp: () => void }) {
  const next = theme.value === "dark" ? "light" : "dark";
  return (
    <header class="top">
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the view
      </a>
      <a class="brand" href={href({ view: null, choose: null, range: null })}>
        stepscope
      </a>
      <h1 title={short(title)}>{short(title, 120)}</h1>
      <Chips />
      <button type="button" class="icon" aria-label={`Switch to the ${next} theme`} data-tip={`Switch to ${next}`} onClick={switchTheme}>
        <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
          <circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" />
          <path d="M8 2a6 6 0 0 1 0 12z" fill="currentColor" />
        </svg>
      </button>
      <button type="button" class="icon" aria-label="Keyboard shortcuts" data-tip="Keyboard shortcuts (?)" onClick={onHelp}>
        ?
      </button>
    </header>
  );
}

function Chips() {
  const session = useDocument("session").value;
  const chosen = selection.value;
  const diagnosis = useOptional("diagnosis", chosen?.kind === "finding");
  const stretch = range.value;
  const words = () => {
    if (chosen?.kind === "finding") return findingOf(chosen.value, diagnosis?.findings ?? [])?.title ?? chosen.value;
    return chosen?.kind === "cause" ? causeOf(session, chosen.value).label : (chosen?.value ?? "");
  };
  return (
    <div class="chips" role="group" aria-label="What is chosen">
      {chosen && <Chip kind={chosen.kind} words={words()} onClear={() => choose(null)} />}
      {stretch && <Chip kind="time" words={`${duration(stretch.end - stretch.start)} from ${moment(stretch.start)}`} onClear={() => look(null)} />}
    </div>
  );
}

const Chip = ({ kind, words, onClear }: { kind: string; words: string; onClear: () => void }) => (
  <span class="chip" data-tip={short(words)}>
    <b>{kind}</b>
    <span>{short(words, 120)}</span>
    <button type="button" aria-label={`Clear the chosen ${kind}`} onClick={onClear}>
      <svg width="10" height="10" viewBox="0 0 10 10" aria-hidden="true">
        <path d="M1 1l8 8M9 1L1 9" stroke="currentColor" stroke-width="1.5" />
      </svg>
    </button>
  </span>
);

export function Navigation({ views, shown }: { views: View[]; shown?: View }) {
  const here = useRef<HTMLAnchorElement>(null);
  useEffect(() => here.current?.scrollIntoView({ block: "nearest", inline: "nearest" }), [shown?.name]);
  return (
    <nav class="views" aria-label="Views">
      {views.map((each, place) => (
        <>
          {each.group && each.group !== views[place - 1]?.group && <h2>{each.group}</h2>}
          <a href={href({ view: each.name })} ref={each === shown ? here : undefined} aria-current={each === shown ? "page" : undefined}>
            {each.title}
          </a>
        </>
      ))}
    </nav>
  );
}

const GENERAL: [string, string][] = [
  ["/", "Filter or search this view"],
  ["Esc", "Clear what is chosen"],
  ["t", "Light or dark"],
  ["?", "This list"],
  ["↑ ↓ Enter", "In a table: move, choose"],
  ["Alt ←", "Back"],
];

export function Shortcuts({ views, open, onClose }: { views: View[]; open: boolean; onClose: () => void }) {
  if (!open) return null;
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <div class="keys">
        {[...GENERAL, ...views.map(({ key, title }) => [`g ${key}`, title] as const)].map(([keys, what]) => (
          <div>
            <span>{what}</span>
            <span>
              {keys.split(" ").map((key) => (
                <>
                  <kbd>{key}</kbd>{" "}
                </>
              ))}
            </span>
          </div>
        ))}
      </div>
    </Dialog>
  );
}

/** Keys of the whole page. "g" and a letter come before the keys of a view, which may use the letter; all others after them. */
export function useKeys(views: View[], onHelp: () => void): void {
  useEffect(() => {
    let went = Number.NEGATIVE_INFINITY;
    const go = (event: KeyboardEvent) => {
      if (isElsewhere(event)) return;
      const chosen = event.timeStamp - went < 1200 && views.find((view) => view.key === event.key);
      went = event.key === "g" ? event.timeStamp : Number.NEGATIVE_INFINITY;
      if (!chosen) return;
      event.stopImmediatePropagation();
      show(chosen.name);
    };
    const act = (event: KeyboardEvent) => {
      if (isElsewhere(event) || event.defaultPrevented) return;
      if (event.key === "?") onHelp();
      else if (event.key === "t") switchTheme();
      else if (event.key === "Escape") change({ choose: null, range: null });
      else if (event.key === "/") {
        const filter = document.querySelector<HTMLInputElement>("main [data-filter]");
        if (!filter) return;
        event.preventDefault();
        filter.focus();
        filter.select();
      }
    };
    addEventListener("keydown", go, true);
    addEventListener("keydown", act);
    return () => {
      removeEventListener("keydown", go, true);
      removeEventListener("keydown", act);
    };
  }, [views]);
}

/** Whether a key is for a field or a dialog. */
function isElsewhere(event: KeyboardEvent): boolean {
  const target = event.target as HTMLElement;
  return event.ctrlKey || event.metaKey || event.altKey || target.matches?.("input, textarea, select") || document.querySelector("dialog[open]") !== null;
}
