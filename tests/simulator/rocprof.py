"""Writes a simulated machine's run as the JSON file that rocprofv3 writes on an AMD device.

Operators, steps and other annotations are roctx ranges, as ``torch.autograd.profiler.emit_nvtx`` pushes them on ROCm.
There are no Python frames, and nothing tells of the profiler's own time. A memset is a kernel of the runtime's.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.simulator.device import COPY, SET, Work
from tests.simulator.machine import PROCESS_ID, Machine
from tests.simulator.sight import MARKS
from tests.simulator.timeline import ANNOTATION, CALL, DRIVER_CALL, FRAME, STEP_PREFIX, Slice

HIP_NAMES = {
    "cuLaunchKernel": "hipModuleLaunchKernel",
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaGraphLaunch": "hipGraphLaunch",
    "cudaMemcpyAsync": "hipMemcpyAsync",
    "cudaMemsetAsync": "hipMemsetAsync",
    "cudaStreamSynchronize": "hipStreamSynchronize",
    "cudaDeviceSynchronize": "hipDeviceSynchronize",
    "cudaEventSynchronize": "hipEventSynchronize",
    "cudaEventRecord": "hipEventRecord",
    "cudaStreamWaitEvent": "hipStreamWaitEvent",
    "cudaMalloc": "hipMalloc",
    "cudaFree": "hipFree",
}
"""What a call of the simulated machine is called on an AMD device."""

KINDS: dict[str, tuple[str, ...]] = {
    "NONE": (),
    "HSA_CORE_API": ("hsa_init", "hsa_shut_down"),
    "HSA_AMD_EXT_API": (),
    "HSA_IMAGE_EXT_API": (),
    "HSA_FINALIZE_EXT_API": (),
    "HIP_RUNTIME_API": ("hipApiName", *HIP_NAMES.values()),
    "HIP_COMPILER_API": ("__hipPopCallConfiguration",),
    "MARKER_CORE_API": ("roctxMarkA", "roctxRangePushA", "roctxRangePop", "roctxRangeStartA", "roctxRangeStop"),
    "MARKER_CONTROL_API": ("roctxProfilerPause", "roctxProfilerResume"),
    "MARKER_NAME_API": ("roctxNameOsThread",),
    "MEMORY_COPY": (
        "MEMORY_COPY_NONE",
        "MEMORY_COPY_HOST_TO_HOST",
        "MEMORY_COPY_HOST_TO_DEVICE",
        "MEMORY_COPY_DEVICE_TO_HOST",
        "MEMORY_COPY_DEVICE_TO_DEVICE",
    ),
    "KERNEL_DISPATCH": ("KERNEL_DISPATCH_NONE", "KERNEL_DISPATCH_COMPLETE"),
    "MARKER_CORE_RANGE_API": ("roctxMarkA", "roctxThreadRangeA", "roctxProcessRangeA", "roctxGetThreadId"),
}
"""A record's kind is a place in this list, its operation one in the kind's own."""

COPY_DIRECTIONS = {"HtoD": "HOST_TO_DEVICE", "DtoH": "DEVICE_TO_HOST", "DtoD": "DEVICE_TO_DEVICE"}
MEMSET_KERNEL = "__amd_rocclr_fillBufferAligned"
HOST_AGENT = 14_226_842_321_010_561_129
RANGES_FROM = 5_000_000

Record = dict[str, Any]


@dataclass(frozen=True)
class RocprofOptions:
    """How a file is written. ``start_ns`` is what the clock shows at machine time 0; ``shuffle_seed`` writes the
    records of each list in another order; ``without`` names lists of records that were not recorded, and are empty."""

    start_ns: int = 4_118_873_295_101_876
    shuffle_seed: int | None = None
    without: frozenset[str] = frozenset()


def write_rocprof(machine: Machine, path: Path, options: RocprofOptions | None = None) -> Path:
    """Write a file; a name that ends in .gz is compressed."""
    data = rocprof_bytes(machine, options)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def rocprof_bytes(machine: Machine, options: RocprofOptions | None = None) -> bytes:
    """The file as UTF-8 JSON."""
    return json.dumps({"rocprofiler-sdk-tool": [_Writer(machine, options or RocprofOptions()).tool()]}).encode()


class _Writer:
    def __init__(self, machine: Machine, options: RocprofOptions) -> None:
        self.machine = machine
        self.options = options
        self._kernels: dict[str, int] = {}
        self._messages: dict[int, str] = {}
        self._operations = count(31)
        self._ranges = count(RANGES_FROM)

    def tool(self) -> Record:
        records: dict[str, list[Record]] = {
            "kernel_dispatch": [self._kernel(number, work) for number, work in enumerate(self._kernels_run(), 1)],
            "hip_api": list(self._calls()),
            "hsa_api": [],
            "marker_api": list(self._markers()),
            "rccl_api": [],
            "memory_copy": [self._copy(work) for work in self.machine.works if work.kind == COPY],
            "memory_allocation": [],
            "scratch_memory": [],
            "pc_sample_host_trap": [],
            "rocdecode_api": [],
            "rocjpeg_api": [],
        }
        for name, listed in records.items():
            if name in self.options.without:
                listed.clear()
            if self.options.shuffle_seed is not None:
                random.Random(self.options.shuffle_seed).shuffle(listed)
        kinds = [{"kind": kind, "operations": list(operations)} for kind, operations in KINDS.items()]
        markers = [{"key": key, "value": text} for key, text in self._messages.items()]
        return {
            "metadata": {"pid": PROCESS_ID, **self._window(), "config": {}, "command": ["python3", "train.py"]},
            "agents": list(self._agents()),
            "counters": [],
            "strings": {"callback_records": kinds, "buffer_records": kinds, "marker_api": markers},
            "code_objects": [],
            "kernel_symbols": list(self._symbols()),
            "host_functions": [],
            "summary": [],
            "callback_records": {"counter_collection": []},
            "buffer_records": records,
        }

    def _window(self) -> Record:
        last_ns = max([*(host.now_ns for host in self.machine.hosts), *(work.end_ns for work in self.machine.works), 0])
        return {"init_time": self.options.start_ns - 5_000, "fini_time": self.options.start_ns + last_ns + 9_000}

    def _agents(self) -> Iterator[Record]:
        """The processor, then the devices; numbers of nodes count both, those by type begin at 0 for each."""
        devices = sorted({work.device for work in self.machine.works})
        for number, device in enumerate([None, *range(max(devices, default=-1) + 1)]):
            is_device = device is not None
            yield {
                "size": 328,
                "id": {"handle": HOST_AGENT if device is None else _agent(device)},
                "type": 2 if is_device else 1,
                "node_id": number,
                "logical_node_id": number,
                "logical_node_type_id": device or 0,
                "name": "gfx942" if is_device else "Simulated Processor",
                "vendor_name": "AMD" if is_device else "CPU",
                "product_name": "Simulated Device 80GB" if is_device else "Simulated Processor",
                "cu_count": 132 if is_device else 0,
                "wave_front_size": 64 if is_device else 0,
            }

    def _symbols(self) -> Iterator[Record]:
        yield {"kernel_id": 0, "code_object_id": 0, "kernel_name": "", "formatted_kernel_name": ""}
        for name, number in self._kernels.items():
            yield {
                "size": 80,
                "kernel_id": number,
                "code_object_id": 1,
                "kernel_name": f"_Z{len(name)}{name}.kd",
                "group_segment_size": 0,
                "private_segment_size": 0,
                "sgpr_count": 48,
                "arch_vgpr_count": 32,
                "accum_vgpr_count": 0,
                "formatted_kernel_name": name,
                "demangled_kernel_name": f"{name}.kd",
                "truncated_kernel_name": name.partition("<")[0],
            }

    def _calls(self) -> Iterator[Record]:
        for host in self.machine.hosts:
            for slice_ in host.slices:
                if slice_.category in (CALL, DRIVER_CALL):
                    name = HIP_NAMES[slice_.name]
                    yield self._call("HIP_RUNTIME_API", name, slice_.correlation or 0, host.thread_id, slice_)

    def _markers(self) -> Iterator[Record]:
        for host in self.machine.hosts:
            for slice_ in host.slices:
                if slice_.category in (CALL, DRIVER_CALL, FRAME):
                    continue
                number = next(self._ranges)
                self._messages[number] = self._message(slice_)
                yield self._call("MARKER_CORE_RANGE_API", "roctxThreadRangeA", number, host.thread_id, slice_)

    def _message(self, slice_: Slice) -> str:
        """PyTorch's own ranges have the number of the operation, what a program pushes for itself is as it is."""
        own = slice_.category == ANNOTATION and not slice_.name.startswith(MARKS)
        if own or slice_.name.startswith(STEP_PREFIX):
            return slice_.name
        text = f"{slice_.name}, op_id = {next(self._operations)}"
        if slice_.shapes is not None:
            text += f", sizes = [{', '.join(str(list(shape)) for shape in slice_.shapes)}]"
        return text

    def _call(self, kind: str, operation: str, correlation: int, thread: int, slice_: Slice) -> Record:
        return {
            "size": 64,
            **_kind(kind, operation),
            "correlation_id": {"internal": correlation, "external": 0, "ancestor": 0},
            **self._times(slice_.start_ns, slice_.closed_ns),
            "thread_id": thread,
        }

    def _kernels_run(self) -> list[Work]:
        return [work for work in self.machine.works if work.kind != COPY]

    def _kernel(self, number: int, work: Work) -> Record:
        name = MEMSET_KERNEL if work.kind == SET else work.name
        return {
            "size": 184,
            **_kind("KERNEL_DISPATCH", "KERNEL_DISPATCH_COMPLETE"),
            **self._launched(work),
            "dispatch_info": {
                "size": 104,
                "agent_id": {"handle": _agent(work.device)},
                "queue_id": {"handle": work.device * 4 + 1},
                "kernel_id": self._kernels.setdefault(name, len(self._kernels) + 1),
                "dispatch_id": number,
                "private_segment_size": 0,
                "group_segment_size": 0,
                "workgroup_size": {"x": 128, "y": 1, "z": 1},
                "grid_size": {"x": 132 * 128, "y": 1, "z": 1},
            },
            "stream_id": {"handle": work.queue},
        }

    def _copy(self, work: Work) -> Record:
        direction = work.name.split(" ")[1]
        host, device = {"handle": HOST_AGENT}, {"handle": _agent(work.device)}
        return {
            "size": 128,
            **_kind("MEMORY_COPY", f"MEMORY_COPY_{COPY_DIRECTIONS[direction]}"),
            **self._launched(work),
            "dst_agent_id": host if direction == "DtoH" else device,
            "src_agent_id": host if direction == "HtoD" else device,
            "bytes": work.bytes,
            "stream_id": {"handle": work.queue},
        }

    def _launched(self, work: Work) -> Record:
        """Who launched the work and when it ran; the launching thread is known even where its call is not."""
        main = self.machine.main
        thread = work.launch.thread if work.launch else main
        return {
            "thread_id": thread.thread_id if thread else PROCESS_ID,
            "correlation_id": {"internal": work.correlation, "external": 0},
            **self._times(work.start_ns, work.end_ns),
        }

    def _times(self, start_ns: int, end_ns: int) -> Record:
        return {
            "start_timestamp": start_ns + self.options.start_ns,
            "end_timestamp": end_ns + self.options.start_ns,
        }


def _kind(kind: str, operation: str) -> Record:
    return {"kind": list(KINDS).index(kind), "operation": KINDS[kind].index(operation)}


def _agent(device: int) -> int:
    return 16_345_679_001_230_000_000 + device
