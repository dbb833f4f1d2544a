"""The interface for training scripts: `stepscope.telemetry()` and `stepscope.log()`.

run = stepscope.telemetry()
run.watch_optimizer(optimizer)
run.watch(model, modules=["*.attn"], every=10)
for step, batch in enumerate(loader):
    loss = train_step(batch)
    run.log({"loss": loss}, step=step)
    run.throughput(samples=len(batch))
"""

from __future__ import annotations

import atexit
import functools
import operator
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.files import private_folder
from stepscope.record.telemetry.sampler import DEFAULT_INTERVAL_S, Sampler
from stepscope.record.telemetry.store import Series, Writer
from stepscope.record.telemetry.values import Logged, ModelWatch, OptimizerWatch, ScalarReader, Watch, chosen_modules
from stepscope.threads import Lock

RUN_VARIABLE: Final = "STEPSCOPE_RUN"
"""The run folder of a program that `stepscope run` started."""
_RANKS: Final = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_THROUGHPUT_S: Final = 1.0


class Telemetry:
    """The values that one process logs and samples, written into a folder while the program runs.

    Nothing here waits for a device or raises because of a value, a driver or a disk: a value that cannot be obtained is
    null in the file, which also gives the reason.

    Args:
        folder: a run folder; the file goes to `rank<R>/telemetry/` in it.
        interval_s: seconds between two samples of the machine; None samples nothing.

    Attributes:
        problem: why nothing is kept, in a sentence; None if values are kept.

    Raises:
        UsageError: the interval is not above zero.
    """

    def __init__(self, folder: Path, *, rank: int = 0, interval_s: float | None = DEFAULT_INTERVAL_S) -> None:
        if interval_s is not None and not interval_s > 0:
            raise UsageError(f"the interval between samples must be above zero, not {interval_s:g} s")
        self.folder = folder / f"rank{rank}" / "telemetry"
        self.problem: str | None = None
        try:
            private_folder(self.folder)
        except OSError as error:
            self.problem = f"nothing is logged: telemetry cannot be written into {self.folder}: {error.strerror}"
            _warn_once(self.problem)
        self._writer = Writer(self.folder, {"rank": str(rank)})
        self._scalars = ScalarReader(self._writer)
        self._throughputs: dict[str, _Throughput] = {}
        self._closed = self.problem is not None
        self._sampler = None if interval_s is None or self._closed else Sampler(self._writer, interval_s)
        if self._sampler is not None:
            self._sampler.start()
        self._held = guard.on_failure("the telemetry from here on", self._abandon)
        _OPEN.add(self)

    @guard.entry(raises=UsageError)
    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log values by name: numbers, or tensors of one element on any device; the host does not wait for them.

        The value at the time of the call is kept, even if the tensor is changed later. Without `step`, the recording's
        current step is used, if there is one.

        Raises:
            UsageError: `values` is not a mapping, or `step` is not a whole number.
        """
        if not isinstance(values, Mapping):
            raise UsageError(f'log takes values by name, such as {{"loss": loss}}, not a {type(values).__name__}')
        try:
            number = _step_now() if step is None else operator.index(step)
        except TypeError as error:
            raise UsageError(f"a step is a whole number, not {step!r}") from error
        self._record([(Series("log", str(name)), value) for name, value in values.items()], number)

    @guard.entry(otherwise=Watch(), raises=UsageError)
    def watch(
        self,
        model: Any,
        *,
        gradients: bool = True,
        activations: bool = False,
        every: int = 10,
        modules: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Watch:
        """Record norms of a model's gradients, before each `every`th step of its optimizer, and of its activations.

        `modules` are patterns of module names, such as "*.attn"; each of those modules gets its own norms. Without them
        there is one norm for the whole model. `name` distinguishes several models.

        Raises:
            UsageError: it is not a torch.nn.Module, no module name matches, or `every` is less than 1.
        """
        chosen = chosen_modules(model, modules, name)
        watch = ModelWatch(model, chosen, _checked(every), self._record_counted, self._writer)
        if gradients:
            watch.watch_gradients()
        if activations:
            watch.watch_activations()
        return watch

    @guard.entry(otherwise=Watch(), raises=UsageError)
    def watch_optimizer(self, optimizer: Any, *, name: str = "learning_rate", every: int = 1) -> Watch:
        """Record an optimizer's learning rate at each `every`th step; one series per parameter group.

        Raises UsageError if it is not a torch optimizer, or `every` is less than 1.
        """
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise UsageError(f"watch_optimizer takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        return OptimizerWatch(optimizer, name, _checked(every), self._record_counted, self._writer)

    @guard.entry
    def throughput(self, *, step: int | None = None, **amounts: float) -> None:
        """Report the work done since the last call, such as `samples=32, tokens=4096`; call it once per step.

        Records `samples_per_s` and so on about once a second, measured on the host's clock.
        """
        now = time.perf_counter_ns()
        for name, amount in amounts.items():
            series = Series("throughput", f"{name}_per_s", None, f"{name}/s")
            with self._writer.guarded(series):
                rate = self._throughputs.setdefault(name, _Throughput(now)).add(float(amount), now)
                if rate is not None:
                    self._record([(series, rate)], _step_now() if step is None else step)

    @guard.entry
    def flush(self) -> None:
        """Write the values that have arrived; values still on a device follow later."""
        self._scalars.poll()
        self._writer.flush()

    @guard.entry
    def close(self) -> None:
        """Wait for pending values, write everything and end the threads. May be called twice."""
        if self._closed:
            return
        self._closed = True
        _forget(self)
        guard.off(self._held)
        if self._sampler is not None:
            self._sampler.close()
        self._scalars.drain()
        self._writer.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def after_fork(self) -> None:
        """In a child process, begin a file of its own; the parent keeps sampling the machine."""
        self._sampler = None
        self._writer.after_fork()
        self._scalars.begin()

    def _abandon(self) -> None:
        """After an internal error, keep what was written and end the threads."""
        self._closed = True
        if self._sampler is not None:
            self._sampler.abandon()
        self._writer.abandon()

    def _record_counted(self, logged: Sequence[Logged], counted: int) -> None:
        """Record a hook's values; the hook's own count is the step number unless a recording counts steps."""
        step = _step_now()
        self._record(logged, counted if step is None else step)

    def _record(self, logged: Sequence[Logged], step: int | None) -> None:
        if self._closed:
            if self.problem is None:
                _warn_once("something was logged after the telemetry was closed, and is not kept")
            return
        self._scalars.read(logged, time.time_ns(), step)


class _Throughput:
    def __init__(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._amount: float | None = None

    def add(self, amount: float, now_ns: int) -> float | None:
        """Return the rate per second since the last returned rate, or None if a second has not passed."""
        if self._amount is None:  # the start of the first call's work is unknown
            self._amount = 0.0
            return None
        self._amount += amount
        passed_ns = now_ns - self._since_ns
        if passed_ns < _THROUGHPUT_S * 1e9:
            return None
        rate = self._amount / (passed_ns / 1e9)
        self._since_ns, self._amount = now_ns, 0.0
        return rate


def _inert() -> Telemetry:
    """Return a telemetry object whose methods do nothing, for the program to use after an internal error."""
    found = Telemetry.__new__(Telemetry)
    found.folder = Path(os.devnull)
    return found


_INERT: Final = _inert()
_OPEN: Final[weakref.WeakSet[Telemetry]] = weakref.WeakSet()
_LOCK: Final = Lock()
_current: Telemetry | None = None
_warned: Final[set[str]] = set()


@guard.entry(otherwise=_INERT, raises=UsageError)
def telemetry(
    folder: str | Path | None = None, *, rank: int | None = None, interval_s: float | None = DEFAULT_INTERVAL_S
) -> Telemetry:
    """Return this process's telemetry; a second call without a folder returns the same object.

    Args:
        folder: a run folder; by default that of `stepscope run`, or a new one below `stepscope-runs`.
        rank: this process's rank; by default from its launcher.
        interval_s: seconds between two samples of the machine; None samples nothing.

    Raises:
        UsageError: the interval is not above zero.
    """
    global _current
    with _LOCK:
        if folder is None and _current is not None:
            return _current
        place = _default_folder() if folder is None else Path(folder)
        made = Telemetry(place, rank=_launched_rank() if rank is None else rank, interval_s=interval_s)
        if _current is None:
            _current = made
        return made


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Log values by name with this process's telemetry, which the first call starts; see `Telemetry.log`.

    Raises:
        UsageError: `values` is not a mapping, or `step` is not a whole number.
    """
    telemetry().log(values, step)


