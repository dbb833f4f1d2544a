"""Functions of libraries in which host time goes, from Python frames: where a user's line calls a library for it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.analysis.attribution import Attribution, parse
from stepscope.analysis.host import TABLES
from stepscope.analysis.rows import at
from stepscope.trace.nesting import Rows

_MOST_SLICES: Final = 10_000
"""Costliest slices that are followed to their frames; what they leave out counts as time of no function."""


def library_functions(attribution: Attribution, slices: Rows, ns: Rows) -> tuple[str, ...]:
    """The libraries' functions below a user's frame that each contain at least half of this time, outermost first.

    Each as "file:line function". Backward work, which a line only causes, counts as time of no function.

    Args:
        slices: indices into the attribution's activity, all of one place; shape (n,).
        ns: cost of each; shape (n,).
    """
    if attribution.trace.frames.is_empty():
        return ()
    total = int(ns.sum())
    order = np.argsort(-ns, kind="stable")[:_MOST_SLICES]
    order = order[~attribution.caused[slices[order]]]
    weights, found = ns[order], []
    for level in _from_outside(attribution, slices[order]):
        numbers, which = np.unique(level, return_inverse=True)
        sums = np.where(numbers >= 0, np.bincount(which, weights, len(numbers)), 0)
        best = int(np.argmax(sums)) if len(sums) else 0
        if not len(sums) or sums[best] <= 0 or 2 * sums[best] < total:
            break
        found.append(int(numbers[best]))
        weights = np.where(level == numbers[best], weights, 0)
    return tuple(name for number in found if (name := _function(attribution, number)))


def _from_outside(attribution: Attribution, slices: Rows) -> npt.NDArray[np.int64]:
    """Library frames around each slice up to the user's, from the outside: shape (depth, n), -1 past the innermost."""
    activity, library = attribution.activity, attribution.library_frames
    is_frame = activity.table == TABLES.index("frames")
    is_users = is_frame & (activity.user_frame == activity.row)
    levels, current = [], slices
    while (current >= 0).any():
        levels.append(at(library, current))
        ended = (current < 0) | is_users[np.maximum(current, 0)]
        current = np.where(ended, -1, at(activity.around, current))
    chain = np.full((len(levels), len(slices)), -1, np.int64)
    depth, columns = np.zeros(len(slices), np.int64), np.arange(len(slices))
    for level in reversed(levels):
        known = level >= 0
        chain[depth[known], columns[known]] = level[known]
        depth += known
    return chain


def _function(attribution: Attribution, frame: int) -> str | None:
    entry = parse(attribution.trace.frames["name"][frame])
    return "{}:{} {}".format(*entry) if entry else None
