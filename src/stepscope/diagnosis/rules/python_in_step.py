"""# What it finds
Long stretches of Python code inside the steps, between the operators.

# Why it costs time
While the main thread computes in Python (builds lists, formats text, runs NumPy, reads files), it gives the device
nothing to do; without a device, no operator runs meanwhile.

# How it is measured
Stretches in which the main thread ran Python and no operator, each at least as long as the threshold `stretch`: with
a device only as far as the device was idle. Short stretches, which every operator call has, are ignored, and so are
long stretches at lines where they are rare: there the operating system took the processor away, or the work happened
once. Without a device, a line counts if such stretches take at least half of its time: otherwise they lie between the
operators of what the line calls, which the line cannot change. Lines that call a module are left out then.
If one kind of work takes most of these stretches, the finding names its lines and saves what it takes, less 5 % (rows
of a table, searches through lists, ever longer slices) or 10 % (loops); `slow-input-function` explains the kinds.

# Known false positives
Recording every Python frame (stacks) slows Python several times: record with lines instead. A call into C code that
blocks, such as a wait for a file or a network, counts too, and delays the step just as much.

# What to do
Move work that does not depend on the batch out of the step, do the rest with tensor operators, or move it to a thread
or a data loader worker that runs ahead.

# Reference
XProf calls a step moderately host-bound if it spends 3 % or more in "all others" (mostly Python), and highly host-bound
from 15 %.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import TABLES
from stepscope.diagnosis.lines.costs import calls_at
from stepscope.diagnosis.lines.function_work import FunctionWork, Work, figures_of, least, left_of, remedy_of, said_of
from stepscope.diagnosis.lines.graphs import lines_that_run_modules
from stepscope.diagnosis.rule import (
    Answers,
    Change,
    Figure,
    Found,
    Limits,
    Remedy,
    Rows,
    Rule,
    Threshold,
    View,
)
from stepscope.diagnosis.rules.between_iterations import OVERLAP
from stepscope.whatif.changes import scaled_host_time, together

_HABIT: Final = 0.25
"""Share of a line's stretches that must be long; if fewer are, the line is not the cause."""
_MOSTLY: Final = 0.5
"""Share of a line's time that must be such Python; with less, it lies between its callees' operators."""

_REMEDY: Final = Remedy(
    "Move what does not depend on the batch out of the step, and let a background thread do what need not be done at "
    "once.",
    "from concurrent.futures import ThreadPoolExecutor\n"
    "background = ThreadPoolExecutor(max_workers=1)            # once, before the loop\n"
    "background.submit(write_record, step, loss.detach())      # in the step, instead of doing it there",
)

_IN_INFERENCE: Final = Remedy(
    "Do once what does not depend on the new tokens, handle those of all requests in one operation, and look only at "
    "what is new.",
    "tokens = logits[:, -1].argmax(-1)                  # all requests at once; .tolist() once for each iteration\n"
    "text = stream.step(tokenizer, token)               # tokenizers.decoders.DecodeStream: what is new, not all again",
)


def check(view: View, limits: Limits) -> Answers:
    shortest = limits["stretch"]
    pieces = _with_stretch(view.pieces_of("python"))
    is_long = pl.col("ns") >= shortest
    lengths = _stretches(view, pieces).filter(is_long & (is_long.mean().over("place") >= _HABIT))
    if view.device is None:
        lengths = _of_python_lines(view, lengths)
    mine = pieces.join(lengths, on="stretch", how="semi", maintain_order="left")
    cost = int(mine["duration_ns"].sum())
    if not limits.reached(cost):
        return
    waits = " while the device waits" if view.device is not None else ""
    found = Found(
        f"{view.percent(cost)} of the {view.period} is Python code between operators{waits}",
        cost,
        basis="idle time of the device in long stretches of Python of the launching thread"
        if view.device is not None
        else "time of the main thread in long stretches of Python",
        confidence="medium",
        figures=[
            view.count_per_step("such stretches", lengths.height),
            Figure("the longest of them", int(lengths["ns"].to_numpy().max()), "ns", shortest),
        ],
        intervals=view.longest(mine.with_columns(gap="stretch"), "Python between operators"),
        remedy=_REMEDY if view.trains else _IN_INFERENCE,
        where=view.locations(mine),
        change=_without_stretches(view, mine),
    )
    works = FunctionWork(view, mine)
    work = works.costliest()
    if work is not None:
        yield _of_work(view, found, work, works)
        return
    called = calls_at(view, found.where[0])[:3] if found.where else ()
    yield replace(found, remedy=replace(found.remedy, text=_called_text(view, called))) if called else found


def _called_text(view: View, called: tuple[str, ...]) -> str:
    names = " and ".join(f"{name}()" for name in called)
    if not view.trains:
        return (
            f"The costliest line calls {names}: give it only what is new, for all requests at once, and do once what "
            "does not depend on the new tokens."
        )
    return (
        f"The costliest line calls {names}: compute what does not depend on the batch once, before the loop; choose "
        "what the step needs before anything is computed or copied for all of it; let a background thread do what need "
        "not be done at once."
    )


def _of_python_lines(view: View, stretches: pl.DataFrame) -> pl.DataFrame:
    """The stretches at lines that mostly consist of such stretches and call no module; all with an unknown line."""
    lines = view.begin_in_span(view.trace.lines).group_by(place="name").agg(whole=pl.col("duration_ns").sum())
    # Between the operators of a model's call lies the Python of the framework.
    calling = (
        view.trace.lines["name"].filter(pl.Series(lines_that_run_modules(view)[: view.trace.lines.height])).unique()
    )
    stretches = stretches.filter(~pl.col("place").is_in(calling.implode()).fill_null(False))
    known = stretches.join(lines, on="place", how="left", maintain_order="left")
    mostly = pl.col("ns").sum().over("place") >= _MOSTLY * pl.col("whole")
    return known.filter(pl.col("whole").is_null() | mostly).drop("whole")


