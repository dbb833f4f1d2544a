"""What the page draws beyond the commands' JSON: levels of memory, flame graph, waits, roofs, ranks by step; and its
links, what ran together, by which it filters every view by what is chosen in another one.

Every figure comes from the analysis that the command of the same subject prints. Each row of the links sums the time of
one combination of line, module, operator and kernel, or of one cause and line: choosing a value keeps the rows that
have it, and their other values are what it is related to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.blocks import CATEGORIES
from stepscope.analysis.flame import flame_graph
from stepscope.analysis.host import HOST_SCHEMA, host_time
from stepscope.analysis.input_pipeline import MOST_WORKERS
from stepscope.analysis.memory import GROUPINGS, DeviceMemory, alive_at, levels_by, memory_summary, moments
from stepscope.analysis.module_paths import PHASES
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.places import idle_places
from stepscope.analysis.roofline import device_peaks, peaks_or_bounds, roofline_table, with_graphs
from stepscope.analysis.steps import span_of
from stepscope.analysis.telemetry import TelemetryPicture
from stepscope.diagnosis.loading import loading_of
from stepscope.diagnosis.rank_groups import Exchanges
from stepscope.diagnosis.rank_summary import RankSteps
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.report.format import count, duration, share
from stepscope.report.memory import facts
from stepscope.report.palette import memory_look, series_colours
from stepscope.report.ranks import clock_sentence
from stepscope.trace import Trace, Window
from stepscope.trace.nesting import at, row_numbers

Json: TypeAlias = dict[str, Any]

_BANDS: Final = 8
"""Most lines in a picture of memory; the smallest are one band."""
_ALIVE: Final = 500
"""Most blocks of one moment; the smallest are left out."""
_WAITS: Final = 4000
_KINDS: Final = ("line", "phase", "operator", "other")
_LINE: Final = re.compile(r".+:\d+ .+", re.DOTALL)
_OPERATOR: Final = re.compile(r"^[\w.]+::\w|Backward\d*$")


def _kind_of_frame(name: str) -> str:
    if name in PHASES:
        return "phase"
    if _LINE.fullmatch(name):
        return "line"
    return "operator" if _OPERATOR.search(name) else "other"


def flame_json(view: View) -> Json:
    """Time by stack; frames as (name, frame below it, nanoseconds)."""
    graph = flame_graph(view.trace, view.attribution)
    names: dict[str, int] = {}
    frames = [(names.setdefault(each.name, len(names)), each.parent, each.ns) for each in graph.frames]
    return {
        "basis": graph.basis,
        "total_ns": graph.total_ns,
        "dropped": graph.dropped,
        "names": list(names),
        "kinds": [_KINDS.index(_kind_of_frame(name)) for name in names],
        "frames": frames,
    }


def device_memory(view: View, device: str | None) -> DeviceMemory:
    """The memory of a device; by default of the one that `stepscope memory` shows first.

    Raises:
        UsageError: there is none.
    """
    found = [memory for memory in view.memories if device is None or memory.device == device]
    if not found:
        raise UsageError("no allocations were recorded" if device is None else f"no memory of device {device!r}")
    return found[0]


def memory_levels_json(view: View, device: str | None = None, by: str = "category") -> Json:
    """One device's memory over time, by category or by line, from the bottom to the top."""
    memory = device_memory(view, device)
    levels = memory.levels
    chosen = moments(levels["start_ns"].to_numpy(), levels["allocated_bytes"].to_numpy(), memory.peak_row)
    rows, summary = levels[chosen], memory_summary(view.trace, memory)
    times = rows["start_ns"].to_list()
    span = span_of(memory.steps) or Window(times[0], 0)
    marks = memory.steps.sort("start_ns").select("index", "start_ns")
    return {
        "device": memory.device,
        "name": summary.name,
        "start_ns": min(times[0], span.start_ns),
        "end_ns": max(times[-1], span.end_ns, times[0] + 1),
        "times": times,
        "bands": _bands(memory, times, rows, by),
        "reserved": None if rows["reserved_bytes"].null_count() else rows["reserved_bytes"].to_list(),
        "capacity_bytes": memory.capacity_bytes,
        "peak_ns": memory.peak_ns,
        "peak_bytes": memory.peak_bytes,
        "steps": marks.rows(),
        "by": groupings_of(memory) if summary.addressed else [],
        "facts": list(facts(summary)),
    }


