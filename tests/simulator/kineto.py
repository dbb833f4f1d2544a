"""Writes a simulated machine's run as the Chrome-trace JSON of the PyTorch profiler (Kineto).

Times are written as exact decimal text, never by way of a float, as the profiler writes them.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.simulator.device import COMMUNICATION, COMPUTE, COPY, SET, Work
from tests.simulator.host import Host
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.timeline import (
    ANNOTATION,
    CALL,
    DATA_LOADER_PREFIX,
    DRIVER_CALL,
    FRAME,
    OPERATOR,
    OPTIMIZER_PREFIX,
    STEP_PREFIX,
    SYNCHRONISING_CALLS,
    Slice,
)

CATEGORIES = {
    OPERATOR: "cpu_op",
    FRAME: "python_function",
    ANNOTATION: "user_annotation",
    CALL: "cuda_runtime",
    DRIVER_CALL: "cuda_driver",
    COMPUTE: "kernel",
    COMMUNICATION: "kernel",
    COPY: "gpu_memcpy",
    SET: "gpu_memset",
}
CAPITALISED_CATEGORIES = CATEGORIES | {
    OPERATOR: "Operator",
    CALL: "Runtime",
    DRIVER_CALL: "Runtime",
    COMPUTE: "Kernel",
    COMMUNICATION: "Kernel",
    COPY: "Memcpy",
    SET: "Memset",
}
ANNOTATIONS_ONCE_OPERATORS = (STEP_PREFIX, OPTIMIZER_PREFIX, DATA_LOADER_PREFIX)
SYNCHRONISATION_KINDS = {
    "cudaStreamSynchronize": "Stream Sync",
    "cudaDeviceSynchronize": "Context Sync",
    "cudaEventSynchronize": "Event Sync",
}

Clock = Literal["base", "epoch", "integer_epoch"]


@dataclass(frozen=True)
class KinetoOptions:
    """How a trace is written.

    ``clock``: "base" counts from ``base_time_ns`` and says so in ``baseTimeNanoseconds``, "epoch" counts from 1970,
    both in microseconds with three decimals; "integer_epoch" is whole microseconds from 1970 and needs a machine
    whose times all are. ``start_ns`` is what the clock shows at machine time 0. ``capitalised`` gives the categories,
    the thread names and the flows of the first Kineto files. Device annotations and synchronisation records stand on
    the device's rows and are no work.
    """

    clock: Clock = "base"
    base_time_ns: int = 1_751_410_836_000_000_000
    start_ns: int | None = None
    capitalised: bool = False
    flows: bool = True
    device_annotations: bool = True
    synchronisation_records: bool = True
    shuffle_seed: int | None = None
    events_first: bool = False

    @property
    def origin_ns(self) -> int:
        """What the file's clock shows at machine time 0, in ns."""
        if self.start_ns is not None:
            return self.start_ns
        return 141_911_610_400_123 if self.clock == "base" else 1_683_564_901_548_726_000


def write_kineto(machine: Machine, path: Path, options: KinetoOptions | None = None) -> Path:
    """Write a trace; a name that ends in .gz is compressed."""
    data = kineto_bytes(machine, options)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def kineto_bytes(machine: Machine, options: KinetoOptions | None = None) -> bytes:
    """The trace as UTF-8 JSON, one event a line."""
    options = options or KinetoOptions()
    events = list(_Writer(machine, options).events())
    if options.shuffle_seed is not None:
        random.Random(options.shuffle_seed).shuffle(events)
    listed = '"traceEvents": [\n' + ",\n".join(events) + "\n]"
    header = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in _header(machine, options).items()]
    parts = [listed, *header] if options.events_first else [*header, listed]
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _header(machine: Machine, options: KinetoOptions) -> dict[str, Any]:
    devices = sorted({work.device for work in machine.works})
    header: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": device, "name": "Simulated Device 80GB", "numSms": 132} for device in devices],
        "with_stack": int(machine.ledger.with_frames),
        "displayTimeUnit": "ms",
        "traceName": "simulated.json",
    }
    if options.clock == "base":
        header["baseTimeNanoseconds"] = options.base_time_ns
    return header


