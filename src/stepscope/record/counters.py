"""Counters of the operating system and of Python's garbage collector, and step times while no profiler ran.

A reading takes some tens of microseconds between two steps; counters that the machine does not have are left out. Step
times come with the losses of their backward passes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from stepscope import guard
from stepscope.trace.naming import is_user_file
from stepscope.trace.program_facts import PauseFacts, StepFacts

MOST_STEPS: Final = 5_000
MOST_PAUSES: Final = 5_000
SHORTEST_PAUSE_NS: Final = 20_000
"""Shorter collections are only added up."""
_SLOW_READ_NS: Final = 200_000
_DEEPEST: Final = 64


class Reading(NamedTuple):
    """The counters at one moment; None for a counter that the machine does not have."""

    time_ns: int
    thread_processor_ns: int
    process_processor_ns: int
    thread_system_ns: int | None
    thread_waiting_ns: int | None
    context_switches: int | None
    involuntary_switches: int | None
    minor_faults: int | None
    core: int | None
    clock_mhz: float | None
    pressure_ns: int | None
    throttled_ns: int | None


class Counters:
    """Reads the counters of the calling thread, and drops those that are slow or unreadable."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = str(root).rstrip("/")
        self._current_core = _core_reader()
        self._unreadable: set[str] = set()
        self._cgroup = _cgroup_of(self._root)

    def read(self) -> Reading:
        usage = _usage()
        core = self._current_core()
        return Reading(
            time_ns=time.perf_counter_ns(),
            thread_processor_ns=time.thread_time_ns(),
            process_processor_ns=time.process_time_ns(),
            thread_system_ns=usage.system_ns,
            thread_waiting_ns=self._waiting_ns(),
            context_switches=usage.switches,
            involuntary_switches=usage.involuntary,
            minor_faults=usage.faults,
            core=core,
            clock_mhz=self._clock_mhz(core),
            pressure_ns=self._pressure_ns(),
            throttled_ns=self._throttled_ns(),
        )

    def _text(self, path: str, key: str) -> str | None:
        """Read a small file; a kind of file that is unreadable or slow is not tried again."""
        if key in self._unreadable:
            return None
        begun = time.perf_counter_ns()
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                text = os.read(file, 4096).decode("ascii", "replace")
            finally:
                os.close(file)
        except OSError:
            self._unreadable.add(key)
            return None
        if time.perf_counter_ns() - begun > _SLOW_READ_NS and key == "clock":
            self._unreadable.add(key)
        return text

    def _waiting_ns(self) -> int | None:
        words = (self._text(f"{self._root}/proc/thread-self/schedstat", "waiting") or "").split()
        return int(words[1]) if len(words) == 3 and words[1].isdecimal() else None

    def _clock_mhz(self, core: int | None) -> float | None:
        if core is None:
            return None
        text = self._text(f"{self._root}/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", "clock")
        return int(text) / 1000 if text and text.strip().isdecimal() else None

    def _pressure_ns(self) -> int | None:
        own = self._text(f"{self._cgroup}/cpu.pressure", "own pressure") if self._cgroup else None
        text = own or self._text(f"{self._root}/proc/pressure/cpu", "pressure") or ""
        first = text.partition("\n")[0].rpartition("total=")[2]
        return int(first) * 1000 if first.isdecimal() else None

    def _throttled_ns(self) -> int | None:
        text = self._text(f"{self._cgroup}/cpu.stat", "throttled") if self._cgroup else None
        for line in (text or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "throttled_usec" and value.isdecimal():
                return int(value) * 1000
        return None


class StepCounters:
    """The counters of each recorded step, between calls of `border` with the number of the step that ended."""

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = counters or Counters()
        self._last: Reading | None = None
        self._collector_ns: Callable[[], int] = lambda: 0
        self._last_collector_ns = 0
        self.steps: list[StepFacts] = []

    def follow(self, collector_ns: Callable[[], int]) -> None:
        """Use this function as the source of garbage-collection time: nanoseconds so far on the calling thread."""
        self._collector_ns = collector_ns

    def border(self, ended: int | None) -> None:
        now, collector_ns = self._counters.read(), self._collector_ns()
        if ended is not None and self._last is not None and len(self.steps) < MOST_STEPS:
            self.steps.append(_difference(ended, self._last, now, collector_ns - self._last_collector_ns))
        self._last, self._last_collector_ns = now, collector_ns


_GROWING: Final = (
    *("thread_processor_ns", "thread_system_ns", "thread_waiting_ns", "process_processor_ns", "context_switches"),
    *("involuntary_switches", "minor_faults", "pressure_ns", "throttled_ns"),
)


def _difference(index: int, before: Reading, now: Reading, collector_ns: int) -> StepFacts:
    grown: dict[str, int | None] = {}
    for name in _GROWING:
        first, last = getattr(before, name), getattr(now, name)
        grown[name] = None if first is None or last is None else max(last - first, 0)
    return StepFacts(
        index=index,
        duration_ns=now.time_ns - before.time_ns,
        core=now.core,
        clock_mhz=now.clock_mhz,
        collector_ns=collector_ns,
        **grown,
    )


class WarmUp:
    """Page faults of the process from construction until `figures`, in steps that the profiler does not record.

    Recorded steps would not do: the profiler keeps its records in memory, which causes page faults of its own.
    """

    def __init__(self) -> None:
        self._begun_ns, self._faults = time.perf_counter_ns(), _usage().faults

    def figures(self) -> dict[str, int]:
        """Return {"warm_up_ns", "warm_up_faults"} so far; empty if the machine does not count them."""
        faults = _usage().faults
        if faults is None or self._faults is None:
            return {}
        return {"warm_up_ns": time.perf_counter_ns() - self._begun_ns, "warm_up_faults": faults - self._faults}


def faults_of_process() -> int | None:
    """Return how many pages have been mapped for this process so far; None if the machine does not count them."""
    return _usage().faults


class PauseWatch:
    """Records the runs of Python's garbage collector from `start` to `stop`, in the process that started it only.

    Attributes:
        total_ns: time in the collector, over all threads; threads wait for each other's collections, so it is the
            time lost by the process.
        runs: number of collections.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self.runs = 0
        self._begun: int | None = None
        self._process = os.getpid()
        self._notes: list[tuple[dict[str, Any], tuple[str, int, str] | None]] = []

    def start(self) -> None:
        gc.callbacks.append(self._collector_runs)

    def stop(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collector_runs)

    def pauses(self) -> tuple[PauseFacts, ...]:
        """Return the long pauses, in order of time."""
        return tuple(PauseFacts(**note, **_place(where)) for note, where in self._notes)

    @guard.entry
    def _collector_runs(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter_ns()
        if phase == "start":
            self._begun = now
            return
        begun, self._begun = self._begun, None
        if begun is None or os.getpid() != self._process:
            return
        duration = now - begun
        self.total_ns += duration
        self.runs += 1
        if duration >= SHORTEST_PAUSE_NS and len(self._notes) < MOST_PAUSES:
            note = {
                "start_unix_ns": time.time_ns() - duration,
                "duration_ns": duration,
                "generation": info["generation"],
                "thread": threading.get_native_id(),
                "collected": info["collected"],
            }
            # outside the guard's frame; None when a thread ends
            self._notes.append((note, _user_line(sys._getframe(1).f_back)))


def _user_line(frame: Any) -> tuple[str, int, str] | None:
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        code = frame.f_code
        if is_user_file(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def _place(where: tuple[str, int, str] | None) -> dict[str, Any]:
    if where is None:
        return {}
    import linecache

    file, line, function = where
    text = linecache.getline(file, line)
    shown = file if file[:1] == "<" else os.path.abspath(file)
    return {"file": shown, "line": line, "function": function, "called": "collect(" in text if text else None}


class _Usage(NamedTuple):
    system_ns: int | None = None
    switches: int | None = None
    involuntary: int | None = None
    faults: int | None = None


def _usage() -> _Usage:
    try:
        import resource
    except ImportError:  # Windows
        return _Usage()
    of_thread = getattr(resource, "RUSAGE_THREAD", None)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if of_thread is None:
        return _Usage(faults=faults)
    thread = resource.getrusage(of_thread)
    return _Usage(round(thread.ru_stime * 1e9), thread.ru_nvcsw + thread.ru_nivcsw, thread.ru_nivcsw, faults)


def _core_reader() -> Callable[[], int | None]:
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes

    try:
        function = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: None

    def core() -> int | None:
        found = int(function())
        return found if found >= 0 else None

    return core


def _cgroup_of(root: str) -> str | None:
    """Return the folder of the process's own control group (version 2), or None."""
    try:
        text = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    path = next((line[3:] for line in text.splitlines() if line.startswith("0::")), None)
    for folder in (path, "/") if path else ():
        place = f"{root}/sys/fs/cgroup{folder}".rstrip("/")
        if os.path.isfile(f"{place}/cpu.stat"):
            return place
    return None


TIMED_STEPS: Final = 50
"""Number of steps timed after the recording, before stepscope detaches."""
TIMED_S: Final = 30.0
"""Time after the recording at which timing stops."""
_MOST_STEPS: Final = 10_000


@dataclass(slots=True)
class ConsecutiveSteps:
    """Steps in a row that the profiler recorded, or that it did not.

    Attributes:
        durations_ns: of each step, excluding stepscope's own work before it.
        recorded: whether the profiler ran.
        processor_ns: time that the steps' thread ran on a processor in each step, which other programs do not lengthen;
            empty if unknown.
        faults: pages that were mapped for the process in each step; empty if unknown.
    """

    first_step: int
    recorded: bool
    durations_ns: list[int] = field(default_factory=list)
    processor_ns: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        times = {"ns": self.durations_ns, "processor_ns": self.processor_ns, "faults": self.faults}
        return {"first_step": self.first_step, "recorded": self.recorded, **times}

    @classmethod
    def from_json(cls, content: object) -> ConsecutiveSteps | None:
        """Read the form written by `to_json`; None for anything else."""
        if not isinstance(content, Mapping):
            return None
        first, durations = content.get("first_step"), content.get("ns")
        if type(first) is not int or not are_durations(durations):
            return None
        processor, faults = (
            each if are_durations(each := content.get(name)) and len(each) == len(durations) else []
            for name in ("processor_ns", "faults")
        )
        return cls(first, bool(content.get("recorded")), durations, processor, faults)


def are_durations(content: object) -> TypeGuard[list[int]]:
    """Whether a stored value is a list of step times in nanoseconds."""
    return isinstance(content, list) and all(type(each) is int and 0 <= each < 2**63 for each in content)


class StepTimes:
    """Times the steps of one thread, between calls of `begins` and `ended`."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        processor_ns: Callable[[], int] = time.thread_time_ns,
        faults: Callable[[], int | None] = faults_of_process,
    ) -> None:
        self.stretches: list[ConsecutiveSteps] = []
        self._clocks = (clock_ns, processor_ns, faults)
        self._begun: tuple[int, int, int | None] | None = None
        self._now: ConsecutiveSteps | None = None
        self._count = 0

    def begins(self, step: int, recorded: bool | None) -> None:
        """Begin a step; `recorded` None excludes it from the times."""
        if recorded is None or self._count >= _MOST_STEPS:
            self._begun = self._now = None
            return
        now = self._now
        if now is None or now.recorded != recorded or now.first_step + len(now.durations_ns) != step:
            self._now = ConsecutiveSteps(step, recorded)
        self._begun = self._read()

    def ended(self) -> None:
        begun, now = self._begun, self._now
        if begun is None or now is None:
            return
        wall_ns, processor_ns, faults = self._read()
        now.durations_ns.append(wall_ns - begun[0])
        now.processor_ns.append(processor_ns - begun[1])
        if faults is not None and begun[2] is not None:
            now.faults.append(faults - begun[2])
        self._begun = None
        self._count += 1
        if len(now.durations_ns) == 1:
            self.stretches.append(now)

    def _read(self) -> tuple[int, int, int | None]:
        wall_ns, processor_ns, faults = self._clocks
        return wall_ns(), processor_ns(), faults()

    def clear(self) -> None:
        """Drop all times, for example when a better step source is found."""
        self.stretches.clear()
        self._begun, self._now, self._count = None, None, 0

    def to_json(self) -> list[dict[str, Any]]:
        return [stretch.to_json() for stretch in self.stretches]


_marks: dict[str, int] = {}


def mark(name: str) -> None:
    """Record the time of an event's first occurrence; later calls do nothing."""
    _marks.setdefault(name, time.time_ns())


def start_times() -> dict[str, int]:
    """Return nanoseconds from process start to each mark, as "<mark>_ns"; empty if the process start is unknown."""
    started = _process_start_unix_ns()
    if started is None:
        return {}
    return {f"{name}_ns": max(when - started, 0) for name, when in _marks.items()}


def _process_start_unix_ns() -> int | None:
    try:
        text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns
    except (OSError, ValueError, IndexError, AttributeError):
        return None
