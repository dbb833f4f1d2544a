"""Which module of the network each host slice ran in: a path such as "GPT2.blocks.0.attention"."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from stepscope.analysis.host import TABLES, HostActivity
from stepscope.analysis.per_slice import Numbering, at, own_values
from stepscope.analysis.scopes import parsed_scope
from stepscope.line_records import DEEPEST_MODULE, LONGEST_MODULE
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit, innermost_at
from stepscope.trace.nesting import parents as parents_of

_FRAMES, _OPERATORS = TABLES.index("frames"), TABLES.index("operators")


def own_modules(trace: Trace, activity: HostActivity) -> tuple[tuple[str, ...], Rows, Rows, Rows]:
    """The module paths, that of each slice that is a call of a module or whose module was recorded, and their parents.

    The last array has, for each row of `device_work`, the path that its own scope gives.
    """
    paths = Numbering[str]()
    parents: dict[int, int] = {}
    own = np.full(len(activity.row), -1, np.int64)
    calls = trace.modules
    if calls.height:
        for path in calls["name"].unique(maintain_order=True):
            _number_of_path(path.split("."), paths, parents)
        own = _recorded_modules(calls, activity, pl.Series(paths.words, dtype=pl.String))
    elif trace.frames.height:
        _add_module_frames(trace, activity, own, paths, parents)
    own = np.where(
        own >= 0, own, own_values(activity, _OPERATORS, _of_scopes(trace.operators["scope"], paths, parents))
    )
    of_work = _of_scopes(trace.device_work["scope"], paths, parents)
    around = np.array([parents.get(number, -1) for number in range(len(paths.words))], np.int64)
    return paths.words, own, around, of_work


def _of_scopes(scopes: pl.Series, paths: Numbering[str], parents: dict[int, int]) -> Rows:
    """The innermost module of each scope of compiled code, -1 for none."""
    different = scopes.drop_nulls().unique(maintain_order=True)
    if different.is_empty():
        return np.full(len(scopes), -1, np.int64)
    numbers = [_number_of_path(parsed_scope(scope).modules, paths, parents) for scope in different]
    found = scopes.replace_strict(different, numbers, default=-1, return_dtype=pl.Int64)
    result: Rows = found.fill_null(-1).to_numpy()
    return result


def _recorded_modules(calls: pl.DataFrame, activity: HostActivity, paths: pl.Series) -> Rows:
    """The module that each slice's thread was in when the slice began, -1 for none."""
    lane, start, duration = (calls[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
    call = innermost_at(activity.lane, activity.start, lane, start, duration, parents_of(lane, start, duration))
    names = calls["name"].replace_strict(paths, range(len(paths)), return_dtype=pl.Int64)
    return at(names.to_numpy(), call)


def _number_of_path(parts: Iterable[str], paths: Numbering[str], parents: dict[int, int]) -> int:
    """The number of a path, made with those around it; -1 for an empty one."""
    around, path = -1, ""
    for position, part in enumerate(parts):
        path = f"{path}.{part}" if position else part
        number = paths[path]
        parents.setdefault(number, around)
        around = number
    return around


def _add_module_frames(
    trace: Trace, activity: HostActivity, own: Rows, paths: Numbering[str], parents: dict[int, int]
) -> None:
    """The paths of the calls of modules that Python frames tell of; outer calls come before those inside them.

    What is deeper or longer than any network's belongs to the module around it: frames come from a file, and a path of
    each of ten thousand calls inside each other would fill the memory.
    """
    words = list(paths.words)
    rows = trace.frames["module"]
    calls = np.flatnonzero(own_values(activity, _FRAMES, rows.is_not_null().cast(pl.Int64).to_numpy()) > 0)
    is_call = np.full(len(own), -1, np.int64)
    is_call[calls] = calls
    nearest = inherit(is_call, activity.around)
    outer = np.where(activity.around[calls] >= 0, nearest[np.maximum(activity.around[calls], 0)], -1)
    order = np.lexsort((calls, activity.start[calls] - activity.end[calls], activity.start[calls]))
    for call, around in zip(calls[order].tolist(), outer[order].tolist(), strict=True):
        parent = int(own[around]) if around >= 0 else -1
        name = rows[int(activity.row[call])]
        path = f"{words[parent]}.{name}" if parent >= 0 else name
        if len(path) > LONGEST_MODULE or path.count(".") > DEEPEST_MODULE:
            own[call] = parent
            continue
        own[call] = number = paths[path]
        if number == len(words):
            words.append(path)
        parents.setdefault(number, parent)
