"""The facts of the program that a recording keeps in its trace: see `stepscope.program_facts`.

Collected by the recorder: a few counters at each border of steps, everything else after the last. Whatever cannot be
collected is left out, and the recording goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from stepscope.capture.checkpoint_calls import CheckpointCalls
from stepscope.capture.facts_compilations import compilations
from stepscope.capture.facts_counters import PauseWatch, StepCounters
from stepscope.capture.facts_machine import process_figures, torch_settings
from stepscope.capture.facts_objects import LiveObjects
from stepscope.capture.input_stages import InputWatch, input_watch
from stepscope.capture.manifest import speed_environment
from stepscope.capture.padding import PaddingSamples
from stepscope.capture.start_marks import mark, start_times
from stepscope.program_facts import KEY, ProgramFacts, to_json

_T = TypeVar("_T")
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
        with contextlib.suppress(Exception):
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
            with contextlib.suppress(Exception):
                self._steps.border(number)

    def finish(self) -> ProgramFacts | None:
        """Count no more, and tell what there is; None if nothing was started."""
        if not self._is_on:
            return None
        self._is_on = False
        self._pauses.stop()
        _or_none(self._checkpoints.stop)
        facts = _or_none(self._facts)
        _or_none(lambda: self._watch.uninstall(self))
        return facts

    def _facts(self) -> ProgramFacts:
        objects = _or_none(LiveObjects)
        counted = self._steps.steps if self._steps is not None else []
        figures = _or_none(process_figures) or {}
        figures.update(
            self._warm_up,
            garbage_collection_ns=self._pauses.total_ns,
            garbage_collections=self._pauses.runs,
            checkpoint_bytes=self._checkpoints.saved_bytes,
        )
        return ProgramFacts(
            loaders=_or_none(self._watch.loaders) or (),
            input_stages=_or_none(self._watch.stages) or (),
            optimizers=(_or_none(objects.optimizers) if objects else None) or (),
            data_parallel=(_or_none(objects.data_parallel) if objects else None) or (),
            model=_or_none(objects.model) if objects else None,
            compilations=_or_none(compilations) or (),
            torch=_or_none(torch_settings) or {},
            process=figures,
            environment=_or_none(lambda: speed_environment(os.environ)) or {},
            start=_or_none(start_times) or {},
            pauses=_or_none(self._pauses.pauses) or (),
            steps=tuple(counted),
            padding=_or_none(self._padding.stop) or (),
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


def _or_none(reading: Callable[[], _T]) -> _T | None:
    try:
        return reading()
    except Exception:  # a version of torch or an object of the user's that is unlike what is known
        return None
