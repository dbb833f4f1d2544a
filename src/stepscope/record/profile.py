"""`stepscope.profile`: record a block of code, or nothing.

Cheap to import, since programs that do not record import it too.
"""

from __future__ import annotations

TYPE_CHECKING = False  # like typing.TYPE_CHECKING; typing is too slow to import here
if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike
    from pathlib import Path
    from types import TracebackType
    from typing import Any

    from stepscope import Diagnosis
    from stepscope.record.profile_block import ProfileBlock
    from stepscope.record.schedule import Schedule


class NullProfile:
    """The result of `profile(enabled=False)`: the interface of a profile block without any effect."""

    __slots__ = ()

    enabled = False
    is_recording = False
    step_number = 0
    problem: str | None = None
    traces: tuple[Path, ...] = ()

    def __enter__(self) -> NullProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def start(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str | PathLike[str], use_python_export: bool = False) -> None: ...

    def diagnosis(self) -> Diagnosis | None:
        return None


_NOTHING = NullProfile()


def profile(
    out: str | PathLike[str] | None = None,
    *,
    schedule: Schedule | None = None,
    enabled: bool = True,
    diagnose: bool = False,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = True,
    lines: bool = True,
    flops: bool = False,
    modules: bool = False,
    on_trace_ready: Callable[[ProfileBlock], Any] | None = None,
    name: str | None = None,
) -> ProfileBlock | NullProfile:
    """Record the steps of a block of code:

        with stepscope.profile("trace.json.gz", schedule=stepscope.schedule(wait=5, active=3, repeat=1)) as profile:
            for batch in loader:
                train(batch)
                profile.step()

    A trace is saved at the end of each cycle of the schedule and at the end of the block, also when the block raises;
    the exception propagates unchanged.

    Args:
        out: a file (`.json` or `.json.gz`; several cycles are numbered) or a folder; None for a run folder, under
            `stepscope run` that run's.
        schedule: which steps are recorded, `stepscope.schedule(...)` or torch.profiler.schedule's; None for all.
        enabled: False returns an object with the same interface that records nothing and costs nothing.
        diagnose: print the diagnosis of the last trace at the end of the block (on rank 0).
        shapes, stacks, memory, lines, flops, modules: see `stepscope.record.schedule.RecordOptions`.
        on_trace_ready: called with the block after each trace is saved; torch.profiler's handlers work too.
        name: name of the run folder that is made if `out` is None.

    Raises:
        UsageError: at the start of the block, if PyTorch is not installed, `out` has another suffix, or another
            recording runs in this process.
    """
    if not enabled:
        return _NOTHING
    from stepscope import guard

    with guard.attempt() as loading:
        from stepscope.record.profile_block import open_block
        from stepscope.record.schedule import RecordOptions
    if loading.error is not None:
        guard.failed(loading.error, "record.profile")
        return _NOTHING
    options = RecordOptions(
        shapes=shapes, stacks=stacks, memory=memory, lines=lines, flops=flops, modules=modules
    )  # fmt: skip
    block = open_block(out, schedule, options, diagnose=diagnose, on_trace_ready=on_trace_ready, name=name)
    return _NOTHING if block is None else block
