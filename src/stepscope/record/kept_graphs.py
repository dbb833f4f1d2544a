"""Look at which variables keep the autograd graphs of steps that have ended, such as a sum of losses."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from stepscope import guard
from stepscope.record.program_objects import is_plain
from stepscope.trace.program_facts import KeptGraphFacts

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
