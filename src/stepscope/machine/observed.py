"""What the checks of the environment look at: a machine's files below a root, one process on it, and its settings."""

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

Verdict: TypeAlias = Literal["problem", "note", "fine", "unknown"]

_PACKAGES: Final = ("torch",)
"""Whose versions are compared with the table of slow ones."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that can make timings slow or noisy, and how it stands here.

    Attributes:
        check: identifier of what was looked at, such as "cpu-governor".
        verdict: "problem" makes timings slow or noisy, "note" is worth knowing, "fine", or "unknown": not readable.
        title: one sentence.
        read: what was read, and where.
        why: why it matters; empty where all is fine.
        change: what to do; empty where there is nothing to do.
    """

    check: str
    verdict: Verdict
    title: str
    read: str
    why: str = ""
    change: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the things that are looked at, by its identifier; makes observations of each verdict."""

    name: str

    def says(self, verdict: Verdict, title: str, read: str, why: str = "", change: str = "") -> Observation:
        """An observation; the attributes are those of `Observation`."""
        return Observation(self.name, verdict, title, read, why, change)

    def unknown(self, title: str, read: str) -> Observation:
        """It cannot be read."""
        return self.says("unknown", title, read)

    def fine(self, title: str, read: str) -> Observation:
        """Nothing needs to be done."""
        return self.says("fine", title, read)

    def note(self, title: str, read: str, why: str, change: str) -> Observation:
        """It is worth knowing."""
        return self.says("note", title, read, why, change)

    def problem(self, title: str, read: str, why: str, change: str) -> Observation:
        """It makes timings slow or noisy."""
        return self.says("problem", title, read, why, change)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a Python process says of itself; None stands for what is not known.

    Attributes:
        python: the interpreter's version.
        versions: of the packages that `SLOW_VERSIONS` names, where installed; None for another process.
        torch_threads: threads that one operator of PyTorch uses on the CPU.
        torch_why_not: why PyTorch could not be asked; empty where it was.
        collector: whether the garbage collector is on.
        collector_thresholds: as `gc.get_threshold`.
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
        """Of the calling process; `torch` is PyTorch where it is imported."""
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
    """A machine as its files tell it, and one process on it.

    Attributes:
        root: below which /proc, /sys and /dev lie; another one than "/" for tests.
        process: the process to look at; None for the calling one.
        environ: that process's environment variables; None where they may not be read.
        runtime: what is known of that process from inside.
        free_bytes: (size, free) of the file system at a path, in bytes; raises OSError.
        sleep: waits for some seconds between two readings.
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
        """As another process on this machine sees it."""
        return cls(root=root, process=process, environ=_environ_of(root, process))

    @property
    def proc(self) -> str:
        """The process's folder below the root."""
        return f"proc/{self.process or 'self'}"

    def read(self, path: str) -> str | None:
        """The text of a file below the root, stripped; None where it is missing or may not be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The whole number in a file; None where there is none."""
        text = self.read(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def fields(self, path: str) -> dict[str, str]:
        """The lines "Name: value" or "name value" of a file; empty where it cannot be read."""
        pairs = (line.replace(":", " ", 1).split(None, 1) for line in (self.read(path) or "").splitlines())
        return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}

    def matching(self, folder: str, pattern: str) -> list[Path]:
        """Paths below a folder that match a pattern, in order."""
        return sorted((self.root / folder).glob(pattern))

    def variable(self, name: str) -> str:
        """An environment variable of the process; empty where it is not set or not readable."""
        return (self.environ or {}).get(name, "").strip()

    @cached_property
    def affinity(self) -> frozenset[int] | None:
        """The logical cores that the process may run on; None where the machine does not say."""
        cores = self.fields(f"{self.proc}/status").get("Cpus_allowed_list")
        return cpu_list(cores) if cores is not None else None

    @cached_property
    def online(self) -> frozenset[int] | None:
        """The logical cores that are switched on."""
        text = self.read("sys/devices/system/cpu/online")
        return cpu_list(text) if text is not None else None

    @cached_property
    def siblings(self) -> dict[int, frozenset[int]]:
        """For each logical core, the logical cores of the same physical core, itself among them."""
        return {
            core: cpu_list(self.read(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core))
            for core in sorted((self.online or frozenset()) | (self.affinity or frozenset()))
        }

    @cached_property
    def nodes(self) -> dict[int, frozenset[int]]:
        """The NUMA nodes and their logical cores; empty where the machine does not say."""
        folders = self.matching("sys/devices/system/node", "node[0-9]*")
        lists = {int(folder.name[4:]): self.read(f"{folder.relative_to(self.root)}/cpulist") for folder in folders}
        return {node: cpu_list(text) for node, text in sorted(lists.items()) if text}

    def cgroup_folders(self, controller: str) -> Iterator[str]:
        """The process's control group for a controller such as "cpu", then each group around it, below the root."""
        for mount, inner in self._cgroups(controller):
            parts = [part for part in inner.split("/") if part]
            for length in range(len(parts), -1, -1):
                yield "/".join([mount, *parts[:length]])

    def _cgroups(self, controller: str) -> Iterator[tuple[str, str]]:
        """(mount point below the root, the process's folder inside it), in version 2 and in version 1."""
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
    """Cores from the kernel's notation, such as "0-3,8": {0, 1, 2, 3, 8}; what is no list is empty."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def cpu_list_text(cores: frozenset[int] | tuple[int, ...]) -> str:
    """Cores in the kernel's notation: "0-3,8"."""
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
    # Asking a build without CUDA, or before the first use of CUDA, would initialise it.
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.get_sync_debug_mode())
