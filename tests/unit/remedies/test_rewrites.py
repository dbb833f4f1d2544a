"""Rewrites of source text: what comes out to the letter, what is left alone, and that losses and gradients stay."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepscope.remedies.rewrites import Criterion, rewrites_of, rewritten, unified_diff

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
    "sample by sample": """
        def loss_of(logits, targets):
            logits, targets = logits[:, 0], targets[:, 0]
            loss = 0
            for i in range(logits.shape[0]):
                loss += F.cross_entropy(logits[i], targets[i], ignore_index=0)
            return loss
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


def test_a_criterion_that_is_an_argument_is_taken_for_the_one_of_its_name() -> None:
    source = IMPORTS + dedent(
        """
        def train(logits, targets, criterion):
            loss = 0
            for t in range(LENGTH):
                loss += criterion(logits[:, t], targets[:, t])
            return loss

        if __name__ == "__main__":
            criterion = nn.CrossEntropyLoss(ignore_index=0).to("cuda")
        """
    )
    (rewrite,) = rewrites_of(source)

    assert "`criterion` is the CrossEntropyLoss that line 15 makes." in rewrite.assumptions
    assert rewrite.criterion == Criterion("criterion", "CrossEntropyLoss", "mean", ("ignore_index",), is_argument=True)
    assert "ignore_index=criterion.ignore_index" in rewritten(source, [rewrite])


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
@settings(deadline=None, max_examples=6)
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


TRAINING = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def train(model, data, device):
    loader = DataLoader(
        data,
        batch_size=8,
        num_workers=0,  # for now
    )
    model = DDP(model, device_ids=[0], find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.set_detect_anomaly(mode=True)
    running = 0.0
    history = []
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            x, y = x.to(device), y.cuda()
            mask = torch.zeros(8, 8).to(device)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            loss = model(x, y, mask)
            with torch.autograd.detect_anomaly():
                loss.backward()
            optimizer.zero_grad(set_to_none=False)
            running += loss.item()
            history.append(loss.item())
            if number % 100 == 99:
                print(epoch, running / 100)
                running = 0.0
    return history
"""
TRAINED = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def train(model, data, device):
    loader = DataLoader(
        data,
        batch_size=8,
        persistent_workers=True,
        pin_memory=True,
        num_workers=4,  # for now
    )
    model = DDP(model, device_ids=[0], find_unused_parameters=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    torch.autograd.set_detect_anomaly(mode=False)
    running = 0.0
    history = []
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
            mask = torch.zeros(8, 8, device=device)
            model.zero_grad()
            loss = model(x, y, mask)
            with torch.autograd.set_detect_anomaly(False):
                loss.backward()
            optimizer.zero_grad()
            running += loss.detach().float()
            history.append(loss.detach())
            if number % 100 == 99:
                print(epoch, float(running) / 100)
                running = 0.0
    history = [number.item() for number in history]
    return history
"""
SETTINGS = {
    "num_workers": "4",
    "persistent_workers": "True",
    "pin_memory": "True",
    "find_unused_parameters": "False",
    "gradient_as_bucket_view": "True",
}


def test_a_training_loop_with_every_other_rewrite() -> None:
    assert rewritten(TRAINING, rewrites_of(TRAINING, settings=SETTINGS)) == TRAINED


def test_what_is_rewritten_is_not_rewritten_again() -> None:
    again = [each for each in rewrites_of(TRAINED, settings=SETTINGS) if each.name != "non-blocking"]

    assert again == []
    for body in LOSSES.values():
        now = both_forms(body)[1]
        assert rewrites_of(now) == []


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_line_ends_stay(line_end: str) -> None:
    source = TRAINING.replace("\n", line_end)
    assert rewritten(source, rewrites_of(source, settings=SETTINGS)) == TRAINED.replace("\n", line_end)


REFUSED = {
    "something else in the loop": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
            print(t)
    """,
    "the position is used afterwards": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
        print(t)
    """,
    "positions from the end": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t - 1], targets[:, t])
    """,
    "none at all": """
        for t in range(-1):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
    """,
    "steps of two": """
        for t in range(0, LENGTH, 2):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
    """,
    "weights of classes": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t], weight=weight)
    """,
    "an early end": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
        else:
            loss = 0
    """,
    "what is indexed changes": """
        for t in range(LENGTH):
            logits = logits + F.cross_entropy(logits[:, t], targets[:, t])
    """,
    "a factor for each position": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t]) * factor[t]
    """,
    "a criterion that nobody knows": """
        for t in range(LENGTH):
            loss = loss + criterion(logits[:, t], targets[:, t])
    """,
    "a criterion that may be one of two": """
        def main():
            criterion = nn.CrossEntropyLoss()
            criterion = nn.CrossEntropyLoss(ignore_index=0)
        for t in range(LENGTH):
            loss = loss + criterion(logits[:, t], targets[:, t])
    """,
    "a list of tensors": """
        steps = [step(x) for x in inputs]
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(steps[t], targets[:, t])
    """,
    "the last of them counts": """
        for t in range(LENGTH):
            loss = F.cross_entropy(logits[:, t], targets[:, t])
    """,
    "a filter": """
        loss = sum(F.cross_entropy(logits[:, t], targets[:, t]) for t in range(LENGTH) if t % 2)
    """,
    "a smoothing for each position": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t], label_smoothing=factor[t])
    """,
    "an ignored class for each position": """
        for t in range(LENGTH):
            ignored = t - 1
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t], ignore_index=ignored)
    """,
    "another range": """
        def range(count):
            return [0] * count
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
    """,
    "another zip": """
        from itertools import product as zip
        for x, y in zip(logits, targets):
            loss = loss + F.cross_entropy(x, y)
    """,
    "the position is deleted afterwards": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
        del t
    """,
    "the position is where another loop begins": """
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
        for t in range(t):
            loss = loss + 1
    """,
    "a change in the same statement": """
        loss = logits.zero_().sum() + sum(F.cross_entropy(logits[:, t], targets[:, t]) for t in range(LENGTH))
    """,
    "a criterion that changes": """
        entropy = nn.CrossEntropyLoss()
        entropy.weight = weight
        for t in range(LENGTH):
            loss = loss + entropy(logits[:, t], targets[:, t])
    """,
    "a criterion that is watched": """
        entropy = nn.CrossEntropyLoss()
        entropy.register_forward_hook(print)
        for t in range(LENGTH):
            loss = loss + entropy(logits[:, t], targets[:, t])
    """,
    "another function of that name": """
        def cross_entropy(a, b):
            return a
        for t in range(LENGTH):
            loss = loss + cross_entropy(logits[:, t], targets[:, t])
    """,
}


