"""Collect the facts about the program that a recording keeps in its trace: see `stepscope.trace.program_facts`.

The recorder reads a few counters at each step boundary and everything else after the last step. Facts that cannot be
collected are left out, and the recording continues.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.machine.environment import process_figures, torch_settings
from stepscope.record.annotations import CheckpointCalls
from stepscope.record.counters import PauseWatch, StepCounters, mark, start_times
from stepscope.record.input_stages import InputWatch, input_watch
from stepscope.record.manifest import speed_environment
from stepscope.record.program_objects import attributes, groups_of, parameters_in, parameters_of, unseen
from stepscope.trace.program_facts import (
    KEY,
    CompilationFacts,
    DataParallelFacts,
    ModelFacts,
    OptimizerFacts,
    PaddingFacts,
    ProgramFacts,
    to_json,
)

_LONGEST_REASON: Final = 2_000


def compilations() -> tuple[CompilationFacts, ...]:
    """Return the latest compilations of this process, oldest first; torch keeps 64. Empty if nothing was compiled."""
    module = sys.modules.get("torch._dynamo.utils")
    kept = getattr(module, "get_compilation_metrics", None)
    found = []
    for metrics in kept() if kept is not None else ():
        with guard.attempt():
            if metrics.co_name:  # absent for a backward pass that is compiled later
                found.append(_compilation(metrics))
    return tuple(found)


def _compilation(metrics: Any) -> CompilationFacts:
    reason = getattr(metrics, "recompile_reason", None)
    start, duration = getattr(metrics, "start_time_us", None), getattr(metrics, "duration_us", None)
    return CompilationFacts(
        function=str(metrics.co_name),
        file=metrics.co_filename,
        line=metrics.co_firstlineno,
        reason=str(reason)[:_LONGEST_REASON] if reason else None,
        start_unix_ns=int(start) * 1000 if start is not None else None,
        duration_ns=int(duration) * 1000 if duration is not None else None,
    )


MOST: Final = 50
"""Maximum number of described objects of one kind."""
_DATA_PARALLEL: Final = "torch.nn.parallel.data_parallel", "DataParallel"
_DISTRIBUTED: Final = "torch.nn.parallel.distributed", "DistributedDataParallel"


class LiveObjects:
    """Live objects of some torch classes, except those hidden by `gc.freeze`."""

    def __init__(self) -> None:
        import torch

        kinds = {
            "optimizers": torch.optim.Optimizer,
            "parameters": torch.nn.Parameter,
            "modules": torch.nn.Module,
            "distributed": _loaded(*_DISTRIBUTED),
            "data_parallel": _loaded(*_DATA_PARALLEL),
        }
        everything = gc.get_objects()
        classes = {id(type(each)): type(each) for each in everything}
        self._found: dict[str, list[Any]] = {}
        for name, kind in kinds.items():
            wanted = {number for number, each in classes.items() if kind is not None and issubclass(each, kind)}
            self._found[name] = [each for each in everything if id(type(each)) in wanted] if wanted else []

    def optimizers(self) -> tuple[OptimizerFacts, ...]:
        """Return the optimizers that are not wrapped by others, once each."""
        shown = [each for each in self._found["optimizers"] if "optimizer" not in attributes(each)]
        shown = shown or self._found["optimizers"]
        found = []
        for each in shown[:MOST]:
            with guard.attempt():
                found.append(_optimizer(each))
        return tuple(found)

    def data_parallel(self) -> tuple[DataParallelFacts, ...]:
        found = []
        for each in self._found["distributed"][:MOST]:
            with guard.attempt():
                found.append(_distributed(each))
        for each in self._found["data_parallel"][:MOST]:
            with guard.attempt():
                gradient_bytes = _bytes(one for one in parameters_in(each) if one.requires_grad)
                devices = len(attributes(each)["device_ids"])
                found.append(DataParallelFacts(kind="DataParallel", devices=devices, gradient_bytes=gradient_bytes))
        return tuple(found)

    def model(self) -> ModelFacts | None:
        """Return sizes of all parameters, optimizer state and module buffers; None without parameters."""
        import torch

        parameters = self._found["parameters"]
        if not parameters:
            return None
        buffers: dict[int, Any] = {}
        for module in self._found["modules"]:
            held = attributes(module).get("_buffers", {})
            buffers.update({id(one): one for one in held.values() if one is not None})
        state = {
            id(value): value
            for optimizer in self._found["optimizers"]
            for values in list(attributes(optimizer).get("state", {}).values())
            for value in (list(dict.values(values)) if issubclass(type(values), dict) else ())
            if issubclass(type(value), torch.Tensor)
        }
        return ModelFacts(
            parameters=sum(one.numel() for one in parameters),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(one for one in parameters if one.requires_grad),
            optimizer_state_bytes=_bytes(state.values()),
            buffer_bytes=_bytes(buffers.values()),
        )


def _optimizer(optimizer: Any) -> OptimizerFacts:
    groups, tensors = groups_of(optimizer), parameters_of(optimizer)
    devices = [tensor.device.type for tensor in tensors]
    return OptimizerFacts(
        name=type(optimizer).__name__,
        tensors=len(tensors),
        foreach=_setting(groups, "foreach"),
        fused=_setting(groups, "fused"),
        capturable=_setting(groups, "capturable"),
        implementation=_implementation(groups[0], tensors),
        device=max(sorted(set(devices)), key=devices.count) if devices else None,
    )


def _setting(groups: Sequence[dict[str, Any]], name: str) -> bool | None:
    values = {group.get(name) for group in groups}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, bool) else None


def _implementation(group: dict[str, Any], tensors: list[Any]) -> str | None:
    """Return the optimizer's implementation, as set or by torch's default; None if it has no such choice."""
    if "foreach" not in group and "fused" not in group:
        return None
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None and group.get("fused") is None:
        from torch.optim.optimizer import _default_to_fused_or_foreach

        fused, foreach = _default_to_fused_or_foreach(tensors, bool(group.get("differentiable")), use_fused=False)
        if fused:
            return "fused"
    return "foreach" if foreach else "single"


def _distributed(module: Any) -> DataParallelFacts:
    own = attributes(module)
    trained = [one for one in parameters_in(module) if one.requires_grad]
    without = sum(one.grad is None for one in trained)
    bucket_bytes = own.get("bucket_bytes_cap")
    backend = None
    with guard.attempt():
        import torch.distributed

        backend = str(torch.distributed.get_backend(own["process_group"]))
    ids = own.get("device_ids")
    return DataParallelFacts(
        kind="DistributedDataParallel",
        devices=len(ids) if ids else None,
        backend=backend,
        bucket_bytes=bucket_bytes if isinstance(bucket_bytes, int) else None,
        gradient_bytes=_bytes(trained),
        find_unused_parameters=bool(own.get("find_unused_parameters")),
        gradient_as_bucket_view=bool(own.get("gradient_as_bucket_view")),
        static_graph=bool(own.get("static_graph")),
        unused_parameters=without if without < len(trained) else None,  # after zero_grad the gradients are gone
    )


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


_TAIL_BYTES: Final = 64


class FactsRecording:
    """The counters and facts from `start` to `finish`; raises nothing.

    Args:
        warm_up: counters from before, as {"warm_up_ns", "warm_up_faults"}.
    """

    def __init__(self, watch: InputWatch | None = None, warm_up: dict[str, int] | None = None) -> None:
        self._watch = watch or input_watch()
        self._warm_up = warm_up or {}
        self._pauses = PauseWatch()
        self._checkpoints = CheckpointCalls()
        self._padding = PaddingSamples()
        self._steps: StepCounters | None = None
        self._is_on = False

    def start(self) -> None:
        with guard.attempt():
            mark("recording")
            self._watch.install(self)
            self._watch.begin()
            self._pauses.start()
            self._checkpoints.start()
            self._padding.start()
            self._is_on = True
            self._steps = StepCounters()
            self._steps.follow(lambda: self._pauses.total_ns)
            self._steps.border(None)

    def step_ended(self, number: int) -> None:
        if self._steps is not None:
            with guard.attempt():
                self._steps.border(number)

    def finish(self) -> ProgramFacts | None:
        """Stop counting; return None if it was not started."""
        if not self._is_on:
            return None
        self._is_on = False
        self._pauses.stop()
        guard.attempted(self._checkpoints.stop)
        with unseen:
            facts = guard.attempted(self._facts)
        guard.attempted(lambda: self._watch.uninstall(self))
        return facts

    def abandon(self) -> None:
        self._is_on, self._steps = False, None
        for stop in (self._pauses.stop, self._checkpoints.stop, self._padding.give_back):
            guard.attempted(stop)
        guard.attempted(lambda: self._watch.uninstall(self))

    def _facts(self) -> ProgramFacts:
        objects = guard.attempted(LiveObjects)
        counted = self._steps.steps if self._steps is not None else []
        figures = guard.attempted(process_figures) or {}
        figures.update(
            self._warm_up,
            garbage_collection_ns=self._pauses.total_ns,
            garbage_collections=self._pauses.runs,
            checkpoint_bytes=self._checkpoints.saved_bytes,
        )
        return ProgramFacts(
            loaders=guard.attempted(self._watch.loaders) or (),
            input_stages=guard.attempted(self._watch.stages) or (),
            optimizers=(guard.attempted(objects.optimizers) if objects else None) or (),
            data_parallel=(guard.attempted(objects.data_parallel) if objects else None) or (),
            model=guard.attempted(objects.model) if objects else None,
            compilations=guard.attempted(compilations) or (),
            torch=guard.attempted(torch_settings) or {},
            process=figures,
            environment=guard.attempted(lambda: speed_environment(os.environ)) or {},
            start=guard.attempted(start_times) or {},
            pauses=guard.attempted(self._pauses.pauses) or (),
            steps=tuple(counted),
            padding=guard.attempted(self._padding.stop) or (),
        )


def add_to_trace(path: Path, facts: ProgramFacts | None) -> None:
    """Append the facts to a Chrome trace file that has just been written.

    Raises OSError if the file cannot be changed. A file with an unexpected ending is left unchanged.
    """
    if facts is None:
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(size - _TAIL_BYTES, 0)
        file.seek(start)
        tail = file.read()
        end = tail.rstrip()
        if not end.endswith(b"}") or end[:-1].rstrip().endswith((b"{", b",")):
            return
        file.seek(start + len(end) - 1)
        file.write(f", {json.dumps(KEY)}: {to_json(facts)}\n}}\n".encode())
        file.truncate()


IGNORED: Final = -100
"""The default `ignore_index` of torch's losses."""

