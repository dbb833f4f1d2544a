"""The end of a step's graph on devices that collect operators and run them later, and nothing elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["mark_step"]

_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._dynamo.is_compiling
"""Whether torch.compile looks at the code: then it stands for True, and nothing behind it is compiled."""


def mark_step() -> None:
    """End the step's graph and start the device on it, where one is collected; elsewhere nothing happens.

    On XLA this is `torch_xla.sync()` (before torch_xla 2.3 `torch_xla.core.xla_model.mark_step()`), on Gaudi in lazy
    mode `habana_frameworks.torch.core.mark_step()`. No package is imported: who uses such a device has done so. Where
    torch_xla is loaded but no XLA device is in use (some libraries load it whenever it is installed) nothing happens
    either. Under torch.compile it is no operation and does not break the graph: there the graph is the compiler's.

    Put it behind the optimizer's step, and where a graph grows too large or a part of the step has changing shapes.
    https://docs.pytorch.org/xla/release/r2.8/learn/xla-overview.html
    https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html
    """
    if _is_compiling():
        return
    loaded = sys.modules
    if "torch_xla" in loaded:
        _mark_xla(loaded["torch_xla"])
    if "habana_frameworks.torch.core" in loaded:
        _mark_hpu(loaded["habana_frameworks.torch.core"])


def _mark_xla(package: Any) -> None:
    """What this version of torch_xla calls the end of a graph."""
    started = getattr(getattr(package, "_XLAC", None), "_xla_runtime_is_initialized", None)
    if started is not None and not started():  # marking would start the runtime and take the device
        return
    if hasattr(package, "sync"):
        package.sync()
        return
    model = sys.modules.get("torch_xla.core.xla_model")
    if model is not None:
        model.mark_step()


def hpu_is_lazy() -> bool:
    """Whether the loaded bridge of Gaudi collects operators; False where it is not loaded or does not say."""
    internal = sys.modules.get("habana_frameworks.torch.utils.internal")
    return internal is not None and bool(internal.is_lazy())


def _mark_hpu(core: Any) -> None:
    if hpu_is_lazy():
        core.mark_step()
