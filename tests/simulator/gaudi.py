"""Writes a simulated machine's run as torch.profiler does on Intel Gaudi: torch's events, then those of Intel's bridge.

The bridge logs the calls as beginnings and ends under a made-up process, repeats those that enqueue a recipe on rows of
Synapse's, and writes the device's work by engine: matrix products on the MME, other kernels on two TPCs at once, copies
on a DMA. No file of a real machine was at hand; the form follows the sources of HabanaAI/gaudi-pytorch-bridge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.simulator.device import COMMUNICATION, COMPUTE, COPY, Work
from tests.simulator.host import Host
from tests.simulator.kineto import CATEGORIES, slice_arguments
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.timeline import ANNOTATION, CALL, DRIVER_CALL, FRAME, OPERATOR, Slice

LOGGER = PROCESS_ID + 10_000
CALLS = {
    "cudaLaunchKernel": "synLaunchWithExternalEvents",
    "cuLaunchKernel": "synLaunchWithExternalEvents",
    "cudaGraphLaunch": "synLaunchWithExternalEvents",
    "cudaMemcpyAsync": "synMemCopyAsync",
    "cudaMemsetAsync": "synMemsetD32Async",
    "cudaStreamSynchronize": "synStreamSynchronize",
    "cudaDeviceSynchronize": "synDeviceSynchronize",
    "cudaEventSynchronize": "synEventSynchronize",
    "cudaEventRecord": "synEventRecord",
    "cudaStreamWaitEvent": "synStreamWaitEvent",
    "cudaMalloc": "synDeviceMalloc",
    "cudaFree": "synDeviceFree",
}
ROWS = {"PDMA": 3000, "EDMA": 4000, "MME": 6000, "TPC": 7000, "NIC": 14000}
SYNAPSE_ROW = -1000
UNIT_LATER_NS = 7


@dataclass(frozen=True)
class GaudiOptions:
    """``flows``: as with PT_TB_ENABLE_FLOW_EVENTS; else only recipes tell what a call started. ``kineto``: by way of
    Kineto, as newer bridges write, with its categories and complete events; else appended as JSON of its own.
    ``synapse_thread``: whether the name of Synapse's row tells the thread."""

    flows: bool = False
    kineto: bool = False
    synapse_thread: bool = True
    origin_ns: int = 141_911_610_400_123


def gaudi_bytes(machine: Machine, options: GaudiOptions | None = None) -> bytes:
    """The trace as JSON without white space and with sorted keys, as the bridge writes it."""
    writer = _Writer(machine, options or GaudiOptions())
    document = {
        "baseTimeNanoseconds": 1_751_410_836_000_000_000,
        "deviceProperties": [{"name": "GAUDI2", "totalGlobalMem": 101_468_602_368}],
        "displayTimeUnit": "ms",
        "schemaVersion": 1,
        "with_stack": 1,
    }
    events = ",".join(writer.events())
    return (json.dumps(document, sort_keys=True, separators=(",", ":"))[:-1] + f',"traceEvents":[{events}]}}').encode()


