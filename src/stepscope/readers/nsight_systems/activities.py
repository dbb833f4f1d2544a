"""Convert the CUPTI tables, with device work and the host's API calls, to rows of a trace's tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import polars as pl

from stepscope.readers.nsight_systems.lanes import STREAM_KEYS, TableReader
from stepscope.trace import naming
from stepscope.trace.tables import SCHEMAS, rows_frame

RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
SYNCHRONIZATION: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
EVENT: Final = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
DEVICE_TABLES: Final = (KERNEL, MEMCPY, MEMSET, GRAPH)

_Types = dict[str, type[pl.DataType]]
_VERSION: Final = re.compile(r"_v\d{4,6}$")
"""API version suffix that the profiler appends to a call's name."""
_COPIES: Final[Mapping[int, tuple[str, str]]] = {
    1: ("copy_in", "HtoD"),
    2: ("copy_out", "DtoH"),
    3: ("copy_in", "HtoA"),
    4: ("copy_out", "AtoH"),
    5: ("copy_on_device", "AtoA"),
    6: ("copy_on_device", "AtoD"),
    7: ("copy_on_device", "DtoA"),
    8: ("copy_on_device", "DtoD"),
    9: ("other", "HtoH"),
    10: ("copy_on_device", "PtoP"),
    11: ("copy_in", "HtoD, unified memory"),
    12: ("copy_out", "DtoH, unified memory"),
    13: ("copy_on_device", "DtoD, unified memory"),
}
"""copyKind -> kind of device work, and the direction in the spelling of PyTorch's profiler."""
_MEMORY_KINDS: Final[Mapping[int, str]] = {
    0: "Pageable",
    1: "Pinned",
    2: "Device",
    3: "Array",
    4: "Managed",
    5: "Device Static",
    6: "Managed Static",
}
_SYNCHRONISATIONS: Final[Mapping[int, str]] = {1: "event", 2: "queue_wait", 3: "queue", 4: "device"}
_SYNCHRONISATION_NAMES: Final[Mapping[str, str]] = {
    "event": "Event Sync",
    "queue_wait": "Stream Wait Event",
    "queue": "Stream Sync",
    "device": "Context Sync",
    "other": "Sync",
}
_ON_STREAM: Final[_Types] = dict.fromkeys(("start", "end", *STREAM_KEYS, "correlationId"), pl.Int64)


