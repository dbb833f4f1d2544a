"""Which steps evaluate: modules are switched to evaluation mode in them, from the first step on until the recording."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, Final

from stepscope import guard
from stepscope.record.lines import compiling, line_of
from stepscope.record.program_objects import attributes
from stepscope.trace.program_facts import EvaluationFacts

_SKIPPED: Final = 2
"""First steps, which take longer than others."""
_MOST: Final = 1000


class EvaluationWatch:
    """Notes for each step how long it took and whether a module was switched to evaluation mode."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._restore: Callable[[], None] | None = None
        self._evaluates = False
        self._begun_ns = 0
        self._place = ("", 0, "")
        self._steps: list[tuple[int, bool]] = []  # duration (0 if recorded), evaluates

    def start(self) -> None:
        """Begin with the step that begins now; modules must be imported."""
        kind: Any = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
        self.stop()
        if kind is not None:
            self._steps, self._evaluates, self._begun_ns = [], False, self._clock_ns()
            ours = guard.around(kind.train, before=self.switched, unless=compiling())
            self._restore = guard.put(kind, "train", ours)

    def stop(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    @guard.entry
    def switched(self, module: Any, mode: bool = True) -> None:
        """A module's mode is being set."""
        if not mode and attributes(module).get("training"):
            self._evaluates = True
            code, line = line_of(sys._getframe())
            if code is not None and line is not None:
                self._place = (code.co_filename, line, code.co_name)

    def border(self, *, recorded: bool) -> None:
        """A step has ended."""
        if self._restore is None:
            return
        now_ns = self._clock_ns()
        if len(self._steps) < _MOST:
            self._steps.append((0 if recorded else now_ns - self._begun_ns, self._evaluates))
        self._evaluates, self._begun_ns = False, now_ns

    def facts(self) -> EvaluationFacts | None:
        """What was seen; None if no step evaluated."""
        evaluating = [number for number, (_, evaluates) in enumerate(self._steps) if evaluates]
        if not evaluating:
            return None
        gaps = [after - before for before, after in pairwise(evaluating)]
        timed = [step for step in self._steps[_SKIPPED:] if step[0]]
        longer = [ns for ns, evaluates in timed if evaluates]
        others = [ns for ns, evaluates in timed if not evaluates]
        file, line, function = self._place
        return EvaluationFacts(
            file=file,
            line=line,
            function=function,
            seen=len(self._steps),
            steps=len(evaluating),
            every=float(median(gaps)) if gaps else float(len(self._steps)),
            step_ns=int(median(others)) if others else None,
            evaluating_ns=int(median(longer)) if longer else None,
        )


_watch = EvaluationWatch()


def evaluation_watch() -> EvaluationWatch:
    """Return the watch of this process."""
    return _watch
