"""Short sequences of operators that repeat many times in a row: loops in the user's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSE_CODES, HostActivity
from stepscope.trace import Trace, Window
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows

SHORT_BODY: Final = 24
"""Operators in one repetition of the small loops that are looked for; longer bodies are mostly layers of a model."""
LONGEST_BODY: Final = 256
"""Operators in one repetition at most: a small model that is called again and again."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One run of repetitions.

    Attributes:
        repetitions: how often the body ran in a row.
        body: names of the operators of one repetition.
        operators: rows of `operators`, all outermost calls of the run, in order.
    """

    repetitions: int
    body: tuple[str, ...]
    operators: Rows


def loops(
    trace: Trace, activity: HostActivity, window: Window, minimum_repetitions: int, step_starts: Times
) -> list[Loop]:
    """Runs of a repeating body of outermost operators on each thread; those of a long body may have others in them.

    Operators of the optimizer, of the data loader and of the backward pass itself do not start a loop, and a run
    ends where a step does.

    Args:
        window: operators that start in it are looked at.
        step_starts: when steps begin, in order; shape (n,).
    """
    operators = trace.operators
    outermost = operators.with_row_index("row").filter(
        pl.col("parent").is_null()
        & pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left")
        & ~pl.col("name").str.contains(r"^autograd::engine|Backward\d*$")
    )
    slices = activity.slices_of("operators")
    excluded = [CAUSE_CODES["optimizer"], CAUSE_CODES["input"]]
    keep = ~np.isin(activity.cause_of(slices[outermost["row"].to_numpy()]), excluded)
    outermost = outermost.filter(pl.Series(keep, dtype=pl.Boolean))
    step = np.searchsorted(step_starts, outermost["start_ns"].to_numpy(), side="right")
    outermost = outermost.with_columns(step=pl.Series(step, dtype=pl.Int64))
    found: list[Loop] = []
    for _, mine in outermost.group_by("lane", "step", maintain_order=True):
        codes = mine["name"].rank("dense").to_numpy().astype(np.int64)
        rows = mine["row"].to_numpy().astype(np.int64)
        for first, last, body in _runs(codes, minimum_repetitions):
            called = rows[first:last]
            names = tuple(mine["name"][first : first + body])
            found.append(Loop((last - first) // body, names, called))
    return found


def _runs(codes: npt.NDArray[np.int64], minimum: int) -> list[tuple[int, int, int]]:
    """Stretches (first, last, body length) in which the sequence repeats itself at least `minimum` times.

    Shorter bodies are looked for first, and what they explain is not looked at again; but a long body may have short
    loops, or equal layers, in it.
    """
    taken = np.zeros(len(codes), np.bool_)
    result: list[tuple[int, int, int]] = []
    for body in range(1, min(LONGEST_BODY, len(codes) // max(minimum, 1)) + 1):
        same = codes[body:] == codes[:-body]
        if np.count_nonzero(same) < (minimum - 1) * body:
            continue
        if body <= SHORT_BODY:
            same &= ~taken[body:] & ~taken[:-body]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = (end - begin + body) // body * body
            if length >= minimum * body and not _is_inside(begin, begin + length, result):
                result.append((begin, begin + length, body))
                taken[begin : begin + length] = True
    return sorted(result)


def _is_inside(first: int, last: int, runs: list[tuple[int, int, int]]) -> bool:
    """Whether a stretch is a part of a run: any multiple of a body repeats itself, too."""
    return any(begin <= first and last <= end for begin, end, _ in runs)
