"""What files beside the trace say, as figures, places and notes of findings: counts of the whole run, and no saving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from stepscope.diagnosis.finding import Evidence, Figure, Finding, Location, Remedy
from stepscope.diagnosis.view import View
from stepscope.trace.evidence import Fallback, Tally, Trigger

NO_SAVING: Final = "no saving: the files beside the trace count, and do not tell what the device waited for"
_MOST_PLACES: Final = 3
_MOST_NAMED: Final = 3


def figures_of(what: str, tally: Tally | None) -> tuple[Figure, ...]:
    """How often, how long together and how long at most; of the whole run."""
    if tally is None:
        return ()
    figures = [Figure(f"{what} in the whole run", tally.count, "count")]
    if tally.total_ns is not None:
        figures.append(Figure(f"time of all {what}", tally.total_ns, "ns"))
    if tally.longest_ns is not None:
        figures.append(Figure(f"longest of the {what}", tally.longest_ns, "ns"))
    return tuple(figures)


def places_of(view: View, triggers: Sequence[Trigger]) -> tuple[Location, ...]:
    """The lines of the user's code that triggered most."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for trigger in triggers:
        own = next((frame for frame in trigger.frames if frame.file in view.user_code), None)
        if own is not None:
            counts[own.file, own.line, own.function] += trigger.count
    total = max(sum(trigger.count for trigger in triggers), 1)
    return tuple(
        Location(file, line, function, min(count / total, 1.0), exact_line=True)
        for (file, line, function), count in counts.most_common(_MOST_PLACES)
    )


def named(fallbacks: Sequence[Fallback]) -> str:
    """The most frequent operators, in words."""
    first = ", ".join(each.operator for each in fallbacks[:_MOST_NAMED])
    return first + (f" and {len(fallbacks) - _MOST_NAMED} others" if len(fallbacks) > _MOST_NAMED else "")


def note(
    view: View,
    rule: str,
    title: str,
    figures: Sequence[Figure],
    remedy: Remedy,
    where: tuple[Location, ...] = (),
) -> Finding:
    """What only the files tell: a note, which claims no saving."""
    found = view.finding(
        rule,
        title,
        0,
        basis=NO_SAVING,
        confidence="high",
        evidence=Evidence(tuple(figures)),
        remedy=remedy,
        where=where,
    )
    return replace(found, title=title, severity="note")