_MOST_BATCHES: Final = 64
_MOST_POSITIONS: Final = 1 << 22
_SHORTEST: Final = 8
"""Tensors with fewer columns are not treated as sequences."""
_FEWEST_POSITIONS: Final = 64
_DEEPEST: Final = 4
_TIMES: Final = 16
"""Assumed size of the data set, as a multiple of the inspected rows."""


class PaddingSamples:
    """Measures the padding of batches from the loaders, from `start` to `stop`."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Sequences] = {}
        self._batches = 0
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        from torch.utils.data import dataloader

        kinds = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
        self._restore = [
            guard.put(kind, "_next_data", guard.around(vars(kind)["_next_data"], after=self.seen))
            for kind in kinds
            if "_next_data" in vars(kind)
        ]

    def stop(self) -> tuple[PaddingFacts, ...]:
        """Restore the loaders; return the findings, the most padded first."""
        self.give_back()
        self._look_around()
        found = [sequences.facts(name) for name, sequences in self._tensors.items()]
        found = [facts for facts in found if facts.padding_share or facts.ignored_share]
        return tuple(sorted(found, key=lambda facts: -(facts.padding_share or 0.0)))

    def give_back(self) -> None:
        while self._restore:
            self._restore.pop()()

    @guard.entry
    def seen(self, _: None, batch: Any, iterator: Any) -> None:
        """Measure a batch; one that cannot be inspected is skipped."""
        with guard.attempt(), unseen:
            self.add(batch)

    def add(self, batch: Any) -> None:
        """Measure one batch: a tensor, or nested lists, tuples and dictionaries of tensors."""
        if self._batches >= _MOST_BATCHES:
            return
        self._batches += 1
        for name, tensor in _tensors(batch, ""):
            self._add(name or "batch", tensor)

    def _add(self, name: str, tensor: Any) -> None:
        if not 0 < tensor.numel() <= _MOST_POSITIONS:
            return
        # these operators are not recorded by any profiler
        numbers = tensor.numpy()
        if not ({int(numbers.min()), int(numbers.max())} <= {0, 1}):  # a mask, or token types: no sequence of its own
            self._tensors.setdefault(name, _Sequences()).add(numbers)

    def _look_around(self) -> None:
        """Measure live integer tensors that did not come from a loader, such as labels made in the step."""
        import torch

        found = []
        for each in gc.get_objects():
            with guard.attempt():
                if type(each) is torch.Tensor and _is_sequences(each) and each.numel() <= _MOST_POSITIONS:
                    found.append(each)
        found.sort(key=lambda tensor: -tensor.numel())
        ignoring = [each for each in found if (each.numpy() == IGNORED).any()]
        batches = [each for each in found if each.dim() == 2]
        if ignoring and not any(sequences.ignored for sequences in self._tensors.values()):
            self._add("a tensor of targets", ignoring[0])
        if batches and not self._batches:
            self._add("a tensor of the batch", batches[0])


class _Sequences:
    def __init__(self) -> None:
        self.batches = 0
        self.positions = 0
        self.ignored = 0
        self._padding = 0
        self._rows: list[int] = []
        self._sizes: list[int] = []
        self.longest = 0

    def add(self, numbers: Any) -> None:
        self.batches += 1
        self.positions += numbers.size
        self.ignored += int((numbers == IGNORED).sum())
        if numbers.ndim != 2 or numbers.shape[1] < _SHORTEST:
            return
        lengths = _lengths(numbers)
        self._rows += lengths
        self._sizes.append(len(lengths))
        self._padding += numbers.size - sum(lengths)
        self.longest = max(self.longest, numbers.shape[1])

    def facts(self, name: str) -> PaddingFacts:
        padded = sum(self._rows) + self._padding
        left = sum(size * max(rows) - sum(rows) for size, rows in self._sorted())
        real = sum(self._rows) * _TIMES
        return PaddingFacts(
            name=name,
            batches=self.batches,
            positions=self.positions,
            padding_share=self._padding / padded if padded else None,
            sorted_padding_share=left / (real + left) if real else None,
            longest=self.longest or None,
            ignored_share=self.ignored / self.positions if self.positions else None,
        )

    def _sorted(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the rows sorted into batches of the same sizes, an estimate for sorting the whole data set."""
        rows = iter(length for length in sorted(self._rows) for _ in range(_TIMES))
        for size in self._sizes * _TIMES:
            batch = list(islice(rows, size))
            if batch:
                yield len(batch), batch


