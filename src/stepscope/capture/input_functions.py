"""The functions that a loader's pipeline consists of, and where they are defined."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stepscope.program_facts import LoaderFacts

_TRANSFORMS: Final = ("transform", "transforms", "target_transform")
_MOST_TRANSFORMS: Final = 24
_DEEPEST: Final = 8


@dataclass(frozen=True, slots=True)
class StageFunction:
    """One stage of a pipeline.

    Attributes:
        stage: as in `InputStageFacts`.
        holder: what holds the function, where it can be exchanged: an object or a list.
        place: the attribute's name or the list's index.
    """

    stage: str
    name: str
    file: str | None = None
    line: int | None = None
    holder: Any = None
    place: Any = None


def loader_facts(loader: Any) -> LoaderFacts:
    """The settings of a DataLoader."""
    workers = loader.num_workers
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):  # a stream, or a sampler without a length
        batches = None
    return LoaderFacts(
        dataset=type(_innermost(loader.dataset)).__name__,
        workers=workers,
        batch_size=loader.batch_size,
        batches=batches,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        prefetch_factor=loader.prefetch_factor if workers else None,
        start_method=start_method(loader) if workers else None,
    )


def start_method(loader: Any) -> str:
    """How its workers are started: "fork", "spawn" or "forkserver"."""
    context = loader.multiprocessing_context
    if context is None:
        import multiprocessing

        context = multiprocessing
    return str(context.get_start_method())


def stage_functions(dataset: Any, collate: Any) -> list[StageFunction]:
    """The pipeline's item and collate functions, and after them the transforms that the dataset holds.

    The same for the same objects in every process, so that an index into it tells a stage everywhere.
    """
    inner = _innermost(dataset)
    method = _method_of(type(inner))
    found = [_described("item", getattr(type(inner), method, None), f"{type(inner).__name__}.{method}")]
    found.append(_described("collate", collate, _name_of(collate)))
    for attribute in _TRANSFORMS:
        transform = _attribute(inner, attribute)
        if callable(transform) and len(found) < _MOST_TRANSFORMS:
            found.extend(_transforms(transform, inner, attribute))
    return found[: _MOST_TRANSFORMS + 2]


def _method_of(kind: type) -> str:
    """What torch calls of a dataset of that class to have its items."""
    is_stream = any(base.__name__ == "IterableDataset" for base in kind.__mro__)
    names = ("__iter__",) if is_stream else ("__getitems__", "__getitem__")
    return next((name for name in names if callable(getattr(kind, name, None))), "__getitem__")


def _transforms(transform: Any, holder: Any, attribute: str) -> list[StageFunction]:
    """A transform, or those that it is composed of."""
    parts = _attribute(transform, "transforms")
    if isinstance(parts, list) and all(callable(part) for part in parts):
        return [_transform(part, parts, place) for place, part in enumerate(parts)]
    return [_transform(transform, holder, attribute)]


def _transform(function: Any, holder: Any, place: Any) -> StageFunction:
    found = _described("transform", function, _name_of(function))
    return StageFunction(found.stage, found.name, found.file, found.line, holder, place)


def _described(stage: str, function: Any, name: str) -> StageFunction:
    code = _code_of(function)
    if code is None:
        return StageFunction(stage, name)
    file = code.co_filename
    return StageFunction(stage, name, file if file[:1] == "<" else os.path.abspath(file), code.co_firstlineno)


def _code_of(function: Any) -> Any:
    """The code that runs when it is called; None for what is not written in Python."""
    for _ in range(_DEEPEST):
        inner = getattr(function, "func", None)  # of a functools.partial
        if not callable(inner):
            break
        function = inner
    if not inspect.isroutine(function):
        kind = type(function)
        forward = getattr(kind, "forward", None)
        function = forward if callable(forward) else getattr(kind, "__call__", None)  # noqa: B004
    return getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return str(name) if isinstance(name, str) else type(function).__name__


def _innermost(dataset: Any) -> Any:
    """The dataset inside torch's own Subset and the like."""
    for _ in range(_DEEPEST):
        if not type(dataset).__module__.startswith("torch.utils.data"):
            break
        inner = _attribute(dataset, "dataset")
        parts = _attribute(dataset, "datasets")
        if inner is None and isinstance(parts, (list, tuple)) and parts:
            inner = parts[0]
        if inner is None:
            break
        dataset = inner
    return dataset


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that the object itself has; properties of the user's are not run."""
    try:
        return vars(owner).get(name)
    except TypeError:
        return None