class _Writer:
    def __init__(self, machine: Machine, options: GaudiOptions) -> None:
        self.machine = machine
        self.options = options
        self._recipes: dict[str, int] = {}

    def events(self) -> Iterator[str]:
        for host in self.machine.hosts:
            for slice_ in host.slices:
                if slice_.category in (OPERATOR, FRAME, ANNOTATION):
                    yield self._event(
                        "X",
                        CATEGORIES[slice_.category],
                        slice_.name,
                        (PROCESS_ID, host.thread_id),
                        slice_.start_ns,
                        slice_.closed_ns - slice_.start_ns,
                        slice_arguments(slice_),
                    )
        yield from self._names()
        for host in self.machine.hosts:
            yield from self._calls(host)
        for work in self.machine.works:
            yield from self._work(work)

    def _names(self) -> Iterator[str]:
        yield self._name("process", 0, 0, "/device:HPU:0")
        yield self._name("process", LOGGER, 0, "Synapse Logger")
        for engine, row in ROWS.items():
            for unit in range(2):
                yield self._name("thread", 0, row + unit, f"{engine} {unit}")
        for index, host in enumerate(self.machine.hosts):
            thread = f"{host.thread_id}" if self.options.synapse_thread else host.name
            yield self._name("thread", 2, SYNAPSE_ROW + index, f"Synapse/{thread}")

    def _calls(self, host: Host) -> Iterator[str]:
        category = "privateuse1_runtime" if self.options.kineto else "Runtime"
        for call in host.slices:
            if call.category not in (CALL, DRIVER_CALL):
                continue
            name, row = CALLS.get(call.name, call.name), (LOGGER, host.thread_id)
            if self.options.kineto:
                yield self._event("X", category, name, row, call.start_ns, call.closed_ns - call.start_ns)
            else:
                yield self._event("B", category, name, row, call.start_ns)
                yield self._event("E", category, name, row, call.closed_ns)
            works = self._started_by(call)
            if works:
                yield from self._enqueue(call, works, host)

    def _enqueue(self, call: Slice, works: list[Work], host: Host) -> Iterator[str]:
        """Synapse's own record of a call that runs a recipe; and the flows to the work that any call started."""
        row = (LOGGER, host.thread_id)
        if works[0].kind in (COMPUTE, COMMUNICATION):
            row = (2, SYNAPSE_ROW + self.machine.hosts.index(host))
            category = "hpu_op" if self.options.kineto else "Runtime"
            duration_ns = call.closed_ns - call.start_ns
            name = "enqueueWithExternalEventsExt"
            yield self._event("X", category, name, row, call.start_ns, duration_ns, self._recipe(works[0]))
        if self.options.flows:
            for work in works:
                for unit in range(2):
                    yield self._flow("s", work, row, call.start_ns, unit)

    def _started_by(self, call: Slice) -> list[Work]:
        return [work for work in self.machine.works if work.launch and work.launch.call is call]

    def _work(self, work: Work) -> Iterator[str]:
        engine = _engine(work)
        if self.options.kineto:
            category = {"MME": "kernel", "TPC": "kernel"}.get(engine, "gpu_memcpy" if work.kind == COPY else "hpu_op")
        else:
            category = {"MME": "Kernel", "TPC": "Kernel"}.get(engine, "Memcpy" if work.kind == COPY else "Runtime")
        args = self._recipe(work) if work.kind in (COMPUTE, COMMUNICATION) else {"recipeId": 0}
        args |= {"dataType": "bf16" if engine == "MME" else "", "device": 0}
        row = (0, ROWS[engine])
        yield self._event("X", category, work.name, row, work.start_ns, work.duration_ns, args)
        if engine == "TPC" and work.duration_ns > UNIT_LATER_NS:  # the second unit begins later and ends with the first
            later = work.start_ns + UNIT_LATER_NS
            other = (0, ROWS[engine] + 1)
            yield self._event("X", category, work.name, other, later, work.duration_ns - UNIT_LATER_NS, args)
            if self.options.flows and work.launch:
                yield self._flow("f", work, other, later, 1)
        if self.options.flows and work.launch:
            yield self._flow("f", work, row, work.start_ns)

    def _recipe(self, work: Work) -> dict[str, Any]:
        """The recipe is what the call started with this work starts each time."""
        together = self._started_by(work.launch.call) if work.launch else [work]
        name = "+".join(other.name for other in together)
        number = self._recipes.setdefault(name, len(self._recipes) + 1)
        return {"recipeId": number, "recipeName": f"graph_{name}"[:40], "streamHandle": "0x1"}

    def _flow(self, phase: str, work: Work, row: tuple[int, int], at_ns: int, unit: int = 0) -> str:
        identifier = f'"id":{2 * self.machine.works.index(work) + unit},"bp":"e"'
        return self._event(phase, "enqueue", work.name, row, at_ns)[:-1] + f",{identifier}}}"

    def _name(self, kind: str, process: int, thread: int, name: str) -> str:
        event = {"name": f"{kind}_name", "ph": "M", "ts": 0.0, "pid": process, "tid": thread, "args": {"name": name}}
        return json.dumps(event, sort_keys=True, separators=(",", ":"))

    def _event(
        self,
        phase: str,
        category: str,
        name: str,
        row: tuple[int, int],
        start_ns: int,
        duration_ns: int | None = None,
        args: dict[str, Any] | None = None,
    ) -> str:
        head = {"cat": category, "name": name, "ph": phase, "pid": row[0], "tid": row[1]}
        if args:
            head = {"args": args, **head}
        times = f'"ts":{_microseconds(start_ns + self.options.origin_ns)}'
        if duration_ns is not None:
            times = f'"dur":{_microseconds(duration_ns)},' + times
        return json.dumps(head, sort_keys=True, separators=(",", ":"))[:-1] + f",{times}}}"


def _engine(work: Work) -> str:
    if work.kind == COMMUNICATION:
        return "NIC"
    if work.kind == COPY:
        return "PDMA"
    return "EDMA" if work.kind != COMPUTE else "MME" if "gemm" in work.name else "TPC"


def _microseconds(time_ns: int) -> str:
    units, rest = divmod(time_ns, 1000)
    return f"{units}.{rest:03d}"
