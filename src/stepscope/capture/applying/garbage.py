"""When Python's garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

from stepscope.capture.applying.flags import Flag
from stepscope.capture.applying.module_calls import compiling
from stepscope.capture.applying.patching import Applying
from stepscope.capture.hooks import Marker

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

    garbage = collect_garbage_at_steps(_EVERY, freeze=not applying.is_recorded)
    marker = Marker()
    is_compiling = compiling()
    is_on = False

    def stepped(optimizer: Any, positional: Any, named: Any) -> None:
        nonlocal is_on
        if is_compiling() or not marker.hit(id(optimizer)):
            return
        if is_on:
            garbage.step()
        elif not gc.isenabled():
            applying.could_not("garbage-at-steps", "the program has turned the collector off itself")
        else:
            is_on = True
            applying.did("garbage-at-steps", f"garbage is collected after every {_EVERY} steps, and not within them")
            garbage.start()

    applying.on_remove(register_optimizer_step_post_hook(stepped).remove)
    applying.on_remove(garbage.close)