def groupings_of(memory: DeviceMemory) -> list[str]:
    """What the levels can be divided by: what some blocks tell."""
    first = {name: columns[0] for name, columns in GROUPINGS.items()}
    return [
        name
        for name, column in first.items()
        if name == "category" or memory.blocks[column].null_count() < memory.blocks.height
    ]


def _bands(memory: DeviceMemory, times: Sequence[int], rows: pl.DataFrame, by: str) -> list[Json]:
    if not memory.blocks.height:
        return [{"name": "allocated", **memory_look("allocated"), "bytes": rows["allocated_bytes"].to_list()}]
    held = levels_by(memory, times, by, _BANDS)
    if by == "category":
        looks = {name: memory_look(name, meaning) for name, meaning in CATEGORIES.items()}
    else:
        colours = series_colours(list(held))
        looks = {
            name: {"label": name or "all others", "meaning": "", "colour": colours[name], "hatched": False}
            for name in held
        }
    return [
        {"name": name, **look, "bytes": held[name].tolist()}
        for name, look in looks.items()
        if held.get(name) is not None and held[name].any()
    ]


def memory_alive_json(view: View, device: str | None, time_ns: int) -> Json:
    """What is alive on a device at a moment, the largest first, with its time and place."""
    memory = device_memory(view, device)
    row = int(np.searchsorted(memory.levels["start_ns"].to_numpy(), time_ns, side="right")) - 1
    if row < 0:
        return {"time_ns": time_ns, "bytes": 0, "count": 0, "blocks": []}
    alive = alive_at(memory, row)
    return {
        "time_ns": time_ns,
        "bytes": int(memory.levels["allocated_bytes"][row]),
        "count": alive.height,
        "blocks": alive.head(_ALIVE).drop("exact_line", "region").to_dicts(),
    }


def loading_json(view: View) -> Json:
    """How steps wait for batches, and how long they would take with other numbers of workers."""
    loading = loading_of(view)
    load, made, waits = loading.load, loading.batches, loading.waits
    tried = () if load is None else _tried(loading.workers, loading.processors, load.workers_needed())
    return {
        "workers": loading.workers,
        "processors": loading.processors,
        "step_ns": view.step_ns,
        "wait_ns": view.per_step(loading.wait_ns),
        "calls": loading.calls,
        "batch_ns": made.clock_ns,
        "waits": {name: waits[name].head(_WAITS).to_list() for name in ("start_ns", "wait_ns")},
        "with_workers": [{"workers": each, "step_ns": _with_workers_ns(view, each)} for each in tried],
        "facts": list(_loading_facts(view)),
    }


def _with_workers_ns(view: View, workers: int) -> int:
    """The step with this number of workers; with more than there are it is shorter by what the finding promises."""
    loading = loading_of(view)
    if loading.load is not None and workers < (loading.workers or 0):
        return max(view.step_ns, round(loading.load.step_ns(workers)))
    saved_ns = loading.saved_ns(view, workers) if workers > (loading.workers or 0) else 0
    return view.step_ns - view.per_step(saved_ns)


def _tried(workers: int | None, processors: int | None, needed: int) -> list[int]:
    """None, what there is and one more, and up to what is needed; no more than there are processors."""
    most = min(max(needed + 1, (workers or 0) + 1, 4), max(processors or MOST_WORKERS, (workers or 0) + 1))
    return (
        list(range(most + 1)) if most <= 16 else sorted({0, 1, 2, 4, 8, needed, workers or 0, (workers or 0) + 1, most})
    )


def _loading_facts(view: View) -> list[tuple[str, str]]:
    loading = loading_of(view)
    wait = view.per_step(loading.wait_ns)
    rows = [("waits for batches", f"{duration(wait)} {view.per}, {share(wait / view.step_ns)} of it")]
    if loading.batches.clock_ns is not None:
        rows.append(("a batch takes", f"{duration(loading.batches.clock_ns)} to make, in one process"))
    if loading.workers is not None:
        rows.append(("workers", count(loading.workers) if loading.workers else "none: the program makes its batches"))
    if loading.processors is not None:
        rows.append(("processors", f"{count(loading.processors)} that the program may use"))
    return rows


