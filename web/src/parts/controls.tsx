/** Small parts that every view uses. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import type { Loaded } from "../document";

/** What a view shows of a document: its value, or in its place that it loads, or why there is none. Keeps `height` free. */
export function Shown<Value>({ of, height = 240, children }: { of: Loaded<Value>; height?: number; children: (value: Value) => ComponentChildren }) {
  if (of.error !== undefined) return <Failed>{of.error}</Failed>;
  if (of.value === undefined) return <Loading height={height} />;
  return <>{children(of.value)}</>;
}

const PATIENCE_MS = 4000;

export function Loading({ height = 240 }: { height?: number }) {
  const [isLong, setLong] = useState(false);
  useEffect(() => {
    const waiting = setTimeout(() => setLong(true), PATIENCE_MS);
    return () => clearTimeout(waiting);
  }, []);
  return (
    <div class="loading" role="status" style={{ minHeight: `${height}px` }}>
      {isLong ? "Still working: the first look at a large trace takes a while…" : "Loading…"}
    </div>
  );
}

export const Failed = ({ children }: { children: ComponentChildren }) => (
  <div class="notice failed" role="alert">
    <b>This cannot be shown.</b>
    <span>{children}</span>
    <span>
      <button type="button" onClick={() => location.reload()}>
        Try again
      </button>
    </span>
  </div>
);

/** Nothing to show: what is missing, and how to get it. */
export const Empty = ({ title, children }: { title: string; children?: ComponentChildren }) => (
  <div class="notice">
    <b>{title}</b>
    {children && <span>{children}</span>}
  </div>
);

/** What is shown above all else until it is closed, also by Escape and by a click beside it. */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} aria-labelledby={id} onClose={onClose} onClick={(event) => event.target === dialog.current && onClose()}>
      <header>
        <h2 id={id}>{title}</h2>
        <button type="button" onClick={onClose}>
          Close
        </button>
      </header>
      {children}
    </dialog>
  );
}

export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const [said, say] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied");
    } catch {
      say(copyOldWay(text) ? "Copied" : "Select it and press Ctrl+C");
    }
    setTimeout(() => say(""), 1600);
  };
  return (
    <button type="button" onClick={copy} aria-live="polite">
      {said || label}
    </button>
  );
}

/** Pages of the file: scheme may not use the clipboard's interface. */
function copyOldWay(text: string): boolean {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

export function Code({ text, diff = false }: { text: string; diff?: boolean }) {
  const colour = (line: string) => (line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : undefined);
  return (
    <div class={text.includes("\n") ? "code" : "code line"}>
      <pre tabIndex={0}>
        {diff ? text.split("\n").map((line) => <span class={colour(line)}>{line + "\n"}</span>) : text}
      </pre>
      <CopyButton text={text} />
    </div>
  );
}

export interface Tab {
  name: string;
  title: ComponentChildren;
  content: () => ComponentChildren;
}

/** Tabs of which one is shown; arrows move between them. */
export function Tabs({ tabs, label, shown, onShow }: { tabs: Tab[]; label: string; shown: string; onShow: (name: string) => void }) {
  const id = useId();
  const list = useRef<HTMLDivElement>(null);
  const at = Math.max(0, tabs.findIndex((tab) => tab.name === shown));
  const move = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = (at + by + tabs.length) % tabs.length;
    onShow(tabs[next]!.name);
    (list.current?.children[next] as HTMLElement | undefined)?.focus();
  };
  return (
    <div>
      <div class="tabs" role="tablist" aria-label={label} ref={list} onKeyDown={move}>
        {tabs.map((tab, place) => (
          <button
            type="button"
            role="tab"
            id={`${id}-${tab.name}`}
            aria-selected={place === at}
            aria-controls={`${id}-panel`}
            tabIndex={place === at ? 0 : -1}
            onClick={() => onShow(tab.name)}
          >
            {tab.title}
          </button>
        ))}
      </div>
      <div role="tabpanel" id={`${id}-panel`} aria-labelledby={`${id}-${tabs[at]?.name}`}>
        {tabs[at]?.content()}
      </div>
    </div>
  );
}
