"""Cross entropy in blocks: torch's losses and gradients, and no tensor as large as all scores."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy, linear  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from stepscope.remedies import chunked_cross_entropy, linear_cross_entropy  # noqa: E402

POSITIONS, WIDTH, CLASSES = 37, 12, 50
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.2, "reduction": "none"},
    {"weight": True, "label_smoothing": 0.2, "ignore_index": 3},
]


def numbers(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2
    return made.to(dtype or torch.float32).requires_grad_()


def targets(options: dict[str, Any], *shape: int) -> Any:
    made = torch.randint(0, CLASSES, shape or (POSITIONS,), generator=torch.Generator().manual_seed(9))
    made.view(-1)[::5] = options.get("ignore_index", -100)
    return made


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options with numbers for the class weights."""
    if not options.get("weight"):
        return options
    return {**options, "weight": torch.rand(CLASSES, generator=torch.Generator().manual_seed(4))}


def upstream(loss: Any) -> Any:
    return torch.linspace(0.5, 2.0, loss.numel()).reshape(loss.shape).to(loss.dtype)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunked_in_fp32_is_torchs(options: dict[str, Any], keep: bool) -> None:
    """Loss and gradient to 1e-6."""
    logits, reference = numbers(POSITIONS, CLASSES), numbers(POSITIONS, CLASSES)
    target = targets(options)
    expected = cross_entropy(reference, target, **given(options))
    expected.backward(upstream(expected))
    copy = logits * 1.0
    before = copy.detach().clone()
    loss = chunked_cross_entropy(copy, target, **given(options), chunk_size=8, keep_logits=keep)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy, before)
    loss.backward(upstream(loss))
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(copy, before) == keep
    if not keep:
        torch.testing.assert_close(copy.detach(), reference.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunked_in_narrow_types_is_fp32s_rounded_once(options: dict[str, Any], dtype: Any) -> None:
    """The loss to 1e-6 of FP32's of the same logits, the gradient to the type's eps."""
    logits = numbers(POSITIONS, CLASSES, dtype=dtype)
    reference = logits.detach().float().requires_grad_()
    target = targets(options)
    expected = cross_entropy(reference, target, **given(options))
    expected.backward(upstream(expected))
    loss = chunked_cross_entropy(logits * 1.0, target, **given(options), chunk_size=8)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward(upstream(loss))
    torch.testing.assert_close(logits.grad.float(), reference.grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_linear_in_fp32_is_torchs(options: dict[str, Any], with_bias: bool) -> None:
    """Loss and gradients to 1e-5."""
    inputs, references = ([numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)] for _ in range(2))
    if with_bias:
        for each in (inputs, references):
            each.append(numbers(CLASSES, seed=2))
    target, options = targets(options), given(options)
    expected = cross_entropy(linear(*references), target, **options)
    expected.backward(upstream(expected))
    named = {"class_weight" if name == "weight" else name: value for name, value in options.items()}
    loss = linear_cross_entropy(inputs[0], inputs[1], target, *inputs[2:], **named, chunk_size=8)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward(upstream(loss))
    for found, wanted in zip(inputs, references, strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_in_bf16_is_near_fp32s(reduction: Any) -> None:
    """Of the same bf16 numbers: the loss to 1 % of itself, gradients to 2 % of their largest, as torch's in bf16."""
    inputs = [numbers(POSITIONS, WIDTH, dtype=torch.bfloat16), numbers(CLASSES, WIDTH, seed=1, dtype=torch.bfloat16)]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    target = targets({})
    expected = cross_entropy(linear(*exact), target)
    expected.backward()
    loss = linear_cross_entropy(*inputs, target, reduction=reduction, chunk_size=8)
    loss = loss.sum() / (target != -100).sum() if reduction == "none" else loss
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.01)
    loss.backward()
    for found, wanted in zip(inputs, exact, strict=True):
        assert found.grad.dtype == torch.bfloat16
        assert float((found.grad.float() - wanted.grad).abs().max()) < 0.02 * float(wanted.grad.abs().max())


def test_the_weights_gradient_is_summed_in_fp32() -> None:
    """Forty times 0.5 to a gradient of 256; a sum in bf16 would stay where it is."""
    hidden = torch.ones(41, 1, dtype=torch.bfloat16)
    hidden[0] = 512
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(41, dtype=torch.long), reduction="sum", chunk_size=1).backward()
    assert weight.grad.flatten().tolist() == [-276.0, 276.0]


