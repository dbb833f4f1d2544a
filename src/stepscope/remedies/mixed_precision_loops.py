"""Mixed precision for a training loop, with a guard that compares the first losses with full precision."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook


class RandomState:
    """Saved random states of Python, NumPy if it is loaded, torch, and the device."""

    def __init__(self, device: str) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._torch = torch.get_rng_state()
        module: Any = torch if device == "cpu" else getattr(torch, device, None)
        every = "_all" if hasattr(module, "get_rng_state_all") else ""
        self._set_on_device = getattr(module, f"set_rng_state{every}", None)
        self._device = getattr(module, f"get_rng_state{every}")() if self._set_on_device is not None else None

    def restore(self) -> None:
        """Restore the random states; may be called any number of times."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._set_on_device is not None:
            self._set_on_device(self._device)


class ModelState:
    """Saves the buffers of every module called inside the block, as they were before the call.

        with ModelState() as state:
            model(batch)
            state.restore()

    Only changed buffers are restored, and without raising torch's version counter: tensors saved for an earlier
    backward pass stay valid. (Batch normalisation does not raise it either.)
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
        for (
            each
        ) in module.modules():  # including submodules, because a compiled module's parts are not called one by one
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


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_TYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class PrecisionDrift:
    """Losses in low precision beside those of the same batches, weights and random numbers in full precision.

    Attributes:
        dtype: "bf16" or "fp16".
        tolerance: largest accepted relative difference of a loss.
        full, low: the losses, in the order of the steps.
    """

    dtype: str
    tolerance: float
    full: tuple[float, ...] = ()
    low: tuple[float, ...] = ()

    @property
    def differences(self) -> tuple[float, ...]:
        """|low - full| / |full| of each step; infinite if only one of them is finite."""
        return tuple(_relative(low, full) for low, full in zip(self.low, self.full, strict=True))

    @property
    def verdict(self) -> Literal["not checked", "within", "exceeded"]:
        if not self.full:
            return "not checked"
        return "within" if max(self.differences) <= self.tolerance else "exceeded"

    def __str__(self) -> str:
        if not self.full:
            return f"losses in {self.dtype} were not compared with full precision"
        count = len(self.full)
        losses = f"1 loss in {self.dtype} differs" if count == 1 else f"{count} losses in {self.dtype} differ"
        largest = max(self.differences)
        size = f"by {largest:.3%} at most"
        if largest == math.inf:
            place = self.differences.index(largest)
            size = f"by more than a share can say ({self.low[place]:g} beside {self.full[place]:g})"
        return f"{losses} from full precision {size}, tolerance {self.tolerance:.3%}: {self.verdict}"


class MixedPrecision:
    """The result of `mixed_precision`; see there.

    Attributes:
        enabled: whether autocast is on; False once the guard fell back to full precision.
        scaler: the gradient scaler of fp16, None for bf16.
        drift: what the guard found so far.
    """

    def __init__(
        self,
        dtype: str,
        device: str,
        check_steps: int,
        tolerance: float,
        on_drift: Literal["warn", "error"],
        across_ranks: bool,
    ) -> None:
        self.enabled = True
        self.drift = PrecisionDrift(dtype, tolerance)
        self.scaler = _scaler(device) if dtype == "fp16" else None
        self._device = device
        self._dtype = _TYPES[dtype]
        self._left = check_steps
        self._on_drift = on_drift
        self._across_ranks = across_ranks
        self._entered: list[AbstractContextManager[Any]] = []

    def loss(
        self, function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """Return `function(*arguments, **named)`, computed in mixed precision.

        In the first steps the function is first called in full precision, without gradients, with the same random
        numbers; buffers (of batch normalisation, for example) are restored afterwards. Other state that it changes
        itself, such as an iterator that it takes its batch from, is then changed twice: take the batch outside.

        Args:
            function: returns a scalar loss, a tuple that begins with one, or an object with a `loss`.
        """
        if not self.enabled:
            return function(*arguments, **named)
        if self._left <= 0:
            with self._autocast():
                return function(*arguments, **named)
        self._left -= 1
        return self._compared(lambda: function(*arguments, **named))

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, scaled for fp16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale fp16's gradients before they are clipped; a no-op for bf16."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`; in fp16 it is skipped if a gradient has overflowed, and the scale is adapted."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def __enter__(self) -> MixedPrecision:
        """Autocast for a block, without the guard."""
        context = self._autocast() if self.enabled else nullcontext()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, dtype=self._dtype)

    def _compared(self, function: Callable[[], Result]) -> Result:
        random = RandomState(self._device)
        with ModelState() as state:
            with torch.no_grad(), torch.autocast(self._device, enabled=False):
                full = _value(function())
            random.restore()
            state.restore()
            with self._autocast():
                result = function()
            low = _value(result)
            self.drift = replace(self.drift, full=(*self.drift.full, full), low=(*self.drift.low, low))
            if not self._agreed(self.drift.verdict == "exceeded"):
                return result
            self._go_back()
            del result
            random.restore()
            state.restore()
            return function()

    def _agreed(self, exceeded: bool) -> bool:
        """Whether any rank's loss is too far off, so that all ranks do the same."""
        distributed = torch.distributed
        if not (self._across_ranks and distributed.is_available() and distributed.is_initialized()):
            return exceeded
        device = self._device if distributed.get_backend() != "gloo" else "cpu"
        flag = torch.tensor([float(exceeded)], device=device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag.item())

    def _go_back(self) -> None:
        self.enabled = False
        sentence = f"{self.drift}; this step and all later ones are computed in full precision"
        if self.drift.verdict != "exceeded":
            sentence = (
                f"another rank's loss in {self.drift.dtype} is beyond the tolerance; all continue in full precision"
            )
        if self._on_drift == "error":
            raise RuntimeError(sentence.partition("; this step")[0])
        warnings.warn(sentence, UserWarning, stacklevel=4)


