"""Makes long traces for the benchmarks: our own recording, given a device, repeated until the file is large enough.

The recording is of a small GPT-2 on a CPU, with stacks, shapes and memory. Every operator that would start a kernel
on a GPU gets one, with its launch, its flow and the arguments Kineto writes; copies, memory sets, a second queue
with collectives and a synchronisation in every step come with them. A repetition is moved on in time and its numbers
(correlation, External id, sequence, flow, Python id, step) are moved on too, so that the whole is one valid trace.
The text is laid out as torch 2.13 writes it: one key a line.

    python long_trace.py FILE MEGABYTES
    python long_trace.py FILE --events NUMBER [--machine]

The second form counts complete events; with --machine they are those of a simulated device's training in which all
waits for one another: a backward thread, collectives on a queue of their own, a value read in every step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulator import Machine, kineto_bytes

RECORDING = Path(__file__).parent.parent / "examples/gpt2_per_token_loss_cpu.json.gz"
DEVICE, QUEUE, COLLECTIVE_QUEUE = 0, 7, 20
LATENCY_NS = 4_000
CALL_NS = 3_000
PAUSE_NS = 500_000
COLLECTIVE_EVERY = 60
MACHINE_STEPS = 50
US = 1_000
WITHOUT_KERNEL = (
    *("aten::view", "aten::as_strided", "aten::select", "aten::slice", "aten::t", "aten::transpose", "aten::empty"),
    *("aten::detach", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::permute", "aten::resize_", "aten::to"),
    *("aten::reshape", "aten::_unsafe_view", "aten::result_type", "aten::item", "aten::split", "aten::alias"),
    *(
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::lift_fresh",
        "detach",
        "autograd::",
        "Torch",
    ),
)
KERNELS = {
    "aten::addmm": "ampere_sgemm_128x64_tn",
    "aten::mm": "ampere_sgemm_64x32_sliced1x4_nn",
    "aten::bmm": "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(Params)",
}
COLLECTIVE = {
    "Collective name": "allreduce",
    "dtype": "Float",
    "In msg nelems": 32768,
    "Out msg nelems": 32768,
    "Group size": 1,
    "Process Group Name": "0",
}
HEADER = {
    "schemaVersion": 1,
    "deviceProperties": [
        {"id": DEVICE, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}
        | {"computeMajor": 8, "computeMinor": 0, "numSms": 108, "warpSize": 32}
    ],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
    "with_stack": 1,
    "profile_memory": 1,
    "record_shapes": 1,
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": 1_790_857_026_000_000_000,
}

Event = dict[str, Any]


def write_long_trace(path: Path, wanted_bytes: int) -> int:
    """Write a trace of at least `wanted_bytes` and return how many times the recording stands in it."""
    return _write(path, with_device(recording()), lambda repetitions, written: written < wanted_bytes)


def write_long_trace_of(path: Path, events: list[Event], wanted_events: int) -> int:
    """Write these events so often that there are at least `wanted_events` complete ones; return how often."""
    once = sum(event["ph"] == "X" for event in events)
    return _write(path, events, lambda repetitions, _: repetitions * once < wanted_events)


def _write(path: Path, events: list[Event], goes_on: Callable[[int, int], bool]) -> int:
    once = Repetition(events)
    repetitions = 0
    with open(path, "wb") as file:
        file.write(_opening())
        while goes_on(repetitions, file.tell()):
            file.write(once.text(repetitions))
            repetitions += 1
        file.write(once.closing(repetitions))
    return repetitions


def recording() -> list[Event]:
    """The recording's events apart from metadata, times in integer nanoseconds from its first event."""
    return _events_of(gzip.decompress(RECORDING.read_bytes()))


def simulated() -> list[Event]:
    """The same of a simulated device's training."""
    machine = Machine(tick_ns=US)
    main, backward = machine.host("main"), machine.host("backward")
    queue, collectives = machine.queue(number=QUEUE), machine.queue(number=COLLECTIVE_QUEUE)
    for index in range(MACHINE_STEPS):
        with main.step(index), main.frame("train.py(12): step", before_ns=3 * US):
            main.data_loader(30 * US, workers=True)
            for layer in range(6):
                with main.frame(f"nn.Module: Linear_{layer}", before_ns=4 * US), main.operator("aten::addmm"):
                    main.work(6 * US)
                    main.launch("gemm", queue, 15 * US)
            with main.frame("torch/_tensor.py(570): backward", before_ns=8 * US):
                main.hand_over(backward)
                for _ in range(6):
                    node = "autograd::engine::evaluate_function: AddmmBackward0"
                    with backward.operator(node, before_ns=6 * US), backward.operator("aten::mm", before_ns=4 * US):
                        backward.launch("gemm_backward", queue, 20 * US)
                    backward.wait_event(collectives, backward.record_event(queue))
                    backward.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", collectives, 18 * US)
                main.wait_for(backward)
            main.wait_event(queue, main.record_event(collectives))
            with main.optimizer_step(), main.operator("aten::_fused_adamw_", before_ns=12 * US):
                main.launch("adamw", queue, 25 * US)
            main.item(queue)
    return _events_of(kineto_bytes(machine))


