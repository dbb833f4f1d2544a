"""The user's own lines: a loss computed position by position, computed at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, Final

from stepscope.capture.applying.code_swaps import NotSwapped, rewrites_in, swap
from stepscope.capture.applying.flags import Flag
from stepscope.capture.applying.patching import Applying, is_users_file
from stepscope.remedies.rewrites import Rewrite

_BATCHED: Final = "batched-loss"
_DIFF: Final = "stepscope diagnose --diff shows the change"
FLAGS: Final = (
    Flag(
        _BATCHED,
        "computes a loss that a loop sums up position by position for all positions at once",
        "no loop over positions that only adds up their cross entropy was seen",
        "From the second call on of the function that has the loop: one that is called once, or a loop outside of any "
        "function, keeps its code. What is recognised stands on the page of rewrites.",
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
        self._not_users = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
        self._compiling = getattr(torch.compiler, "is_compiling", lambda: False)
        self._judged: dict[int, CodeType] = {}
        """By identity; holding them keeps the identities theirs."""
        self._waiting: dict[int, str] = {}
        """New code, by identity -> what it will have done when it runs."""
        self._new: list[CodeType] = []

    def called(self, original: Any, *positional: Any, **named: Any) -> Any:
        """A loss of the program: what calls it is looked at when it comes for the first time."""
        if not self._compiling():
            frame = self._caller()
            if frame is not None and id(frame.f_code) not in self._judged:
                with self._applying.guarded(_BATCHED):
                    self._judge(frame)
        return original(*positional, **named)

    def end(self) -> None:
        """Say what was never called again."""
        for sentence in self._waiting.values():
            self._applying.could_not(_BATCHED, f"{sentence} was not called again; {_DIFF}")

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
            self._applying.did(_BATCHED, f"{self._waiting.pop(id(code))} computes its loss for all positions at once")
            return
        line = frame.f_lineno
        while code.co_name in ("<listcomp>", "<genexpr>") and frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
        file = code.co_filename
        if not is_users_file(file):
            return
        rewrite = next((each for each in rewrites_in(file, _BATCHED) if each.line <= line <= each.last_line), None)
        if rewrite is None:
            return
        self._change(frame, rewrite)

    def _change(self, frame: FrameType, rewrite: Rewrite) -> None:
        code = frame.f_code
        place = f"{os.path.basename(code.co_filename)}:{rewrite.line}"
        if code.co_name == "<module>":
            self._applying.could_not(_BATCHED, f"the loop at {place} stands outside of any function; {_DIFF}")
            return
        name = f"{rewrite.function} ({place})"
        if not _is_right(rewrite, frame):
            what = " and ".join(dict.fromkeys(each.expression for each in rewrite.expected))
            self._applying.could_not(_BATCHED, f"{name}: {what} are not what the new code needs; see its assumptions")
            return
        others = [each for each in rewrites_in(code.co_filename, _BATCHED) if each.function == rewrite.function]
        try:
            new = swap(code, [each for each in others if each is rewrite or _is_right(each, frame)])
        except NotSwapped as error:
            self._applying.could_not(_BATCHED, f"{name}: {error}; {_DIFF}")
            return
        self._new.append(new)
        self._waiting[id(new)] = name


def _is_right(rewrite: Rewrite, frame: FrameType) -> bool:
    """Whether what a rewrite takes for granted holds now: logits, and targets that are class numbers of them."""
    import torch

    try:
        # The user's own expressions: names, attributes of them and items by a literal.
        values = [eval(each.expression, frame.f_globals, frame.f_locals) for each in rewrite.expected]
    except Exception:
        return False
    if len(values) != 2 or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    logits, targets = values
    fitting = all(value.dim() in each.dimensions for value, each in zip(values, rewrite.expected, strict=True))
    return fitting and logits.dim() == targets.dim() + 1 and not targets.is_floating_point()
