/** What is related to the present choice and ran in the chosen time, as state of a component. */

import { useMemo } from "preact/hooks";
import { useDocument, useOptional } from "./document";
import { relatedTo, within, type Related } from "./selection";
import { range, selection } from "./state";

export function useRelated(): Related | null {
  const session = useDocument("session").value;
  const chosen = selection.value;
  const diagnosis = useOptional("diagnosis", chosen !== null);
  const links = useOptional("links", chosen !== null);
  const time = session?.documents.includes("stretch") ? range.value : null;
  const stretch = useDocument(time && "stretch", time ? { start: time.start, end: time.end } : {}).value;
  return useMemo(() => within(relatedTo(chosen, diagnosis, links), stretch), [chosen, diagnosis, links, stretch]);
}
