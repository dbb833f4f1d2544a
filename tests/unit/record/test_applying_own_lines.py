"""The user's own lines in a running process: functions that get other code, and numbers that are read later."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.record.apply import install
from stepscope.record.apply.patching import Applying
from stepscope.record.apply.training import kept_in
from stepscope.remedies import DeferredNumber

Load = Callable[[str], ModuleType]
LOSS = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    LENGTH = 6

    def loss_of(logits, targets):
        loss = torch.zeros(())
        for t in range(LENGTH):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
        assert loss.isfinite(), "no end"
        return loss / LENGTH
"""
_names = (f"program_{number}" for number in itertools.count())


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Writes a module and imports it."""
    loaded: list[str] = []

    def from_source(source: str) -> ModuleType:
        name = next(_names)
        path = tmp_path / f"{name}.py"
        path.write_text(dedent(source))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield from_source
    for name in loaded:
        del sys.modules[name]


@pytest.fixture
def applying() -> Iterator[Applying]:
    made = install(("batched-loss", "deferred-logging"), None)
    yield made
    made.remove()


def said(applying: Applying, flag: str, *, applied: bool = True) -> list[str]:
    entries = applying.to_json()["applied" if applied else "not_applied"]
    return [each["sentence"] for each in entries if each["flag"] == flag]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 5, generator=generator, requires_grad=True)
    return logits, torch.randint(5, (3, 6), generator=generator)


def test_a_loss_is_batched_from_its_second_call_on(load: Load, applying: Applying) -> None:
    module = load(LOSS)
    logits, targets = batch()

    first = module.loss_of(logits, targets)
    assert said(applying, "batched-loss") == []
    second = module.loss_of(logits, targets)
    third = module.loss_of(logits, targets)

    name = module.__name__
    assert said(applying, "batched-loss") == [f"loss_of ({name}.py:10) computes its loss for all positions at once"]
    torch.testing.assert_close(second, first, rtol=1e-6, atol=0)
    assert torch.equal(second, third)
    assert "token_losses" in module.loss_of.__code__.co_varnames
    of_first, of_second = (torch.autograd.grad(loss, logits)[0] for loss in (first, second))
    torch.testing.assert_close(of_second, of_first, rtol=1e-5, atol=1e-7)


def test_lines_keep_their_numbers(load: Load, applying: Applying) -> None:
    module = load(LOSS)
    logits, targets = batch()
    module.loss_of(logits, targets)

    with pytest.raises(AssertionError, match="no end") as failed:
        module.loss_of(logits.detach() * torch.inf, targets)

    last = traceback.extract_tb(failed.value.__traceback__)[-1]
    assert (last.name, last.lineno) == ("loss_of", 12)
    assert said(applying, "batched-loss")


OTHERS = {
    "a criterion in a module": (
        """
        from torch import nn

        class Trainer(nn.Module):
            def __init__(self):
                super().__init__()
                self.criterion = nn.CrossEntropyLoss()

            def forward(self, logits, targets):
                loss = 0
                for t in range(targets.size(1)):
                    loss += self.criterion(logits[:, t], targets[:, t])
                return loss

        loss_of = Trainer()
        """,
        "Trainer.forward",
    ),
    "a generator": (
        """
        from torch.nn.functional import cross_entropy

        def loss_of(logits, targets):
            return sum(cross_entropy(logits[:, t], targets[:, t]) for t in range(6))
        """,
        "loss_of",
    ),
    "a function inside a function": (
        """
        import torch.nn.functional as F

        def make(scale):
            def inner(logits, targets):
                loss = 0
                for t in range(6):
                    loss += F.cross_entropy(logits[:, t], targets[:, t]) * scale
                return loss
            return inner

        loss_of = make(0.5)
        """,
        "make.<locals>.inner",
    ),
    "a decorated function": (
        """
        import functools
        import torch.nn.functional as F

        def logged(function):
            @functools.wraps(function)
            def wrapped(*positional):
                return function(*positional)
            return wrapped

        @logged
        def loss_of(logits, targets):
            loss = 0
            for t in range(6):
                loss += F.cross_entropy(logits[:, t], targets[:, t])
            return loss
        """,
        "loss_of",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_homes_of_a_loss(load: Load, applying: Applying, kind: str) -> None:
    source, name = OTHERS[kind]
    module = load(source)
    logits, targets = batch()

    first, second = module.loss_of(logits, targets), module.loss_of(logits, targets)

    torch.testing.assert_close(second, first, rtol=1e-6, atol=0)
    assert [sentence.split(" (")[0] for sentence in said(applying, "batched-loss")] == [name]


def test_what_is_not_called_again_keeps_its_code(load: Load, applying: Applying) -> None:
    module = load(LOSS)
    module.loss_of(*batch())
    applying.end()

    assert said(applying, "batched-loss") == [
        f"the loop at {module.__name__}.py:10 takes the losses of its positions from one call"
    ]
    assert said(applying, "batched-loss", applied=False) == []


TRAINING = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    def train(steps):
        torch.manual_seed(0)
        model = nn.Embedding(7, 7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(steps):
            tokens = torch.randint(7, (4, 6 + step % 2))
            logits = model(tokens[:, :-1])
            loss = torch.zeros(())
            LOOP
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
"""
LOOPS = {
    "range": """for t in range(1, tokens.shape[1]):
                loss = loss + F.cross_entropy(logits[:, t - 1], tokens[:, t], ignore_index=3) / 2""",
    "generator": "loss = sum(F.cross_entropy(logits[:, t], tokens[:, t + 1]) for t in range(logits.size(1)))",
    "summed": """for t in range(logits.size(1)):
                scores = logits[:, t]
                loss += F.cross_entropy(scores, tokens[:, t + 1], reduction="sum")""",
    "twice": """for t in range(logits.size(1)):
                loss += F.cross_entropy(logits[:, t], tokens[:, t + 1])
            for t in range(logits.size(1)):
                loss += F.cross_entropy(logits[:, t], tokens[:, t])""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_runs_already_is_served(load: Load, loop: str) -> None:
    source = TRAINING.replace("LOOP", LOOPS[loop])
    expected = load(source).train(6)
    applying = install(("batched-loss",), None)
    module = load(source)

    losses = module.train(6)
    applying.remove()
    applying.end()

    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] != losses[0]
    assert len(said(applying, "batched-loss")) == (2 if loop == "twice" else 1)
    assert f"the loop at {module.__name__}.py:" in said(applying, "batched-loss")[0]
    assert said(applying, "batched-loss", applied=False) == []


def test_a_loop_through_tensors_waits_for_the_next_call(load: Load, applying: Applying) -> None:
    loop = """labels = tokens[:, 1:]
            for score, label in zip(logits.unbind(1), labels.unbind(1)):
                loss = loss + F.cross_entropy(score, label)"""
    module = load(TRAINING.replace("LOOP", loop))
    module.train(3)
    applying.end()

    assert said(applying, "batched-loss", applied=False) == [
        f"train ({module.__name__}.py:16) was not called again; stepscope diagnose --diff shows the change"
    ]


def test_a_loop_outside_of_functions_is_served(load: Load, applying: Applying) -> None:
    module = load(
        """
        import torch
        import torch.nn.functional as F

        logits, targets = torch.randn(2, 6, 5), torch.zeros(2, 6, dtype=torch.long)
        loss = 0
        for t in range(6):
            loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
        """
    )
    applying.end()

    expected = 6 * torch.nn.functional.cross_entropy(module.logits.flatten(0, 1), module.targets.flatten())
    torch.testing.assert_close(module.loss, expected)
    assert said(applying, "batched-loss") == [
        f"the loop at {module.__name__}.py:7 takes the losses of its positions from one call"
    ]


def test_a_loop_that_an_exception_ended_begins_anew(load: Load, applying: Applying) -> None:
    module = load(
        """
        import torch.nn.functional as F

        class Fragile:
            def __init__(self, left):
                self.left, self.total = left, 0

            def __add__(self, other):
                if not self.left:
                    raise OverflowError
                self.left, self.total = self.left - 1, self.total + other
                return self

        def train(logits, targets, patience):
            for left in patience:
                loss = Fragile(left)
                try:
                    for t in range(6):
                        loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
                except OverflowError:
                    pass
            return loss.total
        """
    )
    logits, targets = batch()

    found = module.train(logits, targets, [6, 2, 6, 3, 6])

    expected = 6 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found, expected)


def test_what_a_loop_was_served_is_let_go_of(load: Load, applying: Applying) -> None:
    module = load(
        TRAINING.replace("LOOP", LOOPS["range"]).replace("loss.backward()", "kept.append(weakref.ref(logits))")
    )
    kept: list[Any] = []
    vars(module).update(kept=kept, weakref=weakref)
    module.train(3)
    applying.end()

    assert said(applying, "batched-loss")
    assert [reference() for reference in kept] == [None, None, None]


def test_a_look_at_a_running_loop_keeps_no_variable_of_its_function_alive(load: Load, applying: Applying) -> None:
    module = load(
        """
        import weakref
        import torch
        import torch.nn.functional as F

        def train(steps):
            alive = []
            for step in range(steps):
                logits, targets = torch.randn(3, 6, 5, requires_grad=True), torch.randint(5, (3, 6))
                hidden = torch.ones(2)
                reference, variables = weakref.ref(hidden), locals() if step == 2 else {}
                loss = 0
                for t in range(6):
                    loss = loss + F.cross_entropy(logits[:, t], targets[:, t])
                del hidden
                alive.append((reference() is not None, "logits" in variables))
            return alive
        """
    )

    # In the last step the program itself asked for its variables, and keeps them.
    assert module.train(3) == [(False, False), (False, False), (True, True)]
    applying.end()
    assert said(applying, "batched-loss")


def test_probabilities_as_targets_are_refused(load: Load, applying: Applying) -> None:
    module = load(LOSS)
    logits = batch()[0]
    probabilities = logits.detach().softmax(-1)

    first, second = module.loss_of(logits, probabilities), module.loss_of(logits, probabilities)

    assert torch.equal(first, second)
    assert said(applying, "batched-loss") == []
    assert "logits and targets are not what the new code needs" in said(applying, "batched-loss", applied=False)[0]


CRITERION = """
    from torch import nn

    def loss_of(logits, targets, criterion):
        loss = 0
        for t in range(6):
            loss = loss + criterion(logits[:, t], targets[:, t])
        return loss

    def main():
        criterion = nn.CrossEntropyLoss()
"""


class Own(torch.nn.CrossEntropyLoss):
    """With another meaning, perhaps."""


@pytest.mark.parametrize(
    "criterion",
    [
        torch.nn.CrossEntropyLoss(weight=torch.ones(5)),
        torch.nn.CrossEntropyLoss(ignore_index=1),
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        torch.nn.CrossEntropyLoss(reduction="sum"),
        Own(),
    ],
)
def test_another_criterion_than_the_source_shows_is_refused(load: Load, applying: Applying, criterion: Any) -> None:
    module = load(CRITERION)
    logits, targets = batch()

    first, second = (module.loss_of(logits, targets, criterion) for _ in range(2))

    assert torch.equal(first, second)
    assert said(applying, "batched-loss") == []
    assert "are not what the new code needs" in said(applying, "batched-loss", applied=False)[0]


def test_the_criterion_that_the_source_shows_is_batched(load: Load, applying: Applying) -> None:
    module = load(CRITERION)
    logits, targets = batch()

    first, second = (module.loss_of(logits, targets, torch.nn.CrossEntropyLoss()) for _ in range(2))
    weighed = module.loss_of(logits, targets, torch.nn.CrossEntropyLoss(torch.arange(5.0)))

    torch.testing.assert_close(second, first)
    assert len(said(applying, "batched-loss")) == 1
    assert "takes the losses of its positions from one call" in said(applying, "batched-loss")[0]
    applying.remove()
    assert torch.equal(weighed, module.loss_of(logits, targets, torch.nn.CrossEntropyLoss(torch.arange(5.0))))


def test_another_call_gets_what_it_got_before(load: Load, applying: Applying) -> None:
    module = load(
        LOSS
        + """
    class Task:
        def __init__(self):
            self.criterion = nn.CrossEntropyLoss()

        def loss_of(self, logits, targets):
            loss = 0
            for t in range(LENGTH):
                loss += self.criterion(logits[:, t], targets[:, t])
            return loss

    def paired(logits, targets):
        loss = 0
        for one, other in zip(logits, targets):
            loss += F.cross_entropy(one, other)
        return loss
    """
    )
    logits, targets = batch()
    task = module.Task()
    functions: list[Callable[..., Any]] = [module.loss_of, task.loss_of, module.paired]
    plain = [function(logits, targets) for function in functions]
    for function, expected in zip(functions, plain, strict=True):
        torch.testing.assert_close(function(logits, targets), expected)
    assert len([each for each in said(applying, "batched-loss") if "at once" in each]) == 3
    task.criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, logits.shape[-1] + 1))
    expected = sum(task.criterion(logits[:, t], targets[:, t]) for t in range(module.LENGTH))
    torch.testing.assert_close(task.loss_of(logits, targets), expected)
    chances = torch.softmax(torch.randn_like(logits), -1)
    expected = sum(nn.functional.cross_entropy(logits[:, t], chances[:, t]) for t in range(module.LENGTH))
    torch.testing.assert_close(module.loss_of(logits, chances) * module.LENGTH, expected)
    longer = torch.cat([targets, targets])
    torch.testing.assert_close(module.paired(logits, longer), plain[2])
    torch.testing.assert_close(module.paired(list(logits), list(longer)), plain[2])


def test_a_file_that_has_changed_is_refused(load: Load, applying: Applying) -> None:
    module = load(LOSS)
    assert module.__file__ is not None
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("return loss / LENGTH", "return loss"))
    module.loss_of(*batch())

    assert "its file is not the one that runs" in said(applying, "batched-loss", applied=False)[0]


def test_other_losses_are_left_alone(load: Load, applying: Applying) -> None:
    module = load(
        """
        import torch.nn.functional as F

        def loss_of(logits, targets):
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        """
    )
    code = module.loss_of.__code__
    module.loss_of(*batch())
    module.loss_of(*batch())
    applying.end()

    assert module.loss_of.__code__ is code
    assert said(applying, "batched-loss", applied=False) == [
        "no loop over positions that only adds up their cross entropy was seen"
    ]


def test_a_number_on_the_cpu_is_read_as_before(load: Load, applying: Applying) -> None:
    module = load(
        """
        def train(losses):
            history = []
            for loss in losses:
                history.append(loss.item())
            return history
        """
    )
    history = module.train([torch.tensor(1.5), torch.tensor(2.5)])

    assert history == [1.5, 2.5]
    assert type(history[0]) is float
    assert said(applying, "deferred-logging", applied=False) == [
        f"history.append(loss.item()) at {module.__name__}.py:5: the number is on the CPU, where reading it waits for "
        "nothing"
    ]


def test_lines_that_only_keep_what_they_read(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        dedent(
            """\
            history.append(loss.item())
            total += loss.item() * len(batch)
            self.total += loss.item()
            print(loss.item())
            value = loss.item()
            history.append(round(loss.item(), 2))
            history.append(loss)
            total -= loss.item()
            """
        )
    )
    assert kept_in(str(path)) == {
        1: "history.append(loss.item())",
        2: "total += loss.item() * len(batch)",
        3: "self.total += loss.item()",
    }


def test_json_and_torch_take_deferred_numbers_while_they_are_given_out(applying: Applying) -> None:
    from stepscope.record.apply.training import _let_others_read

    numbers: list[Any] = [DeferredNumber(torch.tensor(1.5)), 2.0]
    with pytest.raises(TypeError):
        json.dumps(numbers)
    _let_others_read(applying)

    assert json.dumps(numbers) == json.dumps(numbers, indent=None) == "[1.5, 2.0]"
    assert json.loads(json.dumps({"history": numbers}, indent=1)) == {"history": [1.5, 2.0]}
    assert torch.tensor(numbers).tolist() == [1.5, 2.0]
    assert torch.as_tensor(numbers, dtype=torch.float64).dtype == torch.float64
    applying.remove()
    with pytest.raises(TypeError):
        json.dumps(numbers)
