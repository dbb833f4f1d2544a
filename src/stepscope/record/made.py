"""Which lines of the user's code make optimizers, modules, loaders, data sets or pools in each step."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import FrameType
from typing import Any, Final

from stepscope.record.lines import line_of
from stepscope.trace.program_facts import MadeFacts

_KINDS: Final = (
    ("optimizer", "torch.optim.optimizer", "Optimizer"),
    ("loader", "torch.utils.data.dataloader", "DataLoader"),
    ("dataset", "torch.utils.data.dataset", "Dataset"),
    ("module", "torch.nn.modules.module", "Module"),
    ("pool", "multiprocessing.pool", "Pool"),
    ("pool", "concurrent.futures._base", "Executor"),
)
_COMPILER: Final = ("torch", "compile")
_MOST: Final = 50
_MOST_BEGUN: Final = 1000
_Place = tuple[str, str, str, int, str]


class MadeInSteps:
    """Counts what is made in the steps that are looked at."""

    def __init__(self) -> None:
        self._steps: list[Counter[_Place]] = [Counter()]
        self._ns: Counter[_Place] = Counter()
        self._begun: dict[int, int] = {}
        self._making: list[tuple[int, str]] = []  # constructors that run, and what they make

    def called(self, frame: FrameType) -> None:
        """Time a call that begins, if it may be a constructor or the compiler."""
        name = frame.f_code.co_name
        if name not in ("__init__", "compile") or len(self._begun) >= _MOST_BEGUN:
            return
        self._begun[id(frame)] = time.perf_counter_ns()
        kind = _kind_of(_first_argument(frame)) if name == "__init__" else None
        if kind is not None:
            self._making.append((id(frame), kind))

    def returned(self, frame: FrameType) -> None:
        """Count a call that ends, if it is a constructor or the compiler that the user's code called."""
        begun = self._begun.pop(id(frame), None)
        if begun is None:
            return
        ns = time.perf_counter_ns() - begun
        name, caller = frame.f_code.co_name, frame.f_back
        if name == "compile":
            if frame.f_globals.get("__name__") == _COMPILER[0]:
                self._count("compiled function", "torch.compile", caller, ns)
        elif name == "__init__":
            self._constructed(frame, caller, ns)

    def _constructed(self, frame: FrameType, caller: FrameType | None, ns: int) -> None:
        """Count what a constructor made, unless it was made while another of these kinds is being made."""
        if self._making and self._making[-1][0] == id(frame):
            _, kind = self._making.pop()
            if not self._making:
                self._count(kind, type(_first_argument(frame)).__name__, caller, ns)

    def _count(self, kind: str, name: str, caller: FrameType | None, ns: int) -> None:
        code, line = line_of(caller)
        if code is not None and line is not None:
            place = kind, name, code.co_filename, line, code.co_name
            self._steps[-1][place] += 1
            self._ns[place] += ns

    def border(self) -> None:
        """A step has ended."""
        self._steps.append(Counter())

    def facts(self) -> tuple[MadeFacts, ...]:
        """What was made in each complete step."""
        complete = self._steps[:-1]
        always = [place for place in complete[0] if all(step[place] for step in complete)] if complete else []
        return tuple(
            MadeFacts(
                kind=place[0],
                name=place[1],
                file=place[2],
                line=place[3],
                function=place[4],
                calls=min(step[place] for step in complete),
                ns=self._ns[place] // max(sum(step[place] for step in self._steps), 1),
            )
            for place in always[:_MOST]
        )


def _kind_of(made: Any) -> str | None:
    classes = type(made).__mro__
    for kind, module, name in _KINDS:
        wanted = getattr(sys.modules.get(module), name, None)
        if wanted is not None and any(each is wanted for each in classes):
            return kind
    return None


def _first_argument(frame: FrameType) -> Any:
    """The object whose method a frame runs, mostly called self."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None
