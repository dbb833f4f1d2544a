"""What every program here gets: the twin, the device, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Step: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """How a program is built.

    Attributes:
        fault: whether the fault is planted.
        device: such as "cuda:0" or "cpu".
        tiny: sizes for a run without a GPU.
    """

    fault: bool
    device: torch.device
    tiny: bool = False

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def size(self, large: int, tiny: int) -> int:
        """The size for a device, or for a run without one."""
        return tiny if self.tiny else large

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def stream(self) -> torch.cuda.Stream | None:
        """A new queue of the device; None on the CPU, which has none."""
        return torch.cuda.Stream(self.device) if self.on_cuda else None  # type: ignore[no-untyped-call]

    def host_batch(self, *shape: int, pinned: bool) -> torch.Tensor:
        """Random numbers in the host's memory, page-locked if asked and if there is a device to pin for."""
        batch = torch.randn(*shape, device="cpu")
        return batch.pin_memory() if pinned and self.on_cuda else batch


def adamw(model: torch.nn.Module, **how: Any) -> torch.optim.AdamW:
    """The only line that makes one: a diagnosis looks for it in the program's text, which several programs share."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **how)  # planted: optimizer_tensor_by_tensor


def training_step(
    model: torch.nn.Module, batch: Callable[[], torch.Tensor], *, foreach: bool | None = None, fused: bool = True
) -> Step:
    """A step of training: mean square of the model's answer, AdamW."""
    optimizer = adamw(model, foreach=foreach, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()  # planted: optimizer_tensor_by_tensor

    return step
