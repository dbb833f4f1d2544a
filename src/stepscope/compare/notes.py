"""What to keep in mind when two programs are compared, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from stepscope.compare.statistics import SampleComparison

if TYPE_CHECKING:
    from stepscope.compare.comparison import SideSummary

_NOTICEABLE: Final = 0.005
"""Two means of the same steps that differ by more than this share are told apart."""


def notes(
    ours: SideSummary,
    theirs: SideSummary,
    *,
    basis: str,
    samples: SampleComparison,
    is_unprofiled: bool,
    unknown: Collection[str],
) -> Iterator[str]:
    """What to keep in mind about a comparison.

    Args:
        unknown: names of tables and columns that only one side's recording has.
    """
    if basis == "mixed":
        without = "before" if ours.basis == "host" else "after"
        yield (
            f"No device was recorded {without}: there the main thread's time stands for the step, on the other side "
            "the device's; operators are compared by their time on the host."
        )
    for word, side in (("before", ours), ("after", theirs)):
        if side.step_source == "none":
            yield f"No steps were found {word}: all that was recorded counts as one step."
    if "input_shapes" in unknown:
        yield "Only one side's recording kept input shapes: operators are matched without them."
    if "module" in unknown:
        yield "Only one side's recording kept modules: operators are matched without them."
    for name, what in (("lines", "lines of your code"), ("memory", "memory")):
        if name in unknown:
            yield f"Only one side's recording kept {what}, which cannot be compared."
    kept = [side.trace.metadata.recorded for side in (ours, theirs)]
    if kept[0] is not None and kept[1] is not None and set(kept[0]) != set(kept[1]):
        more = ", ".join(sorted(set(kept[0]) ^ set(kept[1])))
        yield f"Only one side's recording kept {more}, which costs time itself: record both alike."
    if ours.ranks != theirs.ranks:
        yield f"Ranks: {ours.ranks} before and {theirs.ranks} after; the tables are a rank's mean."
    if is_unprofiled:
        yield (
            "The verdict is about steps that ran without the profiler; what makes the difference is told by those in "
            f"the traces, which take {ours.step_ns / 1e6:,.1f} ms before and {theirs.step_ns / 1e6:,.1f} ms after."
        )
        return
    means = ((ours, samples.before_ns), (theirs, samples.after_ns))
    if any(mean is not None and abs(mean - side.step_ns) > _NOTICEABLE * side.step_ns for side, mean in means):
        yield (
            "Every run counts the same in the verdict, and every step in the tables: their mean step is "
            f"{ours.step_ns / 1e6:,.1f} ms before and {theirs.step_ns / 1e6:,.1f} ms after."
        )
