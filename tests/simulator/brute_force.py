"""The truth worked out a second time, slowly and from the finished slices, to check the simulator's own log by.

Every instant at which anything begins or ends is a cut; between two cuts nothing changes, so looking at the first
instant is enough. Nothing is shared with ``truth`` but the record of a piece.
"""

from __future__ import annotations

from itertools import pairwise

from tests.simulator.device import Work
from tests.simulator.machine import Machine
from tests.simulator.timeline import Slice, Timeline
from tests.simulator.truth import IdlePiece, merge_pieces

SYNCHRONISING = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaDeviceSynchronize",
                 "cudaEventSynchronize", "cudaStreamSynchronize")  # fmt: skip


def brute_force_pieces(machine: Machine) -> list[IdlePiece]:
    """The idle pieces with neighbours of the same cause and trigger joined, sorted by device and start."""
    cuts = {time_ns for work in machine.works for time_ns in (work.start_ns, work.end_ns)}
    cuts |= {
        time_ns for host in machine.hosts for slice_ in host.slices for time_ns in (slice_.start_ns, slice_.closed_ns)
    }
    cuts |= {time_ns for overhead in machine.ledger.overheads for time_ns in overhead}
    times = sorted(cuts)
    pieces: list[IdlePiece] = []
    for device in sorted({work.device for work in machine.works}):
        works = [work for work in machine.works if work.device == device]
        first_ns, last_ns = min(work.start_ns for work in works), max(work.end_ns for work in works)
        for start_ns, end_ns in pairwise(times):
            inside = first_ns <= start_ns < last_ns
            if inside and not any(work.start_ns <= start_ns < work.end_ns for work in works):
                cause, trigger = _say(machine, works, start_ns)
                pieces.append(IdlePiece(device, start_ns, end_ns - start_ns, cause, trigger))
    return merge_pieces(pieces)


def _say(machine: Machine, works: list[Work], now_ns: int) -> tuple[str, str | None]:
    """The cause and the trigger of a device being idle now."""
    gap_end_ns = min(work.start_ns for work in works if work.start_ns > now_ns)
    gap_start_ns = max(work.end_ns for work in works if work.end_ns <= now_ns)
    candidates = [
        (-work.launch.start_ns, work.correlation, work.queue, work.launch)
        for work in works
        if work.start_ns == gap_end_ns and work.launch
    ]
    if not candidates:
        return "unknown", None
    _, _, queue, launch = min(candidates, key=lambda candidate: candidate[:3])
    calls = [
        slice_
        for slice_ in launch.thread.slices
        if slice_.name in SYNCHRONISING[3:] or (slice_.name.startswith("cuda") and slice_.cause == "synchronisation")
    ]
    waiting = [call for call in calls if call.start_ns <= gap_start_ns <= call.closed_ns]
    trigger = max(waiting, key=lambda call: call.start_ns).name if waiting else None
    if launch.start_ns <= gap_start_ns:
        same = any(work.queue == queue for work in works if work.end_ns == gap_start_ns)
        return ("launch_latency" if same else "dependency"), trigger
    if now_ns >= launch.start_ns:
        return "launch_latency", trigger
    if any(start_ns <= now_ns < end_ns for start_ns, end_ns in machine.ledger.overheads):
        return "profiler_overhead", trigger
    stack = _stack(launch.thread, now_ns) or _stack(machine.hosts[0], now_ns)
    return _host_cause(machine, stack), trigger


def _stack(thread: Timeline, now_ns: int) -> list[Slice]:
    open_slices = [slice_ for slice_ in thread.slices if slice_.start_ns <= now_ns < slice_.closed_ns]
    return sorted(open_slices, key=lambda slice_: slice_.start_ns)


def _host_cause(machine: Machine, stack: list[Slice]) -> str:
    copies = {work.correlation: work.name for work in machine.works if work.name.startswith("Memcpy")}
    for position in reversed(range(len(stack))):
        cause = _definite(machine, stack[: position + 1], copies)
        if cause:
            return cause
    kinds = {slice_.category for slice_ in stack}
    if kinds & {"operator", "call", "driver_call"}:
        return "dispatch"
    return "python" if "frame" in kinds else "untraced"


def _definite(machine: Machine, stack: list[Slice], copies: dict[int, str]) -> str | None:
    """What the last slice of the stack stands for."""
    slice_, name = stack[-1], stack[-1].name
    copy_name = copies.get(slice_.correlation or 0, "")
    if name.startswith("enumerate(DataLoader)"):
        return "input"
    if name.startswith(("Optimizer.step#", "torch/optim/")):
        return "optimizer"
    if name.startswith("stepscope.logging#"):
        return "logging"
    if name.startswith(("torch/_dynamo/", "torch/_inductor/")):
        return "compilation"
    if name in ("cudaMalloc", "cudaFree"):
        return "allocation"
    if name.startswith("gloo:"):
        return "communication"
    if "HtoD" in copy_name or (name == "cudaStreamSynchronize" and _copies_to_device(machine, stack, copies)):
        return "host_to_device_copy"
    return "synchronisation" if name in SYNCHRONISING or "DtoH" in copy_name else None


def _copies_to_device(machine: Machine, stack: list[Slice], copies: dict[int, str]) -> bool:
    """Whether the innermost operator is an ``aten::copy_`` that copies to the device."""
    operators = [slice_ for slice_ in stack if slice_.category == "operator"]
    if not operators or operators[-1].name != "aten::copy_":
        return False
    calls = [call for host in machine.hosts for call in host.slices if call.parent is operators[-1]]
    return any("HtoD" in copies.get(call.correlation or 0, "") for call in calls)
