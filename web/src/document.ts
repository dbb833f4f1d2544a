/** A document as state of a component: absent while it loads, then its value or why there is none. */

import { useEffect, useState } from "preact/hooks";
import { fetchDocument, scope, type Parameters } from "./data";
import type { Documents } from "./schema";

export interface Loaded<Value> {
  value?: Value;
  error?: string;
}

type Name = string & keyof Documents;

interface Coming {
  value: Promise<unknown>;
  abort: AbortController;
  waiting: number;
}

const KEPT = 24;
const kept = new Map<string, Loaded<unknown>>();
const coming = new Map<string, Coming>();
const NOTHING: Loaded<unknown> = {};

/** What was loaded once is there at once; `isKept` is false for what is large or changes. Without a name, nothing is loaded. */
export function useDocument<Wanted extends Name>(name: Wanted | null, parameters: Parameters = {}, isKept = name !== "timeline"): Loaded<Documents[Wanted]> {
  const key = `${name}?${JSON.stringify({ ...scope(name ?? ""), ...parameters })}`;
  const [loaded, set] = useState({ key, state: kept.get(key) ?? NOTHING });
  useEffect(() => {
    if (name === null) return;
    if (kept.has(key)) return set({ key, state: kept.get(key)! });
    const asked = isKept ? shared(key, name, parameters) : alone(name, parameters);
    let isLeft = false;
    const finish = (state: Loaded<unknown>) => isLeft || set({ key, state });
    asked.value.then(
      (value) => finish({ value }),
      (error: unknown) => finish({ error: error instanceof Error ? error.message : String(error) }),
    );
    return () => {
      isLeft = true;
      leave(asked);
    };
  }, [key]);
  return (loaded.key === key ? loaded.state : (kept.get(key) ?? NOTHING)) as Loaded<Documents[Wanted]>;
}

/** A document that not every session has: nothing is loaded, and nothing comes, where it does not or it is not wanted. */
export function useOptional<Wanted extends Name>(name: Wanted, isWanted = true): Documents[Wanted] | undefined {
  const has = useDocument("session").value?.documents.includes(name) ?? false;
  return useDocument(has && isWanted ? name : null).value;
}

function alone(name: Name, parameters: Parameters): Coming {
  const abort = new AbortController();
  return { value: fetchDocument(name, parameters, abort.signal), abort, waiting: 1 };
}

/** One request for all components that ask at once. */
function shared(key: string, name: Name, parameters: Parameters): Coming {
  const known = coming.get(key);
  if (known) {
    known.waiting++;
    return known;
  }
  const asked = alone(name, parameters);
  const isOver = () => coming.get(key) === asked && coming.delete(key);
  asked.value.then((value) => keep(key, { value }), () => undefined).finally(isOver);
  asked.abort.signal.addEventListener("abort", isOver);
  coming.set(key, asked);
  return asked;
}

/** What nobody waits for any more is not computed: the browser also has few connections to one server. */
function leave(asked: Coming): void {
  if (--asked.waiting === 0) asked.abort.abort();
}

function keep(key: string, state: Loaded<unknown>): void {
  kept.set(key, state);
  for (const oldest of kept.keys()) {
    if (kept.size <= KEPT) return;
    kept.delete(oldest);
  }
}
