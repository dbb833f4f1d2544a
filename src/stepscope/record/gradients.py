"""Find gradients of a step that nothing uses, from its backward passes, optimizer steps and cleared gradients.

During a look, the autograd graph of each call of `backward` is read: its nodes in the order of their creation, and the
parameters that get a gradient. Only numbers are kept.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, Final

from stepscope import guard
from stepscope.record.program_objects import (
    attributes,
    is_module,
    is_plain,
    modules_in,
    names_in_roots,
    parameters_in,
    parameters_of,
)
from stepscope.trace.program_facts import BackwardFacts

_MOST_NODES: Final = 20_000
"""Graphs with more nodes are not read."""
_MOST_PASSES: Final = 16
_MOST_MODULES: Final = 200
_MOST_RANGES: Final = 500
_OF_PRODUCTS: Final = ("Addmm", "Mm", "Linear", "Convolution", "Baddbmm")
"""Prefixes of the names of nodes that spend half of their time on the gradient of a weight."""


@dataclass
class _Pass:
    """One backward pass.

    Attributes:
        time: its place among the look's events.
        edges: for each node, made first to last, the nodes that it passes gradients to; leaves are negative.
        leaves: ids of the parameters that get a gradient, 0 for other tensors; leaf -1 is the first.
        has_product: for each node, whether it belongs to a product.
    """

    time: int
    edges: list[list[int]]
    leaves: list[int]
    has_product: list[bool]


@dataclass
class _Use:
    """When an optimizer used a parameter's gradient, and when gradients were cleared, as places among the events."""

    steps: list[int] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)


class GradientLook:
    """Observes calls and returns of the functions in `begins` and `ends`; `facts` returns the unused gradients.

    Attributes:
        begins, ends: by code object, what to do with the frame of a function that is called or returns.
    """

    def __init__(self) -> None:
        self.begins: dict[CodeType, Callable[[FrameType], None]] = {}
        self.ends: dict[CodeType, Callable[[FrameType], None]] = {}
        self._time = 0
        self._depth = 0
        self._is_first = True
        self._passes: list[_Pass] = []
        self._uses: dict[int, _Use] = {}
        self._parameters: dict[int, tuple[weakref.ref[Any], int]] = {}

    def start(self) -> None:
        optim: Any = sys.modules.get("torch.optim.optimizer")
        if optim is None:
            return
        import torch

        backward: Any = unwrap(torch.autograd.backward)
        self.begins[backward.__code__] = self._begin
        self.ends[backward.__code__] = self._end
        for clearing in (unwrap(optim.Optimizer.zero_grad), unwrap(torch.nn.Module.zero_grad)):
            self.ends[clearing.__code__] = self._clear
        for code in optim.Optimizer.profile_hook_step.__code__.co_consts:  # the wrapper of each optimizer's step
            if isinstance(code, CodeType):
                self.ends[code] = self._step

    def border(self) -> None:
        """End a step; later passes are not read, but later events decide about those that were."""
        self._is_first = False

    def _begin(self, frame: FrameType) -> None:
        self._depth += 1
        self._time += 1
        tensors, inputs = frame.f_locals["tensors"], frame.f_locals.get("inputs")
        if self._depth == 1 and self._is_first and inputs is None and len(self._passes) < _MOST_PASSES:
            roots = tensors if type(tensors) in (list, tuple) else [tensors]  # an iterator is not consumed
            roots = [each for each in roots if is_plain(each)]
            with guard.attempt():  # the graph may have nodes of any kind
                self._read([root.grad_fn for root in roots if root.grad_fn is not None])

    def _end(self, _: FrameType) -> None:
        self._depth -= 1

    def _clear(self, frame: FrameType) -> None:
        self._time += 1
        owner: Any = frame.f_locals.get("self")
        with guard.attempt():
            for each in _parameters_of_owner(owner):
                self._uses.setdefault(id(each), _Use()).cleared.append(self._time)

    def _step(self, frame: FrameType) -> None:
        self._time += 1
        with guard.attempt():
            for each in parameters_of(frame.f_locals.get("self")):
                self._uses.setdefault(id(each), _Use()).steps.append(self._time)

    def _read(self, roots: list[Any]) -> None:
        nodes, leaves = _reached(roots)
        if not nodes or not hasattr(nodes[0], "_sequence_nr"):
            return
        nodes.sort(key=lambda node: node._sequence_nr())
        number = {node: place for place, node in enumerate(nodes)}
        number.update({leaf: -1 - place for place, leaf in enumerate(leaves)})
        edges = [[number[each] for each, _ in node.next_functions if each is not None] for node in nodes]
        has_product = [node.name().startswith(_OF_PRODUCTS) for node in nodes]
        self._passes.append(_Pass(self._time, edges, [self._kept_id(leaf.variable) for leaf in leaves], has_product))

    def _kept_id(self, leaf: Any) -> int:
        """The id of a leaf if it is a parameter, which is remembered; else 0."""
        if type(leaf).__name__ not in ("Parameter", "UninitializedParameter"):
            return 0
        self._parameters[id(leaf)] = weakref.ref(leaf), leaf._version
        return id(leaf)

    def facts(self, roots: Sequence[Any]) -> tuple[BackwardFacts, ...]:
        """The first step's passes that compute unused gradients.

        Args:
            roots: the outermost modules that were called, which name the parameters' modules.
        """
        if not any(each.steps for each in self._uses.values()):
            return ()
        held, paths = _held_by_optimizers(), _paths(roots)
        found, alike = [], dict[int, int]()
        for each in self._passes:
            order = alike[len(each.edges)] = alike.get(len(each.edges), -1) + 1
            needless = {
                leaf: why for leaf in dict.fromkeys(each.leaves) if (why := self._why_needless(leaf, each.time, held))
            }
            if needless and set(each.leaves) - set(needless):
                found.append(self._facts_of(each, order, needless, paths))
        return tuple(facts for facts in found if facts.needless or facts.halves)

    def _why_needless(self, leaf: int, time: int, held: set[int]) -> str:
        """Why nothing uses a parameter's gradient from a pass at this time; "" if something may."""
        uses = self._uses.get(leaf, _Use())
        step = next((each for each in uses.steps if each > time), None)
        cleared = next((each for each in uses.cleared if each > time), None)
        if uses.steps:
            return "cleared" if cleared is not None and (step is None or cleared < step) else ""
        if not leaf or leaf in held:
            return ""
        parameter, version = self._parameters[leaf][0](), self._parameters[leaf][1]
        return "" if parameter is None or self._is_changed_by_hand(parameter, version) else "untrained"

    def _is_changed_by_hand(self, parameter: Any, version: int) -> bool:
        """Whether a parameter in no optimizer has changed, and not by following a trained one of its shape."""
        trained = (
            self._parameters[one][0]() for one, uses in self._uses.items() if uses.steps and one in self._parameters
        )
        return parameter._version != version and all(each is None or each.shape != parameter.shape for each in trained)

    def _facts_of(self, seen: _Pass, order: int, needless: dict[int, str], paths: dict[int, str]) -> BackwardFacts:
        used = _leading_to(seen, {leaf for leaf in seen.leaves if leaf not in needless})
        untrained = {leaf for leaf, why in needless.items() if why == "untrained"}
        wasted = _leading_to(seen, untrained)
        halves = [
            place
            for place, edges in enumerate(seen.edges)
            if used[place] and seen.has_product[place] and any(_is_wasted(each, seen, used, wasted) for each in edges)
        ]
        gone = [place for place in range(len(seen.edges)) if not used[place]]
        tensors = [one for leaf in needless if (one := self._parameters[leaf][0]()) is not None]
        return BackwardFacts(
            nodes=len(seen.edges),
            order=order,
            needless=_ranges(gone),
            halves=_ranges(halves),
            modules=tuple(dict.fromkeys(paths[leaf] for leaf in needless if leaf in paths))[:_MOST_MODULES],
            parameters=sum(each.numel() for each in tensors),
            bytes=sum(each.numel() * each.element_size() for each in tensors),
            is_cleared=not untrained,
        )


