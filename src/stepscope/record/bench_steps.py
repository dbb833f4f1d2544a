"""Record when the steps of a program end, for `stepscope bench`.

No profiler runs. A step costs a clock reading and, if the process uses an accelerator, one event on its stream, so
that the times are when the device reached the end of each step, not when the host had launched it.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from stepscope import guard
from stepscope.files import with_checksum
from stepscope.machine.quiet import FixedSeeds
from stepscope.record.controller import StepController, StepSource
from stepscope.record.hooks import StepHooks
from stepscope.record.manifest import rank_and_world_size
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.run_process import (
    OPTIMIZER_PATIENCE_S,
    BackgroundHelpers,
    RunOptions,
    end_program,
    is_helper,
    optimizer_exists,
)

MOST_LOSSES: Final = 4096
_BEFORE_SCALING: Final = "_stepscope_before_scaling"


class BackwardLosses:
    """Records the value of every backward pass from `start` on; torch must be imported already."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        torch: Any = sys.modules["torch"]
        self._restore.append(guard.put(torch.autograd, "backward", guard.around(torch.autograd.backward, self._note)))
        scaler: Any = getattr(getattr(torch, "amp", None), "GradScaler", None)
        if scaler is not None and "scale" in vars(scaler):
            self._restore.append(guard.put(scaler, "scale", guard.around(scaler.scale, after=_scaled)))

    def stop(self) -> list[float]:
        """Remove the patches from torch; wait for the device and return the losses."""
        while self._restore:
            self._restore.pop()()
        found: list[float] = []
        with guard.attempt():  # the device failed: keep the values that were read before
            found.extend(float(tensor) for tensor in self._tensors)
        self._tensors.clear()
        return found

    @guard.entry
    def _note(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Keep a copy of the first value: the program may change the tensor in place or reuse its memory."""
        if len(self._tensors) >= MOST_LOSSES:
            return
        torch: Any = sys.modules["torch"]
        first = next(iter(tensors), None) if type(tensors) in (list, tuple) else tensors  # an iterator is not consumed
        loss = getattr(first, _BEFORE_SCALING, first) if isinstance(first, torch.Tensor) else None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or _is_captured(torch, loss):
            return
        self._tensors.append(loss.detach().clone())


@guard.entry
def _scaled(_: None, result: Any, scaler: Any, outputs: Any) -> None:
    tensor: Any = sys.modules["torch"].Tensor
    if isinstance(result, tensor) and isinstance(outputs, tensor):
        setattr(result, _BEFORE_SCALING, outputs)


def _is_captured(torch: Any, tensor: Any) -> bool:
    """Whether a CUDA graph is being captured, which would record the copy."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def fix_seeds(seed: int) -> FixedSeeds:
    """Seed the random generators so that every run with this seed draws the same numbers; torch must be imported.

    `seed` is added to every seed that the program sets itself, so that another seed changes those too; 0 keeps them.
    """
    seeds = FixedSeeds(seed)
    if not seed:
        return seeds
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    for owner, name in ((torch, "manual_seed"), (random, "seed"), (getattr(numpy, "random", None), "seed")):
        if owner is not None:
            setattr(owner, name, _moved(getattr(owner, name), seed))
    return seeds


def _moved(function: Callable[..., Any], by: int) -> Callable[..., Any]:
    def seed(*positional: Any, **named: Any) -> Any:
        if positional and isinstance(positional[0], int):
            positional = (positional[0] + by, *positional[1:])
        named = {name: value + by if isinstance(value, int) else value for name, value in named.items()}
        return function(*positional, **named)

    return seed


PREFIX: Final = "steps-"
"""Prefix of the files in a rank's folder that hold the results of `BenchSteps`."""
_DEVICE_KINDS: Final = ("cuda", "xpu")


class BenchSteps:
    """Records when steps end, and ends the program after enough of them; a listener of the step controller.

    If steps are later detected by a better source, only the steps of that source count.
    """

    def __init__(self, controller: StepController, folder: RunFolder, options: RunOptions) -> None:
        self._controller = controller
        self._folder = folder
        self._boundaries = options.steps + 1  # the start of the first step is unknown
        self._helpers = BackgroundHelpers(folder.path, options, telemetry=False)
        self._losses = BackwardLosses() if options.losses else None
        self._seed = options.seed if options.losses else None
        self._hooks: StepHooks | None = None
        self._source = StepSource.NONE
        self._ends_ns: list[int] = []
        self._device: DeviceMarks | None = None
        self._started_s = time.monotonic()
        self._waits_for_optimizer: bool | None = None
        self._over = False
        self.process = os.getpid()

    @property
    def has_begun(self) -> bool:
        return self._source is not StepSource.NONE

    def watch_torch(self) -> None:
        if self._hooks is None:
            self._hooks = StepHooks(self._controller, watch_input=False)
            self._hooks.install()
            if self._seed is not None:
                fix_seeds(self._seed)
            if self._losses is not None:
                self._losses.start()

    def step_ended(self, step: int) -> None:
        now = time.perf_counter_ns()
        if self._controller.source is not self._source:
            self._source = self._controller.source
            self._restart()
        if self._device is None:
            self._device = DeviceMarks.of_this_process()
            if self._device is not None:
                self._ends_ns.clear()
        if len(self._ends_ns) >= self._boundaries:
            return
        if self._device is None or self._device.mark():
            self._ends_ns.append(now)
        if len(self._ends_ns) == 1 and not is_helper():
            self._helpers.begin()
            self._helpers.recording_begins()
            self._ends_ns[0] = time.perf_counter_ns()

    def step_begins(self, step: int) -> None:
        if len(self._ends_ns) >= self._boundaries and not self._over and self._may_end():
            if is_helper():
                self.let_go()
                return
            self._finish()
            end_program()

    @guard.entry
    def program_ends(self) -> None:
        if os.getpid() == self.process and self.has_begun and not self._over:
            self._finish()

    def abandon(self) -> None:
        """After an internal error, stop recording and leave the program unchanged."""
        for action in (self._controller.abandon, self._helpers.recording_ends, self.let_go):
            guard.attempted(action)
        if self._losses is not None:
            guard.attempted(self._losses.stop)

    def let_go(self) -> None:
        """Remove the hooks from torch and stop counting steps."""
        self._over = True
        if self._hooks is not None:
            self._hooks.remove()
        self._controller.listener = None

    def _restart(self) -> None:
        """Drop the steps found so far, since a better step source was seen."""
        self._ends_ns.clear()
        self._device = None
        self._started_s = time.monotonic()

    def _may_end(self) -> bool:
        if self._source >= StepSource.OPTIMIZER or time.monotonic() - self._started_s >= OPTIMIZER_PATIENCE_S:
            return True
        if self._waits_for_optimizer is None:
            self._waits_for_optimizer = "torch.optim.optimizer" in sys.modules and optimizer_exists()
        return not self._waits_for_optimizer

    def _finish(self) -> None:
        self._over = True
        ends_ns, clock = self._ends_ns, "host"
        if self._device is not None:
            with guard.attempt():  # the device failed: use the host's clock only
                ends_ns, clock = self._device.ends_ns(), "device"
        self._helpers.recording_ends()
        losses = self._losses.stop() if self._losses is not None else []
        if not is_helper():
            self._write(ends_ns, clock, losses)
        self.let_go()

    def _write(self, ends_ns: Sequence[int], clock: str, losses: Sequence[float]) -> None:
        rank, world_size = rank_and_world_size()
        write_json(
            self._folder.rank_folder(rank) / f"{PREFIX}{self.process}.json",
            with_checksum(
                {
                    "process": self.process,
                    "machine": platform.node(),
                    "world_size": world_size,
                    "source": self._source.name.lower(),
                    "clock": clock,
                    "complete": len(ends_ns) >= self._boundaries,
                    "ends_ns": list(ends_ns),
                    "losses": list(losses),
                    "own_profiler": self._controller.others.seen,
                    "said": self._helpers.said,
                }
            ),
        )


class DeviceMarks:
    """Events on the current stream of an accelerator (torch.cuda or torch.xpu), one for each end of a step."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        self._events: list[Any] = []

    @classmethod
    def of_this_process(cls) -> DeviceMarks | None:
        torch: Any = sys.modules.get("torch")
        for kind in _DEVICE_KINDS:
            module = getattr(torch, kind, None)
            if module is not None and module.is_initialized():
                return cls(module)
        return None

    def mark(self) -> bool:
        """Record an event after all launched work; return False during graph capture, which would record it too."""
        if self._is_capturing():
            return False
        event = self._module.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        return True

    def ends_ns(self) -> list[int]:
        """Return when the device reached each event (time.perf_counter_ns); waits for the last."""
        if not self._events:
            return []
        self._events[-1].synchronize()
        now_ns = time.perf_counter_ns()
        return ends_from_gaps([first.elapsed_time(second) for first, second in pairwise(self._events)], now_ns)


def ends_from_gaps(gaps_ms: Sequence[float], last_ns: int) -> list[int]:
    """Convert the gaps between events in milliseconds, and the last event's time, to times of all events."""
    back_ms = accumulate(reversed(gaps_ms), initial=0.0)
    return [last_ns - round(each * 1e6) for each in back_ms][::-1]
