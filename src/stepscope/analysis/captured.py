"""Kernels of recorded graphs, tied to the calls that captured them.

Launching a graph is one call with many kernels, and says nothing about the operator, module and line of each. Those are
known where the graph was captured: every kernel of it is one call there, inside its operator. Where the capture was not
recorded, the same kernels may have been launched one by one, as in a warm-up.

A graph's kernels are matched as a whole. A capture must have launched the same kernels, equally often; the calls of a
kernel's name then follow in order. Kernels launched one by one must have the same names, and the same grids where these
are known, in the same order. Where the profiler did not write which kernel a captured call launches, the capture must
be the only one with as many calls as the graph has kernels, and kernels of one name must fall on calls of one operator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import covered_by
from stepscope.analysis.steps import captures
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, nullable, row_numbers
from stepscope.trace.window import IntervalSet, union

BASES: Final[dict[str, tuple[str, str]]] = {
    "annotation": ("the annotations of the graph's nodes", "high"),
    "capture": ("the calls of the capture, kernel by kernel", "high"),
    "sequence": ("the same kernels, launched one by one in the same order", "medium"),
    "count": ("the calls of the capture in order, which are as many; it does not name their kernels", "low"),
}
"""How a kernel was tied to its code -> what that is, and the confidence."""
_BASES: Final = tuple(BASES)
LEAST_KERNELS: Final = 8
"""Shorter sequences of kernels may be alike by chance."""
LEAST_NAMES: Final = 4
_MOST_UNLAUNCHED: Final = 0.05
"""Share of the work without a launch up to which a graph without work counts as one of which nothing was recorded."""
_LEAST_AGREEMENT: Final = 0.9
"""Share of the kernels that must fall on their name's most frequent operator, if only their number is known."""
_MOST_LISTED: Final = 4
_GRAPH_LAUNCH: Final = r"^(?:cuda|cu|hip)GraphLaunch"
_WORKING: Final = ("launch", "copy", "set")
"""Kinds of calls that become a node of a graph while it is captured."""


@dataclass(frozen=True)
class Tied:
    """Where the kernels of a trace's graphs were captured.

    Attributes:
        capture: the recording with the calls if it is not the trace itself, which would keep itself alive here.
        launch: for each row of `device_work` the row in the source's launches, -1 for none.
        basis: for each row of `device_work` an index into BASES, -1 for none.
    """

    capture: Trace | None
    launch: Rows
    basis: npt.NDArray[np.int8]

    def source(self, trace: Trace) -> Trace:
        """The recording with the calls."""
        return trace if self.capture is None else self.capture


@dataclass(frozen=True, slots=True)
class TiedBy:
    """How many kernels of graphs are tied to their code in one way: a key of BASES."""

    basis: str
    kernels: int
    confidence: str


@dataclass(frozen=True, slots=True)
class GraphUse:
    """The graphs of a trace, as a report shows them.

    Attributes:
        launches: calls that launched a graph.
        kernels: work that these calls launched.
        kernel_ns: its time.
        tied: work among it whose operator, module or line is known.
        tied_ns: its time.
        by: how it is known.
        unrecorded: launches of which the profiler recorded no work.
        unrecorded_ns: time after them in which the device may have run their kernels or not.
        capture: path of the recording of the capture; None if none was given.
    """

    launches: int
    kernels: int
    kernel_ns: int
    tied: int
    tied_ns: int
    by: tuple[TiedBy, ...]
    unrecorded: int
    unrecorded_ns: int
    capture: str | None = None


def tied_kernels(trace: Trace) -> tuple[Tied, ...]:
    """Where the kernels of graphs were captured; empty if no graph's kernels are tied to a call.

    The recording of the capture counts before the trace's own calls.
    """
    return trace.kept("tied_kernels", lambda: tuple(_tied(trace)))


def _tied(trace: Trace) -> Iterator[Tied]:
    graphs = _graphs(trace)
    if graphs.is_empty():
        return
    taken = np.zeros(trace.device_work.height, np.bool_)
    for source in (trace.capture, trace):
        if source is None:
            continue
        launch, basis = _Matching(graphs.filter(~pl.Series(taken[graphs["row"].to_numpy()])), source).found(len(taken))
        if (launch >= 0).any():
            taken |= launch >= 0
            yield Tied(None if source is trace else source, launch, basis)


