"""Time a blind program's steps without a profiler.

    python -m tests.zoo.blind.stopwatch sentiment
    python -m tests.zoo.blind.stopwatch sentiment --mended

A step ends with an optimizer's step, or with a call of the function that the program's truth names. The last line
printed is a JSON object: the steps' nanoseconds on the clock, and those of the process on its processors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.zoo.blind.registry import truth

LAST: Final = 24
"""Steps after which a program is ended."""


class Enough(BaseException):
    """The program has made as many steps as are timed."""


class Marks:
    """When steps ended, by the clock and by the time that the process was given."""

    def __init__(self) -> None:
        self.wall: list[int] = []
        self.cpu: list[int] = []

    def note(self, *_: Any) -> None:
        """A step ends here."""
        self.wall.append(time.perf_counter_ns())
        self.cpu.append(time.process_time_ns())
        if len(self.wall) > LAST:
            raise Enough

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose every end is a step's."""

        @functools.wraps(function)
        def noted(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self.note()
            return result

        return noted


def _as_module(path: str) -> ModuleType:
    """The program, imported from its file under the name it has as a script, but not yet run."""
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    name, *arguments = sys.argv[1:]
    program = truth(name)
    path = str(program.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(program.path.parent))
    module, marks = _as_module(path), Marks()
    if program.step_function is None:
        register_optimizer_step_post_hook(marks.note)
    else:
        setattr(module, program.step_function, marks.after(getattr(module, program.step_function)))
    with contextlib.suppress(Enough):
        module.main()
    lengths = {
        "wall": [end - begin for begin, end in pairwise(marks.wall)],
        "cpu": [end - begin for begin, end in pairwise(marks.cpu)],
    }
    print(json.dumps(lengths))


if __name__ == "__main__":
    main()
