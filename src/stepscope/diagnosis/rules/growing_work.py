"""# What it finds
Lines that do more work in each step than in the one before because what they read grows: a tensor to which each step
appends rows, a list that is summed or sorted again, a cache that is copied to add the keys and values of one token.

# Why it costs time
If each step adds the same amount, the time of all steps together grows with the square of their number. What costs
little when the run begins takes most of the step later.

# How it is measured
For tensors: in at least 4 complete steps of a program that trains, the inputs of a line's operators are larger by the
same number of elements in each step than in the one before. The part of the line's time that goes to what the last step
added remains.

For caches: where a loop generates, concatenations in decoding iterations that append few rows to a tensor with at least
eight times as many. Their time remains by the share of the rows that are new.

For lists: before `stepscope run` records, it examines two steps. A list of the user's functions that is longer in the
second one grows; the source shows the statements that read it for more than adding to it. The list is assumed to keep
growing as fast until the recorded steps. The part of the time that goes to what one step adds remains.

# Known false positives
A buffer that is still being filled and has a fixed size.

# What to do
Keep running sums instead of everything so far, and add only what is new; or keep the last steps only. Let a cache have
its full size from the start, and write each token's keys and values in place.

# Reference
Welford's method for running means and variances (Technometrics 4, 1962).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.work import elements, tensor_shapes_of
from stepscope.diagnosis.lines.costs import MOST_SHOWN, SHOWN, LineCosts, line_costs
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Remedy, Rule, Threshold, View
from stepscope.diagnosis.view import rows_of
from stepscope.trace.nesting import Rows, at
from stepscope.whatif.changes import scaled_work_of

LOOKED_AT: Final = 3
"""Number of steps after which the recorder has examined the lengths of lists."""
_FEWEST: Final = 4
"""Fewest steps that show that each adds the same."""


@dataclass(frozen=True, slots=True)
class Growing:
    """Lines whose inputs grow by the same number of elements from step to step.

    Attributes:
        numbers: indices into the attribution's places, costliest first.
        ns: their time in each step; shape (steps,).
        sizes, added: elements of the inputs of the costliest line's operators in each step, and what each step adds.
        left: part of their time spent on what the last step added, 0 to 1.
    """

    numbers: Rows
    ns: npt.NDArray[np.float64]
    sizes: Rows
    added: int
    left: float

    @property
    def ns_a_step(self) -> float:
        """By how much the time grows per step, by least squares."""
        return float(np.polyfit(np.arange(len(self.ns)), self.ns, 1)[0])


def growing_lines(view: View, costs: LineCosts) -> Growing | None:
    """Find costly lines of a training program whose operators' inputs grow in each step; None if there are none."""
    bounds = view.complete_steps["start_ns"].to_numpy()
    if not view.trains or len(bounds) < _FEWEST or view.lane is None:
        return None
    costly = [line.number for line in costs.lines[:MOST_SHOWN] if view.share(line.ns) >= SHOWN]
    sizes = {number: found for number, found in _sizes(view, costly, bounds).items() if _grows(found)}
    if not sizes:
        return None
    numbers = [number for number in costly if number in sizes]
    times = {number: _times(costs, number, bounds) for number in numbers}
    added = {number: int(found[1] - found[0]) for number, found in sizes.items()}
    new = sum(float((times[number] * added[number] / sizes[number]).sum()) for number in numbers)
    ns: npt.NDArray[np.float64] = np.stack(list(times.values())).sum(axis=0)
    first = numbers[0]
    return Growing(np.array(numbers, np.int64), ns, sizes[first], added[first], min(new / max(float(ns.sum()), 1.0), 1))


