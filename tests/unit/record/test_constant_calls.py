"""A look at functions of torch whose inputs are the same in each step."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from stepscope import guard
from stepscope.record import constant_calls, lines
from stepscope.record.constant_calls import STEPS, ConstantLook

torch = pytest.importorskip("torch")
buffer = torch.ones(16)


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the user's, and no other; whatever other tests have compiled is not the program's."""
    monkeypatch.setattr(constant_calls, "compiles", lambda: False)
    monkeypatch.setattr(lines, "_is_user", defaultdict(bool, {__file__: True}))


def looked(step: Callable[[int], object]) -> dict[str, list[str]]:
    """The constant calls that a look at steps finds, by function."""
    look = ConstantLook()
    look.start()
    for number in range(STEPS):
        step(number)
        look.border()
    assert look.is_over
    assert not torch._C._len_torch_function_stack()
    found = defaultdict(list)
    for each in look.facts():
        found[each.function] += [each.calls[place] for place in each.constant]
    return dict(found)


def positions(length: int) -> Any:
    table = torch.zeros(length, 4)
    angle = torch.arange(length)[:, None] * torch.tensor([1.0, 0.5])
    table[:, 0::2] = torch.sin(angle)
    return table


def with_batch(batch: Any) -> Any:
    return batch + torch.arange(16) * 2


def written_later(batch: Any) -> Any:
    result = torch.zeros(16)
    result[:] = batch
    return result


def of_a_buffer(batch: Any) -> Any:
    return buffer.cumsum(0) * batch


def counted(number: int) -> Any:
    return torch.arange(16) + number


def noise() -> Any:
    return torch.zeros(16).normal_() + torch.rand(16)


def test_what_comes_only_from_numbers_is_constant() -> None:
    found = looked(lambda _: positions(8))
    assert found == {"positions": ["zeros", "arange", "__getitem__", "tensor", "mul", "sin", "__setitem__"]}


def test_what_depends_on_the_batch_is_not() -> None:
    assert looked(lambda number: with_batch(torch.full((16,), number))) == {"with_batch": ["arange", "mul"]}


def test_numbers_and_shapes_are_compared() -> None:
    assert looked(lambda number: positions(8 + number)) == {"positions": ["tensor"]}
    assert looked(counted) == {"counted": ["arange"]}


def test_what_is_written_into_belongs_to_the_result() -> None:
    assert looked(lambda number: written_later(torch.full((16,), number))) == {}
    assert looked(lambda _: noise()) == {}


def test_a_kept_tensor_is_constant_as_long_as_nothing_changes_it() -> None:
    batches = [torch.full((16,), number) for number in range(STEPS)]
    assert looked(lambda number: of_a_buffer(batches[number])) == {"of_a_buffer": ["cumsum"]}
    assert looked(lambda number: of_a_buffer(batches[0])) == {}  # one step again and again

    def changing(number: int) -> None:
        of_a_buffer(batches[number])
        buffer.data.add_(1)

    assert looked(changing) == {}


def test_a_trained_weight_is_not_constant_but_one_without_a_graph_is() -> None:
    weight = torch.nn.Parameter(torch.ones(16))
    batches = [torch.full((16,), number) for number in range(STEPS)]

    def merged(number: int) -> Any:
        return (weight * 2) * batches[number]

    assert looked(merged) == {}
    with torch.no_grad():
        assert looked(merged) == {"merged": ["mul"]}


def test_a_program_that_watches_functions_is_left_alone() -> None:
    look = ConstantLook()
    with torch.device("cpu"):
        look.start()
        assert look.is_over


def test_a_watch_under_another_one_is_removed_and_that_one_stays() -> None:
    look = ConstantLook()
    look.start()
    with torch.device("cpu"):
        for _ in range(STEPS):
            look.border()
        assert look.is_over
        assert torch._C._len_torch_function_stack() == 1
    assert not torch._C._len_torch_function_stack()


