import { change, choose, look, range } from "../state";
import { Timeline } from "../timeline/timeline";

export function TimelineView() {
  const shown = range.value;
  return (
    <Timeline
      {...(shown ?? {})}
      height={Math.max(innerHeight - 180, 240)}
      onRange={(at, done) => look(at, !done)}
      onSelect={(slice) => change({ slice: slice && `${slice.table}:${slice.row}` })}
      onCause={(cause) => choose({ kind: "cause", value: cause })}
    />
  );
}
