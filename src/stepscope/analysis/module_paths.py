"""Module and phase of each host slice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import TABLES, HostActivity, without_closures
from stepscope.trace import Trace
from stepscope.trace.line_records import DEEPEST_MODULE, LONGEST_MODULE
from stepscope.trace.naming import cause_of_name
from stepscope.trace.nesting import Numbering, Rows, at, by_value, inherit, innermost_at, row_numbers
from stepscope.trace.nesting import parents as parents_of

_TRANSFORMED: Final = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_COMPILING: Final = frozenset({"jit", "pjit", "xla_call", "pmap", "shard_map", "custom_jvp_call", "custom_vjp_call"})
"""Transformations whose brackets hold a function's name, which is not a module."""
_NO_MODULES: Final = frozenset({
    "while", "body", "cond", "branch", "scan", "closed_call", "core_call", "remat", "checkpoint", "main",
    "rematted_computation", "body_fun", "cond_fun", "custom_jvp_call", "custom_vjp_call", "pjit", "XlaModule:",
})  # fmt: skip
_NUMBER: Final = re.compile(r"\.\d+$")
_TORCH_OPERATOR: Final = re.compile(r"(?:aten|xla|prim)__")
_BRANCH: Final = re.compile(r"branch_\d+_fun$")


class Scope(NamedTuple):
    """A parsed scope.

    Attributes:
        modules: names of the modules around the operation, outermost first.
        direction: "backward" if transposed, "forward" if differentiated, None if neither.
    """

    modules: tuple[str, ...]
    direction: Literal["forward", "backward"] | None


@lru_cache(maxsize=65536)
def parsed_scope(scope: str) -> Scope:
    """Parse the modules and the direction in a scope's name."""
    parts = _parts(scope[:LONGEST_MODULE])
    modules: list[str] = []
    backward = forward = False
    for part in parts[:-1]:
        name = part
        while match := _TRANSFORMED.fullmatch(name):
            backward |= match[1] == "transpose"
            forward |= match[1] == "jvp"
            name = "" if match[1] in _COMPILING else match[2]
        name = _NUMBER.sub("", name)
        if name and name not in _NO_MODULES and not _TORCH_OPERATOR.match(name) and not _BRANCH.match(name):
            modules.append(name)
    return Scope(tuple(modules[:DEEPEST_MODULE]), "backward" if backward else "forward" if forward else None)


def _parts(scope: str) -> list[str]:
    """Split a scope at slashes outside of brackets."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(scope):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "/" and depth <= 0:
            parts.append(scope[begin:position])
            begin = position + 1
    return [*parts, scope[begin:]]


def own_modules(trace: Trace, activity: HostActivity) -> tuple[tuple[str, ...], Rows, Rows, Rows]:
    """Module paths, each slice's path if it is a module call or has a recorded module, and the paths' parents.

    The last array has the path from each `device_work` row's own scope.
    """
    paths = Numbering[str]()
    parents: dict[int, int] = {}
    own = np.full(len(activity.row), -1, np.int64)
    calls = trace.modules
    if calls.height:
        for path in calls["name"].unique(maintain_order=True):
            _number_of_path(path.split("."), paths, parents)
        own = _recorded_modules(calls, activity, paths.words)
    elif trace.frames.height:
        _add_module_frames(trace, activity, own, paths, parents)
    of_operators = activity.spread("operators", _of_scopes(trace.operators["scope"], paths, parents))
    own = np.where(own >= 0, own, of_operators)
    named = _of_annotations(trace.device_work["module"], paths, parents)
    of_work = np.where(named >= 0, named, _of_scopes(trace.device_work["scope"], paths, parents))
    around = np.array([parents.get(number, -1) for number in range(len(paths.words))], np.int64)
    return paths.words, own, around, of_work


def _of_annotations(names: pl.Series, paths: Numbering[str], parents: dict[int, int]) -> Rows:
    """Module that an annotation of a graph's node names, -1 for none."""

    def number(path: str) -> int:
        return _number_of_path(path[:LONGEST_MODULE].split(".")[:DEEPEST_MODULE], paths, parents)

    return by_value(names, number)


