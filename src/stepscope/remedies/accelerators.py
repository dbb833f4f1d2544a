"""Which device a process computes on, its streams, and the host's memory for it, whatever the version of torch."""

from __future__ import annotations

import sys
from typing import Any

import torch


def default_device() -> torch.device:
    """The accelerator that torch has chosen, XLA's where torch_xla is imported, or else the CPU."""
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)  # torch 2.6
    if current is not None and torch.accelerator.is_available():
        kind = current()
        if kind is not None:
            return torch.device(kind.type, torch.accelerator.current_device_index())
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "habana_frameworks.torch" in sys.modules:
        return torch.device("hpu")
    xla = sys.modules.get("torch_xla")
    if xla is not None:
        return torch.device(xla.device())
    return torch.device("cpu")


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a copy of a tensor: pinned, where this torch can do that for the device."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.empty(like.shape, dtype=like.dtype)


def streams_of(device: torch.device) -> Any | None:
    """torch's module of the device, such as `torch.cuda`, where it has streams and events; None elsewhere."""
    module = getattr(torch, device.type, None)
    needed = ("Stream", "Event", "current_stream", "stream")
    # torch.cpu has them too, but without effect.
    if device.type in ("cpu", "mps") or module is None or not all(hasattr(module, name) for name in needed):
        return None
    return module
