"""Record a few steps of a training with Transformers' Trainer:

trainer = Trainer(model, arguments, train_dataset=data, callbacks=[StepscopeCallback()])
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stepscope.errors import UsageError
from stepscope.integrations._recording import RecordingCallback

__all__ = ["StepscopeCallback"]

try:
    _TrainerCallback: Any = import_module("transformers").TrainerCallback
except ImportError as error:
    raise UsageError("stepscope.integrations.transformers needs Transformers: pip install transformers") from error


class StepscopeCallback(RecordingCallback, _TrainerCallback):  # type: ignore[misc]
    """A callback for Transformers' Trainer that records a few steps; a step is one optimizer step.

    Args:
        out: a trace file, a folder, or None for a run folder; as in `stepscope.profile`.
        schedule: `stepscope.schedule(...)`; None skips 5 steps, warms up for 2 and records 5.
        options: `diagnose`, `shapes`, `stacks`, `memory`, `lines`, `flops`, `modules`, `name` of `stepscope.profile`.

    Raises:
        UsageError: the suffix of `out` is not that of a trace.
    """

    _framework = "the Trainer"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._recording.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._recording.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._recording.end()
