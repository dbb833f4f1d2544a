/** What is related to the present choice, as state of a component. */

import { useMemo } from "preact/hooks";
import { useOptional } from "./document";
import { relatedTo, type Related } from "./selection";
import { selection } from "./state";

export function useRelated(): Related | null {
  const diagnosis = useOptional("diagnosis");
  const links = useOptional("links");
  const chosen = selection.value;
  return useMemo(() => relatedTo(chosen, diagnosis, links), [chosen, diagnosis, links]);
}
