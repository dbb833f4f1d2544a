"""Garbage collected between steps, and not within them.

with collect_garbage_at_steps(every=50) as garbage:
    for batch in loader:
        ...
        garbage.step()
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any, Final

_OLDEST: Final = 2


def collect_garbage_at_steps(every: int = 50, *, generation: int = _OLDEST, freeze: bool = True) -> GarbageAtSteps:
    """Keep Python's collector from running within steps; collect at every so many borders of steps instead.

    It begins with the `with` statement, with `start()`, or with the first `step()`: then everything is collected, what
    is alive (modules, model, optimizer) is frozen, so that later collections need not look at it, and the automatic
    collector is turned off. Begin after the model is made. At the end everything is as it was before. Worker processes
    that are forked meanwhile keep their automatic collector.

    Memory that only cycles hold is freed at the next collection: a model that makes cycles with large tensors in every
    step needs a small `every`.

    Args:
        every: steps between collections, from 1 on.
        generation: the oldest generation that is collected: 0, 1 or 2 (all).
        freeze: False leaves what is alive to every collection. Nothing is frozen either where the program has frozen
            objects itself, because these could not be told apart at the end.

    Raises:
        ValueError: an argument cannot be used.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every is {every!r}; it takes a whole number of steps from 1 on")
    if generation not in (0, 1, 2):
        raise ValueError(f"generation is {generation!r}; it takes 0, 1 or 2")
    return GarbageAtSteps(every, generation, freeze)


class GarbageAtSteps:
    """What `collect_garbage_at_steps` returns.

    Attributes:
        collections: how often it has collected at a step's border.
        collected_ns: how long that took, all together.
    """

    def __init__(self, every: int, generation: int, freeze: bool) -> None:
        self._every, self._generation, self._freeze = every, generation, freeze
        self._steps = 0
        self._started = self._was_enabled = self._has_frozen = False
        self.collections = self.collected_ns = 0

    def start(self) -> None:
        """Collect, freeze, and turn the automatic collector off; nothing where that has been done."""
        if self._started:
            return
        gc.collect()
        self._was_enabled = gc.isenabled()
        self._has_frozen = self._freeze and gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()
        gc.disable()
        self._started = True
        _in_workers_too(self)

    def step(self) -> int:
        """Say that a step has ended; collects when it is time. Returns how many objects it freed."""
        self.start()
        self._steps += 1
        if self._steps % self._every:
            return 0
        begin = time.perf_counter_ns()
        freed = gc.collect(self._generation)
        self.collected_ns += time.perf_counter_ns() - begin
        self.collections += 1
        return freed

    def close(self) -> None:
        """Put the collector back as it was; can be started again."""
        if not self._started:
            return
        self._started = False
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> GarbageAtSteps:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _in_child(self) -> None:
        """In a process that was forked meanwhile: nobody calls `step` there."""
        if self._started and self._was_enabled:
            gc.enable()


_ACTIVE: Final[weakref.WeakSet[GarbageAtSteps]] = weakref.WeakSet()
_REGISTERED: Final[list[bool]] = []


def _in_workers_too(garbage: GarbageAtSteps) -> None:
    """Have forked processes collect by themselves; what is registered for them cannot be taken back."""
    _ACTIVE.add(garbage)
    if hasattr(os, "register_at_fork") and not _REGISTERED:
        _REGISTERED.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for garbage in list(_ACTIVE):
        garbage._in_child()