def telemetry_json(pictures: Sequence[tuple[int | None, TelemetryPicture]]) -> Json:
    """Plots of each rank's telemetry."""
    return {
        "ranks": [
            {
                "rank": rank,
                "duration_s": picture.duration_s,
                "recorded_s": picture.recorded_s,
                "notes": picture.notes,
                "plots_left_out": picture.plots_left_out,
                "plots": [
                    {
                        "group": plot.group,
                        "title": plot.title,
                        "unit": plot.unit,
                        "left_out": plot.left_out,
                        "lines": [
                            {
                                "label": line.label,
                                **{name: line.points[name].to_list() for name in ("time_s", "value")},
                                "step": line.points["step"].to_list() if line.points["step"].count() else None,
                                "not_finite_s": line.not_finite_s,
                            }
                            for line in plot.lines
                        ],
                    }
                    for plot in picture.plots
                ],
            }
            for rank, picture in pictures
        ]
    }


def roofline_json(trace: Trace) -> Json:
    """What `stepscope roofline` lists, and the roofs of the devices."""
    rows = with_graphs(roofline_table(trace, bounds=True), trace)
    roofs = []
    for device in rows["device"].unique().sort().to_list():
        peaks = peaks_or_bounds(trace, device)
        if peaks is not None:
            rates = {name: flops / 1e12 for name, flops in peaks.flops_s.items()}
            roofs.append(
                {
                    "device": device,
                    "name": peaks.name,
                    "is_least": device_peaks(trace, device) is None,
                    "gb_per_s": peaks.bandwidth_bytes_s / 1e9,
                    "tflop_per_s": rates,
                }
            )
    return {"roofs": roofs, "operators": rows.to_dicts()}


STEP: Final = "step"
_MOST_DRAWN: Final = 50_000
"""Arrivals of ranks that are drawn."""
LATE: Final = "late"
"""Figures of a rank and a step besides causes: the step's time, and how late the rank comes to collectives."""


def ranks_json(
    ranks: Sequence[RankSteps],
    cause: str | None,
    late: pl.DataFrame,
    sentences: Sequence[str],
    unreadable: Sequence[str] = (),
    of: int | None = None,
    together: Exchanges | None = None,
    step: int | None = None,
) -> Json:
    """A figure of each rank and step: the idle time of a cause, STEP or LATE.

    Args:
        cause: None for LATE where it is known, else STEP.
        late: of `matched_collectives` columns step, last, late_ns, ranks and arrivals_ns.
        unreadable: why other ranks are missing.
        of: how many ranks there are with those that were not read yet; None where all were.
        together: what they exchange.
        step: whose collectives are drawn; None for the one in which ranks wait longest.
    """
    read = len(ranks) + len(unreadable)
    numbers = sorted({number for rank in ranks for number in rank.index})
    column = {number: place for place, number in enumerate(numbers)}
    sums: dict[str, int] = {}
    for rank in ranks:
        for name, times in rank.cause_ns.items():
            sums[name] = sums.get(name, 0) + sum(times)
    if cause is None or (cause == LATE and not late.height):
        cause = LATE if late.height else STEP
    lateness = _lateness(late) if cause == LATE else {}
    values: list[list[int | None]] = []
    for place, rank in enumerate(ranks):
        row: list[int | None] = [None] * len(numbers)
        own = rank.step_ns if cause == STEP else rank.cause_ns.get(cause, [0] * len(rank.index))
        for position, number in enumerate(rank.index):
            row[column[number]] = lateness[number, place] if (number, place) in lateness else own[position]
        values.append(row)
    return {
        "ranks": [
            {
                "rank": rank.rank,
                "name": rank.name,
                "path": rank.path,
                "step_ns": sum(rank.step_ns) // len(rank.step_ns) if rank.step_ns else None,
            }
            for rank in ranks
        ],
        "steps": numbers,
        "causes": [*([LATE] if late.height else []), STEP, *sorted(sums, key=lambda name: (-sums[name], name))],
        "cause": cause,
        "ns": values,
        "slowest": _slowest(ranks, numbers, late),
        "sentences": list(sentences),
        "unreadable": list(unreadable),
        "read": read,
        "of": read if of is None else of,
        "exchanges": [] if together is None else together.table.rows(named=True),
        "clocks": "" if together is None or not together.count else clock_sentence(together),
        "drawn": _drawn(late, step, len(ranks)) if together is not None and late.height else None,
    }


