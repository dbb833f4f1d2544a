"""What the program does with its objects in each step: graphs that variables keep, and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.step_objects import KeptGraphs

torch = pytest.importorskip("torch")


def kept(change: Callable[[Any, Any], object]) -> dict[str, int]:
    """Nodes that variables keep, by name, after two steps that change an object's attributes by a new loss."""
    weight, look = torch.nn.Parameter(torch.ones(3)), KeptGraphs()
    self = SimpleNamespace(total=0.0, history=[], by_name={"loss": []}, last=None)
    for _ in range(2):
        loss = (weight * 2).sum()
        loss.backward()
        change(self, loss)
        look.look([(sys._getframe().f_code, {"self": self})])
    return {each.name: each.nodes for each in look.facts()}


def test_a_sum_of_losses_keeps_their_graphs() -> None:
    def add(self: Any, loss: Any) -> None:
        self.total = self.total + loss

    assert kept(add) == {"self.total": 3}  # product, sum and addition


def test_a_list_of_losses_keeps_their_graphs_wherever_it_is() -> None:
    assert kept(lambda self, loss: self.history.append(loss)) == {"self.history": 2}
    assert kept(lambda self, loss: self.by_name["loss"].append(loss)) == {"self.by_name": 2}


def test_numbers_and_the_last_loss_keep_nothing() -> None:
    def change(self: Any, loss: Any) -> None:
        self.total += loss.item()
        self.history.append(loss.detach())
        self.last = loss

    assert kept(change) == {}


from stepscope.record.step_objects import EvaluationWatch  # noqa: E402


def test_steps_with_an_evaluation_are_told_apart_with_their_time() -> None:
    times = iter([0, *(100 * step + (250 if step > 4 else 0) + (250 if step > 9 else 0) for step in range(1, 13))])
    model, before = torch.nn.Linear(1, 1), torch.nn.Module.train
    watch = EvaluationWatch(lambda: next(times))
    watch.start()
    for step in range(12):
        if step in (4, 9):
            model.eval().train()
        watch.border(recorded=False)
    watch.stop()
    facts = watch.facts()

    assert torch.nn.Module.train is before
    assert facts is not None
    assert (facts.seen, facts.steps, facts.every) == (12, 2, 5.0)
    assert (facts.step_ns, facts.evaluating_ns, facts.file) == (100, 350, __file__)


def test_a_module_that_stays_in_evaluation_mode_is_no_evaluation() -> None:
    teacher = torch.nn.Linear(1, 1).eval()
    watch = EvaluationWatch()
    watch.start()
    for _ in range(3):
        teacher.eval()
        watch.border(recorded=False)
    watch.stop()

    assert watch.facts() is None


def test_what_is_being_compiled_does_not_contain_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    watch = EvaluationWatch()
    watch.start()
    torch.nn.Linear(1, 1).eval()
    watch.border(recorded=False)
    watch.stop()

    assert watch.facts() is None
