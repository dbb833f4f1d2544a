"""Which lines of the user's code host slices stand under."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import TABLES, HostActivity
from stepscope.analysis.naming import is_user_file
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit

_ENTRY: Final = re.compile(r"(.+)\((\d{1,9})\): (.+)", re.DOTALL)
_LONGEST_PATH: Final = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's code and what it cost.

    Attributes:
        exact_line: whether `line` is the statement's; otherwise it is the function's definition.
        ns: cost that stands under it.
        call_path: the user's frames that lead there, outermost first, as "file:line function".
    """

    file: str
    line: int
    function: str
    exact_line: bool
    ns: int
    call_path: tuple[str, ...]


def slice_index(activity: HostActivity, table: pl.Series, row: pl.Series) -> Rows:
    """Index into `activity` of slices given by table name and row; -1 where either is null. Shape (n,)."""
    result = np.full(len(table), -1, np.int64)
    for name in TABLES:
        mine = (table == name).fill_null(False).to_numpy()
        if mine.any():
            result[mine] = activity.slices_of(name)[row.to_numpy()[mine].astype(np.int64)]
    return result


def places(trace: Trace, activity: HostActivity, slices: Rows, ns: Rows, top: int = 3) -> list[Place]:
    """The user's lines, or else functions, under which the slices stand, the costliest first.

    Lines that the recording kept with the operators come first; what has none is placed by Python frames, and without
    frames by call stacks.

    Args:
        slices: indices into `activity`, -1 for none; shape (n,).
        ns: cost of each; shape (n,).
    """
    known = slices >= 0
    if not known.any():
        return []
    frames = np.where(known, activity.user_frame[np.maximum(slices, 0)], -1)
    source = _source_rows(trace, activity, slices)
    found = _by_source(trace, source, frames, ns)
    frames = np.where(source >= 0, -1, frames)
    found += _by_frame(trace, frames, ns)
    if not found:
        found = _by_call_stack(trace, activity, slices[known], ns[known])
    return sorted(found, key=lambda place: -place.ns)[:top]


def _source_rows(trace: Trace, activity: HostActivity, slices: Rows) -> Rows:
    """For each slice, the row of the innermost operator around it or itself that has a source line, -1 for none."""
    has_line = trace.operators["source_line"].is_not_null().to_numpy()
    own = np.full(len(activity.row), -1, np.int64)
    mine = np.flatnonzero(activity.table == TABLES.index("operators"))
    mine = mine[has_line[activity.row[mine]]]
    if not mine.size:
        return np.full(len(slices), -1, np.int64)
    own[mine] = activity.row[mine]
    return np.where(slices >= 0, inherit(own, activity.around)[np.maximum(slices, 0)], -1)


def _by_source(trace: Trace, operators: Rows, frames: Rows, ns: Rows) -> list[Place]:
    """The places of operators with source lines; the path to each, where frames were recorded, is its costliest's."""
    known = operators >= 0
    if not known.any():
        return []
    columns = ["source_file", "source_line", "source_function"]
    lines = trace.operators.select(columns)[operators[known]]
    costs = (
        lines.with_columns(ns=pl.Series(ns[known]), frame=pl.Series(frames[known]))
        .sort("ns", descending=True, maintain_order=True)
        .group_by(columns, maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("frame").first())
        .sort("ns", descending=True, maintain_order=True)
        .head(20)
    )
    parent = trace.frames["parent"].to_list() if trace.frames.height else []
    result = []
    for file, line, function, cost, frame in costs.iter_rows():
        # A backward operator runs under other frames than those of its line.
        around = parse(trace.frames["name"][frame]) if frame >= 0 else None
        path = _path(trace, frame, parent) if around is not None and around[2] == function else ()
        result.append(Place(file, line, function, exact_line=True, ns=cost, call_path=path))
    return result


def _path(trace: Trace, frame: int, parent: list[int | None]) -> tuple[str, ...]:
    """The user's frames around a frame, outermost first; none without a frame."""
    path: list[str] = []
    above = parent[frame] if frame >= 0 else None
    while above is not None and len(path) < _LONGEST_PATH:
        outer = parse(trace.frames["name"][above])
        if outer is not None and is_user_file(outer[0]):
            path.append(f"{outer[0]}:{outer[1]} {outer[2]}")
        above = parent[above]
    return tuple(reversed(path))


def _by_frame(trace: Trace, frames: Rows, ns: Rows) -> list[Place]:
    costs = pl.DataFrame({"row": frames, "ns": ns}).filter(pl.col("row") >= 0).group_by("row").agg(pl.col("ns").sum())
    if costs.is_empty():
        return []
    named = costs.with_columns(name=trace.frames["name"].gather(costs["row"]))
    merged = (
        named.sort("ns", descending=True)
        .group_by("name", maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("row").first())
    )
    parent = trace.frames["parent"].to_list() if merged.height else []
    result = []
    for name, cost, row in merged.sort("ns", descending=True).head(20).iter_rows():
        entry = parse(name)
        if entry is None:
            continue
        result.append(Place(*entry, exact_line=False, ns=cost, call_path=_path(trace, row, parent)))
    return result


def _by_call_stack(trace: Trace, activity: HostActivity, slices: Rows, ns: Rows) -> list[Place]:
    stacks = {
        name: trace.table(name)["call_stack"] for name in ("operators", "annotations") if trace.table(name).height
    }
    if all(stack.null_count() == len(stack) for stack in stacks.values()):
        return []
    own = np.full(len(activity.row), -1, np.int64)
    for name, stack in stacks.items():
        mine = np.flatnonzero(activity.table == TABLES.index(name))
        has_stack = stack.is_not_null().to_numpy()[activity.row[mine]]
        own[mine[has_stack]] = mine[has_stack]
    source = inherit(own, activity.around)[slices]
    costs: dict[tuple[str, ...], int] = {}
    for index, cost in zip(source.tolist(), ns.tolist(), strict=True):
        if index >= 0:
            entries = user_entries(stacks[TABLES[activity.table[index]]][int(activity.row[index])])
            if entries:
                costs[entries] = costs.get(entries, 0) + cost
    result = []
    for entries, cost in costs.items():
        entry = parse(entries[0])
        if entry is not None:
            outer = [f"{file}:{line} {function}" for file, line, function in map(_parsed, reversed(entries[1:]))]
            result.append(Place(*entry, exact_line=True, ns=cost, call_path=tuple(outer)))
    return result


@lru_cache(maxsize=16384)
def user_entries(call_stack: str) -> tuple[str, ...]:
    """The user's entries of a call stack, innermost first."""
    found = [(entry, parse(entry)) for entry in call_stack.split(";")]
    return tuple(entry for entry, parsed in found if parsed is not None and is_user_file(parsed[0]))


@lru_cache(maxsize=65536)
def parse(name: str) -> tuple[str, int, str] | None:
    """File, line and function of "file(line): function"; None for anything else."""
    match = _ENTRY.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def _parsed(name: str) -> tuple[str, int, str]:
    return parse(name) or (name, 0, "")
