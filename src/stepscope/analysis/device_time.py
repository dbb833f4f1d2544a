"""How each device's and each queue's time was spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import DEVICE_CAUSES, HostActivity, host_activity, host_time
from stepscope.analysis.idle import device_window
from stepscope.analysis.kernels import arithmetic
from stepscope.analysis.roofline import is_eligible
from stepscope.analysis.work import NUMBER_TYPES, call_of
from stepscope.trace import Trace, Window
from stepscope.trace.window import IntervalSet, Times, union

COPY_KINDS: Final = ("copy_in", "copy_out", "copy_on_device")

DEVICE_TIME_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "window_ns": pl.Int64,
    "busy_ns": pl.Int64,
    "idle_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "communication_ns": pl.Int64,
    "copy_ns": pl.Int64,
    "exposed_communication_ns": pl.Int64,
    "exposed_copy_ns": pl.Int64,
}

QUEUE_TIME_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "queue": pl.String,
    "works": pl.Int64,
    "busy_ns": pl.Int64,
    "share": pl.Float64,  # of the device's window
}


def device_time(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """One row a device; every time is the length of a union over the device's queues.

    Returns:
        Columns as in DEVICE_TIME_SCHEMA. `window_ns` runs from the first to the last work, or is the chosen window;
        `busy_ns + idle_ns == window_ns`. `exposed_*` is what no compute work covers. A set of memory counts as
        busy only.
    """
    rows = []
    for device in trace.working_devices:
        span = device_window(trace, device, window)
        work = trace.device_work.filter(pl.col("device") == device)
        busy = busy_intervals(work, span)
        compute = busy_intervals(work.filter(pl.col("kind") == "compute"), span)
        communication = busy_intervals(work.filter(pl.col("kind") == "communication"), span)
        copy = busy_intervals(work.filter(pl.col("kind").is_in(COPY_KINDS)), span)
        rows.append(
            {
                "device": device,
                "window_ns": span.duration_ns,
                "busy_ns": busy.total_ns,
                "idle_ns": span.duration_ns - busy.total_ns,
                "compute_ns": compute.total_ns,
                "communication_ns": communication.total_ns,
                "copy_ns": copy.total_ns,
                "exposed_communication_ns": communication.total_ns - communication.overlap_ns(compute),
                "exposed_copy_ns": copy.total_ns - copy.overlap_ns(compute),
            }
        )
    return pl.DataFrame(rows, schema=dict(DEVICE_TIME_SCHEMA))


def step_busy_shares(trace: Trace, steps: pl.DataFrame) -> pl.DataFrame:
    """Each device's duty cycle in each step: the share of the step in which any of its queues worked, 0 to 1.

    Args:
        steps: as `stepscope.analysis.steps.step_table` gives them.

    Returns:
        A row for each step, in order, with a column device_<name>_busy_share for each device.
    """
    starts, ends = steps["start_ns"].to_numpy(), (steps["start_ns"] + steps["duration_ns"]).to_numpy()
    columns = []
    for device in trace.working_devices:
        work = trace.device_work.filter(pl.col("device") == device)
        begin = work["start_ns"].to_numpy()
        busy = union(begin, begin + work["duration_ns"].to_numpy())
        inside = _covered(busy, ends) - _covered(busy, starts)
        share = np.divide(inside, ends - starts, out=np.zeros(len(starts)), where=ends > starts)
        columns.append(pl.Series(f"device_{device}_busy_share", share))
    return pl.DataFrame(columns)


def _covered(busy: IntervalSet, times: Times) -> Times:
    """How much of the intervals lies before each time."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(busy.ends - busy.starts)])
    place = np.searchsorted(busy.starts, times, side="right") - 1
    inside = np.clip(times - busy.starts[np.maximum(place, 0)], 0, None) if len(busy.starts) else times * 0
    length = (busy.ends - busy.starts)[np.maximum(place, 0)] if len(busy.starts) else inside
    result: Times = np.where(place >= 0, before[np.maximum(place, 0)] + np.minimum(inside, length), 0)
    return result


