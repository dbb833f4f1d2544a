"""The phases of the recording that `stepscope run` makes, and what moves it from one to the next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.record import bootstrap
from stepscope.record.bootstrap import TRANSITIONS, Event, FirstRecording, Phase
from stepscope.record.controller import StepController, StepSource
from stepscope.record.hooks import AllHooks
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RunOptions
from tests.unit.agents import Recording


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., FirstRecording]:
    def begun(**options: Any) -> FirstRecording:
        folder = RunFolder.create(tmp_path, "run", RunManifest(command=("train.py",)))
        controller = StepController(lambda: folder.new_trace_path(0), make_recording=Recording)
        chosen = RunOptions(**{"telemetry": False, "warmup": 2, "steps": 2, **options})
        controller.listener = FirstRecording(controller, AllHooks(controller), folder, chosen)
        return controller.listener

    return begun


def steps(recording: FirstRecording, count: int, source: StepSource = StepSource.OPTIMIZER) -> list[Phase]:
    """The phase after each step."""
    phases = []
    for _ in range(count):
        recording._controller.step_boundary(source)
        phases.append(recording.phase)
    return phases


class TestTable:
    def test_a_recording_goes_from_warm_up_to_rest(self) -> None:
        phase = Phase.WARMING_UP
        for event in (Event.WARM, Event.CAPTURED, Event.TIMED):
            phase = TRANSITIONS[phase, event]
        assert phase is Phase.RESTING

    def test_a_better_sign_of_steps_begins_anew_from_everywhere_but_the_end(self) -> None:
        begins = {phase: TRANSITIONS.get((phase, Event.BETTER_SIGN)) for phase in Phase}
        assert begins == {**dict.fromkeys(Phase, Phase.WARMING_UP), Phase.OVER: None}

    def test_the_end_comes_in_every_phase_and_nothing_follows_it(self) -> None:
        assert all(TRANSITIONS[phase, Event.ENDED] is Phase.OVER for phase in Phase)
        assert {after for (phase, _), after in TRANSITIONS.items() if phase is Phase.OVER} == {Phase.OVER}

    def test_every_phase_can_be_reached_and_every_event_means_something(self) -> None:
        assert {Phase.WARMING_UP, *TRANSITIONS.values()} == set(Phase)
        assert {event for _, event in TRANSITIONS} == set(Event)

    def test_what_makes_no_sense_is_no_move(self) -> None:
        senseless = [
            *((phase, Event.WARM) for phase in Phase if phase is not Phase.WARMING_UP),
            *((phase, Event.TIMED) for phase in Phase if phase is not Phase.TIMING),
            *(
                (phase, event)
                for event in (Event.GAVE_WAY, Event.CAPTURED, Event.CAPTURED_LAST)
                for phase in Phase
                if phase is not Phase.CAPTURING
            ),
        ]
        assert not TRANSITIONS.keys() & set(senseless)
        assert len(TRANSITIONS) + len(senseless) + 1 == len(Phase) * len(Event)  # and a better sign after the end


class TestPhases:
    def test_warm_up_capture_and_times(
        self, begin: Callable[..., FirstRecording], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bootstrap, "TIMED_STEPS", 2)
        recording = begin()
        assert steps(recording, 6) == [
            *[Phase.CAPTURING] * 3,
            *[Phase.TIMING] * 2,
            Phase.RESTING,
        ]
        assert recording._controller.listener is None
        assert [one["trace"] for one in recording._folder.recordings()] == ["trace-1.json.gz"]

    def test_better_steps_are_recorded_too(self, begin: Callable[..., FirstRecording]) -> None:
        recording = begin(warmup=1)
        guessed = steps(recording, 4, StepSource.LOADER)
        better = steps(recording, 1)
        assert (guessed[-1], better) == (Phase.TIMING, [Phase.CAPTURING])
        assert steps(recording, 3)[-1] is Phase.TIMING
        assert len(recording._folder.traces()) == 2

    def test_a_profiler_of_the_programs_is_waited_for(self, begin: Callable[..., FirstRecording]) -> None:
        recording = begin(steps=5)
        assert steps(recording, 2)[-1] is Phase.CAPTURING
        recording._controller._give_way()
        assert steps(recording, 1) == [Phase.WARMING_UP]
        assert steps(recording, 1) == [Phase.CAPTURING]

    def test_the_program_ends_with_its_steps(self, begin: Callable[..., FirstRecording]) -> None:
        recording = begin(exit_after=True)
        with pytest.raises(SystemExit):
            steps(recording, 9)
        assert recording.phase is Phase.RESTING
        assert len(recording._folder.traces()) == 1

    @pytest.mark.parametrize("count", [1, 3, 5])
    def test_an_end_in_any_phase_is_reported_once(self, count: int, begin: Callable[..., FirstRecording]) -> None:
        recording = begin()
        steps(recording, count)
        recording.program_ends()
        (first,) = recording._folder.recordings()
        recording.program_ends()
        assert recording.phase is Phase.OVER
        assert recording._folder.recordings() == [first]
        assert (first["trace"] is None) == (count == 1)

    def test_after_a_failure_nothing_is_done(self, begin: Callable[..., FirstRecording]) -> None:
        recording = begin()
        steps(recording, 2)
        recording.abandon()
        recording.step_ended(3)
        assert recording.phase is Phase.OVER
        assert "failed" in recording._folder.recordings()[0]["problem"]


def test_a_program_that_ends_at_once_does_not_wait_long_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(bootstrap, "_EXIT", ended.append)
    monkeypatch.setattr(bootstrap, "_LONGEST_END_S", 0.0)

    def hang() -> None:
        until = time.monotonic() + 10
        while not ended and time.monotonic() < until:
            time.sleep(0.001)

    bootstrap._ends_now(os.getpid(), hang, 7)
    bootstrap._ends_now(os.getpid() + 1, lambda: None, 8)  # of a child's parent

    assert ended == [7]