class Activities(TableReader):
    """Reads the CUPTI tables of one file; call `read` once."""

    def read(self) -> Iterator[None]:
        """Gather all tables, yielding now and then so that the caller can show progress."""
        for batch in self._work(KERNEL, _KERNEL_COLUMNS):
            self._add_work(self._kernels(batch))
            yield
        for batch in self._work(
            MEMCPY, {"bytes": pl.Int64, **dict.fromkeys(("copyKind", "srcKind", "dstKind"), pl.Int64)}
        ):
            self._add_work(self._copies(batch))
            yield
        for batch in self._work(MEMSET, {"bytes": pl.Int64, "memKind": pl.Int64}):
            self._add_work(self._sets(batch))
            yield
        for batch in self._work(GRAPH, {"graphId": pl.Int64}):
            self._add_work(self._graphs(batch))
            yield
        for batch in self._calls():
            self._gathering.add("launches", batch)
            yield
        self._add_synchronisations()
        yield

    def _work(self, table: str, columns: _Types) -> Iterator[pl.DataFrame]:
        where, parameters = self._selection.of_work(table)
        wanted = {**_ON_STREAM, **columns}
        for batch in self._database.batches(table, wanted, where=where, parameters=parameters):
            yield self._placed(table, batch)

    def _placed(self, table: str, batch: pl.DataFrame, *, of_context: bool = False) -> pl.DataFrame:
        correlation = self._lanes.correlations(batch["globalPid"], batch["correlationId"])
        batch = batch.drop("correlationId").with_columns(correlation.alias("correlation"))
        needed = () if of_context else ("device", "queue")
        return self._selection.complete(table, self._lanes.streams(batch, of_context=of_context), *needed)

    def _kernels(self, batch: pl.DataFrame) -> pl.DataFrame:
        name = batch.select(pl.coalesce("demangledName", "shortName")).to_series()
        blocks = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
        count = pl.col("device").replace_strict(self._lanes.multiprocessors(), default=None, return_dtype=pl.Int64)
        return batch.with_columns(
            name=self._strings.codes(name),
            kind=self._strings.words(name, _kernel_kind),
            grid=pl.concat_str("gridX", "gridY", "gridZ", separator=","),
            block=pl.concat_str("blockX", "blockY", "blockZ", separator=","),
            registers=pl.col("registersPerThread"),
            shared_memory_bytes=pl.col("staticSharedMemory") + pl.col("dynamicSharedMemory"),
            blocks_per_multiprocessor=blocks / count,
        )

    def _copies(self, batch: pl.DataFrame) -> pl.DataFrame:
        described = batch.select("copyKind", "srcKind", "dstKind").unique()
        kind_and_name = described.with_columns(
            pl.Series("kind_and_name", [_copy(*row) for row in described.iter_rows()], dtype=pl.List(pl.String))
        )
        return batch.join(
            kind_and_name, on=["copyKind", "srcKind", "dstKind"], how="left", nulls_equal=True, maintain_order="left"
        ).with_columns(kind=pl.col("kind_and_name").list.get(0), name=pl.col("kind_and_name").list.get(1))

    def _sets(self, batch: pl.DataFrame) -> pl.DataFrame:
        where = pl.col("memKind").replace_strict(_MEMORY_KINDS, default="Unknown", return_dtype=pl.String)
        return batch.with_columns(name=pl.format("Memset ({})", where), kind=pl.lit("set"))

    def _graphs(self, batch: pl.DataFrame) -> pl.DataFrame:
        number = pl.col("graphId").cast(pl.String).fill_null("")
        return batch.with_columns(name=pl.concat_str(pl.lit("CUDA graph "), number), kind=pl.lit("compute"))

    def _add_work(self, batch: pl.DataFrame) -> None:
        columns = [name for name in SCHEMAS["device_work"] if name in batch.columns]
        self._gathering.add("device_work", batch.select(columns))

    def _calls(self) -> Iterator[pl.DataFrame]:
        where, parameters = self._selection.of_calls()
        columns: _Types = dict.fromkeys(("start", "end", "globalTid", "correlationId", "nameId"), pl.Int64)
        for batch in self._database.batches(RUNTIME, columns, where=where, parameters=parameters):
            frame = batch.select(
                "start",
                "end",
                self._lanes.threads(batch["globalTid"]).alias("lane"),
                self._strings.codes(batch["nameId"], _without_version).alias("name"),
                self._lanes.correlations(batch["globalTid"], batch["correlationId"]).alias("correlation"),
            )
            yield self._selection.complete(RUNTIME, frame)

    def _add_synchronisations(self) -> None:
        where, parameters = self._selection.overlap(SYNCHRONIZATION)
        columns: _Types = {**_ON_STREAM, "syncType": pl.Int64, "eventSyncId": pl.Int64}
        recorded = self._recorded_events()
        for batch in self._database.batches(SYNCHRONIZATION, columns, where=where, parameters=parameters):
            process = batch["globalPid"]
            batch = self._placed(SYNCHRONIZATION, batch.with_columns(process=process), of_context=True)
            kind = pl.col("syncType").replace_strict(_SYNCHRONISATIONS, default="other", return_dtype=pl.String)
            self._gathering.add(
                "synchronisations",
                batch.join(recorded, on=["process", "eventSyncId"], how="left", maintain_order="left")
                .with_columns(kind=kind)
                .with_columns(name=pl.col("kind").replace_strict(_SYNCHRONISATION_NAMES, return_dtype=pl.String))
                .select(
                    *("start_ns", "duration_ns", "name", "lane", "kind", "correlation", "device", "queue"),
                    *("waited_queue", "waited_correlation"),
                ),
            )

    def _recorded_events(self) -> pl.DataFrame:
        """For each process and event number, the stream and the call that recorded the event."""
        columns: _Types = dict.fromkeys((*STREAM_KEYS, "correlationId", "eventSyncId"), pl.Int64)
        schema: _Types = {
            "process": pl.Int64,
            "eventSyncId": pl.Int64,
            "waited_queue": pl.String,
            "waited_correlation": pl.Int64,
        }
        parts = [pl.DataFrame(schema=schema)]
        for batch in self._database.batches(EVENT, columns):
            batch = batch.filter(pl.col("eventSyncId") > 0).with_columns(process=pl.col("globalPid"))
            batch = batch.with_columns(
                self._lanes.correlations(batch["globalPid"], batch["correlationId"]).alias("waited_correlation")
            )
            parts.append(
                self._lanes.streams(batch, of_context=True)
                .rename({"queue": "waited_queue"})
                .select(pl.col(name).cast(dtype) for name, dtype in schema.items())
            )
        return pl.concat(parts).unique(["process", "eventSyncId"], keep="none")


