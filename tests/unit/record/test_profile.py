"""`stepscope.profile`: which steps are recorded, where they go, and that the program goes on whatever happens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.errors import UsageError
from stepscope.record import profile_block
from stepscope.record.profile_block import TracePlaces
from stepscope.record.recorder import Recorder, profiler_is_active
from stepscope.record.schedule import RecordOptions

torch = pytest.importorskip("torch")

PLAIN: dict[str, Any] = {"shapes": False, "memory": False, "lines": False}


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("STEPSCOPE_RUN", raising=False)
    yield
    assert not profiler_is_active()
    assert profile_block._one_block.acquire(blocking=False)
    profile_block._one_block.release()


def steps_of(path: Path) -> list[int]:
    found: list[int] = stepscope.open_trace(path).annotations["step"].drop_nulls().to_list()
    return found


def train(profile: Any, steps: int) -> None:
    for _ in range(steps):
        torch.ones(3).sum()
        profile.step()


@pytest.mark.slow
def test_each_cycle_is_a_trace_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = stepscope.schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2)

    with stepscope.profile(tmp_path / "trace.json.gz", schedule=schedule, **PLAIN) as profile:
        train(profile, 12)
        assert not profile.is_recording

    assert [path.name for path in profile.traces] == ["trace.json.gz", "trace-2.json.gz"]
    assert [steps_of(path) for path in profile.traces] == [[3, 4], [7, 8]]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"stepscope: steps 3 to 4 recorded: {tmp_path / 'trace.json.gz'}\n"
        f"stepscope: steps 7 to 8 recorded: {tmp_path / 'trace-2.json.gz'}\n"
    )


def train_and_raise(profile: Any, steps: int, error: Exception) -> None:
    train(profile, steps)
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_cycles_without_a_pause_follow_each_other(tmp_path: Path, warmup: int) -> None:
    schedule = stepscope.schedule(warmup=warmup, active=1)

    with stepscope.profile(tmp_path, schedule=schedule, **PLAIN) as profile:
        train(profile, 5)

    expected = {0: [[0], [1], [2], [3], [4], [5]], 1: [[1], [3], [5]], 2: [[2], [5]]}[warmup]
    assert [steps_of(path) for path in profile.traces] == expected
    assert [path.name for path in profile.traces][:2] == ["trace-1.json.gz", "trace-2.json.gz"]


def test_torchs_schedule_and_handler_will_do(tmp_path: Path) -> None:
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path / "board"))
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)

    with stepscope.profile(tmp_path / "own.json.gz", schedule=schedule, on_trace_ready=handler, **PLAIN) as profile:
        train(profile, 4)

    (copied,) = (tmp_path / "board").iterdir()
    assert "traceEvents" in json.loads(copied.read_text())
    assert steps_of(copied) == steps_of(tmp_path / "own.json.gz") == [1]


def test_without_a_schedule_the_whole_block_is_recorded(tmp_path: Path) -> None:
    with stepscope.profile(tmp_path / "trace.json", **PLAIN) as profile:
        assert profile.is_recording
        torch.ones(3)

    assert steps_of(tmp_path / "trace.json") == [0]


def test_what_was_recorded_before_an_exception_is_kept(tmp_path: Path) -> None:
    mine = KeyError("mine")
    schedule = stepscope.schedule(warmup=1, active=5)

    def handler(_: object) -> None:
        raise ValueError("handler")

    profile = stepscope.profile(tmp_path / "t.json.gz", schedule=schedule, on_trace_ready=handler, **PLAIN)
    with pytest.raises(KeyError) as caught, profile:
        train_and_raise(profile, 3, mine)

    assert caught.value is mine
    assert caught.value.__context__ is None
    assert steps_of(tmp_path / "t.json.gz") == [1, 2, 3]
    assert profile.problem == "on_trace_ready failed: handler"


def test_an_exception_while_the_profiler_warms_up_leaves_no_trace(tmp_path: Path) -> None:
    schedule = stepscope.schedule(warmup=3, active=5)

    profile = stepscope.profile(tmp_path / "trace.json.gz", schedule=schedule, **PLAIN)
    with pytest.raises(KeyError), profile:
        train_and_raise(profile, 2, KeyError())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_users_handler_that_fails_is_the_users_error(tmp_path: Path) -> None:
    def handler(_: object) -> None:
        raise ValueError("handler")

    schedule = stepscope.schedule(warmup=0, active=1)
    with (
        pytest.raises(ValueError, match="handler"),
        stepscope.profile(tmp_path, schedule=schedule, on_trace_ready=handler, **PLAIN) as profile,
    ):
        train(profile, 1)


def test_a_full_disk_does_not_end_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    with stepscope.profile(tmp_path / "file" / "trace.json.gz", **PLAIN) as profile:
        train(profile, 2)

    assert profile.traces == ()
    assert "stepscope: the trace was not saved: the trace cannot be written to" in capsys.readouterr().err


def test_blocks_do_not_overlap(tmp_path: Path) -> None:
    with stepscope.profile(tmp_path / "outer.json.gz", **PLAIN) as outer:
        with (
            pytest.raises(UsageError, match="another profile block is open in this process; blocks cannot overlap"),
            stepscope.profile(tmp_path / "inner.json.gz", **PLAIN),
        ):
            pytest.fail("the block was entered")
        train(outer, 1)

    assert steps_of(tmp_path / "outer.json.gz") == [0, 1]
    assert not (tmp_path / "inner.json.gz").exists()


def test_another_profiler_is_not_disturbed(tmp_path: Path) -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs,
        pytest.raises(UsageError, match="another profiler of torch is running"),
        stepscope.profile(tmp_path, **PLAIN),
    ):
        pytest.fail("the block was entered")

    assert theirs.events() is not None


@pytest.mark.slow
def test_a_recording_on_demand_has_the_profiler_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_demand = Recorder(RecordOptions(**PLAIN))
    schedule = stepscope.schedule(warmup=1, active=1, repeat=1)
    with stepscope.profile(tmp_path, schedule=stepscope.schedule(wait=1, active=1, repeat=1), **PLAIN) as profile:
        on_demand.start()
        train(profile, 4)

    on_demand.discard()
    assert profile.traces == ()
    assert profile.problem is not None
    assert "another recording of stepscope is running in this process" in capsys.readouterr().err
    with stepscope.profile(tmp_path, schedule=schedule, **PLAIN) as following:
        train(following, 3)
    assert len(following.traces) == 1


@pytest.mark.slow
def test_several_blocks_and_one_block_again(tmp_path: Path) -> None:
    for number in range(2):
        with stepscope.profile(tmp_path / f"{number}.json.gz", **PLAIN) as profile:
            train(profile, 1)
    profile.start()
    train(profile, 2)
    profile.stop()
    profile.stop()
    profile.step()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json.gz", "1-2.json.gz", "1.json.gz"]
    assert steps_of(tmp_path / "1-2.json.gz") == [0, 1, 2]


def test_steps_may_come_from_another_thread(tmp_path: Path) -> None:
    with stepscope.profile(tmp_path / "trace.json.gz", **PLAIN) as profile:
        thread = threading.Thread(target=train, args=(profile, 2))
        thread.start()
        thread.join()

    trace = stepscope.open_trace(tmp_path / "trace.json.gz")
    assert trace.annotations["step"].drop_nulls().to_list() == [0, 1, 2]
    assert trace.operators.filter(trace.operators["name"] == "aten::ones").height == 2


@pytest.mark.slow
def test_the_diagnosis_as_an_object_and_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stepscope.profile(tmp_path / "trace.json.gz", diagnose=True) as profile:
        assert profile.diagnosis() is None
        train(profile, 4)

    diagnosis = profile.diagnosis()
    assert diagnosis is not None
    assert diagnosis.step_source == "annotation"
    assert "No device was recorded; a step takes" in capsys.readouterr().out


def test_the_controller_hears_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boundaries: list[int] = []
    monkeypatch.setattr(profile_block, "tell_controller", lambda: boundaries.append(1))

    schedule = stepscope.schedule(wait=9, active=1)
    with stepscope.profile(tmp_path, schedule=schedule, **PLAIN) as profile:
        train(profile, 3)

    assert boundaries == [1, 1, 1]


def test_a_schedule_that_says_nonsense(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="profile: the schedule returned None"),
        stepscope.profile(tmp_path, schedule=lambda step: None, **PLAIN),
    ):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("out", ["trace.txt", "trace.json.zip", "trace.pt"])
def test_files_with_other_suffixes_are_refused(out: str) -> None:
    with pytest.raises(UsageError, match=rf"out is a file that ends in \.json\.gz or \.json, or a folder, not '{out}'"):
        stepscope.profile(out)


def test_without_torch_the_block_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_block, "find_spec", lambda name: None)

    with pytest.raises(UsageError, match="profile: recording needs PyTorch, which is not installed here"):
        stepscope.profile("trace.json").start()


def test_places_of_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_block, "rank_and_world_size", lambda: (3, 8))

    files, folder = TracePlaces(tmp_path / "trace.json", None), TracePlaces(tmp_path / "traces", None)

    assert [files.next().name for _ in range(2)] == ["trace-rank3.json", "trace-rank3-2.json"]
    assert [folder.next().relative_to(tmp_path) for _ in range(2)] == [
        Path("traces/rank3/trace-1.json.gz"),
        Path("traces/rank3/trace-2.json.gz"),
    ]


def test_without_out_a_run_folder_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))

    with stepscope.profile(name="first", **PLAIN) as profile:
        train(profile, 1)

    (path,) = profile.traces
    assert path.name == "trace-1.json.gz"
    assert (path.parents[1].name, path.parent.name) == ("first", "rank0")
    assert (path.parents[1] / "run.json").is_file()


@pytest.mark.slow
def test_under_stepscope_run_its_folder_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    with stepscope.profile(name="first", **PLAIN) as first:
        train(first, 1)
    monkeypatch.setenv("STEPSCOPE_RUN", str(first.traces[0].parents[1]))

    with stepscope.profile(**PLAIN) as second:
        train(second, 1)

    assert second.traces[0] == first.traces[0].with_name("trace-2.json.gz")


def test_a_block_that_made_a_run_notes_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.record.runs import RunIndex

    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("STEPSCOPE_RUN", raising=False)
    with stepscope.profile(name="inside", lines=False) as profile:
        profile.step()
    [record] = RunIndex().all()
    assert (record.name, record.exit_code, record.traces) == ("inside", 0, 1)
