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

    def called(self, frame: FrameType) -> None:
        """Time a call that begins, if it may be a constructor or the compiler."""
        if frame.f_code.co_name in ("__init__", "compile") and len(self._begun) < _MOST_BEGUN:
            self._begun[id(frame)] = time.perf_counter_ns()

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
            kind = _kind_of(made := _first_argument(frame))
            if kind is not None and not _is_inner(caller):
                self._count(kind, type(made).__name__, caller, ns)

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
        if getattr(sys.modules.get(module), name, None) in classes:
            return kind
    return None


def _first_argument(frame: FrameType) -> Any:
    """The object whose method a frame runs, mostly called self."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def _is_inner(caller: FrameType | None) -> bool:
    """Whether an object is made while one of these kinds is being made."""
    while caller is not None and caller.f_code.co_name != "<module>":
        if caller.f_code.co_name == "__init__" and _kind_of(_first_argument(caller)) is not None:
            return True
        caller = caller.f_back
    return False