def _default_folder() -> Path:
    started = os.environ.get(RUN_VARIABLE)
    if started:
        return Path(started)
    if any(os.environ.get(name) for name in _RANKS):  # all ranks of a machine have the same parent
        folder = Path("stepscope-runs", time.strftime("%Y%m%d") + f"-launch-{os.getppid()}")
    else:
        folder = Path("stepscope-runs", time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}")
    print(f"stepscope: telemetry is written into {folder}", file=sys.stderr)
    return folder


def _launched_rank() -> int:
    """Return the launcher's rank of this process; 0 without a launcher."""
    numbers = (os.environ.get(name, "") for name in _RANKS)
    return next((int(number) for number in numbers if number.isdecimal()), 0)


def _step_now() -> int | None:
    module = sys.modules.get("stepscope.record.controller")
    found = module.controller() if module is not None else None
    return None if found is None else int(found.current_step())


def _checked(every: int) -> int:
    if every < 1:
        raise UsageError(f"every must be 1 or more, not {every}")
    return every


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        guard.tell(text)


def _forget(run: Telemetry) -> None:
    global _current
    _OPEN.discard(run)
    if _current is run:
        _current = None


TRACKERS: Final[dict[str, tuple[str, str]]] = {
    "wandb.sdk.wandb_run": ("Run", "log"),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "tensorboardX.writer": ("SummaryWriter", "add_scalar"),
}
"""Maps a module to the class and method that log values."""
_DEEPEST: Final = 8


