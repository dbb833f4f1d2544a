"""# What it finds
Lines that have more to do in each step than in the one before, because what they read grows: a tensor to which each
step appends its rows, a list that is summed or sorted again.

# Why it costs time
If each step adds as much, all steps together take time with the square of their number. What costs little when the run
begins takes most of the step later.

# How it is measured
For tensors: in at least 4 complete steps of a program that trains, the inputs of a line's operators are larger by the
same number of elements in each step than in the one before. Of the line's time remains the part that goes to what the
last step added.

For lists: before `stepscope run` records, it looks at two steps. A list of the user's functions that is longer in the
second one grows; the statements that read it, other than to add to it, are taken from the source. If it grows on as
fast, its length in the recorded steps follows from how many steps later they are, and what remains is the part that one
step adds.

# Known false positives
A buffer that is still being filled and has a fixed size.

# What to do
Keep running sums instead of everything so far, and add only what is new; or keep the last steps only.

# Reference
Welford's method for running means and variances (Technometrics 4, 1962).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stepscope.diagnosis.lines.costs import LineCosts
from stepscope.diagnosis.lines.growth import Growing, GrowingList, growing_lines, growing_lists
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rule, Threshold, View

_REMEDY: Final = Remedy(
    "Keep sums or other running values instead of everything so far, and add only what is new; or keep the last steps "
    "only, in a tensor or a deque of fixed size.",
    "count, total = count + len(new), total + new.sum(0)     # instead of torch.cat([everything, new]).mean(0)\n"
    "recent = collections.deque(maxlen=100)                  # instead of a list that grows",
)


def check(view: View, limits: Limits) -> Answers:
    costs = LineCosts(view)
    for found in _all(view, costs):
        if limits.reached(found.cost_ns):
            yield found


def _all(view: View, costs: LineCosts) -> Iterator[Found]:
    growing = growing_lines(view, costs)
    if growing is not None:
        yield _of_tensors(view, costs, growing)
    for one in growing_lists(view, costs):
        yield _of_list(view, costs, one)


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


def _of_list(view: View, costs: LineCosts, growing: GrowingList) -> Found:
    left = min(growing.added / growing.length, 1.0)
    return Found(
        f"{view.percent(growing.ns)} of the {view.period} goes to lines that read {growing.name}, a list that each "
        f"step makes {growing.added:,} entries longer",
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
