"""Processes that stay alive and try one input after the other, each under a limit of time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.seeds import Case

TIME_LIMIT_S = 20.0
"""Of the processor's time, so that a busy machine is no fault; waiting counts after ten times as long."""
MEMORY_LIMIT_BYTES = 3 * 2**30
INPUTS_OF_A_WORKER = 3000
"""A fresh process after so many: what a library leaves behind does not add up."""
_HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """An input by the numbers that it is made of, or a case that is given, with a command to run first.

    Words of commands name the folder of the case as PLACE.
    """

    format: str
    seed: int
    number: int
    case: Case | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of an input: "result", "refusal" or "fault", which has a signature, a traceback and its files."""

    job: Job
    kind: str
    seconds: float
    peak_bytes: int
    signature: str = ""
    detail: str = ""
    case: Case | None = None
    command: tuple[str, ...] = ()


PLACE = "{place}"


def made(job: Job, seeds: dict[str, list[Case]]) -> Case:
    """The damaged files of a job."""
    from tests.fuzz.formats import FORMATS, changed_case

    if job.case is not None:
        return job.case
    if job.format not in seeds:
        seeds[job.format] = next(each for each in FORMATS if each.name == job.format).seeds()
    random = Random(f"{job.seed} {job.format} {job.number}")
    return changed_case(random, random.choice(seeds[job.format]))


def examine(job: Job, case: Case, place: Path) -> tuple[str, str, str]:
    """Kind, signature and detail of what became of a case."""
    from stepscope.errors import StepscopeError
    from tests.fuzz.formats import FORMATS, clean, examine_again
    from tests.fuzz.invariants import Broken, check_sentence, last_command

    form = next(each for each in FORMATS if each.name == job.format)
    clean(place)
    last_command.clear()
    try:
        path = case.write(place)
    except (OSError, ValueError):
        return "refusal", "", "no file system takes this name"
    try:
        try:
            if job.command:
                (place / ".out").mkdir(exist_ok=True)
                examine_again([word.replace(PLACE, str(place)) for word in job.command])
            form.examine(path, Random(f"{job.seed} {job.number}"))
        except StepscopeError as error:
            check_sentence(error)
            return "refusal", "", str(error)
    except Broken as error:
        return "fault", f"Broken {str(error).split(':')[0]}", traceback.format_exc()
    except (Exception, SystemExit) as error:
        return "fault", _signature(error), traceback.format_exc()
    except BaseException as error:  # what Rust code raises as it panics
        if isinstance(error, KeyboardInterrupt):
            raise
        return "fault", _signature(error), traceback.format_exc()
    return "result", "", ""


def _signature(error: BaseException) -> str:
    """The error's class and the innermost line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}stepscope{os.sep}" in frame.filename] or list(frames)
    place = ours[-1].filename.rpartition(f"{os.sep}stepscope{os.sep}")[2]
    return f"{type(error).__name__} {place}:{ours[-1].name}"


def _serve(pipe: Connection, place: str) -> None:
    """Answer jobs until the pipe closes."""
    _prepare(Path(place))
    from tests.fuzz.invariants import last_command

    seeds: dict[str, list[Case]] = {}
    home = Path(place) / "case"
    home.mkdir(exist_ok=True)
    trim = _allocator_trim()
    while True:
        try:
            job: Job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        case = made(job, seeds)
        shutil.rmtree(Path(place) / "data", ignore_errors=True)  # runs and prices of the last input
        gc.collect(0)
        _reset_peak()
        began, before = time.perf_counter(), _memory("VmRSS")
        kind, signature, detail = examine(job, case, home)
        took, peak = time.perf_counter() - began, max(0, _memory("VmHWM") - before)
        if peak > 2**26:
            gc.collect()
            trim()
        outcome = Outcome(job, kind, took, peak)
        if kind == "fault":
            words = tuple(word.replace(str(home), PLACE) for word in last_command)
            outcome = replace(outcome, signature=signature, detail=detail[-6000:], case=case, command=words)
        pipe.send(outcome)


def _prepare(place: Path) -> None:
    """Everything of the user's out of the way, limits on memory, and no word of native code on the terminal."""
    for name in ("CACHE", "CONFIG", "DATA"):
        os.environ[f"STEPSCOPE_{name}_DIR"] = str(place / name.lower())
    os.environ["COLUMNS"] = "120"
    os.environ.pop("STEPSCOPE_DEVICES", None)
    (place / "tmp").mkdir(exist_ok=True)
    tempfile.tempdir = str(place / "tmp")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES + 2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    import stepscope.commands  # noqa: F401
    import tests.fuzz.formats  # noqa: F401

    gc.collect()
    gc.freeze()


def _allocator_trim() -> Any:
    try:
        return lambda: ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return lambda: None


def _memory(what: str) -> int:
    """Bytes, as Linux counts them; elsewhere the peak of the process."""
    try:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{what}:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _worked_s(pid: int | None) -> float:
    """Seconds of the processor's time that a process has used, as Linux counts them; elsewhere the time of day."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return time.monotonic()


class Worker:
    """A process and its pipe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._start()

    def _start(self) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self._root))
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self.place)), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.tried, self.worked_s, self.given_s = 0, 0.0, 0.0

    def give(self, job: Job) -> None:
        if self.tried >= INPUTS_OF_A_WORKER:
            self.restart()
        self.job = job
        start = 60.0 if not self.tried else 0.0  # it imports everything first
        self.tried += 1
        self.worked_s, self.given_s = _worked_s(self.process.pid) + start, time.monotonic() + 10 * start
        self.pipe.send(job)

    def answer(self) -> Outcome | None:
        """The outcome, where there is one; a worker that hangs or died is replaced."""
        assert self.job is not None
        job, why = self.job, ""
        if self.pipe.poll():
            try:
                self.job = None
                return self.pipe.recv()  # type: ignore[no-any-return]
            except (EOFError, OSError):
                self.process.join(5)
                why = f"Died with exit code {self.process.exitcode}"
        elif self._hangs():
            why = f"Hung for {TIME_LIMIT_S:.0f} seconds"
        if not why:
            return None
        self.restart()
        return Outcome(job, "fault", TIME_LIMIT_S, 0, why, why, job.case or made(job, {}))

    def _hangs(self) -> bool:
        return (
            _worked_s(self.process.pid) - self.worked_s > TIME_LIMIT_S
            or time.monotonic() - self.given_s > 10 * TIME_LIMIT_S
        )

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        shutil.rmtree(self.place, ignore_errors=True)


class Team:
    """Some workers, for as long as the `with` lasts."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> Team:
        os.environ.setdefault("POLARS_MAX_THREADS", "1")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), str(_HERE / "src"), os.environ.get("PYTHONPATH", "")])
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._root = tempfile.mkdtemp(prefix="stepscope-fuzz-", dir=shared)
        self._workers = [Worker(Path(self._root)) for _ in range(self._size)]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        shutil.rmtree(self._root, ignore_errors=True)

    def outcomes(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        """Of each job, in the order in which they end."""
        busy = [worker for worker in self._workers if _fed(worker, jobs)]
        while busy:
            wait([worker.pipe for worker in busy], timeout=1)
            for worker in list(busy):
                outcome = worker.answer()
                if outcome is None:
                    continue
                yield outcome
                if not _fed(worker, jobs):
                    busy.remove(worker)


def _fed(worker: Worker, jobs: Iterator[Job]) -> bool:
    job = next(jobs, None)
    if job is not None:
        worker.give(job)
    return job is not None