def mixed_precision(
    dtype: str | torch.dtype = "bf16",
    *,
    device: str | torch.device | None = None,
    check_steps: int = 3,
    tolerance: float = 0.02,
    on_drift: Literal["warn", "error"] = "warn",
    across_ranks: bool = True,
) -> MixedPrecision:
    """Autocast for a training loop, with a guard that compares its first losses with full precision.

        precision = mixed_precision("bf16")
        for batch, target in loader:
            loss = precision.loss(lambda: criterion(model(batch), target))
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
        print(precision.drift)

    The guard computes the first losses both ways from the same weights, batch and random numbers, without any effect on
    weights, gradients, buffers and the random numbers of later steps. If a loss differs by more than the tolerance, it
    warns and falls back to full precision from this very step. It reads the losses, so that the host waits for the
    device in these steps and in no other. Only losses are compared: gradients may underflow while the losses agree,
    which fp16's scaler prevents. `with precision:` is autocast without the guard.

    Args:
        dtype: "bf16" (torch.bfloat16), or "fp16" (torch.float16), whose gradients a scaler keeps from underflowing.
        device: the device's type, such as "cuda"; by default the current accelerator, else the CPU. For XLA pass "xla".
        check_steps: losses to compare; 0 for none.
        tolerance: largest accepted relative difference. It must be wider if dropout draws other numbers for other
            dtypes, or a loss is nearly 0.
        on_drift: "warn", or "error" for a RuntimeError instead of full precision.
        across_ranks: with torch.distributed, fall back on all ranks if one has to. All of them have to call `loss`.

    Raises:
        ValueError: for another dtype, a device that lacks bf16, or numbers out of range.
    """
    named = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, dtype) if not isinstance(dtype, str) else dtype
    if not isinstance(named, str) or named not in _TYPES:
        raise ValueError(f"mixed precision is in 'bf16' or 'fp16', not {dtype!r}")
    if check_steps < 0:
        raise ValueError(f"check_steps must be 0 or more, not {check_steps}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be 0 or more, not {tolerance}")
    if on_drift not in ("warn", "error"):
        raise ValueError(f"on_drift must be 'warn' or 'error', not {on_drift!r}")
    kind = _device_type(device)
    if kind == "cuda" and named == "bf16" and not _has_bf16():
        raise ValueError(f"{torch.cuda.get_device_name()} has no arithmetic in bf16; take mixed_precision('fp16')")
    return MixedPrecision(named, kind, check_steps, tolerance, on_drift, across_ranks)


