"""Doing something every n steps, or every few seconds: prints, progress bars, checks.

log_now = every(50)
for step, batch in enumerate(loader):
    ...
    if log_now(step):
        print(step, loss.item())

bar = every(50)(tqdm(loader))           # a bar that is drawn, and whose postfix is read, every 50 steps
show = every(seconds=10)(print)         # a function that is called at most every 10 seconds
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch


def every(steps: int | None = None, *, seconds: float | None = None) -> Every:
    """Something that says when it is time: every so many steps, or every so many seconds.

    Called with a step it says whether this is the first one, or another multiple of `steps` has been reached since;
    asked twice about the same step it says the same. Called with nothing it counts the calls: the first, and each
    `steps`-th after it. Called with a function it returns one that calls it only when it is time; called with a
    progress bar (something with `update`), one that draws only when it is time.

    Args:
        steps: from 1 on.
        seconds: above 0; instead of steps.

    Raises:
        ValueError: both, neither, or a number that is too small.
    """
    if (steps is None) == (seconds is None):
        raise ValueError("every takes a number of steps or of seconds: every(50) or every(seconds=10)")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"every({steps!r}) takes a whole number of steps from 1 on")
    if seconds is not None and not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"every(seconds={seconds!r}) takes a number above 0")
    return Every(steps, seconds)


class Every:
    """What `every` returns; each object keeps its own count."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self._calls = 0
        self._last_step: int | None = None
        self._last_answer = False
        self._last_turn: float | None = None

    @overload
    def __call__(self, what: int | None = None) -> bool: ...
    @overload
    def __call__(self, what: Any) -> Any: ...
    def __call__(self, what: Any = None) -> Any:
        """Whether it is time at this step, or at this call; or `what` done only when it is time."""
        if what is None:
            self._calls += 1
            return self._is_time(self._calls - 1)
        if isinstance(what, int) and not isinstance(what, bool):
            if what != self._last_step:
                self._last_step, self._last_answer = what, self._is_time(what)
            return self._last_answer
        if callable(getattr(what, "update", None)) and not isinstance(what, type):
            return SparseBar(what, self._again(), self._again())
        if callable(what):
            return _sparse(what, self._again())
        raise TypeError(f"every takes a step, a function or a progress bar, not {type(what).__name__}")

    def _is_time(self, step: int) -> bool:
        if self._seconds is not None:
            now = time.monotonic()
            due = self._last_turn is None or now - self._last_turn >= self._seconds
        else:
            now = step // (self._steps or 1)
            due = now != self._last_turn  # smaller, too: a new epoch
        if due:
            self._last_turn = now
        return due

    def _again(self) -> Every:
        return Every(self._steps, self._seconds)


def _sparse(function: Callable[..., Any], is_time: Every) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named) if is_time() else None

    return call


class SparseBar:
    """A progress bar that is drawn every so often: it passes everything on, but collects `update` and `set_postfix`.

    Tensors given to `set_postfix` are read only when the bar is drawn, so that the steps between do not wait for the
    device. `close`, the end of the iteration and the end of a `with` statement draw what is left.
    """

    def __init__(self, bar: Any, is_time: Every, is_time_for_postfix: Every) -> None:
        self._bar, self._is_time, self._is_time_for_postfix = bar, is_time, is_time_for_postfix
        self._advance: float = 0
        self._postfix: tuple[dict[str, Any], bool] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_bar":
            raise AttributeError(name)
        return getattr(self._bar, name)

    def __len__(self) -> int:
        return len(self._bar)

    def __iter__(self) -> Iterator[Any]:
        items = getattr(self._bar, "iterable", None)
        try:
            if items is None:
                yield from self._bar
            else:
                # tqdm's own iteration would draw when it thinks it is time.
                for item in items:
                    yield item
                    self.update()
        finally:
            self._draw()
            if items is not None:
                self._bar.close()  # as its own iteration does

    def __enter__(self) -> SparseBar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        self._draw()
        return self._bar.__exit__(*error)

    def update(self, n: float = 1) -> None:
        """Advance the bar, when it is time by all that was collected."""
        self._advance += n
        if self._is_time():
            self._advance_bar()

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **values: Any) -> None:
        """Show these values, when it is time; the last ones before it are shown."""
        self._postfix = {**(ordered_dict or {}), **values}, refresh
        if self._is_time_for_postfix():
            self._show_postfix()

    def close(self) -> None:
        """Draw what is left, and close the bar."""
        self._draw()
        self._bar.close()

    def _draw(self) -> None:
        self._show_postfix()
        self._advance_bar()

    def _advance_bar(self) -> None:
        advance, self._advance = self._advance, 0
        if advance:
            self._bar.update(advance)

    def _show_postfix(self) -> None:
        if self._postfix is not None:
            (values, refresh), self._postfix = self._postfix, None
            self._bar.set_postfix({name: _read(value) for name, value in values.items()}, refresh)


def _read(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
