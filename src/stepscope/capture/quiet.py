"""A quiet process: kept to its cores, without garbage collection while steps are recorded, with fixed seeds if asked.

Nothing outside the process is changed, and all but the seeds is undone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stepscope.capture import guard
from stepscope.capture.environment_machine import Machine, Runtime
from stepscope.capture.environment_settings import program_settings
from stepscope.capture.quiet_cores import CoreShare, core_share
from stepscope.capture.quiet_seeds import FixedSeeds

__all__ = ["QuietReport", "QuietSteps", "prepare_quiet", "quiet_steps"]

_THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


@dataclass
class QuietReport:
    """What `prepare_quiet` did to this process.

    Attributes:
        cores: the logical cores it was pinned to; empty where it was left as it was.
        done: what was done, a phrase each.
        refused: what could not be done and why, a phrase each.
    """

    cores: tuple[int, ...] = ()
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False, compare=False)

    def sentences(self) -> list[str]:
        """All of it for people, a sentence each."""
        return [f"Quiet machine: {phrase}." for phrase in self.done] + [
            f"Quiet machine, not done: {phrase}." for phrase in self.refused
        ]

    def undo(self) -> None:
        """Give the process its cores and threads back; may be called again."""
        self._undo.close()


@dataclass
class QuietSteps:
    """What `quiet_steps` did, a phrase each; `noise` is what the program itself does to its timings."""

    done: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)


def prepare_quiet(
    rank: int, local_world_size: int, *, seed: int | None = None, machine: Machine | None = None
) -> QuietReport:
    """Pin the process to its share of the cores and fix seeds, before the program begins; never raises for the system.

    Args:
        rank: of the process, local or global: ranks are taken to be numbered machine by machine.
        local_world_size: processes of the run on this machine.
        seed: for Python's, NumPy's and PyTorch's random numbers; None leaves them alone.
        machine: where to read the cores and devices from; this one by default.
    """
    report = QuietReport()
    ranks = max(1, local_world_size)
    share = core_share(machine or Machine(), rank % ranks, ranks)
    if not share.possible:
        report.refused.append(f"the process is not pinned: {share.why}")
    elif share.cores is None:
        report.done.append(share.why)
    else:
        _pin(report, share)
    if share.possible and share.threads is not None:
        _limit_threads(report, share.threads)
    if seed is not None:
        seeds = FixedSeeds(seed)
        report.done.append(seeds.done)
        report.refused.extend([seeds.missing] if seeds.missing else [])
        report._undo.callback(seeds.stop)
    return report


@contextlib.contextmanager
def quiet_steps() -> Iterator[QuietSteps]:
    """Hold garbage collection off inside the block and leave the collector exactly as it was found.

    Everything alive is collected once and then frozen, so that the collection after the block has little to look
    through. Blocks may be nested and may overlap in several threads: the last one to end restores.
    """
    report = QuietSteps(noise=_noise())
    report.done.append(_COLLECTOR.hold())
    try:
        yield report
    finally:
        _COLLECTOR.release()


class _HeldCollector:
    """The garbage collector of the process, held off while anyone asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._was_on = False
        self._froze = False

    def hold(self) -> str:
        """Hold it off; returns what was done."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._was_on = gc.isenabled()
                gc.collect()
                # Objects the program itself froze could not be told from ours: unfreezing would free them too.
                self._froze = gc.get_freeze_count() == 0
                if self._froze:
                    gc.freeze()
                gc.disable()
            frozen = f"{gc.get_freeze_count():,} objects frozen" if self._froze else "the program's frozen objects kept"
            return f"garbage collection held off during the recorded steps, {frozen}"

    def release(self) -> None:
        """Restore it, if nobody else holds it."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            if self._froze:
                gc.unfreeze()
            if self._was_on:
                gc.enable()
            else:
                gc.disable()

    @guard.entry
    def forget(self) -> None:
        """In a forked child, whose threads that held it are gone: restore it."""
        self._lock = threading.Lock()
        if self._holders:
            self._holders = 1
            self.release()


_COLLECTOR: Final = _HeldCollector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COLLECTOR.forget)


def _pin(report: QuietReport, share: CoreShare) -> None:
    """Keep every thread of the process to the share's cores."""
    if not hasattr(os, "sched_setaffinity"):
        report.refused.append(f"the process is not pinned: {sys.platform} has no way to do so")
        return
    assert share.cores is not None
    own = os.sched_getaffinity(0)
    before: dict[int, set[int]] = {}
    try:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, share.cores)
    except OSError as error:
        _restore(before, own)
        report.refused.append(f"the process is not pinned: the system refuses ({error.strerror})")
        return
    report.cores = tuple(sorted(share.cores))
    report.done.append(f"{share.why}; threads and processes that it starts stay there too")
    report._undo.callback(_restore, before, own)


def _restore(before: dict[int, set[int]], own: set[int]) -> None:
    """Give every thread the cores it had; those begun since get the main thread's."""
    for thread in _threads():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, before.get(thread, own))


def _threads() -> list[int]:
    """Numbers of the process's threads, as the system counts them."""
    try:
        return [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]


def _limit_threads(report: QuietReport, limit: int) -> None:
    """Let an operator use no more threads than there are cores for them."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        before = torch.get_num_threads()
        if before > limit:
            torch.set_num_threads(limit)
            report.done.append(f"PyTorch uses {limit} thread{'s' if limit > 1 else ''} instead of {before}")
            report._undo.callback(torch.set_num_threads, before)
    elif _THREADS_VARIABLE not in os.environ:
        os.environ[_THREADS_VARIABLE] = str(limit)
        report.done.append(f"{_THREADS_VARIABLE}={limit} is set, as many as there are cores for them")
        report._undo.callback(os.environ.pop, _THREADS_VARIABLE, None)


def _noise() -> list[str]:
    """Debugging aids that the running program has switched on."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_anomaly_enabled"):
        return []
    from dataclasses import replace

    # A recording itself may trace Python calls.
    runtime = replace(Runtime.of_this_process(torch=torch), tracer="")
    return [found.title for found in program_settings(Machine(runtime=runtime)) if found.verdict == "problem"]
