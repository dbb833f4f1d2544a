/** A document as state of a component: absent while it loads, then its value or why there is none. */

import { useEffect, useState } from "preact/hooks";
import { fetchDocument, scope, type Parameters } from "./data";
import type { Documents } from "./schema";

export interface Loaded<Value> {
  value?: Value;
  error?: string;
}

type Name = string & keyof Documents;

const KEPT = 24;
const kept = new Map<string, Loaded<unknown>>();
const coming = new Map<string, Promise<unknown>>();
const NOTHING: Loaded<unknown> = {};

/** What was loaded once is there at once; `isKept` is false for what is large or changes. Without a name, nothing is loaded. */
export function useDocument<Wanted extends Name>(name: Wanted | null, parameters: Parameters = {}, isKept = name !== "timeline"): Loaded<Documents[Wanted]> {
  const key = `${name}?${JSON.stringify({ ...scope(name ?? ""), ...parameters })}`;
  const [loaded, set] = useState({ key, state: kept.get(key) ?? NOTHING });
  useEffect(() => {
    if (name === null) return;
    if (kept.has(key)) return set({ key, state: kept.get(key)! });
    const abort = new AbortController();
    const finish = (state: Loaded<unknown>) => abort.signal.aborted || set({ key, state });
    (isKept ? shared(key, name, parameters) : fetchDocument(name, parameters, abort.signal)).then(
      (value) => finish({ value }),
      (error: unknown) => finish({ error: error instanceof Error ? error.message : String(error) }),
    );
    return () => abort.abort();
  }, [key]);
  return (loaded.key === key ? loaded.state : (kept.get(key) ?? NOTHING)) as Loaded<Documents[Wanted]>;
}

/** A document that not every session has: nothing is loaded, and nothing comes, where it does not or it is not wanted. */
export function useOptional<Wanted extends Name>(name: Wanted, isWanted = true): Documents[Wanted] | undefined {
  const has = useDocument("session").value?.documents.includes(name) ?? false;
  return useDocument(has && isWanted ? name : null).value;
}

/** One request for all components that ask at once. */
function shared(key: string, name: Name, parameters: Parameters): Promise<unknown> {
  const known = coming.get(key);
  if (known) return known;
  const asked = fetchDocument(name, parameters)
    .then((value) => {
      keep(key, { value });
      return value;
    })
    .finally(() => coming.delete(key));
  coming.set(key, asked);
  return asked;
}

function keep(key: string, state: Loaded<unknown>): void {
  kept.set(key, state);
  for (const oldest of kept.keys()) {
    if (kept.size <= KEPT) return;
    kept.delete(oldest);
  }
}
