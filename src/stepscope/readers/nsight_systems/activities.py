"""What devices did and what the host asked of them: the CUPTI tables, into rows of a trace's tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import polars as pl

from stepscope.readers import names
from stepscope.readers.nsight_systems.places import STREAM_KEYS
from stepscope.readers.nsight_systems.tables import TableReader

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
"""What the profiler appends to a call's name: the version of the interface."""
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
"""copyKind -> kind of device work, and the direction as PyTorch's profiler writes it."""
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
_WORK_TEXT: Final = ("name", "kind", "device", "queue", "grid", "block")
_WORK_NUMBERS: Final[_Types] = {
    "correlation": pl.Int64,
    "bytes": pl.Int64,
    "registers": pl.Int64,
    "shared_memory_bytes": pl.Int64,
    "blocks_per_multiprocessor": pl.Float64,
}
_ON_STREAM: Final[_Types] = dict.fromkeys(("start", "end", *STREAM_KEYS, "correlationId"), pl.Int64)


class Activities(TableReader):
    """Reads the CUPTI tables of one file; call `read` once."""

    def read(self) -> Iterator[None]:
        """Gather all of it; stops now and then for the caller to show progress."""
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
        """Rows of work on a stream with their place and correlation; those without a time are counted and left out."""
        where, parameters = self._selection.of_work(table)
        wanted = {**_ON_STREAM, **columns}
        for batch in self._database.batches(table, wanted, where=where, parameters=parameters):
            yield self._placed(table, batch)

    def _placed(self, table: str, batch: pl.DataFrame, *, of_context: bool = False) -> pl.DataFrame:
        correlation = self._places.correlations(batch["globalPid"], batch["correlationId"])
        batch = batch.drop("correlationId").with_columns(correlation.alias("correlation"))
        needed = () if of_context else ("device", "queue")
        return self._selection.complete(table, self._places.streams(batch, of_context=of_context), *needed)

    def _kernels(self, batch: pl.DataFrame) -> pl.DataFrame:
        name = batch.select(pl.coalesce("demangledName", "shortName")).to_series()
        blocks = pl.col("gridX") * pl.col("gridY") * pl.col("gridZ")
        count = pl.col("device").replace_strict(self._places.multiprocessors(), default=None, return_dtype=pl.Int64)
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
        told = described.with_columns(
            pl.Series("told", [_copy(*row) for row in described.iter_rows()], dtype=pl.List(pl.String))
        )
        return batch.join(
            told, on=["copyKind", "srcKind", "dstKind"], how="left", nulls_equal=True, maintain_order="left"
        ).with_columns(kind=pl.col("told").list.get(0), name=pl.col("told").list.get(1))

    def _sets(self, batch: pl.DataFrame) -> pl.DataFrame:
        where = pl.col("memKind").replace_strict(_MEMORY_KINDS, default="Unknown", return_dtype=pl.String)
        return batch.with_columns(name=pl.format("Memset ({})", where), kind=pl.lit("set"))

    def _graphs(self, batch: pl.DataFrame) -> pl.DataFrame:
        number = pl.col("graphId").cast(pl.String).fill_null("")
        return batch.with_columns(name=pl.concat_str(pl.lit("CUDA graph "), number), kind=pl.lit("compute"))

    def _add_work(self, batch: pl.DataFrame) -> None:
        absent = [name for name in (*_WORK_TEXT, *_WORK_NUMBERS) if name not in batch.columns]
        batch = batch.with_columns(pl.lit(None, _WORK_NUMBERS.get(name, pl.UInt32)).alias(name) for name in absent)
        self._gathering.add("device_work", batch.select("start_ns", "duration_ns", "lane", *_WORK_TEXT, *_WORK_NUMBERS))

    def _calls(self) -> Iterator[pl.DataFrame]:
        """Calls of the CUDA runtime and driver."""
        where, parameters = self._selection.of_calls()
        columns: _Types = dict.fromkeys(("start", "end", "globalTid", "correlationId", "nameId"), pl.Int64)
        for batch in self._database.batches(RUNTIME, columns, where=where, parameters=parameters):
            frame = batch.select(
                "start",
                "end",
                self._places.threads(batch["globalTid"]).alias("lane"),
                self._strings.codes(batch["nameId"], _without_version).alias("name"),
                self._places.correlations(batch["globalTid"], batch["correlationId"]).alias("correlation"),
                kind=pl.lit(None, pl.UInt32),  # follows from the name
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
        """By process and number: the stream and the call that recorded the event that a wait is for."""
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
                self._places.correlations(batch["globalPid"], batch["correlationId"]).alias("waited_correlation")
            )
            parts.append(
                self._places.streams(batch, of_context=True)
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
    """Kind and name of a copy; where the direction is not told, from what is copied to where."""
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
    return "communication" if names.is_communication(name) else "compute"


def _without_version(name: str) -> str:
    return _VERSION.sub("", name)
