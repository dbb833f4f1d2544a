"""Summary of one trace for comparisons: sums over its complete steps, in whole nanoseconds; settings and energies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import polars as pl

from stepscope.analysis.captured import graph_operators
from stepscope.analysis.communication import collectives
from stepscope.analysis.device_time import COPY_KINDS, busy_intervals
from stepscope.analysis.host import host_time
from stepscope.analysis.memory import alive_table
from stepscope.analysis.places import PlaceCosts, place_costs
from stepscope.compare.statistics import compare_samples
from stepscope.diagnosis.rank_summary import RankSummary, rank_summary
from stepscope.diagnosis.view import View
from stepscope.trace import Metadata, Trace, TraceWarning, Window
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode
from stepscope.trace.nesting import at
from stepscope.trace.program_facts import ProgramFacts

Basis: TypeAlias = Literal["device", "host"]
_SUMS: Final = {"ns": pl.Int64, "calls": pl.Int64}
SCHEMAS: Final[Mapping[str, Mapping[str, type[pl.DataType]]]] = {
    # Kind is "busy" (device work, each moment under the first kind that covers it), "idle" (why the device was idle)
    # or, without a device, "host" (main-thread time). `ns` adds up to the steps' time.
    "causes": {"kind": pl.String, "name": pl.String, "ns": pl.Int64},
    "operators": {
        "name": pl.String,
        "module": pl.String,
        "input_shapes": pl.String,
        "host_ns": pl.Int64,  # self time on the host
        **_SUMS,  # self time on the device, or on the host where the trace has no device
    },
    "kernels": {
        "name": pl.String,
        "kind": pl.String,
        "operator": pl.String,  # that launched it
        "module": pl.String,
        "input_shapes": pl.String,
        **_SUMS,
    },
    "lines": {
        "file": pl.String,
        "line": pl.Int64,
        "function": pl.String,
        "exact_line": pl.Boolean,
        "operators": pl.String,  # the distinct operators that it called, which identify it after an edit
        "idle_ns": pl.Int64,
        **_SUMS,  # device time and idle time; or operators' self time and the main thread's time outside of operators
    },
    "modules": {"module": pl.String, "idle_ns": pl.Int64, **_SUMS},
    "communication": {"kind": pl.String, "ranks": pl.Int64, "bytes": pl.Int64, **_SUMS},
    "memory": {"category": pl.String, "bytes": pl.Int64},  # at the peak of the device, or of the host without one
}
_BUSY_KINDS: Final = (
    ("computing", ("compute",)),
    ("communication", ("communication",)),
    ("copies", COPY_KINDS),
    ("other work", ()),
)


@dataclass(frozen=True)
class TraceRecord:
    """Summary of one trace's steps.

    Attributes:
        steps: length of each complete step by its number, up to the start of the next; their sum is `total_ns`.
    """

    metadata: Metadata
    basis: Basis  # "device" for device times, "host" for main-thread times
    device: str | None  # device that the times belong to
    total_ns: int  # total length of the steps: what `stepscope diagnose` divides by their number
    step_count: int  # complete steps; 1 where there are none and the whole recording counts as one
    step_source: str  # "annotation", "inferred" or "none"
    steps: Mapping[int, int]
    left_out: tuple[LeftOut, ...]  # complete steps that are excluded
    tables: Mapping[str, pl.DataFrame]  # tables of SCHEMAS, sums over the steps
    settings: Mapping[str, str]  # program settings recorded in the trace
    warnings: tuple[TraceWarning, ...]
    rank: RankSummary | None = None  # of a job with several ranks


Edge: TypeAlias = Literal["first", "last"]

FEWEST_BETWEEN: Final = 3  # with fewer steps between the first and the last, all steps count
FARTHEST: Final = 8.0  # standard deviations from the median beyond which the first or last step is excluded
FARTHEST_OF_THREE: Final = 24.0  # the same with only three steps between, which say little about the scatter
LEAST_SHARE: Final = 0.2
_TO_STANDARD_DEVIATION: Final = 1.4826


@dataclass(frozen=True, slots=True)
class LeftOut:
    trace: int  # index of the trace within its side
    index: int  # step number
    edge: Edge  # whether it is the recording's first or last step
    duration_ns: int
    shortest_ns: int
    longest_ns: int  # shortest_ns, longest_ns: of the steps between the first and the last


@dataclass(frozen=True)
class SideSummary:
    """Summary of one side.

    Attributes:
        ranks: most ranks in one run.
        basis: "device" for device times, "host" for main-thread times.
        devices: names of the accelerators, if recorded.
        step_source: "annotation", "inferred" or "none"; with "none" the whole recording counts as one step.
        step_count: complete steps of all its traces.
        total_ns: their total length; the tables' sums cover the same time.
        trace: the first of its traces.
        left_out: excluded steps at the edges of recordings, see `stepscope.compare.trace_record`.
        warnings: what was skipped or repaired while reading its traces.
    """

    name: str
    paths: tuple[str, ...]
    ranks: int
    runs: int
    basis: Basis
    devices: tuple[str, ...]
    step_source: str
    step_count: int
    total_ns: int
    trace: Trace
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[TraceWarning, ...] = ()

    @property
    def step_ns(self) -> float:
        return self.total_ns / self.step_count


def far_edges(step_ns: Sequence[float]) -> tuple[Edge, ...]:
    """Whether the first and the last of a recording's consecutive steps lie far from the steps between."""
    between = step_ns[1:-1]
    if len(between) < FEWEST_BETWEEN:
        return ()
    middle = median(between)
    deviation = _TO_STANDARD_DEVIATION * median(abs(ns - middle) for ns in between)
    farthest = FARTHEST_OF_THREE if len(between) == FEWEST_BETWEEN else FARTHEST
    limit = max(farthest * deviation, LEAST_SHARE * middle)
    edges: tuple[tuple[Edge, float], ...] = (("first", step_ns[0]), ("last", step_ns[-1]))
    return tuple(edge for edge, ns in edges if abs(ns - middle) > limit and not min(between) <= ns <= max(between))


