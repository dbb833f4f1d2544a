"""Collect the facts about the program that a recording keeps in its trace: see `stepscope.trace.program_facts`.

The recorder reads a few counters at each step boundary and everything else after the last step. Facts that cannot be
collected are left out, and the recording continues.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from stepscope import guard
from stepscope.machine.environment import process_figures, torch_settings
from stepscope.machine.observed import LoadMeter
from stepscope.record.annotations import CheckpointCalls
from stepscope.record.batch_samples import PaddingSamples, model_calls
from stepscope.record.counters import PauseWatch, StepCounters, mark, start_times
from stepscope.record.input_stages import InputWatch, input_watch
from stepscope.record.lines import line_of
from stepscope.record.manifest import speed_environment
from stepscope.record.program_objects import attributes, groups_of, parameters_in, parameters_of, unseen
from stepscope.trace.naming import is_stepscope_file
from stepscope.trace.program_facts import (
    KEY,
    CompilationFacts,
    DataParallelFacts,
    ModelFacts,
    OptimizerFacts,
    ProgramFacts,
    WaitingFacts,
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


def waiting_threads() -> tuple[WaitingFacts, ...]:
    """Where the other threads stand in the user's code; those that stand in none are left out."""
    own = threading.get_ident()
    places = [line_of(frame) for thread, frame in guard.current_frames().items() if thread != own]
    return tuple(
        WaitingFacts(file=code.co_filename, line=line, function=code.co_name)
        for code, line in dict.fromkeys(places)
        if code is not None and line is not None
    )


def _files_on_stack(frame: FrameType | None) -> tuple[str, ...]:
    found: dict[str, None] = {}
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_stepscope_file(file) and not _OF_TORCH.search(file) and file[:1] != "<":
            found[file] = None
        frame = frame.f_back
    return tuple(reversed(list(found)[-MOST:]))


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


_OF_TORCH: Final = re.compile(r"[/\\]torch[/\\]")
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
        self._load: LoadMeter | None = None
        self._waiting: tuple[WaitingFacts, ...] = ()
        self._stack: tuple[str, ...] = ()
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
            self._waiting = waiting_threads()
            self._load = LoadMeter()
            self._steps = StepCounters()
            self._steps.follow(lambda: self._pauses.total_ns)
            self._steps.border(None)

    def step_ended(self, number: int) -> None:
        if self._steps is not None:
            with guard.attempt():
                self._steps.border(number)
                self._stack = self._stack or _files_on_stack(sys._getframe(1))

    def finish(self) -> ProgramFacts | None:
        """Stop counting; return None if it was not started."""
        if not self._is_on:
            return None
        self._is_on = False
        others = guard.attempted(self._load.other_cores) if self._load is not None else None
        self._pauses.stop()
        guard.attempted(self._checkpoints.stop)
        with unseen:
            facts = guard.attempted(lambda: self._facts(others))
        guard.attempted(lambda: self._watch.uninstall(self))
        return facts

    def abandon(self) -> None:
        self._is_on, self._steps = False, None
        for stop in (self._pauses.stop, self._checkpoints.stop, self._padding.give_back):
            guard.attempted(stop)
        guard.attempted(lambda: self._watch.uninstall(self))

    def _facts(self, other_cores: float | None) -> ProgramFacts:
        objects = guard.attempted(LiveObjects)
        counted = self._steps.steps if self._steps is not None else []
        figures = guard.attempted(process_figures) or {}
        figures.update(
            self._warm_up,
            garbage_collection_ns=self._pauses.total_ns,
            garbage_collections=self._pauses.runs,
            checkpoint_bytes=self._checkpoints.saved_bytes,
        )
        if other_cores is not None:
            figures["other_cores"] = round(other_cores, 3)
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
            prompts=guard.attempted(model_calls().prompts),
            model_calls=guard.attempted(model_calls().calls),
            waiting=self._waiting,
            stack=self._stack,
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
