import { useEffect, useRef, useState } from "preact/hooks";
import { fetchDocument, isFile, type Parameters, Unavailable } from "../data";
import { type Loaded, useDocument } from "../document";
import { count } from "../format";
import { useRelated } from "../related";
import type { Diagnosis, Documents, Places, SlicePlace } from "../schema";
import { findingOf, isRelated, lineOf, type Related, valueOf } from "../selection";
import { change, look, parameter, type Range, range, selection, type Selection } from "../state";
import { placesIn, sliceIn as sliceAt, stretchIn } from "../timeline/local";
import { chooseNamed, kindOf, SlicePanel, StretchPanel } from "../timeline/panel";
import { Timeline } from "../timeline/timeline";
import { toggle } from "../parts/causes";
import { OpenInPerfetto } from "../parts/perfetto";
import "./timeline.css";

const NONE: never[] = [];

export function TimelineView() {
  const session = useDocument("session").value;
  const diagnosis = useDocument("diagnosis").value;
  const related = useRelated();
  const shown = range.value;
  const chosen = sliceOf(parameter("slice"));
  const marked = rangeIn(parameter("measure"));
  const slice = useLatest("slice", chosen && { ...chosen });
  const stretch = useLatest("stretch", { ...(marked ?? shown ?? {}) });
  const search = useSearch();
  const goTo = (place: SlicePlace) => {
    const room = Math.max(place.duration, 200) * 4;
    change({ slice: `${place.table}:${place.row}`, range: rangeText({ start: place.start - room, end: place.start + place.duration + room }) });
  };
  const facts = chosen ? slice.value : undefined;
  useEffect(() => {
    // A frame of the user's code chooses its line.
    const { where, name = "", kind } = facts ?? {};
    const isLine = where && (kind === "line" || (kind === "frame" && name.startsWith(`${where.file}(`)));
    if (isLine) change({ choose: `line:${lineOf(where)}` }, true);
  }, [facts]);
  return (
    <>
      <div class="toolbar">
        <SearchBox search={search} near={shown?.start ?? 0} onGo={goTo} />
        <span class="spring" />
        {!isFile && (
          <button type="button" aria-pressed={parameter("path") === "1"} onClick={() => change({ path: parameter("path") === "1" ? null : "1" })}>
            Critical path
          </button>
        )}
        <button type="button" disabled={!shown} title="Key 0" onClick={() => look(null)}>
          {isFile ? "Whole step" : "Whole recording"}
        </button>
        <OpenInPerfetto />
      </div>
      <Timeline
        {...(shown ?? {})}
        height={Math.max(Math.round(innerHeight * 0.62), 240)}
        path={parameter("path") === "1"}
        chosen={chosen}
        arrows={(facts?.links ?? NONE).map((link) => arrowOf(facts!, link))}
        frames={framesOf(selection.value, diagnosis)}
        marked={marked}
        mark={markOf(selection.value, diagnosis)}
        matches={search.text ? searchMatches(search.text) : matchesOf(selection.value, related)}
        matchesCause={related && (related.cause ? (cause) => isRelated(related, "cause", cause) : null)}
        onSelect={(at) => {
          change({ slice: at && `${at.table}:${at.row}` });
          if (at && kindOf(at.kind) && !isChosen(at.kind, at.name)) chooseNamed(at.kind, at.name);
        }}
        onCause={(cause) => toggle("cause", cause)}
        onRange={look}
        onMark={(at) => change({ measure: at && rangeText(at) }, true)}
      />
      <p class="muted small timeline-keys">
        <kbd>W</kbd> <kbd>S</kbd> or Ctrl and wheel zoom, <kbd>A</kbd> <kbd>D</kbd> or drag move, <kbd>F</kbd> zooms to the chosen slice, <kbd>0</kbd> shows the whole recording, <kbd>M</kbd> or Shift and drag
        measure, double-click zooms to a slice or step.
      </p>
      {chosen && <SlicePanel of={slice} session={session} onGo={goTo} onClose={() => change({ slice: null })} />}
      <StretchPanel of={stretch} isMarked={marked !== null} session={session} />
    </>
  );
}

/** What a slice or a stretch of time is; the last value stays until there is another one. None without parameters. */
function useLatest<Name extends "slice" | "stretch">(name: Name, parameters: Parameters | null): Loaded<Documents[Name]> {
  const [loaded, set] = useState<Loaded<Documents[Name]>>({});
  useEffect(() => {
    if (!parameters) return set({});
    const abort = new AbortController();
    asked(name, parameters, abort.signal).then(
      (value) => abort.signal.aborted || set({ value }),
      (error: unknown) => abort.signal.aborted || set({ error: error instanceof Error ? error.message : String(error) }),
    );
    return () => abort.abort();
  }, [name, JSON.stringify(parameters)]);
  return loaded;
}

/** A document of the server; in a report file, what its window of the timeline tells. */
async function asked<Name extends "slice" | "stretch" | "places">(name: Name, parameters: Parameters, signal: AbortSignal): Promise<Documents[Name]> {
  if (!isFile) return fetchDocument(name, parameters, signal);
  const document = await fetchDocument("timeline", {}, signal);
  const { start, end, table, row, text } = parameters;
  const found =
    name === "places"
      ? placesIn(document, String(text))
      : name === "slice"
        ? sliceAt(document, String(table), Number(row))
        : stretchIn(document, start === undefined ? null : { start: Number(start), end: Number(end) });
  if (!found) throw new Unavailable("This report has no such slice.");
  return found as unknown as Documents[Name];
}

