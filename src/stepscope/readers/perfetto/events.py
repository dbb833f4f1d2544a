"""Convert track events to rows of the trace's tables; slices are held until their ends, which may be anywhere."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.assembly import Spill
from stepscope.readers.gathering import Gathering, fitting
from stepscope.readers.kineto.arguments import (
    ANNOTATION_CATEGORIES,
    DEVICE_CATEGORIES,
    FRAME_CATEGORIES,
    LAUNCH_CATEGORIES,
    OPERATOR_CATEGORIES,
    SYNCHRONISATION_CATEGORIES,
    device_work_kind,
)
from stepscope.readers.perfetto.sequences import NUMBERS, Sequence, Tracks, plain
from stepscope.trace import naming
from stepscope.trace.tables import SCHEMAS, VOCABULARY

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import GpuRenderStageEvent, TrackEvent


MEMORY_NAME: Final = "[memory]"
"""Name of the instants that become rows of `memory`."""

CATEGORIES: Final[Mapping[str, Mapping[str | None, str]]] = {
    "operators": {None: "cpu_op"},
    "launches": {None: "cuda_runtime"},
    "device_work": {
        None: "kernel",
        "copy_in": "gpu_memcpy",
        "copy_out": "gpu_memcpy",
        "copy_on_device": "gpu_memcpy",
        "set": "gpu_memset",
    },
    "frames": {None: "python_function"},
    "lines": {None: "user_annotation"},
    "modules": {None: "user_annotation"},
    "annotations": {
        None: "user_annotation",
        "device": "gpu_user_annotation",
        "overhead": "overhead",
        "profiler": "trace",
    },
    "synchronisations": {None: "cuda_sync"},
    "memory": {None: "cpu_instant_event"},
}
"""Table -> the row's `kind` (None for all others) -> category of its event."""

ANNOTATIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "operators": {
        "sequence_number": "Sequence number",
        "forward_thread": "Fwd thread id",
        "external_id": "External id",
        "input_shapes": "Input Dims",
        "input_types": "Input type",
        "input_values": "Concrete Inputs",
        "call_stack": "Call stack",
        "source_file": "source_file",
        "source_line": "source_line",
        "source_function": "source_function",
        "scope": "scope",
    },
    "launches": {
        "kind": "kind",
        "correlation": "correlation",
        "external_id": "External id",
        "bytes": "bytes",
        "kernel": "kernel",
    },
    "device_work": {
        "kind": "kind",
        "device": "device",
        "queue": "stream",
        "correlation": "correlation",
        "external_id": "External id",
        "bytes": "bytes",
        "grid": "grid",
        "block": "block",
        "registers": "registers per thread",
        "shared_memory_bytes": "shared memory",
        "occupancy": "occupancy",
        "blocks_per_multiprocessor": "blocks per SM",
        "collective": "Collective name",
        "group": "Process Group Name",
        "group_size": "Group size",
        "group_ranks": "Process Group Ranks",
        "group_description": "Process Group Description",
        "source_rank": "Src Rank",
        "target_rank": "Dst Rank",
        "message_elements": "In msg nelems",
        "message_type": "dtype",
        "call_stack": "Call stack",
        "scope": "scope",
        "module": "module_fqn",
    },
    "frames": {"python_id": "Python id", "file": "file", "line": "line", "function": "function", "module": "module"},
    "lines": {"file": "file", "line": "line", "function": "function"},
    "modules": {"evaluates": "evaluates"},
    "annotations": {"kind": "kind", "step": "step", "call_stack": "Call stack"},
    "synchronisations": {
        "kind": "kind",
        "correlation": "correlation",
        "device": "device",
        "queue": "stream",
        "waited_queue": "wait_on_stream",
        "waited_correlation": "wait_on_cuda_event_record_corr_id",
    },
    "memory": {
        "device": "device",
        "address": "Addr",
        "bytes": "Bytes",
        "total_allocated": "Total Allocated",
        "total_reserved": "Total Reserved",
        "call_stack": "Call stack",
    },
}
"""Table -> column -> name of its debug annotation; Kineto's name where Kineto has one."""


def category(table: str, kind: str | None) -> str:
    """Return the category of the event for a row of this table and kind."""
    words = CATEGORIES[table]
    return words.get(kind, words[None])


