"""Writes a simulated machine's run as the SQLite file that Nsight Systems exports.

Operators are NVTX ranges as ``torch.autograd.profiler.emit_nvtx`` pushes them, steps and other annotations NVTX ranges
of their own. There are no Python frames.
"""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.simulator.device import COPY, SET, Work
from tests.simulator.host import Host
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.nsight_schema import ENUMERATIONS, TABLES, VERSIONED_CALLS
from tests.simulator.sight import MARKS
from tests.simulator.timeline import ANNOTATION, CALL, DRIVER_CALL, FRAME, STEP_PREFIX, Slice

PUSH_POP_RANGE = 59
NO_ID = 2**32 - 1
SYNCHRONISATION_TYPES = {"cudaEventSynchronize": 1, "cudaStreamSynchronize": 3, "cudaDeviceSynchronize": 4}
COPY_KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
MEMORY_KINDS = {"Pageable": 0, "Pinned": 1, "Device": 2}
BUFFER_FLUSH = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class NsightOptions:
    """How a file is written.

    ``start_ns`` is what the machine's clock shows at machine time 0, ``session_start_ns`` what it showed when the
    recording began, ``utc_ns`` the wall clock then. ``shuffle_seed`` writes the rows of each table in another order.
    ``without`` names tables that were not recorded or not exported; ``empty_tables`` keeps those without a row.
    """

    start_ns: int = 60_111_430_336
    session_start_ns: int = 28_254_349_605
    utc_ns: int = 1_779_782_330_176_752_435
    shuffle_seed: int | None = None
    without: frozenset[str] = frozenset()
    empty_tables: bool = False


def write_nsight(machine: Machine, path: Path, options: NsightOptions | None = None) -> Path:
    """Write a file; one that is there already is replaced."""
    options = options or NsightOptions()
    tables = _Writer(machine, options).tables()
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        for table, columns in TABLES.items():
            rows = tables.get(table, [])
            if table in options.without or not (rows or options.empty_tables):
                continue
            if options.shuffle_seed is not None:
                random.Random(options.shuffle_seed).shuffle(rows)
            connection.execute(f"CREATE TABLE {table} ({columns})")
            for names in dict.fromkeys(tuple(row) for row in rows):
                fields = ", ".join(names)
                values = ", ".join(f":{name}" for name in names)
                mine = [row for row in rows if tuple(row) == names]
                connection.executemany(f"INSERT INTO {table} ({fields}) VALUES ({values})", mine)
    return path


def global_number(process: int, thread: int = 0) -> int:
    """The process, or the thread, as one number: virtual machine, process and thread behind each other."""
    return 1 << 48 | process << 24 | thread