_KERNEL_COLUMNS: Final[_Types] = dict.fromkeys(
    (
        *("demangledName", "shortName", "registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
        *("staticSharedMemory", "dynamicSharedMemory"),
    ),
    pl.Int64,
)


def _copy(kind: int | None, source: int | None, target: int | None) -> list[str]:
    """An unknown direction is derived from source and target."""
    names_of = [_MEMORY_KINDS.get(-1 if side is None else side, "Unknown") for side in (source, target)]
    found = _COPIES.get(-1 if kind is None else kind)
    if found is None:
        on_host = [name in ("Pageable", "Pinned") for name in names_of]
        if "Unknown" in names_of:
            found = ("other", "Unknown")
        else:
            found = {(True, False): _COPIES[1], (False, True): _COPIES[2], (True, True): _COPIES[9]}.get(
                (on_host[0], on_host[1]), _COPIES[8]
            )
    return [found[0], f"Memcpy {found[1]} ({names_of[0]} -> {names_of[1]})"]


def _kernel_kind(name: str) -> str:
    return "communication" if naming.is_communication(name) else "compute"


def _without_version(name: str) -> str:
    return _VERSION.sub("", name)


HOST_CALLS: Final = ("OSRT_API", "CUDNN_EVENTS", "CUBLAS_EVENTS")
OVERHEADS: Final = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")
SCHEDULING: Final = "SCHED_EVENTS"
MEMORY: Final = "CUDA_GPU_MEMORY_USAGE_EVENTS"
METRICS: Final = "GPU_METRICS"
_METRIC_NAMES: Final = "TARGET_INFO_GPU_METRICS"
_MOST_METRICS: Final = 10_000
_COMPILES: Final[Mapping[int, str]] = {
    2: "Driver JIT compiler",
    6: "Runtime module loading",
    7: "Lazy function loading",
}
"""overheadType of CUDA's own work: loading or compiling a kernel."""
_FULL_QUEUE: Final = 8
"""overheadType of a launch that waits for room in the command buffer because the host is ahead of the device."""
_ON_HOST: Final = (0, 1)
"""memKind of host memory."""


class Others(TableReader):
    """Reads host calls, overheads, scheduling, memory and metrics; call `read` once, after all threads are known."""

    has_memory = False

    def read(self) -> Iterator[None]:
        """Gather all tables, yielding now and then so that the caller can show progress."""
        working = [self._lanes.thread(number) for number in self._lanes.known_threads()]
        for table in HOST_CALLS:
            yield from self._host_calls(table)
        for table in OVERHEADS:
            yield from self._overhead(table, working)
        yield from self._scheduling()
        yield from self._memory()
        yield from self._metrics()

    def _host_calls(self, table: str) -> Iterator[None]:
        for batch in self._slices(table, {}):
            self._add_annotations(batch, "host")
            yield

    def _overhead(self, table: str, working: Sequence[int | None]) -> Iterator[None]:
        """Add the profiler's own work: "overhead" on the program's threads, "profiler" on threads of its own.

        Kernel loading is CUDA's work and counts as compilation.
        """
        for batch in self._slices(table, {"overheadType": pl.Int64}):
            kind = pl.col("overheadType")
            compiles = batch.filter(kind.is_in(list(_COMPILES)))
            name = kind.replace_strict(_COMPILES, default=None, return_dtype=pl.String)
            self._gathering.add(
                "launches", compiles.select(*("start_ns", "duration_ns", "lane"), name=name, kind=pl.lit("compile"))
            )
            self._add_annotations(batch.filter(kind == _FULL_QUEUE), "host")
            is_profilers = ~kind.is_in([*_COMPILES, _FULL_QUEUE]).fill_null(False)
            in_the_way = pl.col("lane").is_in(working)
            self._add_annotations(batch.filter(is_profilers & in_the_way), "overhead")
            self._add_annotations(batch.filter(is_profilers & ~in_the_way), "profiler")
            yield

    def _slices(self, table: str, columns: _Types) -> Iterator[pl.DataFrame]:
        where, parameters = self._selection.overlap(table)
        wanted: _Types = {**dict.fromkeys(("start", "end", "globalTid", "nameId"), pl.Int64), **columns}
        for batch in self._database.batches(table, wanted, where=where, parameters=parameters):
            lanes = self._lanes.threads(batch["globalTid"]).alias("lane")
            names = self._strings.codes(batch["nameId"]).alias("name")
            yield self._selection.complete(table, batch.with_columns(lanes, names))

    def _add_annotations(self, batch: pl.DataFrame, kind: str) -> None:
        self._gathering.add("annotations", batch.select("start_ns", "duration_ns", "name", "lane", kind=pl.lit(kind)))

    def _scheduling(self) -> Iterator[None]:
        """Add a counter for each known thread: 1 while it runs on a processor, else 0."""
        known = self._lanes.known_threads()
        columns: _Types = dict.fromkeys(("start", "globalTid", "isSchedIn"), pl.Int64)
        where, parameters = self._selection.inside(SCHEDULING, "start")
        for batch in self._database.batches(SCHEDULING, columns, where=where, parameters=parameters):
            batch = batch.filter(pl.col("globalTid").is_in(known)).drop_nulls()
            lanes = self._lanes.threads(batch["globalTid"])
            self._add_counters(
                batch.select(
                    start_ns="start", lane=lanes, name=pl.lit("on a processor"), series=pl.lit(""), value="isSchedIn"
                )
            )
            yield

    def _memory(self) -> Iterator[None]:
        columns: _Types = dict.fromkeys(
            ("start", "globalPid", "deviceId", "address", "bytes", "memKind", "memoryOperationType"), pl.Int64
        )
        where, parameters = self._selection.inside(MEMORY, "start")
        for batch in self._database.batches(MEMORY, columns, where=where, parameters=parameters):
            keys = batch.select("globalPid", "deviceId", "memKind").unique(maintain_order=True)
            places = [self._memory_place(*row) for row in keys.iter_rows()]
            found = rows_frame(places, {"lane": pl.Int32, "device": pl.String})
            rows = batch.join(
                pl.concat([keys, found], how="horizontal"), on=keys.columns, how="left", nulls_equal=True
            ).filter(pl.all_horizontal(pl.col("start", "lane", "bytes", "memoryOperationType").is_not_null()))
            if rows.height < batch.height:
                self._gathering.damage[f"incomplete_row:{MEMORY}"] += batch.height - rows.height
            taken = pl.when(pl.col("memoryOperationType") == 0).then(pl.col("bytes")).otherwise(-pl.col("bytes"))
            self._gathering.add("memory", rows.select("lane", "device", "address", start_ns="start", bytes=taken))
            self.has_memory |= rows.height > 0
            yield

    def _memory_place(self, process: int | None, device: int | None, kind: int | None) -> tuple[int | None, str]:
        lane = self._lanes.other(("memory",), "CUDA memory", process)
        return lane, "cpu" if kind in _ON_HOST else self._lanes.device(process, device or 0)

    def _metrics(self) -> Iterator[None]:
        """Add the sampled GPU counters; the lowest byte of `typeId` is the GPU."""
        described = self._database.whole(
            _METRIC_NAMES, {"typeId": pl.Int64, "metricId": pl.Int64, "metricName": pl.String}, _MOST_METRICS
        ).unique(["typeId", "metricId"], keep="first")
        columns: _Types = {"timestamp": pl.Int64, "typeId": pl.Int64, "metricId": pl.Int64, "value": pl.Float64}
        where, parameters = self._selection.inside(METRICS, "timestamp")
        for batch in self._database.batches(METRICS, columns, where=where, parameters=parameters):
            batch = batch.drop_nulls().join(described, on=["typeId", "metricId"], how="left", maintain_order="left")
            gpu = pl.col("typeId") % 256
            lane = self._lanes.other(("metrics",), "GPU counters")
            self._add_counters(
                batch.select(
                    start_ns="timestamp",
                    lane=pl.lit(lane, pl.Int32),
                    name=pl.col("metricName").fill_null(pl.format("metric {}", "metricId")),
                    series=pl.format("GPU {}", gpu),
                    value="value",
                )
            )
            yield

    def _add_counters(self, frame: pl.DataFrame) -> None:
        self._gathering.add("counters", frame.filter(pl.col("lane").is_not_null()))
