"""The tables beside CUDA and NVTX: the operating system's calls and scheduler, overhead, memory, sampled counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import polars as pl

from stepscope.readers.nsight_systems.tables import TableReader
from stepscope.trace.tables import rows_frame

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
"""overheadType of what CUDA itself does: it loads or compiles a kernel."""
_FULL_QUEUE: Final = 8
"""overheadType of a launch that waits for room in the command buffer: the host is ahead of the device."""
_ON_HOST: Final = (0, 1)
"""memKind of memory of the host."""
_Types = dict[str, type[pl.DataType]]


class Others(TableReader):
    """Reads these tables of one file; call `read` once, after the threads that matter are known.

    Attributes:
        has_memory: whether allocations were recorded.
    """

    has_memory = False

    def read(self) -> Iterator[None]:
        """Gather all of it; stops now and then for the caller to show progress."""
        working = [self._places.thread(number) for number in self._places.known_threads()]
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
        """The profiler's own work, which is overhead on the program's threads, but not on threads of its own.

        What CUDA does to load kernels is a compilation, and none of the profiler's.
        """
        for batch in self._slices(table, {"overheadType": pl.Int64}):
            kind = pl.col("overheadType")
            compiles = batch.filter(kind.is_in(list(_COMPILES)))
            name = kind.replace_strict(_COMPILES, default=None, return_dtype=pl.String)
            self._gathering.add(
                "launches",
                compiles.select(
                    *("start_ns", "duration_ns", "lane"),
                    name=name,
                    kind=pl.lit("compile"),
                    correlation=pl.lit(None, pl.Int64),
                ),
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
            lanes = self._places.threads(batch["globalTid"]).alias("lane")
            names = self._strings.codes(batch["nameId"]).alias("name")
            yield self._selection.complete(table, batch.with_columns(lanes, names))

    def _add_annotations(self, batch: pl.DataFrame, kind: str) -> None:
        self._gathering.add(
            "annotations",
            batch.select("start_ns", "duration_ns", "name", "lane", kind=pl.lit(kind), step=pl.lit(None, pl.Int64)),
        )

    def _scheduling(self) -> Iterator[None]:
        """When each thread that did something else runs on a processor (1) and when it does not (0)."""
        known = self._places.known_threads()
        columns: _Types = dict.fromkeys(("start", "globalTid", "isSchedIn"), pl.Int64)
        where, parameters = self._selection.inside(SCHEDULING, "start")
        for batch in self._database.batches(SCHEDULING, columns, where=where, parameters=parameters):
            batch = batch.filter(pl.col("globalTid").is_in(known)).drop_nulls()
            lanes = self._places.threads(batch["globalTid"])
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
        lane = self._places.other(("memory",), "CUDA memory", process)
        return lane, "cpu" if kind in _ON_HOST else self._places.device(process, device or 0)

    def _metrics(self) -> Iterator[None]:
        """Sampled counters of the GPUs; the lowest byte of a kind of counter is the GPU."""
        described = self._database.whole(
            _METRIC_NAMES, {"typeId": pl.Int64, "metricId": pl.Int64, "metricName": pl.String}, _MOST_METRICS
        ).unique(["typeId", "metricId"], keep="first")
        columns: _Types = {"timestamp": pl.Int64, "typeId": pl.Int64, "metricId": pl.Int64, "value": pl.Float64}
        where, parameters = self._selection.inside(METRICS, "timestamp")
        for batch in self._database.batches(METRICS, columns, where=where, parameters=parameters):
            batch = batch.drop_nulls().join(described, on=["typeId", "metricId"], how="left", maintain_order="left")
            gpu = pl.col("typeId") % 256
            lane = self._places.other(("metrics",), "GPU counters")
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