_OTHER_NAMES: Final = {
    "operators": {"external id": "external_id"},
    "launches": {"external id": "external_id", "corr_id": "correlation"},
    "device_work": {
        "external id": "external_id",
        "corr_id": "correlation",
        "copy_bytes": "bytes",
        "size": "bytes",
        "queue": "queue",
        "agent": "device",
        "dst_agent": "device",
        "group_segment_size": "shared_memory_bytes",
        "est. achieved occupancy %": "occupancy",
    },
    "synchronisations": {"cuda_sync_kind": "kind"},
    "memory": {"Device Id": "device"},
}
"""Alternative argument names -> columns, from older files and other tools."""
ARGUMENTS: Final = {
    table: {name: column for column, name in columns.items()} | _OTHER_NAMES.get(table, {})
    for table, columns in ANNOTATIONS.items()
}
"""Table -> argument name -> column."""


_TABLE_OF_CATEGORY: Final = {
    **dict.fromkeys((*OPERATOR_CATEGORIES, "rccl_api"), "operators"),
    **dict.fromkeys((*LAUNCH_CATEGORIES, "hip_api", "hsa_api"), "launches"),
    **dict.fromkeys((*DEVICE_CATEGORIES, "kernel_dispatch", "memory_copy"), "device_work"),
    **dict.fromkeys(FRAME_CATEGORIES, "frames"),
    **dict.fromkeys(SYNCHRONISATION_CATEGORIES, "synchronisations"),
    **dict.fromkeys(ANNOTATION_CATEGORIES, "annotations"),
    "marker_api": None,
}
"""Known categories -> table, including those of rocprofv3; a marker is classified by its name."""


@lru_cache(maxsize=65536)
def table_of(category: str, name: str) -> tuple[str, str | None]:
    """Return a slice's table, and its kind if the table has kinds; an unknown category falls back to the name."""
    lowered = category.lower()
    table = _TABLE_OF_CATEGORY.get(lowered) or naming.host_slice_table(name) or "annotations"
    if table == "operators" and lowered in OPERATOR_CATEGORIES and naming.is_annotation(name):
        table = "annotations"
    if table == "launches":
        return table, naming.launch_kind(name)
    if table == "device_work":
        is_copy = lowered == "memory_copy"
        return table, naming.copy_kind(name) if is_copy else device_work_kind(lowered, name, None)
    if table == "synchronisations":
        return table, naming.synchronisation_kind(name)
    return table, ANNOTATION_CATEGORIES.get(lowered, "host") if table == "annotations" else None


def is_known(category: str) -> bool:
    """Whether the category determines the table."""
    return category.lower() in _TABLE_OF_CATEGORY


def _percent(value: Any) -> Any:
    return value / 100 if isinstance(value, (int, float)) else None


CHANGES: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("device_work", "est. achieved occupancy %"): _percent,
    ("synchronisations", "cuda_sync_kind"): lambda value: naming.synchronisation_kind(str(value)),
    ("memory", "Device Id"): lambda value: "cpu" if value == -1 else value,
}
"""(table, argument name) -> function that converts the value."""


_CHANGED: Final = frozenset(name for _, name in CHANGES)


def text(value: Any) -> str | None:
    """Convert an argument to text; values other than text and numbers become JSON."""
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else json.dumps(value)


def integer(value: Any) -> int | None:
    """Convert an argument to a 64-bit integer; None if it is not one."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


def _integers(values: list[Any]) -> pl.Series:
    try:
        return pl.Series(values, dtype=pl.Int64, strict=True)  # nearly always
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return pl.Series([integer(value) for value in values], dtype=pl.Int64)


def number(value: Any) -> float | None:
    """Convert an argument to a float; None if it is not a number."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


UNKNOWN_NS: Final = -1
"""Duration of a slice without an end in the file."""


class Ends:
    """Pairs begins and ends of slices; `unmatched` ends close nothing, `unclosed` begins have no end."""

    def __init__(self) -> None:
        self._times = array("q")
        self._tracks = array("q")
        self._numbers = array("q")
        self.count = 0
        self.unmatched = 0
        self.unclosed = 0

    def begin(self, track: int, time_ns: int) -> int:
        """Begin a slice and return its number."""
        number = self.count
        self.count += 1
        self._note(track, time_ns, number)
        return number

    def end(self, track: int, time_ns: int) -> None:
        """End the last slice that began on this track."""
        self._note(track, time_ns, -1)

    def _note(self, track: int, time_ns: int, number: int) -> None:
        self._times.append(time_ns)
        self._tracks.append(track)
        self._numbers.append(number)

    def durations(self) -> npt.NDArray[np.int64]:
        """Return each slice's duration in ns by number, UNKNOWN_NS without an end.

        Events at equal times keep the file's order.
        """
        times = np.frombuffer(self._times, np.int64)
        numbers = np.frombuffer(self._numbers, np.int64)
        tracks = np.frombuffer(self._tracks, np.int64)
        order = np.lexsort((np.arange(len(times)), times, tracks))
        result = np.full(self.count, UNKNOWN_NS, np.int64)
        stack: list[tuple[int, int]] = []
        durations: list[tuple[int, int]] = []
        current = -1
        for track, time, number in zip(
            tracks[order].tolist(), times[order].tolist(), numbers[order].tolist(), strict=True
        ):
            if track != current:
                current = track
                stack.clear()
            if number >= 0:
                stack.append((number, time))
            elif stack:
                began, begin_time = stack.pop()
                durations.append((began, time - begin_time))
            else:
                self.unmatched += 1
        if durations:
            closed, lengths = np.array(durations, np.int64).T
            result[closed] = lengths
        self.unclosed = int((result == UNKNOWN_NS).sum())
        return result