def _is_wasted(number: int, seen: _Pass, used: list[bool], wasted: list[bool]) -> bool:
    """Whether a node or leaf leads only to untrained parameters."""
    place = number if number >= 0 else len(seen.edges) - 1 - number
    return wasted[place] and not used[place]


def _reached(roots: list[Any]) -> tuple[list[Any], list[Any]]:
    """The nodes that gradients of these roots reach, and the leaves that keep one; empty if the graph is too large."""
    seen = dict.fromkeys(roots)
    waiting = list(seen)
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                waiting.append(following)
        if len(seen) > _MOST_NODES:
            return [], []
    leaves = [node for node in seen if hasattr(node, "variable")]
    return [node for node in seen if not hasattr(node, "variable")], leaves


def _leading_to(seen: _Pass, wanted: set[int]) -> list[bool]:
    """For each node, and after them for each leaf, whether its gradient reaches one of these parameters."""
    count = len(seen.edges)
    result = [False] * count + [leaf in wanted for leaf in seen.leaves]
    sources: list[list[int]] = [[] for _ in result]
    for node, edges in enumerate(seen.edges):
        for each in edges:
            sources[each if each >= 0 else count - 1 - each].append(node)
    waiting = [place for place, is_wanted in enumerate(result) if is_wanted]
    while waiting:
        for node in sources[waiting.pop()]:
            if not result[node]:
                result[node] = True
                waiting.append(node)
    return result


def _ranges(places: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """First and last of each run of consecutive numbers; none if there are too many runs to keep."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place - 1:
            found[-1] = found[-1][0], place
        else:
            found.append((place, place))
    return tuple(found) if len(found) <= _MOST_RANGES else ()


def _parameters_of_owner(owner: Any) -> Iterable[Any]:
    """The parameters of an optimizer or module."""
    return parameters_in(owner) if is_module(owner) else parameters_of(owner)


def _held_by_optimizers() -> set[int]:
    """Ids of the parameters in optimizers that have made a step."""
    optimizer: Any = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    living = [each for each in gc.get_objects() if optimizer is not None and issubclass(type(each), optimizer)]
    own = [(each, attributes(each)) for each in living]
    using = [each for each, held in own if held.get("state") or held.get("defaults", {}).get("momentum") == 0]
    return {id(one) for each in using for one in parameters_of(each)}


def _paths(roots: Sequence[Any]) -> dict[int, str]:
    """The path of the module that owns each parameter, by id."""
    names = names_in_roots(roots)
    return {
        id(one): names[id(module)]
        for root in roots
        for number, (_, module) in modules_in(root).items()
        for one in attributes(module).get("_parameters", {}).values()
        if one is not None and number in names
    }
