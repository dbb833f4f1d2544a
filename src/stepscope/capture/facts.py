"""The facts of the program that a recording keeps in its trace: see `stepscope.program_facts`.

Collected by the recorder: a few counters at each border of steps, everything else after the last. Whatever cannot be
collected is left out, and the recording goes on without it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from stepscope.capture import guard
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
