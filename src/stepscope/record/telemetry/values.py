"""Numbers of the program: logged values, norms of gradients and activations, learning rates.

A value on a device becomes a number without the host waiting for it: values are gathered on the device, copied into
pinned memory on the stream that computes them, and followed by an event. Later calls query the event and read the
memory only after it has passed. Only the thread that logs queries the event: while a CUDA graph is captured, a query
from any other thread would invalidate the capture. Norms are computed by hooks, on the tensors' own device.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, Final, TypeAlias

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.guard import sentence
from stepscope.record.telemetry.store import Sample, Series, Writer

Logged: TypeAlias = tuple[Series, Any]
"""A series and its value, anything that is a single number."""

_SMALLEST_PAGE: Final = 64
_PAGES_AT_ONCE: Final = 16


@dataclass(slots=True)
class _Copy:
    event: Any
    page: Any
    numbers: Any
    series: list[Series]
    unix_ns: int
    step: int | None


class ScalarReader:
    """Reads logged values: at once if that needs no wait, otherwise after the device has computed them."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.begin()

    def begin(self) -> None:
        """Reset, also in a child process, where the parent's device copies must be dropped."""
        self._lock = threading.Lock()
        self._waiting: deque[_Copy] = deque()
        self._pages = PinnedPages()

    def read(self, logged: Sequence[Logged], unix_ns: int, step: int | None) -> None:
        """Record the values as of that time and step."""
        self.poll()
        on_devices: defaultdict[Any, list[Logged]] = defaultdict(list)
        for series, value in logged:
            with guard.attempt() as reading:
                device = _device_of(value)
                if device is not None:
                    on_devices[device].append((series, value))
                    continue
                self._writer.add(Sample(series, unix_ns, step, None if value is None else _number(value)))
            if reading.error is not None:
                self._lack(series, unix_ns, step, sentence(reading.error))
        for device, values in on_devices.items():
            self._start_copy(device, values, unix_ns, step)

    def poll(self) -> None:
        """Record the copies that have arrived; never waits."""
        if not self._waiting or is_capturing() or not self._lock.acquire(blocking=False):
            return
        try:
            while self._waiting and self._arrived(self._waiting[0]):
                self._waiting.popleft()
        finally:
            self._lock.release()

    def drain(self, timeout_s: float = 5.0) -> None:
        """Wait for pending copies at the end of a run, at most `timeout_s`, since a device may hang."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.001)
            self.poll()
        for copy in self._waiting:
            for series in copy.series:
                self._lack(series, copy.unix_ns, copy.step, "the device had not computed it when the run ended")
        self._waiting.clear()

    def _arrived(self, copy: _Copy) -> bool:
        """Whether a copy is done or has failed; the values of a finished copy are recorded."""
        try:
            if not copy.event.query():
                return False
        except RuntimeError as error:  # the device has failed, which the program's own calls will report
            for series in copy.series:
                self._lack(series, copy.unix_ns, copy.step, sentence(error))
            return True
        for series, number in zip(copy.series, copy.numbers.tolist(), strict=True):
            self._writer.add(Sample(series, copy.unix_ns, copy.step, number))
        self._pages.give_back(copy.page)
        return True

    def _start_copy(self, device: Any, values: list[Logged], unix_ns: int, step: int | None) -> None:
        series = [each for each, _ in values]
        with guard.attempt() as copying:  # drivers and tensor subclasses may raise anything
            copy = self._copy(device, [value for _, value in values], series, unix_ns, step)
            self._waiting.append(copy)
        if copying.error is not None:
            for each in series:
                self._lack(each, unix_ns, step, sentence(copying.error))

    def _copy(self, device: Any, tensors: list[Any], series: list[Series], unix_ns: int, step: int | None) -> _Copy:
        torch = sys.modules["torch"]
        module: Any = getattr(torch, device.type, None)
        if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
            raise RuntimeError(
                f"a value on the device {device} cannot be copied without waiting; log float(value) rarely"
            )
        if is_capturing():
            raise RuntimeError("it was logged while a CUDA graph was captured")
        with torch.no_grad():
            # Integers and float64, which a float32 page cannot hold exactly, are rare and take two slots.
            exact = all(tensor.is_floating_point() and tensor.element_size() <= 4 for tensor in tensors)
            dtype = torch.float32 if exact else torch.float64
            scalars = [local_part(tensor.detach()).reshape(()).to(dtype) for tensor in tensors]
            gathered = torch.stack(scalars)
            page = self._pages.take(len(scalars))
            numbers = page.view(dtype)[: len(scalars)]
            numbers.copy_(gathered, non_blocking=True)
            event = module.Event()
            event.record(module.current_stream(device))
        return _Copy(event, page, numbers, series, unix_ns, step)

    def _lack(self, series: Series, unix_ns: int, step: int | None, reason: str) -> None:
        self._writer.add(Sample(series, unix_ns, step, None))
        self._writer.lacks(series, reason)


class PinnedPages:
    """Pinned memory for asynchronous copies; pages are reused, since allocating one can stall the device."""

    def __init__(self, allocate: Callable[[int], Any] | None = None) -> None:
        self._allocate = allocate or pinned_bytes
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    def take(self, numbers: int) -> Any:
        size = 8 * max(_SMALLEST_PAGE, 1 << (numbers - 1).bit_length())
        free = self._free[size]
        if not free:
            free.extend(self._allocate(_PAGES_AT_ONCE * size).split(size))
        return free.pop()

    def give_back(self, page: Any) -> None:
        self._free[page.numel()].append(page)


def pinned_bytes(size: int) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor that may be distributed over ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _device_of(value: Any) -> Any:
    """Return the device of a tensor that is not on the host; None for everything else.

    Raises ValueError if the tensor does not have exactly one element on this rank.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {list(value.shape)} is not one number")
    if any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
        raise ValueError("a tensor spread over several ranks is not one number on any of them")
    device = value.device
    return None if device.type == "cpu" else device


