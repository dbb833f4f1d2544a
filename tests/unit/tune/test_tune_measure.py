"""When a comparison is clear enough, why one failed, and what two real programs compute."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepscope.compare.bench import Bench, BenchCommand, BenchFailure, BenchRun, BenchSettings
from stepscope.compare.statistics import WarmUp
from stepscope.tune.next_trial import BenchMeasure, _is_enough
from stepscope.tune.trials import ON, Configuration, Proposal, Purpose, Space, user_knob
from tests.e2e.conftest import environment

MS = 1_000_000
SPACE = Space((user_knob("--wrong"),))
WRONG = Configuration((("--wrong", ON),))
PROGRAM = """
    import sys, torch
    rate = 0.5 if "--wrong" in sys.argv else 0.01
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(100):
        loss = model(torch.rand(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def bench(before_ms: Sequence[float], after_ms: Sequence[float]) -> Bench:
    """With a run for each mean step."""
    commands = tuple(BenchCommand(label, "x", ("x",), {}) for label in "AB")
    found = Bench(commands, BenchSettings(), Path("nowhere"))
    for number, means in enumerate(zip(before_ms, after_ms, strict=True), start=1):
        for label, mean in zip("AB", means, strict=True):
            steps = tuple(int(mean * MS) + step * 1000 for step in range(20))
            found.runs.append(
                BenchRun(label, number, Path("nowhere"), steps, WarmUp(0, 2, True), "optimizer", "host", 1, True, 3.0)
            )
    found.seconds = 6.0 * len(before_ms)
    return found


@pytest.mark.parametrize(
    ("purpose", "before_ms", "after_ms", "enough"),
    [
        ("screen", [10], [9], False),  # each has to come first once
        ("screen", [10], [11.5], True),  # hopeless
        ("screen", [10, 10], [9, 12], True),
        ("combine", [10], [5], False),
        ("combine", [10, 10.1], [5, 5.1], True),  # shown
        ("combine", [10, 10.1], [10.2, 10.1], True),  # no gain
        ("combine", [10, 12], [9, 11], False),  # not clear
        ("combine", [10, 12, 10, 12, 10], [9, 11, 9, 11, 9], True),  # and will not be soon
        ("simplify", [10], [20], False),
        ("simplify", [10, 12], [9.9, 12], True),  # no slower without
        ("simplify", [10, 12], [10.5, 12.5], False),
        ("simplify", [10, 10.1], [15, 15.1], True),  # shown to be needed
        ("proof", [10], [20], False),
        ("proof", [10, 10, 10], [5, 5, 5], False),  # too few to tell how much runs differ
        ("proof", [10, 10, 10, 10], [5, 5, 5, 5], True),
        ("proof", [10, 14, 10, 14], [5, 9, 5, 9], False),
    ],
)
def test_enough(purpose: Purpose, before_ms: list[float], after_ms: list[float], enough: bool) -> None:
    assert _is_enough(bench(before_ms, after_ms), Proposal(purpose, WRONG), 1e6) is enough


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "enough"),
    [([10, 12], [9, 11], False), ([10, 12], [11, 12.5], True), ([10, 10.1], [5, 5.1], True)],
    ids=["not clear", "no gain", "shown"],
)
def test_what_a_finding_promises_is_measured_until_it_is_clear(
    before_ms: list[float], after_ms: list[float], enough: bool
) -> None:
    runs = bench(before_ms, after_ms)

    assert _is_enough(runs, Proposal("screen", WRONG), 1e6, is_promised=True) is enough
    assert _is_enough(runs, Proposal("screen", WRONG), 1e6)


def test_a_proof_takes_four_rounds_also_where_no_time_is_left() -> None:
    assert not _is_enough(bench([10, 14, 10], [5, 9, 5]), Proposal("proof", WRONG), 1.0)
    assert _is_enough(bench([10, 14, 10, 14], [5, 9, 5, 9]), Proposal("proof", WRONG), 1.0)


def measure(folder: Path, *words: str) -> BenchMeasure:
    return BenchMeasure(words, (sys.executable, *words), SPACE, folder, BenchSettings(steps=5, seed=0))


@pytest.mark.parametrize(
    ("printed", "sentence", "reason"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n", "failed with exit code 1", "out of memory"),
        ("", "failed with exit code 137 after 3 steps", "out of memory"),
        ("ValueError: no\n", "failed with exit code 1", "the program failed with exit code 1: ValueError: no"),
        ("", "failed with exit code 1", "the program failed with exit code 1"),
    ],
)
def test_why_a_program_failed(tmp_path: Path, printed: str, sentence: str, reason: str) -> None:
    (tmp_path / "log").write_text(printed)
    failure = BenchFailure("B", 1, sentence, tmp_path / "log")
    found = measure(tmp_path, "x")._failed(bench([], []), failure, Proposal("screen", WRONG))
    assert (found.reason, found.is_program, found.measured) == (reason, False, None)
    found = measure(tmp_path, "x")._failed(
        bench([], []), BenchFailure("A", 1, sentence, tmp_path / "log"), Proposal("screen", WRONG)
    )
    assert (found.reason, found.is_program) == (f"its reference: {reason}", True)


def test_a_run_may_take_long_but_not_for_ever(tmp_path: Path) -> None:
    measuring = measure(tmp_path, "x")
    assert measuring._limit_s(10.0) == 300.0  # nothing is known yet
    measuring._longest_s = 20.0
    assert measuring._limit_s(10_000.0) == 500.0
    assert measuring._limit_s(1.0) == 200.0


def test_real_losses_start_alike_without_a_seed_of_the_programs_and_then_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    found = measure(tmp_path, str(script))(Proposal("screen", WRONG), 0, 1e6)
    assert [(run["side"], run["round"], len(run["step_ns"])) for run in found.runs] == [("A", 1, 5), ("B", 1, 5)]
    before, after = (run["losses"] for run in found.runs)
    assert len(before) == len(after) == 6
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert found.reason == "the losses differ"
    assert found.measured is not None
    assert found.measured.losses.equal is False
