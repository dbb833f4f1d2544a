"""Searches over a real study: going on after a stop, sharing, and what the study keeps."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.tune.next_trial import Outcome
from stepscope.tune.search import Search, TuneResult, TuneStudy, share_of_unchanged
from stepscope.tune.study import open_study, process_name
from stepscope.tune.trials import ON, Configuration, Knob, Proposal, Trial
from tests.unit.tune.searches import Truth, measured, space_of

SPACE = space_of(Knob("compile"), Knob("fuse-optimizer"), Knob("workers", ("1", "2"), draws=True), Knob("zero-grad"))
FACTORS = {"fuse-optimizer": 0.8, "workers=1": 0.9, "workers=2": 0.6}


def study(place: Path) -> TuneStudy:
    return TuneStudy(open_study(place / "study.db", "search"))


def search(place: Path, truth: Truth, **more: Any) -> TuneResult:
    truth.space = SPACE
    return Search(study(place), SPACE, truth, place / "lock", 1e6, pause_s=0.0, **more).run()


def stop_at(number: int, truth: Truth) -> Truth:
    """The same, but Ctrl-C comes in the measurement of that number."""

    def before(proposal: Proposal) -> None:
        if len(truth.proposals) == number:
            raise KeyboardInterrupt

    truth.before = before
    return truth


def test_a_search_to_its_end(tmp_path: Path) -> None:
    truth = Truth(FACTORS, failing={"zero-grad": "not applied: the program steps no optimizer"})
    found = search(tmp_path, truth)
    assert (found.stop, dict(found.best.settings)) == ("done", {"fuse-optimizer": ON, "workers": "2"})
    assert found.is_proven
    assert found.proof is not None
    assert found.proof.measured is not None
    assert found.proof.measured.change == pytest.approx(0.48 - 1)
    purposes = [proposal.purpose for proposal in truth.proposals]
    assert purposes[:5] == ["screen"] * 5
    assert purposes[-1] == "proof"
    assert len({proposal.key for proposal in truth.proposals}) == len(purposes)
    tried = [proposal.configuration for proposal in truth.proposals if proposal.purpose == "refine"]
    assert len(tried) == len(set(tried)) <= 8
    assert all(configuration.value("zero-grad") is None for configuration in tried)  # it failed alone
    again = Truth(FACTORS)
    assert search(tmp_path, again).best == found.best
    assert again.proposals == []


def test_a_stopped_search_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = Truth(FACTORS)
    expected = search(tmp_path / "whole", whole)
    first = stop_at(3, Truth(FACTORS))
    stopped = search(tmp_path / "parts", first)
    assert (stopped.stop, len(first.proposals), len(stopped.trials)) == ("interrupted", 3, 3)
    second = Truth(FACTORS)
    found = search(tmp_path / "parts", second)
    assert (found.stop, found.best) == ("done", expected.best)
    assert [each.key for each in first.proposals + second.proposals][:5] == [each.key for each in whole.proposals][:5]
    assert found.proof is not None


def test_what_a_killed_process_measured_is_measured_again(tmp_path: Path) -> None:
    shared = study(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    proposal = Proposal("screen", Configuration((("compile", ON),)))
    for owner in ({**process_name(), "process": gone.pid}, {"machine": "another", "process": 1, "started": "1"}):
        shared.study.enqueue_trial({}, user_attrs={"proposal": proposal.key})
        shared.study.ask().set_user_attr("owner", owner)
    assert shared.trials() == []
    shared.study.enqueue_trial({}, user_attrs={"proposal": proposal.key})
    shared.study.ask().set_user_attr("owner", process_name())
    assert [trial.state for trial in shared.trials()] == ["running"]


def test_two_processes_take_different_trials(tmp_path: Path) -> None:
    truths = [Truth(FACTORS), Truth(FACTORS)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda truth: search(tmp_path, truth), truths))
    assert found[0].best == found[1].best == Configuration.of({"fuse-optimizer": ON, "workers": "2"})
    keys = [proposal.key for truth in truths for proposal in truth.proposals]
    assert len(keys) == len(set(keys))
    assert found[0].proof == found[1].proof


def test_what_somebody_else_took_first_is_left_to_him(tmp_path: Path) -> None:
    proposal = Proposal("screen", Configuration((("compile", ON),)))
    with study(tmp_path).claimed(proposal, SPACE) as first, study(tmp_path).claimed(proposal, SPACE) as second:
        assert first is not None
        assert second is None
    assert study(tmp_path).trials() == []  # neither said what came of it


def test_a_trial_keeps_its_steps_interval_and_losses(tmp_path: Path) -> None:
    proposal = Proposal("screen", Configuration((("workers", "2"),)))
    runs = ({"side": "A", "round": 1, "step_ns": [5, 6], "dropped": 0, "losses": [1.0]},)
    with study(tmp_path).claimed(proposal, SPACE) as claim:
        assert claim is not None
        told = claim.tell(Outcome(measured(-0.25), runs=runs, folder="nowhere"), reference=0.5)
    assert study(tmp_path).trials() == [told]
    [kept] = study(tmp_path).study.trials
    assert kept.value == pytest.approx(0.375)
    assert kept.params == {
        "compile": "unchanged",
        "fuse-optimizer": "unchanged",
        "workers": "2",
        "zero-grad": "unchanged",
    }
    assert kept.user_attrs["run A-1"] == runs[0]


def test_a_program_that_fails_as_it_is_ends_the_search(tmp_path: Path) -> None:
    def failing(proposal: Proposal, number: int, left_s: float) -> Outcome:
        return Outcome(reason="the program failed with exit code 7", is_program=True)

    with pytest.raises(UsageError, match="exit code 7"):
        Search(study(tmp_path), SPACE, failing, tmp_path / "lock", 1e6).run()


def test_a_proof_that_was_not_clear_is_measured_again_and_one_that_was_is_not(tmp_path: Path) -> None:
    class Unclear(Truth):
        def __call__(self, proposal: Proposal, number: int, left_s: float) -> Outcome:
            outcome = super().__call__(proposal, number, left_s)
            return Outcome(measured(-0.5, half_width=0.9)) if proposal.purpose == "proof" else outcome

    first = search(tmp_path, Unclear(FACTORS))
    assert not first.is_proven
    again = Truth(FACTORS)
    assert search(tmp_path, again).is_proven
    assert [proposal.purpose for proposal in again.proposals] == ["proof"]


def test_no_time_is_left(tmp_path: Path) -> None:
    truth = Truth(FACTORS, space=SPACE)
    found = Search(study(tmp_path), SPACE, truth, tmp_path / "lock", 0.0).run()
    assert (found.stop, found.best.settings, truth.proposals) == ("budget", (), [])


@pytest.mark.parametrize(("factors", "purposes"), [(FACTORS, ["screen"] * 4 + ["proof"]), ({}, ["screen"] * 5)])
def test_time_is_kept_for_a_proof_only_where_there_is_something_to_prove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: dict[str, float], purposes: list[str]
) -> None:
    now = 0.0

    def fifteen_seconds(proposal: Proposal) -> None:
        nonlocal now
        now += 15.0

    monkeypatch.setattr(
        "stepscope.tune.search.time",
        SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None, time=time.time, time_ns=time.time_ns),
    )
    truth = Truth(factors, space=SPACE, before=fifteen_seconds)
    Search(study(tmp_path), SPACE, truth, tmp_path / "lock", 70.0).run()
    assert [proposal.purpose for proposal in truth.proposals[:5]] == purposes


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    program = {"words": ["train.py"], "script": "a1", "steps": 50}
    study(tmp_path).check_program(program)
    study(tmp_path).check_program(program)
    with pytest.raises(UsageError, match=r"the study search belongs to another command, train\.py"):
        study(tmp_path).check_program({**program, "words": ["other.py"]})
    with pytest.raises(UsageError, match="was begun with another script"):
        study(tmp_path).check_program({**program, "script": "b2"})


def test_a_study_of_another_tool_or_a_damaged_one(tmp_path: Path) -> None:
    shared = study(tmp_path)
    shared.study.enqueue_trial({}, user_attrs={"proposal": '["screen", [], [["x", ""]]]', "outcome": {"state": 7}})
    with pytest.raises(UsageError, match="did not create the study search"):
        shared.check_program({"words": ["train.py"]})
    shared.study.ask()
    with pytest.raises(UsageError, match="the study search is damaged, or from another version of stepscope: "):
        shared.trials()
    shared.study.set_user_attr("space 1", {"knobs": [{"colour": "red"}], "said": []})
    with pytest.raises(UsageError, match="the study search is damaged"):
        shared.space()


def test_the_space_of_the_first_process_counts(tmp_path: Path) -> None:
    assert study(tmp_path).space() is None
    assert study(tmp_path).keep_space(SPACE) == SPACE
    assert study(tmp_path).keep_space(space_of(Knob("compile"))) == SPACE


def test_a_step_as_a_share_of_the_unchanged_program() -> None:
    fused, both = Configuration.of({"fuse-optimizer": ON}), Configuration.of({"fuse-optimizer": ON, "workers": "2"})
    trials = [
        Trial(0, Proposal("screen", fused), "measured", "", measured(-0.5)),
        Trial(1, Proposal("combine", both, fused), "measured", "", measured(-0.2)),
    ]
    assert share_of_unchanged(both, trials) == pytest.approx(0.4)
    assert share_of_unchanged(Configuration(), trials) == 1.0