const isChosen = (kind: string, name: string) => selection.value?.kind === kindOf(kind) && selection.value?.value === valueOf(name);

function sliceOf(text: string | null): { table: string; row: number } | null {
  const [table, row] = (text ?? "").split(":");
  return table && row ? { table, row: Number(row) } : null;
}

function rangeIn(text: string | null): Range | null {
  const [start, end] = (text ?? "").split("-").map(Number);
  return start !== undefined && end !== undefined && end > start ? { start, end } : null;
}

const rangeText = ({ start, end }: Range) => `${Math.max(Math.floor(start), 0)}-${Math.ceil(end)}`;

/** From the end of what comes first to the beginning of what follows from it. */
function arrowOf(slice: SlicePlace, link: SlicePlace & { link: string; outgoing: boolean }) {
  const [first, second] = link.outgoing ? [slice, link] : [link, slice];
  const from = { lane: first.lane, depth: first.depth, time: link.link === "launch" ? first.start : first.start + first.duration };
  return { kind: link.link, from, to: { lane: second.lane, depth: second.depth, time: second.start } };
}

/** What the server is to point out: the chosen name, line or module, or the lines of the chosen finding. */
function markOf(chosen: Selection | null, diagnosis: Diagnosis | undefined): string {
  if (!chosen) return "";
  if (["operator", "kernel", "line", "module"].includes(chosen.kind)) return `${chosen.kind}:${chosen.value}`;
  const lines = chosen.kind === "finding" ? (findingOf(chosen.value, diagnosis?.findings ?? [])?.where ?? []) : [];
  return lines.slice(0, 20).map((place) => `line:${lineOf(place)}`).join("\n");
}

/** Of a finding its intervals, of a step its time. */
function framesOf(chosen: Selection | null, diagnosis: Diagnosis | undefined): Range[] {
  const span = ({ start_ns, duration_ns }: { start_ns: number; duration_ns: number }) => ({ start: start_ns, end: start_ns + duration_ns });
  if (chosen?.kind === "finding") return (findingOf(chosen.value, diagnosis?.findings ?? [])?.evidence.intervals ?? []).map(span);
  if (chosen?.kind === "step") return (diagnosis?.steps.list ?? []).filter((step) => String(step.index) === chosen.value).map(span);
  return NONE;
}

/** Where the server points nothing out, as in a report file: by name. */
function matchesOf(chosen: Selection | null, related: Related | null) {
  if (!chosen || !related || (chosen.kind !== "operator" && chosen.kind !== "kernel")) return null;
  return (name: string, kind: string) => {
    const by = kindOf(kind);
    return by !== null && by !== "module" && (related[by]?.has(valueOf(name)) ?? false);
  };
}

function searchMatches(text: string) {
  const wanted = text.toLowerCase();
  return (name: string) => name.toLowerCase().includes(wanted);
}

interface Search {
  text: string;
  places: Places | null;
  at: number; // number of the place gone to, -1 before
  look: (text: string, near: number) => void;
  go: (by: number, near: number) => Promise<SlicePlace | null>;
}

function useSearch(): Search {
  const [state, set] = useState<{ text: string; places: Places | null; at: number }>({ text: "", places: null, at: -1 });
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const ask = async (text: string, near: number): Promise<Places | null> => {
    abort.current?.abort();
    const own = (abort.current = new AbortController());
    try {
      const places = await asked("places", { text, near: Math.max(Math.round(near), 0) }, own.signal);
      return own.signal.aborted ? null : places;
    } catch {
      return null;
    }
  };
  return {
    ...state,
    look: (text, near) => {
      set({ text, places: null, at: -1 });
      if (text) void ask(text, near).then((places) => places && set({ text, places, at: -1 }));
    },
    go: async (by, near) => {
      let { places } = state;
      if (!places?.count) return null;
      // From where the reader is, then one by one; what is not listed yet is asked for.
      const from = state.at < 0 ? places.first + places.places.findIndex(({ start }) => start >= near) - (by > 0 ? 1 : 0) : state.at;
      const at = (Math.max(from, -1) + by + places.count) % places.count;
      if (!places.places[at - places.first]) {
        const beyond = at === 0 ? 0 : at === places.count - 1 ? Number.MAX_SAFE_INTEGER : (places.places[by > 0 ? places.places.length - 1 : 0]?.start ?? 0);
        places = (await ask(state.text, beyond)) ?? places;
      }
      set({ ...state, places, at });
      return places.places[at - places.first] ?? null;
    },
  };
}

function SearchBox({ search, near, onGo }: { search: Search; near: number; onGo: (place: SlicePlace) => void }) {
  const go = async (by: number) => {
    const place = await search.go(by, near);
    if (place) onGo(place);
  };
  const { places, at, text } = search;
  return (
    <>
      <input
        type="search"
        data-filter
        placeholder="Search names"
        aria-label="Search names of slices"
        value={text}
        onInput={(event) => search.look(event.currentTarget.value, near)}
        onKeyDown={(event) => {
          if (event.key === "Enter") void go(event.shiftKey ? -1 : 1);
          if (event.key === "Escape") search.look("", near);
        }}
      />
      {text && (
        <>
          <button type="button" aria-label="Previous" disabled={!places?.count} onClick={() => go(-1)}>
            ‹
          </button>
          <button type="button" aria-label="Next" disabled={!places?.count} onClick={() => go(1)}>
            ›
          </button>
          <span class="muted small" role="status">
            {places ? (at >= 0 ? `${count(at + 1)} of ${count(places.count)}` : `${count(places.count)} slices, ${count(places.names)} names`) : "Searching…"}
          </span>
        </>
      )}
    </>
  );
}
