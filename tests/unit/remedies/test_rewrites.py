"""Rewrites of source text: what comes out to the letter, what is left alone, and that losses and gradients stay."""

from __future__ import annotations

from functools import cache
from textwrap import dedent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepscope.remedies.rewrites import rewrites_of, rewritten

IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 5

"""


def after(source: str, name: str) -> str:
    """The source with all rewrites of one kind done."""
    return rewritten(source, rewrites_of(source, names=[name]))


@cache
def both_forms(body: str) -> tuple[str, str]:
    """A module with the body, and the same rewritten."""
    source = IMPORTS + dedent(body)
    return source, after(source, "batched-loss")


LOSSES = {
    "as in the example": """
        def loss_of(logits, targets):
            loss = torch.zeros((), device=logits.device)
            for position in range(LENGTH):
                loss = loss + F.cross_entropy(logits[:, position], targets[:, position])
            return loss / LENGTH
    """,
    "criterion, sizes, colons": """
        criterion = nn.CrossEntropyLoss(ignore_index=0)

        def loss_of(logits, targets):
            loss = 0
            for t in range(targets.size(1)):
                loss += criterion(logits[:, t, :], targets[:, t])
            return loss / targets.size(1)
    """,
    "shifted by one": """
        def loss_of(logits, targets):
            loss = 0.0
            for t in range(1, logits.shape[1]):
                loss += F.cross_entropy(logits[:, t - 1], targets[:, t], ignore_index=-100)
            return loss / (logits.shape[1] - 1)
    """,
    "shifted the other way": """
        def loss_of(logits, targets):
            batch, length, classes = logits.shape
            loss = 0.0
            for t in range(length - 1):
                loss += F.cross_entropy(logits[:, t], targets[:, t + 1]) / (length - 1)
            return loss
    """,
    "appended and stacked": """
        def loss_of(logits, targets):
            losses = []
            for t in range(logits.size(1)):
                losses.append(F.cross_entropy(logits[:, t], targets[:, t]))
            return torch.stack(losses).mean()
    """,
    "appended and summed": """
        def loss_of(logits, targets):
            losses: list[torch.Tensor] = []
            for t in range(5):
                losses.append(F.cross_entropy(logits[:, t], targets[:, t], label_smoothing=0.1))
            return sum(losses) / len(losses)
    """,
    "appended to a list that is used in other ways": """
        def loss_of(logits, targets):
            losses = []
            for t in range(LENGTH):
                losses.append(F.cross_entropy(logits[:, t], targets[:, t]))
            return max(losses) + losses[0]
    """,
    "summed in a generator": """
        def loss_of(logits, targets):
            return sum(F.cross_entropy(logits[:, t], targets[:, t]) for t in range(LENGTH)) / LENGTH
    """,
    "stacked from a comprehension": """
        def loss_of(logits, targets):
            loss = torch.stack([F.cross_entropy(logits[:, t], targets[:, t]) for t in range(LENGTH)]).mean()
            return loss
    """,
    "sequence by sequence": """
        def loss_of(logits, targets):
            loss = 0
            for i in range(len(logits)):
                loss += F.cross_entropy(logits[i], targets[i])
            return loss / len(logits)
    """,
    "sequence by sequence, zipped": """
        def loss_of(logits, targets):
            loss = 0
            for row, labels in zip(logits, targets):
                loss = F.cross_entropy(row, labels) * 0.5 + loss
            return loss
    """,
    "unbound": """
        def loss_of(logits, targets):
            loss = 0
            for row, labels in zip(logits.unbind(1), targets.unbind(dim=1)):
                loss += F.cross_entropy(row, labels)
            return loss
    """,
    "in a module, with names for the parts": """
        class Trainer(nn.Module):
            def __init__(self):
                super().__init__()
                self.criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.2)

            def forward(self, logits, targets):
                total = torch.zeros(())
                for step in range(LENGTH):
                    scores = logits[:, step, :]
                    label = targets[:, step].long()
                    step_loss = self.criterion(scores.double(), label)
                    total = total + step_loss
                return total

        loss_of = Trainer()
    """,
    "summed over the batch": """
        def loss_of(logits, targets):
            loss = 0
            for t in range(LENGTH):
                loss += F.cross_entropy(logits[:, t], targets[:, t], reduction="sum")
            return loss
    """,
    "classes in the middle": """
        def loss_of(logits, targets):
            logits = logits.transpose(1, 2)
            loss = 0
            for t in range(targets.shape[1]):
                loss += F.cross_entropy(logits[:, :, t], targets[:, t])
            return loss
    """,
    "positions first in the logits": """
        def loss_of(logits, targets):
            steps = logits.transpose(0, 1)
            loss = 0
            for t in range(LENGTH):
                loss += F.cross_entropy(steps[t], targets[:, t])
            return loss
    """,
    "positions first in the targets": """
        def loss_of(logits, targets):
            labels = targets.t()
            loss = 0
            for t in range(LENGTH):
                loss += F.cross_entropy(logits[:, t], labels[t])
            return loss
    """,
    "log probabilities": """
        def loss_of(logits, targets):
            scores = F.log_softmax(logits, dim=-1)
            loss = 0
            for t in range(LENGTH):
                loss += F.nll_loss(scores[:, t], targets[:, t])
            return loss
    """,
}


@pytest.mark.parametrize("form", LOSSES)
def test_forms_are_rewritten(form: str) -> None:
    before, now = both_forms(LOSSES[form])
    assert before != now
    assert "for " not in now.removeprefix(IMPORTS)


def loss_and_gradient(source: str, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    names: dict[str, object] = {}
    exec(compile(source, "module.py", "exec"), names)
    leaf = logits.clone().requires_grad_()
    loss = names["loss_of"](leaf, targets)  # type: ignore[operator]
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("form", LOSSES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_losses_and_gradients_stay(form: str, data: st.DataObject) -> None:
    """To 1e-12 relative in FP64, whatever is ignored where; a position that is ignored as a whole is NaN in both."""
    before, now = both_forms(LOSSES[form])
    batch, classes = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 7))
    ignored = 0 if "ignore_index=0" in before else -100
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(batch, 5, classes, dtype=torch.float64)
    targets = torch.randint(classes, (batch, 5))
    targets[torch.rand(batch, 5) < share] = ignored
    loss, gradient = loss_and_gradient(before, logits, targets)
    new_loss, new_gradient = loss_and_gradient(now, logits, targets)
    torch.testing.assert_close(new_loss, loss, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(new_gradient, gradient, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_every_other_character_stays() -> None:
    source = IMPORTS + dedent(
        """\
        def loss_of(logits, targets):  # both of a batch
            loss = torch.zeros(())
            for t in range(LENGTH):  # token by token
                # the teacher is always right
                loss = loss + F.cross_entropy(logits[:, t], targets[:, t])  # a mean
            return  loss/LENGTH   # formatted as nobody would
        """
    )
    assert after(source, "batched-loss") == IMPORTS + dedent(
        """\
        def loss_of(logits, targets):  # both of a batch
            loss = torch.zeros(())
            # token by token
            # the teacher is always right
            token_losses = F.cross_entropy(
                logits[:, :LENGTH].flatten(0, 1), targets[:, :LENGTH].flatten(), reduction="none"
            )
            counted = targets[:, :LENGTH] != -100
            loss = loss + (token_losses.view_as(counted).sum(0) / counted.sum(0)).sum()  # a mean
            return  loss/LENGTH   # formatted as nobody would
        """
    )


def test_a_list_of_losses_becomes_a_tensor() -> None:
    _, now = both_forms(LOSSES["appended and stacked"])
    assert now.removeprefix(IMPORTS) == dedent(
        """
        def loss_of(logits, targets):
            token_losses = F.cross_entropy(
                logits.flatten(0, 1), targets[:, : logits.size(1)].flatten(), reduction="none"
            )
            counted = targets[:, : logits.size(1)] != -100
            losses = token_losses.view_as(counted).sum(0) / counted.sum(0)
            return losses.mean()
        """
    )
