"""Copies from the host to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stepscope.record.apply.flags import Flag
from stepscope.record.apply.patching import Applying, users_place

FLAGS: Final = (
    Flag(
        "non-blocking",
        "copies from pinned memory to a device without waiting for the copy",
        "nothing was copied from pinned memory to a device",
        "Only copies from pinned memory (pin-memory makes it), by Tensor.to and Tensor.cuda. The program must not "
        "write into the pinned tensor before the copy has ended.",
    ),
)


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have Tensor.to and Tensor.cuda not wait, where the source is pinned."""
    import torch

    dtype: Any = torch.dtype

    def changed(tensor: Any, target: Any, named: dict[str, Any]) -> bool:
        """Whether the copy is one to a device, from pinned memory, that waits."""
        if tensor.device.type != "cpu" or named.get("non_blocking") or isinstance(target, dtype):
            return False
        if isinstance(target, torch.Tensor):
            target = target.device
        kind = torch.device(target).type if isinstance(target, (str, int, torch.device)) else "cpu"
        return kind != "cpu" and bool(tensor.is_pinned())

    def to(original: Any, tensor: Any, *positional: Any, **named: Any) -> Any:
        target = positional[0] if positional else named.get("device", named.get("other"))
        with applying.guarded("non-blocking"):
            rest = positional[1:]
            if rest and isinstance(rest[0], dtype):  # to(device, dtype, non_blocking, copy)
                rest = rest[1:]
            if not (rest and rest[0]) and changed(tensor, target, named):
                if rest:  # non_blocking=False by position
                    place = len(positional) - len(rest)
                    positional = (*positional[:place], True, *rest[1:])
                else:
                    named["non_blocking"] = True
                _say(applying)
        return original(tensor, *positional, **named)

    def cuda(original: Any, tensor: Any, *positional: Any, **named: Any) -> Any:
        with applying.guarded("non-blocking"):
            if len(positional) < 2 and changed(tensor, "cuda", named):
                named["non_blocking"] = True
                _say(applying)
        return original(tensor, *positional, **named)

    applying.wrap(torch.Tensor, "to", to)
    applying.wrap(torch.Tensor, "cuda", cuda)


def _say(applying: Applying) -> None:
    if not applying.said_about("non-blocking"):
        applying.did("non-blocking", f"copies such as that at {users_place() or 'an unknown place'} are not waited for")
