"""Settings of a process and of data-parallel training: threads, garbage collection, and DistributedDataParallel.

counts = set_thread_counts(workers=4)          # at the top of the script, before torch computes anything
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from stepscope.remedies.attempts import in_background

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["DataParallelSettings"]

_LONGEST: Final = 64 * 1024
"""Bytes to read of a kernel file."""


def allowed_processors() -> set[int]:
    """The numbers of the processors in this process's affinity."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def usable_processors(root: Path = Path("/")) -> int:
    """Processors (hardware threads) that this process may keep busy, 1 or more: its affinity, or its quota if less."""
    return _within_quota(len(allowed_processors()), root)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy, 1 or more.

    Hardware threads of a core count once, if the system shows which belong together.
    """
    siblings = set()
    for processor in allowed_processors():
        shared = _text(root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        siblings.add(shared or str(processor))
    return _within_quota(len(siblings), root)


def quota(root: Path = Path("/")) -> float | None:
    """CPU quota of the control groups in processors, such as 1.5; None without a limit.

    Reads `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1) of the process's group and its ancestors.
    """
    limits = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"]
        else:
            continue
        # Inside a container the group's own path may be above the mounted one: check the root, too.
        group = Path(path.lstrip("/"))
        for mount in mounts:
            limits += [_limit(root / mount / each) for each in (group, *group.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """One group's limit in processors."""
    words = (_text(group / "cpu.max") or "").split()
    if not words:
        words = [_text(group / "cpu.cfs_quota_us") or "", _text(group / "cpu.cfs_period_us") or ""]
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None  # "max", or -1: no limit
    return int(words[0]) / int(words[1])


def _within_quota(count: int, root: Path) -> int:
    limit = quota(root)
    return max(count if limit is None else min(count, math.ceil(limit)), 1)


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("ascii", "replace").strip()
    except OSError:
        return None


_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Threads of a rank, and what they are computed from.

    Attributes:
        processors: hardware threads that this process may use, by its affinity and its control group's quota.
        cores: the same in cores.
        ranks: processes that share the processors.
        workers: DataLoader processes of this rank, each of which needs a processor.
        intra_op: threads that one operator may use.
        inter_op: operators that torch may run in parallel.
        not_set: which settings could no longer be changed, and why, in sentences.
    """

    processors: int
    cores: int
    ranks: int
    workers: int
    intra_op: int
    inter_op: int
    not_set: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables for a process to be started with these counts."""
        return dict.fromkeys(_VARIABLES, str(self.intra_op))


def thread_counts(
    *,
    workers: int = 0,
    ranks: int | None = None,
    intra_op: int | None = None,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> ThreadCounts:
    """Compute how many threads this rank should use; change nothing.

    One operator gets the cores of this rank, less the processors that its DataLoader's workers need beyond the second
    hardware threads of these cores; at least one. Operators do not run in parallel: they would contend for the same
    cores. A rank whose launcher gave it its own processors uses them all; others divide the shared ones.

    Args:
        workers: num_workers of this rank's DataLoader.
        ranks: processes that share this machine's processors; by default LOCAL_WORLD_SIZE, or 1.
        intra_op: this many threads, instead of the computed number.
        environ: where variables are read; by default this process's.
        root: the folder that holds /proc and /sys.

    Raises:
        ValueError: a number is below 1 (below 0 for workers).
    """
    for name, number, least in (("workers", workers, 0), ("ranks", ranks, 1), ("intra_op", intra_op, 1)):
        if number is not None:
            check_whole(name, number, least)
    if ranks is None:
        ranks = 1 if _has_its_own_processors() else _local_world_size(os.environ if environ is None else environ)
    processors, cores = usable_processors(root), usable_cores(root)
    own_processors, own_cores = max(processors // ranks, 1), max(cores // ranks, 1)
    free = own_processors - own_cores
    threads = max(own_cores - max(workers - free, 0), 1) if intra_op is None else intra_op
    return ThreadCounts(processors, cores, ranks, workers, threads, 1)


def set_thread_counts(
    *, workers: int = 0, ranks: int | None = None, intra_op: int | None = None, inter_op: int = 1
) -> ThreadCounts:
    """Set torch's threads to the result of `thread_counts`, and the variables of OpenMP and MKL for child processes.

    Call it early: torch can set the number of parallel operators only before the first ones run. It overrides what
    launchers set: torchrun gives every rank OMP_NUM_THREADS=1.

    Args:
        workers, ranks, intra_op: see `thread_counts`.
        inter_op: operators that torch may run in parallel.

    Raises:
        ValueError: a number is below 1 (below 0 for workers).
    """
    check_whole("inter_op", inter_op)
    counts = thread_counts(workers=workers, ranks=ranks, intra_op=intra_op)
    torch.set_num_threads(counts.intra_op)
    not_set = []
    if torch.get_num_interop_threads() != inter_op:
        try:
            torch.set_num_interop_threads(inter_op)
        except RuntimeError:
            now = torch.get_num_interop_threads()
            not_set.append(
                f"torch runs {now} operators side by side, and changes that only before the first ones run: call "
                "set_thread_counts earlier"
            )
    os.environ.update(counts.environment)
    return replace(counts, inter_op=torch.get_num_interop_threads(), not_set=tuple(not_set))


def _local_world_size(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else 1


def _has_its_own_processors() -> bool:
    """Whether this process may use only a part of what its parent may: its launcher assigned that part."""
    if not hasattr(os, "sched_getaffinity"):
        return False
    try:
        parent = set(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False
    return allowed_processors() < parent


_OLDEST: Final = 2


def collect_garbage_at_steps(every: int = 50, *, generation: int = _OLDEST, freeze: bool = True) -> GarbageAtSteps:
    """Keep Python's garbage collector from running within steps; collect between steps instead, after every few.

    It begins with the `with` statement, with `start()`, or with the first `step()`: everything is collected, live
    objects (modules, model, optimizer) are frozen, so that later collections skip them, and the automatic collector is
    turned off. Begin after the model is made. At the end everything is as it was before. Worker processes that are
    forked meanwhile keep their automatic collector.

    Memory that only reference cycles hold is freed at the next collection: a model that makes cycles with large tensors
    in every step needs a small `every`.

    Args:
        every: steps between collections, from 1 on.
        generation: the oldest generation that is collected: 0, 1 or 2 (all).
        freeze: False leaves live objects to every collection. If the program has frozen objects itself, nothing is
            frozen either, because the two could not be told apart at the end.

    Raises:
        ValueError: an argument cannot be used.
    """
    check_whole("every", every)
    if generation not in (0, 1, 2):
        raise ValueError(f"generation is {generation!r}; it takes 0, 1 or 2")
    return GarbageAtSteps(every, generation, freeze)


class GarbageAtSteps:
    """The result of `collect_garbage_at_steps`.

    Attributes:
        collections: number of collections between steps so far.
        collected_ns: their total duration.
    """

    def __init__(self, every: int, generation: int, freeze: bool) -> None:
        self._every, self._generation, self._freeze = every, generation, freeze
        self._steps = 0
        self._started = self._was_enabled = self._has_frozen = False
        self.collections = self.collected_ns = 0

    def start(self) -> None:
        """Collect, freeze, and turn the automatic collector off; nothing if already started."""
        if self._started:
            return
        gc.collect()
        self._was_enabled = gc.isenabled()
        self._has_frozen = self._freeze and gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()
        gc.disable()
        self._started = True
        _ACTIVE.add(self)
        _register_for_forks()

    def step(self) -> int:
        """Mark the end of a step; collect when due. Returns the number of objects freed."""
        self.start()
        self._steps += 1
        if self._steps % self._every:
            return 0
        begin = time.perf_counter_ns()
        freed = gc.collect(self._generation)
        self.collected_ns += time.perf_counter_ns() - begin
        self.collections += 1
        return freed

    def close(self) -> None:
        """Restore the collector; it can be started again."""
        if not self._started:
            return
        self._started = False
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> GarbageAtSteps:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


_ACTIVE: Final[weakref.WeakSet[GarbageAtSteps]] = weakref.WeakSet()


@cache
def _register_for_forks() -> None:
    """Let forked processes collect automatically, since nobody calls `step` there; it cannot be undone."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


@in_background
def _after_fork() -> None:
    if any(each._started and each._was_enabled for each in _ACTIVE):
        gc.enable()


def check_whole(name: str, number: object, least: int = 1) -> None:
    """Raise ValueError if an argument is not a whole number from `least` on."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{name} is {number!r}; it takes a whole number from {least} on")


def autocast_type(kind: str) -> torch.dtype | None:
    """The dtype of autocast on a device type, such as "cuda"; None while autocast is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 and later
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def default_device() -> torch.device:
    """torch's current accelerator, XLA's if torch_xla is imported, or else the CPU."""
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)  # torch 2.6
    if current is not None and torch.accelerator.is_available():
        kind = current()
        if kind is not None:
            return torch.device(kind.type, torch.accelerator.current_device_index())
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "habana_frameworks.torch" in sys.modules:
        return torch.device("hpu")
    xla = sys.modules.get("torch_xla")
    if xla is not None:
        return torch.device(xla.device())
    return torch.device("cpu")


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a copy of a tensor: pinned, if this torch supports that for the device."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.empty(like.shape, dtype=like.dtype)


def streams_of(device: torch.device) -> Any | None:
    """torch's module of the device, such as `torch.cuda`, if it has streams and events; None otherwise."""
    module = getattr(torch, device.type, None)
    needed = ("Stream", "Event", "current_stream", "stream")
    # torch.cpu has them too, but without effect.
    if device.type in ("cpu", "mps") or module is None or not all(hasattr(module, name) for name in needed):
        return None
    return module


SCHEMA: Final = 1
_LONGEST_FILE: Final = 1 << 20
_LARGEST_MB: Final = 1 << 20


@dataclass(frozen=True)
class DataParallelSettings:
    """Settings of DistributedDataParallel; None keeps torch's default.

    `stepscope data-parallel TRACE --json FILE` computes them from a recording of the ranks.

        model = DataParallelSettings.load("data_parallel.json").ddp(model)

    Attributes:
        bucket_cap_mb: size in MiB at which a bucket of gradients is sent. Torch's default is 25, and 1 for the first;
            newer versions apply a given size to the first, too.
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves a copy of them; code must not
            call `detach_()` on them.
        static_graph: whether the same parameters are used in the same order in every step.
        find_unused_parameters: whether each step looks for parameters that got no gradient.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None

    def __post_init__(self) -> None:
        size = self.bucket_cap_mb
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, (int, float)):
                raise TypeError(f"bucket_cap_mb must be a number of MiB, not {size!r}")
            if not math.isfinite(size) or not 0 < size <= _LARGEST_MB:
                raise ValueError(f"bucket_cap_mb={size!r} is not a bucket size: give MiB above 0")
        for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")

    def arguments(self) -> dict[str, Any]:
        """The settings that are not None, as arguments of DistributedDataParallel."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def ddp(self, model: torch.nn.Module, **others: Any) -> DistributedDataParallel:
        """Wrap the model in DistributedDataParallel with these settings and other arguments of it.

        Raises ValueError for an argument that these settings also have.
        """
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, **self._with(others))

    def lightning_strategy(self, **others: Any) -> Any:
        """Return Lightning's strategy with these settings, for `Trainer(strategy=...)`.

        On Gaudi, with lightning_habana and a device, this is its HPUDDPStrategy or HPUParallelStrategy; otherwise
        DDPStrategy of lightning or pytorch_lightning, whichever is installed.

        Args:
            others: arguments of the strategy.

        Raises:
            RuntimeError: none of these packages is installed.
            ValueError: an argument that these settings also have.
        """
        arguments = self._with(others)
        if find_spec("lightning_habana") and import_module("lightning_habana").HPU_AVAILABLE:
            strategies = import_module("lightning_habana.pytorch.strategies")
            # Before HPUDDPStrategy existed, HPUParallelStrategy was the strategy itself.
            strategy = getattr(strategies, "HPUDDPStrategy", None) or strategies.HPUParallelStrategy
            return strategy(**arguments)
        for package in ("lightning", "pytorch_lightning"):
            if find_spec(package):
                home = "lightning.pytorch.strategies" if package == "lightning" else "pytorch_lightning.strategies"
                return import_module(home).DDPStrategy(**arguments)
        raise RuntimeError("neither lightning nor pytorch_lightning is installed: pip install lightning, or use ddp()")

    def accelerate_arguments(self) -> dict[str, Any]:
        """The settings that are not None, for `accelerate.DistributedDataParallelKwargs(**...)`."""
        return self.arguments()

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "settings": asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DataParallelSettings:
        """Read the JSON of `to_json` or `stepscope data-parallel --json`; other keys are ignored.

        Raises ValueError for anything else; the message says what was found.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"these are not settings of data-parallel training: not JSON ({error})") from error
        settings = found.get("settings") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(settings, dict):
            raise ValueError('these are not settings of data-parallel training: the JSON has no object "settings"')
        if found.get("schema") != SCHEMA:
            raise ValueError(f"settings of schema {found.get('schema')!r} cannot be read, only those of {SCHEMA}")
        known = [each.name for each in fields(cls)]
        strange = [name for name in settings if name not in known]
        if strange:
            raise ValueError(
                f"{strange[0]!r} is not a setting of data-parallel training; the settings are {', '.join(known)}"
            )
        try:
            return cls(**settings)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def load(cls, path: str | Path) -> DataParallelSettings:
        """Read the settings from a file; see `from_json`.

        Raises:
            OSError: it cannot be read.
            ValueError: its content is something else.
        """
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        try:
            if len(content) > _LONGEST_FILE:
                raise ValueError("these are not settings of data-parallel training: the file is too large")
            return cls.from_json(content.decode())
        except ValueError as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise ValueError(f"{path}: {reason}") from error

    def _with(self, others: dict[str, Any]) -> dict[str, Any]:
        own = self.arguments()
        twice = next((name for name in own if name in others), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice: by these settings ({own[twice]}) and as an argument")
        return {**own, **others}
