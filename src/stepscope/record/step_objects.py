"""What the program does with its objects in each step: graphs that it keeps, objects that it makes, evaluation.

Which variables keep the autograd graphs of steps that have ended, such as a sum of losses. Which lines of the user's
code make optimizers, modules, loaders, data sets or pools. In which steps modules are switched to evaluation mode, from
the first step on until the recording.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import CodeType, FrameType
from typing import Any, Final

from stepscope import guard
from stepscope.record.lines import compiling, line_of
from stepscope.record.program_objects import attributes, is_plain
from stepscope.trace.program_facts import EvaluationFacts, KeptGraphFacts, MadeFacts

_MOST_NODES: Final = 5_000
_MOST_NAMES: Final = 60
_MOST_ITEMS: Final = 1_000

_Variable = tuple[CodeType, str]


@dataclass(frozen=True)
class _Graph:
    """A variable's graph at the end of a step: number of nodes, and when the first and the last were made."""

    nodes: int
    first: int
    last: int


class KeptGraphs:
    """Counts nodes that running functions' variables keep; `look` is called at the end of each of two steps."""

    def __init__(self) -> None:
        self._before: dict[_Variable, _Graph] = {}
        self._found: dict[_Variable, int] = {}

    def look(self, running: list[tuple[CodeType, dict[str, Any]]]) -> None:
        """Compare the local variables of running functions with those at the end of the step before."""
        graphs: dict[_Variable, _Graph] = {}
        for code, names in running:
            for name, value in itertools.islice(_variables(names), _MOST_NAMES):
                with guard.attempt():  # a variable may be anything
                    graph = _graph(value)
                    if graph is not None:
                        graphs[code, name] = graph
        for key, graph in graphs.items():
            before = self._before.get(key)
            if before is not None and graph.nodes > before.nodes and graph.first <= before.last < graph.last:
                self._found[key] = graph.nodes - before.nodes
        self._before = graphs

    def facts(self) -> tuple[KeptGraphFacts, ...]:
        return tuple(
            KeptGraphFacts(
                file=code.co_filename,
                function=code.co_name,
                line=0 if code.co_name == "<module>" else code.co_firstlineno,
                name=name,
                nodes=nodes,
            )
            for (code, name), nodes in self._found.items()
        )


