"""# What it finds
Evaluation of the model, or generating samples from it, so often that it takes a noticeable part of the training's time.

# Why it costs time
Each evaluation runs the model over batches that do not train it, with their loading and their metrics. Done every few
steps it takes longer than the training between two evaluations, and its result hardly changes from one to the next.

# How it is measured
An evaluation is a stretch in which a module that is also called in training mode runs in evaluation mode. It includes
the whole line of the user's code that runs it: the outermost line in which the module is not called in training mode.
Where a trainer runs the evaluation, it begins at the end of the training before it: the call, its backward pass and the
optimizer's step. A module that is only ever called in evaluation mode, such as a teacher, does not count. From the
first step on, `stepscope run` notes in which steps modules are switched to evaluation mode: the median number of steps
between two switches is how often the program evaluates. Without this, at least half of the recorded steps must hold an
evaluation. If no recorded step holds one, its time is how much longer the steps with an evaluation took than the others
before the recording.

With E the time of an evaluation, T that of a step without it and an evaluation every N steps, its share of the time is
E / N of T + E / N. The saving assumes that it runs so rarely that it takes 2 % of the training's time.

# Known false positives
An evaluation at the end of each epoch is intended; where an epoch has only a few steps, evaluate every few epochs
instead. A recording at the beginning of a run may contain an evaluation that only checks that evaluating works.

# What to do
Evaluate less often, or on a part of the data; evaluate under `torch.no_grad()`, with a larger batch.

# Reference
`eval_steps` of Transformers; `val_check_interval`, `check_val_every_n_epoch` and `limit_val_batches` of Lightning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.costs import Visits, lines_at
from stepscope.diagnosis.lines.graphs import evaluations, outermost_calls, unused_graphs
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.rules._waits import every_steps
from stepscope.trace.window import Times
from stepscope.whatif.changes import scaled_stretches

_OFTEN: Final = 0.5
"""Smallest share of recorded steps with an evaluation that shows how often it runs."""
_SELDOM: Final = 0.02
"""Share of the training's time that an evaluation may take."""
_ALIKE: Final = 0.1
"""Largest relative difference between how often the program and the recorded steps evaluate."""


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """How long one evaluation takes, and how often it runs.

    Attributes:
        ns, step_ns: time of one evaluation, and of a step without it.
        every: steps from one to the next.
        stretches: recorded ones; columns module, lane, start_ns, duration_ns, calls.
        where: the line that starts it.
    """

    ns: float
    step_ns: float
    every: float
    stretches: pl.DataFrame
    where: tuple[Location, ...]

    @property
    def per_step_ns(self) -> float:
        return self.ns / self.every

    @property
    def share(self) -> float:
        """Share of the time that evaluation takes."""
        return self.per_step_ns / max(self.step_ns + self.per_step_ns, 1.0)


def check(view: View, limits: Limits) -> Answers:
    found = _recorded(view) or _before_recording(view)
    if found is None:
        return
    every = every_steps(round(found.ns), round(found.ns + found.step_ns), _SELDOM)
    left = found.every / every
    cost = view.length_ns * found.share * (1 - left)
    if left >= 1 or not limits.reached(cost):
        return
    yield _found(view, found, every, cost)


def _recorded(view: View) -> _Evaluation | None:
    """The evaluation in the recorded steps; None without one, or if they do not show how often it runs."""
    stretches = evaluations(view)
    if stretches.is_empty() or view.complete_steps.height < 2:
        return None
    steps = view.steps_with(stretches["start_ns"].to_numpy())
    known = view.program.evaluations
    if known is not None and known.steps > 1:
        every = max(known.every, 1.0)
    elif steps >= _OFTEN * view.step_count:
        every = view.step_count / steps
    else:
        return None
    stretches, where = _extended_to_lines(view, stretches)
    taken = int(stretches["duration_ns"].sum())
    step_ns = max(view.length_ns - taken, 0) / view.step_count
    return _Evaluation(taken / steps, step_ns, every, stretches, (*where, *lines_at(view, stretches)))


def _before_recording(view: View) -> _Evaluation | None:
    """The evaluation that the recorder met before the recording, if it recorded no step with one."""
    known = view.program.evaluations
    if known is None or known.steps < 2 or known.step_ns is None or known.evaluating_ns is None:
        return None
    place = Location(known.file, known.line, known.function, 1.0, exact_line=True)
    longer = known.evaluating_ns - known.step_ns
    none = evaluations(view).clear()
    return _Evaluation(longer, known.step_ns, max(known.every, 1.0), none, (place,) if known.file else ())


