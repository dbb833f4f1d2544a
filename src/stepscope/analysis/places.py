"""Cost of the user's lines and modules, forward and backward, and the library functions where their host time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.attribution import Attribution, SourcePlace, attribute, parse, user_entries
from stepscope.analysis.host import TABLES, HostActivity
from stepscope.analysis.idle import idle_time
from stepscope.analysis.module_paths import OTHER, PHASES
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.steps import span_of, step_table
from stepscope.trace import Trace, Window
from stepscope.trace.naming import module_pattern
from stepscope.trace.nesting import Rows, at, row_numbers

PHASE_COLUMNS: Final = tuple(f"{phase}_ns" for phase in PHASES)
COST_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    **dict.fromkeys(PHASE_COLUMNS, pl.Int64),  # device time, or operators' self time if the trace has no device
    "total_ns": pl.Int64,  # sum of the phases
    "host_ns": pl.Int64,  # operators' self time on the host
    "idle_ns": pl.Int64,  # device idle time that it caused; null without a device
    "calls": pl.Int64,
    "bytes_allocated": pl.Int64,  # null where allocations were not recorded
}
_RECORDS: Final = dict.fromkeys(
    ("place", "module", "phase", "ns", "host_ns", "idle_ns", "calls", "bytes_allocated"), pl.Int64
)
_EVER: Final = Window(-(2**62), 2**62)


@dataclass(frozen=True)
class PlaceCosts:
    """Costs in a window of a trace, by place, module and phase.

    Attributes:
        basis: "device" for the time of device work, "host" for operators' self time.
        steps: complete steps in the window; 0 where it is the whole recording.
        window: work launched or begun in it counts.
        records: columns place and module (indices into the attribution's, -1 for none), phase (index into PHASES), ns,
            host_ns, idle_ns, calls, bytes_allocated; one row for each combination.
    """

    attribution: Attribution
    basis: Literal["device", "host"]
    steps: int
    window: Window
    records: pl.DataFrame

    @property
    def total_ns(self) -> int:
        return int(self.records["ns"].sum())

    @property
    def attributed_ns(self) -> int:
        """The part of `total_ns` that has a place in the user's code."""
        return int(self.records.filter(pl.col("place") >= 0)["ns"].sum())

    @property
    def idle_ns(self) -> int | None:
        """Total idle time of devices; None without a device."""
        return int(self.records["idle_ns"].sum()) if self.basis == "device" else None


def place_costs(
    trace: Trace,
    *,
    attribution: Attribution | None = None,
    window: Window | None = None,
    idle: pl.DataFrame | None = None,
) -> PlaceCosts:
    """Costs of the complete steps, or of the whole recording without steps.

    Args:
        window: window to use instead of the steps'.
    """
    attribution = attribute(trace) if attribution is None else attribution
    steps = 0
    if window is None:
        complete = step_table(trace).filter(pl.col("complete"))
        steps, window = complete.height, span_of(complete) or _EVER
    basis: Literal["device", "host"] = "device" if trace.device_work.height else "host"
    parts = [pl.DataFrame(schema=dict(_RECORDS)), _operators(trace, attribution, window, count_time=basis == "host")]
    if basis == "device":
        pieces = idle_time(trace, activity=attribution.activity) if idle is None else idle
        parts += [_work(trace, attribution, window), _idle(attribution, window, pieces)]
    keys = ["place", "module", "phase"]
    records = pl.concat(parts, how="diagonal").group_by(keys).agg(pl.exclude(keys).sum()).sort(keys)
    return PlaceCosts(attribution, basis, steps, window, records)


def cost_sums(costs: PlaceCosts, by: str) -> pl.DataFrame:
    """Sum costs: columns `by` ("place" or "module") and COST_COLUMNS, one row per value."""
    phases = [
        pl.col("ns").filter(pl.col("phase") == number).sum().alias(name) for number, name in enumerate(PHASE_COLUMNS)
    ]
    sums = costs.records.group_by(by).agg(
        *phases, pl.col("ns").sum().alias("total_ns"), pl.col("host_ns", "idle_ns", "calls", "bytes_allocated").sum()
    )
    unknown = [] if costs.basis == "device" else [pl.lit(None).alias("idle_ns")]
    if costs.attribution.trace.memory.is_empty():
        unknown.append(pl.lit(None).alias("bytes_allocated"))
    columns = [pl.col(name).cast(dtype) for name, dtype in COST_COLUMNS.items()]
    return sums.with_columns(unknown).select(by, *columns)


def _records(place: Rows, module: Rows, **columns: Rows) -> pl.DataFrame:
    return pl.DataFrame(
        {"place": place, "module": module, **{name: values.astype(np.int64) for name, values in columns.items()}}
    )


def _work(trace: Trace, attribution: Attribution, window: Window) -> pl.DataFrame:
    work = trace.device_work
    launched = trace.launches["start_ns"].gather(work["launch"])
    start = pl.select(pl.coalesce(launched, work["start_ns"])).to_series().to_numpy()
    columns = {"phase": attribution.work_phase, "ns": work["duration_ns"].to_numpy()}
    rows = _records(attribution.work_place, attribution.work_module, **columns)
    return rows.filter(pl.Series((start >= window.start_ns) & (start < window.end_ns)))


def _operators(trace: Trace, attribution: Attribution, window: Window, *, count_time: bool) -> pl.DataFrame:
    costs = operator_costs(trace)
    slices = attribution.operator_slices
    own = costs["host_self_ns"].to_numpy()
    phase = np.where(slices >= 0, at(attribution.phase, slices), OTHER)
    rows = _records(
        at(attribution.place, slices),
        at(attribution.module, slices),
        phase=phase,
        ns=own if count_time else np.zeros(len(own), np.int64),
        host_ns=own,
        calls=_is_call(trace, attribution),
        bytes_allocated=costs["bytes_allocated"].to_numpy(),
    )
    start = trace.operators["start_ns"].to_numpy()
    return rows.filter(pl.Series((start >= window.start_ns) & (start < window.end_ns)))


def _is_call(trace: Trace, attribution: Attribution) -> Rows:
    """1 for operators called by the line itself: neither nested in another one of the line, nor its backward."""
    slices = attribution.operator_slices
    place = at(attribution.place, slices)
    parent = row_numbers(trace.operators["parent"])
    caused = (slices >= 0) & (at(attribution.caused.astype(np.int64), slices) > 0)
    outermost = (parent < 0) | (at(place, parent) != place)
    result: Rows = (outermost & ~caused).astype(np.int64)
    return result


def _idle(attribution: Attribution, window: Window, pieces: pl.DataFrame) -> pl.DataFrame:
    start = pl.col("start_ns").clip(lower_bound=window.start_ns)
    end = (pl.col("start_ns") + pl.col("duration_ns")).clip(upper_bound=window.end_ns)
    pieces = pieces.with_columns(ns=end - start).filter(pl.col("ns") > 0)
    slices = attribution.activity.slice_index(pieces["slice_table"], pieces["slice_row"])
    return _records(
        idle_places(attribution, pieces),
        at(attribution.module, slices),
        phase=np.full(len(slices), OTHER),
        idle_ns=pieces["ns"].to_numpy(),
    )


def idle_places(attribution: Attribution, pieces: pl.DataFrame) -> Rows:
    """Place of pieces of idle time or of a host's: of the host's slice, else its line, else the launch after the gap.

    Args:
        pieces: columns slice_table and slice_row, and launch where it is known.
    """
    activity = attribution.activity
    place = at(attribution.place, activity.slice_index(pieces["slice_table"], pieces["slice_row"]))
    place = np.where(place >= 0, place, _lines(attribution, pieces))
    if "launch" not in pieces.columns:
        return place
    launching = at(activity.slices_of("launches"), row_numbers(pieces["launch"]))
    return np.where(place >= 0, place, at(attribution.place, launching))


def _lines(attribution: Attribution, pieces: pl.DataFrame) -> Rows:
    """Place of pieces whose host activity is known only from recorded lines, -1 for others."""
    rows = pl.select(pl.when(pieces["slice_table"] == "lines").then(pieces["slice_row"])).to_series()
    return at(attribution.line_place, row_numbers(rows))


LINE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "file": pl.String,  # null in the single row for costs outside of the user's code
    "line": pl.Int32,
    "function": pl.String,
    "exact_line": pl.Boolean,  # whether `line` is the statement's, not the function definition's
    **COST_COLUMNS,
    "share": pl.Float64,  # share of all time, 0 to 1
}


