"""Breakdown of each device's and each queue's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import DEVICE_CAUSES, covered_by, host_time
from stepscope.analysis.idle import Windows, device_window
from stepscope.analysis.operators import described_work, has_four_bits, kernel_class
from stepscope.analysis.work import NUMBER_TYPES, call_of
from stepscope.trace import Trace, Window
from stepscope.trace.window import IntervalSet

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


def device_time(trace: Trace, *, window: Windows = None) -> pl.DataFrame:
    """Device time, one row per device; every time is the length of a union over the device's queues.

    Returns:
        Columns as in DEVICE_TIME_SCHEMA. `window_ns` runs from the first to the last work, or is the chosen window;
        `busy_ns + idle_ns == window_ns`. `exposed_*` is time not covered by compute work. Memory sets count as busy
            only.
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
    """Duty cycle of each device per step: the share of the step in which any of its queues worked, 0 to 1.

    Args:
        steps: as from `stepscope.analysis.steps.step_table`.

    Returns:
        A row for each step, in order, with a column device_<name>_busy_share for each device.
    """
    starts, ends = steps["start_ns"].to_numpy(), (steps["start_ns"] + steps["duration_ns"]).to_numpy()
    columns = []
    for device in trace.working_devices:
        busy = covered_by(trace.device_work.filter(pl.col("device") == device))
        share = np.divide(busy.overlap_of(starts, ends), ends - starts, out=np.zeros(len(starts)), where=ends > starts)
        columns.append(pl.Series(f"device_{device}_busy_share", share))
    return pl.DataFrame(columns)


def busy_intervals(work: pl.DataFrame, window: Window) -> IntervalSet:
    """Union of rows of `device_work`, inside the window."""
    return covered_by(work).clip(window.start_ns, window.end_ns)


def queue_time(trace: Trace) -> pl.DataFrame:
    """Queue time, one row per queue, each device's busiest first; columns as in QUEUE_TIME_SCHEMA."""
    rows = []
    for (device, queue), work in trace.device_work.group_by("device", "queue"):
        span = device_window(trace, str(device))
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
"""Engine -> what it does, in order of priority: the first active engine gets the time."""
_BY_QUEUE: Final = {"MME": "MME", "TPC": "TPC", "NIC": "NIC", **dict.fromkeys(("DMA", "EDMA", "PDMA", "KDMA"), "DMA")}
_COMPUTING: Final = ("MME", "TPC")


@dataclass(frozen=True, slots=True)
class EngineTime:
    """One engine's part of a device's window, in whole nanoseconds."""

    engine: str
    busy_ns: int  # time in which any of its units worked
    exposed_ns: int  # time in which no engine before it in ENGINES worked


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Division of a device's window: the engines' exposed_ns + idle_ns == window_ns."""

    device: str
    window_ns: int
    idle_ns: int
    computing_together_ns: int  # time in which both MME and TPC worked
    engines: tuple[EngineTime, ...]  # engines with any work, in the order of ENGINES


def engine_uses(trace: Trace) -> tuple[EngineUse, ...]:
    """Use of every device whose queues are engines, by device name."""
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
    both = [busy[engine] for engine in _COMPUTING if engine in busy]
    together = both[0].overlap_ns(both[1]) if len(both) == 2 else 0
    return EngineUse(device, window.duration_ns, window.duration_ns - covered, together, tuple(times))


LOW_PRECISION: tuple[str, ...] = ("fp16", "bf16", "fp8", "fp4", "int8")
GRAPH_BUILDING: tuple[str, ...] = ("dispatch", "optimizer", "python", "graph_tracing", "step_marker")
WAITING: tuple[str, ...] = ("synchronisation", "untraced", "unknown", *DEVICE_CAUSES)
"""Host causes in which the host did nothing for the program, as far as the trace shows."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Use of one device over its window, in whole nanoseconds.

    Times are unions over the device's queues: matrix_ns + vector_only_ns + unknown_only_ns + communication_only_ns +
    copy_only_ns + other_ns + idle_ns == window_ns.
    """

    device: str
    window_ns: int  # from the first work's start to the last one's end, limited to the part that was read
    busy_ns: int  # time in which any queue worked
    host_ns: int  # time in the window in which the main host thread worked, without waits for a device
    both_ns: int  # time in which both device and host worked
    matrix_ns: int  # time in which matrix work ran
    vector_ns: int  # time in which other computation ran
    both_engines_ns: int  # time in which both ran
    vector_only_ns: int  # vector_ns - both_engines_ns
    unknown_only_ns: int  # computation of which neither name nor operator tells what it is, where no other ran
    communication_only_ns: int  # collectives not covered by computation
    copy_only_ns: int  # copies not covered by computation or collectives
    other_ns: int  # rest of the busy time: memory sets and work of unknown kind
    idle_ns: int  # window_ns - busy_ns
    matrix_work_ns: int  # total duration of matrix kernels with a known number type
    low_precision_ns: int  # part of matrix_work_ns in 16 bits or fewer
    four_bits_ns: int = 0  # part of matrix_work_ns with weights or inputs of 4 bits

    @property
    def device_ratio(self) -> float:
        """busy_ns / window_ns: share of time in which the device worked, 0 to 1."""
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
        """both_ns / min(busy_ns, host_ns): 1 if device and host never waited for each other; None without either."""
        least = min(self.busy_ns, self.host_ns)
        return self.both_ns / least if least else None


@dataclass(frozen=True, slots=True)
class HostUse:
    """Use of the main host thread's recorded time, in whole nanoseconds; the parts need not add up to window_ns."""

    window_ns: int
    graph_build_ns: int  # preparing work: operators, launches, the optimizer and Python between them
    loader_ns: int
    input_copy_ns: int
    compile_ns: int
    waiting_ns: int
    compute_ns: int  # computing on a machine without a device