@pytest.mark.parametrize("stop", ["n - 2", "n", "-n", "2"])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_loop_that_does_nothing_stays_one(stop: str, n: int) -> None:
    source = (
        f"{IMPORTS}def loss_of(logits, targets, n):\n    loss = torch.zeros(())\n    for t in range(2, {stop}):\n"
        "        loss = loss + F.cross_entropy(logits[:, t - 2], targets[:, t])\n    return loss\n"
    )
    logits, targets = torch.randn(2, 5, 3), torch.zeros(2, 5, dtype=torch.long)
    results = []
    for text in (source, after(source, "batched-loss")):
        names: dict[str, Any] = {}
        exec(text, names)
        results.append(names["loss_of"](logits, targets, n))
    assert after(source, "batched-loss") != source
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_shown_to_be_safe_is_left_alone(why: str) -> None:
    body = dedent(REFUSED[why]).replace("\n", "\n    ")
    source = f"{IMPORTS}def loss_of(logits, targets, loss, factor, weight, criterion, inputs):{body}return loss\n"
    compile(source, "module.py", "exec")
    assert rewrites_of(source) == []


KEPT = {
    "read every n steps": """
        history = []
        for step in range(9):
            loss = work()
            if step % 3 == 0:
                history.append(loss.item())
    """,
    "a list of somebody else's": """
        for step in range(9):
            loss = work()
            log.history.append(loss.item())
    """,
    "looked at in every step": """
        history = []
        for step in range(9):
            loss = work()
            history.append(loss.item())
            print(history[-1])
    """,
    "one tensor that is added to": """
        history = []
        loss = torch.zeros(())
        for step in range(9):
            loss += work()
            history.append(loss.item())
    """,
    "scaled after it is kept": """
        history = []
        for step in range(9):
            loss = work()
            history.append(loss.item())
            loss.div_(9)
    """,
    "left inside the loop": """
        history = []
        for step in range(9):
            loss = work()
            history.append(loss.item())
            if step == 5:
                return history
    """,
    "seen by a function inside": """
        history = []
        def last():
            return history[-1]
        for step in range(9):
            loss = work()
            history.append(loss.item())
            last()
    """,
    "a sum that is shown in every step": """
        running = 0
        for step in range(9):
            loss = work()
            running += loss.item()
            bar.set_postfix(running)
    """,
    "printed in every step": """
        for step in range(9):
            loss = work()
            print(step, loss.item())
    """,
    "copied to the host": """
        for x in loader:
            x = x.to("cpu")
            y = x.to(dtype)
    """,
    "no batch": """
        for x in range(9):
            y = model.to(device)
    """,
    "arguments from a dictionary": """
        optimizer = torch.optim.AdamW(parameters, **options)
    """,
    "an optimizer that is to be differentiated": """
        optimizer = torch.optim.AdamW(parameters, differentiable=True)
    """,
    "clipped gradients among others": """
        for p in model.parameters():
            p.grad.zero_()
            p.data.clamp_(0, 1)
    """,
    "random numbers": """
        noise = torch.randn(8).to(device)
    """,
    "a leaf on the host": """
        weight = torch.zeros(8, requires_grad=True).to(device)
    """,
    "modules, which know no non_blocking": """
        for layer in model.children():
            layer.cuda()
    """,
    "a count of whole numbers": """
        correct = 0
        for step in range(9):
            hits = work()
            correct += hits.item()
        print(correct)
    """,
    "a history that is written out after an exception": """
        history = []
        try:
            for step in range(9):
                loss = work()
                history.append(loss.item())
        finally:
            log(history)
    """,
    "workers that may be none": """
        from torch.utils.data import DataLoader
        loader = DataLoader(loader, num_workers=options.workers, pin_memory=options.pin)
    """,
}