def keep_tracked_values(module: str) -> None:
    """Keep the values that the program logs to a tracker, whose module was just imported; other modules are ignored."""
    if module not in TRACKERS:
        return
    kind, method = TRACKERS[module]
    owner = getattr(sys.modules.get(module), kind, None)
    original = vars(owner).get(method) if owner is not None else None
    if not callable(original):
        return
    setattr(owner, method, guard.around(original, after=functools.partial(_log_tracked, method)))


@guard.entry
def _log_tracked(method: str, _: None, answer: Any, owner: Any, /, *positional: Any, **keywords: Any) -> None:
    if method == "log":
        data, step = _arguments(("data", "step"), positional, keywords)
        values = dict(_numbers(data, "", 0))
    else:
        tag, value, step = _arguments(("tag", "scalar_value", "global_step"), positional, keywords)
        values = {str(tag): value}
    if values:
        with guard.attempt():  # values that telemetry does not accept go to the tracker only
            log(values, step if type(step) is int else None)


def _arguments(names: tuple[str, ...], positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
    given = dict(zip(names, positional, strict=False))
    return [given.get(name, keywords.get(name)) for name in names]


def _numbers(data: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield numbers and tensors by name; keys of nested mappings are joined by dots, as in W&B."""
    if not isinstance(data, Mapping) or depth > _DEEPEST:
        return
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.", depth + 1)
        elif not isinstance(value, bool) and (isinstance(value, (int, float)) or hasattr(value, "item")):
            yield f"{prefix}{name}", value


@guard.entry
def _close_all() -> None:
    for run in list(_OPEN):
        run.close()


@guard.entry
def _after_fork() -> None:
    for run in list(_OPEN):
        run.after_fork()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
