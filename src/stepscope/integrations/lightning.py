"""Record a few steps of a Lightning training, as its profiler or as a callback beside another profiler.

trainer = Trainer(profiler=StepscopeProfiler())     # steps, and Lightning's actions by name
trainer = Trainer(callbacks=[StepscopeCallback()])  # steps only
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.integrations._recording import FrameworkRecording, RecordingCallback
from stepscope.record.annotations import annotate

__all__ = ["StepscopeCallback", "StepscopeProfiler"]


def _lightning() -> str:
    """Return the Lightning package that the program uses, since the two packages have separate classes."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return name
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            import_module(name)
        except ImportError:
            continue
        return name
    raise UsageError("stepscope.integrations.lightning needs Lightning: pip install lightning")


_PACKAGE: Final = _lightning()
_Profiler: Any = import_module(f"{_PACKAGE}.profilers").Profiler
_TorchProfiler: Any = import_module(f"{_PACKAGE}.profilers").PyTorchProfiler
_Callback: Any = import_module(f"{_PACKAGE}.callbacks").Callback

_STEPS: Final = {
    "fit": "on_train_batch_end",
    "validate": "on_validation_batch_end",
    "test": "on_test_batch_end",
    "predict": "on_predict_batch_end",
}
"""Maps the trainer's task to the module hook that ends a step of it."""
_AROUND_STEPS: Final = ("run_training_epoch",)
"""Actions that span many steps: naming them would cover everything else."""


class StepscopeProfiler(_Profiler):  # type: ignore[misc]
    """A profiler for Lightning's trainer that records a few steps, with Lightning's actions named in the trace.

    Args:
        out: a trace file, a folder, or None for a run folder; as in `stepscope.profile`.
        schedule: `stepscope.schedule(...)`; None skips 5 steps, warms up for 2 and records 5.
        options: `diagnose`, `shapes`, `stacks`, `memory`, `lines`, `flops`, `modules`, `name` of `stepscope.profile`.

    Raises:
        UsageError: the suffix of `out` is not that of a trace.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        schedule: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._recording = FrameworkRecording("Lightning", out, schedule, options)
        self._actions: dict[str, list[annotate]] = {}
        self._begun = False

    @property
    def traces(self) -> tuple[Path, ...]:
        return self._recording.traces

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Name an action of the trainer in the trace; an error in a whole epoch ends the recording."""
        self.start(action_name)
        is_whole = False
        try:
            yield action_name
            is_whole = True
        finally:
            if not is_whole and action_name in _AROUND_STEPS:
                self._end()
            self.stop(action_name)

    @guard.entry
    def start(self, action_name: str) -> None:
        if not self._begun and self._is_loop(action_name):
            self._begun = True
            self._recording.begin()
        if self._recording.is_recording and action_name not in _AROUND_STEPS:
            action = annotate(action_name)
            action.__enter__()
            self._actions.setdefault(action_name, []).append(action)

    @guard.entry
    def stop(self, action_name: str) -> None:
        """End an action of the trainer; the end of a batch is the end of a step."""
        opened = self._actions.get(action_name)
        if opened:
            opened.pop().__exit__(None, None, None)
        if action_name.startswith("[LightningModule]") and action_name.endswith(f".{_STEPS.get(self._stage or '')}"):
            self._recording.step()
        elif action_name.endswith(".on_exception"):
            self._end()

    @guard.entry(otherwise="")
    def summary(self) -> str:
        """Return the paths of the traces, for the trainer's log."""
        self._end()
        return "\n".join(f"stepscope diagnose {path}" for path in self.traces)

    def teardown(self, stage: str | None) -> None:
        """Save the recording at the end of the trainer's task."""
        if hasattr(self, "_recording"):  # Lightning calls this from __del__, too
            self._end()
        super().teardown(stage)

    def _is_loop(self, action_name: str) -> bool:
        """Whether the steps begin with this action; Lightning's validation check before training does not count."""
        if self._stage == "fit":
            return action_name in _AROUND_STEPS
        return action_name.endswith("_next")  # the first batch is fetched

    @guard.entry
    def _end(self) -> None:
        self._begun = False
        self._actions.clear()
        self._recording.end()


class StepscopeCallback(RecordingCallback, _Callback):  # type: ignore[misc]
    """A callback for Lightning's trainer that records a few steps beside any profiler but PyTorchProfiler.

    Args:
        out, schedule, options: as in `StepscopeProfiler`.

    Raises:
        UsageError: the suffix of `out` is not that of a trace.
    """

    _framework = "Lightning"

    @guard.entry
    def _begin(self, trainer: Any, pl_module: Any = None) -> None:
        busy = isinstance(trainer.profiler, _TorchProfiler)
        self._recording.begin("the trainer's PyTorchProfiler already records, and its traces can be diagnosed" * busy)

    @guard.entry
    def _step(self, trainer: Any, kind: str) -> None:
        if _task_of(trainer) == kind:
            self._recording.step()

    def _end(self, trainer: Any, pl_module: Any, exception: BaseException | None = None) -> None:
        self._recording.end()

    on_train_start = on_test_start = on_predict_start = _begin
    on_train_end = on_test_end = on_predict_end = _end
    on_exception = _end  # keep what was recorded

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._step(trainer, "fit")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a validation, standalone or within a training."""
        if _task_of(trainer) == "validate":
            self._begin(trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._step(trainer, "validate")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if _task_of(trainer) == "validate":
            self._recording.end()

    def on_test_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._step(trainer, "test")

    def on_predict_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._step(trainer, "predict")


def _task_of(trainer: Any) -> str:
    """The trainer's task: fit, validate, test or predict."""
    return str(getattr(trainer.state.fn, "value", trainer.state.fn))
