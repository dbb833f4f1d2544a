"""A look at who uses the gradients of a step."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from stepscope.record import lines
from stepscope.record.equal_values import STEPS, ValueLook
from stepscope.trace.program_facts import BackwardFacts

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the user's, and no other."""
    monkeypatch.setattr(lines, "_is_user", defaultdict(bool, {__file__: True}))


def looked(step: Callable[[], object]) -> tuple[BackwardFacts, ...]:
    look, before = ValueLook(), sys.getprofile()
    sys.setprofile(None)
    try:
        look.start()
        for _ in range(STEPS):
            step()
            look.border()
    finally:
        look.stop()
        sys.setprofile(before)
    return look.facts().backward


def net(*sizes: int) -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(one, other) for one, other in pairwise(sizes)))


def trained(*parts: Any, loss: Callable[[], Any], kind: Any = torch.optim.Adam) -> Callable[[], object]:
    optimizer = kind([one for part in parts for one in part.parameters()], 0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def test_a_part_in_no_optimizer_is_differentiated_for_nothing() -> None:
    body, head = net(4, 5, 6), net(6, 2)
    (found,) = looked(trained(head, loss=lambda: head(body(torch.ones(3, 4))).sum()))

    assert found.needless[0][0] == 0  # the body runs first
    assert found.needless[0][1] < found.nodes - 2
    assert (sorted(found.modules), found.is_cleared) == (["Sequential.0", "Sequential.1"], False)
    assert found.parameters == 4 * 5 + 5 + 5 * 6 + 6


def test_nothing_is_said_where_all_gradients_are_used() -> None:
    body, head = net(4, 5), net(5, 2)
    assert looked(trained(body, head, loss=lambda: head(body(torch.ones(3, 4))).sum())) == ()
    body.requires_grad_(False)
    assert looked(trained(head, loss=lambda: head(body(torch.ones(3, 4))).sum())) == ()


def test_a_teacher_with_a_graph_needs_none_but_a_frozen_layer_between_needs_half() -> None:
    student, teacher = net(4, 5, 2), net(4, 7, 2)
    (found,) = looked(trained(student, loss=lambda: (student(torch.ones(3, 4)) - teacher(torch.ones(3, 4))).sum()))
    assert (len(found.needless), found.halves) == (1, ())

    (found,) = looked(trained(student, loss=lambda: net_between(student(torch.ones(3, 4))).sum()))
    assert len(found.halves) == 1


net_between = net(2, 2)


def adversaries(*, detached: bool) -> Callable[[], object]:
    maker, judge = net(4, 5, 6), net(6, 1)
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), 0.1) for each in (maker, judge))

    def step() -> None:
        made = maker(torch.ones(3, 4))
        judge.zero_grad()
        judge(made.detach() if detached else made).sum().backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(maker(torch.ones(3, 4))).sum().backward()
        of_maker.step()

    return step


def test_gradients_that_are_cleared_before_they_are_used_are_needless() -> None:
    found = looked(adversaries(detached=False))
    assert [each.is_cleared for each in found] == [True, True]
    assert sorted(found[0].modules) == ["Sequential.0", "Sequential.1"]

    (weights,) = looked(adversaries(detached=True))  # of the judge, in the pass that trains the maker
    assert all(first == last for first, last in weights.needless)


def test_accumulated_gradients_are_used_by_the_next_step() -> None:
    body = net(4, 2)
    optimizer = torch.optim.SGD(body.parameters(), 0.1)
    calls = []

    def step() -> None:
        body(torch.ones(3, 4)).sum().backward()
        calls.append(1)
        if len(calls) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    assert looked(step) == ()


def test_a_part_that_the_program_updates_itself_is_trained() -> None:
    own, other = net(4, 3), net(3, 2)

    def loss() -> Any:
        with torch.no_grad():
            for each in own.parameters():
                each -= 0.1
        return other(own(torch.ones(3, 4))).sum()

    assert looked(trained(other, loss=loss)) == ()


def test_a_trained_input_needs_its_graph_but_not_the_weights_gradients() -> None:
    body, image = net(4, 4), torch.ones(3, 4, requires_grad=True)
    optimizer = torch.optim.Adam([image], 0.1)

    def step() -> None:
        optimizer.zero_grad()
        body(image).sum().backward()
        optimizer.step()

    (found,) = looked(step)
    assert len(found.halves) == 1
    assert all(first == last for first, last in found.needless)  # the weight's transposition