@pytest.mark.parametrize("why", KEPT)
def test_loops_are_left_alone(why: str) -> None:
    body = dedent(KEPT[why]).replace("\n", "\n    ")
    source = (
        f"import torch\n\ndef train(work, log, bar, loader, dtype, device, model, parameters, options):{body}pass\n"
    )
    compile(source, "module.py", "exec")
    assert rewrites_of(source, settings=SETTINGS) == []


def test_an_iterable_dataset_gets_no_workers() -> None:
    source = "from torch.utils.data import DataLoader, IterableDataset\nloader = DataLoader(data)\nIterableDataset\n"
    assert rewrites_of(source, settings={"num_workers": "4"}) == []


def test_a_history_keeps_its_values() -> None:
    names: dict[str, object] = {"torch": torch}
    source = dedent(
        """\
        def train(steps):
            history = []
            running = 0.0
            said = []
            for step in range(steps):
                loss = torch.tensor(step, dtype=torch.bfloat16).sqrt()
                history.append(loss.item())
                running += loss.item()
                if step % 2:
                    said.append(running)
            return history, said
        """
    )
    now = after(source, "deferred-logging")
    assert now != source
    exec(source, names)
    expected = names["train"](5)  # type: ignore[operator]
    exec(now, names)
    history, said = names["train"](5)  # type: ignore[operator]
    assert history == expected[0]
    assert said == pytest.approx(expected[1], rel=1e-6)


def test_a_history_of_the_module_itself() -> None:
    source = dedent(
        """\
        history = []
        for batch in loader:
            loss = work(batch)
            history.append(loss.item())
        print(history)
        """
    )
    assert after(source, "deferred-logging") == dedent(
        """\
        history = []
        for batch in loader:
            loss = work(batch)
            history.append(loss.detach())
        history = [number.item() for number in history]
        print(history)
        """
    )
    assert rewrites_of(f"{source}def last():\n    return history[-1]\n") == []


HOSTILE = {
    "nothing": "",
    "no Python": "for in loss:",
    "a null": "loss = 1\0\n",
    "half a surrogate pair": "loss = '\ud800'\n",
    "deep brackets": "loss = " + "(" * 5000 + ")" * 5000,
    "deep signs": "loss = " + "-" * 15000 + "1",
    "deep attributes": "loss = a" + "\\\n.b" * 3000,
    "deep blocks": "".join(" " * depth + "if a:\n" for depth in range(90)) + " " * 90 + "pass\n",
    "a long line": "loss = '" + "x" * 100_000 + "'",
    "huge": "loss = 1\n" * 600_000,
    "many branches": "if a: pass\n" + "elif a: pass\n" * 900,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_is_refused_in_a_sentence_or_left_alone(kind: str) -> None:
    found: object = None
    try:
        found = rewrites_of(HOSTILE[kind])
    except ValueError as error:
        found = str(error)

    assert found == [] or str(found).startswith("the source")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind of rewrite is called 'faster'"):
        rewrites_of("", names=["faster"])


def test_a_line_or_a_function_can_be_asked_for() -> None:
    source = both_forms(LOSSES["as in the example"])[0]
    line = source.splitlines().index("    for position in range(LENGTH):") + 1

    assert len(rewrites_of(source, line=line + 1, function="loss_of")) == 1
    assert rewrites_of(source, line=line - 1) == []
    assert rewrites_of(source, function="another") == []


@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize("name", ["train.py", "my train.py", 'a"b.py', "sürprise.py"])
def test_git_applies_the_diff(tmp_path: Path, name: str, ending: str) -> None:
    source = "import torch\n\nloss = 1\ntorch.autograd.set_detect_anomaly(True)" + ending
    (tmp_path / name).write_bytes(source.encode())
    patch = unified_diff(name, source, rewrites_of(source))

    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True)

    assert (tmp_path / name).read_text() == source.replace("True", "False")


def test_a_mark_at_the_beginning_and_other_letters_are_counted_right() -> None:
    source = "\ufeffimport torch\nläuft = 'ja 🚂'; torch.autograd.set_detect_anomaly(True)  # später\n"
    assert after(source, "no-debug") == source.replace("True", "False")
