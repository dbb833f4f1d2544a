"""A look at the values of a few steps: which results are equal in each step, or within one."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from typing import Any

import pytest

from stepscope import guard
from stepscope.record import constant_calls, lines
from stepscope.record.equal_values import STEPS, LookFacts, ValueLook, fingerprint
from stepscope.trace.program_facts import ValueFacts
from tests.unit.test_guard import fails

torch = pytest.importorskip("torch")
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the user's, and no other."""
    monkeypatch.setattr(lines, "_is_user", defaultdict(bool, {__file__: True}))


def looked(step: Any, look: ValueLook | None = None) -> dict[tuple[str, str], ValueFacts]:
    """The facts of a look at steps, by function or module and variable."""
    look = look or ValueLook()
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        for number in range(STEPS + constant_calls.STEPS):
            step(number)
            look.border()
        assert look.is_over
        assert sys.getprofile() is None
    finally:
        sys.setprofile(before)
    return {(each.module or each.function, each.name): each for each in look.facts().values}


def mask(size: int) -> list[list[int]]:
    return [[int(column <= row) for column in range(size)] for row in range(size)]


def noise(number: int) -> Any:
    shifted = torch.arange(16) + number
    return shifted * 2


def test_a_result_that_is_the_same_in_each_step_is_constant() -> None:
    found = looked(lambda number: (mask(9), noise(number)))

    assert (found["mask", ""].is_constant, found["noise", ""].is_constant) == (True, False)
    assert found["noise", "shifted"].is_constant is False
    assert (found["mask", ""].file, found["mask", ""].calls) == (__file__, 1)
    assert found["mask", ""].line < found["mask", ""].last


def test_a_look_that_forgets_looks_again_at_other_steps() -> None:
    look = ValueLook()
    requests = looked(lambda number: noise(number), look)
    look.forget()
    steps = looked(lambda number: mask(9), look)

    assert [("noise", "") in requests, ("noise", "") in steps, ("mask", "") in steps] == [True, False, True]


