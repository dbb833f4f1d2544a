"""Attention against the formula written out: outputs and gradients, and what is returned beside."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import attention  # noqa: E402
from stepscope.remedies.fused_attention import blocks  # noqa: E402
from stepscope.remedies.fused_attention.blocks import attend_by_flex, block_mask  # noqa: E402
from tests.unit.remedies.attention_cases import (  # noqa: E402
    BF16,
    FP32,
    Watched,
    inputs,
    seen,
    valid_part,
    written_out,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_same(given: list[Any], dtype: Any, mask: Any = None, dropout_p: float = 0.0, **options: Any) -> None:
    """Outputs and all gradients are those of the formula in float64, with the dropout mask that came back."""
    ours = [each.to(dtype).requires_grad_() for each in given]
    exact = [each.detach().double().requires_grad_() for each in ours]
    learns = mask is not None and mask.requires_grad
    exact_mask = mask.detach().double().requires_grad_() if learns else mask
    result = attention(*ours, attn_mask=mask, dropout_p=dropout_p, **options)
    output, kept = result if isinstance(result, tuple) else (result, None)
    weights, values = written_out(*exact, exact_mask, options.get("is_causal", False), options.get("scale"))
    if kept is not None:
        weights = weights * kept / (1 - dropout_p)
    expected = weights @ values
    direction = torch.randn_like(expected)
    output.backward(direction.to(dtype))
    expected.backward(direction)
    assert output.dtype == dtype
    pairs = [(output, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    pairs += [(mask.grad, exact_mask.grad)] if learns else []
    tolerance = FP32 if dtype == torch.float32 else BF16
    for found, wanted in pairs:
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


CASES: dict[str, Any] = {
    "plain": lambda *_: {},
    "causal": lambda *_: {"is_causal": True},
    "scale": lambda *_: {"scale": 0.5},
    "boolean mask of each element": lambda batch, heads, length, keys: {"mask": seen(batch, 1, length, keys)},
    "boolean mask of all": lambda batch, heads, length, keys: {"mask": seen(length, keys)},
    "boolean mask of keys": lambda batch, heads, length, keys: {"mask": seen(batch, 1, 1, keys)},
    "boolean mask of every score": lambda batch, heads, length, keys: {"mask": seen(batch, heads, length, keys)},
    "numbers": lambda batch, heads, length, keys: {"mask": torch.randn(heads, length, keys)},
    "numbers that learn": lambda batch, heads, length, keys: {
        "mask": torch.randn(1, heads, length, keys).requires_grad_()
    },
    "no recomputing": lambda batch, heads, length, keys: {"mask": seen(length, keys), "recompute": False},
    "dropout": lambda *_: {"dropout_p": 0.2, "recompute": False, "return_dropout_mask": True},
    "causal dropout": lambda *_: {
        "dropout_p": 0.2,
        "recompute": False,
        "return_dropout_mask": True,
        "is_causal": True,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_formula(case: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for block, (heads, key_heads), (length, keys), size in itertools.product(
        (2**20, 2**12), ((4, 4), (6, 2)), ((48, 48), (33, 50)), (16, 24)
    ):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
        given = inputs((2, heads, length, 16), key_heads, keys, size)
        assert_same(given, dtype, **CASES[case](2, heads, length, keys))


def test_float64_is_exact_to_its_own_precision() -> None:
    query, key, value = (each.double() for each in inputs())
    weights, values = written_out(query, key, value)
    torch.testing.assert_close(attention(query, key, value, dropout_p=0.0), weights @ values)
    mask = torch.zeros(48, 48, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(attention(query, key, value, mask), weights @ values)


def test_a_transposed_layout_is_taken_as_it_is() -> None:
    given = [torch.randn(2, 48, 4, 16).transpose(1, 2) for _ in range(3)]
    assert_same(given, torch.float32, dropout_p=0.1, recompute=False, return_dropout_mask=True)
    assert_same([each.mT.contiguous().mT for each in inputs()], torch.float32)


@pytest.mark.parametrize("numbers", [False, True], ids=["boolean", "numbers"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saving", "recomputing"])
def test_a_query_that_sees_no_key_has_zeros(numbers: bool, recompute: bool) -> None:
    given = [each.requires_grad_() for each in inputs()]
    mask = torch.ones(48, 48, dtype=torch.bool)
    mask[7] = False
    if numbers:
        mask = torch.zeros(48, 48).masked_fill(~mask, -math.inf).requires_grad_(recompute)
    output = attention(*given, attn_mask=mask, recompute=recompute)
    output.sum().backward()
    assert not output[:, :, 7].any()
    assert not given[0].grad[:, :, 7].any()
    assert all(each.grad.isfinite().all() for each in given)
    torch.testing.assert_close(given[2].grad.sum(2), torch.full((3, 4, 16), 47.0))


def test_dropout_drops_as_often_as_it_was_told() -> None:
    query = torch.zeros(2, 4, 256, 8)
    output, kept = attention(
        query, query, torch.ones_like(query), dropout_p=0.25, recompute=False, return_dropout_mask=True
    )
    assert kept.shape == (2, 4, 256, 256)
    assert kept.dtype == torch.bool
    assert abs(kept.float().mean() - 0.75) < 0.005  # 8 standard deviations of 524,288 draws
    torch.testing.assert_close(output[..., 0], kept.float().mean(-1) / 0.75)


def test_dropout_follows_the_seed_and_its_backward_pass_sees_the_same_mask() -> None:
    def gradients(recompute: bool) -> list[Any]:
        torch.manual_seed(5)
        given = [torch.randn(2, 4, 64, 16).requires_grad_() for _ in range(3)]
        output = attention(*given, dropout_p=0.3, recompute=recompute)
        torch.rand(100)  # what else is drawn between must not matter
        output.square().sum().backward()
        return [output, *(each.grad for each in given)]

    recomputed, saved = gradients(True), gradients(False)
    assert all(torch.equal(a, b) for a, b in zip(recomputed, saved, strict=True))
    torch.manual_seed(6)
    assert not torch.equal(attention(*inputs(), dropout_p=0.3), attention(*inputs(), dropout_p=0.3))


def test_every_probability_can_be_dropped_and_none_need_be() -> None:
    given = [each.requires_grad_() for each in inputs()]
    output = attention(*given, dropout_p=1.0)
    output.sum().backward()
    assert not output.any()
    assert not any(each.grad.any() for each in given)
    output, kept = attention(*given, recompute=False, return_dropout_mask=True)
    assert kept.all()
    torch.testing.assert_close(output, attention(*given))


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_padding_is_zero_and_the_rest_is_as_if_it_were_not_there(padding: str, dtype: Any, as_tensor: bool) -> None:
    lengths = [48, 1, 30, 0]
    given = [each.to(dtype) for each in inputs((4, 4, 48, 16), key_heads=2)]
    parts = valid_part(lengths, 48, padding)
    for tensor in given:  # what stands in the padding must not matter
        for element, part in zip(tensor, parts, strict=True):
            padded = torch.ones(48, dtype=torch.bool)
            padded[part] = False
            element[:, padded] = math.nan
    ours = [each.clone().requires_grad_() for each in given]
    output = attention(
        *ours,
        is_causal=True,
        valid_seq_len=torch.tensor(lengths, dtype=torch.int32) if as_tensor else lengths,
        seq_padding=padding,
    )
    direction = torch.randn_like(output)
    output.backward(direction)
    wanted, wanted_grads = torch.zeros_like(output), [torch.zeros_like(each) for each in given]
    for number, part in enumerate(parts):
        alone = [each[number : number + 1, :, part].double().requires_grad_() for each in given]
        weights, values = written_out(*alone, causal=True)
        result = weights @ values
        result.backward(direction[number : number + 1, :, part].double())
        wanted[number, :, part] = result[0]
        for whole, each in zip(wanted_grads, alone, strict=True):
            whole[number, :, part] = each.grad[0]
    tolerance = FP32 if dtype == torch.float32 else BF16
    torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
    for one, expected in zip(ours, wanted_grads, strict=True):
        torch.testing.assert_close(one.grad, expected, rtol=tolerance, atol=tolerance)


def test_an_empty_batch_with_lengths_keeps_its_shape() -> None:
    query, key, value = torch.randn(0, 4, 5, 8), torch.randn(0, 2, 5, 8), torch.randn(0, 2, 5, 3)
    output, kept = attention(
        query, key, value, is_causal=True, valid_seq_len=[], recompute=False, return_dropout_mask=True
    )
    assert (tuple(output.shape), tuple(kept.shape)) == ((0, 4, 5, 3), (0, 4, 5, 5))


@pytest.mark.parametrize("masked", [False, True])
def test_queries_without_any_key_get_zeros(masked: bool) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 0, 8), torch.randn(2, 2, 0, 3)
    query.requires_grad_()
    mask = torch.zeros(5, 0) if masked else None
    output, weights = attention(query.detach(), key, value, mask, return_attn_probs=True)
    assert torch.equal(output, torch.zeros(2, 4, 5, 3))
    assert tuple(weights.shape) == (2, 4, 5, 0)
    attention(query, key, value, mask).sum().backward()
    assert torch.equal(query.grad, torch.zeros_like(query))


def test_padding_costs_no_work() -> None:
    given = inputs((2, 4, 256, 16), keys=256)
    with Watched() as watched:
        attention(*given, is_causal=True, valid_seq_len=[64, 16])
    kernels = [shapes for name, shapes in watched.calls if "flash_attention" in name]
    assert [shapes[0][2] for shapes in kernels] == [64, 16]


def test_lengths_go_with_dropout_probabilities_and_the_mask() -> None:
    given = inputs((2, 4, 48, 16))
    output, probabilities, kept = attention(
        *given,
        dropout_p=0.5,
        is_causal=True,
        recompute=False,
        valid_seq_len=[10, 48],
        seq_padding="right",
        return_dropout_mask=True,
        return_attn_probs=True,
    )
    weights, values = written_out(*(each[:1, :, :10] for each in given), causal=True)
    torch.testing.assert_close(probabilities[:1, :, :10, :10], weights)
    torch.testing.assert_close(output[:1, :, :10], weights * kept[:1, :, :10, :10] / 0.5 @ values)
    for each in (output[:1, :, 10:], probabilities[:1, :, 10:], probabilities[:1, ..., 10:], kept[:1, :, 10:]):
        assert not each.any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_blocks_that_cuda_is_given_cover_what_is_valid_and_no_more(padding: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    lengths = torch.tensor([300, 1, 170, 0, 128, 256])
    begin = 300 - lengths if padding == "left" else torch.zeros_like(lengths)
    end = begin + lengths
    blocks = block_mask(begin, end, 300)
    complete = flex.create_block_mask(blocks.mask_mod, 6, None, 300, 300, device="cpu")
    assert torch.equal(blocks.to_dense(), complete.to_dense())
    assert torch.equal(blocks.full_kv_num_blocks, complete.full_kv_num_blocks)
    given = inputs((6, 4, 300, 16), key_heads=2, keys=300)
    output = attend_by_flex(*given, lengths, padding, 0.25, flex=flex.flex_attention)
    wanted = attention(*given, is_causal=True, valid_seq_len=lengths, seq_padding=padding)
    torch.testing.assert_close(output, wanted, rtol=FP32, atol=FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_probabilities_come_second_and_the_dropout_mask_third(dtype: Any) -> None:
    given = [each.to(dtype) for each in inputs(key_heads=2)]
    weights, values = written_out(*(each.double() for each in given), causal=True)
    output, probabilities = attention(*given, is_causal=True, return_attn_probs=True)
    tolerance = FP32 if dtype == torch.float32 else BF16
    torch.testing.assert_close(probabilities.double(), weights, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(output.double(), weights @ values, rtol=tolerance, atol=tolerance)
    assert probabilities.dtype == dtype
    three = attention(
        *given, is_causal=True, dropout_p=0.5, recompute=False, return_dropout_mask=True, return_attn_probs=True
    )
    assert torch.equal(three[1], probabilities)  # before dropout
    assert three[2].dtype == torch.bool


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_fast_softmax_stays_within_its_stated_error(is_causal: bool) -> None:
    given = [each.bfloat16() for each in inputs((2, 4, 256, 64), keys=256, size=64)]
    ours = [each.clone().requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    output = attention(*ours, is_causal=is_causal, softmax_mode="fast", recompute=False)
    weights, values = written_out(*exact, causal=is_causal)
    expected = weights @ values
    direction = torch.randn_like(expected)
    output.backward(direction.bfloat16())
    expected.backward(direction)
    torch.testing.assert_close(output.double(), expected, rtol=0.03, atol=0.03)
    for one, other in zip(ours, exact, strict=True):
        relative = (one.grad.double() - other.grad).norm() / other.grad.norm()
        assert relative < 0.02
    ordinary = attention(*given, is_causal=is_causal)
    assert not torch.equal(output, ordinary)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_copies_of_a_model_can_go_through_vmap() -> None:
    given = [torch.randn(3, 2, 4, 16, 8) for _ in range(3)]
    found = torch.func.vmap(lambda *each: attention(*each, is_causal=True))(*given)
    weights, values = written_out(*(each.flatten(0, 1) for each in given), causal=True)
    torch.testing.assert_close(found, (weights @ values).view(found.shape), rtol=FP32, atol=FP32)
    dropped = torch.func.vmap(lambda *each: attention(*each, dropout_p=0.5), randomness="different")(*given)
    assert dropped.shape == found.shape