class _Writer:
    def __init__(self, machine: Machine, options: KinetoOptions) -> None:
        self.machine = machine
        self.options = options
        self.categories = CAPITALISED_CATEGORIES if options.capitalised else CATEGORIES

    def events(self) -> Iterator[str]:
        yield from self._metadata()
        launched = {work.correlation for work in self.machine.works}
        for host in self.machine.hosts:
            for slice_ in host.slices:
                yield self._slice(host, slice_)
                if self.options.flows and slice_.correlation in launched:
                    yield self._flow("s", PROCESS_ID, self._thread(host), slice_.start_ns, slice_.correlation)
                if self.options.synchronisation_records and slice_.name in SYNCHRONISING_CALLS:
                    yield self._synchronisation(slice_)
            if self.options.device_annotations:
                yield from self._device_annotations(host)
        for work in self.machine.works:
            yield self._work(work)
            if self.options.flows:
                yield self._flow("f", work.device, self._row(work.queue), work.start_ns, work.correlation)
        for start_ns, end_ns in self.machine.ledger.overheads:
            yield self._complete("overhead", "Buffer Flush", -1, 0, start_ns, end_ns - start_ns, None)

    def _metadata(self) -> Iterator[str]:
        first_ns = self.machine.first_event_ns()
        last_ns = max((host.now_ns for host in self.machine.hosts), default=first_ns)
        last_ns = max([last_ns, *(work.end_ns for work in self.machine.works)])
        for process, label in [(PROCESS_ID, "CPU"), *self._device_labels()]:
            for name, value in (("name", "python3"), ("labels", label)):
                args = {name: value}
                yield self._event("M", None, f"process_{name}", process, 0, first_ns, {"args": args})
        span = self._complete(
            "Trace", "PyTorch Profiler (0)", "Spans", "PyTorch Profiler", first_ns, last_ns - first_ns, {"Op count": 0}
        )
        yield span
        name, row = "Iteration Start: PyTorch Profiler", "Trace PyTorch Profiler"
        yield self._event("i", None, name, "Traces", row, first_ns, {"s": "g"})
        yield self._event("i", None, "Record Window End", "", "", last_ns, {"s": "g"})

    def _device_labels(self) -> list[tuple[int, str]]:
        return [(device, f"GPU {device}") for device in sorted({work.device for work in self.machine.works})]

    def _slice(self, host: Host, slice_: Slice) -> str:
        category = self.categories[slice_.category]
        if self.options.capitalised and slice_.name.startswith(ANNOTATIONS_ONCE_OPERATORS):
            category = self.categories[OPERATOR]
        duration_ns = slice_.closed_ns - slice_.start_ns
        args, thread = slice_arguments(slice_), self._thread(host)
        return self._complete(category, slice_.name, PROCESS_ID, thread, slice_.start_ns, duration_ns, args)

    def _work(self, work: Work) -> str:
        row, args = self._row(work.queue), work_arguments(work)
        category = self.categories[work.kind]
        return self._complete(category, work.name, work.device, row, work.start_ns, work.duration_ns, args)

    def _synchronisation(self, call: Slice) -> str:
        row = -1 if call.queue is None else call.queue
        kind, device = SYNCHRONISATION_KINDS[call.name], call.device or 0
        args = {"cuda_sync_kind": kind, "stream": row, "correlation": call.correlation, "device": device}
        duration_ns = call.closed_ns - call.start_ns
        return self._complete("cuda_sync", kind, device, row, call.start_ns, duration_ns, args)

    def _device_annotations(self, host: Host) -> Iterator[str]:
        """On each queue, an annotation spans the work launched inside it."""
        own = [work for work in self.machine.works if work.launch and work.launch.thread is host]
        for slice_ in host.slices:
            if slice_.category != ANNOTATION:
                continue
            spans: dict[tuple[int, int], tuple[int, int]] = {}
            for work in own:
                if work.launch and slice_.start_ns <= work.launch.start_ns < slice_.closed_ns:
                    row = (work.device, work.queue)
                    start_ns, end_ns = spans.get(row, (work.start_ns, work.end_ns))
                    spans[row] = (min(start_ns, work.start_ns), max(end_ns, work.end_ns))
            for (device, queue), (start_ns, end_ns) in spans.items():
                yield self._complete(
                    "gpu_user_annotation",
                    slice_.name,
                    device,
                    self._row(queue),
                    start_ns,
                    end_ns - start_ns,
                    {"External id": slice_.identifier},
                )

    def _thread(self, host: Host) -> int | str:
        return str(host.thread_id) if self.options.capitalised else host.thread_id

    def _row(self, queue: int) -> int | str:
        return f"stream {queue}" if self.options.capitalised else queue

    def _flow(self, phase: str, process: int, thread: int | str, at_ns: int, identifier: int) -> str:
        category, name = ("async", "launch") if self.options.capitalised else ("ac2g", "ac2g")
        more = {"id": identifier} | ({"bp": "e"} if phase == "f" else {})
        return self._event(phase, category, name, process, thread, at_ns, more)

    def _complete(
        self,
        category: str,
        name: str,
        process: int | str,
        thread: int | str,
        start_ns: int,
        duration_ns: int,
        args: dict[str, Any] | None,
    ) -> str:
        more = {} if args is None else {"args": args}
        return self._event("X", category, name, process, thread, start_ns, more, duration_ns)

    def _event(
        self,
        phase: str,
        category: str | None,
        name: str,
        process: int | str,
        thread: int | str,
        start_ns: int,
        more: dict[str, Any],
        duration_ns: int | None = None,
    ) -> str:
        head: dict[str, Any] = {"ph": phase}
        if category is not None:
            head["cat"] = category
        head |= {"name": name, "pid": process, "tid": thread}
        times = f'"ts": {self._decimal(start_ns + self.options.origin_ns)}'
        if duration_ns is not None:
            times += f', "dur": {self._decimal(duration_ns)}'
        tail = f", {json.dumps(more)[1:-1]}" if more else ""
        return f"{json.dumps(head)[:-1]}, {times}{tail}}}"

    def _decimal(self, time_ns: int) -> str:
        return microseconds(time_ns, whole=self.options.clock == "integer_epoch")