def left_out(steps: Mapping[int, int], trace: int = 0) -> Iterator[LeftOut]:
    """Steps of a recording to exclude; `steps` has the nanoseconds of each complete step by its number."""
    numbers, lengths = list(steps), list(steps.values())
    for edge in far_edges(lengths):
        at = 0 if edge == "first" else -1
        yield LeftOut(trace, numbers[at], edge, lengths[at], min(lengths[1:-1]), max(lengths[1:-1]))


def _of_used_steps(whole: View, used: pl.DataFrame) -> View:
    """View of some of a trace's complete steps; shares everything independent of them with the original view."""
    view = View(whole.trace, user_code=whole.user_code, device=whole.device)
    view.activity, view.attribution, view.steps = whole.activity, whole.attribution, whole.steps
    view.complete_steps = used
    return view


def trace_record(
    trace: Trace,
    user_code: UserCode = DEFAULT_USER_CODE,
    all_steps: bool = False,
    *,
    number: int = 0,
    device: str | None = None,
) -> TraceRecord:
    """Summarise one trace.

    Args:
        all_steps: include a first and last step that are far from the others.
        number: index of the trace within its side.
        device: device to use if it worked; otherwise the busiest.
    """
    view = View(trace, user_code=user_code, device=device)
    window = view.window
    gone: tuple[LeftOut, ...] = ()
    if not all_steps and trace.metadata.window is None:  # a window chosen by the user stays as it is
        gone = tuple(left_out(_steps(view, window), number))
    if gone:
        unused = [each.index for each in gone]
        view = _of_used_steps(view, view.complete_steps.filter(~pl.col("index").is_in(unused)))
        window = view.window
    places = _place_costs(view, window)
    tables = {
        "causes": _causes(view, window),
        "operators": _operators(view),
        "kernels": _kernels(view),
        "lines": _lines(view, places),
        "modules": _modules(places),
        "communication": _communication(view),
        "memory": _memory(view),
    }
    return TraceRecord(
        metadata=trace.metadata,
        basis="host" if view.device is None else "device",
        device=view.device,
        total_ns=window.duration_ns,
        step_count=view.step_count,
        step_source=view.summary.source if view.complete_steps.height else "none",
        steps=_steps(view, window),
        left_out=gone,
        tables={name: tables[name].select(*schema).cast(pl.Schema(schema)) for name, schema in SCHEMAS.items()},
        settings=settings_of_trace(trace.metadata),
        warnings=trace.warnings,
        rank=rank_summary(view) if (trace.metadata.world_size or 1) > 1 else None,
    )