def _sizes(view: View, numbers: list[int], bounds: Rows) -> dict[int, Rows]:
    """Elements of the inputs of each line's outermost operators on the main thread, by step."""
    operators = view.operators.filter(
        (pl.col("lane") == view.lane) & pl.col("parent").is_null() & pl.col("input_shapes").is_not_null()
    )
    place = at(view.attribution.place, view.slices_of_operators(rows_of(operators)))
    mine = operators.filter(pl.Series(np.isin(place, numbers)))
    place = place[np.isin(place, numbers)]
    step = np.searchsorted(bounds, mine["start_ns"].to_numpy(), side="right") - 1
    found = {number: np.zeros(len(bounds), np.int64) for number in numbers}
    for line, number, shapes in zip(place.tolist(), step.tolist(), mine["input_shapes"], strict=True):
        found[line][number] += min(sum(map(elements, tensor_shapes_of(shapes))), 2**40)
    return found


def _grows(sizes: Rows) -> bool:
    added = np.diff(sizes)
    return bool(added[0] > 0 and (added == added[0]).all() and sizes[0] > added[0])


def _times(costs: LineCosts, number: int, bounds: Rows) -> npt.NDArray[np.float64]:
    mine = costs.pieces.filter(pl.col("place") == number)
    step = np.searchsorted(bounds, mine["start_ns"].to_numpy(), side="right") - 1
    weights = mine["duration_ns"].to_numpy().astype(np.float64)
    taken: npt.NDArray[np.float64] = np.bincount(np.maximum(step, 0), weights, len(bounds)).astype(np.float64)
    return taken[: len(bounds)]


@dataclass(frozen=True, slots=True)
class GrowingList:
    """Lines that read a list that is longer in each step.

    Attributes:
        numbers: indices into the attribution's places.
        length: its length in the middle of the recording, if each step until then added as many entries.
        seen, added: its length when the recorder examined it, and entries added per step.
    """

    name: str
    numbers: Rows
    ns: int
    length: int
    seen: int
    added: int


def growing_lists(view: View, costs: LineCosts) -> list[GrowingList]:
    """Find lines that read growing lists; those of the costliest list first."""
    later = int(view.complete_steps["index"].median() or 0) - LOOKED_AT if view.complete_steps.height else 0  # type: ignore[arg-type]
    found = []
    for each in view.program.lists:
        lines = [
            line
            for line in costs.lines
            if line.place.file == each.file and any(first <= line.place.line <= last for first, last in each.read)
        ]
        if each.growth > 0 and lines:
            numbers = np.array([line.number for line in lines], np.int64)
            length = each.length + each.growth * max(later, 0)
            ns = sum(line.ns for line in lines)
            found.append(GrowingList(each.name, numbers, ns, length, each.length, each.growth))
    return sorted(found, key=lambda one: -one.ns)


_REMEDY: Final = Remedy(
    "Keep sums or other running values instead of everything so far, and add only what is new; or keep the last steps "
    "only, in a tensor or a deque of fixed size.",
    "count, total = count + len(new), total + new.sum(0)     # instead of torch.cat([everything, new]).mean(0)\n"
    "recent = collections.deque(maxlen=100)                  # instead of a list that grows",
)


_FIXED_CACHE: Final = InServing(
    "Let the cache have its full size from the start, and write what a token adds in place.",
    "cache",
    "keys = torch.empty(batch, heads, longest, size, device=device)     # once\n"
    "keys[:, :, position] = key[:, :, 0]                                # instead of torch.cat([keys, key], dim=2)",
)
_FAR_MORE: Final = 8
"""A cache has at least this many times as many rows as are appended to it."""
_FEWEST_DIMENSIONS: Final = 3
"""Fewest dimensions of a cache: lists of tokens have two."""


def check(view: View, limits: Limits) -> Answers:
    costs = line_costs(view)
    for found in _all(view, costs):
        if limits.reached(found.cost_ns):
            yield found


def _all(view: View, costs: LineCosts) -> Iterator[Found]:
    growing = growing_lines(view, costs)
    if growing is not None:
        yield _of_tensors(view, costs, growing)
    for one in growing_lists(view, costs):
        yield _of_list(view, costs, one)
    yield from _of_caches(view)


