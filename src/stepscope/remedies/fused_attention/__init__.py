"""One function for fused attention on CUDA, CPU and HPU, which never materializes the score matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stepscope.remedies.fused_attention.blocks import (
    Results,
    Settings,
    attend_by_element,
    attend_by_flex,
    block_attention,
    can_use_flex,
    zero_padding,
)
from stepscope.remedies.settings import autocast_type

SOFTMAX_MODES: Final = ("exact", "fast")
PADDINGS: Final = ("left", "right")


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, head size), not {_shape(tensor)}")
    found = f"query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query, key and value must have the same batch size, which is not broadcast: {found}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key and value must have the same number of heads and the same length: {found}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head size: {found}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"query's heads must be a multiple of key's and value's: {found}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        types = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"query, key and value must have the same floating-point type, not {types}")
    if not query.device == key.device == value.device:
        devices = f"{query.device}, {key.device} and {value.device}"
        raise ValueError(f"query, key and value must be on the same device, not on {devices}")
    if query.device.type == "hpu" and query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the HPU's fused attention takes float32 and bfloat16, not {query.dtype}")


def check_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, not {type(mask).__name__}")
    if is_causal:
        raise ValueError("attn_mask cannot be given together with is_causal=True: put the triangle into the mask")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ValueError(f"attn_mask must be boolean, float32 or of query's type {query.dtype}, not {mask.dtype}")
    if mask.device != query.device:
        raise ValueError(f"attn_mask must be on query's device {query.device}, not on {mask.device}")
    full = (*query.shape[:3], key.shape[2])
    fits = mask.dim() <= 4 and all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(full), strict=False))
    if not fits or mask.dim() < 2:
        raise ValueError(
            f"attn_mask must have 2 to 4 dimensions that can be broadcast to (batch, heads, queries, keys) = {full}, "
            f"not {_shape(mask)}"
        )


def check_options(dropout_p: float, scale: float | None, softmax_mode: str, seq_padding: str) -> None:
    for name, number in (("dropout_p", dropout_p), ("scale", scale)):
        if not isinstance(number, (int, float)) and not (name == "scale" and number is None):
            raise TypeError(f"{name} must be a number, not {type(number).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be a probability from 0 to 1, not {dropout_p}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, or None for 1 / sqrt(head size), not {scale}")
    if softmax_mode not in SOFTMAX_MODES:
        raise ValueError(f'softmax_mode must be "exact" or "fast", not {softmax_mode!r}')
    if seq_padding not in PADDINGS:
        raise ValueError(f'seq_padding must be "left" or "right", not {seq_padding!r}')


def check_modes(query: Tensor, settings: Settings, training: bool, recompute: bool) -> None:
    """Raise TypeError or ValueError for a combination that the fused kernels do not have."""
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute must be True, False or None, not {recompute!r}")
    if settings.fast and query.dtype != torch.bfloat16:
        raise ValueError(f'softmax_mode="fast" is for bfloat16, not {query.dtype}: use "exact"')
    if settings.fast and training and recompute and not settings.causal:
        raise ValueError(
            'softmax_mode="fast" cannot train in recompute mode with is_causal=False: use "exact", or recompute=False'
        )
    if settings.want_dropout and recompute:
        raise ValueError("return_dropout_mask=True needs recompute=False: in recompute mode no dropout mask is kept")
    if settings.want_probabilities and training:
        raise ValueError("return_attn_probs=True is for inference: use torch.no_grad(), or inputs without gradients")
    if settings.want_probabilities and query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"return_attn_probs=True is for float32 and bfloat16, not {query.dtype}")


def check_lengths(
    lengths: Tensor | Sequence[int] | None, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> None:
    """Raise TypeError or ValueError for lengths that do not fit.

    Values on a device are not read, because that would wait for the device.
    """
    if lengths is None:
        return
    if not is_causal or mask is not None:
        raise ValueError("valid_seq_len needs is_causal=True and attn_mask=None")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"valid_seq_len needs as many keys as queries, not {key.shape[2]} and {query.shape[2]}")
    if isinstance(lengths, Tensor):
        if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
            raise ValueError(f"valid_seq_len must hold integers, not {lengths.dtype}")
        found = tuple(lengths.shape)
    elif isinstance(lengths, Sequence) and all(hasattr(n, "__index__") for n in lengths):
        found = (len(lengths),)
    else:
        raise TypeError("valid_seq_len must be a tensor or a list of integers, one for each batch element")
    if found != (query.shape[0],):
        raise ValueError(f"valid_seq_len must have one length for each of {query.shape[0]} batch elements, not {found}")
    if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
        return
    for length in lengths.tolist() if isinstance(lengths, Tensor) else lengths:
        if not 0 <= length <= query.shape[2]:
            raise ValueError(f"valid_seq_len must lie between 0 and the padded length {query.shape[2]}, not {length}")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


_LOCAL: Final[ContextVar[bool | None]] = ContextVar("stepscope_recompute_attention", default=None)
_everywhere = True


@contextmanager
def recompute_attention(enabled: bool) -> Iterator[None]:
    """Within the block, let `attention` recompute in its backward pass (True) or save more instead (False).

    It applies to this thread or asynchronous task alone; blocks can be nested. A `recompute` argument of `attention`
    wins, and is the one to use under `torch.compile`, because a switch read inside the function can break the graph.

    Raises:
        TypeError: `enabled` is neither True nor False.
    """
    token = _LOCAL.set(_checked(enabled))
    try:
        yield
    finally:
        _LOCAL.reset(token)


def set_recompute_attention(enabled: bool) -> None:
    """Set the mode for all threads of the process, until set again; a surrounding `recompute_attention` block wins.

    Raises TypeError if `enabled` is neither True nor False.
    """
    global _everywhere
    _everywhere = _checked(enabled)


def recompute_attention_enabled() -> bool:
    """Whether `attention` recomputes when called without `recompute`: True unless it was switched off."""
    local = _LOCAL.get()
    return _everywhere if local is None else local


def _checked(enabled: bool) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(f"recomputing attention takes True or False, not {enabled!r}")
    return enabled


def vendor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    settings: Settings,
    scale: float | None,
    recompute: bool,
    valid_seq_len: Tensor | Sequence[int] | None,
    seq_padding: str,
) -> Any:
    """Call `FusedSDPA.apply` with its arguments in the documented order.

    Source: Intel Gaudi documentation, "Using Fused Scaled Dot Product Attention (FusedSDPA)".

    Raises:
        RuntimeError: the vendor's package is not installed.
    """
    try:
        kernel = import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
    except ImportError as error:
        raise RuntimeError(
            "attention on an HPU needs habana_frameworks of the Intel Gaudi software, which cannot be imported"
        ) from error
    group = query.shape[1] // key.shape[1]
    if group > 1:  # the kernel needs as many key heads as heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    lengths = None
    if valid_seq_len is not None:
        lengths = torch.as_tensor(valid_seq_len, dtype=torch.int32).to(query.device)
    results = kernel.apply(
        query,
        key,
        value,
        attn_mask,
        settings.dropout_p,
        settings.causal,
        scale,
        "fast" if settings.fast else "None",
        recompute,
        lengths,
        seq_padding,
        settings.want_dropout,
        settings.want_probabilities,
    )
    if lengths is None:
        return results
    if isinstance(results, Tensor):
        return zero_padding(results, lengths, seq_padding)
    return (zero_padding(results[0], lengths, seq_padding), *results[1:])


_HAS_GROUPS: Final = "enable_gqa" in (scaled_dot_product_attention.__doc__ or "")
"""PyTorch 2.5 and later accept fewer key heads than query heads; before, they are repeated."""
_MATH: Final = 0
"""PyTorch's number for its attention that writes the scores out."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "exact",
    recompute: bool | None = None,
    valid_seq_len: Tensor | Sequence[int] | None = None,
    seq_padding: str = "left",
    return_dropout_mask: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute softmax(scale * query @ key^T + mask) @ value, without holding the scores.

    Outputs and gradients agree with the plain formula to 2e-5 in FP32 and 4e-2 in bfloat16, for values around 1.

    Args:
        query: (batch, heads, queries, head size).
        key: (batch, key heads, keys, head size); heads is a multiple of key heads (grouped-query attention).
        value: (batch, key heads, keys, size); on HPU and for PyTorch's fastest kernels, size must be the head size.
        attn_mask: boolean, True where a key is seen, or floats added to the scores, broadcastable to (batch, heads,
            queries, keys). Floats may need a gradient. A query that sees no key gets zeros.
        dropout_p: probability of zeroing an attention probability; pass 0.0 when not training.
        is_causal: query i sees keys 0 to i.
        scale: None for 1 / sqrt(head size).
        softmax_mode: "fast" allows scores and probabilities in bfloat16, for bfloat16 inputs, on the CPU and in the
            HPU's kernel; on CUDA it equals "exact". On a CPU the outputs' error is 0.5 % instead of 0.2 % for scores
            with a standard deviation of 1, and 1.1 % for 4 (`benchmarks/attention_error.py`). It is not always faster:
            no gain was measured in training.
        recompute: True recomputes in the backward pass where possible, False saves more for it; None asks
            `recompute_attention_enabled`. Under `torch.compile` give True or False.
        valid_seq_len: length without padding of each batch element, with is_causal=True and no mask. Padding costs no
            work, and has zeros in output and gradients. A tensor on CUDA is not waited for if Triton is present and
            dropout_p is 0; otherwise pass a list or a CPU tensor, which never waits.
        seq_padding: "left" or "right": where the padding is.
        return_dropout_mask: also return which probabilities dropout kept, (batch, heads, queries, keys), boolean here
            and in the kernel's own format on HPU. It is as large as the scores.
        return_attn_probs: also return the probabilities before dropout, of the same shape, in query's dtype.

    Returns:
        output (batch, heads, queries, value's size); or a tuple (output, probabilities), (output, dropout mask) or
        (output, probabilities, dropout mask), as requested.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments that do not fit each other, or a combination that a fused kernel lacks. The rules of
            Gaudi's FusedSDPA apply on every device, except that only the HPU refuses float16 and float64.
        RuntimeError: tensors are on an HPU and the vendor's package is missing.
    """
    query, key, value, attn_mask = _as_autocast(query, key, value, attn_mask)
    check_tensors(query, key, value)
    check_options(dropout_p, scale, softmax_mode, seq_padding)
    check_mask(attn_mask, query, key, is_causal)
    check_lengths(valid_seq_len, query, key, attn_mask, is_causal)
    recompute = recompute_attention_enabled() if recompute is None else recompute
    training = _needs_gradients(query, key, value, attn_mask)
    settings = Settings(
        scale=1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale),
        causal=is_causal,
        dropout_p=dropout_p,
        fast=softmax_mode == "fast",
        keep_dropout=training and not recompute,
        want_dropout=return_dropout_mask,
        want_probabilities=return_attn_probs,
    )
    check_modes(query, settings, training, recompute)
    if query.device.type == "hpu":
        return vendor_attention(query, key, value, attn_mask, settings, scale, recompute, valid_seq_len, seq_padding)
    if valid_seq_len is None:
        return _requested(_attend(query, key, value, attn_mask, settings, training and recompute))
    return _requested(_attend_valid(query, key, value, valid_seq_len, seq_padding, settings))


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _requested(results: Results) -> Any:
    """The output alone, or with the requested extras in the documented order."""
    found = tuple(each for each in results if each is not None)
    return found[0] if len(found) == 1 else found


def _as_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast as PyTorch's own attention does within torch.autocast: floats to the lower dtype."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) else "cpu"
    target = autocast_type(kind)
    if target is None:
        return tensors
    return tuple(
        each.to(target)
        if isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64
        else each
        for each in tensors
    )


def _attend_valid(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | Sequence[int], padding: str, settings: Settings
) -> Results:
    wants = settings.want_dropout or settings.want_probabilities
    if not wants and can_use_flex(query, lengths, settings.dropout_p):
        assert isinstance(lengths, Tensor)
        return attend_by_flex(query, key, value, lengths, padding, settings.scale), None, None
    numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    return attend_by_element(
        query, key, value, numbers, padding, lambda q, k, v: _attend(q, k, v, None, settings, recomputes=True)
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings, recomputes: bool
) -> Results:
    """Use one of PyTorch's kernels if one fits, else blocks."""
    if not key.shape[2]:
        return _without_keys(query, key, value, settings)
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    wants = settings.want_dropout or settings.want_probabilities or (settings.fast and query.device.type == "cpu")
    has_kernel = _is_transformed() or (
        not _copies(mask, query, key, recomputes) and _has_kernel(query, key, value, mask, settings)
    )
    if wants or not has_kernel:
        return block_attention(query, key, value, mask, settings)
    group = query.shape[1] // key.shape[1]
    more: dict[str, Any] = {}
    if group > 1 and _HAS_GROUPS:
        more["enable_gqa"] = True
    elif group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = scaled_dot_product_attention(
        query, key, value, mask, settings.dropout_p, settings.causal, scale=settings.scale, **more
    )
    return output, None, None


def _without_keys(query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Results:
    """Zeros for queries that see no key, connected to the graph of all three inputs."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-2, -1)
    probabilities = scores.detach() if settings.want_probabilities else None
    return scores @ value, probabilities, scores.bool() if settings.want_dropout else None


def _copies(mask: Tensor | None, query: Tensor, key: Tensor, recomputes: bool) -> bool:
    """Whether the CPU's kernel would turn a boolean mask into a float one as large as the scores, or one it keeps."""
    if mask is None or mask.dtype != torch.bool or query.device.type != "cpu" or mask.shape[-2] == 1:
        return False
    return recomputes or mask.numel() == query.shape[:-1].numel() * key.shape[2]


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings) -> bool:
    """Whether PyTorch has a kernel for this that does not write the scores out."""
    if query.device.type not in ("cpu", "cuda", "xpu"):
        return True  # such a device has only its own attention
    if _is_compiling():  # the check below would break the graph
        learns = mask is not None and mask.requires_grad
        return query.device.type != "cpu" or not (settings.dropout_p or learns or query.shape[-1] != value.shape[-1])
    more = {"enable_gqa": query.shape[1] != key.shape[1]} if _HAS_GROUPS else {}
    choice = torch._fused_sdp_choice(
        query, key, value, mask, settings.dropout_p, settings.causal, scale=settings.scale, **more
    )
    return int(choice) > _MATH


def _is_compiling() -> bool:
    asked = getattr(torch.compiler, "is_compiling", None)  # PyTorch 2.3 and later
    return asked is not None and bool(asked())


def _is_transformed() -> bool:
    """Whether torch.func's vmap or grad is active, which only PyTorch's own operators support."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())
