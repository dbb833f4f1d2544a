"""Lanes and devices for the packed thread, stream and device numbers of Nsight Systems.

A global number holds, from its highest bits down, a machine (16 bits), a process (24) and a thread (24).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from stepscope.readers.gathering import Gathering
from stepscope.readers.nsight_systems.database import Database, Strings
from stepscope.trace.metadata import Device
from stepscope.trace.tables import rows_frame
from stepscope.trace.window import Window

MOST_LANES: Final = 50_000
_MOST_NAMES: Final = 200_000
_PART: Final = 0xFFFFFF
NO_STREAM: Final = 0xFFFFFFFF
"""The stream number of a wait that is not on a particular stream."""

_DEVICE_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    "id": pl.Int64,
    "name": pl.String,
    "totalMemory": pl.Int64,
    "smCount": pl.Int64,
    "computeMajor": pl.Int64,
    "computeMinor": pl.Int64,
}
STREAM_KEYS: Final = ("globalPid", "deviceId", "contextId", "streamId")


class Lanes:
    """Lanes by the numbers in the database."""

    def __init__(self, database: Database, gathering: Gathering, strings: Strings) -> None:
        self._gathering = gathering
        self._lanes: dict[tuple[object, ...], int] = {}
        self._process_labels: dict[int, str] = {}
        self._claimed: dict[tuple[str, ...], object] = {}
        self._correlations: dict[int, int] = {}
        self._process_names = _process_names(database)
        self._thread_names = _thread_names(database, strings)
        self._ranks = _ranks(database)
        self._gpu_of = _physical_devices(database)
        self._gpus = _devices(database)
        self._context_device = _context_devices(database)
        self.used_devices: dict[str, None] = {}
        self.has_too_many_lanes = False

    def threads(self, numbers: pl.Series) -> pl.Series:
        """Return the lane of each global thread number (Int32), null above MOST_LANES lanes."""
        return _mapped(numbers, [self.thread(number) for number in numbers.unique(maintain_order=True)])

    def thread(self, number: int | None) -> int | None:
        """Return the lane of a global thread number; None above MOST_LANES lanes."""
        if number is None:
            return self._lane(("thread", None), kind="other", process="", thread="", name="unknown thread")
        process, thread = self.process_label(number >> 24), str(number & _PART)
        return self._lane(
            ("thread", number),
            kind="host_thread",
            process=process,
            thread=thread,
            name=self._thread_names.get(number) or f"thread {thread}",
            process_name=self._process_names.get(number >> 24),
            rank=self._ranks.get(number >> 24),
        )

    def known_threads(self) -> list[int]:
        """Return the global numbers of the threads that have a lane."""
        return [key[1] for key in self._lanes if key[0] == "thread" and isinstance(key[1], int)]

    def process_label(self, process: int) -> str:
        """Return a process's number as text, with the machine if another machine has a process of that number."""
        if process not in self._process_labels:
            label = str(process & _PART)
            if self._claimed.setdefault(("process", label), process) != process:
                label = f"{label} (machine {process >> 24})"
            self._process_labels[process] = label
        return self._process_labels[process]

    def device(self, process: int | None, number: int) -> str:
        """Return a device's label: the GPU's number on the machine if known, else its number in the process."""
        if process is None:
            return str(number)
        return str(self._gpu_of.get((process >> 24 & _PART, number), number))

    def streams(self, frame: pl.DataFrame, *, of_context: bool = False) -> pl.DataFrame:
        """Replace STREAM_KEYS by `lane`, `device` and `queue`; lane is null above MOST_LANES lanes.

        Args:
            of_context: take the device from the context, not from the row.
        """
        keys = list(STREAM_KEYS)
        different = frame.select(keys).unique(maintain_order=True)
        rows = [self._stream(*row, of_context=of_context) for row in different.iter_rows()]
        found = rows_frame(rows, {"lane": pl.Int32, "device": pl.String, "queue": pl.String})
        known = pl.concat([different, found], how="horizontal")
        return frame.join(known, on=keys, how="left", nulls_equal=True, maintain_order="left").drop(keys)

    def _stream(
        self, process: int | None, device: int | None, context: int | None, stream: int | None, *, of_context: bool
    ) -> tuple[int | None, str | None, str | None]:
        if of_context:  # records of waits carry device 0 whatever the context's device is
            device = self._context_device.get(((process or 0) >> 24 & _PART, context or 0))
        elif context is not None and device is not None:
            self._context_device[(process or 0) >> 24 & _PART, context] = device
        label = None if device is None else self.device(process, device)
        owner = "" if process is None else self.process_label(process >> 24)
        if stream is None or label is None or stream in (NO_STREAM, -1):
            name = f"waits for device {label}" if label is not None else "waits"
            lane = self._lane(("waits", process, label), kind="other", process=owner, thread=name, name=name)
            return lane, label, None
        return self._queue(process, owner, label, context, stream, is_work=not of_context)

    def _queue(
        self, process: int | None, owner: str, label: str, context: int | None, stream: int, *, is_work: bool
    ) -> tuple[int | None, str, str]:
        """Return the lane, device and name of a stream; streams of several processes or contexts may share a number."""
        queue = str(stream)
        if self._claimed.setdefault(("stream", label, queue), (process, context)) != (process, context):
            queue = f"{stream} of process {owner}" + (f", context {context}" if context not in (None, 1) else "")
        if is_work:
            self.used_devices[label] = None
        lane = self._lane(
            ("stream", process, label, context, stream),
            kind="queue",
            process=owner,
            thread=f"stream {queue} of device {label}",
            name=f"stream {queue}",
            process_name=None if process is None else self._process_names.get(process >> 24),
            rank=None if process is None else self._ranks.get(process >> 24),
            device=label,
            queue=queue,
        )
        return lane, label, queue

    def other(self, key: tuple[object, ...], name: str, process: int | None = None) -> int | None:
        """Return a lane that is neither a thread nor a stream."""
        owner = "" if process is None else self.process_label(process >> 24)
        return self._lane((*key, process), kind="other", process=owner, thread=name, name=name)

    def correlations(self, processes: pl.Series, numbers: pl.Series) -> pl.Series:
        """Make correlation numbers unique across processes (Int64); those of the first process stay as they are."""
        parts = processes.fill_null(0) // 2**24
        offsets = [
            self._correlations.setdefault(part, len(self._correlations)) for part in parts.unique(maintain_order=True)
        ]
        possible = pl.when(numbers.is_between(1, 2**32 - 1)).then(numbers)
        return pl.select(possible + _mapped(parts, offsets).cast(pl.Int64) * 2**32).to_series()

    def devices(self) -> tuple[Device, ...]:
        """Return the file's descriptions of the devices that did work, or of all devices if none did."""
        labels = list(self.used_devices) or [str(number) for number in self._gpus]
        return tuple(self._described(label) for label in sorted(labels, key=lambda label: (len(label), label)))

    def multiprocessors(self) -> dict[str, int]:
        """Return the number of multiprocessors of each device that did work, where known."""
        found = {label: self._described(label).multiprocessors for label in self.used_devices}
        return {label: count for label, count in found.items() if count}

    def _described(self, label: str) -> Device:
        """Describe a device; without the table of which process saw which GPU, only if all GPUs are alike."""
        device = self._gpus.get(int(label)) if self._gpu_of or not self.used_devices else None
        kinds = {
            (gpu.name, gpu.memory_bytes, gpu.compute_capability, gpu.multiprocessors) for gpu in self._gpus.values()
        }
        if device is None and len(kinds) == 1 and not self._gpu_of:
            device = next(iter(self._gpus.values()))
        if device is None:
            return Device(label)
        return Device(label, device.name, device.memory_bytes, device.compute_capability, device.multiprocessors)

    @property
    def rank(self) -> int | None:
        """The rank, if the whole file belongs to one rank."""
        ranks = set(self._ranks.values())
        return ranks.pop() if len(ranks) == 1 else None

    def _lane(self, key: tuple[object, ...], **columns: str | int | None) -> int | None:
        if key not in self._lanes:
            if len(self._lanes) >= MOST_LANES:
                self.has_too_many_lanes = True
                return None
            self._lanes[key] = self._gathering.lane(key, **columns)
        return self._lanes[key]


