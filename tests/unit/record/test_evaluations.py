"""Which steps evaluate, by the mode of modules."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

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