@pytest.mark.parametrize("function", ["chunked", "linear", "linear none"])
def test_z_loss(function: str) -> None:
    """To 1e-5 of the formula, differentiated by autograd."""
    hidden, weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    other, other_weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    target = targets({})
    scores = linear(other, other_weight)
    counted = target != -100
    expected = cross_entropy(scores, target) + 0.01 * torch.logsumexp(scores, -1)[counted].square().mean()
    expected.backward()
    if function == "chunked":
        loss = chunked_cross_entropy(linear(hidden, weight), target, z_loss=0.01)
    elif function == "linear":
        loss = linear_cross_entropy(hidden, weight, target, z_loss=0.01, chunk_size=10)
    else:
        losses = linear_cross_entropy(hidden, weight, target, z_loss=0.01, reduction="none", chunk_size=10)
        loss = losses.sum() / counted.sum()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=1e-4, atol=1e-5)


def test_float64_gradients_are_those_of_finite_differences() -> None:
    def double(*shape: int) -> Any:
        return numbers(*shape, seed=len(shape)).detach().double().requires_grad_()

    target = torch.tensor([0, 3, -100, 1, 2])
    options: dict[str, Any] = {"chunk_size": 2, "label_smoothing": 0.1, "z_loss": 0.1}
    torch.autograd.gradcheck(
        lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, target, bias, reduction="none", **options),
        (double(5, 3), double(4, 3), double(4)),
    )
    torch.autograd.gradcheck(
        lambda logits: chunked_cross_entropy(logits, target, keep_logits=True, **options), (double(5, 4),)
    )


@pytest.mark.parametrize("shape", [(), (1,), (3, 7), (2, 3, 4)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_positions_may_have_any_shape(shape: tuple[int, ...], reduction: Any) -> None:
    torch.manual_seed(0)
    logits = torch.randn(*shape, CLASSES)
    target = torch.randint(0, CLASSES, shape)
    expected = cross_entropy(logits.reshape(-1, CLASSES), target.reshape(-1), reduction=reduction)
    found = chunked_cross_entropy(logits, target, reduction=reduction)
    identity = torch.eye(CLASSES)
    through = linear_cross_entropy(logits, identity, target, reduction=reduction)
    for loss in (found, through):
        assert loss.shape == (shape if reduction == "none" else ())
        torch.testing.assert_close(loss.reshape(expected.shape), expected)


def test_a_shifted_view_is_neither_copied_nor_written_beyond_its_part() -> None:
    base, reference = numbers(2, 6, CLASSES), numbers(2, 6, CLASSES)
    logits = base * 1.0
    before = logits.detach().clone()
    target = targets({}, 2, 5)
    chunked_cross_entropy(logits[:, :-1], target).backward()
    cross_entropy(reference[:, :-1].reshape(-1, CLASSES), target.reshape(-1)).backward()
    torch.testing.assert_close(base.grad, reference.grad)
    assert torch.equal(logits[:, -1], before[:, -1])


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """Elements of the largest memory that an operator has made, but for memory that was there before."""

    def __init__(self, *known: Any) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self.elements = 0
        self._kept: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
                self._kept.append(tensor.untyped_storage())  # so that no address is used twice
        return made


@pytest.mark.parametrize(
    ("reduction", "dtype"), [*itertools.product(["mean", "none"], [torch.float32, torch.bfloat16])]
)
def test_linear_makes_no_tensor_of_positions_by_classes(reduction: Any, dtype: Any) -> None:
    hidden, weight = numbers(512, 4, dtype=dtype), numbers(300, 4, seed=1, dtype=dtype)
    target = torch.arange(512) % 300
    with Largest(hidden, weight) as seen:
        linear_cross_entropy(hidden, weight, target, reduction=reduction, label_smoothing=0.1).sum().backward()
    assert seen.elements == 128 * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_makes_none_but_the_one_it_is_given(dtype: Any) -> None:
    logits = numbers(512, 300, dtype=dtype) * 1.0
    target = torch.arange(512) % 300
    with Largest(logits) as seen:
        gradient = torch.autograd.grad(chunked_cross_entropy(logits, target, chunk_size=64), logits)[0]
    assert seen.elements <= 64 * 300
    assert gradient.data_ptr() == logits.data_ptr()


def test_padded_rows_of_the_weight_count_for_nothing() -> None:
    hidden, weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    padded = torch.cat([weight.detach(), torch.full((14, WIDTH), 7.0)]).requires_grad_()
    target = targets({})
    loss = linear_cross_entropy(hidden, padded, target, classes=CLASSES, label_smoothing=0.1)
    loss.backward()
    expected = cross_entropy(linear(hidden.detach(), weight), target, label_smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(padded.grad[:CLASSES], weight.grad)
    assert float(padded.grad[CLASSES:].abs().max()) == 0.0
    for keep in (False, True):
        logits = linear(hidden.detach(), padded.detach()).requires_grad_()
        loss = chunked_cross_entropy(logits * 1.0, target, classes=CLASSES, label_smoothing=0.1, keep_logits=keep)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(logits.grad[:, :CLASSES].t() @ hidden.detach(), weight.grad)
        assert float(logits.grad[:, CLASSES:].abs().max()) == 0.0


def test_under_autocast_products_are_narrow_and_parameters_get_gradients_in_their_own_type() -> None:
    hidden, weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    other, other_weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    target = targets({})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = cross_entropy(linear(other, other_weight), target)
        loss = linear_cross_entropy(hidden, weight, target)
        chunked = chunked_cross_entropy(linear(hidden.detach(), weight.detach()), target)
    expected.backward()
    loss.backward()
    torch.testing.assert_close((loss, chunked), (expected, expected), rtol=1e-5, atol=1e-5)
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=0.02, atol=2e-3)


def test_nothing_counts() -> None:
    """As in torch: the mean over no position is no number, and its gradient 0."""
    hidden, weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    target = torch.full((POSITIONS,), -100)
    for loss in (linear_cross_entropy(hidden, weight, target), chunked_cross_entropy(linear(hidden, weight), target)):
        assert bool(loss.isnan())
        loss.backward()
    assert float(hidden.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0
    empty = linear_cross_entropy(hidden[:0], weight, target[:0], reduction="sum")
    assert float(empty.detach()) == float(chunked_cross_entropy(torch.zeros(0, 4), target[:0], reduction="sum")) == 0.0


def test_a_scaled_loss_and_no_gradients() -> None:
    hidden, weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    other = numbers(POSITIONS, WIDTH)
    target = targets({})
    (linear_cross_entropy(hidden, weight, target) * 8.0).backward()
    (cross_entropy(linear(other, weight.detach()), target) * 8.0).backward()
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), Largest(hidden, weight) as seen:
        loss = linear_cross_entropy(hidden, weight, target, chunk_size=8)
    assert not loss.requires_grad
    assert seen.elements == 8 * CLASSES, "gradients were made that nobody asked for"


def test_a_second_backward_pass_says_what_to_do() -> None:
    hidden, weight = numbers(POSITIONS, WIDTH), numbers(CLASSES, WIDTH, seed=1)
    target = targets({})
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='has one backward pass; take reduction="none"'):
        loss.backward()
    loss = chunked_cross_entropy(hidden * 1.0, torch.zeros(POSITIONS, dtype=torch.long))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"were overwritten before its backward pass.*keep_logits=True"):
        loss.backward()


