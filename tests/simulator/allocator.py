"""A caching allocator that keeps its history, and writes it as `torch.cuda.memory._dump_snapshot` does.

No device was at hand to record a real one. The structure is the public one of `torch.cuda.memory._snapshot`; torch's
own `torch.cuda._memory_viz` reads what is written here, and the tests compare its numbers with ours.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUND = 512
SEGMENT = 2 << 20
Frame = tuple[str, int, str]


class OutOfMemory(Exception):
    """The simulated device has no more memory."""


@dataclass
class SimulatedAllocator:
    """One device's memory: segments from the driver, cut into blocks, first fit.

    Every call takes a microsecond.
    """

    capacity: int = 64 << 20
    device: int = 0
    now_us: int = 1_700_000_000_000_000
    segments: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    recording: bool = True
    _next_address: int = 0x7F00_0000_0000

    @property
    def reserved(self) -> int:
        """What the driver has handed out."""
        return sum(segment["total_size"] for segment in self.segments)

    def allocate(self, size: int, *frames: Frame) -> int:
        """A block of so many bytes; returns its address. Frames are innermost first."""
        rounded = -(-size // ROUND) * ROUND
        stack = self._frames(frames)
        found = self._free_block(rounded)
        if found is None:
            self._new_segment(max(rounded, SEGMENT), size, stack)
            found = self._free_block(rounded)
        assert found is not None
        segment, position = found
        block = segment["blocks"][position]
        if block["size"] > rounded:
            rest = {**block, "size": block["size"] - rounded, "address": block["address"] + rounded}
            segment["blocks"].insert(position + 1, rest)
        block.update(
            size=rounded, requested_size=size, state="active_allocated", frames=stack if self.recording else []
        )
        self._event("alloc", addr=block["address"], size=size, frames=stack)
        return int(block["address"])

    def free(self, address: int, *, wait: bool = False) -> None:
        """Give a block back; with `wait` another stream still uses it."""
        block = next(block for segment in self.segments for block in segment["blocks"] if block["address"] == address)
        self._event("free_requested", addr=address, size=block["requested_size"], frames=[])
        if wait:
            block["state"] = "active_pending_free"
            return
        self._event("free_completed", addr=address, size=block["requested_size"], frames=[])
        block.update(state="inactive", requested_size=0, frames=[])
        self._merge()

    def empty_cache(self) -> None:
        """Give segments that nobody uses back to the driver."""
        for segment in list(self.segments):
            if all(block["state"] == "inactive" for block in segment["blocks"]):
                self.segments.remove(segment)
                self._event("segment_free", addr=segment["address"], size=segment["total_size"], frames=[])

    def snapshot(self) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot()`."""
        self._event("snapshot", addr=0, size=0, frames=[])
        for segment in self.segments:
            active = [block for block in segment["blocks"] if block["state"] != "inactive"]
            segment["active_size"] = sum(block["size"] for block in active)
            segment["allocated_size"] = segment["active_size"]
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": self.segments,
            "device_traces": [*traces, self.history],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "roundup_power2_divisions": {"1": 0},
            },
            "external_annotations": [],
        }

    def dump(self, path: Path, protocol: int = 4) -> Path:
        """Write the snapshot as a pickle."""
        path.write_bytes(pickle.dumps(self.snapshot(), protocol=protocol))
        return path

    def _frames(self, frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
        above = [{"name": "torch::unwind::unwind()", "filename": "??", "line": 0}]
        return above + [{"name": name, "filename": file, "line": line} for file, line, name in frames]

    def _event(self, action: str, **columns: Any) -> None:
        self.now_us += 1
        if self.recording:
            more = {"stream": 0, "time_us": self.now_us, "compile_context": "N/A", "user_metadata": ""}
            self.history.append({"action": action, **columns, **more})

    def _free_block(self, size: int) -> tuple[dict[str, Any], int] | None:
        for segment in self.segments:
            for position, block in enumerate(segment["blocks"]):
                if block["state"] == "inactive" and block["size"] >= size:
                    return segment, position
        return None

    def _new_segment(self, size: int, asked: int, stack: list[dict[str, Any]]) -> None:
        if self.reserved + size > self.capacity:
            free = self.capacity - self.reserved
            self.now_us += 1
            event = {
                "action": "oom",
                "size": asked,
                "device_free": free,
                "stream": 0,
                "time_us": self.now_us,
                "frames": stack,
            }
            self.history.append(event)
            raise OutOfMemory
        block = {"address": self._next_address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
        segment = {
            "device": self.device,
            "address": self._next_address,
            "total_size": size,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": stack,
            "blocks": [block],
        }
        self.segments.append(segment)
        self._event("segment_alloc", addr=self._next_address, size=size, frames=stack)
        self._next_address += size + (1 << 30)

    def _merge(self) -> None:
        """Neighbouring free blocks become one."""
        for segment in self.segments:
            merged: list[dict[str, Any]] = []
            for block in segment["blocks"]:
                if merged and merged[-1]["state"] == block["state"] == "inactive":
                    merged[-1]["size"] += block["size"]
                else:
                    merged.append(block)
            segment["blocks"] = merged


MODEL: tuple[Frame, ...] = (
    ("/usr/lib/python3/site-packages/torch/nn/modules/linear.py", 109, "__init__"),
    ("model.py", 12, "__init__"),
    ("train.py", 5, "main"),
)
FORWARD: tuple[Frame, ...] = (
    ("/usr/lib/python3/site-packages/torch/nn/modules/linear.py", 125, "forward"),
    ("/usr/lib/python3/site-packages/torch/nn/modules/module.py", 1775, "_call_impl"),
    ("model.py", 20, "forward"),
    ("train.py", 9, "main"),
)
BACKWARD: tuple[Frame, ...] = (
    ("/usr/lib/python3/site-packages/torch/autograd/graph.py", 824, "_engine_run_backward"),
    ("train.py", 10, "main"),
)
OPTIMIZER: tuple[Frame, ...] = (
    ("/usr/lib/python3/site-packages/torch/optim/adam.py", 175, "_init_group"),
    ("train.py", 11, "main"),
)
EVALUATION: tuple[Frame, ...] = (("evaluate.py", 3, "collect"), ("train.py", 12, "main"))
KIB = 1024


def training(steps: int = 3, *, history_from_step: int = 0, capacity: int = 64 << 20) -> SimulatedAllocator:
    """A model of 400 KiB, trained; each step keeps 100 KiB in a list. Ends early where memory runs out."""
    allocator = SimulatedAllocator(capacity=capacity, recording=history_from_step == 0)
    allocator.allocate(400 * KIB, *MODEL)
    state = None
    for step in range(steps):
        allocator.recording = step >= history_from_step
        try:
            activations = [allocator.allocate(300 * KIB + 100, *FORWARD) for _ in range(2)]
            inner = allocator.allocate(50 * KIB, *BACKWARD)
            gradient = allocator.allocate(400 * KIB, *BACKWARD)
            for block in [inner, *activations]:
                allocator.free(block)
            if state is None:
                state = allocator.allocate(800 * KIB, *OPTIMIZER)
            allocator.free(gradient)
            allocator.allocate(100 * KIB, *EVALUATION)
        except OutOfMemory:
            break
    return allocator
