/** A document that changes: asked for again while it is expected to, and while the page is looked at. */

import { useEffect, useState } from "preact/hooks";
import { fetchDocument, scope, type Parameters } from "./data";
import type { Loaded } from "./document";
import type { Documents } from "./schema";

const EVERY_MS = 1500;

/** Whether more of the ranks is still to come. */
export const isToCome = ({ read, of, diagnosing }: Documents["ranks"]) => read < of || diagnosing === true;

/** The last answer stays until the next one is there; `isOld` until the first for these parameters is. */
export function usePolled<Name extends string & keyof Documents>(
  name: Name,
  parameters: Parameters,
  goesOn: (value: Documents[Name]) => boolean,
  everyMs = EVERY_MS,
): Loaded<Documents[Name]> & { isOld: boolean; again: () => void } {
  const key = JSON.stringify({ ...scope(name), ...parameters });
  const [loaded, set] = useState<{ key: string; state: Loaded<Documents[Name]> }>({ key, state: {} });
  const [times, count] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        const value = await fetchDocument(name, parameters, abort.signal);
        set({ key, state: { value } });
        if (goesOn(value)) timer = window.setTimeout(() => (document.hidden ? wait() : ask()), everyMs);
      } catch (error) {
        const failed = error instanceof Error ? error.message : String(error);
        if (!abort.signal.aborted) set((last) => (last.key === key && last.state.value !== undefined ? last : { key, state: { error: failed } }));
      }
    };
    const wait = () => document.addEventListener("visibilitychange", ask, { once: true, signal: abort.signal });
    void ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [key, times]);
  return { ...loaded.state, isOld: loaded.key !== key, again: () => count((last) => last + 1) };
}
