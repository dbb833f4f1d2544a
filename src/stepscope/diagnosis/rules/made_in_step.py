"""# What it finds
Models, optimizers, loaders, data sets, worker pools or compiled functions that the program makes anew in each step, for
instance for each request.

# Why it costs time
Making a module allocates and fills its parameters, and mostly reads a file. A loader starts its workers, an optimizer
loses its moments, a function is traced and compiled. The result is the same every time.

# How it is measured
Before `stepscope run` records, it examines two steps and notes which lines of the user's code call the constructors of
such classes (or `torch.compile`) in both. The constructor's time counts, up to that of its line. For models, optimizers
and compiled functions, it is the time of the outermost line around it in which no module is called and no step begins:
that line makes and loads them but does not use them. If the constructors take less than a tenth of it, the line does
something else as well, and only they count.

# Known false positives
An object that differs from step to step on purpose, such as a model for each of many users.

# What to do
Make it once, before the loop or at the start of the service, and keep it.

# Reference
PyTorch documentation, "Saving and Loading Models".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.costs import Visits
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.trace.program_facts import MadeFacts
from stepscope.trace.window import Times
from stepscope.whatif.changes import scaled_stretches

_WHY: Final = {
    "optimizer": "An optimizer that is made again has also lost its moments and counts",
    "loader": "A loader that is made again begins a new epoch and starts its workers",
    "dataset": "A data set that is made again reads its files again",
    "pool": "A pool that is made again starts its threads or processes",
    "compiled function": "A function that is compiled again is traced again",
}
_TRAINED: Final = "A module that is made again has new parameters, which no optimizer knows"
_SERVED: Final = "A module that is made again fills and reads its parameters again"
_FILLED: Final = frozenset({"module", "optimizer", "compiled function"})
"""Kinds that are mostly made in other lines than the constructor's."""
_OF_THE_LINE: Final = 0.1
"""Least share of a line's time for its constructors if the rest only loads into what they make."""


@dataclass(frozen=True, slots=True)
class _Making:
    """The visits of a line that makes objects: their times, disjoint and in order."""

    place: tuple[str, int, str]
    made: tuple[MadeFacts, ...]
    starts: Times
    ends: Times


def check(view: View, limits: Limits) -> Answers:
    for making in _makings(view):
        found = _found(view, making)
        if limits.reached(found.cost_ns):
            yield found


def _makings(view: View) -> Iterator[_Making]:
    if not view.program.made or view.lane is None:
        return
    is_main = pl.col("lane") == pl.lit(view.lane, pl.Int32)
    visits = Visits(view.trace.lines.filter(is_main))
    places = [visits.place(visit) for visit in range(len(visits.rows))]
    calls = view.trace.modules.filter(is_main)["start_ns"].to_numpy()
    uses = np.sort(np.concatenate([calls, view.steps["start_ns"].to_numpy(), [view.span.end_ns - 1]]))
    begun = (visits.starts >= view.span.start_ns) & (visits.ends <= view.span.end_ns)
    found: dict[tuple[str, int, str], dict[int, MadeFacts]] = {}
    for made in view.program.made:
        where = (made.file, made.line, made.function)
        for visit in (visit for visit, place in enumerate(places) if place == where and begun[visit]):
            outer = visits.outermost(visit, uses) if made.kind in _FILLED and len(calls) else visit
            found.setdefault(places[outer], {})[outer] = made
    for place, at in found.items():
        rows = np.array(sorted(at), np.int64)
        yield _Making(place, tuple(dict.fromkeys(at.values())), visits.starts[rows], visits.ends[rows])


def _places(view: View, making: _Making, whole: int) -> tuple[Location, ...]:
    """The line, and up to two constructors in it with their shares of its time, at least 1 %."""
    inner = [made for made in making.made[:2] if (made.file, made.line) != making.place[:2]]
    parts = [made.calls * made.ns * view.step_count / max(whole, 1) for made in inner]
    return (
        Location(*making.place, 1.0, exact_line=True),
        *(Location(made.file, made.line, made.function, min(max(part, 0.01), 1.0), exact_line=True)
          for made, part in zip(inner, parts, strict=True)),
    )  # fmt: skip


def _found(view: View, making: _Making) -> Found:
    first = max(making.made, key=lambda made: made.calls * made.ns)
    whole = int((making.ends - making.starts).sum())
    constructors = sum(made.calls * made.ns for made in making.made) * view.step_count
    is_filled = first.kind in _FILLED and constructors >= _OF_THE_LINE * whole
    cost = whole if is_filled else min(whole, constructors)
    function = making.place[2]
    maker = "the program" if function == "<module>" else function
    article = "an" if first.kind == "optimizer" else "a"
    per_step = len(making.starts) / view.step_count
    many = f"{per_step:,.3g} times" if per_step != 1 else "once"
    why = _WHY.get(first.kind, _TRAINED if view.trains else _SERVED)
    return Found(
        f"{maker} makes {article} {first.kind} ({first.name}) {many} {view.a_step}: {view.percent(cost)} of the "
        f"{view.period} goes to making it",
        cost,
        basis="the time of the line that makes it, with what it calls"
        if is_filled
        else "the time that its constructor took before the recording, at most that of its line",
        confidence="medium",
        figures=[
            Figure("times a step that the line runs", per_step, "count"),
            Figure("kinds of objects made there", len(making.made), "count"),
            Figure("time of its constructor before the recording", first.ns, "ns"),
        ],
        where=_places(view, making, whole),
        remedy=Remedy(
            f"Make it once, before the loop over steps or when the service starts, and keep it. {why}.",
            f"kept = {first.name}(...)            # once, before the loop\nkept                      # in the step",
        ),
        change=scaled_stretches(
            np.full(len(making.starts), view.lane, np.int32), making.starts, making.ends, 1 - cost / max(whole, 1)
        ),
    )  # fmt: skip


RULE: Final = Rule(
    id="made-in-step",
    title="The same objects are made anew in each step",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} that goes to making them")},
    check=check,
)