def _of_work(view: View, found: Found, work: Work, works: FunctionWork) -> Found:
    """The finding, reworded for the kind of work that most of this Python code does."""
    left = left_of(work)
    remains = f", but for {left:.0%} of it" if left else ""
    share = Figure("share of this Python code", work.share, "share", least(work))
    return replace(
        found,
        title=f"{said_of(view, work)}: {work.share:.0%} of the Python code between operators, which is "
        f"{view.percent(found.cost_ns)} of the {view.period}",
        cost_ns=found.cost_ns * work.share * (1 - left),
        basis=f"{found.basis}, by the share of them in these lines{remains}",
        weighed_ns=found.cost_ns,
        figures=[share, *figures_of(work), *found.figures],
        remedy=remedy_of(work, in_step=True),
        for_every_framework=True,
        where=work.where,
        change=works.scaled(work, left),
    )


def _without_stretches(view: View, mine: pl.DataFrame) -> Change:
    """Remove the Python stretches that these pieces are part of, including the time when the device still works."""
    changes = []
    for (lane,), pieces in mine.drop_nulls("lane").group_by("lane", maintain_order=True):
        whole = view.activity.pieces(int(str(lane))).filter(pl.col("cause") == "python")
        start, end = whole["start"].to_numpy(), whole["end"].to_numpy()
        first = np.flatnonzero(np.append(True, start[1:] != end[:-1])[: len(start)])
        begins, ends = start[first], end[np.append(first[1:], len(start))[: len(first)] - 1]
        chosen = np.unique(np.searchsorted(begins, pieces["start_ns"].to_numpy(), side="right") - 1)
        chosen = chosen[chosen >= 0]
        changes.append(scaled_host_time(np.full(len(chosen), lane, np.int32), begins[chosen], ends[chosen], 0.0))
    return together(*changes)


def _with_stretch(pieces: pl.DataFrame) -> pl.DataFrame:
    """The pieces with the number of their `stretch`; adjacent pieces belong to one stretch."""
    pieces = pieces.sort("start_ns")
    starts = pieces["start_ns"].to_numpy()
    ends = starts + pieces["duration_ns"].to_numpy()
    begins = np.append(True, starts[1:] != ends[:-1])[: len(starts)]
    return pieces.with_columns(stretch=pl.Series(np.cumsum(begins), dtype=pl.Int64))


def _stretches(view: View, pieces: pl.DataFrame) -> pl.DataFrame:
    """Each stretch's length, and the line (or else the slice) that takes most of it: columns stretch, ns, place."""
    parts = [_placed(view, int(str(lane)), mine) for (lane,), mine in pieces.drop_nulls("lane").group_by("lane")]
    if not parts:
        return pl.DataFrame(schema={"stretch": pl.Int64, "ns": pl.Int64, "place": pl.String})
    places = pl.concat(parts).group_by("stretch", "place").agg(pl.col("ns").sum()).sort("ns", "place")
    return places.group_by("stretch", maintain_order=True).agg(pl.col("ns").sum(), pl.col("place").last())


def _placed(view: View, lane: int, pieces: pl.DataFrame) -> pl.DataFrame:
    """The pieces of one thread, cut where its line changes: columns stretch, ns, place."""
    slices = _slice_names(view, pieces["slice"].to_numpy())
    timeline = view.activity.line_timelines.get(lane)
    if timeline is None:
        return pieces.select("stretch", ns="duration_ns", place=slices)
    start = pieces["start_ns"].to_numpy()
    part, begin, end, rows = timeline.cut(start, start + pieces["duration_ns"].to_numpy())
    lines = _gathered(view.trace.lines["name"], rows)
    stretch = pieces["stretch"].gather(part)
    return pl.DataFrame(
        {"stretch": stretch, "ns": end - begin, "place": lines.zip_with(lines.is_not_null(), slices.gather(part))}
    )


def _slice_names(view: View, slices: Rows) -> pl.Series:
    names = pl.Series([None] * len(slices), dtype=pl.String)
    if not len(view.activity.row):  # a trace with lines but no slices
        return names
    table, row = view.activity.table[slices], view.activity.row[slices]
    for code, name in enumerate(TABLES):
        mine = (slices >= 0) & (table == code)
        names = _gathered(view.trace.table(name)["name"], np.where(mine, row, -1)).zip_with(pl.Series(mine), names)
    return names


def _gathered(names: pl.Series, rows: Rows) -> pl.Series:
    found: pl.Series = names.gather(pl.Series(rows, dtype=pl.Int64).replace(-1, None)).cast(pl.String)
    return found


RULE: Final = Rule(
    id="python-in-step",
    title="Python code between the operators takes long",
    thresholds={
        "share": Threshold(0.03, "share", "share of the {period} in long stretches of Python"),
        "stretch": Threshold(200_000, "ns", "shortest stretch of Python that counts"),
    },
    check=check,
    beneath=2,
    replaces=("launch-bound",),
    remedies={
        "jax": Remedy(
            "Move what does not depend on the batch out of the step, and let a background thread do what need not be "
            "done at once.",
            "background = ThreadPoolExecutor(max_workers=1)            # once, before the loop\n"
            "background.submit(write_record, step, loss)               # in the step, instead of doing it there",
        ),
    },
    serving=OVERLAP,
)