def line_table(trace: Trace, *, costs: PlaceCosts | None = None) -> pl.DataFrame:
    """Cost of the user's lines, costliest first.

    Returns:
        Columns as in LINE_SCHEMA, sums over the steps. The times of all rows add up to all device time, or, where the
        trace has no device, to the operators' self time. `calls` counts the operators that the line called itself.
    """
    costs = place_costs(trace) if costs is None else costs
    sums = cost_sums(costs, "place")
    places = pl.DataFrame(
        [(number, *place) for number, place in enumerate(costs.attribution.places)],
        schema={"place": pl.Int64, **{name: LINE_SCHEMA[name] for name in SourcePlace._fields}},
        orient="row",
    )
    total = max(costs.total_ns, 1)
    table = sums.join(places, on="place", how="left").with_columns(share=pl.col("total_ns") / total)
    if not (table["place"] >= 0).any() and not costs.total_ns:
        return pl.DataFrame(schema=dict(LINE_SCHEMA))
    columns = [pl.col(name).cast(dtype) for name, dtype in LINE_SCHEMA.items()]
    order = ["total_ns", "idle_ns", "host_ns", "file", "line", "function"]
    return table.select(columns).sort(order, descending=[True, True, True, False, False, False], nulls_last=True)


MODULE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "module": pl.String,  # path; null in the single row for costs outside of modules
    "name": pl.String,  # path relative to the parent row's
    "depth": pl.Int64,  # depth in the tree, from 0
    **COST_COLUMNS,  # including nested modules
    "self_ns": pl.Int64,  # `total_ns` without nested modules
    "share": pl.Float64,  # share of all time, 0 to 1
}
_SUMMED: Final = tuple(name for name in COST_COLUMNS if name != "calls")


