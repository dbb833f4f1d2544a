"""The same work for many files, in as many processes as the machine has room for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

_Result = TypeVar("_Result")
FEW: Final = 4
"""Files for which the start of processes takes as long as the work."""
_EACH_BYTES: Final = 300 << 20
_TIMES_PLAIN: Final = 2.5
_TIMES_PACKED: Final = 40
"""Memory that diagnosing a file takes, in times its size, besides _EACH_BYTES."""


def in_processes(
    work: Callable[[Path], _Result],
    files: Sequence[Path],
    *,
    begin: Callable[..., None],
    given: tuple[Any, ...],
    spared: int = 0,
) -> Iterator[_Result]:
    """The results of `work` for each file, in any order.

    Args:
        work: a function of a module; what it raises stops all.
        begin: called with `given` at the start of each process.
        spared: processors that are left to others.
    """
    import multiprocessing

    count = process_count(files, spared)
    with multiprocessing.get_context("spawn").Pool(count, _begun, (begin, given)) as pool:
        yield from pool.imap_unordered(work, files)


def process_count(files: Sequence[Path], spared: int = 0) -> int:
    """How many processes the processors and the memory that this process may use have room for; at least one."""
    from stepscope.readers.source import memory_limit

    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = memory_limit() / max(map(_needed, files), default=1.0)
    return max(min(processors - spared, int(room), len(files)), 1)


def _needed(file: Path) -> float:
    try:
        size = file.stat().st_size
    except OSError:
        size = 0
    is_packed = file.suffix in (".gz", ".zst")
    return _EACH_BYTES + size * (_TIMES_PACKED if is_packed else _TIMES_PLAIN)


def _begun(begin: Callable[..., None], given: tuple[Any, ...]) -> None:
    """Begin a process: it prints nothing, gives way to everything else, and leaves Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the process's life
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)
    begin(*given)