def _events_of(text: bytes) -> list[Event]:
    document = json.loads(text, parse_float=Decimal)
    events = [e for e in document["traceEvents"] if e["ph"] in "Xsfi" and isinstance(e["pid"], int)]
    origin = min(_nanoseconds(e["ts"]) for e in events)
    for event in events:
        event["ts"] = _nanoseconds(event["ts"]) - origin
        if "dur" in event:
            event["dur"] = _nanoseconds(event["dur"])
    return events


def with_device(events: list[Event]) -> list[Event]:
    """The events and what a device would have added."""
    result = list(events)
    free_at = {QUEUE: 0, COLLECTIVE_QUEUE: 0}
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    correlation = 0
    for operator in sorted(_launching(events), key=lambda e: e["ts"]):
        correlation += 1
        work = _work(operator, correlation)
        queue = work["tid"]
        call = _call(operator, work, correlation)
        work["ts"] = max(call["ts"] + LATENCY_NS, free_at[queue])
        free_at[queue] = work["ts"] + work["dur"]
        result += [call, _flow("s", call, correlation), work, _flow("f", work, correlation)]
    for step in steps:
        correlation += 1
        result += _synchronisation(step, correlation)
    return result


def _launching(events: list[Event]) -> Iterator[Event]:
    """Operators without operators inside them, of the kinds that start a kernel."""
    operators = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    for event, following in zip(operators, [*operators[1:], None], strict=True):
        end = event["ts"] + event["dur"]
        is_leaf = following is None or following["tid"] != event["tid"] or following["ts"] >= end
        if is_leaf and not event["name"].startswith(WITHOUT_KERNEL):
            yield event


def _call(operator: Event, work: Event, correlation: int) -> Event:
    name = {"gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}.get(work["cat"], "cudaLaunchKernel")
    start = operator["ts"] + operator["dur"] // 4
    args = {"External id": operator["args"]["External id"], "cbid": 211, "correlation": correlation}
    place = {"pid": operator["pid"], "tid": operator["tid"]}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, **place} | {
        "ts": start,
        "dur": min(CALL_NS, operator["dur"] // 2),
        "args": args,
    }


def _work(operator: Event, correlation: int) -> Event:
    """The kernel, copy or set of an operator, without its start."""
    duration = 1_500 + operator["dur"] % 9_000
    name, category, queue = operator["name"], "kernel", QUEUE
    own: Event
    args: Event = {"External id": operator["args"]["External id"], "queued": 0, "device": DEVICE, "context": 1}
    if name == "aten::copy_":
        name, category, own = "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", {"bytes": 65536}
        own |= {"memory bandwidth (GB/s)": 11.42}
    elif name in ("aten::fill_", "aten::zero_"):
        name, category, own = "Memset (Device)", "gpu_memset", {"bytes": 4096, "memory bandwidth (GB/s)": 2.9}
    else:
        if correlation % COLLECTIVE_EVERY == 0:
            name, queue = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", 20
        else:
            name = KERNELS.get(name, f"void at::native::vectorized_elementwise_kernel<4, at::native::{name[6:]}_cuda>")
        own = {"registers per thread": 32, "shared memory": 0, "blocks per SM": 0.148148, "warps per SM": 0.59259}
        own |= {"grid": [16, 1 + correlation % 7, 1], "block": [128, 1, 1], "est. achieved occupancy %": 12}
        own |= COLLECTIVE if queue == COLLECTIVE_QUEUE else {}
    args |= {"stream": queue, "correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "pid": DEVICE, "tid": queue, "ts": 0, "dur": duration} | {
        "args": args | own
    }


def _flow(phase: str, event: Event, correlation: int) -> Event:
    flow = {"ph": phase, "id": correlation, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]}
    return flow | {"cat": "ac2g", "name": "ac2g"} | ({"bp": "e"} if phase == "f" else {})


def _synchronisation(step: Event, correlation: int) -> list[Event]:
    """The host waits for the device at the end of a step."""
    times = {"ts": step["ts"] + step["dur"] - 60_000, "dur": 50_000}
    place = {"pid": step["pid"], "tid": step["tid"]}
    own: Event = {"cbid": 165, "correlation": correlation}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", **place, **times, "args": own}
    args: Event = {"cuda_sync_kind": "Context Sync", "stream": -1, "correlation": correlation, "device": DEVICE}
    record = {"ph": "X", "cat": "cuda_sync", "name": "Context Sync", "pid": DEVICE, "tid": -1, **times, "args": args}
    return [call, record]