def _drawn(late: pl.DataFrame, step: int | None, ranks: int) -> Json | None:
    """The collectives of one step, in order, on the first rank's clock from the first arrival on."""
    waits = (
        late.group_by("step").agg(ns=pl.col("waits_ns").list.sum().sum()).sort("ns", "step", descending=[True, False])
    )
    mine = late.filter(pl.col("step") == (waits["step"][0] if step is None else step))
    if mine.is_empty():
        return None
    last = pl.col("arrivals_ns").list.max()
    drawn = mine.sort(last, maintain_order=True).head(max(_MOST_DRAWN // ranks, 1))
    first = int(mine["arrivals_ns"].list.min().min())  # type: ignore[arg-type]
    arrivals: list[list[int | None]] = []
    for places, times in drawn.select("ranks", "arrivals_ns").iter_rows():
        of_rank = dict(zip(places, times, strict=True))
        arrivals.append([of_rank[rank] - first if rank in of_rank else None for rank in range(ranks)])
    return {
        "step": int(mine["step"][0]),
        "kinds": drawn["kind"].to_list(),
        "bytes": drawn["bytes"].to_list(),
        "arrivals_ns": arrivals,
        "ends_ns": drawn.select(last + pl.col("transfer_ns") - first).to_series().to_list(),
        "left_out": mine.height - drawn.height,
    }


def _lateness(late: pl.DataFrame) -> dict[tuple[int, int], int]:
    """By step and rank, how much later than the first one it comes to the collectives in it, added up."""
    first = pl.col("arrivals_ns").list.min()
    taken = late.select("step", "ranks", "arrivals_ns", first=first).explode("ranks", "arrivals_ns")
    sums = taken.group_by("step", "ranks").agg(ns=(pl.col("arrivals_ns") - pl.col("first")).sum())
    return {(step, rank): ns for step, rank, ns in sums.iter_rows()}


def _slowest(ranks: Sequence[RankSteps], numbers: Sequence[int], late: pl.DataFrame) -> list[int | None]:
    """By step, the rank that the others wait for longest in collectives; without those, the one with the longest."""
    found: dict[int, int] = {}
    if late.height:
        sums = (
            late.group_by("step", "last").agg(pl.col("late_ns").sum()).sort("late_ns", "last", descending=[False, True])
        )
        found = {step: last for step, last, _ in sums.iter_rows()}
    else:
        longest: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            for number, ns in zip(rank.index, rank.step_ns, strict=True):
                if ns > longest.get(number, -1):
                    longest[number], found[number] = ns, place
    return [found.get(number) for number in numbers]


MOST_ROWS: Final = 50_000
"""Combinations with the most time; a trace has hundreds, one with generated names could have millions."""
BUSY: Final = "busy"


def links_json(view: View) -> dict[str, Any]:
    """The document "links" of the page; see `Links` in web/src/schema.ts.

    Times are in nanoseconds, over the steps: of the device's work, or operators' own where there is no device.
    """
    attribution = view.attribution
    lines = pl.Series([f"{place.file}:{place.line}" for place in attribution.places], dtype=pl.String)
    modules = pl.Series(attribution.modules, dtype=pl.String)
    work = _device_work(view) if view.trace.device_work.height else _operators(view)
    pieces = _pieces(view)
    names: dict[str, int] = {}
    named = work.select(
        line=_named(lines, work["place"]), module=_named(modules, work["module"]), operator="operator",
        kernel="kernel", ns="ns",
    )  # fmt: skip
    idle = pieces.select("cause", line=_named(lines, pl.Series(idle_places(attribution, pieces))), ns="duration_ns")
    return {
        "work": _numbered(named, names),
        "idle": _numbered(idle, names),
        "steps": _steps(view, pieces, names),
        "names": list(names),
    }


def _device_work(view: View) -> pl.DataFrame:
    trace, attribution = view.trace, view.attribution
    work = trace.device_work
    launched = trace.launches["start_ns"].gather(work["launch"])
    operator = at(row_numbers(trace.launches["operator"]), row_numbers(work["launch"]))
    rows = pl.DataFrame(
        {
            "start_ns": pl.select(pl.coalesce(launched, work["start_ns"])).to_series(),
            "place": attribution.work_place,
            "module": attribution.work_module,
            "operator": _named(trace.operators["name"], pl.Series(operator)),
            "kernel": work["name"],
            "ns": work["duration_ns"],
        }
    )
    return view.begin_in_span(rows)


def _operators(view: View) -> pl.DataFrame:
    trace, attribution = view.trace, view.attribution
    slices = attribution.operator_slices
    rows = pl.DataFrame(
        {
            "start_ns": trace.operators["start_ns"],
            "place": at(attribution.place, slices),
            "module": at(attribution.module, slices),
            "operator": trace.operators["name"],
            "kernel": pl.Series([None], dtype=pl.String).new_from_index(0, trace.operators.height),
            "ns": operator_costs(trace)["host_self_ns"],
        }
    )
    return view.begin_in_span(rows)


def _pieces(view: View) -> pl.DataFrame:
    """The time that findings explain, as in `View.pieces`, with the slices that the host was in."""
    if view.device is not None:
        return view.idle_in_steps.filter(pl.col("device") == view.device)
    if view.lane is None:
        return pl.DataFrame(schema=dict(HOST_SCHEMA))
    return host_time(view.trace, window=view.span, activity=view.activity)


def _steps(view: View, pieces: pl.DataFrame, names: dict[str, int]) -> dict[str, list[int]]:
    """Each step's time by cause, and what the device was busy."""
    starts, lengths = (view.steps[name].to_numpy() for name in ("start_ns", "duration_ns"))
    window = view.window
    first = np.clip(starts, window.start_ns, window.end_ns)
    last = np.clip(starts + lengths, window.start_ns, window.end_ns)
    parts = {
        str(cause): _before(rows, last) - _before(rows, first)
        for (cause,), rows in pieces.sort("start_ns").group_by("cause", maintain_order=True)
    }
    if view.device is not None:
        parts = {BUSY: last - first - sum(parts.values(), np.zeros(len(starts), np.int64)), **parts}
    tables = [
        pl.DataFrame({"step": view.steps["index"], "cause": [cause] * len(ns), "ns": ns}) for cause, ns in parts.items()
    ]
    if not tables:
        return {"step": [], "cause": [], "ns": []}
    return _columns(pl.concat(tables).filter(pl.col("ns") > 0).sort("step", maintain_order=True), ["cause"], names)


def _before(rows: pl.DataFrame, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Total duration of disjoint rows, sorted by time, before each of `times`."""
    starts, lengths = rows["start_ns"].to_numpy(), rows["duration_ns"].to_numpy()
    count = np.searchsorted(starts, times, side="right")
    sums = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.concatenate([[times.min(initial=0)], starts + lengths])  # before the first row nothing has ended
    result: npt.NDArray[np.int64] = sums[count] - np.maximum(ends[count] - times, 0)
    return result


def _named(names: pl.Series, rows: pl.Series) -> pl.Series:
    """Names of rows, null for -1."""
    numbers = rows.cast(pl.Int64)
    return names.gather(pl.select(pl.when(numbers >= 0).then(numbers)).to_series())


def _numbered(rows: pl.DataFrame, names: dict[str, int]) -> dict[str, list[int]]:
    """Sums by all columns but ns, the largest first, as columns of numbers of names."""
    keys = rows.columns[:-1]
    sums = rows.group_by(keys).agg(pl.col("ns").sum()).filter(pl.col("ns") > 0)
    return _columns(sums.sort("ns", *keys, descending=[True, *[False] * len(keys)]).head(MOST_ROWS), keys, names)


def _columns(rows: pl.DataFrame, keys: Sequence[str], names: dict[str, int]) -> dict[str, list[int]]:
    numbers = {
        key: [-1 if name is None else names.setdefault(name, len(names)) for name in rows[key].to_list()]
        for key in keys
    }
    return {**{name: rows[name].to_list() for name in rows.columns}, **numbers}