@dataclass(slots=True)
class _Node:
    """A module with its own costs and, once summed, those of nested modules."""

    path: str
    costs: dict[str, Any]
    self_ns: int
    calls: int | None
    inside: list[_Node] = field(default_factory=list)


def module_table(trace: Trace, *, costs: PlaceCosts | None = None, depth: int | None = None) -> pl.DataFrame:
    """List the modules as a tree, top down, the costliest of each level first.

    A module without own cost and with a single child is merged with that child.

    Args:
        depth: levels to keep, by default all; deeper modules count in their parent's row.

    Returns:
        Columns as in MODULE_SCHEMA, sums over the steps; `calls` is how often the module was called, null for a module
        that only holds others. The rows' `self_ns` add up to all device time, or, where the trace has no device, to the
            operators' self time, unless `depth` leaves rows out.
    """
    costs = place_costs(trace) if costs is None else costs
    if not costs.attribution.modules:
        return pl.DataFrame(schema=dict(MODULE_SCHEMA))
    roots, outside = _tree(trace, costs)
    rows = [row for root in _in_order(roots) for row in _rows(root, "", 0, depth)]
    if outside is not None:
        rows.append({"module": None, "name": None, "depth": 0, **outside, "self_ns": outside["total_ns"]})
    total = max(costs.total_ns, 1)
    return pl.DataFrame([{**row, "share": row["total_ns"] / total} for row in rows], schema=dict(MODULE_SCHEMA))


