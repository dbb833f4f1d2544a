/** A document as state of a component: absent while it loads, then its value or why there is none. */

import { useEffect, useState } from "preact/hooks";
import { fetchDocument, type Parameters } from "./data";
import type { Documents } from "./schema";

export interface Loaded<Value> {
  value?: Value;
  error?: string;
}

export function useDocument<Name extends string & keyof Documents>(name: Name, parameters: Parameters = {}): Loaded<Documents[Name]> {
  const [loaded, set] = useState<Loaded<Documents[Name]>>({});
  useEffect(() => {
    const abort = new AbortController();
    fetchDocument(name, parameters, abort.signal).then(
      (value) => abort.signal.aborted || set({ value }),
      (error: unknown) => abort.signal.aborted || set({ error: error instanceof Error ? error.message : String(error) }),
    );
    return () => abort.abort();
  }, [name, JSON.stringify(parameters)]);
  return loaded;
}