def _graphs(trace: Trace) -> pl.DataFrame:
    """Work that graphs did, a call's together in order of time: row, launch, key (kernel or kind), size, name."""
    calls = trace.launches.with_row_index("launch").filter(pl.col("kind") == "graph_launch").select("launch")
    if calls.is_empty():
        return _keyed(trace.device_work.head(0)).with_columns(launch=pl.lit(None, pl.UInt32))
    work = _keyed(trace.device_work).with_columns(launch=trace.device_work["launch"])
    work = work.join(calls, on="launch", how="semi")
    work = work.filter(pl.len().over("launch") >= LEAST_KERNELS)
    return work.sort("launch", "start_ns", "row")


def _keyed(work: pl.DataFrame) -> pl.DataFrame:
    kind = pl.col("kind").str.extract("^(copy|set)")
    size = pl.concat_str("grid", "block", separator="/")
    return work.with_row_index("row").select("row", "start_ns", "name", key=pl.coalesce(kind, "name"), size=size)


class _Matching:
    """Matches graphs to the calls of one recording; each distinct graph once."""

    def __init__(self, graphs: pl.DataFrame, source: Trace) -> None:
        self._graphs = graphs
        self._source = source
        self._captured = tuple(_captured(source)) if graphs.height else ()
        self._operators = source.operators["name"].gather(source.launches["operator"])

    def found(self, works: int) -> tuple[Rows, npt.NDArray[np.int8]]:
        """Row of the source's call and index of the basis for each of this many works, -1 for none."""
        launch, basis = np.full(works, -1, np.int64), np.full(works, -1, np.int8)
        known: dict[tuple[str, ...], tuple[Rows, str] | None] = {}
        for _, graph in self._graphs.group_by("launch", maintain_order=True):
            keys = tuple(graph["key"].to_list())
            if keys not in known:
                known[keys] = self._calls_of(graph, keys)
            match = known[keys]
            if match is not None:
                rows = graph["row"].to_numpy()
                launch[rows], basis[rows] = match[0], _BASES.index(match[1])
        return launch, basis

    def _calls_of(self, graph: pl.DataFrame, keys: tuple[str, ...]) -> tuple[Rows, str] | None:
        counts = Counter(keys)
        for calls, named in self._captured:
            if named is not None and Counter(named) == counts:
                return calls[_in_turn(keys, named)], "capture"
        in_sequence = self._in_sequence(graph) if len(counts) >= LEAST_NAMES else None
        if in_sequence is not None:
            return in_sequence, "sequence"
        alike = [calls for calls, named in self._captured if named is None and len(calls) == len(keys)]
        if len(alike) == 1 and self._agree(keys, alike[0]):
            return alike[0], "count"
        return None

    def _in_sequence(self, graph: pl.DataFrame) -> Rows | None:
        """The first calls that launched the graph's kernels one by one; None if there are none."""
        single = self._single
        by_size = graph["size"].null_count() == 0
        wanted = _texts(graph, by_size=by_size)
        for rows in single.partition_by("lane"):
            texts = _texts(rows, by_size=by_size)
            codes = {text: code for code, text in enumerate(dict.fromkeys(texts))}
            hay = np.array([codes[text] for text in texts], np.int32).tobytes()
            needle = np.array([codes.get(text, -1) for text in wanted], np.int32).tobytes()
            at = hay.find(needle)
            while at >= 0 and at % 4:
                at = hay.find(needle, at + 1)
            if at >= 0:
                calls: Rows = rows["launch"].to_numpy().astype(np.int64)
                return calls[at // 4 : at // 4 + len(wanted)]
        return None

    @property
    def _single(self) -> pl.DataFrame:
        """Work that calls launched one by one, in the order of the calls: launch, lane of the call, key, size."""
        return self._source.kept("single_launches", lambda: _single_launches(self._source))

    def _agree(self, keys: Sequence[str], calls: Rows) -> bool:
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for key, operator in zip(keys, self._operators.gather(calls).to_list(), strict=True):
            found[key][operator or ""] += 1
        agreeing = [operators.most_common(1)[0] for operators in found.values()]
        enough = sum(count for _, count in agreeing) >= _LEAST_AGREEMENT * len(keys)
        return enough and len({operator for operator, _ in agreeing if operator}) >= LEAST_NAMES


def _single_launches(source: Trace) -> pl.DataFrame:
    calls = source.launches.with_row_index("launch").filter(pl.col("kind").is_in(_WORKING)).select("launch", "lane")
    work = _keyed(source.device_work).with_columns(launch=source.device_work["launch"])
    return work.join(calls, on="launch", how="inner").sort("launch", "start_ns").select("launch", "lane", "key", "size")


def _texts(rows: pl.DataFrame, *, by_size: bool) -> list[str]:
    key = pl.concat_str("key", pl.col("size").fill_null(""), separator="\0") if by_size else pl.col("key")
    return rows.select(key.fill_null("")).to_series().to_list()


def _captured(source: Trace) -> Iterator[tuple[Rows, tuple[str, ...] | None]]:
    """Calls of each capture, and the kernels or kinds of work they captured; None where a kernel's name is unknown."""
    begun = captures(source.launches)
    if begun.is_empty():
        return
    processes = source.lanes.select("lane", "process")
    done = source.device_work["launch"].drop_nulls().unique()
    calls = source.launches.with_row_index("launch").filter(pl.col("kind").is_in(_WORKING))
    calls = calls.filter(~pl.col("launch").is_in(done.implode())).join(processes, on="lane", how="left")
    begun = begun.join(processes, on="lane", how="left")
    for start_ns, duration_ns, process in begun.select("start_ns", "duration_ns", "process").iter_rows():
        mine = calls.filter(
            pl.col("start_ns").is_between(start_ns, start_ns + duration_ns) & pl.col("process").eq_missing(process)
        ).sort("start_ns", "launch")
        kinds = pl.when(pl.col("kind") == "launch").then("kernel").otherwise("kind")
        named = mine.select(kinds).to_series()
        rows = mine["launch"].to_numpy().astype(np.int64)
        yield rows, None if named.null_count() else tuple(named.to_list())


def _in_turn(keys: Sequence[str], named: Sequence[str]) -> Rows:
    """For each key the position of the same name among `named`: its first for the first, and so on."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for position in range(len(named) - 1, -1, -1):
        places[named[position]].append(position)
    return np.array([places[key].pop() for key in keys], np.int64)


def why_not_tied(trace: Trace) -> str | None:
    """Why no graph's kernels are tied to the recording of the capture, as a clause; None if some are."""
    capture = trace.capture
    if capture is None or any(tied.capture is capture for tied in tied_kernels(trace)):
        return None
    graphs = _graphs(trace)
    if graphs.is_empty():
        calls = int((trace.launches["kind"] == "graph_launch").sum())
        return (
            f"the trace's {calls:,} launches of graphs have fewer than {LEAST_KERNELS} recorded kernels each"
            if calls
            else "the trace launches no graph"
        )
    sizes = graphs.group_by("launch").len()["len"].unique().sort().to_list()
    wanted = f"the graphs have {_listed(sizes)} kernels"
    captured = sorted({len(calls) for calls, _ in _captured(capture)})
    if not captured:
        return f"{wanted}, and the file neither captures a graph nor launches the same kernels one by one"
    return f"{wanted}, and the file captures other ones: {_listed(captured)} calls"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(f"{number:,}" for number in numbers[:_MOST_LISTED])
    return f"{shown}, ..." if len(numbers) > _MOST_LISTED else shown


GRAPH_OPERATORS: Final[dict[str, type[pl.DataType]]] = {
    "graph_operator": pl.String,
    "graph_shapes": pl.String,
    "graph_types": pl.String,
}


def graph_operators(trace: Trace) -> pl.DataFrame | None:
    """The operator that captured each row of `device_work`, its shapes and types; None if no graph is tied.

    Columns as in GRAPH_OPERATORS, null for other work.
    """
    if not tied_kernels(trace):
        return None
    return trace.kept("graph_operators", lambda: _operators_of(trace))


def _operators_of(trace: Trace) -> pl.DataFrame:
    whole = pl.DataFrame(schema=dict(GRAPH_OPERATORS)).clear(trace.device_work.height)
    for tied in tied_kernels(trace):
        source = tied.source(trace)
        rows = row_numbers(source.launches["operator"].gather(nullable(tied.launch)))
        names = ("name", "input_shapes", "input_types")
        found = {
            column: source.operators[name].gather(nullable(rows))
            for column, name in zip(GRAPH_OPERATORS, names, strict=True)
        }
        whole = whole.with_columns(pl.coalesce(column, values) for column, values in found.items())
    return whole


def graph_calls(trace: Trace, works: Rows) -> Trace | None:
    """The work of tied graphs as if the captured operators had been called at each launch and had launched it.

    Args:
        works: rows of `device_work` to take.

    Returns:
        A trace with these operators, their launches and the work, for analyses of operators' calls; None without any.
    """
    parts: list[pl.DataFrame] = []
    for tied in tied_kernels(trace):
        source = tied.source(trace)
        operator = source.launches["operator"].gather(nullable(tied.launch))
        work = trace.device_work.with_columns(graph="launch", operator=operator, work=pl.int_range(pl.len()))
        work = work.filter(pl.col("work").is_in(works.tolist()) & pl.col("operator").is_not_null())
        names = ("name", "input_shapes", "input_types", "input_values")
        called = source.operators[work["operator"]].select(pl.col(name).alias(f"called_{name}") for name in names)
        parts.append(pl.concat([work, called], how="horizontal").with_columns(source=pl.lit(len(parts))))
    work = pl.concat(parts) if parts else pl.DataFrame()
    if work.is_empty():
        return None
    keys = ("graph", "source", "operator")
    calls = work.unique(keys, keep="first", maintain_order=True).select(*keys, pl.col("^called_.*$"))
    begun = trace.launches.select("start_ns", "lane").with_row_index("graph")
    calls = calls.join(begun, on="graph").sort("start_ns", *keys).with_row_index("call")
    work = work.drop("launch").join(calls.select(*keys, launch="call"), on=keys, how="left", maintain_order="left")
    columns = [pl.col(f"called_{name}").alias(name) for name in names]
    operators = calls.select("start_ns", "lane", *columns, duration_ns=pl.lit(0))
    launches = operators.with_columns(kind=pl.lit("launch"), operator=calls["call"])
    tables = {"lanes": trace.lanes, "operators": operators, "launches": launches, "device_work": work}
    return Trace.from_tables(tables, trace.metadata)


def graph_use(trace: Trace) -> GraphUse | None:
    """How much of a trace's work ran in graphs, and what is known of it; None without a launch of a graph."""
    return trace.kept("graph_use", lambda: _use(trace))


def _use(trace: Trace) -> GraphUse | None:
    graph_calls = trace.launches.with_row_index("launch").filter(pl.col("kind") == "graph_launch")
    if graph_calls.is_empty():
        return None
    duration = trace.device_work["duration_ns"].to_numpy()
    inside = trace.device_work["launch"].is_in(graph_calls["launch"].implode()).fill_null(False).to_numpy()
    basis = np.full(len(duration), -1, np.int8)
    for tied in tied_kernels(trace):
        basis = np.where(tied.launch >= 0, tied.basis, basis)
    annotated = trace.device_work["module"].is_not_null().to_numpy()
    basis = np.where(annotated, _BASES.index("annotation"), basis)
    known = inside & (basis >= 0)
    by = {name: int((basis[known] == code).sum()) for code, name in enumerate(_BASES)}
    unknown_ns = 0
    for device, times in unrecorded_graphs(trace).items():
        busy = covered_by(trace.device_work.filter(pl.col("device") == device))
        unknown_ns += times.total_ns - times.overlap_ns(busy)
    return GraphUse(
        launches=graph_calls.height,
        kernels=int(inside.sum()),
        kernel_ns=int(duration[inside].sum()),
        tied=int(known.sum()),
        tied_ns=int(duration[known].sum()),
        by=tuple(TiedBy(name, number, BASES[name][1]) for name, number in by.items() if number),
        unrecorded=_unrecorded(trace).height,
        unrecorded_ns=unknown_ns,
        capture=None if trace.capture is None else trace.capture.metadata.path,
    )


def _unrecorded(trace: Trace) -> pl.DataFrame:
    """Launches of CUDA and HIP graphs without recorded work, with `row`, in a trace that records a device's work."""
    calls = trace.launches.with_row_index("row").filter(
        (pl.col("kind") == "graph_launch") & pl.col("name").str.contains(_GRAPH_LAUNCH)
    )
    if calls.is_empty() or trace.device_work.is_empty():
        return calls.head(0)
    if trace.device_work["launch"].null_count() > _MOST_UNLAUNCHED * trace.device_work.height:
        return calls.head(0)  # the work may be there without its launch
    return calls.filter(~pl.col("row").is_in(trace.device_work["launch"].drop_nulls().unique().implode()))


def unrecorded_graphs(trace: Trace) -> dict[str, IntervalSet]:
    """Times in which a device may have run a graph of which the profiler recorded nothing, by device.

    Each begins with the launch and ends with the next work that the device is known to have begun, or with the next
    wait of the host for the device, whichever is first. The device is that of the launching thread's other work.
    """
    return trace.kept("unrecorded_graphs", lambda: _unrecorded_times(trace))


def _unrecorded_times(trace: Trace) -> dict[str, IntervalSet]:
    calls = _unrecorded(trace)
    if calls.is_empty():
        return {}
    device = _devices_of_lanes(trace)
    work = trace.device_work.select(
        "device", "start_ns", called=trace.launches["start_ns"].gather(trace.device_work["launch"])
    )
    last = int((trace.device_work["start_ns"] + trace.device_work["duration_ns"]).to_numpy().max())
    waits = trace.launches.filter((pl.col("kind") == "synchronise") & ~pl.col("name").str.contains("Event"))
    waited = _Following(waits["start_ns"], waits["start_ns"] + waits["duration_ns"])
    begins: defaultdict[str, list[int]] = defaultdict(list)
    for lane, start_ns in calls.select("lane", "start_ns").iter_rows():
        if (its := device.get(lane, device.get(None))) is not None:
            begins[its].append(start_ns)
    found = {}
    for name, times in begins.items():
        mine = work.filter((pl.col("device") == name) & pl.col("called").is_not_null())
        starts = np.array(times, np.int64)
        ends = np.minimum(_Following(mine["called"], mine["start_ns"]).first(starts), waited.first(starts))
        found[name] = union(starts, np.clip(ends, starts, max(last, int(starts.max()))))
    return found


class _Following:
    """The earliest of some times among those whose call came later."""

    def __init__(self, called: pl.Series, times: pl.Series) -> None:
        order = np.argsort(called.to_numpy(), kind="stable")
        self._called = called.to_numpy()[order]
        self._earliest = np.append(np.minimum.accumulate(times.to_numpy()[order][::-1])[::-1], np.iinfo(np.int64).max)

    def first(self, after: Rows) -> Rows:
        """The earliest time among the calls after each of these times; the largest integer if there are none."""
        found: Rows = self._earliest[np.searchsorted(self._called, after, side="right")]
        return found


def _devices_of_lanes(trace: Trace) -> dict[int | None, str]:
    """The device that each thread gave most work to; under None that of all threads."""
    work = trace.device_work.select("device", lane=trace.launches["lane"].gather(trace.device_work["launch"]))
    counts = work.drop_nulls("device").group_by("lane", "device").len().sort("len", "device", descending=[True, False])
    found: dict[int | None, str] = {}
    for lane, device in counts.select("lane", "device").iter_rows():
        found.setdefault(lane, device)
        found.setdefault(None, device)
    return found