def _tree(trace: Trace, costs: PlaceCosts) -> tuple[list[_Node], dict[str, Any] | None]:
    """The outermost modules, and the costs outside of all modules."""
    attribution = costs.attribution
    own = {row.pop("module"): row for row in cost_sums(costs, "module").iter_rows(named=True)}
    known = next(iter(own.values()), dict.fromkeys(COST_COLUMNS, 0))  # nothing with a cost
    nothing: dict[str, Any] = {name: None if known[name] is None else 0 for name in COST_COLUMNS}
    calls = _calls(trace, costs)
    nodes = []
    for number, path in enumerate(attribution.modules):
        mine = dict(own.get(number, nothing))
        nodes.append(_Node(path, mine, mine["total_ns"], calls.get(number)))
    roots = []
    for number in reversed(range(len(nodes))):  # children come after their parents
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
    """Number of calls of each module in the window."""
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
            break  # has another cost, such as idle time
        node = node.inside[0]
    name = node.path[len(around) :].removeprefix(".")
    more = {"module": node.path, "name": name, "depth": depth, "calls": node.calls, "self_ns": node.self_ns}
    yield {**node.costs, **more}
    if deepest is None or depth + 1 < deepest:
        for inner in _in_order(node.inside):
            yield from _rows(inner, node.path, depth + 1, deepest)


def _in_order(nodes: list[_Node]) -> list[_Node]:
    return sorted(nodes, key=lambda node: (-node.costs["total_ns"], -(node.costs["idle_ns"] or 0), node.path))


_LONGEST_PATH: Final = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's code and its cost; or in a library, if none of the frames is the user's."""

    file: str
    line: int
    function: str
    exact_line: bool  # whether `line` is the statement's, not the function definition's
    ns: int  # cost of this place
    call_path: tuple[str, ...]  # the user's frames that lead there, outermost first, as "file:line function"
    inside: tuple[str, ...] = ()  # the libraries' functions below it that each contain at least half of its cost
    module: str = ""  # a library's module that contains at least half of its cost; a star stands for several layers


def places(attribution: Attribution, slices: Rows, ns: Rows, top: int = 3) -> list[Place]:
    """The user's lines, or else functions, that these slices belong to, costliest first.

    Backward work counts for the line of its forward; the path to each place is that of its costliest slice. Where no
    slice belongs to the user's code, the places are the innermost functions of libraries.

    Args:
        slices: indices into the attribution's activity, -1 for none; shape (n,).
        ns: cost of each; shape (n,).
    """
    slices, ns = slices[slices >= 0], ns[slices >= 0]
    placed = at(attribution.place, slices)
    found = []
    for place, cost, slice_ in _costliest(placed, slices, ns, top):
        mine, its_ns = slices[placed == place], ns[placed == place]
        module, function = library_module(attribution, mine, its_ns)
        inside = library_functions(attribution, mine, its_ns) or ((function,) if function else ())
        found.append(Place(*attribution.places[place], cost, call_path(attribution, slice_), inside, module))
    return found or _library_places(attribution, slices, ns, top)


def _costliest(placed: Rows, slices: Rows, ns: Rows, top: int) -> list[tuple[int, int, int]]:
    """The places with the highest cost, each with its cost and its costliest slice; -1 is no place."""
    costs = (
        pl.DataFrame({"place": placed, "slice": slices, "ns": ns})
        .filter(pl.col("place") >= 0)
        .sort("ns", descending=True, maintain_order=True)
        .group_by("place", maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("slice").first())
        .sort("ns", descending=True, maintain_order=True)
        .head(top)
    )
    return costs.select("place", "ns", "slice").rows()


def _library_places(attribution: Attribution, slices: Rows, ns: Rows, top: int) -> list[Place]:
    """The innermost functions of libraries that these slices belong to, costliest first."""
    names = attribution.trace.frames["name"]
    frames = _costliest(at(attribution.library_frame, slices), slices, ns, top)
    parsed = [(parse(names[frame]), cost) for frame, cost, _ in frames]
    return [Place(*entry, False, cost, ()) for entry, cost in parsed if entry is not None]


def call_path(attribution: Attribution, row: int) -> tuple[str, ...]:
    """The user's frames around the place of a slice, outermost first, as "file:line function"."""
    stack, activity = int(attribution.stack[row]), attribution.activity
    if stack >= 0:
        table = attribution.trace.table(TABLES[activity.table[stack]])
        entries = user_entries(table["call_stack"][int(activity.row[stack])], activity.user_code)
        return tuple("{}:{} {}".format(*(parse(entry) or (entry, 0, ""))) for entry in reversed(entries[1:]))
    place, frame = attribution.places[attribution.place[row]], int(attribution.frame[row])
    frames = attribution.trace.frames
    around = parse(frames["name"][frame]) if frame >= 0 else None
    if around is None or around[2] != place.function:  # a frame of another function leads elsewhere
        return ()
    return _path_of_frame(frames, frame, activity)


