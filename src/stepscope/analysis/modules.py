"""What each module of the network costs, forward and backward, as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from stepscope.analysis.place_costs import COST_COLUMNS, PlaceCosts, cost_sums, place_costs
from stepscope.trace import Trace, Window

MODULE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "module": pl.String,  # the path; null in the one row of what ran outside of modules
    "name": pl.String,  # the path behind that of the row above it in the tree
    "depth": pl.Int64,  # in the tree, from 0
    **COST_COLUMNS,  # with the modules inside
    "self_ns": pl.Int64,  # `total_ns` without the modules inside
    "share": pl.Float64,  # of the whole time, 0 to 1
}
_SUMMED: Final = tuple(name for name in COST_COLUMNS if name != "calls")


@dataclass(slots=True)
class _Node:
    """A module: its own costs, and once summed those of the modules inside as well."""

    path: str
    name: str
    costs: dict[str, Any]
    self_ns: int
    calls: int | None
    inside: list[_Node] = field(default_factory=list)


def module_table(
    trace: Trace, *, costs: PlaceCosts | None = None, window: Window | None = None, depth: int | None = None
) -> pl.DataFrame:
    """The modules as a tree, row by row from its top, the costliest of each level first.

    A module that costs nothing itself and holds only one other is drawn as one with it.

    Args:
        costs: as `place_costs` gives them, if they were computed already.
        window: another stretch than the complete steps.
        depth: levels to keep, all by default; what is deeper counts in the row around it.

    Returns:
        Columns as in MODULE_SCHEMA, sums over the steps; `calls` is how often the module was called, null for a module
        that only holds others. The rows' `self_ns` add up to all device time, or, where the trace has no device, to the
        operators' own time, unless `depth` leaves rows out.
    """
    costs = place_costs(trace, window=window) if costs is None else costs
    if not costs.attribution.modules:
        return pl.DataFrame(schema=dict(MODULE_SCHEMA))
    roots, outside = _tree(trace, costs)
    rows = [row for root in _in_order(roots) for row in _rows(root, "", 0, depth)]
    if outside is not None:
        rows.append({"module": None, "name": None, "depth": 0, **outside, "self_ns": outside["total_ns"]})
    total = max(costs.total_ns, 1)
    return pl.DataFrame([{**row, "share": row["total_ns"] / total} for row in rows], schema=dict(MODULE_SCHEMA))


def _tree(trace: Trace, costs: PlaceCosts) -> tuple[list[_Node], dict[str, Any] | None]:
    """The outermost modules, and the costs of what ran in none."""
    attribution = costs.attribution
    own = {row.pop("module"): row for row in cost_sums(costs, "module").iter_rows(named=True)}
    known = next(iter(own.values()), dict.fromkeys(COST_COLUMNS, 0))  # nothing that modules could cost
    nothing: dict[str, Any] = {name: None if known[name] is None else 0 for name in COST_COLUMNS}
    calls = _calls(trace, costs)
    nodes = []
    for number, path in enumerate(attribution.modules):
        mine = dict(own.get(number, nothing))
        nodes.append(_Node(path, path, mine, mine["total_ns"], calls.get(number)))
    roots = []
    for number in reversed(range(len(nodes))):  # a module comes after those around it
        node, around = nodes[number], int(attribution.module_parents[number])
        if not any(node.costs[name] for name in _SUMMED) and not node.calls:
            continue
        if around < 0:
            roots.append(node)
            continue
        nodes[around].inside.append(node)
        for name in _SUMMED:
            if node.costs[name] is not None:
                nodes[around].costs[name] += node.costs[name]
    return roots, own.get(-1)


def _calls(trace: Trace, costs: PlaceCosts) -> dict[int, int]:
    """How often each module was called in the stretch."""
    attribution, window = costs.attribution, costs.window
    begins = pl.col("start_ns").is_between(window.start_ns, window.end_ns, closed="left")
    if trace.modules.height:
        numbers = {path: number for number, path in enumerate(attribution.modules)}
        counts = trace.modules.filter(begins).group_by("name").len()
        return {numbers[name]: count for name, count in counts.iter_rows()}
    slices = attribution.activity.slices_of("frames")
    frames = trace.frames.select("start_ns", is_call=pl.col("module").is_not_null())
    called = frames.with_columns(slice=pl.Series(slices)).filter(begins & pl.col("is_call") & (pl.col("slice") >= 0))
    modules = pl.Series("module", attribution.module[called["slice"].to_numpy()])
    return dict(modules.value_counts().iter_rows())


def _rows(node: _Node, around: str, depth: int, deepest: int | None) -> Iterator[dict[str, Any]]:
    while len(node.inside) == 1 and node.self_ns == 0 and node.costs["total_ns"] == node.inside[0].costs["total_ns"]:
        if node.costs != {**node.inside[0].costs, "calls": node.costs["calls"]}:
            break  # it costs something else, such as idle time
        node = node.inside[0]
    name = node.path[len(around) :].removeprefix(".")
    yield {
        "module": node.path,
        "name": name,
        "depth": depth,
        **node.costs,
        "calls": node.calls,
        "self_ns": node.self_ns,
    }
    if deepest is None or depth + 1 < deepest:
        for inner in _in_order(node.inside):
            yield from _rows(inner, node.path, depth + 1, deepest)


def _in_order(nodes: list[_Node]) -> list[_Node]:
    return sorted(nodes, key=lambda node: (-node.costs["total_ns"], -(node.costs["idle_ns"] or 0), node.path))
