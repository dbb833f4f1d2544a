"""The profilers of XLA in this process: that of JAX, and that of PyTorch/XLA.

Both write an `.xplane.pb` file and record the device as well as the host. Imports nothing but what the program has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope import guard
from stepscope.record.schedule import RecordOptions

STEP_NAME: Final = "step"
"""What a step is called that the program does not mark itself; its number is the event's `step_num`."""


class XlaProfiler(Protocol):
    """A profiler of XLA."""

    def start(self, folder: Path, options: RecordOptions) -> None:
        """Begin to record; the profile will be written below a folder."""

    def stop(self) -> None:
        """End, and write the profile."""

    def step(self, number: int) -> AbstractContextManager[Any]:
        """What marks a step while it is open."""

    def wait(self) -> None:
        """Return when the devices have done what they were given so far."""


class JaxProfiler:
    """The profiler of JAX; jax is imported."""

    def start(self, folder: Path, options: RecordOptions) -> None:
        """Begin to record; Python frames only where stacks are asked for, since they are many."""
        profiler: Any = sys.modules["jax"].profiler
        if not hasattr(profiler, "ProfileOptions"):  # jax before 0.5 has none
            profiler.start_trace(str(folder))
            return
        chosen = profiler.ProfileOptions()
        chosen.python_tracer_level = int(options.stacks)
        profiler.start_trace(str(folder), profiler_options=chosen)

    def stop(self) -> None:
        """End, and write the profile."""
        profiler: Any = sys.modules["jax"].profiler
        profiler.stop_trace()

    def step(self, number: int) -> AbstractContextManager[Any]:
        """A StepTraceAnnotation."""
        profiler: Any = sys.modules["jax"].profiler
        mark: AbstractContextManager[Any] = profiler.TraceAnnotation(STEP_NAME, _r=1, step_num=number)
        return mark

    def wait(self) -> None:
        """Wait for every array that is alive, and so for what computes it."""
        jax: Any = sys.modules["jax"]
        for array in jax.live_arrays():
            with guard.attempt():  # given away to a later call, or of a computation that failed
                array.block_until_ready()


class TorchXlaProfiler:
    """The profiler of PyTorch/XLA; torch_xla is imported."""

    def start(self, folder: Path, options: RecordOptions) -> None:
        """Begin to record; nothing can be chosen."""
        import_module("torch_xla.debug.profiler").start_trace(str(folder))

    def stop(self) -> None:
        """End, and write the profile."""
        import_module("torch_xla.debug.profiler").stop_trace()

    def step(self, number: int) -> AbstractContextManager[Any]:
        """The event of a StepTrace, without the synchronisation that a StepTrace ends with."""
        return torch_xla_event(STEP_NAME, _r=1, step_num=number)

    def wait(self) -> None:
        """Wait for what the devices were given."""
        import_module("torch_xla.core.xla_model").wait_device_ops()


def torch_xla_event(name: str, **stats: Any) -> AbstractContextManager[Any]:
    """An event in the profile, and nothing else: the annotations of PyTorch/XLA also open a scope, inside which the
    program may not call torch_xla.sync()."""
    annotation: Any = import_module("torch_xla.debug.profiler").Trace
    event: AbstractContextManager[Any] = annotation.__bases__[0](name, **stats)
    return event


def xla_facts() -> tuple[Mapping[str, str], list[str]]:
    """Versions, and names of the accelerators that JAX uses in this process; starts no device."""
    versions = {}
    for name in ("jax", "jaxlib", "flax", "optax", "equinox", "torch_xla"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    devices: list[str] = []
    with guard.attempt():  # where jax has it is not promised
        bridge: Any = sys.modules.get("jax._src.xla_bridge")
        if bridge is not None and bridge.backends_are_initialized():
            jax: Any = sys.modules["jax"]
            devices = [str(each.device_kind) for each in jax.local_devices() if each.platform != "cpu"]
    return versions, devices