def test_errors_of_the_program_pass() -> None:
    look = ConstantLook()
    look.start()
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.ones(2) + torch.ones(3)
        if sys.version_info >= (3, 11):  # see stepscope.guard.hide
            assert not any(str(each.path).endswith("record/constant_calls.py") for each in raised.traceback)
    finally:
        look.stop()


def test_modules_choose_the_same_functions_as_without_the_look() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    inputs = torch.ones(2, 6, 16)
    padding = torch.tensor([[False] * 4 + [True] * 2] * 2)
    encoder = torch.nn.TransformerEncoder(layer, 1)
    results = []
    with torch.no_grad():
        looked(lambda _: results.append(encoder(inputs, src_key_padding_mask=padding)))
        assert all(each.equal(encoder(inputs, src_key_padding_mask=padding)) for each in results)


def test_a_mode_that_the_program_has_put_above_stays_when_the_look_ends() -> None:
    from torch.overrides import TorchFunctionMode

    class Own(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    look = ConstantLook()
    look.start()
    with Own():
        look.stop()
        assert torch._C._len_torch_function_stack() == 1


def test_the_look_ends_when_something_is_compiled() -> None:
    look = ConstantLook()
    original = torch.compile
    look.start()
    compiled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    assert look.is_over
    assert not torch._C._len_torch_function_stack()
    assert torch.compile is original
    assert torch.equal(compiled(buffer), buffer * 2)


@pytest.mark.fails
def test_what_is_compiled_is_compiled_if_the_look_cannot_end() -> None:
    def probe(entered: str) -> None:
        if entered == "record.constant_calls.ConstantLook.compiles":
            raise RuntimeError("planted")

    look = ConstantLook()
    look.start()
    guard.probe = probe
    compiled = torch.compile(lambda x: x * 3, backend="eager")
    guard.probe = None
    look.take_off()

    assert guard.has_failed()
    assert torch.equal(compiled(buffer), buffer * 3)


def test_a_look_that_no_step_ends_takes_itself_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_calls, "_MOST_NOTED", 5)
    overrides = sys.modules["torch.overrides"]
    original = overrides.has_torch_function
    for until_s in (float("inf"), 0.0):
        look = ConstantLook()
        look.start(until_s)
        for _ in range(8):
            buffer + 1
        assert (torch._C._len_torch_function_stack(), sys.getprofile()) == (0, None)
        assert overrides.has_torch_function is original


def test_a_look_that_another_thread_ends_leaves_its_own_thread_soon() -> None:
    from torch.overrides import TorchFunctionMode

    class Own(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    look = ConstantLook()
    look.start()
    other = threading.Thread(target=look.stop)
    other.start()
    other.join()
    assert look._noted == 0
    with Own():
        buffer + 1
        assert torch._C._len_torch_function_stack() == 1
    assert (look._noted, torch._C._len_torch_function_stack(), sys.getprofile()) == (0, 0, None)


@pytest.mark.fails
def test_a_watch_that_cannot_leave_stays_without_effect() -> None:
    def probe(entered: str) -> None:
        if entered == "record.constant_calls.ConstantLook.leave":
            raise RuntimeError("planted")

    look = ConstantLook()
    look.start()
    look.is_over = True
    guard.probe = probe
    result = buffer + 1
    guard.probe = None

    assert guard.has_failed()
    assert (look._noted, sys.getprofile(), float(result.sum())) == (0, None, float((buffer + 1).sum()))
    look.take_off()


def test_inputs_of_products_that_are_mostly_zeros_are_counted_where_they_need_no_gradient() -> None:
    table, weight = torch.zeros(64, 512), torch.zeros(512, 512, requires_grad=True)
    table[torch.arange(64), torch.arange(64)] = 1

    def step(number: int) -> None:
        torch.nn.functional.linear(table, weight)
        torch.ones(64, 512) @ weight
        table.to("meta") @ weight.to("meta")  # has no values
        table * table

    look = ConstantLook()
    look.start()
    for number in range(STEPS):
        step(number)
        look.border()

    [facts] = look.sparse
    assert (facts.file, facts.shape, facts.nonzero) == (__file__, (64, 512), 64)
    assert facts.line == step.__code__.co_firstlineno + 1
