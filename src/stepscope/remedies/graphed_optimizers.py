"""Optimizers whose step can be part of a CUDA graph: nothing of it is read or decided on the host.

By torch's documentation of CUDA graphs an optimizer with a `capturable` setting must have it set, which keeps its step
count on the device. A learning rate that is a Python number would be a constant of the graph, and a schedule without
effect: Adam and AdamW, and fused SGD, take it as a tensor, into which schedules write. What else an optimizer has as
Python numbers belongs to the graph's key, so that a change of it captures anew instead of being lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

_CUDA: Final = ("cuda",)


class GraphedOptimizers:
    """The optimizers that a captured function steps.

    Args:
        device_types: of the parameters whose optimizers are changed; others' states are left as they are.
    """

    def __init__(self, device_types: Sequence[str] = _CUDA) -> None:
        self._device_types = device_types
        self._optimizers: list[Optimizer] = []
        self._kept: list[tuple[Any, Any]] = []
        self._rates: list[tuple[dict[str, Any], Tensor]] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._optimizers)

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Make these ready for graphs, too."""
        self._optimizers += optimizers
        self.prepare()

    def prepare(self) -> None:
        """Put what a step reads on the device; anew after `load_state_dict`, which replaces it."""
        self._kept = [(each.state, each.param_groups) for each in self._optimizers]
        self._rates = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                device = _device(group, self._device_types)
                if device is None:
                    continue
                if "capturable" in group:
                    group["capturable"] = True
                    _move_counts(optimizer, group, device)
                if _takes_rates(optimizer, group):
                    rate = group["lr"]
                    kept = torch.tensor(float(rate), dtype=torch.float32, device=device)
                    group["lr"] = kept
                    self._rates.append((group, kept))

    def refresh(self) -> bool:
        """Take over learning rates that were set since; whether states were replaced, so that graphs are of no use."""
        if any(
            each.state is not state or each.param_groups is not groups
            for each, (state, groups) in zip(self._optimizers, self._kept, strict=True)
        ):
            self.prepare()
            return True
        for group, kept in self._rates:
            rate = group["lr"]
            if rate is not kept:
                if isinstance(rate, Tensor):
                    kept.copy_(rate, non_blocking=True)
                else:
                    kept.fill_(float(rate))
                group["lr"] = kept
        return False

    @property
    def key(self) -> Hashable:
        """What is a constant of the graph."""
        own = {id(kept) for _, kept in self._rates}
        return tuple(
            tuple(
                (name, _constant(value))
                for name, value in group.items()
                if name not in ("params", "initial_lr") and id(value) not in own
            )
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        )

    @property
    def settings(self) -> Hashable:
        """All of the groups' settings as they are now, for telling whether something changed them."""
        return self.key, tuple((id(group["lr"]), kept._version) for group, kept in self._rates)


def _device(group: dict[str, Any], types: Sequence[str]) -> torch.device | None:
    """Where the group's parameters are, if they are all on one such device."""
    devices = {each.device for each in group["params"]}
    found = devices.pop() if len(devices) == 1 else None
    return found if found is not None and found.type in types else None


def _takes_rates(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether its kernels read the learning rate from the device."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return bool(group.get("capturable"))
    return isinstance(optimizer, torch.optim.SGD) and bool(group.get("fused"))


def _move_counts(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
    """Step counts of the host to the device, as torch keeps them where capturable is set."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        count = state.get("step")
        if isinstance(count, Tensor):
            state["step"] = count.to(device=device, dtype=torch.float32)
        elif count is not None:
            state["step"] = torch.tensor(float(count), dtype=torch.float32, device=device)


def _constant(value: object) -> Hashable:
    """A setting as a key: tensors of a device by their address, of the host by their value."""
    if isinstance(value, Tensor):
        return (float(value),) if value.device.type == "cpu" and value.numel() == 1 else value.data_ptr()
    if isinstance(value, (list, tuple)):
        return tuple(_constant(each) for each in value)
    return value if isinstance(value, Hashable) else id(value)