def _extended_to_lines(view: View, stretches: pl.DataFrame) -> tuple[pl.DataFrame, Iterable[Location]]:
    """The stretches, extended to the lines that run them or to the end of the training before; the longest's line."""
    visits = Visits(view.trace.lines.filter(pl.col("lane") == pl.lit(view.lane, pl.Int32)))
    evaluated = pl.col("name").is_in(stretches["module"].unique().implode())
    training = outermost_calls(view).filter(evaluated & ~pl.col("evaluates").fill_null(False))
    calls, trained = training["start_ns"].to_numpy(), _ends_of_training(view, training)
    places: dict[int, tuple[str, int, str]] = {}
    starts: list[int] = []
    ends: list[int] = []
    for begin, duration in stretches.select("start_ns", "duration_ns").iter_rows():
        start, end, visit = begin, begin + duration, visits.at(begin)
        if visit >= 0 and not visits.holds(visit, calls):
            visit = visits.outermost(visit, calls)
            start, end = min(start, int(visits.starts[visit])), max(end, int(visits.ends[visit]))
            places[end - start] = visits.place(visit)
        elif (before := int(np.searchsorted(trained, begin, side="right"))) > 0:
            start = int(trained[before - 1])
        starts.append(max(start, ends[-1] if ends else start))
        ends.append(max(end, starts[-1]))
    whole = stretches.with_columns(start_ns=pl.Series(starts), duration_ns=pl.Series(np.subtract(ends, starts)))
    return whole, [Location(*places[length], 1.0, exact_line=True) for length in sorted(places)[-1:]]


def _ends_of_training(view: View, calls: pl.DataFrame) -> Times:
    """When calls in training mode, backward passes and steps of optimizers ended, in order."""
    nodes = view.operators.filter(pl.col("name").str.contains(BACKWARD_NAME) & pl.col("parent").is_null())
    steps = view.trace.annotations.filter(pl.col("name").str.starts_with("Optimizer.step#"))
    times = pl.concat([each.select(pl.col("start_ns") + pl.col("duration_ns")) for each in (calls, nodes, steps)])
    ends: Times = np.sort(times["start_ns"].to_numpy())
    return ends


def _found(view: View, found: _Evaluation, every: int, cost: float) -> Found:
    stretches = found.stretches
    made = sum(int(graph.calls["made"].sum()) for graph in unused_graphs(view))
    graph = " Its calls record a graph that nothing runs backward: put them under torch.no_grad()." if made else ""
    what = stretches["module"][0] if stretches.height else "the model"
    often = "in each step" if found.every == 1 else f"every {found.every:,.3g} steps"
    steps = view.steps_with(stretches["start_ns"].to_numpy()) if stretches.height else 0
    known = view.program.evaluations
    noted = [Figure("steps noted from the first one on", known.seen, "count"),
             Figure("of them with an evaluation", known.steps, "count")] if known is not None else []  # fmt: skip
    return Found(
        f"{found.share:.0%} of the time goes to running {what} in evaluation mode {often}; "
        f"every {every} steps would do",
        cost,
        basis=f"the time of these evaluations, less what remains of it if they run every {every} steps",
        confidence="medium",
        figures=[
            Figure("share of the time in evaluation", found.share, "share"),
            Figure("share of the time in training", 1 - found.share, "share"),
            Figure("time of one evaluation", round(found.ns), "ns"),
            Figure("time of a step without one", round(found.step_ns), "ns"),
            Figure("steps from one to the next", found.every, "count"),
            Figure("steps between two evaluations that take 2 % of the time", every, "count"),
            view.count_per_step("calls in evaluation mode", int(stretches["calls"].sum())),
            Figure("recorded steps that evaluate", steps, "count"),
            *noted,
            view.count_per_step("autograd nodes made in them", made),
        ],
        where=tuple({(place.file, place.line): place for place in reversed(found.where)}.values())[::-1][:3],
        remedy=Remedy(
            f"Evaluate every {every} steps or once in an epoch, or on a part of the data.{graph}",
            f"if step % {every} == 0:\n"
            "    with torch.no_grad():\n"
            "        evaluate(model)\n"
            "# in trainers: eval_steps=..., val_check_interval=..., limit_val_batches=...",
        ),
        change=_change(view, found, steps, every),
    )


def _change(view: View, found: _Evaluation, steps: int, every: int) -> Change | None:
    """The evaluations run every `every` steps; None if the recorded steps hold more or fewer than others do."""
    if abs(steps * found.every - view.step_count) > _ALIKE * view.step_count:
        return None
    starts = found.stretches["start_ns"].to_numpy()
    ends = starts + found.stretches["duration_ns"].to_numpy()
    return scaled_stretches(found.stretches["lane"].to_numpy(), starts, ends, found.every / every)


RULE: Final = Rule(
    id="frequent-evaluation",
    title="The model is evaluated too often",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} that evaluating less often would save")},
    check=check,
    needs=("operators",),
)
