"""The user's own lines: a loss computed position by position, computed at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, Final

from stepscope import guard
from stepscope.record.apply.code_swaps import Guard, NotSwapped, is_current, rewrites_in, swap
from stepscope.record.apply.flags import Flag
from stepscope.record.apply.patching import PACKAGE, Applying, in_a_line, is_users_file
from stepscope.remedies.rewrites import Criterion, Positions, Rewrite

_INNER = ("<listcomp>", "<genexpr>")


def function_frame(frame: FrameType) -> FrameType:
    """The frame of the function or module that a comprehension stands in; any other frame itself."""
    while frame.f_code.co_name in _INNER and frame.f_back is not None:
        frame = frame.f_back
    return frame


class ServedPositions:
    """The losses of one loop, computed anew whenever its tensors are others.

    Args:
        file: that the loop stands in.

    Attributes:
        loops: how often the loop was served from its first position to its last.
    """

    def __init__(self, rewrite: Rewrite, positions: Positions, file: str) -> None:
        self.rewrite = rewrite
        self.place = f"{os.path.basename(file)}:{rewrite.line}"
        self.loops = 0
        self._positions = positions
        self._prepare = compile(positions.statements, "<stepscope>", "exec")
        self._compute = compile(positions.losses, "<stepscope>", "eval")
        self._expected = [compile(each.expression, "<stepscope>", "eval") for each in rewrite.expected]
        self._losses: tuple[Any, ...] = ()
        self._of: tuple[Any, ...] = ()
        self._next = 0

    def loss(self, frame: FrameType) -> Any:
        """The loss that the call in this frame asks for; None where it has to be computed as it is."""
        around = function_frame(frame)
        place = frame.f_locals[self._positions.variable] - self._positions.start
        local = around.f_locals
        tensors = [eval(each, around.f_globals, local) for each in self._expected]
        of = tuple((id(each), getattr(each, "_version", 0)) for each in tensors)
        if place == 0:
            if not is_right(self.rewrite, tensors, self._criterion(around, local)):
                return None
            names = {**around.f_globals, **local}
            exec(self._prepare, names)
            losses = eval(self._compute, names)
            self._losses, self._of, self._next = losses.unbind(), (of, tensors), 0
        if not self._of or of != self._of[0] or place != self._next or place >= len(self._losses):
            self._forget()
            return None
        found = self._losses[place]
        self._next += 1
        if self._next == len(self._losses):
            self.loops += 1
            self._forget()
        return found

    def _criterion(self, frame: FrameType, local: Any) -> Any:
        criterion = self.rewrite.criterion
        return None if criterion is None else eval(criterion.expression, frame.f_globals, local)

    def _forget(self) -> None:
        """Let go of the tensors: a graph is not to live longer for this."""
        self._losses, self._of, self._next = (), (), 0


def is_right(rewrite: Rewrite, tensors: list[Any], criterion: Any) -> bool:
    """Whether what a rewrite takes for granted holds: logits, targets that are class numbers of them, the criterion."""
    import torch

    if rewrite.criterion is not None and not _is_as_taken(rewrite.criterion, criterion):
        return False

    if len(tensors) != 2 or not all(isinstance(value, torch.Tensor) for value in tensors):
        return False
    logits, targets = tensors
    fitting = all(value.dim() in each.dimensions for value, each in zip(tensors, rewrite.expected, strict=True))
    if not fitting or logits.dim() != targets.dim() + 1 or targets.is_floating_point():
        return False
    # Without a number of positions the loop goes through both, and ends with the shorter one.
    return rewrite.positions is not None or sorted(logits.shape[:-1]) == sorted(targets.shape)


def _is_as_taken(taken: Criterion, criterion: Any) -> bool:
    """Whether a criterion is torch's own, reduces as was taken, and has no setting that the rewrite leaves out."""
    import torch

    if type(criterion) is not getattr(torch.nn, taken.kind) or criterion.reduction != taken.reduction:
        return False
    defaults = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0}
    if criterion._forward_hooks or criterion._forward_pre_hooks or criterion._backward_hooks:
        return False
    values = {name: getattr(criterion, name, default) for name, default in defaults.items() if name not in taken.other}
    return values.get("weight") is None and all(values[name] == defaults[name] for name in values.keys() - {"weight"})