def busy_intervals(work: pl.DataFrame, window: Window) -> IntervalSet:
    """The union of rows of `device_work`, inside the window."""
    starts = work["start_ns"].to_numpy()
    return union(starts, starts + work["duration_ns"].to_numpy()).clip(window.start_ns, window.end_ns)


def queue_time(trace: Trace, *, window: Window | None = None) -> pl.DataFrame:
    """One row a queue, each device's busiest first; columns as in QUEUE_TIME_SCHEMA."""
    rows = []
    for (device, queue), work in trace.device_work.group_by("device", "queue"):
        span = device_window(trace, str(device), window)
        busy_ns = busy_intervals(work, span).total_ns
        rows.append((device, queue, work.height, busy_ns, busy_ns / span.duration_ns if span.duration_ns else 0.0))
    table = pl.DataFrame(rows, schema=dict(QUEUE_TIME_SCHEMA), orient="row")
    return table.sort(["device", "busy_ns", "queue"], descending=[False, True, False])


ENGINES: Final[dict[str, str]] = {
    "MME": "matrix products",
    "TPC": "all other computation",
    "DMA": "moving data",
    "NIC": "between devices",
    "other": "engines of other kinds",
}
"""Engine -> what it does, in the order in which a moment is theirs."""
_BY_QUEUE: Final = {"MME": "MME", "TPC": "TPC", "NIC": "NIC", **dict.fromkeys(("DMA", "EDMA", "PDMA", "KDMA"), "DMA")}
_COMPUTING: Final = ("MME", "TPC")


