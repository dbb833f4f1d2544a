"""What attention holds: never all scores, and between the passes nothing of their size when recomputing."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import attention  # noqa: E402
from tests.unit.remedies.attention_cases import Watched, seen, written_out  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


LONG = (2, 4, 512, 16)
SCORES, MASK = 2 * 4 * 512 * 512, 512 * 512
BLOCK = 2**18
"""Scores in a block, in FP32."""

HOLDING: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "boolean mask": lambda: {"attn_mask": seen(512, 512)},
    "boolean mask of every score": lambda: {"attn_mask": seen(2, 4, 512, 512)},
    "numbers that learn": lambda: {"attn_mask": torch.randn(512, 512).requires_grad_()},
    "dropout": lambda: {"dropout_p": 0.1},
    "lengths": lambda: {"is_causal": True, "valid_seq_len": [512, 300]},
    "lengths and dropout": lambda: {"is_causal": True, "valid_seq_len": [512, 300], "dropout_p": 0.1},
}


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputing", "saving"])
@pytest.mark.parametrize("case", HOLDING)
def test_no_tensor_of_all_scores_is_ever_made(case: str, recompute: bool) -> None:
    options = HOLDING[case]()
    given = [torch.randn(LONG).requires_grad_() for _ in range(3)]
    with Watched() as watched:
        attention(*given, recompute=recompute, **options).sum().backward()
    assert watched.largest <= BLOCK


def test_the_formula_written_out_does_make_one() -> None:
    given = [torch.randn(LONG).requires_grad_() for _ in range(3)]
    with Watched() as watched:
        weights, values = written_out(*given)
        (weights @ values).sum().backward()
    assert watched.largest == SCORES


def saved_between(options: dict[str, Any], recompute: bool) -> list[Any]:
    """What autograd holds between forward and backward pass, but for the inputs themselves."""
    given = [torch.randn(LONG).requires_grad_() for _ in range(3)]
    mask = options.get("attn_mask")
    own = {each.data_ptr() for each in (*given, mask) if each is not None}
    saved: list[Any] = []

    def pack(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(*given, recompute=recompute, **options)
    return [each for each in saved if each.data_ptr() not in own]


@pytest.mark.parametrize("case", HOLDING)
def test_recomputing_saves_nothing_of_the_size_of_scores(case: str) -> None:
    assert all(each.numel() < MASK for each in saved_between(HOLDING[case](), recompute=True))


def test_saving_holds_the_dropout_mask_in_bytes_and_a_boolean_mask_as_numbers() -> None:
    held = saved_between(HOLDING["dropout"](), recompute=False)
    assert {each.dtype for each in held} == {torch.uint8}
    assert sum(each.numel() for each in held) == SCORES
    held = saved_between(HOLDING["boolean mask"](), recompute=False)
    assert [tuple(each.shape[-2:]) for each in held if each.numel() >= MASK and each.dtype == torch.float32]