def _variables(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables of a function, and attributes of the object that it belongs to."""
    yield from names.items()
    own: dict[str, Any] = {}
    with guard.attempt():  # an object without attributes
        own = dict(object.__getattribute__(names.get("self"), "__dict__"))
    for name, value in own.items():
        yield f"self.{name}", value


def _graph(value: Any) -> _Graph | None:
    """The graph of a tensor, or of the tensors in a list or dictionary; None without one, or if it is too large."""
    roots = [root for root in (_node(each) for each in _items(value)) if root is not None]
    seen, waiting = set(roots), deque(roots)
    while waiting and len(seen) <= _MOST_NODES:
        new = {each for each, _ in waiting.popleft().next_functions if each is not None} - seen
        seen |= new
        waiting.extend(new)
    made = [node._sequence_nr() for node in seen if not hasattr(node, "variable")]
    return _Graph(len(made), min(made), max(made)) if made and not waiting else None


def _items(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        for each in itertools.islice(value.values(), _MOST_ITEMS):
            yield from _items(each) if type(each) is not dict else ()
    elif type(value) in (list, tuple, deque):
        yield from itertools.islice(value, _MOST_ITEMS)
    else:
        yield value


def _node(value: Any) -> Any:
    """The node that made a tensor; None for a leaf and for anything else."""
    return value.grad_fn if is_plain(value) else None


_KINDS: Final = (
    ("optimizer", "torch.optim.optimizer", "Optimizer"),
    ("loader", "torch.utils.data.dataloader", "DataLoader"),
    ("dataset", "torch.utils.data.dataset", "Dataset"),
    ("module", "torch.nn.modules.module", "Module"),
    ("pool", "multiprocessing.pool", "Pool"),
    ("pool", "concurrent.futures._base", "Executor"),
)
_CONTAINERS: Final = "torch.nn.modules.container"
_COMPILER: Final = ("torch", "compile")
_MOST_MADE: Final = 50
_MOST_BEGUN: Final = 1000
_Place = tuple[str, str, str, int, str]


class MadeInSteps:
    """Counts what is made in the steps that are looked at."""

    def __init__(self) -> None:
        self._steps: list[Counter[_Place]] = [Counter()]
        self._ns: Counter[_Place] = Counter()
        self._started: dict[int, int] = {}
        self._making: list[tuple[int, str]] = []  # constructors that run, and what they make

    def called(self, frame: FrameType) -> None:
        """Time a call that begins, if it may be a constructor or the compiler."""
        name = frame.f_code.co_name
        if name not in ("__init__", "compile") or len(self._started) >= _MOST_BEGUN:
            return
        self._started[id(frame)] = time.perf_counter_ns()
        kind = _kind_of(_first_argument(frame)) if name == "__init__" else None
        if kind is not None:
            self._making.append((id(frame), kind))

    def returned(self, frame: FrameType) -> None:
        """Count a call that ends, if it is a constructor or the compiler that the user's code called."""
        started = self._started.pop(id(frame), None)
        if started is None:
            return
        ns = time.perf_counter_ns() - started
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
            if not self._making and not _is_part_of_a_container(caller):
                self._count(kind, type(_first_argument(frame)).__name__, caller, ns)

    def _count(self, kind: str, name: str, caller: FrameType | None, ns: int) -> None:
        code, line = line_of(caller)
        if code is not None and line is not None:
            place = kind, name, code.co_filename, line, code.co_name
            self._steps[-1][place] += 1
            self._ns[place] += ns

    def border(self) -> None:
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
            for place in always[:_MOST_MADE]
        )


def _is_part_of_a_container(caller: FrameType | None) -> bool:
    """Whether a container of modules makes another one of some of them: nothing is made anew."""
    return (
        caller is not None
        and caller.f_code.co_name == "__getitem__"
        and caller.f_globals.get("__name__") == _CONTAINERS
    )


def _kind_of(made: Any) -> str | None:
    classes = type(made).__mro__
    for kind, module, name in _KINDS:
        wanted = getattr(sys.modules.get(module), name, None)
        if wanted is not None and any(each is wanted for each in classes):
            return kind
    return None


def _first_argument(frame: FrameType) -> Any:
    """The object whose method a frame runs, usually called self."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


_SKIPPED: Final = 2
"""First steps, which take longer than others."""
_MOST_STEPS: Final = 1000


class EvaluationWatch:
    """Notes for each step how long it took and whether a module was switched to evaluation mode."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._restore: Callable[[], None] | None = None
        self._evaluates = False
        self._started_ns = 0
        self._place = ("", 0, "")
        self._steps: list[tuple[int, bool]] = []  # duration (0 if recorded), evaluates

    def start(self) -> None:
        """Begin with the step that begins now; modules must be imported."""
        kind: Any = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
        self.stop()
        if kind is not None:
            self._steps, self._evaluates, self._started_ns = [], False, self._clock_ns()
            ours = guard.around(kind.train, before=self.switched, unless=compiling())
            self._restore = guard.put(kind, "train", ours)

    def stop(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    @guard.entry
    def switched(self, module: Any, mode: bool = True) -> None:
        if not mode and attributes(module).get("training"):
            self._evaluates = True
            code, line = line_of(sys._getframe())
            if code is not None and line is not None:
                self._place = (code.co_filename, line, code.co_name)

    def border(self, *, recorded: bool) -> None:
        if self._restore is None:
            return
        now_ns = self._clock_ns()
        if len(self._steps) < _MOST_STEPS:
            self._steps.append((0 if recorded else now_ns - self._started_ns, self._evaluates))
        self._evaluates, self._started_ns = False, now_ns

    def facts(self) -> EvaluationFacts | None:
        """None if no step evaluated."""
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
    return _watch
