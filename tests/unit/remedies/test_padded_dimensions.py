"""Padded dimensions give the same results, and no gradient to what was added."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import pad_dimension, pad_vocabulary, padded_size  # noqa: E402


def test_sizes() -> None:
    assert [padded_size(size) for size in (0, 1, 64, 65, 50257)] == [0, 64, 64, 128, 50304]
    assert padded_size(50257, 8) == 50264
    for wrong in ((-1, 8), (5, 0)):
        with pytest.raises(ValueError, match="a size of 0 or more and a multiple of 1 or more are expected"):
            padded_size(*wrong)


@pytest.mark.parametrize(("dim", "shape"), [(0, (8, 5, 3)), (1, (3, 8, 3)), (-1, (3, 5, 8))])
def test_a_dimension(dim: int, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(45.0).reshape(3, 5, 3).requires_grad_()
    padded = pad_dimension(tensor, dim, 8, value=-1.0)
    assert padded.shape == shape
    first = padded.narrow(dim, 0, tensor.shape[dim])
    assert torch.equal(first, tensor)
    assert set(padded.detach().flatten().tolist()) - set(tensor.detach().flatten().tolist()) == {-1.0}
    (padded * torch.arange(float(padded.numel())).reshape(shape)).sum().backward()
    expected = torch.arange(float(padded.numel())).reshape(shape).narrow(dim, 0, tensor.shape[dim])
    assert torch.equal(tensor.grad, expected)


def test_what_fits_is_left_alone() -> None:
    tensor = torch.zeros(3, 64)
    assert pad_dimension(tensor, 1) is tensor
    with pytest.raises(IndexError, match=r"a tensor of shape \(3, 64\) has no dimension 2"):
        pad_dimension(tensor, 2)


class Words(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, tied: bool, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(13, 4)
        self.head = torch.nn.Linear(4, 13, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Any) -> Any:
        return self.head(self.table(words).tanh())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary(tied: bool, bias: bool, dtype: Any) -> None:
    """Outputs and gradients to the rounding of another shape's matrix product; none in the padding, trained or not."""
    model, reference = Words(tied, bias).to(dtype), Words(tied, bias).to(dtype)
    assert pad_vocabulary(model.table, model.head, multiple=8) == 16
    assert (model.table.num_embeddings, model.head.out_features) == (16, 16)
    assert (model.head.weight is model.table.weight) == tied
    words, wanted = torch.tensor([[1, 2, 12], [0, 0, 3]]), torch.tensor([[2, 12, 1], [0, 3, 3]])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
    eps = 4 * torch.finfo(dtype).eps
    for _ in range(3):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(each(words).view(-1, 13), wanted.view(-1)).backward()
        for padded, plain in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(padded.grad[:13], plain.grad, rtol=10 * eps, atol=10 * eps)
            assert float(padded.grad[13:].abs().max()) == 0.0
        for optimizer in optimizers:
            optimizer.step()
        reference.load_state_dict({name: value[:13] for name, value in model.state_dict().items()})
    torch.testing.assert_close(model(words), reference(words), rtol=eps, atol=eps)
    assert all(float(parameter.detach()[13:].abs().max()) == 0.0 for parameter in model.parameters())


def test_models_can_be_copied_and_pickled_and_padded_again() -> None:
    model = Words(tied=True)
    pad_vocabulary(model.table, model.head, multiple=8)
    words = torch.tensor([1, 2])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(words), model(words))
    assert pad_vocabulary(model.table, model.head, multiple=8) == 16
    assert model(words).shape == (2, 13)
    assert pad_vocabulary(model.table, model.head, multiple=64) == 64
    assert model(words).shape == (2, 13)


def test_frozen_layers_and_scores_of_the_padding() -> None:
    head = torch.nn.Linear(4, 13).requires_grad_(False)
    pad_vocabulary(head, multiple=8, keep_padding=True)
    assert not head.weight.requires_grad
    assert head(torch.ones(2, 4))[:, 13:].tolist() == [[0.0] * 3] * 2


def test_nonsense_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Embedding and torch\.nn\.Linear can be padded, not Conv1d"):
        pad_vocabulary(torch.nn.Conv1d(2, 2, 1))
    with pytest.raises(ValueError, match=r"layers over the same words are expected, not over \[10, 13\]"):
        pad_vocabulary(torch.nn.Linear(4, 13), torch.nn.Embedding(10, 4))
    with pytest.raises(ValueError, match="not over none"):
        pad_vocabulary()
