"""When Python's garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from stepscope import guard
from stepscope.record.apply.flags import Flag
from stepscope.record.apply.patching import Applying, compiling
from stepscope.record.hooks import Marker

FLAGS: Final = (
    Flag(
        "garbage-at-steps",
        "collects Python's garbage after every 50 steps, and not within them",
        "no optimizer stepped",
        "Not where the program has turned the collector off itself. Memory that only cycles hold is freed later. "
        "Under `stepscope bench` what is alive is also frozen, which shortens collections and would hide it from "
        "recordings.",
    ),
)
_EVERY: Final = 50
"""What `collect_garbage_at_steps` takes where nothing is said."""


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Begin with the first step of an optimizer; of several optimizers, the one around the others counts."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from stepscope.remedies import collect_garbage_at_steps

    garbage = _Garbage(applying, collect_garbage_at_steps(_EVERY, freeze=not applying.is_recorded))
    is_compiling = compiling()

    def stepped(optimizer: Any, positional: Any, named: Any) -> None:
        if not is_compiling():
            garbage.stepped(optimizer)

    applying.on_remove(partial(guard.unhook, register_optimizer_step_post_hook(stepped)))
    applying.on_remove(garbage.collection.close)


class _Garbage:
    """Has garbage collected at the steps of the optimizer that marks them."""

    def __init__(self, applying: Applying, collection: Any) -> None:
        self.collection = collection
        self._applying = applying
        self._marker = Marker()
        self._is_on = False

    @guard.entry
    def stepped(self, optimizer: Any) -> None:
        flag = "garbage-at-steps"
        if not self._marker.hit(id(optimizer)):
            return
        if self._is_on:
            self.collection.step()
        elif not gc.isenabled():
            self._applying.could_not(flag, "the program has turned the collector off itself")
        else:
            self._is_on = True
            self._applying.did(flag, f"garbage is collected after every {_EVERY} steps, and not within them")
            self.collection.start()
