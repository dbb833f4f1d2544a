/** What is related to the present choice, as state of a component. */

import { useMemo } from "preact/hooks";
import { useDocument } from "./document";
import type { Diagnosis, Links } from "./schema";
import { relatedTo, type Related } from "./selection";
import { selection } from "./state";

export function useRelated(): Related | null {
  const diagnosis: Diagnosis | undefined = useDocument("diagnosis").value;
  const links: Links | undefined = useDocument("links").value;
  const chosen = selection.value;
  return useMemo(() => relatedTo(chosen, diagnosis, links), [chosen, diagnosis, links]);
}
