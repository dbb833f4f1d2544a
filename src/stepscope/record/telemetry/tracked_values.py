"""Values that a program hands to W&B or TensorBoard, kept as if it had logged them with `stepscope.log` as well.

`stepscope sweep` reads its metric there. The program's own call is made first and unchanged; what cannot be kept is
left out without a word, for it is the program's tracker that the values are for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepscope import guard

TRACKERS: Final[dict[str, tuple[str, str]]] = {
    "wandb.sdk.wandb_run": ("Run", "log"),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "tensorboardX.writer": ("SummaryWriter", "add_scalar"),
}
"""Module, and the class and method of it that values are handed to."""
_DEEPEST: Final = 8


def keep_values(module: str) -> None:
    """Have the values kept that are handed to that module, which was imported just now; does nothing for others."""
    if module not in TRACKERS:
        return
    kind, method = TRACKERS[module]
    owner = getattr(sys.modules.get(module), kind, None)
    original = vars(owner).get(method) if owner is not None else None
    if not callable(original):
        return
    setattr(owner, method, guard.around(original, after=functools.partial(_log, method)))


@guard.entry
def _log(method: str, _: None, answer: Any, owner: Any, /, *positional: Any, **keywords: Any) -> None:
    from stepscope.record.telemetry.log import log

    if method == "log":
        data, step = _arguments(("data", "step"), positional, keywords)
        values = dict(_numbers(data, "", 0))
    else:
        tag, value, step = _arguments(("tag", "scalar_value", "global_step"), positional, keywords)
        values = {str(tag): value}
    if values:
        with guard.attempt():  # what is no value of telemetry is the tracker's alone
            log(values, step if type(step) is int else None)


def _arguments(names: tuple[str, ...], positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
    given = dict(zip(names, positional, strict=False))
    return [given.get(name, keywords.get(name)) for name in names]


def _numbers(data: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors by name; those of mappings inside have dots in their names, as W&B shows them."""
    if not isinstance(data, Mapping) or depth > _DEEPEST:
        return
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.", depth + 1)
        elif not isinstance(value, bool) and (isinstance(value, (int, float)) or hasattr(value, "item")):
            yield f"{prefix}{name}", value
