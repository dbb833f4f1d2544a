"""TF32: matrix products and convolutions of FP32 numbers with ten bits of mantissa, on tensor cores."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch


class Tf32Setting:
    """What `allow_tf32` set; at the end of a `with` block the settings are again as they were before."""

    def __init__(self, enabled: bool) -> None:
        self._before = _settings()
        _allow(enabled, enabled)

    def restore(self) -> None:
        """Set everything as it was before."""
        products, convolutions, exact = self._before
        _allow(products, convolutions)
        for holder, value in exact:
            holder.fp32_precision = value

    def __enter__(self) -> Tf32Setting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def allow_tf32(enabled: bool = True) -> Tf32Setting:
    """Let matrix products and convolutions of FP32 numbers run in TF32 (NVIDIA Ampere and later), or forbid it.

    It takes effect at once, for the process; `with allow_tf32():` ends with the block. Inputs keep 10 of FP32's 23 bits
    of mantissa, sums are in FP32: products are exact to about 1e-3. Elsewhere it changes nothing on a GPU without TF32.
    Both of torch's ways to ask for the setting (`allow_tf32`, and `fp32_precision` of torch 2.9 and later) say the same
    afterwards; setting only the newer one makes programs fail that read the older one.

    Args:
        enabled: False for FP32 throughout, also in convolutions, where torch allows TF32 by itself.

    Returns:
        A context manager, with `restore()` for those who do not need a block.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"allow_tf32 takes True or False, not {enabled!r}")
    return Tf32Setting(enabled)


def _allow(products: bool, convolutions: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 calls this way old; it is the one that sets both
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = convolutions


def _holders() -> list[Any]:
    """What has torch's newer setting; none before torch 2.9."""
    backends: Any = torch.backends
    places = (backends.cuda.matmul, getattr(backends.cudnn, "conv", None), getattr(backends.cudnn, "rnn", None))
    return [place for place in places if isinstance(getattr(place, "fp32_precision", None), str)]


def _settings() -> tuple[bool, bool, list[tuple[Any, str]]]:
    """Of products, of convolutions, and of the newer settings, none of which is changed by asking."""
    holders = _holders()
    if not holders:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, []
    exact = [(holder, holder.fp32_precision) for holder in holders]
    return exact[0][1] == "tf32", any(value == "tf32" for _, value in exact[1:]), exact
