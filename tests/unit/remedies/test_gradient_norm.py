"""clip_grad_norm gives what torch.nn.utils.clip_grad_norm_ gives, and never waits for a device."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from stepscope.remedies import clip_grad_norm  # noqa: E402


def parameters(*dtypes: Any, size: float = 1.0) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(12):
        shape = [(7, 5), (40,), (), (3, 1, 4)][index % 4]
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[index % len(dtypes)]))
        parameter.grad = (torch.randn(shape, generator=generator) * size).to(parameter.dtype)
        made.append(parameter)
    made[5].grad = None
    return made


def gradients(given: list[Any]) -> list[Any]:
    return [parameter.grad for parameter in given if parameter.grad is not None]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64,), (torch.float32, torch.float64)])
def test_bit_by_bit_what_torch_does(dtypes: tuple[Any, ...], max_norm: float, norm_type: float) -> None:
    mine, reference = parameters(*dtypes), parameters(*dtypes)
    norm = clip_grad_norm(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(mine), gradients(reference), rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,), (torch.float16,), (torch.float32, torch.bfloat16, torch.float16)]
)
def test_narrow_gradients_have_an_exact_norm(dtypes: tuple[Any, ...]) -> None:
    """The norm to 1e-6 of the one in float64, the gradients to their type's eps; torch's is off by 1e-3 in bf16."""
    given = parameters(*dtypes)
    exact = [gradient.double() for gradient in gradients(given)]
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in exact))
    norm = clip_grad_norm(given, 0.5)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    for clipped, before in zip(gradients(given), exact, strict=True):
        torch.testing.assert_close(
            clipped.double(), before * 0.5 / expected, rtol=2 * torch.finfo(clipped.dtype).eps, atol=0
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norms_that_are_not_finite_go_on_as_in_torch(bad: float) -> None:
    mine, reference = parameters(torch.float32), parameters(torch.float32)
    mine[0].grad[0, 0] = reference[0].grad[0, 0] = bad
    torch.testing.assert_close(
        (clip_grad_norm(mine, 1.0), *gradients(mine)),
        (torch.nn.utils.clip_grad_norm_(reference, 1.0), *gradients(reference)),
        equal_nan=True,
        rtol=0,
        atol=0,
    )


def test_nothing_to_clip() -> None:
    assert float(clip_grad_norm([], 1.0)) == 0.0
    assert float(clip_grad_norm([torch.nn.Parameter(torch.ones(3))], 1.0)) == 0.0
    empty = torch.nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    assert float(clip_grad_norm([empty], 1.0)) == 0.0
    assert float(clip_grad_norm([empty], 1.0, math.inf)) == 0.0


def test_one_parameter_and_a_generator_are_taken_too() -> None:
    one = torch.nn.Parameter(torch.zeros(4))
    one.grad = torch.full((4,), 3.0)
    assert float(clip_grad_norm(one, 3.0)) == 6.0
    torch.testing.assert_close(one.grad, torch.full((4,), 1.5))
    assert float(clip_grad_norm((each for each in [one]), 10.0)) == pytest.approx(3.0)


def test_sparse_gradients_are_summed_before_they_are_measured() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True, _weight=torch.ones(5, 2))
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert float(clip_grad_norm(table.parameters(), 1.0)) == pytest.approx(math.sqrt(2 * 4 + 2))
    dense = table.weight.grad.to_dense()
    assert float(dense.norm()) == pytest.approx(1.0, abs=1e-5)
    assert float(dense[1, 0] / dense[3, 0]) == pytest.approx(2.0)


class Operators(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_no_operator_waits_for_a_device_or_works_on_one_gradient() -> None:
    """On the meta device, where a number cannot be read at all; as many operators for 100 gradients as for 12."""
    counts = []
    for repeated in (1, 9):
        given = [torch.nn.Parameter(torch.zeros(3, device="meta")) for _ in range(12 * repeated)]
        for parameter in given:
            parameter.grad = torch.zeros(3, device="meta")
        with Operators() as seen:
            clip_grad_norm(given, 1.0)
        assert not [name for name in seen.names if "local_scalar" in name or "nonzero" in name]
        counts.append(len([name for name in seen.names if "foreach" in name]))
    assert counts == [2, 2]


def test_gradients_on_a_cpu_that_need_no_clipping_are_not_written() -> None:
    given = parameters(torch.float32)
    with Operators() as seen:
        clip_grad_norm(given, 1e6)
    assert not [name for name in seen.names if "foreach_mul" in name]


def test_nonsense_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"takes parameters, not Linear; give it model\.parameters\(\)"):
        clip_grad_norm(torch.nn.Linear(2, 2), 1.0)
    with pytest.raises(TypeError, match=r"takes parameters, not float$"):
        clip_grad_norm(3.0, 1.0)
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must be 0 or more"):
            clip_grad_norm([], wrong)
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            clip_grad_norm([], 1.0, wrong)
    with pytest.raises(ValueError, match="norm_type must be above 0"):
        clip_grad_norm([], 1.0, "two")  # type: ignore[arg-type]


def test_the_largest_value_may_be_asked_for_by_its_name() -> None:
    given = parameters(torch.float32)
    assert clip_grad_norm(given, math.inf, "inf") == clip_grad_norm(given, math.inf, math.inf)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_waits() -> None:
    given = parameters(torch.float32, torch.bfloat16)
    for parameter in given:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.cuda()
        parameter.grad = None if gradient is None else gradient.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = clip_grad_norm(given, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(torch.nn.utils.get_total_norm(gradients(given))) == pytest.approx(0.5, rel=0.01)
    assert float(norm) > 0.5