class _Writer:
    def __init__(self, machine: Machine, options: NsightOptions) -> None:
        self.machine = machine
        self.options = options
        self._rows: dict[str, list[Row]] = defaultdict(list)
        self._strings: dict[str, int] = {}
        self._operations = count(990_346)

    def tables(self) -> dict[str, list[Row]]:
        self._about_the_recording()
        for host in self.machine.hosts:
            self._host(host)
        for number, work in enumerate(self.machine.works):
            self._work(number, work)
        for start_ns, end_ns in self.machine.ledger.overheads:
            self._add(
                "PROFILER_OVERHEAD",
                **self._times(start_ns, end_ns),
                globalTid=self._stopped_thread(),
                nameId=self._string("CUPTI Buffer flush"),
                overheadType=BUFFER_FLUSH,
            )
        self._rows["StringIds"] = [{"id": number, "value": text} for text, number in self._strings.items()]
        for table, values in ENUMERATIONS.items():
            self._rows[table] = [dict(zip(("id", "name", "label"), row, strict=True)) for row in values]
        return self._rows

    def _about_the_recording(self) -> None:
        options = self.options
        for name, value in (
            ("EXPORT_PRODUCT_NAME", "NVIDIA Nsight Systems"),
            ("EXPORT_PRODUCT_VERSION", "2026.2.1.210"),
            ("EXPORT_SCHEMA_VERSION", "3.25.0"),
        ):
            self._add("META_DATA_EXPORT", name=name, value=value)
        self._add(
            "META_DATA_CAPTURE", name="ENVIRONMENT", value="TOKEN=a secret that no reader may keep;HOME=/home/user"
        )
        self._add(
            "TARGET_INFO_SESSION_START_TIME",
            utcEpochNs=options.utc_ns,
            utcTime="2026-05-26T07:58:50",
            localTime="2026-05-26T07:58:50",
            systemClockNs=options.session_start_ns,
        )
        self._add("PROCESSES", globalPid=global_number(PROCESS_ID), pid=PROCESS_ID, name="python3")
        for device in sorted({work.device for work in self.machine.works}):
            self._device(device)
        for queue in self.machine.ledger.queues.values():
            self._add(
                "TARGET_INFO_CUDA_STREAM",
                streamId=queue.number,
                hwId=0,
                vmId=1,
                processId=PROCESS_ID,
                contextId=queue.device + 1,
                priority=0,
                flag=2,
            )

    def _stopped_thread(self) -> int:
        """The thread that the profiler flushes its buffers on: one of the program's, which it keeps from its work."""
        recorded = (host for host in self.machine.hosts if any(slice_.category != FRAME for slice_ in host.slices))
        host = next(recorded, self.machine.main)
        return global_number(PROCESS_ID, host.thread_id if host else PROCESS_ID)

    def _device(self, device: int) -> None:
        self._add(
            "TARGET_INFO_GPU",
            vmId=global_number(0),
            id=device,
            name="Simulated Device 80GB",
            busLocation=f"0000:{device + 7:02x}:00.0",
            isDiscrete=1,
            totalMemory=80 << 30,
            smCount=132,
            uuid=f"simulated-{device}",
            chipName="SD100",
            cuDevice=device,
            threadsPerWarp=32,
            computeMajor=9,
            computeMinor=0,
        )

    def _host(self, host: Host) -> None:
        thread = global_number(PROCESS_ID, host.thread_id)
        name = "python3" if host.is_main else host.name
        self._add("ThreadNames", nameId=self._string(name), priority=20, globalTid=thread)
        for slice_ in host.slices:
            times = self._times(slice_.start_ns, slice_.closed_ns)
            if slice_.category in (CALL, DRIVER_CALL):
                self._call(slice_, times, thread)
            elif slice_.category != FRAME:
                self._add("NVTX_EVENTS", **times, eventType=PUSH_POP_RANGE, globalTid=thread, **self._text(slice_))

    def _text(self, slice_: Slice) -> Row:
        """A range's text. What a program pushes for itself is a registered string in a domain of its own."""
        if slice_.name.startswith(STEP_PREFIX):
            return {"text": slice_.name, "domainId": 0}
        if slice_.category == ANNOTATION and not slice_.name.startswith(MARKS):
            return {"textId": self._string(slice_.name), "domainId": 1}
        text = f"{slice_.name}, op_id = {next(self._operations)}"
        if slice_.shapes is not None:
            text += f", sizes = [{', '.join(str(list(shape)) for shape in slice_.shapes)}]"
        return {"text": text, "domainId": 0}

    def _call(self, slice_: Slice, times: Row, thread: int) -> None:
        self._add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            **times,
            eventClass=1 if slice_.category == DRIVER_CALL else 0,
            globalTid=thread,
            correlationId=slice_.correlation,
            nameId=self._string(VERSIONED_CALLS.get(slice_.name, slice_.name)),
            returnValue=0,
        )
        kind = SYNCHRONISATION_TYPES.get(slice_.name)
        if kind is not None:
            device = slice_.device or 0
            self._add(
                "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
                **times,
                deviceId=device,
                contextId=device + 1,
                streamId=NO_ID if slice_.queue is None else slice_.queue,
                correlationId=slice_.correlation,
                globalPid=global_number(PROCESS_ID),
                syncType=kind,
                eventId=18 if kind == 1 else NO_ID,
                eventSyncId=0,
            )

    def _work(self, number: int, work: Work) -> None:
        place = self._times(work.start_ns, work.end_ns) | {
            "deviceId": work.device,
            "contextId": work.device + 1,
            "greenContextId": 0,
            "streamId": work.queue,
            "correlationId": work.correlation,
            "globalPid": global_number(PROCESS_ID),
        }
        if work.kind == COPY:
            self._copy(work, place)
        elif work.kind == SET:
            self._add("CUPTI_ACTIVITY_KIND_MEMSET", **place, value=0, bytes=work.bytes, memKind=MEMORY_KINDS["Device"])
        else:
            self._kernel(number, work, place)

    def _copy(self, work: Work, place: Row) -> None:
        """``Memcpy HtoD (Pageable -> Device)`` is a number for the direction and one for each side's memory."""
        _, direction, memories = work.name.split(" ", 2)
        source, target = memories.strip("()").split(" -> ")
        self._add(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            **place,
            bytes=work.bytes,
            copyKind=COPY_KINDS[direction],
            srcKind=MEMORY_KINDS[source],
            dstKind=MEMORY_KINDS[target],
            copyCount=1,
        )

    def _kernel(self, number: int, work: Work, place: Row) -> None:
        in_graph = work.launch is not None and work.launch.call.name == "cudaGraphLaunch"
        short = work.name.removeprefix("void ").partition("<")[0].rpartition("::")[2]
        self._add(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            **place,
            demangledName=self._string(work.name),
            shortName=self._string(short),
            mangledName=self._string(f"_Z{len(short)}{short}v"),
            launchType=1,
            cacheConfig=1,
            registersPerThread=32,
            **{f"grid{axis}": size for axis, size in (("X", 132), ("Y", 1), ("Z", 1))},
            **{f"block{axis}": size for axis, size in (("X", 128), ("Y", 1), ("Z", 1))},
            staticSharedMemory=0,
            dynamicSharedMemory=0,
            localMemoryPerThread=0,
            localMemoryTotal=250_871_808,
            gridId=161_656 + number,
            sharedMemoryExecuted=32_768,
            graphNodeId=(7 << 32) + number if in_graph else None,
            tensorSizeMinusOneElements="[]",
        )

    def _times(self, start_ns: int, end_ns: int) -> Row:
        return {"start": start_ns + self.options.start_ns, "end": end_ns + self.options.start_ns}

    def _string(self, text: str) -> int:
        """The text's number; they are neither dense nor in order of use."""
        return self._strings.setdefault(text, 1_366_270 - 7 * len(self._strings))

    def _add(self, table: str, **row: Any) -> None:
        self._rows[table].append(row)