_BATCH_ROWS: Final = 50_000
_BEGIN, _END, _INSTANT, _COUNTER, _COMPLETE = 1, 2, 3, 4, 100
_PHASES: Final = {
    ord("B"): _BEGIN,
    ord("E"): _END,
    ord("X"): _COMPLETE,
    ord("I"): _INSTANT,
    ord("i"): _INSTANT,
    ord("R"): _INSTANT,
}
_HOST_TABLES: Final = frozenset({"operators", "launches", "frames"})


class Events:
    """The events of a file: rows without lanes and durations at first, and finished rows once all events were seen."""

    def __init__(self, gathering: Gathering, tracks: Tracks, directory: Path) -> None:
        self._gathering = gathering
        self._damage: Counter[str] = gathering.damage
        self._tracks = tracks
        self._ends = Ends()
        self._spill = Spill(directory)
        self._held: dict[str, list[tuple[int, int, str, int, dict[str, Any]]]] = {}
        self._known: set[str] = set()
        self._host_tracks: set[int] = set()
        self._totals: dict[int, float] = {}
        self._flows = (array("Q"), array("q"), array("b"))  # flow, slice, whether the flow ends there
        self._tables: list[str] = []
        self._table_of_slice = array("b")

    def add(self, event: TrackEvent, sequence: Sequence, time_ns: int) -> None:
        kind = event.type or _PHASES.get(event.legacy_event.phase, 0)
        place = self._place(event, sequence)
        if kind == _END:
            self._ends.end(self._tracks.code(place), time_ns)
        elif kind in (_BEGIN, _COMPLETE):
            self._add_slice(event, sequence, self._tracks.code(place), time_ns)
            if kind == _COMPLETE:
                duration_ns = max(0, event.legacy_event.duration_us) * 1000
                self._ends.end(self._tracks.code(place), time_ns + duration_ns)
        elif kind == _COUNTER:
            self._add_counter(event, self._tracks.code(place), time_ns)
        elif kind == _INSTANT:
            self._add_instant(event, sequence, self._tracks.code(place), time_ns)
        else:
            self._damage["unknown_event"] += 1

    def add_stage(self, stage: GpuRenderStageEvent, sequence: Sequence, time_ns: int) -> None:
        """Add a stage of graphics or compute work on a GPU."""
        queue = stage.hw_queue_iid or stage.hw_queue_id
        track = self._tracks.code(-1 - (stage.gpu_id % 2**20 * 2**32 + queue % 2**32))
        stage_name = plain(getattr(stage, "name", ""), self._damage)  # only newer protobuf definitions have this field
        name = stage_name or sequence.stage(stage.stage_iid, f"stage {stage.stage_iid or stage.stage_id}")
        number = self._ends.begin(track, time_ns)
        self._ends.end(track, time_ns + min(stage.duration, 2**62))
        self._note_table("device_work")
        self._tracks.works_for(track, str(stage.gpu_id), sequence.stage(stage.hw_queue_iid, str(queue)))
        self._hold("device_work", number, time_ns, name, track, {"kind": device_work_kind("", name, None)})

    def _place(self, event: TrackEvent, sequence: Sequence) -> int | tuple[int, int]:
        """The event's track, or (process, thread) in files without tracks."""
        if event.HasField("track_uuid"):
            return int(event.track_uuid)
        if event.legacy_event.pid_override or event.legacy_event.tid_override:
            process, thread = sequence.thread or (0, 0)
            return event.legacy_event.pid_override or process, event.legacy_event.tid_override or thread
        if sequence.track is not None:
            return sequence.track
        return sequence.thread or 0

    def _add_slice(self, event: TrackEvent, sequence: Sequence, track: int, time_ns: int) -> None:
        name, category = sequence.name(event), sequence.category(event)
        if name is None:
            self._damage["lost_name"] += 1
            name = ""
        table, kind = table_of(category, name)
        columns: dict[str, Any] = {} if kind is None else {"kind": kind}
        if category not in self._known:
            if is_known(category):
                self._known.add(category)
            else:
                self._damage[f"unknown_category:{category[:40]}"] += 1
        self._read_arguments(event, sequence, table, columns)
        number = self._ends.begin(track, time_ns)
        self._note_table(table)
        self._note_flows(event, number)
        if table in _HOST_TABLES:
            self._host_tracks.add(track)
        elif table == "device_work":
            self._tracks.works_for(track, text(columns.get("device")), text(columns.get("queue")))
        self._hold(table, number, time_ns, name, track, columns)

    def _read_arguments(self, event: TrackEvent, sequence: Sequence, table: str, columns: dict[str, Any]) -> None:
        wanted = ARGUMENTS[table]
        for annotation in event.debug_annotations:
            name = annotation.name
            if annotation.name_iid or not name.isascii():
                name = sequence.annotation_name(annotation)
            column = wanted.get(name)
            if column is None:
                continue
            kind = annotation.WhichOneof("value")
            value = getattr(annotation, kind) if kind in NUMBERS else sequence.value(annotation)
            if name in _CHANGED and (table, name) in CHANGES:
                value = CHANGES[table, name](value)
            if value is not None and not (column == "kind" and table != "synchronisations"):
                columns[column] = value

    def _add_instant(self, event: TrackEvent, sequence: Sequence, track: int, time_ns: int) -> None:
        if sequence.name(event) != MEMORY_NAME:
            self._damage["unused_instant"] += 1
            return
        columns: dict[str, Any] = {}
        self._read_arguments(event, sequence, "memory", columns)
        self._hold("memory", -1, time_ns, "", track, columns)

    def _add_counter(self, event: TrackEvent, track: int, time_ns: int) -> None:
        name, is_incremental, unit = self._tracks.counter(track)
        value = (
            event.double_counter_value if event.HasField("double_counter_value") else float(event.counter_value)
        ) * unit
        if is_incremental:
            value = self._totals[track] = self._totals.get(track, 0.0) + value
        columns = {"series": None, "value": value}
        self._hold("counters", -1, time_ns, name, track, columns)

    def _note_table(self, table: str) -> None:
        if table not in self._tables:
            self._tables.append(table)
        self._table_of_slice.append(self._tables.index(table))

    def _note_flows(self, event: TrackEvent, number: int) -> None:
        flows, slices, ends = self._flows
        for terminating, numbers in (
            (0, event.flow_ids),
            (0, event.flow_ids_old),
            (1, event.terminating_flow_ids),
            (1, event.terminating_flow_ids_old),
        ):
            if numbers:  # to walk through an empty one takes ten times as long
                for flow in numbers:
                    flows.append(flow)
                    slices.append(number)
                    ends.append(terminating)

    def _hold(self, table: str, number: int, time_ns: int, name: str, track: int, columns: dict[str, Any]) -> None:
        rows = self._held.setdefault(table, [])
        rows.append((number, time_ns, name, track, columns))
        if len(rows) >= _BATCH_ROWS:
            self._set_aside(table)

    def _set_aside(self, table: str) -> None:
        rows = self._held.pop(table, [])
        pool = self._gathering.pool
        series: dict[str, pl.Series] = {
            "slice": pl.Series([row[0] for row in rows], dtype=pl.Int64),
            "start_ns": pl.Series([row[1] for row in rows], dtype=pl.Int64),
            "track": pl.Series([row[3] for row in rows], dtype=pl.Int64),
        }
        if "name" in SCHEMAS[table]:
            series["name"] = pool.codes([row[2] for row in rows])
        given = set().union(*(row[4] for row in rows))
        for column in _argument_columns(table):
            dtype = SCHEMAS[table][column]
            if column not in given:
                kind = pl.UInt32 if dtype is pl.String else dtype
                series[column] = pl.repeat(None, len(rows), dtype=kind, eager=True)
                continue
            values = [row[4].get(column) for row in rows]
            if dtype is pl.String:
                known = VOCABULARY.get((table, column))
                texts = [value if value is None or type(value) is str else text(value) for value in values]
                series[column] = pool.optional_codes(
                    texts if known is None else [text if text in known else None for text in texts]
                )
            elif dtype is pl.Float64:
                series[column] = pl.Series([number(value) for value in values], dtype=pl.Float64)
            else:
                wide = _integers(values)
                series[column] = fitting(column, wide, dtype, self._gathering.damage)
        self._spill.add({table: pl.DataFrame(series)})

    def finish(self) -> None:
        """Give every row its lane and duration, and add it to the gathering."""
        for table in list(self._held):
            self._set_aside(table)
        durations = self._ends.durations()
        self._damage["unmatched_end"] += self._ends.unmatched
        self._damage["unclosed_slice"] += self._ends.unclosed
        lanes: dict[int, int] = {}
        starts = np.zeros(len(durations), np.int64)
        lane_of_slice = np.full(len(durations), -1, np.int64)
        for table in (*self._tables, "memory", "counters"):
            rows = self._spill.take(table)
            if rows is None:
                continue
            codes = rows["track"].unique().sort().to_list()
            for code in codes:
                if code not in lanes:
                    is_host = code in self._host_tracks
                    lanes[code] = self._tracks.lane(code, self._gathering, is_host=is_host)
            rows = rows.with_columns(lane=rows["track"].replace_strict(lanes, return_dtype=pl.Int32))
            if table in ("memory", "counters"):
                self._gathering.add(table, self._finished(table, rows))
                continue
            numbers = rows["slice"].to_numpy()
            starts[numbers], lane_of_slice[numbers] = rows["start_ns"].to_numpy(), rows["lane"].to_numpy()
            rows = rows.with_columns(duration_ns=pl.Series(durations[numbers], dtype=pl.Int64))
            self._gathering.add(table, self._finished(table, rows.filter(pl.col("duration_ns") != UNKNOWN_NS)))
        self._spill.clean()
        self._add_flows(starts, lane_of_slice)

    def _finished(self, table: str, rows: pl.DataFrame) -> pl.DataFrame:
        if table == "device_work":
            rows = self._with_queues(rows)
        follow_from_names = {"frames": ["file", "line", "function", "module"], "annotations": ["step"]}
        absent = [name for name in follow_from_names.get(table, []) if rows[name].null_count() == rows.height]
        return rows.drop("slice", "track", *absent)

    def _with_queues(self, rows: pl.DataFrame) -> pl.DataFrame:
        codes = rows["track"].unique().to_list()
        places = [self._tracks.queue(code) for code in codes]
        pool = self._gathering.pool
        queues = pl.DataFrame(
            {
                "track": pl.Series(codes, dtype=pl.Int64),
                "device_of_track": pool.codes([device for device, _ in places]),
                "queue_of_track": pool.codes([queue for _, queue in places]),
            }
        )
        rows = rows.join(queues, on="track", how="left", maintain_order="left")
        return rows.with_columns(
            device=pl.col("device").fill_null(pl.col("device_of_track")),
            queue=pl.col("queue").fill_null(pl.col("queue_of_track")),
        ).drop("device_of_track", "queue_of_track")

    def _add_flows(self, starts: npt.NDArray[np.int64], lanes: npt.NDArray[np.int64]) -> None:
        """A flow between operators leads to the backward operator, any other from a call to its device work."""
        if not len(self._flows[0]):
            return
        flows, slices, ends = (pl.Series(each) for each in self._flows)
        numbers = slices.to_numpy()
        tables = np.frombuffer(self._table_of_slice, np.int8)[numbers]
        found = pl.DataFrame(
            {
                "flow": flows,
                "ends": ends,
                "start_ns": starts[numbers],
                "lane": lanes[numbers],
                "table": pl.Series(tables),
            }
        ).filter(pl.col("lane") >= 0)
        found = found.sort("flow", "ends", "start_ns", maintain_order=True)
        first = pl.int_range(pl.len()).over("flow") == 0
        of = {table: number for number, table in enumerate(self._tables)}
        operators = (pl.col("table") == of.get("operators", -1)).all().over("flow")
        rows = found.with_columns(
            end=pl.when(first).then(pl.lit("source")).otherwise(pl.lit("target")),
            category=pl.when(operators).then(pl.lit("fwdbwd")).otherwise(pl.lit("launch")),
            flow=pl.col("flow").cast(pl.String),
        )
        self._gathering.add_flows(rows.select("start_ns", "lane", "end", "category", "flow"))


def _argument_columns(table: str) -> Iterator[str]:
    left_out = {"start_ns", "duration_ns", "name", "lane", "parent", "operator", "launch"}
    return (column for column in SCHEMAS[table] if column not in left_out)