def _device_type(device: str | torch.device | None) -> str:
    if device is not None:
        return torch.device(device).type
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator().type)
    for name in ("cuda", "hpu"):
        if hasattr(torch, name) and getattr(torch, name).is_available():
            return name
    return "cpu"


def _has_bf16() -> bool:
    try:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    except TypeError:  # torch before 2.5 does not report emulated bf16
        return bool(torch.cuda.is_bf16_supported())


def _scaler(device: str) -> Any:
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device)
    return torch.cuda.amp.GradScaler(enabled=device == "cuda")  # torch before 2.3 has no other


def _value(result: Any) -> float:
    found = result
    if isinstance(found, tuple | list) and found:
        found = found[0]
    elif isinstance(found, dict):
        found = found.get("loss")
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise TypeError(
            "the function must return a loss without dimensions, a tuple that begins with one or an object that has "
            f"one as its loss, not {type(result).__name__}{shape}"
        )
    return float(found.detach())


def _relative(low: float, full: float) -> float:
    if low == full or (math.isnan(low) and math.isnan(full)):
        return 0.0
    if not (math.isfinite(low) and math.isfinite(full)) or full == 0:
        return math.inf
    return abs(low - full) / abs(full)


class Tf32Setting:
    """The result of `allow_tf32`; the end of a `with` block restores the settings."""

    def __init__(self, enabled: bool) -> None:
        self._before = _settings()
        _allow(enabled, enabled)

    def restore(self) -> None:
        products, convolutions, exact = self._before
        _allow(products, convolutions)
        for holder, value in exact:
            holder.fp32_precision = value

    def __enter__(self) -> Tf32Setting:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def allow_tf32(enabled: bool = True) -> Tf32Setting:
    """Let FP32 matrix products and convolutions run in TF32 (NVIDIA Ampere and later), or forbid it.

    It takes effect at once, for the process; `with allow_tf32():` ends with the block. Inputs keep 10 of FP32's 23
    mantissa bits, sums are in FP32: products are accurate to about 1e-3. It changes nothing on hardware without TF32.
    Both of torch's settings (`allow_tf32`, and `fp32_precision` of torch 2.9 and later) agree afterwards; setting only
    the newer one makes programs fail that read the older one.

    Args:
        enabled: False for FP32 throughout, also in convolutions, for which torch allows TF32 by default.

    Returns:
        A context manager, with `restore()` for use without a block.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"allow_tf32 takes True or False, not {enabled!r}")
    return Tf32Setting(enabled)


def _allow(products: bool, convolutions: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the way that torch 2.9 calls old sets both
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = convolutions


def _holders() -> list[Any]:
    """The objects with torch's newer setting; empty before torch 2.9."""
    backends: Any = torch.backends
    places = (backends.cuda.matmul, getattr(backends.cudnn, "conv", None), getattr(backends.cudnn, "rnn", None))
    return [place for place in places if isinstance(getattr(place, "fp32_precision", None), str)]


def _settings() -> tuple[bool, bool, list[tuple[Any, str]]]:
    """Settings for products, convolutions, and the newer settings; reading them changes none."""
    holders = _holders()
    if not holders:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, []
    exact = [(holder, holder.fp32_precision) for holder in holders]
    return exact[0][1] == "tf32", any(value == "tf32" for _, value in exact[1:]), exact