def microseconds(time_ns: int, *, whole: bool = False) -> str:
    """A time in ns as microseconds in exact decimal text."""
    units, rest = divmod(time_ns, 1000)
    if not whole:
        return f"{units}.{rest:03d}"
    if rest:
        raise ValueError(f"{time_ns} ns is no whole number of microseconds")
    return str(units)


def slice_arguments(slice_: Slice) -> dict[str, Any]:
    """What the profiler writes beside the times of a host slice."""
    if slice_.category == FRAME:
        parent = slice_.enclosing(FRAME)
        return {"Python parent id": parent.identifier if parent else None, "Python id": slice_.identifier}
    if slice_.correlation is not None:
        operator = slice_.enclosing(OPERATOR)
        args = {"External id": operator.identifier} if operator else {}
        kernel = {"kernel": slice_.kernel} if slice_.kernel is not None else {}
        return args | {"cbid": 211, "correlation": slice_.correlation} | kernel
    args = {"External id": slice_.identifier, "Record function id": 0, "Ev Idx": slice_.identifier}
    if slice_.shapes is not None:
        args |= {"Input Dims": slice_.shapes, "Input type": slice_.types}
    return args


def work_arguments(work: Work) -> dict[str, Any]:
    """What the profiler writes beside the times of device work."""
    args: dict[str, Any] = {"device": work.device, "context": 1, "stream": work.queue, "correlation": work.correlation}
    operator = work.launch.call.enclosing(OPERATOR) if work.launch else None
    if operator:
        args["External id"] = operator.identifier
    if work.bytes is not None:
        return args | {"bytes": work.bytes, "memory bandwidth (GB/s)": round(work.bytes / work.duration_ns, 6)}
    args |= {"queued": 0, "registers per thread": 32, "shared memory": 0, "blocks per SM": 1.0, "warps per SM": 4.0}
    args |= {"grid": [132, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 50}
    if work.kind == COMMUNICATION:
        args |= {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2}
        args |= {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    return args