_BATCHED: Final = "batched-loss"
_DIFF: Final = "stepscope diagnose --diff shows the change"
FLAGS: Final = (
    Flag(
        _BATCHED,
        "computes a loss that a loop sums up position by position for all positions at once",
        "no loop over positions that only adds up their cross entropy was seen",
        "What is recognised stands on the page of rewrites. A function gets other code from its second call on; a loop "
        "that runs already, or stands outside of any function, is handed losses that were computed at once.",
    ),
)


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Watch who calls cross_entropy and nll_loss."""
    import torch.nn.functional

    batching = _Batching(applying)
    for name in ("cross_entropy", "nll_loss"):
        applying.wrap(torch.nn.functional, name, batching.called)
    applying.at_end(batching.end)


class _Batching:
    """Looks once at every code that calls a loss, and gives its function new code where that computes the same."""

    def __init__(self, applying: Applying) -> None:
        import torch

        self._applying = applying
        self._not_users = (
            os.path.dirname(torch.__file__) + os.sep,
            PACKAGE,
        )
        self._compiling = getattr(torch.compiler, "is_compiling", lambda: False)
        self._judged: dict[int, CodeType] = {}
        """By identity; holding them keeps the identities theirs."""
        self._guard = Guard(is_right)
        self._guard.install()
        self._new: list[CodeType] = []
        self._waiting: dict[int, tuple[str, int]] = {}
        """New code, by identity -> the function that has it from its next call on, and the code that it had."""
        self._served: dict[int, list[ServedPositions]] = {}
        """Calling code, by identity -> its loops that run already."""

    def called(self, original: Any, *positional: Any, **named: Any) -> Any:
        """A loss of the program: what calls it is looked at when it comes for the first time."""
        if self._compiling():
            return original(*positional, **named)
        frame = self._caller()
        if frame is not None and id(frame.f_code) not in self._judged:
            with self._applying.guarded(_BATCHED):
                self._judge(frame)
        loss = None
        if frame is not None and id(frame.f_code) in self._served:
            with self._applying.guarded(_BATCHED):
                loss = self._serve(frame)
        return original(*positional, **named) if loss is None else loss

    def end(self) -> None:
        """Say what was done, or not, in functions that were called only once."""
        for loops in self._served.values():
            for served in loops:
                if served.loops:
                    self._say_served(served)
        for name, before in self._waiting.values():
            if not any(served.loops for served in self._served.get(before, ())):
                self._applying.could_not(_BATCHED, f"{name} was not called again; {_DIFF}")

    def _caller(self) -> FrameType | None:
        """The first frame outside of torch and stepscope."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(self._not_users):
            frame = frame.f_back
        return frame

    def _judge(self, frame: FrameType) -> None:
        code = frame.f_code
        self._judged[id(code)] = code
        if id(code) in self._waiting:
            name, before = self._waiting.pop(id(code))
            self._served.pop(before, None)
            self._applying.did(_BATCHED, f"{name} computes its loss for all positions at once")
            return
        around, line = function_frame(frame), frame.f_lineno
        file = around.f_code.co_filename
        if not is_users_file(file):
            return
        rewrite = next((each for each in rewrites_in(file, _BATCHED) if each.line <= line <= each.last_line), None)
        if rewrite is not None:
            self._change(frame, around, rewrite)

    def _change(self, frame: FrameType, around: FrameType, rewrite: Rewrite) -> None:
        """Have the loops of the code that runs served, and its function given new code."""
        code = around.f_code
        place = f"{os.path.basename(code.co_filename)}:{rewrite.line}"
        name = f"{rewrite.function} ({place})" if rewrite.function else f"the loop at {place}"
        if not _is_right(rewrite, around):
            what = " and ".join(dict.fromkeys(each.expression for each in rewrite.expected))
            self._applying.could_not(_BATCHED, f"{name}: {what} are not what the new code needs; see its assumptions")
            return
        others = [each for each in rewrites_in(code.co_filename, _BATCHED) if each.function == rewrite.function]
        is_checked_anew = any(each.criterion is not None and each.criterion.is_argument for each in others)
        if code.co_name != "<module>" and not is_checked_anew:
            try:
                new = swap(code, [each for each in others if each is rewrite or _is_right(each, around)], self._guard)
                self._new.append(new)
                self._waiting[id(new)] = (name, id(frame.f_code))
            except NotSwapped as error:
                if rewrite.positions is None or not is_current(code):
                    self._applying.could_not(_BATCHED, f"{name}: {error}; {_DIFF}")
                    return
        elif not is_current(code):
            self._applying.could_not(_BATCHED, f"{name}: its file is not the one that runs; {_DIFF}")
            return
        self._served[id(frame.f_code)] = [
            ServedPositions(each, each.positions, code.co_filename) for each in others if each.positions is not None
        ]

    def _serve(self, frame: FrameType) -> Any:
        """The loss that is asked for, where it was computed with those of all positions."""
        for served in self._served[id(frame.f_code)]:
            if served.rewrite.line <= frame.f_lineno <= served.rewrite.last_line:
                with guard.attempt() as serving:
                    loss = served.loss(frame)
                if serving.error is not None:  # the loop then computes every loss itself
                    self._served.pop(id(frame.f_code))
                    self._applying.could_not(_BATCHED, in_a_line(serving.error))
                    return None
                if served.loops == 2 and loss is not None:  # in one call of its function, which may be the only one
                    self._say_served(served)
                return loss
        return None

    def _say_served(self, served: ServedPositions) -> None:
        self._applying.did(_BATCHED, f"the loop at {served.place} takes the losses of its positions from one call")


def _is_right(rewrite: Rewrite, frame: FrameType) -> bool:
    """Whether what a rewrite takes for granted holds in a frame now."""
    with guard.attempt():
        # The user's own expressions: names, attributes of them and items by a literal.
        values = [eval(each.expression, frame.f_globals, frame.f_locals) for each in rewrite.expected]
        criterion = rewrite.criterion
        called = None if criterion is None else eval(criterion.expression, frame.f_globals, frame.f_locals)
        return is_right(rewrite, values, called)
    return False