class Repetition:
    """The text of all events with gaps for the numbers that differ from repetition to repetition."""

    MOVING = ("External id", "correlation", "Sequence number", "Python id", "Python parent id", "Ev Idx", "flow", "id")

    def __init__(self, events: list[Event]) -> None:
        ends = [e["ts"] + e.get("dur", 0) for e in events]
        self._length_ns = max(ends) + PAUSE_NS
        self._gaps: list[tuple[int, int, int]] = []  # number, growth, and 1 for microseconds or 2 for the rest
        numbers = {
            key: [e["args"][key] for e in events if isinstance(e.get("args", {}).get(key), int)] for key in self.MOVING
        }
        self._strides = {key: max(found, default=0) + 1 for key, found in numbers.items()}
        self._steps = sum(e["name"].startswith("ProfilerStep#") for e in events)
        self._flows = {category: self._flow_stride(events, category) for category in ("ac2g", "fwdbwd")}
        self._template = "".join(self._event(event) + ",\n" for event in events)
        self._first, self._stride, self._part = np.array(self._gaps).T

    def text(self, number: int) -> bytes:
        """The events of one repetition, each with a comma after it."""
        values = self._first + number * self._stride
        values[self._part == 1] //= 1000
        values[self._part == 2] %= 1000
        return (self._template % tuple(values.tolist())).encode()

    def closing(self, repetitions: int) -> bytes:
        """The profiler's own span, the end of the list and of the document."""
        length = f"{self._length_ns * repetitions // 1000}.000"
        place = '"pid": "Spans", "tid": "PyTorch Profiler"'
        span = f'  {{\n    "ph": "X", "cat": "Trace", "ts": 0.000, "dur": {length}, {place},\n'
        return (
            span
            + '    "name": "PyTorch Profiler (0)", "args": {"Op count": 0}\n  }\n  ],\n  "traceName": "long.json"\n}\n'
        ).encode()

    @staticmethod
    def _flow_stride(events: list[Event], category: str) -> int:
        return max((e["id"] for e in events if e["ph"] == "s" and e["cat"] == category), default=0) + 1

    def _gap(self, first: int, stride: int, part: int = 0) -> str:
        self._gaps.append((first, stride, part))
        return "%03d" if part == 2 else "%d"

    def _time(self, nanoseconds: int) -> str:
        return self._gap(nanoseconds, self._length_ns, 1) + "." + self._gap(nanoseconds, self._length_ns, 2)

    def _event(self, event: Event) -> str:
        lines = []
        for key, value in event.items():
            if key != "args":
                lines.append(f'    "{key}": {self._field(event, key, value)}')
        text = "  {\n" + ",\n".join(lines)
        if "args" in event:
            args = ", ".join(
                json.dumps(key).replace("%", "%%") + f": {self._argument(key, value)}"
                for key, value in event["args"].items()
            )
            text += f'\n    ,\n    "args": {{\n      {args}\n    }}'
        return text + "\n  }"

    def _field(self, event: Event, key: str, value: Any) -> str:
        if key == "ts":
            return self._time(value)
        if key == "dur":
            return f"{value // 1000}.{value % 1000:03}"
        if key == "id":
            return self._gap(value, self._flows[event["cat"]])
        if key == "name" and value.startswith("ProfilerStep#"):
            return f'"ProfilerStep#{self._gap(int(value[13:]), self._steps)}"'
        return json.dumps(value).replace("%", "%%")

    def _argument(self, key: str, value: Any) -> str:
        if key in self._strides and isinstance(value, int):
            return self._gap(value, self._strides[key])
        return json.dumps(value, default=float).replace("%", "%%")


def _opening() -> bytes:
    header = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in HEADER.items())
    names = [("process_name", 0, {"name": "python"}), ("process_labels", 0, {"labels": "GPU 0"})]
    names += [("thread_name", queue, {"name": f"stream {queue}"}) for queue in (QUEUE, COLLECTIVE_QUEUE)]
    events = "".join(
        "  " + json.dumps({"ph": "M", "name": name, "ts": 0, "pid": DEVICE, "tid": thread, "args": args}) + ",\n"
        for name, thread, args in names
    )
    return f'{{\n{header},\n  "traceEvents": [\n{events}'.encode()


def _nanoseconds(microseconds: Any) -> int:
    return int(Decimal(microseconds) * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("megabytes", metavar="MEGABYTES", type=float, nargs="?")
    parser.add_argument("--events", metavar="NUMBER", type=int, help="complete events, instead of megabytes")
    parser.add_argument("--machine", action="store_true", help="of a simulated device (with --events)")
    options = parser.parse_args()
    if (options.megabytes is None) == (options.events is None):
        parser.error("one of MEGABYTES and --events is needed")
    if options.events is None:
        write_long_trace(options.file, int(options.megabytes * 1e6))
    else:
        write_long_trace_of(options.file, simulated() if options.machine else with_device(recording()), options.events)


if __name__ == "__main__":
    main()