def _number(value: Any) -> float:
    """Convert a number, or a tensor or array in host memory, to a float.

    Raises TypeError or ValueError if it is not a number.
    """
    if isinstance(value, (int, float)):
        return float(value)
    # tolist() reads the memory; item() would go through the dispatcher and look like a synchronisation in a trace.
    if hasattr(value, "detach") and hasattr(value, "tolist"):
        return float(local_part(value.detach()).reshape(()).tolist())
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"a value of type {type(value).__name__} is not a number")
    return float(value)


def is_capturing() -> bool:
    """Whether this thread is capturing a CUDA graph, during which nothing may be copied or queried."""
    torch: Any = sys.modules.get("torch")
    return (
        torch is not None
        and torch.cuda.is_initialized()
        and hasattr(torch.cuda, "is_current_stream_capturing")
        and torch.cuda.is_current_stream_capturing()
    )


Record: TypeAlias = Callable[[Sequence[Logged], int], None]
"""Takes series with their values, and the watch's own step count."""


class Watch:
    """Hooks installed by `Telemetry.watch` or `Telemetry.watch_optimizer`, which can be removed."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class ModelWatch(Watch):
    """Records norms of a model's gradients before its optimizer steps, and of its activations in forward passes.

    Args:
        modules: maps module names to the norms' names; "" is the whole model.
        every: record one in `every` optimizer steps and forward passes.
    """

    def __init__(self, model: Any, modules: Mapping[str, str], every: int, record: Record, writer: Writer) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self._modules = modules
        self._every = every
        self._record = record
        self._writer = writer
        self._clock: weakref.ref[Any] | None = None
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps = 0
        self._forwards = 0
        self._norms: dict[str, Any] | None = None

    def watch_gradients(self) -> None:
        """Hook into every optimizer's step, when the gradients are complete, unscaled and clipped."""
        register = import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
        self._handles.append(register(self._before_step))

    def watch_activations(self) -> None:
        """Hook into the chosen modules; forward passes of the whole model are counted."""
        model = self._model()
        assert model is not None
        self._handles.append(model.register_forward_pre_hook(self._before_forward))
        for path, name in self._modules.items():
            self._handles.append(model.get_submodule(path).register_forward_hook(partial(self._after_module, name)))
        self._handles.append(model.register_forward_hook(self._after_forward))

    @guard.entry
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._is_clock(optimizer):
            return
        step, self._steps = self._steps, self._steps + 1
        if step % self._every or is_capturing():
            return
        with self._writer.guarded(Series("gradient", "gradient_norm")):
            self._record(self._gradient_norms(getattr(optimizer, "grad_scale", None)), step)

    def _is_clock(self, optimizer: Any) -> bool:
        """Whether the optimizer is the first one seen that updates this model: its steps are counted."""
        if self._clock is not None and self._clock() is optimizer:
            return True
        if optimizer in self._others:
            return False
        model = self._model()
        ours = set(map(id, model.parameters())) if model is not None else set()
        changed = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        free = self._clock is None or self._clock() is None
        if free and not ours.isdisjoint(changed):
            self._clock = weakref.ref(optimizer)
            return True
        self._others.add(optimizer)
        return False

    def _gradient_norms(self, scale: Any) -> list[Logged]:
        model = self._model()
        if model is None:
            return []
        gradients = {id(each): each.grad for each in model.parameters() if each.grad is not None}
        norms = dict(zip(gradients, norms_of(list(gradients.values())), strict=True))
        logged: list[Logged] = []
        for path, name in self._modules.items():
            parts = [norms[id(each)] for each in model.get_submodule(path).parameters() if id(each) in norms]
            series = Series("gradient", f"gradient_norm{name}")
            parts = [part for part in parts if part is not None]
            if parts:
                # A fused optimizer receives gradients that are still scaled, and the scale with them.
                whole = total_norm(parts)
                logged.append((series, whole if scale is None else whole / scale))
            else:
                self._writer.lacks(series, "no parameter of the module had a dense gradient")
        return logged

    def _before_forward(self, *_: Any) -> None:
        if not _is_compiling():
            self._forward_begins()

    @guard.entry
    def _forward_begins(self) -> None:
        self._norms = {} if self._forwards % self._every == 0 and not is_capturing() else None

    def _after_module(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        if not _is_compiling() and self._norms is not None:
            self._module_ended(name, output, self._norms)

    @guard.entry
    def _module_ended(self, name: str, output: Any, norms: dict[str, Any]) -> None:
        with self._writer.guarded(Series("activation", f"activation_norm{name}")):
            tensor = _first_tensor(output)
            if tensor is not None:
                norms[name] = _norm(local_part(tensor.detach()))

    def _after_forward(self, *_: Any) -> None:
        if not _is_compiling():
            self._forward_ended()

    @guard.entry
    def _forward_ended(self) -> None:
        norms, self._norms = self._norms, None
        step = self._steps if self._clock is not None else self._forwards
        self._forwards += 1
        for name in self._modules.values():
            if norms is not None and name not in norms:
                reason = (
                    "the module did not run in this pass, gave no floating-point tensor, or ran inside compiled code"
                )
                self._writer.lacks(Series("activation", f"activation_norm{name}"), reason)
        if norms:
            self._record([(Series("activation", f"activation_norm{name}"), each) for name, each in norms.items()], step)


class OptimizerWatch(Watch):
    """Records an optimizer's learning rates before its steps: those that the step uses."""

    def __init__(self, optimizer: Any, name: str, every: int, record: Record, writer: Writer) -> None:
        super().__init__()
        self._name = name
        self._every = every
        self._record = record
        self._writer = writer
        self._steps = 0
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    @guard.entry
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        step, self._steps = self._steps, self._steps + 1
        if step % self._every:
            return
        with self._writer.guarded(Series("optimizer", self._name)):
            rates = [group.get("lr") for group in optimizer.param_groups]
            names = [self._name] if len(rates) == 1 else [f"{self._name}/{number}" for number in range(len(rates))]
            self._record([(Series("optimizer", name), rate) for name, rate in zip(names, rates, strict=True)], step)


def chosen_modules(model: Any, patterns: Sequence[str] | None, name: str | None) -> dict[str, str]:
    """Map the paths of the watched modules to the suffixes of their norms' names; without patterns, the whole model.

    Raises UsageError if it is not a module, or a pattern matches none of its modules.
    """
    if not hasattr(model, "named_modules"):
        raise UsageError(f"watch takes a torch.nn.Module, not a {type(model).__name__}")
    prefix = "" if name is None else f"/{name}"
    if patterns is None:
        return {"": prefix}
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(paths[:5]) or "no modules in it"
            raise UsageError(f"no module of the model has a name like {pattern!r}; there are {some} and so on")
    separator = "/" if name is None else "."
    return {path: f"{prefix}{separator}{path}" for path in paths if any(fnmatchcase(path, each) for each in patterns)}


def norms_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the 2-norm of each tensor in float32, computed on its device in a few kernels; None for sparse tensors."""
    torch = sys.modules["torch"]
    alike: defaultdict[Any, list[tuple[int, Any]]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        if tensor.layout == torch.strided:
            part = local_part(tensor.detach())
            alike[(part.device, part.dtype)].append((position, part))
    norms: list[Any] = [None] * len(tensors)
    for group in alike.values():
        found = _foreach_norm([part for _, part in group])
        for (position, _), norm in zip(group, found, strict=True):
            norms[position] = norm
    return norms


def total_norm(norms: Sequence[Any]) -> Any:
    """Combine the norms of parts into the norm of the whole, on the first one's device."""
    torch = sys.modules["torch"]
    device = norms[0].device
    together = [norm if norm.device == device else norm.to(device, non_blocking=True) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(together))


def _foreach_norm(tensors: list[Any]) -> Sequence[Any]:
    torch = sys.modules["torch"]
    if tensors[0].dtype in (torch.float32, torch.float64):
        return torch._foreach_norm(tensors, 2)  # type: ignore[no-any-return]
    try:
        # Half precision overflows at 65504 and has three significant digits.
        return torch._foreach_norm(tensors, 2, dtype=torch.float32)  # type: ignore[no-any-return]
    except TypeError:  # before torch 2.4 it takes no dtype
        return [_norm(tensor) for tensor in tensors]


def _norm(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    precise = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dtype=precise)


def _first_tensor(output: Any) -> Any:
    torch = sys.modules["torch"]
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()), None)


def _is_compiling() -> bool:
    torch: Any = sys.modules["torch"]
    return hasattr(torch, "compiler") and hasattr(torch.compiler, "is_compiling") and torch.compiler.is_compiling()
