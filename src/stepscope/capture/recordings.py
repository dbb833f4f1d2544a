"""Which profiler records a program: torch's, JAX's or that of PyTorch/XLA, by what the program uses."""

from __future__ import annotations

import sys
from typing import Any

from stepscope.capture.controller import Recording, StepSource
from stepscope.capture.options import RecordOptions


def new_recording(options: RecordOptions, first_step: int, source: StepSource, *, uses_jax: bool) -> Recording:
    """A recording that has not begun.

    Args:
        options: what is recorded besides times.
        first_step: number of the first recorded step.
        source: what shows where steps end.
        uses_jax: whether JAX showed any; a program may import it and do its steps in torch.
    """
    if _torch_xla_runs():
        from stepscope.capture.xla_profilers import TorchXlaProfiler
        from stepscope.capture.xla_recorder import XlaRecorder

        return XlaRecorder(TorchXlaProfiler(), options, first_step=first_step, marks_steps=not source.marks_steps)
    is_torchs = source in (StepSource.FORWARD, StepSource.OPTIMIZER)
    if "jax" in sys.modules and not is_torchs and (uses_jax or "torch" not in sys.modules):
        from stepscope.capture.xla_profilers import JaxProfiler
        from stepscope.capture.xla_recorder import XlaRecorder

        return XlaRecorder(JaxProfiler(), options, first_step=first_step, marks_steps=not source.marks_steps)
    from stepscope.capture.recorder import Recorder

    return Recorder(options, first_step=first_step)


def _torch_xla_runs() -> bool:
    """Whether PyTorch/XLA has a device in use, and is not merely imported."""
    module: Any = sys.modules.get("torch_xla")
    is_initialized = getattr(getattr(module, "_XLAC", None), "_xla_runtime_is_initialized", None)
    return bool(is_initialized is not None and is_initialized())