def test_equal_results_within_a_step_are_counted() -> None:
    found = looked(lambda number: [noise(number // 2 + each) for each in (0, 1, 1)])["noise", ""]
    assert (found.calls, found.distinct) == (3, 2)


def test_a_module_that_is_called_twice_with_equal_inputs_is_named_by_its_path() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.body(x) + self.body(x)

    net = Net()
    found = looked(lambda number: net(torch.ones(2, 8) * number))

    assert (found["Net.body", ""].calls, found["Net.body", ""].distinct) == (2, 1)
    assert found["Net.body", ""].is_constant is False


class Words:
    def __init__(self) -> None:
        self.known = [str(number) for number in range(100)]
        self.few = ["a", "b"]

    def find(self, word: str) -> bool:
        return word in self.known and word not in self.few


def test_long_lists_that_functions_reach_are_told_with_their_length() -> None:
    words, look = Words(), ValueLook()
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        words.find("7")
        look.border()
    finally:
        look.stop()
        sys.setprofile(before)

    line = Words.find.__code__.co_firstlineno
    assert [(each.name, each.length) for each in look.lists() if each.function == line] == [("self.known", 100)]


def test_what_each_step_makes_is_told_with_its_line() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(4, 4)

    kept, layers = Net(), torch.nn.ModuleList([Net(), Net()])

    def step(number: int) -> None:
        torch.optim.SGD(kept.parameters(), lr=0.1)
        if number:
            Net()
        layers[:1]  # a list of modules that are there

    look = ValueLook()
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        for number in (1, 1):
            step(number)
            look.border()
    finally:
        look.stop()
        sys.setprofile(before)

    first = step.__code__.co_firstlineno
    made = look.made.facts()
    assert [(each.kind, each.name, each.line - first, each.calls) for each in made] == [
        ("optimizer", "SGD", 1, 1),
        ("module", "Net", 3, 1),
    ]
    assert all(each.ns > 0 for each in made)


def test_a_look_that_another_profiler_precedes_does_nothing() -> None:
    before = sys.getprofile()

    def other(*_: object) -> None: ...

    look = ValueLook()
    sys.setprofile(other)
    try:
        look.start()
        assert sys.getprofile() is other
    finally:
        sys.setprofile(before)
    assert look.is_over
    assert look.facts() == LookFacts()


@fails
def test_a_failing_look_ends_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    look = ValueLook()
    monkeypatch.setattr(look, "_look", lambda *_: 1 / 0)
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        assert mask(3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        assert sys.getprofile() is None
    finally:
        sys.setprofile(before)
    assert guard._failed_in == "record.equal_values.ValueLook"


def test_what_is_small_or_foreign_has_no_fingerprint() -> None:
    assert [fingerprint(value) for value in (1, "text", None, [1, 2], object(), torch.ones(3))] == [None] * 6
    assert fingerprint([object()] * 9) is None


def one_changed(tensor: Any) -> Any:
    """A copy in which an element differs that none of the samples is."""
    copy = tensor.clone()
    copy[1, 1] += 1
    return copy


def test_equal_values_have_equal_fingerprints_and_others_do_not() -> None:
    large = torch.arange(3_000_000).reshape(3000, 1000)
    for one, same, other in (
        (torch.ones(9), torch.ones(9), torch.zeros(9)),
        (torch.ones(9), torch.ones(9).clone(), torch.ones(9).double()),
        (list(range(9)), list(range(9)), list(range(1, 10))),
        (torch.ones(4, 4).t(), torch.ones(4, 4), torch.ones(2, 8)),
        (large, large.clone(), large + 1),
        (large, large.clone(), one_changed(large)),
        (large.numpy(), large.clone().numpy(), one_changed(large).numpy()),
        ((torch.ones(9), torch.zeros(9)), (torch.ones(9), torch.zeros(9)), (torch.zeros(9), torch.ones(9))),
        (torch.ones(9).bfloat16(), torch.ones(9).bfloat16(), torch.ones(9).half()),
    ):
        assert fingerprint(one) == fingerprint(same) != fingerprint(other)
        assert fingerprint(one) is not None


class Held:
    """A value whose end shows."""


def test_a_look_keeps_no_variable_of_a_function_that_goes_on() -> None:
    look = ValueLook()
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        held, number = Held(), 1
        gone = weakref.ref(held)
        look.border()
        del held
        assert gone() is None
        assert (number, locals()["number"]) == (1, 1)  # the variables themselves stay
    finally:
        look.stop()
        sys.setprofile(before)


def test_a_program_that_watches_operators_does_not_see_ours() -> None:
    with FlopCounterMode(display=False) as counter:
        assert fingerprint(torch.ones(64, 64)) is None
    assert counter.get_total_flops() == 0
    assert fingerprint(torch.ones(64, 64)) is not None


def test_an_iterator_of_losses_is_not_consumed() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    looked(lambda _: torch.autograd.backward(each for each in [(weight * 2).sum()]))
    assert weight.grad is not None


def test_a_dictionary_of_locals_that_the_program_holds_stays_as_it_is() -> None:
    def settings(rate: float) -> dict[str, Any]:
        found = locals()
        _ = rate * 2
        return found

    found = []
    looked(lambda _: found.append(list(settings(0.1))))
    assert set(map(tuple, found)) == {("rate",)}


def test_a_profile_function_that_the_program_sets_meanwhile_stays() -> None:
    def own(*_: object) -> None: ...

    look = ValueLook()
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        sys.setprofile(own)
        look.border()
        assert (sys.getprofile(), look.is_over) == (own, True)
    finally:
        sys.setprofile(before)


def test_nothing_is_read_while_operators_are_traced() -> None:
    def shifted(value: Any) -> Any:
        result = value + 1
        return result * 2

    looked(lambda _: torch.jit.trace(shifted, (torch.ones(8, 16),), check_trace=False))


def test_a_module_that_the_program_deletes_is_gone() -> None:
    made = []

    def step(_: int) -> None:
        module = torch.nn.Linear(8, 8)
        module(torch.ones(2, 8))
        made.append(weakref.ref(module))

    looked(step)
    assert [each() for each in made] == [None] * len(made)


def test_long_texts_in_a_list_are_not_copied() -> None:
    assert fingerprint(["x" * 20_000] * 100) is None
    assert fingerprint([[1], list(range(1_000_000))]) is None


def test_a_look_that_no_step_ends_ends_by_itself() -> None:
    look = ValueLook()
    look.start(longest_s=0)
    for number in range(300):
        noise(number)
    assert (look.is_over, sys.getprofile()) == (True, None)


def test_a_look_that_begins_again_on_another_thread_leaves_the_first() -> None:
    look = ValueLook()
    look.start()

    def other() -> None:
        look.border()
        look.start()
        begun.append(sys.getprofile() == look._event)
        sys.setprofile(None)

    begun: list[bool] = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

    assert begun == [True]
    assert not look.is_over
    assert sys.getprofile() is None
    look.stop()


def test_a_tensor_with_a_fingerprint_can_still_grow() -> None:
    values = torch.arange(4096.0)

    assert fingerprint(values) is not None
    assert values.resize_(100_000).numel() == 100_000
