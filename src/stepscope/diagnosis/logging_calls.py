"""Calls that log, and how often they may happen."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from stepscope.analysis.host import TABLES
from stepscope.analysis.naming import cause_of_name
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import Rows, inherit

BACKWARD_NODE: Final = "autograd::engine::evaluate_function"
"""Beginning of what the engine calls a node's run. Values read right inside are not the program's: anomaly detection
asks whether they are NaN."""
_NICE: Final = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def every_steps(cost_ns: int, length_ns: int, share: float) -> int:
    """The least handy number of steps between two logs at which they cost no more than this share of the rest."""
    wanted = math.ceil(cost_ns / (share * max(length_ns - cost_ns, 1)))
    return next((number for number in _NICE if number >= wanted), _NICE[-1])


def outermost_logging(view: View) -> Rows:
    """For each slice, the outermost logging call around it or itself, -1 for none."""
    activity = view.activity
    is_logging = np.zeros(len(activity.row), np.bool_)
    for code, table in enumerate(TABLES):
        names = view.trace.table(table)["name"]
        wanted = names.is_in([name for name in names.unique() if cause_of_name(name) == "logging"]).to_numpy()
        mine = np.flatnonzero(activity.table == code)
        is_logging[mine] = wanted[activity.row[mine]]
    inside = inherit(np.where(is_logging, 1, -1), activity.around) > 0
    around = activity.around
    is_inner = (around >= 0) & inside[np.maximum(around, 0)]
    rows = np.arange(len(inside))
    return inherit(np.where(is_logging & ~is_inner, rows, -1), around)