def _steps(view: View, window: Window) -> dict[int, int]:
    steps = view.complete_steps.sort("start_ns")
    if steps.is_empty():
        return {}
    starts = steps["start_ns"].to_numpy()
    bounds = np.append(np.maximum(starts, view.span.start_ns), view.span.end_ns)
    if window != view.span:  # each step ends when the device has finished its work
        launched = pl.coalesce("launch_start_ns", "start_ns")
        ends = view.work.select(at=launched, end=pl.col("start_ns") + pl.col("duration_ns"))
        step = np.searchsorted(starts, ends["at"].to_numpy(), side="right") - 1
        done = np.full(len(starts), window.start_ns, np.int64)
        np.maximum.at(done, np.maximum(step, 0), ends["end"].to_numpy())
        by_device = np.concatenate([[window.start_ns], np.maximum.accumulate(done)])
        bounds = by_device if (np.diff(by_device) > 0).all() else bounds
    return {int(index): int(ns) for index, ns in zip(steps["index"], np.diff(bounds), strict=True)}


def _causes(view: View, window: Window) -> pl.DataFrame:
    """Attribute every nanosecond of the window once."""
    if view.device is None:
        pieces = host_time(view.trace, window=window, activity=view.activity)
        parts = [_by_cause(pieces, "host")]
    else:
        parts = [_busy(view, window), _by_cause(_idle(view), "idle")]
    table = pl.concat(parts)
    rest = window.duration_ns - int(table["ns"].sum())
    if rest:  # a trace without host threads
        table = pl.concat([table, pl.DataFrame([("host", "untraced", rest)], schema=table.schema, orient="row")])
    return table.filter(pl.col("ns") != 0)


def _idle(view: View) -> pl.DataFrame:
    return view.idle_in_steps.filter(pl.col("device") == view.device)


def _by_cause(pieces: pl.DataFrame, kind: str) -> pl.DataFrame:
    sums = pieces.group_by(name="cause").agg(ns=pl.col("duration_ns").sum())
    return sums.select(kind=pl.lit(kind), name="name", ns="ns")


def _busy(view: View, window: Window) -> pl.DataFrame:
    """Busy time of the device, each moment under the first kind that ran."""
    work = view.trace.device_work.filter(pl.col("device") == view.device)
    rows, covered, kinds = [], 0, ()
    for name, more in _BUSY_KINDS:
        kinds = (*kinds, *more)
        until = busy_intervals(work.filter(pl.col("kind").is_in(kinds)) if more else work, window).total_ns
        rows.append(("busy", name, until - covered))
        covered = until
    return pl.DataFrame(rows, schema=dict(SCHEMAS["causes"]), orient="row")


def _operators(view: View) -> pl.DataFrame:
    own = "host_self_ns" if view.device is None else "device_self_ns"
    costs = view.operator_costs.select(ns=own, host_ns="host_self_ns")
    called = view.trace.operators.select("start_ns", "name", "input_shapes")
    rows = pl.concat([called, costs, view.attribution.operators().select("module")], how="horizontal")
    rows = rows.filter(pl.col("start_ns").is_between(view.span.start_ns, view.span.end_ns, closed="left"))
    return rows.group_by("name", "module", "input_shapes").agg(pl.col("host_ns", "ns").sum(), calls=pl.len())


def _kernels(view: View) -> pl.DataFrame:
    """Device work by name, and by name, module and shapes of the operator that launched it."""
    modules = view.attribution.device_work()["module"]
    operator = view.trace.launches.select(operator="operator").with_row_index("launch")
    called = view.trace.operators.select("input_shapes", called="name").with_row_index("operator")
    rows = view.work.with_columns(module=modules.gather(view.work["row"]))
    rows = rows.join(operator, on="launch", how="left", maintain_order="left")
    rows = rows.join(called, on="operator", how="left", maintain_order="left").with_columns(operator="called")
    in_graphs = graph_operators(view.trace)
    if in_graphs is not None:
        mine = in_graphs[rows["row"]]
        rows = rows.with_columns(
            operator=pl.coalesce(mine["graph_operator"], "operator"),
            input_shapes=pl.coalesce(mine["graph_shapes"], "input_shapes"),
        )
    keys = ("name", "kind", "operator", "module", "input_shapes")
    return rows.group_by(keys).agg(ns=pl.col("duration_ns").sum(), calls=pl.len())


