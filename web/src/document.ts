/** A document as state of a component: absent while it loads, then its value or why there is none. */

import { useEffect, useState } from "preact/hooks";
import { fetchDocument, type Parameters } from "./data";
import type { Documents } from "./schema";

export interface Loaded<Value> {
  value?: Value;
  error?: string;
}

const KEPT = 24;
const kept = new Map<string, Loaded<unknown>>();

/** What was loaded once is there at once; `isKept` is false for what is large or changes. */
export function useDocument<Name extends string & keyof Documents>(
  name: Name,
  parameters: Parameters = {},
  isKept = name !== "timeline",
): Loaded<Documents[Name]> {
  const key = `${name}?${JSON.stringify(parameters)}`;
  const [loaded, set] = useState<{ key: string; state: Loaded<unknown> }>({ key, state: kept.get(key) ?? {} });
  useEffect(() => {
    if (kept.has(key)) return set({ key, state: kept.get(key)! });
    const abort = new AbortController();
    const finish = (state: Loaded<unknown>) => {
      if (abort.signal.aborted) return;
      if (isKept && state.value !== undefined) keep(key, state);
      set({ key, state });
    };
    fetchDocument(name, parameters, abort.signal).then(
      (value) => finish({ value }),
      (error: unknown) => finish({ error: error instanceof Error ? error.message : String(error) }),
    );
    return () => abort.abort();
  }, [key]);
  return (loaded.key === key ? loaded.state : (kept.get(key) ?? {})) as Loaded<Documents[Name]>;
}

function keep(key: string, state: Loaded<unknown>): void {
  kept.set(key, state);
  for (const oldest of kept.keys()) {
    if (kept.size <= KEPT) return;
    kept.delete(oldest);
  }
}
