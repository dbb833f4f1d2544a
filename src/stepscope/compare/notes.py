"""Caveats for the reader of a comparison, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from stepscope.compare.record import Edge, LeftOut, SideSummary
from stepscope.compare.statistics import SampleComparison

_NOTICEABLE: Final = 0.005  # means of the same steps that differ by more than this share are shown separately
_MOST_WARNINGS: Final = 3
_MILLISECOND: Final = 1_000_000
_SECOND: Final = 1_000_000_000


def notes(
    ours: SideSummary,
    theirs: SideSummary,
    *,
    basis: str,
    samples: SampleComparison,
    is_unprofiled: bool,
    unknown: Collection[str],
) -> Iterator[str]:
    """Caveats of a comparison; `unknown` are tables and columns that only one recording has."""
    if ours.paths == theirs.paths and all(ours.paths):
        yield f"Both sides are the same {'trace' if len(ours.paths) == 1 else 'traces'}."
    if basis == "mixed":
        without = "before" if ours.basis == "host" else "after"
        yield (
            f"No device was recorded {without}: there the main thread's time stands for the step, on the other side "
            "the device's; operators are compared by their time on the host."
        )
    yield from _about_side("before", ours)
    yield from _about_side("after", theirs)
    several = max(side.trace.device_work["device"].n_unique() for side in (ours, theirs))
    if several > 1:
        yield (
            f"A trace has {several} devices: operators and lines of your code count those of all, the other tables "
            "are about one."
        )
    yield from _of_one_side(ours, theirs, unknown)
    if ours.ranks != theirs.ranks:
        yield f"Ranks: {ours.ranks} before and {theirs.ranks} after; the tables are a rank's mean."
    takes = f"{_time(ours.step_ns)} before and {_time(theirs.step_ns)} after."
    means = ((ours, samples.before_ns), (theirs, samples.after_ns))
    if is_unprofiled:
        yield (
            "The verdict is about steps that ran without the profiler; what makes the difference is told by those in "
            f"the traces, which take {takes}"
        )
    elif any(mean is not None and abs(mean - side.step_ns) > _NOTICEABLE * side.step_ns for side, mean in means):
        yield ("Every run counts the same in the verdict, and every step in the tables: their mean step is " + takes)


def _about_side(word: str, side: SideSummary) -> Iterator[str]:
    if side.left_out:
        yield _left_out(word, side.left_out)
    if side.warnings:
        found = [f"{each.detail} ({each.count:,})" for each in side.warnings[:_MOST_WARNINGS]]
        more = f"; and {len(side.warnings) - len(found)} more" if len(side.warnings) > len(found) else ""
        yield f"{word.capitalize()}, while reading: {'; '.join(found)}{more}."
    if side.step_source == "none":
        yield f"No steps were found {word}: all that was recorded counts as one step."


def _of_one_side(ours: SideSummary, theirs: SideSummary, unknown: Collection[str]) -> Iterator[str]:
    for name, what in (("input_shapes", "input shapes"), ("module", "modules")):
        if name in unknown:
            yield f"Only one side's recording kept {what}: operators are matched without them."
    for name, what in (("lines", "lines of your code"), ("memory", "memory")):
        if name in unknown:
            yield f"Only one side's recording kept {what}, which cannot be compared."
    kept = [side.trace.metadata.recorded for side in (ours, theirs)]
    if kept[0] is not None and kept[1] is not None and (more := sorted(set(kept[0]) ^ set(kept[1]))):
        yield f"Only one side's recording kept {', '.join(more)}, which costs time itself: record both alike."


def _left_out(word: str, steps: Sequence[LeftOut]) -> str:
    """Sentence such as "After, the last step (206.5 ms) is left out: it is far from the 117.9 to 127.1 ms ..."."""
    by_edge: dict[Edge, list[LeftOut]] = {}
    for step in sorted(steps, key=lambda step: step.edge):
        by_edge.setdefault(step.edge, []).append(step)
    which = " and ".join(f"the {edge} step{_lengths(found)}" for edge, found in by_edge.items())
    between = _range([step.shortest_ns for step in steps], [step.longest_ns for step in steps])
    are, they = ("are", "they are") if len(steps) > 1 else ("is", "it is")
    return (
        f"{word.capitalize()}, {which} {are} left out: {they} far from the {between} of those between, and a recording "
        "begins or ends there. --all-steps counts all."
    )


def _lengths(steps: Sequence[LeftOut]) -> str:
    lengths = [step.duration_ns for step in steps]
    of = f" of {len(steps)} traces" if len(steps) > 1 else ""
    return f"{of} ({_range(lengths, lengths)})"


def _range(shortest: Sequence[int], longest: Sequence[int]) -> str:
    low, high = min(shortest), max(longest)
    return _time(high) if low == high else f"{_time(low)} to {_time(high)}"


def _time(ns: float) -> str:
    if ns >= _SECOND:
        return f"{ns / _SECOND:,.2f} s"
    return f"{ns / _MILLISECOND:,.1f} ms" if ns >= _MILLISECOND else f"{ns / 1e3:,.1f} us"
