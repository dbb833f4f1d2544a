/** Documents that are asked for while the reader drags: the last answer stays until the next one is there. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { Parameters } from "./data";
import { useDocument, type Loaded } from "./document";
import type { Documents } from "./schema";

export function useSteady<Wanted extends string & keyof Documents>(
  name: Wanted,
  parameters: Parameters,
  after_ms = 60,
): Loaded<Documents[Wanted]> & { isOld: boolean } {
  const asked = useSettled(parameters, after_ms);
  const loaded = useDocument(name, asked);
  const last = useRef<Documents[Wanted] | undefined>(undefined);
  if (loaded.value !== undefined) last.current = loaded.value;
  const isOld = loaded.value === undefined || JSON.stringify(asked) !== JSON.stringify(parameters);
  if (loaded.error !== undefined && !isOldError(asked, parameters)) return { error: loaded.error, isOld: false };
  return { ...(last.current !== undefined && { value: last.current }), isOld };
}

const isOldError = (asked: Parameters, parameters: Parameters) => JSON.stringify(asked) !== JSON.stringify(parameters);

/** A value that has not changed for a while. */
function useSettled<Value>(value: Value, after_ms: number): Value {
  const key = JSON.stringify(value);
  const [settled, settle] = useState({ key, value });
  useEffect(() => {
    if (settled.key === key) return;
    const timer = setTimeout(() => settle({ key, value }), after_ms);
    return () => clearTimeout(timer);
  }, [key]);
  return settled.value;
}