@dataclass(frozen=True, slots=True)
class EngineTime:
    """One engine's part of a device's window, in whole nanoseconds.

    Attributes:
        busy_ns: when any of its units worked.
        exposed_ns: when no engine before it worked.
    """

    engine: str
    busy_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How a device's window divides: the engines' exposed_ns + idle_ns == window_ns.

    Attributes:
        engines: those that worked at all, in the order of ENGINES.
        computing_together_ns: when both MME and TPC worked.
    """

    device: str
    window_ns: int
    idle_ns: int
    computing_together_ns: int
    engines: tuple[EngineTime, ...]


def engine_of(queue: str | None) -> str | None:
    """The engine that a queue of this name is; None for queues of other kinds."""
    return _BY_QUEUE.get(queue or "")


def engine_uses(trace: Trace) -> tuple[EngineUse, ...]:
    """Of every device whose queues are engines, in order of its name."""
    queues = trace.device_work.select("device", "queue").unique()
    devices = queues.filter(pl.col("queue").is_in(_COMPUTING))["device"].unique().sort().to_list()
    return tuple(_engine_use(trace, device) for device in devices)


def _engine_use(trace: Trace, device: str) -> EngineUse:
    window = device_window(trace, device)
    work = trace.device_work.filter(pl.col("device") == device).with_columns(
        engine=pl.col("queue").replace_strict(_BY_QUEUE, default="other", return_dtype=pl.String)
    )
    present = [engine for engine in ENGINES if (work["engine"] == engine).any()]
    busy = {engine: busy_intervals(work.filter(pl.col("engine") == engine), window) for engine in present}
    times, covered = [], 0
    for position, engine in enumerate(present):
        until = busy_intervals(work.filter(pl.col("engine").is_in(present[: position + 1])), window).total_ns
        times.append(EngineTime(engine, busy[engine].total_ns, until - covered))
        covered = until
    return EngineUse(device, window.duration_ns, window.duration_ns - covered, _together(busy), tuple(times))


def _together(busy: dict[str, IntervalSet]) -> int:
    matrix, vector = (busy.get(engine) for engine in _COMPUTING)
    return 0 if matrix is None or vector is None else matrix.overlap_ns(vector)


LOW_PRECISION: tuple[str, ...] = ("fp16", "bf16", "fp8", "int8")
GRAPH_BUILDING: tuple[str, ...] = ("dispatch", "optimizer", "python", "graph_tracing", "step_marker")
WAITING: tuple[str, ...] = ("synchronisation", "untraced", "unknown", *DEVICE_CAUSES)
"""Causes of host time in which the host did nothing for the program, as far as the trace shows."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """How one device spent its window, in whole nanoseconds.

    Times are unions over the device's queues: matrix_ns + vector_only_ns + communication_only_ns + copy_only_ns +
    other_ns + idle_ns == window_ns.

    Attributes:
        window_ns: from the device's first work to its last one's end, or what was read of it.
        busy_ns: when any queue worked.
        host_ns: when the main host thread worked in the window, other than waiting for a device.
        both_ns: when device and host worked.
        matrix_ns: when matrix work ran.
        vector_ns: when other computation ran.
        both_engines_ns: when both ran.
        vector_only_ns: vector_ns - both_engines_ns.
        communication_only_ns: collectives that no computation covered.
        copy_only_ns: copies that neither computation nor collectives covered.
        other_ns: the rest of the busy time: sets of memory and what has no kind.
        idle_ns: window_ns - busy_ns.
        matrix_work_ns: sum of the matrix kernels' durations whose number type is known.
        low_precision_ns: of it, in 16 or 8 bits.
    """

    device: str
    window_ns: int
    busy_ns: int
    host_ns: int
    both_ns: int
    matrix_ns: int
    vector_ns: int
    both_engines_ns: int
    vector_only_ns: int
    communication_only_ns: int
    copy_only_ns: int
    other_ns: int
    idle_ns: int
    matrix_work_ns: int
    low_precision_ns: int

    @property
    def device_ratio(self) -> float:
        """busy_ns / window_ns: the share of the time in which the device worked, 0 to 1."""
        return self.busy_ns / self.window_ns if self.window_ns else 0.0

    @property
    def device_host_ratio(self) -> float | None:
        """busy_ns / host_ns: above 1 the device has more to do than the host; None where no host was recorded."""
        return self.busy_ns / self.host_ns if self.host_ns else None

    @property
    def low_precision_ratio(self) -> float | None:
        """low_precision_ns / matrix_work_ns, 0 to 1; None without matrix work of a known number type."""
        return self.low_precision_ns / self.matrix_work_ns if self.matrix_work_ns else None

    @property
    def host_overlap(self) -> float | None:
        """both_ns / min(busy_ns, host_ns): 1 where device and host never waited for each other; None without one."""
        least = min(self.busy_ns, self.host_ns)
        return self.both_ns / least if least else None


@dataclass(frozen=True, slots=True)
class HostUse:
    """How the main host thread spent its recorded time, in whole nanoseconds; parts of window_ns, not all of it.

    Attributes:
        graph_build_ns: preparing work: in operators and launches, the optimizer and Python between them.
        loader_ns: loading data.
        input_copy_ns: copying data to a device.
        compile_ns: compiling code.
        waiting_ns: waiting for a device.
        compute_ns: computing, on a machine without a device.
    """

    window_ns: int
    graph_build_ns: int
    loader_ns: int
    input_copy_ns: int
    compile_ns: int
    waiting_ns: int
    compute_ns: int


def host_use(pieces: pl.DataFrame) -> HostUse | None:
    """Of the pieces that `host_time` gives; None where there are none."""
    if pieces.is_empty():
        return None
    by_cause = dict(pieces.group_by("cause").agg(pl.col("duration_ns").sum()).iter_rows())
    return HostUse(
        window_ns=sum(by_cause.values()),
        graph_build_ns=sum(by_cause.get(cause, 0) for cause in GRAPH_BUILDING),
        loader_ns=by_cause.get("input", 0),
        input_copy_ns=by_cause.get("host_to_device_copy", 0),
        compile_ns=by_cause.get("compilation", 0),
        waiting_ns=by_cause.get("synchronisation", 0),
        compute_ns=by_cause.get("compute", 0),
    )


def device_uses(trace: Trace, *, activity: HostActivity | None = None) -> tuple[DeviceUse, ...]:
    """Of every device in the trace, in order of its name."""
    names = trace.working_devices
    if not names:
        return ()
    activity = activity or host_activity(trace)
    pieces = host_time(trace, activity=activity).filter(~pl.col("cause").is_in(WAITING))
    starts = pieces["start_ns"].to_numpy()
    working = union(starts, starts + pieces["duration_ns"].to_numpy())
    work = _with_engine(trace)
    return tuple(
        _device_use(name, work.filter(pl.col("device") == name), device_window(trace, name), working) for name in names
    )


def _device_use(name: str, work: pl.DataFrame, window: Window, working: IntervalSet) -> DeviceUse:
    busy = busy_intervals(work, window)
    compute = work.filter(pl.col("kind") == "compute")
    matrix = busy_intervals(compute.filter("is_matrix"), window)
    vector = busy_intervals(compute.filter(~pl.col("is_matrix")), window)
    kinds = ("compute", "communication", *COPY_KINDS)
    until = [busy_intervals(work.filter(pl.col("kind").is_in(kinds[:count])), window).total_ns for count in (1, 2, 5)]
    both_engines = matrix.overlap_ns(vector)
    host = working.clip(window.start_ns, window.end_ns)
    typed = compute.filter(pl.col("is_matrix") & pl.col("precision").is_not_null())
    return DeviceUse(
        device=name,
        window_ns=window.duration_ns,
        busy_ns=busy.total_ns,
        host_ns=host.total_ns,
        both_ns=busy.overlap_ns(host),
        matrix_ns=matrix.total_ns,
        vector_ns=vector.total_ns,
        both_engines_ns=both_engines,
        vector_only_ns=vector.total_ns - both_engines,
        communication_only_ns=until[1] - until[0],
        copy_only_ns=until[2] - until[1],
        other_ns=busy.total_ns - until[2],
        idle_ns=window.duration_ns - busy.total_ns,
        matrix_work_ns=int(typed["duration_ns"].sum()),
        low_precision_ns=int(typed.filter(pl.col("precision").is_in(LOW_PRECISION))["duration_ns"].sum()),
    )


def _with_engine(trace: Trace) -> pl.DataFrame:
    """`device_work` with is_matrix and precision: as the kernel's name tells, or else its operator's name and types."""
    operators = trace.operators.select(operator_name="name", input_types="input_types").with_row_index("operator")
    launching = trace.launches.select(operator="operator").with_row_index("launch")
    work = trace.device_work.select("name", "device", "queue", "kind", "launch", "start_ns", "duration_ns")
    work = work.join(launching, on="launch", how="left", maintain_order="left")
    work = work.join(operators, on="operator", how="left", maintain_order="left")
    told = {name: arithmetic(name) for name in work["name"].unique().to_list()}
    eligible = {name for name in work["operator_name"].unique().to_list() if name is not None and is_eligible(name)}
    types = {types: _number_type(types) for types in work["input_types"].unique().to_list()}
    is_matrix: npt.NDArray[np.bool_] = np.array(
        [
            engine_of(queue) == "MME" or (engine_of(queue) is None and (told[name].is_matrix or of in eligible))
            for name, of, queue in work.select("name", "operator_name", "queue").iter_rows()
        ],
        np.bool_,
    )
    precision = [told[name].precision or types[of] for name, of in work.select("name", "input_types").iter_rows()]
    return work.with_columns(
        is_matrix=pl.Series(is_matrix, dtype=pl.Boolean), precision=pl.Series(precision, dtype=pl.String)
    )


def _number_type(input_types: str | None) -> str | None:
    """Of the first input that holds floating-point numbers."""
    call = call_of("[]", input_types, None)
    return None if call is None else next((NUMBER_TYPES[one] for one in call.types if one in NUMBER_TYPES), None)
