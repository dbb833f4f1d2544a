"""Naming in the trace what a program logs, and when it starts a loader's workers, while steps are recorded.

A profiler sees operators; a call of `print`, of a progress bar or of an experiment tracker is to it only time that
passes. While this is on, such calls stand in the trace as "stepscope.logging#print" and the like, with the user's
line as operators have it, at the cost of about a microsecond each. Afterwards the functions are the program's own
again.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from stepscope.capture import guard

PREFIX: Final = "stepscope.logging#"
LOADER_START: Final = "DataLoader.__iter__"

_METHODS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("logging", "Logger", "handle", PREFIX + "logging"),
    ("tqdm.std", "tqdm", "refresh", PREFIX + "tqdm"),
    ("tqdm.std", "tqdm", "set_postfix", PREFIX + "tqdm"),
    ("tqdm.std", "tqdm", "set_description", PREFIX + "tqdm"),
    ("rich.console", "Console", "print", PREFIX + "rich"),
    ("rich.live", "Live", "refresh", PREFIX + "rich"),
    ("rich.progress", "Progress", "update", PREFIX + "rich"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", PREFIX + "tensorboard"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalars", PREFIX + "tensorboard"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_histogram", PREFIX + "tensorboard"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_image", PREFIX + "tensorboard"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_images", PREFIX + "tensorboard"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_figure", PREFIX + "tensorboard"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "flush", PREFIX + "tensorboard"),
    ("wandb.sdk.wandb_run", "Run", "log", PREFIX + "wandb"),
    ("mlflow.tracking.client", "MlflowClient", "log_metric", PREFIX + "mlflow"),
    ("mlflow.tracking.client", "MlflowClient", "log_batch", PREFIX + "mlflow"),
    ("torchmetrics.metric", "Metric", "forward", PREFIX + "torchmetrics"),
    ("torch.utils.data.dataloader", "DataLoader", "__iter__", LOADER_START),
)
"""Module, class, method, and what its calls are called in the trace; only modules that the program imported count."""


class LoggingCalls:
    """Names calls from `start` to `stop`; neither raises."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin; what cannot be named is left alone."""
        with guard.attempt():
            mark = recorded_mark()
            for module, kind, method, name in _METHODS:
                owner = getattr(sys.modules.get(module), kind, None)
                if owner is not None and method in vars(owner):
                    self._wrap(owner, method, name, mark)
            self._wrap(os, "fsync", PREFIX + "file", mark)
            if not _has_compiled():  # code that was compiled with a print in it would be compiled anew
                self._wrap(builtins, "print", PREFIX + "print", mark)

    def stop(self) -> None:
        """Give the functions back."""
        while self._restore:
            with guard.attempt():
                self._restore.pop()()

    def _wrap(self, owner: Any, attribute: str, name: str, mark: Callable[[str], Any]) -> None:
        original = vars(owner)[attribute]

        if not callable(original):
            return
        named = marked(original, mark, name)

        def restore() -> None:
            if vars(owner).get(attribute) is named:
                setattr(owner, attribute, original)

        setattr(owner, attribute, named)
        self._restore.append(restore)


def marked(original: Any, mark: Callable[[str], Any], name: str, after: Callable[..., None] | None = None) -> Any:
    """A function in whose place each call stands in the trace by a name; `after`, an entry, is given its arguments."""

    def ended(context: Any, result: Any, *positional: Any, **named: Any) -> None:
        _mark_ends(context)
        if after is not None:
            after(*positional, **named)

    return guard.around(original, functools.partial(_mark_begins, mark, name), ended, also_after_errors=True)


@guard.entry
def _mark_begins(mark: Callable[[str], Any], name: str, /, *_: Any, **__: Any) -> Any:
    context = mark(name)
    context.__enter__()
    return context


@guard.entry
def _mark_ends(context: Any) -> None:
    if context is not None:
        context.__exit__(None, None, None)


def recorded_mark() -> Callable[[str], Any]:
    """What makes a context of that name in the trace; torch's fast one where there is one."""
    import torch

    fast: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    made: Callable[[str], Any] = fast or torch.autograd.profiler.record_function
    return made


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    return bool(utilities is not None and utilities.counters["frames"])
