"""Running a forward pass again as if it had not run: random numbers and modules' buffers put back."""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook


class RandomState:
    """The random numbers of Python, NumPy where it is loaded, torch, and of the device."""

    def __init__(self, device: str) -> None:
        """
        Args:
            device: the device's type, such as "cuda".
        """
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._torch = torch.get_rng_state()
        module: Any = torch if device == "cpu" else getattr(torch, device, None)
        every = "_all" if hasattr(module, "get_rng_state_all") else ""
        self._set_on_device = getattr(module, f"set_rng_state{every}", None)
        self._device = getattr(module, f"get_rng_state{every}")() if self._set_on_device is not None else None

    def restore(self) -> None:
        """Let the same numbers be drawn again; may be called any number of times."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._set_on_device is not None:
            self._set_on_device(self._device)


class ModelState:
    """The buffers of all modules that are called inside the block, as they were before.

        with ModelState() as state:
            model(batch)
            state.restore()

    Only buffers that were changed are written, and without torch counting it as a change: what is saved of them for an
    earlier backward pass stays valid. (Batch normalisation changes its buffers without counting, too.)
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.nn.Module, dict[str, tuple[Tensor, Tensor]]]] = {}
        self._handle: Any = None

    def __enter__(self) -> ModelState:
        self._handle = register_module_forward_pre_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()

    def _keep(self, module: torch.nn.Module, inputs: Any) -> None:
        if id(module) in self._kept:
            return
        for each in module.modules():  # all inside, for a compiled module's parts are not called one by one
            if id(each) not in self._kept:
                buffers = {name: buffer for name, buffer in each._buffers.items() if buffer is not None}
                copies = {name: (buffer, buffer.detach().clone()) for name, buffer in buffers.items()}
                self._kept[id(each)] = (each, copies)

    def restore(self) -> None:
        """Put the buffers back; may be called any number of times."""
        for module, buffers in self._kept.values():
            for name, (buffer, values) in buffers.items():
                if not buffer.is_meta and not torch.equal(buffer, values):
                    buffer.data.copy_(values)
                module._buffers[name] = buffer
