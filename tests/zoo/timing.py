"""Time a program's steps without a profiler, from the end of one optimizer step, or round of requests, to the next.

By the device's events where tensors are made on a CUDA device, else by the host's clock.

python -m tests.zoo.timing per_token_loss --fault
python -m tests.zoo.timing examples/naive_gpt2.py --batched-loss

The last line printed is a JSON list of the steps' nanoseconds, of rank 0 where there are several.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.zoo import command


class Ends:
    """When a device came to the ends of steps; the host's clock where there is no other device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._host: list[int] = []
        self._events: list[Any] = []

    def mark(self) -> None:
        """A step ends after all work launched so far."""
        if not self._is_cuda:
            self._host.append(time.perf_counter_ns())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[-1].record()

    def steps_ns(self) -> list[int]:
        """The times between the marks; waits for the device."""
        if not self._events:
            return [end - begin for begin, end in pairwise(self._host)]
        self._events[-1].synchronize()
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in pairwise(self._events)]


def main() -> None:
    """Run the program of the zoo, or the file, that the first argument names, with the other arguments."""
    name, *arguments = sys.argv[1:]
    ends: list[Ends] = []

    def note(*_: Any) -> None:
        if not ends:  # the program has chosen its device by now
            ends.append(Ends(torch.get_default_device()))
        ends[0].mark()

    register_optimizer_step_post_hook(note)
    command.AFTER_A_ROUND.append(note)
    sys.argv = [name, *arguments]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(f"tests.zoo.{name}", run_name="__main__", alter_sys=True)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(ends[0].steps_ns() if ends else []))


if __name__ == "__main__":
    main()