def _lengths(rows: Any) -> list[int]:
    """Return each row's length without the padding number at its end.

    The padding number is the one that most rows repeat at their end.
    """
    import numpy as np

    last = rows[:, -1]
    repeats = last[rows[:, -2] == last]
    if not len(repeats):
        return [int(rows.shape[1])] * int(rows.shape[0])
    numbers, counts = np.unique(repeats, return_counts=True)
    real = rows != numbers[np.argmax(counts)]
    lengths: list[int] = np.where(real.any(1), rows.shape[1] - np.argmax(real[:, ::-1], axis=1), 0).tolist()
    return lengths


def _is_sequences(tensor: Any) -> bool:
    import torch

    kinds = (torch.int64, torch.int32)
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.dtype in kinds
    return is_plain and tensor.dim() in (1, 2) and tensor.numel() >= _FEWEST_POSITIONS


def _tensors(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    import torch

    kind = type(value)
    if kind is torch.Tensor:
        if _is_sequences(value):
            yield name, value
    elif depth < _DEEPEST and issubclass(kind, (dict, UserDict)):
        named = value if issubclass(kind, dict) else attributes(value).get("data", {})
        for key, inner in list(dict.items(named))[:32]:
            yield from _tensors(inner, f"{name}.{key}".strip("."), depth + 1)
    elif depth < _DEEPEST and issubclass(kind, (list, tuple)):
        parts = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        for place, inner in enumerate(islice(parts, 32)):
            yield from _tensors(inner, f"{name}[{place}]", depth + 1)