def _mapped(values: pl.Series, new: Sequence[int | None]) -> pl.Series:
    """Replace each value by its counterpart; `new` is in order of first appearance."""
    old = values.unique(maintain_order=True).to_frame("value").with_columns(new=pl.Series(new, dtype=pl.Int32))
    joined = values.alias("value").to_frame().join(old, on="value", how="left", nulls_equal=True, maintain_order="left")
    return joined["new"]


def _process_names(database: Database) -> dict[int, str]:
    rows = database.whole("PROCESSES", {"globalPid": pl.Int64, "name": pl.String}, _MOST_NAMES).drop_nulls()
    return {process >> 24: name for process, name in rows.iter_rows()}


def _thread_names(database: Database, strings: Strings) -> dict[int, str]:
    """Names with the highest priority, which are those that the program gave its threads."""
    columns: dict[str, type[pl.DataType]] = {"globalTid": pl.Int64, "nameId": pl.Int64, "priority": pl.Int64}
    rows = database.whole("ThreadNames", columns, _MOST_NAMES).sort("priority", nulls_last=False, maintain_order=True)
    rows = rows.drop_nulls(["globalTid", "nameId"])
    names = strings.texts(rows["nameId"].to_list())
    return {thread: name for thread, name in zip(rows["globalTid"], names, strict=True) if name}


def _ranks(database: Database) -> dict[int, int]:
    rows = database.whole("MPI_RANKS", {"globalTid": pl.Int64, "rank": pl.Int64}, _MOST_NAMES).drop_nulls()
    return {thread >> 24: rank for thread, rank in rows.iter_rows() if 0 <= rank < 2**31}


