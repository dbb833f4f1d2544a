"""Which statements of a source compute on the host with values copied from tensors."""

from __future__ import annotations

from textwrap import dedent

import pytest

from stepscope.record.source_facts import metrics_of_source

METRIC = """\
def confusion(prediction, target):
    matrix = zeros((9, 9))
    for p, t in zip(prediction, target):
        matrix[t, p] += 1
    return matrix

def train():
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        found = out.argmax(1).cpu().numpy()
        total = total + confusion(found, y)
        score = f1(total)
"""
SILENT = {
    "an action": "for x in xs:\n    a = policy(x).numpy()\n    s = env.step(a)\n    state = torch.from_numpy(s)",
    "a token": "while go:\n    n = logits.argmax(-1).item()\n    ids.append(n)\n    out = model(torch.tensor([ids]))",
    "tensors only": "for x in xs:\n    right += (model(x).argmax(1) == y).sum()",
}


def test_statements_and_the_functions_that_they_call() -> None:
    found = {(each.function, each.first, each.last) for each in metrics_of_source(METRIC, "train.py")}

    assert found == {("train", 12, 12), ("train", 13, 13), ("train", 14, 14), ("confusion", 1, 5)}


def test_values_that_are_read_one_by_one() -> None:
    text = "def update(self, a, b):\n    for p, t in zip(a, b):\n        self.v.append(p.item())\n"

    assert [(each.first, each.last) for each in metrics_of_source(text, "train.py")] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("name", SILENT)
def test_values_of_which_a_tensor_is_made_again_are_no_metric(name: str) -> None:
    assert metrics_of_source(dedent(SILENT[name]), "train.py") == []
