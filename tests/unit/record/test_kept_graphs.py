"""A look at variables that keep the graphs of steps that have ended."""

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