def _place_costs(view: View, window: Window) -> tuple[PlaceCosts, pl.DataFrame]:
    """Costs of what began in the steps, and by place and module the idle or main-thread time beside it."""
    idle = None if view.device is None else _idle(view)
    costs = place_costs(view.trace, attribution=view.attribution, window=view.span, idle=idle)
    if view.device is None:
        return costs, _outside_of_operators(view, window)
    waits = costs
    if window != view.span:
        waits = place_costs(view.trace, attribution=view.attribution, window=window, idle=idle)
    return costs, waits.records.select("place", "module", pl.col("idle_ns").fill_null(0))


def _outside_of_operators(view: View, window: Window) -> pl.DataFrame:
    """Main-thread time outside of operators, as `idle_ns`."""
    pieces = host_time(view.trace, window=window, activity=view.activity)
    pieces = pieces.filter(~pl.col("slice_table").is_in(["operators", "launches"]).fill_null(False))
    slices = view.activity.slice_index(pieces["slice_table"], pieces["slice_row"])
    attribution = view.attribution
    place, module = at(attribution.place, slices), at(attribution.module, slices)
    is_line = (pieces["slice_table"] == "lines").fill_null(False).to_numpy()
    row = pieces["slice_row"].cast(pl.Int64).fill_null(-1).to_numpy()
    place = np.where(place >= 0, place, at(attribution.line_place, np.where(is_line, row, -1)))
    return pl.DataFrame({"place": place, "module": module, "idle_ns": pieces["duration_ns"]})


def _lines(view: View, places: tuple[PlaceCosts, pl.DataFrame]) -> pl.DataFrame:
    schema = {name: SCHEMAS["lines"][name] for name in ("file", "line", "function", "exact_line")}
    names = pl.DataFrame([tuple(place) for place in view.attribution.places], schema=schema, orient="row")
    names = names.with_row_index("place").with_columns(pl.col("place").cast(pl.Int64))
    table = _with_waits(*places, "place").join(names, on="place", how="left")
    # The distinct operators that each place called, as one text.
    place = pl.Series(at(view.attribution.place, view.attribution.operator_slices), dtype=pl.Int64)
    called = view.trace.operators.select("name", place=place).filter(pl.col("place") >= 0)
    operators = called.group_by("place").agg(operators=pl.col("name").unique().sort().str.join(" "))
    return table.join(operators, on="place", how="left")


def _modules(places: tuple[PlaceCosts, pl.DataFrame]) -> pl.DataFrame:
    names = pl.DataFrame({"path": places[0].attribution.modules}, schema={"path": pl.String}).with_row_index("module")
    table = _with_waits(*places, "module").join(names.cast({"module": pl.Int64}), on="module", how="left")
    return table.drop("module").rename({"path": "module"})


def _with_waits(costs: PlaceCosts, waits: pl.DataFrame, by: str) -> pl.DataFrame:
    sums = costs.records.group_by(by).agg(pl.col("ns", "calls").sum())
    idle = waits.group_by(by).agg(pl.col("idle_ns").sum())
    table = sums.join(idle, on=by, how="full", coalesce=True)
    table = table.with_columns(pl.col("ns", "calls", "idle_ns").fill_null(0))
    table = table.with_columns(ns=pl.col("ns") + pl.col("idle_ns"))
    return table.filter((pl.col("ns") != 0) | (pl.col("calls") != 0))


def _communication(view: View) -> pl.DataFrame:
    rows = collectives(view.trace, device=view.device, window=view.span)
    return rows.group_by("kind", "ranks", "bytes").agg(ns=pl.col("duration_ns").sum(), calls=pl.len())