def _path_of_frame(frames: pl.DataFrame, frame: int, activity: HostActivity) -> tuple[str, ...]:
    path: list[str] = []
    above = frames["parent"][frame]
    while above is not None and len(path) < _LONGEST_PATH:
        outer = parse(frames["name"][above])
        if outer is not None and outer[0] in activity.user_code:
            path.append("{}:{} {}".format(*outer))
        above = frames["parent"][above]
    return tuple(reversed(path))


def line_places(trace: Trace, activity: HostActivity, pieces: pl.DataFrame) -> list[Place]:
    """The user's lines during these pieces of host time, costliest first.

    Args:
        pieces: columns lane, start_ns, duration_ns.
    """
    parts = []
    for (lane,), mine in pieces.drop_nulls("lane").group_by("lane"):
        timeline = activity.line_timelines.get(int(str(lane)))
        if timeline is None:
            continue
        start = mine["start_ns"].to_numpy()
        _, begins, ends, rows = timeline.cut(start, start + mine["duration_ns"].to_numpy())
        parts.append(pl.DataFrame({"row": rows, "ns": ends - begins}).filter(pl.col("row") >= 0))
    if not parts:
        return []
    costs = pl.concat(parts).group_by("row").agg(pl.col("ns").sum())
    lines = trace.lines.select("file", "line", "function")[costs["row"].to_numpy().astype(np.int64)]
    sums = (
        lines.with_columns(costs["ns"])
        .group_by("file", "line", "function")
        .agg(pl.col("ns").sum())
        .sort(["ns", "file", "line"], descending=[True, False, False])
    )
    return [Place(file, line, function, True, ns, ()) for file, line, function, ns in sums.iter_rows()]


def merged(found: list[Place]) -> list[Place]:
    """Merge places with the same line, costliest first."""
    lines: dict[tuple[str, int, str], Place] = {}
    for place in found:
        key = (place.file, place.line, place.function)
        known = lines.get(key)
        if known is None:
            lines[key] = place
        else:
            exact = known.exact_line or place.exact_line
            path, module = known.call_path or place.call_path, known.module
            lines[key] = Place(*key, exact, known.ns + place.ns, path, known.inside, module)
    return sorted(lines.values(), key=lambda place: (-place.ns, place.file, place.line))


_MOST_SLICES: Final = 10_000
"""Number of slices, costliest first, to follow to their frames; the rest counts as time of no function."""


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


def library_module(attribution: Attribution, slices: Rows, ns: Rows) -> tuple[str, str]:
    """The innermost module that contains at least half of this time, and a library's `forward` in which it runs.

    Layers that differ only in their number count as one, with a star. Both are "" if no library's module does.

    Args:
        slices: indices into the attribution's activity, all of one place; shape (n,).
        ns: cost of each; shape (n,).
    """
    program = attribution.trace.metadata.program
    if program is None or not program.module_functions:
        return "", ""
    numbers, which = np.unique(at(attribution.module, slices), return_inverse=True)
    sums: Counter[str] = Counter()
    paths: dict[str, set[str]] = {}
    for number, cost in zip(numbers.tolist(), np.bincount(which, ns, len(numbers)).tolist(), strict=True):
        parts = attribution.modules[number].split(".") if number >= 0 else []
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            sums[module_pattern(path)] += cost
            paths.setdefault(module_pattern(path), set()).add(path)
    most = [pattern for pattern, cost in sums.items() if 2 * cost >= ns.sum() > 0]
    chosen = max(most, key=lambda pattern: (pattern.count("."), sums[pattern]), default="")
    parts = chosen.split(".")
    around = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    function = next((program.module_functions[each] for each in around if each in program.module_functions), "")
    if not function:
        return "", ""
    return (chosen if len(paths[chosen]) > 1 else paths[chosen].pop()), function


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