def host_use(pieces: pl.DataFrame) -> HostUse | None:
    """Sum up the pieces of `host_time`; None if there are none."""
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


def device_uses(
    trace: Trace, main_thread: pl.DataFrame | None = None, *, window: Windows = None
) -> tuple[DeviceUse, ...]:
    """Use of each device with work.

    Args:
        main_thread: what `host_time` gives, if it is known.
    """
    names = trace.working_devices
    if not names:
        return ()
    main_thread = host_time(trace) if main_thread is None else main_thread
    working = covered_by(main_thread.filter(~pl.col("cause").is_in(WAITING)))
    work = _with_engine(trace)
    return tuple(
        _device_use(name, work.filter(pl.col("device") == name), working, device_window(trace, name, window))
        for name in names
    )


def _device_use(name: str, work: pl.DataFrame, working: IntervalSet, window: Window) -> DeviceUse:
    busy = busy_intervals(work, window)
    compute = work.filter(pl.col("kind") == "compute")
    matrix = busy_intervals(compute.filter("is_matrix"), window)
    vector = busy_intervals(compute.filter(~pl.col("is_matrix") & ~pl.col("is_unknown")), window)
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
        unknown_only_ns=until[0] - matrix.total_ns - vector.total_ns + both_engines,
        communication_only_ns=until[1] - until[0],
        copy_only_ns=until[2] - until[1],
        other_ns=busy.total_ns - until[2],
        idle_ns=window.duration_ns - busy.total_ns,
        matrix_work_ns=int(typed["duration_ns"].sum()),
        low_precision_ns=int(typed.filter(pl.col("precision").is_in(LOW_PRECISION))["duration_ns"].sum()),
        four_bits_ns=int(
            typed.filter(pl.Series(map(has_four_bits, typed["name"]), dtype=pl.Boolean))["duration_ns"].sum()
        ),
    )


def _with_engine(trace: Trace) -> pl.DataFrame:
    """Add is_matrix, is_unknown and precision to `device_work`: by kernels' names, else operators' names and types."""
    work = described_work(trace)
    types = work["input_types"].drop_nulls().unique().to_list()
    of_operator = pl.col("input_types").replace_strict(
        types, [_number_type(each) for each in types], default=None, return_dtype=pl.String
    )
    engine = pl.col("queue").replace_strict(_BY_QUEUE, default=None, return_dtype=pl.String)
    by_name = pl.col("is_matrix") | pl.col("is_eligible").fill_null(False)
    names = work["name"].unique().to_list()
    nameless = [name for name in names if not kernel_class(name or "").kind]
    is_unknown = pl.col("name").is_in(nameless) & ~pl.col("operator").str.starts_with("aten::").fill_null(False)
    return work.with_columns(
        is_unknown=is_unknown & ~by_name & engine.is_null(),
        is_matrix=pl.when(engine.is_null()).then(by_name).otherwise(engine == "MME"),
        precision=pl.coalesce("precision", of_operator),
    )


def _number_type(input_types: str | None) -> str | None:
    """Number type of the first floating-point input."""
    call = call_of("[]", input_types, None)
    return None if call is None else next((NUMBER_TYPES[one] for one in call.types if one in NUMBER_TYPES), None)
