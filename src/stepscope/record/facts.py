"""The facts of the program that a recording keeps in its trace: see `stepscope.trace.program_facts`.

Collected by the recorder: a few counters at each border of steps, everything else after the last. Whatever cannot be
collected is left out, and the recording goes on without it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from stepscope import guard
from stepscope.machine.process import process_figures, torch_settings
from stepscope.record.annotations import CheckpointCalls
from stepscope.record.counters import PauseWatch, StepCounters
from stepscope.record.input_stages import InputWatch, input_watch
from stepscope.record.manifest import speed_environment
from stepscope.record.padding import PaddingSamples
from stepscope.record.step_times import mark, start_times
from stepscope.trace.program_facts import (
    KEY,
    CompilationFacts,
    DataParallelFacts,
    ModelFacts,
    OptimizerFacts,
    ProgramFacts,
    to_json,
)

_LONGEST_REASON: Final = 2_000


def compilations() -> tuple[CompilationFacts, ...]:
    """The latest compilations of this process, the earliest first; torch keeps 64. Empty where nothing was compiled."""
    module = sys.modules.get("torch._dynamo.utils")
    kept = getattr(module, "get_compilation_metrics", None)
    found = []
    for metrics in kept() if kept is not None else ():
        with guard.attempt():
            if metrics.co_name:  # a backward pass that is compiled later has none
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
"""Of one kind that are described."""
_DATA_PARALLEL: Final = "torch.nn.parallel.data_parallel", "DataParallel"
_DISTRIBUTED: Final = "torch.nn.parallel.distributed", "DistributedDataParallel"


class LiveObjects:
    """Objects of some of torch's classes that are alive, those that `gc.freeze` hid excepted."""

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
        classes = {type(each) for each in everything}
        self._found: dict[str, list[Any]] = {}
        for name, kind in kinds.items():
            wanted = {each for each in classes if kind is not None and issubclass(each, kind)}
            self._found[name] = [each for each in everything if type(each) in wanted] if wanted else []

    def optimizers(self) -> tuple[OptimizerFacts, ...]:
        """Those that are not wrapped by others, once each."""
        inner = {id(vars(each).get("optimizer")) for each in self._found["optimizers"]}
        wrapping = [each for each in self._found["optimizers"] if "optimizer" in vars(each)]
        shown = [each for each in self._found["optimizers"] if each not in wrapping or not inner]
        found = []
        for each in shown[:MOST]:
            with guard.attempt():
                found.append(_optimizer(each))
        return tuple(found)

    def data_parallel(self) -> tuple[DataParallelFacts, ...]:
        """DistributedDataParallel and DataParallel modules."""
        found = []
        for each in self._found["distributed"][:MOST]:
            with guard.attempt():
                found.append(_distributed(each))
        for each in self._found["data_parallel"][:MOST]:
            with guard.attempt():
                gradient_bytes = _bytes(one for one in each.parameters() if one.requires_grad)
                found.append(
                    DataParallelFacts(kind="DataParallel", devices=len(each.device_ids), gradient_bytes=gradient_bytes)
                )
        return tuple(found)

    def model(self) -> ModelFacts | None:
        """All parameters, and what the optimizers and modules hold besides; None without any parameter."""
        parameters = self._found["parameters"]
        if not parameters:
            return None
        buffers: dict[int, Any] = {}
        for module in self._found["modules"]:
            buffers.update({id(one): one for one in vars(module).get("_buffers", {}).values() if one is not None})
        state = {
            id(value): value
            for optimizer in self._found["optimizers"]
            for values in list(getattr(optimizer, "state", {}).values())
            for value in (values.values() if isinstance(values, dict) else ())
            if hasattr(value, "element_size")
        }
        return ModelFacts(
            parameters=sum(one.numel() for one in parameters),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(one for one in parameters if one.requires_grad),
            optimizer_state_bytes=_bytes(state.values()),
            buffer_bytes=_bytes(buffers.values()),
        )


def _optimizer(optimizer: Any) -> OptimizerFacts:
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
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
    """What the optimizer's step runs: as set, else by torch's own default; None for one that knows no such choice."""
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
    trained = [one for one in module.parameters() if one.requires_grad]
    without = sum(one.grad is None for one in trained)
    bucket_bytes = getattr(module, "bucket_bytes_cap", None)
    backend = None
    with guard.attempt():
        import torch.distributed

        backend = str(torch.distributed.get_backend(module.process_group))
    ids = getattr(module, "device_ids", None)
    return DataParallelFacts(
        kind="DistributedDataParallel",
        devices=len(ids) if ids else None,
        backend=backend,
        bucket_bytes=bucket_bytes if isinstance(bucket_bytes, int) else None,
        gradient_bytes=_bytes(trained),
        find_unused_parameters=bool(getattr(module, "find_unused_parameters", False)),
        gradient_as_bucket_view=bool(getattr(module, "gradient_as_bucket_view", False)),
        static_graph=bool(getattr(module, "static_graph", False)),
        unused_parameters=without if without < len(trained) else None,  # after zero_grad nothing is known
    )


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


_TAIL_BYTES: Final = 64


class FactsRecording:
    """What is counted from `start` to `finish`; raises nothing.

    Args:
        watch: what sees the loaders.
        warm_up: what was counted before, as {"warm_up_ns", "warm_up_faults"}.
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
        """Begin to count; the first step begins."""
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
        """The step of that number has ended, and the next begins."""
        if self._steps is not None:
            with guard.attempt():
                self._steps.border(number)

    def finish(self) -> ProgramFacts | None:
        """Count no more, and tell what there is; None if nothing was started."""
        if not self._is_on:
            return None
        self._is_on = False
        self._pauses.stop()
        guard.attempted(self._checkpoints.stop)
        facts = guard.attempted(self._facts)
        guard.attempted(lambda: self._watch.uninstall(self))
        return facts

    def abandon(self) -> None:
        """Count no more, and tell nothing."""
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
    """Put the facts behind the events of a Chrome-trace file that has just been written.

    Raises:
        OSError: the file cannot be changed. One that does not end as such a file does is left as it is.
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