def _memory(view: View) -> pl.DataFrame:
    by_device = {memory.device: memory for memory in view.memories}
    others = (memory for device, memory in by_device.items() if device != "cpu")
    memory = by_device.get(view.device or "") or next(others, by_device.get("cpu"))
    return pl.DataFrame(schema=dict(SCHEMAS["memory"])) if memory is None else alive_table(memory)


SETTING_SCHEMA: Final[Mapping[str, type[pl.DataType]]] = {
    "name": pl.String,
    "before": pl.String,  # null where the setting is unknown or absent
    "after": pl.String,
}
_PROCESS: Final = ("processors", "usable_processors", "numa_nodes", "threads", "allocator")
"""Process figures that are settings; the others are measured and differ every time."""
_LOADER: Final = ("workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor", "start_method")
_LONGEST: Final = 500


def settings_of_trace(metadata: Metadata) -> dict[str, str]:
    """Program settings that a trace knows, by name."""
    found: dict[str, Any] = {
        "trace.format": metadata.format or None,
        "trace.recorded": None if metadata.recorded is None else ", ".join(metadata.recorded),
        "ranks": metadata.world_size,
        "backend": metadata.backend,
        "device": ", ".join(dict.fromkeys(device.name for device in metadata.devices if device.name)) or None,
    }
    if metadata.program is not None:
        found.update(_of_program(metadata.program))
    return {name: _text(value) for name, value in found.items() if value is not None}


def _of_program(program: ProgramFacts) -> Iterator[tuple[str, Any]]:
    yield from ((f"torch.{name}", value) for name, value in program.torch.items())
    yield from ((f"process.{name}", program.process.get(name)) for name in _PROCESS)
    yield from ((f"variable {name}", value) for name, value in program.environment.items())
    groups: tuple[tuple[str, Iterable[msgspec.Struct], Collection[str] | None], ...] = (
        ("loader", program.loaders, _LOADER),
        ("optimizer", program.optimizers, None),
        ("data parallel", program.data_parallel, None),
        ("model", () if program.model is None else (program.model,), None),
    )
    for word, structs, names in groups:
        for number, struct in enumerate(structs):
            numbered = word if number == 0 else f"{word} {number + 1}"
            for name in struct.__struct_fields__ if names is None else names:
                yield f"{numbered}.{name}", getattr(struct, name)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def merged_settings(settings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Settings of several traces of one side; where they differ, all values are listed."""
    values: dict[str, dict[str, None]] = {}
    for each in settings:
        for name, value in each.items():
            values.setdefault(name, {})[value] = None
    return {name: " | ".join(different) for name, different in values.items()}


def different_settings(before: Mapping[str, str], after: Mapping[str, str]) -> pl.DataFrame:
    """Settings that differ; columns as in SETTING_SCHEMA, sorted by name."""
    rows = [
        (name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    return pl.DataFrame(rows, schema=dict(SETTING_SCHEMA), orient="row")


StepEnergies: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""Consumer ("gpu", "cpu" or "dram") -> for each run, joules per step in each measured window."""


@dataclass(frozen=True, slots=True)
class EnergyComparison:
    kind: str  # "gpu", "cpu" or "dram"
    before_j: float
    after_j: float  # before_j, after_j: mean joules per step
    change: float  # after_j / before_j - 1
    change_low: float | None
    change_high: float | None  # change_low, change_high: interval; None where chance cannot be estimated
    confidence: float
    before_windows: int
    after_windows: int  # before_windows, after_windows: number of measured windows


def compared_energies(
    before: StepEnergies, after: StepEnergies, confidence: float = 0.95
) -> tuple[EnergyComparison, ...]:
    """Compare energies measured on both sides; consecutive windows get the same statistics as steps."""
    found = []
    for kind in ("gpu", "cpu", "dram"):
        sides = [[run for run in side.get(kind, ()) if run] for side in (before, after)]
        it = compare_samples(*sides, confidence=confidence) if all(sides) else None
        if it is not None and it.before_ns is not None and it.after_ns is not None and it.change is not None:
            means, interval = (it.before_ns, it.after_ns, it.change), (it.change_low, it.change_high)
            windows = (it.before_steps, it.after_steps)
            found.append(EnergyComparison(kind, *means, *interval, confidence, *windows))
    return tuple(found)
