"""The inputs and results of environment checks: a machine's files below a root, one process, and its settings."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, TypeAlias

try:
    import resource
except ImportError:  # Windows, which has no /proc/stat either
    resource = None  # type: ignore[assignment]

Verdict: TypeAlias = Literal["problem", "note", "fine", "unknown"]

_PACKAGES: Final = ("torch",)
"""Packages whose versions are compared with the table of slow ones."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that can make timings slow or noisy, and its state on this machine.

    Attributes:
        check: identifier of the check, such as "cpu-governor".
        verdict: "problem" makes timings slow or noisy, "note" is worth knowing, "fine", or "unknown": not readable.
        title: one sentence.
        read: what was read, and where.
        why: why it matters; empty if all is fine.
        change: what to do; empty if there is nothing to do.
    """

    check: str
    verdict: Verdict
    title: str
    read: str
    why: str = ""
    change: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check by its identifier; makes observations of each verdict."""

    name: str

    def says(self, verdict: Verdict, title: str, read: str, why: str = "", change: str = "") -> Observation:
        return Observation(self.name, verdict, title, read, why, change)

    def unknown(self, title: str, read: str) -> Observation:
        return self.says("unknown", title, read)

    def fine(self, title: str, read: str) -> Observation:
        return self.says("fine", title, read)

    def note(self, title: str, read: str, why: str, change: str) -> Observation:
        return self.says("note", title, read, why, change)

    def problem(self, title: str, read: str, why: str, change: str) -> Observation:
        return self.says("problem", title, read, why, change)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The state of a Python process, seen from inside; None for unknown values.

    Attributes:
        python: the interpreter's version.
        versions: of the packages in `slow_versions`, if installed; None for another process.
        torch_threads: threads that one operator of PyTorch uses on the CPU.
        torch_why_not: why PyTorch could not be queried; empty if it was.
        collector: whether the garbage collector is on.
        collector_thresholds: as in `gc.get_threshold`.
        anomaly_mode: whether autograd looks for NaN and keeps a traceback for each operator.
        sync_debug_mode: of torch.cuda: 0 off, 1 warns, 2 raises.
        deterministic: whether only deterministic algorithms are allowed.
        tracer: what traces or profiles every Python call, such as a debugger; empty for nothing.
    """

    python: str | None = None
    versions: Mapping[str, str] | None = None
    torch_threads: int | None = None
    torch_why_not: str = ""
    collector: bool | None = None
    collector_thresholds: tuple[int, ...] | None = None
    anomaly_mode: bool | None = None
    sync_debug_mode: int | None = None
    deterministic: bool | None = None
    tracer: str | None = None

    @classmethod
    def of_this_process(cls, *, torch: ModuleType | None = None, torch_why_not: str = "") -> Runtime:
        """Read the calling process; `torch` is the module if it is imported."""
        runtime = cls(
            python=platform.python_version(),
            versions=_versions(),
            torch_why_not=torch_why_not,
            collector=gc.isenabled(),
            collector_thresholds=gc.get_threshold(),
            tracer=_tracer(),
        )
        if torch is None:
            return runtime
        return replace(
            runtime,
            torch_threads=int(torch.get_num_threads()),
            anomaly_mode=bool(torch.is_anomaly_enabled()),
            sync_debug_mode=_sync_debug_mode(torch),
            deterministic=bool(torch.are_deterministic_algorithms_enabled()),
        )


@dataclass(frozen=True)
class Machine:
    """A machine, read from its files, and one process on it.

    Attributes:
        root: the folder that contains /proc, /sys and /dev; tests do not use "/".
        process: process number; None for the calling process.
        environ: that process's environment variables; None if they may not be read.
        runtime: the state of that process, seen from inside.
        free_bytes: returns (size, free) of the file system at a path, in bytes; raises OSError.
        sleep: waits between two readings, in seconds.
    """

    root: Path = Path("/")
    process: int | None = None
    environ: Mapping[str, str] | None = field(default_factory=lambda: dict(os.environ))
    runtime: Runtime = field(default_factory=Runtime)
    free_bytes: Callable[[Path], tuple[int, int]] = lambda path: (
        shutil.disk_usage(path).total,
        shutil.disk_usage(path).free,
    )
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def of_process(cls, process: int, root: Path = Path("/")) -> Machine:
        """Make a machine for another process, seen from outside."""
        return cls(root=root, process=process, environ=_environ_of(root, process))

    @property
    def proc(self) -> str:
        """The process's /proc folder below the root."""
        return f"proc/{self.process or 'self'}"

    def read(self, path: str) -> str | None:
        """Read a file below the root, stripped; None if it is missing or may not be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Read the whole number in a file; None if there is none."""
        text = self.read(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def fields(self, path: str) -> dict[str, str]:
        """Read the lines "Name: value" or "name value" of a file; empty if it cannot be read."""
        pairs = (line.replace(":", " ", 1).split(None, 1) for line in (self.read(path) or "").splitlines())
        return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}

    def matching(self, folder: str, pattern: str) -> list[Path]:
        return sorted((self.root / folder).glob(pattern))

    def variable(self, name: str) -> str:
        """Return an environment variable of the process; empty if it is not set or not readable."""
        return (self.environ or {}).get(name, "").strip()

    @cached_property
    def affinity(self) -> frozenset[int] | None:
        """Return the logical cores that the process may run on; None if unknown."""
        cores = self.fields(f"{self.proc}/status").get("Cpus_allowed_list")
        return cpu_list(cores) if cores is not None else None

    @cached_property
    def online(self) -> frozenset[int] | None:
        """Return the logical cores that are online; None if unknown."""
        text = self.read("sys/devices/system/cpu/online")
        return cpu_list(text) if text is not None else None

    @cached_property
    def siblings(self) -> dict[int, frozenset[int]]:
        """Map each logical core to all logical cores of the same physical core, including itself."""
        return {
            core: cpu_list(self.read(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core))
            for core in sorted((self.online or frozenset()) | (self.affinity or frozenset()))
        }

    @cached_property
    def nodes(self) -> dict[int, frozenset[int]]:
        """Map the NUMA nodes to their logical cores; empty if unknown."""
        folders = self.matching("sys/devices/system/node", "node[0-9]*")
        lists = {int(folder.name[4:]): self.read(f"{folder.relative_to(self.root)}/cpulist") for folder in folders}
        return {node: cpu_list(text) for node, text in sorted(lists.items()) if text}

    def cgroup_folders(self, controller: str) -> Iterator[str]:
        """Yield the process's control group for a controller such as "cpu", then its parents, below the root."""
        for mount, inner in self._cgroups(controller):
            parts = [part for part in inner.split("/") if part]
            for length in range(len(parts), -1, -1):
                yield "/".join([mount, *parts[:length]])

    def _cgroups(self, controller: str) -> Iterator[tuple[str, str]]:
        """Yield (mount point below the root, the process's folder inside it), for versions 2 and 1."""
        paths = {}
        for line in (self.read(f"{self.proc}/cgroup") or "").splitlines():
            hierarchy, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if (hierarchy, controllers) == ("0", ""):
                paths["cgroup2"] = path
            elif controller in controllers.split(","):
                paths["cgroup"] = path
        for line in (self.read(f"{self.proc}/mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            words, kinds = before.split(), after.split()
            if len(words) < 5 or len(kinds) < 3 or kinds[0] not in paths:
                continue
            if kinds[0] == "cgroup2" or controller in kinds[2].split(","):
                path, around = paths[kinds[0]], words[3].rstrip("/")
                inside = path[len(around) :] if f"{path}/".startswith(f"{around}/") else ""
                yield words[4].lstrip("/"), inside


def cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's notation for cores: "0-3,8" is {0, 1, 2, 3, 8}; invalid text is empty."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def cpu_list_text(cores: frozenset[int] | tuple[int, ...]) -> str:
    """Format cores in the kernel's notation: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def _environ_of(root: Path, process: int) -> dict[str, str] | None:
    try:
        text = (root / f"proc/{process}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _tracer() -> str:
    hook = sys.gettrace() or sys.getprofile()
    if hook is None:
        return ""
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _sync_debug_mode(torch: ModuleType) -> int | None:
    # A query to a build without CUDA, or before the first use of CUDA, would initialise it.
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.get_sync_debug_mode())


_COARSE_S: Final = 0.1
"""Processor time that the kernel's coarse count of the machine may lack beside that of the process."""


class LoadMeter:
    """Measures how much of the cores that this process may use other processes use, from its creation on."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._begun = self._seconds()

    def other_cores(self) -> float | None:
        """Cores that other processes kept busy since then, on average; None where the system does not report it.

        Children count as this process's: those that multiprocessing started, and others once they have ended.
        """
        begun, now = self._begun, self._seconds()
        if begun is None or now is None or now[0] <= begun[0]:
            return None
        elapsed, all_s, own_s = (after - before for before, after in zip(begun, now, strict=True))
        return max(all_s - own_s, 0.0) / elapsed if all_s + _COARSE_S >= own_s else None

    def _seconds(self) -> tuple[float, float, float] | None:
        """Seconds of wall clock, of all cores without hypervisor steal time, and of this process with children."""
        try:
            ticks = os.sysconf("SC_CLK_TCK")
            usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages) + self._children_ticks() / ticks
            return time.monotonic(), self._busy_ticks() / ticks, own_s
        except (ValueError, IndexError, AttributeError):
            return None

    def _busy_ticks(self) -> int:
        lines = [line.split() for line in (self._machine.read("proc/stat") or "").splitlines()]
        allowed = {f"cpu{core}" for core in self._machine.affinity or ()}
        mine = [words for words in lines if words and words[0] in allowed] or lines[:1]
        if not mine:
            raise ValueError("the system does not count the machine's time")
        return sum(int(words[at]) for words in mine for at in (1, 2, 3, 6, 7))

    def _children_ticks(self) -> int:
        children = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
        return sum(self._ticks_of(child.pid) for child in tuple(children))

    def _ticks_of(self, process: int | None) -> int:
        words = (self._machine.read(f"proc/{process}/stat") or "").rpartition(")")[2].split()
        return int(words[11]) + int(words[12]) if len(words) > 12 else 0
