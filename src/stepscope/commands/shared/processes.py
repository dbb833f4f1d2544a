"""The same work for many files, in as many processes as the machine has room for, or on a cluster of Dask.

`concurrent.futures` would do less: a process that ends, as for lack of memory, breaks its whole pool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from stepscope.errors import UsageError
from stepscope.files import undone_on_error

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

_Result = TypeVar("_Result")
FEW: Final = 4
"""Files for which the start of processes takes as long as the work."""
_ANSWERS_WITHIN_S: Final = 20
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
) -> Iterator[tuple[Path, _Result | None]]:
    """Each file and the result of `work` for it, in any order; None where the process ended, as for lack of memory.

    Args:
        work: a function of a module; what it raises ends its process.
        begin: called with `given` at the start of each process.
        spared: processors that are left to others.
    """
    from multiprocessing.connection import wait

    left = deque(files)
    processes: dict[Connection, SpawnProcess] = {}
    at_work: dict[Connection, Path | None] = {}

    def start() -> None:
        with contextlib.suppress(OSError):  # no room for a further one
            pipe, process = _started(work, begin, given)
            processes[pipe], at_work[pipe] = process, None

    try:
        for _ in range(process_count(files, spared)):
            start()
        while at_work:
            for pipe in cast("list[Connection]", wait(list(at_work))):
                file = at_work.pop(pipe)
                try:
                    result = pipe.recv()
                except (EOFError, OSError):  # one that cannot even begin is not replaced
                    if file is not None:
                        start()
                        yield file, None
                    continue
                if left:
                    at_work[pipe] = left.popleft()
                    with contextlib.suppress(OSError):  # it has ended, which is seen next
                        pipe.send(at_work[pipe])
                if file is not None:
                    yield file, result
        yield from ((file, None) for file in left)
    finally:
        for pipe, process in processes.items():
            process.terminate()
            pipe.close()


def on_cluster(
    work: Callable[..., _Result], files: Sequence[Path], given: tuple[Any, ...], address: str
) -> Iterator[tuple[Path, _Result | str]]:
    """Each file and the result of `work` for it on the workers of a Dask scheduler, in any order, or why there is none.

    Args:
        work: a function of a module that workers can import, called with a file and `given`.

    Raises:
        UsageError: the scheduler cannot be reached, or Dask is not installed.
    """
    try:
        distributed: Any = import_module("distributed")  # its types are not whole
    except ImportError as error:
        raise UsageError("--scheduler needs Dask, which is not installed: pip install 'stepscope[cluster]'") from error
    try:
        client = distributed.Client(address, timeout=_ANSWERS_WITHIN_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        asked = client.map(work, files, given=given, pure=False)  # anew where a worker is lost, by Dask's own settings
        file_of = dict(zip((future.key for future in asked), files, strict=True))
        waiting = distributed.as_completed(asked)
        try:
            for future in waiting:
                failed = _CANCELLED if future.cancelled() else future.exception()
                yield file_of[future.key], future.result() if failed is None else _reason(failed)
                future.cancel()  # the cluster forgets the result
        finally:
            client.cancel(list(waiting.futures))


_CANCELLED: Final = RuntimeError("the scheduler ended or cancelled it")


def _reason(error: BaseException) -> str:
    if type(error).__name__ == "KilledWorker":  # also what only waited there, if that happens to it a few times
        return "each worker that was given it ended, perhaps for lack of memory; call again for this one"
    return f"the cluster cannot read it: {type(error).__name__}: {error}"


def _started(
    work: Callable[[Path], _Result], begin: Callable[..., None], given: tuple[Any, ...]
) -> tuple[Connection, SpawnProcess]:
    import multiprocessing
    from multiprocessing import resource_tracker

    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_serve, args=(other, work, begin, given), daemon=True)
    with other, undone_on_error(own.close):
        if sys.platform == "win32":
            process.start()
        else:
            resource_tracker.ensure_running()  # which would unblock the signal
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return own, process


def process_count(files: Sequence[Path], spared: int = 0) -> int:
    """How many processes the processors and the memory that this process may use have room for; at least one."""
    from stepscope.readers.source import memory_limit

    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = memory_limit() / max(map(_needed, files), default=1.0)
    return max(min(processors - spared, int(room), len(files)), 1)


def _needed(file: Path) -> float:
    from stepscope.readers.source import file_bytes

    size = file_bytes(file) or 0
    is_packed = file.suffix in (".gz", ".zst")
    return _EACH_BYTES + size * (_TIMES_PACKED if is_packed else _TIMES_PLAIN)


def _serve(
    pipe: Connection, work: Callable[[Path], object], begin: Callable[..., None], given: tuple[Any, ...]
) -> None:
    """Work on files of the pipe until it is closed: print nothing, give way to everything else, leave Ctrl-C alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the process's life
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)
    begin(*given)
    pipe.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(work(pipe.recv()))