def _of_tensors(view: View, costs: LineCosts, growing: Growing) -> Found:
    cost = float(growing.ns.sum())
    first, last = int(growing.sizes[0]), int(growing.sizes[-1])
    return Found(
        f"{view.percent(cost)} of the {view.period} goes to lines whose inputs grow by {growing.added:,} elements "
        f"every step, from {first:,} to {last:,} in {len(growing.sizes)} steps",
        cost * (1 - growing.left),
        basis="the time of these lines, less the part of it that goes to what the last step added",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            Figure("elements that each step adds", growing.added, "count"),
            Figure("elements of the inputs in the first step", first, "count"),
            Figure("elements of the inputs in the last step", last, "count"),
            Figure("complete steps", len(growing.sizes), "count"),
            Figure("time of these lines in the first step", round(growing.ns[0]), "ns"),
            Figure("time of these lines in the last step", round(growing.ns[-1]), "ns"),
            Figure("time that each step adds, by least squares", round(growing.ns_a_step), "ns"),
        ],
        where=costs.locations(growing.numbers),
        remedy=_REMEDY,
        change=costs.scaled(growing.numbers, growing.left),
    )


def _of_caches(view: View) -> Iterator[Found]:
    """Concatenations that copy a cache to append what one decoding iteration adds."""
    decodes = view.iterations.filter(pl.col("phase") == "decode") if view.serves else view.iterations.clear()
    spans = decodes.select("lane", begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns")).sort("begin")
    copies = view.operators.filter(pl.col("name") == "aten::cat").sort("start_ns")
    copies = copies.join_asof(spans, left_on="start_ns", right_on="begin", by="lane", check_sortedness=False)
    copies = copies.filter(pl.col("start_ns") < pl.col("until"))
    appended = [_appended(shapes) for shapes in copies["input_shapes"]]
    copies = copies.with_columns(old=pl.Series([each[0] for each in appended], dtype=pl.Int64))
    copies = copies.with_columns(new=pl.Series([each[1] for each in appended], dtype=pl.Int64)).filter(
        pl.col("old") > 0
    )
    if copies.is_empty():
        return
    rows = rows_of(copies)
    cost = view.cost_ns(rows)
    old, new = int(copies["old"].max()), int(copies["new"].max())  # type: ignore[arg-type]
    left = float((copies["new"] / (copies["old"] + copies["new"])).to_numpy().mean())
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to copies of a cache of up to {old:,} rows, each to append "
        f"{new:,}",
        cost * (1 - left),
        basis="the time of these concatenations, less the part of it that goes to new rows",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            view.count_per_step("such copies", copies.height),
            Figure("rows of the longest cache", old, "count"),
            Figure("rows that are appended at once", new, "count"),
        ],
        where=view.at_operators(rows),
        remedy=_FIXED_CACHE.remedy(view),
        change=scaled_work_of(rows, left),
        for_every_framework=True,
    )


def _appended(input_shapes: str | None) -> tuple[int, int]:
    """Rows of the first of two concatenated tensors, and of the second if it has far fewer; zeros otherwise."""
    shapes = tensor_shapes_of(input_shapes)
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) < _FEWEST_DIMENSIONS:
        return 0, 0
    other = [(old, new) for old, new in zip(*shapes, strict=True) if old != new]
    return other[0] if len(other) == 1 and other[0][0] >= _FAR_MORE * other[0][1] > 0 else (0, 0)


def _of_list(view: View, costs: LineCosts, growing: GrowingList) -> Found:
    left = min(growing.added / growing.length, 1.0)
    return Found(
        f"{view.percent(growing.ns)} of the {view.period} goes to lines that read {growing.name}, a list to which "
        f"each step adds {growing.added:,} entries",
        growing.ns * (1 - left),
        basis="the time of these lines, less the part of it that goes to the entries of one step, if the list grew on "
        "as fast from the look at it to the recorded steps",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", growing.ns),
            Figure("entries that a step adds", growing.added, "count"),
            Figure("entries when the recorder looked", growing.seen, "count"),
            Figure("entries in the recorded steps, if it grew on as fast", growing.length, "count"),
        ],
        where=costs.locations(growing.numbers),
        remedy=_REMEDY,
        change=costs.scaled(growing.numbers, left),
    )


RULE: Final = Rule(
    id="growing-work",
    title="Lines take longer from step to step",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} that would be saved")},
    check=check,
    beneath=1,
)