def _physical_devices(database: Database) -> dict[tuple[int, int], int]:
    """(process, device number in the process) -> GPU; processes number their devices independently."""
    columns: dict[str, type[pl.DataType]] = {"pid": pl.Int64, "cudaId": pl.Int64, "gpuId": pl.Int64}
    rows = database.whole("TARGET_INFO_CUDA_DEVICE", columns, _MOST_NAMES).drop_nulls()
    return {(process & _PART, number): gpu for process, number, gpu in rows.iter_rows()}


def _context_devices(database: Database) -> dict[tuple[int, int], int]:
    """(process, context) -> device number in the process, if the file has it; kernels supply the rest."""
    names = ("processId", "contextId", "deviceId")
    rows = database.whole("TARGET_INFO_CUDA_CONTEXT_INFO", dict.fromkeys(names, pl.Int64), _MOST_NAMES).drop_nulls()
    return {(process & _PART, context): device for process, context, device in rows.iter_rows()}


def _devices(database: Database) -> dict[int, Device]:
    rows = database.whole("TARGET_INFO_GPU", _DEVICE_COLUMNS, _MOST_NAMES)
    found = {}
    for number, name, memory, multiprocessors, major, minor in rows.iter_rows():
        if number is not None:
            capability = None if major is None or minor is None else f"{major}.{minor}"
            found[number] = Device(str(number), name or None, memory or None, capability, multiprocessors or None)
    return found


_MARK_WORDS: Final = ("step", "iter", "batch")


class Selection:
    """SQL conditions, with their parameters, that select the rows of each table that a window needs.

    Args:
        window: on the file's clock; None for everything.
        work_tables, call_table: tables of device work, and of the calls that launched it.
    """

    def __init__(
        self,
        database: Database,
        damage: Counter[str],
        window: Window | None,
        work_tables: Sequence[str],
        call_table: str,
    ) -> None:
        self._database = database
        self._damage = damage
        self._window = window
        self._work_tables = [table for table in work_tables if database.has(table, "start", "end", "correlationId")]
        self._call_table = call_table

    def overlap(self, table: str) -> tuple[str, tuple[int, ...]]:
        if self._window is None or not self._database.has(table, "start", "end"):
            return "", ()
        return ('"start" < ? AND ("end" >= ? OR "end" IS NULL)', (self._window.end_ns, self._window.start_ns))

    def inside(self, table: str, column: str) -> tuple[str, tuple[int, ...]]:
        if self._window is None or not self._database.has(table, column):
            return "", ()
        return f'"{column}" BETWEEN ? AND ?', (self._window.start_ns, self._window.end_ns)

    def of_work(self, table: str) -> tuple[str, tuple[int, ...]]:
        """Select device work that overlaps the window or was launched by a call in it."""
        where, parameters = self.overlap(table)
        if not where or table not in self._work_tables or not self._database.has(self._call_table, "correlationId"):
            return where, parameters
        inside, more = self.overlap(self._call_table)
        given = f'SELECT "correlationId" FROM "{self._call_table}" WHERE {inside}' if inside else "NULL"
        return f'({where}) OR "correlationId" IN ({given})', (*parameters, *more)

    def of_calls(self) -> tuple[str, tuple[int, ...]]:
        """Select calls that overlap the window or launched device work in it."""
        where, parameters = self.overlap(self._call_table)
        if not where or not self._database.has(self._call_table, "correlationId"):
            return where, parameters
        for table in self._work_tables:
            inside, more = self.overlap(table)
            where += f' OR "correlationId" IN (SELECT "correlationId" FROM "{table}" WHERE {inside})'
            parameters += more
        return where, parameters

    def of_ranges(self, table: str) -> tuple[str, tuple[int, ...]]:
        """Select ranges that overlap the window, and all that may mark steps, which are counted from the first."""
        where, parameters = self.overlap(table)
        if not where:
            return where, parameters
        if self._database.has(table, "text"):
            where += "".join(f" OR \"text\" LIKE '%{word}%'" for word in _MARK_WORDS)
        if self._database.has(table, "textId") and self._database.has("StringIds", "id", "value"):
            like = " OR ".join(f"\"value\" LIKE '%{word}%'" for word in _MARK_WORDS)
            where += f' OR "textId" IN (SELECT "id" FROM "StringIds" WHERE {like})'
        return where, parameters

    def complete(self, table: str, frame: pl.DataFrame, *needed: str) -> pl.DataFrame:
        """Keep rows with times, a lane and `needed` columns; turn start and end into `start_ns` and `duration_ns`."""
        whole = frame.drop_nulls(["start", "end", "lane", *needed])
        if whole.height < frame.height:
            self._damage[f"incomplete_row:{table}"] += frame.height - whole.height
        return whole.with_columns(start_ns=pl.col("start"), duration_ns=pl.col("end") - pl.col("start")).drop(
            "start", "end"
        )


@dataclass
class TableReader:
    """What a reader of tables needs: the database, its texts and lanes, and the selected rows."""

    _database: Database
    _gathering: Gathering
    _strings: Strings
    _lanes: Lanes
    _selection: Selection
