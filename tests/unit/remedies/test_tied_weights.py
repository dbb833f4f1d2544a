"""Which weights are shared, whether they still are, and sharing them again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.remedies import check_tied, keeps_ties, tie_again, tied_parameters  # noqa: E402

WORDS = (("table.weight", "head.weight"),)


class Words(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4, device=device)
        self.body = torch.nn.Linear(4, 4, device=device)
        self.head = torch.nn.Linear(4, 10, bias=False, device=device)
        self.head.weight = self.table.weight

    def forward(self, words: Any) -> Any:
        return self.head(self.body(self.table(words)))


def test_nothing_is_shared_in_a_plain_model() -> None:
    assert tied_parameters(torch.nn.Linear(2, 2)) == ()
    assert tied_parameters(torch.nn.LSTM(3, 4, 2)) == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_parameter_under_two_names(device: str) -> None:
    model = Words(device)
    assert tied_parameters(model) == WORDS
    assert check_tied(model, WORDS) == ()
    assert check_tied(copy.deepcopy(model), WORDS) == ()
    assert check_tied(model.to(torch.bfloat16), WORDS) == ()


def test_two_parameters_over_one_memory() -> None:
    model = Words()
    model.head.weight = torch.nn.Parameter(model.table.weight.data)
    assert model.head.weight is not model.table.weight
    assert tied_parameters(model) == WORDS


def test_parts_of_one_buffer_are_not_shared() -> None:
    buffer = torch.zeros(8)
    model = torch.nn.ParameterList([torch.nn.Parameter(buffer[:4]), torch.nn.Parameter(buffer[4:])])
    assert tied_parameters(model) == ()


def test_a_module_in_two_places_and_three_names() -> None:
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    model.again = layer
    assert tied_parameters(model) == (("0.weight", "2.weight", "again.weight"), ("0.bias", "2.bias", "again.bias"))


def test_moving_from_the_meta_device_unties_and_tie_again_mends_it() -> None:
    model = Words("meta")
    before = tied_parameters(model)
    model.to_empty(device="cpu")
    assert check_tied(model, before) == WORDS, (
        "torch has begun to keep ties; the test has to find another way to lose them"
    )
    torch.nn.init.ones_(model.table.weight)
    with pytest.warns(UserWarning, match=r"head\.weight have different values; those of table\.weight are kept"):
        assert tie_again(model, before) == WORDS
    assert model.head.weight is model.table.weight
    assert check_tied(model, before) == ()
    assert tie_again(model, before) == ()
    model(torch.tensor([1, 2])).sum().backward()
    assert model.table.weight.grad is model.head.weight.grad is not None


def test_moving_that_makes_new_parameters_unties() -> None:
    """As torch does for devices whose tensors are of another kind, such as XLA's."""
    model = Words()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with keeps_ties(model) as kept:
            model.double()
            assert check_tied(model, kept) == WORDS
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert check_tied(model, WORDS) == ()
    assert model.head.weight.dtype == torch.float64


def test_loading_by_assignment_unties() -> None:
    model = Words()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    assert check_tied(model, WORDS) == WORDS
    assert tie_again(model, WORDS) == WORDS
    assert tied_parameters(model) == WORDS


def test_an_optimizer_made_after_updates_the_shared_weight_once() -> None:
    model = Words("meta").to_empty(device="cpu")
    model.head.weight.data.fill_(2.0)
    model.table.weight.data.fill_(1.0)
    with pytest.warns(UserWarning, match="different values"):
        tie_again(model, WORDS)
    assert len(list(model.parameters())) == 3
    assert float(model.head.weight.detach().max()) == 1.0


def test_names_that_wrappers_changed_are_found() -> None:
    model = Words()
    wrapped = torch.nn.DataParallel(model)
    assert tied_parameters(wrapped) == (("module.table.weight", "module.head.weight"),)
    assert check_tied(wrapped, WORDS) == ()
    model.head.weight = torch.nn.Parameter(model.table.weight.detach().clone())
    assert check_tied(wrapped, WORDS) == WORDS
    assert tie_again(wrapped, WORDS) == WORDS
    assert check_tied(model, [["module.table.weight", "module.head.weight"]]) == ()


def test_parametrized_weights() -> None:
    model = Words()
    torch.nn.utils.parametrizations.weight_norm(model.body)
    other = torch.nn.Linear(4, 4)
    torch.nn.utils.parametrizations.weight_norm(other)
    model.other = other
    other.parametrizations.weight.original1 = model.body.parametrizations.weight.original1
    names = ("body.parametrizations.weight.original1", "other.parametrizations.weight.original1")
    assert tied_parameters(model) == (("table.weight", "head.weight"), names)
    other.parametrizations.weight.original1 = torch.nn.Parameter(
        model.body.parametrizations.weight.original1.detach().clone()
    )
    assert tie_again(model, [names]) == (names,)
    assert check_tied(model, [names]) == ()


def test_a_transposed_view_cannot_be_made_anew() -> None:
    model = Words()
    model.head.weight = torch.nn.Parameter(torch.zeros(4, 10))
    with pytest.raises(
        ValueError, match=r"table\.weight of shape \(10, 4\) and head\.weight of shape \(4, 10\) cannot"
    ):
        tie_again(model, WORDS)


def test_nonsense_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"\(Linear\) has no parameter 'table\.weight'; pass what tied_parameters"):
        check_tied(torch.nn.Linear(2, 2), WORDS)
    with pytest.raises(TypeError, match="groups of names are expected"):
        check_tied(Words(), ["table.weight"])
    with pytest.raises(TypeError, match=r"those of a torch\.nn\.Module, not of list"):
        tied_parameters([torch.nn.Linear(2, 2)])
