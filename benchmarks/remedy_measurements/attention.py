"""attention() beside the formula written out and beside itself in other modes.

On a CPU the processor time of the one thread is counted, so that programs beside this one do not.
"""

from __future__ import annotations

from typing import Final

from remedy_measurements import Measurement

_INPUTS: Final = """
if device() == "cpu":
    time.perf_counter_ns = time.thread_time_ns
from stepscope.remedies import attention
def inputs(batch, heads, length, size=64, dtype=torch.float32, training=True):
    return [torch.randn(batch, heads, length, size, dtype=dtype, device=device(), requires_grad=training)
            for _ in range(3)]
def written_out(query, key, value, causal=False, dropout=0.0):
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if causal:
        length = query.shape[-2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.nn.functional.dropout(torch.softmax(scores, -1), dropout)
    return weights @ value
def trained(attend):
    def step():
        attend().sum().backward()
        for each in given:
            each.grad = None
    return step
"""


def _case(what: str, inputs: str, without: str, with_remedy: str, *, training: bool = True) -> Measurement:
    """Both programs: the inputs, and what is called on them."""
    programs = [
        f"{_INPUTS}\ngiven = inputs({inputs}, training={training})\n"
        + (f"measured(trained(lambda: {call}))\n" if training else f"measured(lambda: {call})\n")
        for call in (without, with_remedy)
    ]
    return Measurement("attention", what, *programs)


MEASUREMENTS: Final = (
    *(
        _case(
            f"training, 8 heads of 64, length {length:,}, FP32; without: written out",
            f"1, 8, {length}",
            "written_out(*given)",
            "attention(*given)",
        )
        for length in (512, 1024, 2048)
    ),
    _case(
        "causal training, length 2,048, FP32; without: written out",
        "1, 8, 2048",
        "written_out(*given, causal=True)",
        "attention(*given, is_causal=True)",
    ),
    _case(
        "causal training, length 1,024, bfloat16; without: written out",
        "1, 8, 1024, 64, torch.bfloat16",
        "written_out(*given, causal=True)",
        "attention(*given, is_causal=True)",
    ),
    _case(
        "training with dropout, length 1,024, FP32; without: written out",
        "1, 8, 1024",
        "written_out(*given, dropout=0.1)",
        "attention(*given, dropout_p=0.1)",
    ),
    _case(
        "training with dropout, length 1,024, FP32; without: PyTorch's own",
        "1, 8, 1024",
        "torch.nn.functional.scaled_dot_product_attention(*given, dropout_p=0.1)",
        "attention(*given, dropout_p=0.1)",
    ),
    _case(
        "no-recompute mode, dropout, length 1,024, FP32; without: recompute mode",
        "1, 8, 1024",
        "attention(*given, dropout_p=0.1, recompute=True)",
        "attention(*given, dropout_p=0.1, recompute=False)",
    ),
    _case(
        "no-recompute mode, boolean mask, length 1,024, FP32; without: recompute mode",
        "1, 8, 1024",
        "attention(*given, attn_mask=torch.ones(1024, 1024, dtype=torch.bool, device=device()), recompute=True)",
        "attention(*given, attn_mask=torch.ones(1024, 1024, dtype=torch.bool, device=device()), recompute=False)",
    ),
    _case(
        "valid lengths 1,024, 512, 256 and 128, causal training, FP32; without: padded to 1,024",
        "4, 8, 1024",
        "attention(*given, is_causal=True)",
        "attention(*given, is_causal=True, valid_seq_len=[1024, 512, 256, 128], seq_padding='right')",
    ),
    *(
        _case(
            f"fast softmax, length {length:,}, bfloat16, inference; without: exact",
            f"1, 8, {length}, 64, torch.bfloat16",
            "attention(*given)",
            "attention(*given, softmax_mode='fast')",
            training=False,
        )
        for length in (512, 2048)
    ),
    _case(
        "fast softmax, length 1,024, bfloat16, training, no recomputing; without: exact",
        "1, 8, 1024, 64, torch.bfloat16",
        "attention(*given, recompute=False)",
        "attention(*given, softmax_mode='fast', recompute=False)",
    ),
    _case(
        "fast softmax, length 1,024, bfloat16, causal training; without: exact",
        "1, 8, 1024, 64, torch.bfloat16",
        "attention(*given, is_causal=True)",
        "attention(*given, is_causal=True, softmax_mode='fast')",
    ),
)
