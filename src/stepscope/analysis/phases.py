"""The phase of the training step that each host slice is part of."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.backward import BACKWARD_NAME
from stepscope.analysis.host import TABLES, HostActivity
from stepscope.analysis.naming import cause_of_name
from stepscope.analysis.per_slice import own_values
from stepscope.analysis.scopes import parsed_scope
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit

PHASES: Final = ("forward", "backward", "optimizer", "input", "other")

FORWARD, BACKWARD, OPTIMIZER, INPUT, OTHER = range(len(PHASES))
_OPERATORS, _FRAMES, _ANNOTATIONS = TABLES.index("operators"), TABLES.index("frames"), TABLES.index("annotations")
_LAUNCHES: Final = TABLES.index("launches")
_BACKWARD_CALL: Final = re.compile(
    r"built-in method run_backward |: _engine_run_backward$|torch/autograd/__init__\.py\(\d+\): (?:backward|grad)$"
)
_INPUT_FRAME: Final = re.compile(r"(?:^|/)torch/utils/data/")
_NODE: Final = re.compile(BACKWARD_NAME)


def phases(trace: Trace, activity: HostActivity, sources: Rows, own_module: Rows) -> npt.NDArray[np.int8]:
    """The phase of each slice, as an index into PHASES."""
    named = _phases_by_name(trace, activity)
    backward = inherit(np.where(named == BACKWARD, 1, -1), activity.around)
    definite = np.where((named < 0) & (own_module >= 0), FORWARD, named)
    nearest = inherit(np.where(definite == BACKWARD, -1, definite), activity.around)
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    if (sources >= 0).any():
        makes_nodes = np.full(len(parent), -1, np.int64)
        makes_nodes[_outermost(sources[sources >= 0], parent)] = FORWARD
        loose = inherit(own_values(activity, _OPERATORS, makes_nodes), activity.around)
    elif (backward >= 0).any():
        loose = np.full(len(nearest), -1, np.int64)
    else:
        works = np.isin(activity.table, (_OPERATORS, _LAUNCHES))
        loose = inherit(np.where(works, FORWARD, -1), activity.around)
    phase = np.where(nearest >= 0, nearest, np.where(loose >= 0, loose, OTHER))
    phase = np.where(backward >= 0, BACKWARD, phase)
    on_engine = np.isin(activity.lane, engine_lanes(trace, activity))
    return np.where(on_engine & (phase == OTHER), BACKWARD, phase).astype(np.int8)


def phases_of_scopes(scopes: pl.Series) -> Rows:
    """The phase of each scope of compiled code, -1 for none; all is forward where nothing is differentiated."""
    different = scopes.drop_nulls().unique(maintain_order=True)
    if different.is_empty():
        return np.full(len(scopes), -1, np.int64)
    directions = [parsed_scope(scope).direction for scope in different]
    code = {"backward": BACKWARD, "forward": FORWARD, None: -1 if any(directions) else FORWARD}
    found = scopes.replace_strict(different, [code[each] for each in directions], default=-1, return_dtype=pl.Int64)
    result: Rows = found.fill_null(-1).to_numpy()
    return result


def _phases_by_name(trace: Trace, activity: HostActivity) -> Rows:
    """The phase that each slice's own name gives away, -1 for none."""
    result = np.full(len(activity.row), -1, np.int64)
    result = np.maximum(result, own_values(activity, _OPERATORS, phases_of_scopes(trace.operators["scope"])))
    for code in (_ANNOTATIONS, _FRAMES, _OPERATORS):
        names = trace.table(TABLES[code])["name"]
        different = names.unique()
        phases = [_phase_of_name(name or "", code) for name in different]
        found = names.replace_strict(different, phases, default=-1, return_dtype=pl.Int64)
        result = np.maximum(result, own_values(activity, code, found.fill_null(-1).to_numpy()))
    return result


@lru_cache(maxsize=65536)
def _phase_of_name(name: str, table: int) -> int:
    if table == _OPERATORS:
        return BACKWARD if _NODE.search(name) else -1
    if table == _FRAMES and _BACKWARD_CALL.search(name):
        return BACKWARD
    cause = cause_of_name(name)
    if cause == "input" or (table == _FRAMES and _INPUT_FRAME.search(name)):
        return INPUT
    return OPTIMIZER if cause == "optimizer" else -1


def _outermost(rows: Rows, parent: Rows) -> Rows:
    """The outermost operators around these rows."""
    top = np.arange(len(parent))
    top = inherit(np.where(parent < 0, top, -1), parent)
    return np.unique(top[rows])


def engine_lanes(trace: Trace, activity: HostActivity) -> list[int]:
    """The threads that autograd's engine runs nodes on, beside the main ones."""
    outer = trace.operators.filter(pl.col("parent").is_null())
    nodes = outer.group_by("lane").agg(share=pl.col("name").str.contains(BACKWARD_NAME).mean())
    lanes = nodes.filter(pl.col("share") > 0.5)["lane"].to_list()
    main = set(activity.main_lanes.values())
    return [lane for lane in lanes if lane not in main]