@pytest.mark.parametrize(("shape", "strides"), [((4, 5), (2, 1)), ((4, 5), (0, 1)), ((2, 3), (0, 4))])
def test_logits_that_share_memory_are_not_written_over(shape: tuple[int, int], strides: tuple[int, int]) -> None:
    targets = torch.arange(shape[0]) % shape[1]
    whole = torch.randn(20, generator=torch.Generator().manual_seed(0))
    gradients = []
    for function in (chunked_cross_entropy, torch.nn.functional.cross_entropy):
        given = whole.clone().requires_grad_()
        function((given * 1).as_strided(shape, strides), targets).backward()  # type: ignore[operator]
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


def test_what_else_needs_the_logits_is_not_given_wrong_ones() -> None:
    logits = numbers(POSITIONS, CLASSES) * 1.0
    squares = (logits**2).sum()
    chunked_cross_entropy(logits, targets({})).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


SMALL = (torch.zeros(3, 5), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        ((SMALL[0], torch.zeros(3, 5)), {}, TypeError, "target has to hold class numbers, not torch.float32; for prob"),
        (
            (SMALL[0], torch.zeros(5, dtype=torch.long)),
            {},
            ValueError,
            r"target of shape \(5,\) does not fit logits of \(3",
        ),
        (SMALL, {"reduction": "avg"}, ValueError, "reduction must be 'mean', 'sum' or 'none', not 'avg'"),
        (SMALL, {"label_smoothing": 1.5}, ValueError, "label_smoothing must be from 0 to 1, not 1.5"),
        (SMALL, {"weight": torch.ones(4)}, ValueError, r"class weights of shape \(4,\) for 5 classes"),
        (SMALL, {"chunk_size": 0}, ValueError, "chunk_size must be 1 or more, not 0"),
        (SMALL, {"z_loss": -1.0}, ValueError, "z_loss must be 0 or more"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(arguments: Any, options: Any, error: Any, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        chunked_cross_entropy(*arguments, **options)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"weight": torch.zeros(5, 7)}, r"weight of shape \(5, 7\) does not fit hidden of shape \(3, 4\)"),
        ({"bias": torch.zeros(4)}, r"bias of shape \(4,\) for 5 classes"),
        ({"classes": 6}, "classes must be from 1 to the 5 rows of weight, not 6"),
        ({"weight": torch.zeros(5, 4).bfloat16()}, "hidden is torch.float32, weight torch.bfloat16; convert"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    fitting = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "target": SMALL[1]}
    with pytest.raises(ValueError, match=sentence):
        linear_cross_entropy(**{**fitting, **changed})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_peak_has_no_room_for_all_scores() -> None:
    hidden = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 32000, (4096,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, target).backward()
    assert torch.cuda.max_memory_allocated() - before < 4096 * 32000 * 2 / 2
