"""A CUDA device that computes nothing: what is wrong about devices, shapes and types shows without a GPU.

Tensors are torch's fake ones, which know their device and refuse to be mixed with another's; torch.cuda's functions
are stand-ins. Values do not exist: what the host reads is 1, and a backward pass only gives each parameter a gradient.
A torch that was built without CUDA lacks the guard of its devices, which autograd asks for: GUARD is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

DEVICE = torch.device("cuda:0")
_IN_PLACE = ("uniform_.default", "uniform.default")
"""Their decompositions ask for a kernel of the device."""

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@cache
def has_guard() -> bool:
    """Whether CUDA devices have a guard in this process: torch's own, or else one that is compiled here in a second."""
    if torch.version.cuda is not None:
        return True
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return False
    place = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        words = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{place / 'include'}", str(source), "-o", str(library)]
        if subprocess.run([*words, f"-L{place / 'lib'}", "-lc10"], capture_output=True).returncode:
            return False
        ctypes.CDLL(str(library))
    return True


class Event:
    """Stands for torch.cuda.Event; 1 ms lies between any two."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream(Event):
    """Stands for torch.cuda.Stream."""

    device = DEVICE

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, _: Event) -> None: ...

    def record_event(self, *_: Any) -> Event:
        return Event()


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


def backward(loss: torch.Tensor, *_: Any, **__: Any) -> None:
    """Give each parameter that the loss depends on a gradient; nothing is computed."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None:
            leaf.grad = torch.empty_like(leaf)


@contextlib.contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """Inside the block tensors can be made on the device that is given, and computed with."""

    def stays(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    def nothing(*_: Any, **__: Any) -> None: ...

    tensors: dict[str, Callable[..., Any]] = {"copy_": stays, "pin_memory": stays, "record_stream": nothing}
    tensors |= {"item": lambda _: 1, "tolist": lambda tensor: [1] * tensor.numel()}
    tensors |= {"backward": backward}
    tensors |= {"__bool__": lambda _: True, "__int__": lambda _: 1, "__float__": lambda _: 1.0}
    cuda: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "graph": lambda *_, **__: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "synchronize": nothing,
        "empty_cache": nothing,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (60 << 30, 80 << 30),
        "get_device_capability": lambda *_: (9, 0),
    }
    with contextlib.ExitStack() as stack:
        for name in _IN_PLACE:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload)
            if operator in decomposition_table:
                known = decomposition_table.pop(operator)
                stack.callback(decomposition_table.__setitem__, operator, known)
        autograd = {"grad": lambda _, inputs, *__: [torch.empty_like(each) for each in inputs]}
        owners = ((torch.Tensor, tensors), (torch.cuda, cuda), (torch.autograd, autograd))
        others = ((torch, {"_fused_sgd_": nothing}), (torch.nn.Module, {"_apply": _apply}))
        for owner, names in (*owners, *others):
            for name, stand_in in names.items():
                stack.enter_context(mock.patch.object(owner, name, stand_in))
        copied = mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)
        stack.enter_context(copied)  # layers of a transformer are copies
        stack.enter_context(FakeTensorMode(shape_env=ShapeEnv()))  # which gives nonzero() a length
        yield DEVICE


def _apply(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], *_: Any) -> torch.nn.Module:
    """What `module.to` does, for tensors that cannot be swapped."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            setattr(child, name, torch.nn.Parameter(convert(parameter.detach()), parameter.requires_grad))
        for name, buffer in list(child.named_buffers(recurse=False)):
            setattr(child, name, convert(buffer))
    return module