def _of_scopes(scopes: pl.Series, paths: Numbering[str], parents: dict[int, int]) -> Rows:
    """Innermost module of each scope of compiled code, -1 for none."""
    return by_value(scopes, lambda scope: _number_of_path(parsed_scope(scope).modules, paths, parents))


def _recorded_modules(calls: pl.DataFrame, activity: HostActivity, paths: tuple[str, ...]) -> Rows:
    """Module that each slice's thread was in when the slice began, -1 for none."""
    lane, start, duration = (calls[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
    call = innermost_at(activity.lane, activity.start, lane, start, duration, parents_of(lane, start, duration))
    numbers = {path: number for number, path in enumerate(paths)}
    return at(by_value(calls["name"], numbers.__getitem__), call)


def _number_of_path(parts: Iterable[str], paths: Numbering[str], parents: dict[int, int]) -> int:
    """Index of a path, adding it and its parents; -1 for an empty one."""
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
    """Number the paths of module calls among the Python frames, outer calls before inner ones.

    Paths deeper or longer than any real network's count for the enclosing module: frames come from a file, and ten
    thousand nested calls would fill the memory.
    """
    words = list(paths.words)
    rows = trace.frames["module"]
    calls = np.flatnonzero(activity.spread("frames", rows.is_not_null().cast(pl.Int64).to_numpy()) > 0)
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


BACKWARD_NAME: Final = r"^autograd::engine|Backward\d*$"
"""Names of the autograd engine's operators."""


def backward_source(trace: Trace) -> Rows:
    """For each backward operator the row of the forward operator that made its autograd node, -1 for none.

    Both have the same sequence number, and the node has the forward operator's thread number; a repeated number refers
    to the nearest preceding forward operator. Each thread of each process has its own sequence: with several threads
    the recorded link decides. Operators inside a node inherit its source. Shape (operators,).
    """
    parent = row_numbers(trace.operators["parent"])
    return inherit(node_source(trace), parent)


def node_source(trace: Trace) -> Rows:
    """Forward operator of each node as in `backward_source`, but -1 for operators inside a node; shape (operators,)."""
    columns = ("row", "lane", "start_ns", "name", "sequence_number", "forward_thread")
    processes = trace.lanes.select("lane", pl.col("process").fill_null(""))
    operators = (
        trace.operators.with_row_index("row")
        .select(columns)
        .join(processes, on="lane", how="left", maintain_order="left")
    )
    result = np.full(operators.height, -1, np.int64)
    numbered = operators.filter(pl.col("sequence_number").is_not_null() & (pl.col("sequence_number") >= 0))
    is_node = pl.col("name").str.contains(BACKWARD_NAME)
    nodes = numbered.filter(is_node).select("row", "start_ns", "sequence_number", "process")
    forward = numbered.filter(~is_node & (pl.col("forward_thread").fill_null(0) == 0))
    if nodes.height and forward.height:
        # Among nested operators with the same number, the innermost (the last one) made the node.
        joined = nodes.sort("start_ns").join_asof(
            forward.select("start_ns", "sequence_number", "process", source="row").sort("start_ns"),
            on="start_ns",
            by=["process", "sequence_number"],
            check_sortedness=False,
        )
        found = joined.drop_nulls("source")
        result[found["row"].to_numpy()] = found["source"].to_numpy()
    links = _links(trace, several=forward["lane"].n_unique() > 1, unknown=result < 0)
    result[links["target"].to_numpy()] = links["source"].to_numpy()
    return result


def _links(trace: Trace, *, several: bool, unknown: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pl.DataFrame:
    """Links from a forward operator to its node that add to the sequence numbers."""
    starts = trace.operators["start_ns"]
    links = trace.links.filter(pl.col("kind") == "forward_backward").select("source", "target")
    forwards = (starts.gather(links["source"]) < starts.gather(links["target"])).fill_null(False)
    asked = pl.Series(unknown).gather(links["target"]) if not several else pl.repeat(True, links.height, eager=True)
    return links.filter(forwards & asked)


PHASES: Final = ("forward", "backward", "optimizer", "input", "other")

FORWARD, BACKWARD, OPTIMIZER, INPUT, OTHER = range(len(PHASES))
_BACKWARD_CALL: Final = re.compile(
    r"built-in method run_backward |: _engine_run_backward$|torch/autograd/__init__\.py\(\d+\): (?:backward|grad)$"
)
_INPUT_FRAME: Final = re.compile(r"(?:^|/)torch/utils/data/")
_NODE: Final = re.compile(BACKWARD_NAME)


def phases(trace: Trace, activity: HostActivity, sources: Rows, own_module: Rows) -> npt.NDArray[np.int8]:
    """Phase of each slice, as an index into PHASES."""
    named = _phases_by_name(trace, activity)
    backward = inherit(np.where(named == BACKWARD, 1, -1), activity.around)
    definite = np.where((named < 0) & (own_module >= 0), FORWARD, named)
    nearest = inherit(np.where(definite == BACKWARD, -1, definite), activity.around)
    parent = row_numbers(trace.operators["parent"])
    if (sources >= 0).any():
        makes_nodes = np.full(len(parent), -1, np.int64)
        top = inherit(np.where(parent < 0, np.arange(len(parent)), -1), parent)
        makes_nodes[top[sources[sources >= 0]]] = FORWARD
        loose = inherit(activity.spread("operators", makes_nodes), activity.around)
    elif (backward >= 0).any():
        loose = np.full(len(nearest), -1, np.int64)
    else:
        works = np.isin(activity.table, (TABLES.index("operators"), TABLES.index("launches")))
        loose = inherit(np.where(works, FORWARD, -1), activity.around)
    phase = np.where(nearest >= 0, nearest, np.where(loose >= 0, loose, OTHER))
    phase = np.where(backward >= 0, BACKWARD, phase)
    on_engine = np.isin(activity.lane, engine_lanes(trace, activity))
    return np.where(on_engine & (phase == OTHER), BACKWARD, phase).astype(np.int8)


def phases_of_scopes(scopes: pl.Series) -> Rows:
    """Phase of each scope of compiled code, -1 for none; all is forward if nothing is differentiated."""
    differentiated = any(parsed_scope(scope).direction for scope in scopes.drop_nulls().unique())
    code = {"backward": BACKWARD, "forward": FORWARD, None: -1 if differentiated else FORWARD}
    return by_value(scopes, lambda scope: code[parsed_scope(scope).direction])


def _phases_by_name(trace: Trace, activity: HostActivity) -> Rows:
    """Phase implied by each slice's own name, -1 for none."""
    result = activity.spread("operators", phases_of_scopes(trace.operators["scope"]))
    for table in ("annotations", "frames", "operators"):
        phases = by_value(trace.table(table)["name"], partial(_phase_of_name, table=table))
        result = np.maximum(result, activity.spread(table, phases))
    without_closures(trace, (activity.lane, activity.start, activity.end, activity.around), result, OPTIMIZER)
    return result


@lru_cache(maxsize=65536)
def _phase_of_name(name: str, table: str) -> int:
    if table == "operators":
        return BACKWARD if _NODE.search(name) else -1
    if table == "frames" and _BACKWARD_CALL.search(name):
        return BACKWARD
    cause = cause_of_name(name)
    if cause == "input" or (table == "frames" and _INPUT_FRAME.search(name)):
        return INPUT
    return OPTIMIZER if cause == "optimizer" else -1


def engine_lanes(trace: Trace, activity: HostActivity) -> list[int]:
    """Threads other than main threads on which autograd's engine runs nodes."""
    outer = trace.operators.filter(pl.col("parent").is_null())
    nodes = outer.group_by("lane").agg(share=pl.col("name").str.contains(BACKWARD_NAME).mean())
    lanes = nodes.filter(pl.col("share") > 0.5)["lane"].to_list()
    main = set(activity.main_lanes.values())
    return [lane for lane in lanes if lane not in main]
