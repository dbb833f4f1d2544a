"""Every combination of arguments that a fused kernel does not have is refused in one clear sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import attention  # noqa: E402
from tests.unit.remedies.attention_cases import seen  # noqa: E402

QUERY = torch.zeros(2, 4, 8, 16)
WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "no tensor": (TypeError, "key must be a tensor, not list", lambda q: attention(q, [1], q)),
    "three dimensions": (ValueError, "query must be \\(batch, heads", lambda q: attention(q[0], q, q)),
    "batch": (ValueError, "same batch size", lambda q: attention(q, q[:1], q[:1])),
    "lengths of key and value": (ValueError, "the same length", lambda q: attention(q, q, q[:, :, :5])),
    "heads of key and value": (ValueError, "same number of heads", lambda q: attention(q, q, q[:, :2])),
    "head size": (ValueError, "query and key must have the same head size", lambda q: attention(q, q[..., :8], q)),
    "heads": (ValueError, "heads must be a multiple", lambda q: attention(q, q[:, :3], q[:, :3])),
    "no heads": (ValueError, "heads must be a multiple", lambda q: attention(q, q[:, :0], q[:, :0])),
    "types": (ValueError, "same floating-point type", lambda q: attention(q, q.double(), q)),
    "integers": (ValueError, "same floating-point type", lambda q: attention(q.int(), q.int(), q.int())),
    "devices": (ValueError, "on the same device", lambda q: attention(q, q.to("meta"), q)),
    "mask and causal": (
        ValueError,
        "cannot be given together with is_causal",
        lambda q: attention(q, q, q, seen(8, 8), is_causal=True),
    ),
    "mask is a list": (TypeError, "attn_mask must be a tensor", lambda q: attention(q, q, q, [[True]])),
    "mask of integers": (
        ValueError,
        "attn_mask must be boolean",
        lambda q: attention(q, q, q, torch.ones(8, 8, dtype=torch.int64)),
    ),
    "mask of another shape": (ValueError, "can be broadcast to", lambda q: attention(q, q, q, seen(8, 7))),
    "mask of one dimension": (ValueError, "2 to 4 dimensions", lambda q: attention(q, q, q, seen(8))),
    "mask of five dimensions": (ValueError, "2 to 4 dimensions", lambda q: attention(q, q, q, seen(1, 2, 4, 8, 8))),
    "mask on another device": (
        ValueError,
        "on query's device cpu, not on meta",
        lambda q: attention(q, q, q, seen(8, 8).to("meta")),
    ),
    "dropout above 1": (ValueError, "probability from 0 to 1, not 1.5", lambda q: attention(q, q, q, dropout_p=1.5)),
    "dropout below 0": (ValueError, "probability from 0 to 1", lambda q: attention(q, q, q, dropout_p=-0.1)),
    "dropout as a word": (
        TypeError,
        "dropout_p must be a number, not str",
        lambda q: attention(q, q, q, dropout_p="0"),
    ),
    "scale as a tensor": (TypeError, "scale must be a number, not Tensor", lambda q: attention(q, q, q, scale=q)),
    "dropout nan": (ValueError, "probability from 0 to 1", lambda q: attention(q, q, q, dropout_p=math.nan)),
    "scale": (ValueError, "scale must be a finite number", lambda q: attention(q, q, q, scale=math.inf)),
    "softmax": (ValueError, '"exact" or "fast", not', lambda q: attention(q, q, q, softmax_mode="None")),
    "padding": (ValueError, '"left" or "right", not', lambda q: attention(q, q, q, seq_padding="both")),
    "recompute": (TypeError, "True, False or None, not 'yes'", lambda q: attention(q, q, q, recompute="yes")),
    "fast FP32": (ValueError, "is for bfloat16", lambda q: attention(q, q, q, softmax_mode="fast")),
    "fast training": (
        ValueError,
        "cannot train in recompute mode with is_causal=False",
        lambda q: attention(*[q.bfloat16().requires_grad_()] * 3, softmax_mode="fast"),
    ),
    "dropout mask while recomputing": (
        ValueError,
        "return_dropout_mask=True needs recompute=False",
        lambda q: attention(q, q, q, dropout_p=0.1, return_dropout_mask=True),
    ),
    "probabilities while training": (
        ValueError,
        "return_attn_probs=True is for inference",
        lambda q: attention(q.clone().requires_grad_(), q, q, return_attn_probs=True),
    ),
    "probabilities in FP16": (
        ValueError,
        "is for float32 and bfloat16, not torch.float16",
        lambda q: attention(q.half(), q.half(), q.half(), return_attn_probs=True),
    ),
    "lengths without causal": (
        ValueError,
        "needs is_causal=True and attn_mask=None",
        lambda q: attention(q, q, q, valid_seq_len=[8, 8]),
    ),
    "lengths and fewer keys": (
        ValueError,
        "as many keys as queries, not 5 and 8",
        lambda q: attention(q, q[:, :, :5], q[:, :, :5], is_causal=True, valid_seq_len=[5, 5]),
    ),
    "too few lengths": (
        ValueError,
        "one length for each of 2 batch elements",
        lambda q: attention(q, q, q, is_causal=True, valid_seq_len=[8]),
    ),
    "length above": (
        ValueError,
        "between 0 and the padded length 8, not 9",
        lambda q: attention(q, q, q, is_causal=True, valid_seq_len=torch.tensor([8, 9])),
    ),
    "length below": (
        ValueError,
        "between 0 and the padded length 8, not -1",
        lambda q: attention(q, q, q, is_causal=True, valid_seq_len=[8, -1]),
    ),
    "lengths in float": (
        ValueError,
        "must hold integers",
        lambda q: attention(q, q, q, is_causal=True, valid_seq_len=torch.tensor([8.0, 8.0])),
    ),
    "lengths are words": (
        TypeError,
        "a tensor or a list of integers",
        lambda q: attention(q, q, q, is_causal=True, valid_seq_len=["8", "8"]),
    ),
    "lengths are a number": (
        TypeError,
        "a tensor or a list of integers",
        lambda q: attention(q, q, q, is_causal=True, valid_seq_len=8),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_says_so(name: str) -> None:
    kind, message, call = WRONG[name]
    with pytest.raises(kind, match=message):
        call(QUERY)


def test_what_is_allowed_beside_what_is_not() -> None:
    half, short = QUERY.half().requires_grad_(), QUERY.bfloat16().requires_grad_()
    attention(half, half, half)
    attention(short, short, short, softmax_mode="fast", is_causal=True)
    attention(short, short, short, softmax_mode="fast", recompute=False)
    with torch.no_grad():
        attention(short, short, short, softmax_mode="fast", return_attn_probs=True)
    assert attention(QUERY, QUERY[:, :, :0], QUERY[:, :, :0]).shape == QUERY.shape
    assert attention(QUERY[:0], QUERY[:0], QUERY[:0], dropout_p=0.1).shape == (0, 4, 8, 16)
