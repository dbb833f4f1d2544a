"""The recorder: what it writes, and that it leaves the program alone whatever happens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope
from stepscope.errors import UsageError
from stepscope.record.recorder import Recorder, profiler_is_active
from stepscope.record.schedule import RecordOptions

torch = pytest.importorskip("torch")

PLAIN = RecordOptions(shapes=False, memory=False, lines=False)


@pytest.fixture(autouse=True)
def _no_profiler_left() -> Iterator[None]:
    yield
    assert not profiler_is_active()


def _work() -> None:
    value = torch.ones(4, 4, requires_grad=True)
    (value @ value).sum().backward()


def test_steps_are_numbered_from_the_first(tmp_path: Path) -> None:
    recorder = Recorder(PLAIN, first_step=7)
    recorder.start()
    for _ in range(2):
        _work()
        recorder.step()
    _work()
    recorder.stop()

    path = recorder.save(tmp_path / "deep" / "trace.json.gz")

    trace = stepscope.open_trace(path)
    assert trace.annotations["step"].drop_nulls().to_list() == [7, 8, 9]
    assert trace.operators.filter(trace.operators["name"] == "aten::mm").height == 9
    assert trace.warnings == ()
    assert recorder.problem is None
    assert [child.name for child in path.parent.iterdir()] == ["trace.json.gz"]


def test_the_warm_up_is_not_kept(tmp_path: Path) -> None:
    recorder = Recorder(PLAIN)
    recorder.prepare()
    torch.zeros(3)
    recorder.start()
    torch.ones(3)

    path = recorder.save(tmp_path / "trace.json")

    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::ones" in names
    assert "aten::zeros" not in names


def test_options_are_what_the_profiler_is_asked_for(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(shapes=True, stacks=True, memory=True, lines=False, flops=True, modules=True))
    recorder.start()
    _work()

    trace = stepscope.open_trace(recorder.save(tmp_path / "trace.json.gz"))

    assert trace.metadata.recorded is not None
    assert sorted(trace.metadata.recorded) == ["flops", "memory", "modules", "shapes", "stacks"]
    assert trace.frames.height > 0
    assert trace.memory.height > 0


def test_other_threads_are_recorded_and_may_stop_it(tmp_path: Path) -> None:
    recorder = Recorder(PLAIN)
    recorder.start()
    for function in (_work, recorder.stop):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    trace = stepscope.open_trace(recorder.save(tmp_path / "trace.json.gz"))

    assert trace.operators.height > 0
    assert recorder.problem is None


def test_with_allocations_another_thread_stops_it_at_the_next_step(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(shapes=False, memory=True, lines=False))
    recorder.start()
    _work()
    thread = threading.Thread(target=recorder.stop)
    thread.start()
    thread.join()
    assert recorder.is_recording
    recorder.step()
    assert not recorder.is_recording

    trace = stepscope.open_trace(recorder.save(tmp_path / "trace.json.gz"))

    assert trace.annotations["step"].drop_nulls().to_list() == [0]


def test_with_allocations_another_thread_discards_it_at_the_next_step(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(shapes=False, memory=True, lines=False))
    recorder.start()
    thread = threading.Thread(target=recorder.discard)
    thread.start()
    thread.join()
    recorder.step()

    with pytest.raises(UsageError, match="nothing was recorded"):
        recorder.save(tmp_path / "trace.json.gz")


def test_a_launcher_names_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    recorder = Recorder(PLAIN)
    recorder.start()
    _work()

    metadata = stepscope.open_trace(recorder.save(tmp_path / "trace.json.gz")).metadata

    assert (metadata.rank, metadata.world_size) == (3, 8)


def test_calls_may_be_repeated_and_come_in_any_order(tmp_path: Path) -> None:
    recorder = Recorder(PLAIN)
    recorder.step()
    recorder.stop()
    for _ in range(2):
        recorder.prepare()
    for _ in range(2):
        recorder.start()
    _work()
    for _ in range(2):
        recorder.stop()
    recorder.start()
    recorder.step()

    assert recorder.step_number == 0
    assert recorder.save(tmp_path / "one.json.gz").exists()
    with pytest.raises(UsageError, match=r"already saved as .*one\.json\.gz"):
        recorder.save(tmp_path / "two.json.gz")


def test_what_is_discarded_cannot_be_saved(tmp_path: Path) -> None:
    recorder = Recorder(PLAIN)
    recorder.start()
    _work()
    recorder.discard()

    with pytest.raises(UsageError, match="nothing was recorded"):
        recorder.save(tmp_path / "trace.json.gz")


def test_a_warm_up_without_a_recording_leaves_nothing(tmp_path: Path) -> None:
    recorder = Recorder(PLAIN)
    recorder.prepare()
    recorder.stop()

    with pytest.raises(UsageError, match="nothing was recorded"):
        recorder.save(tmp_path / "trace.json.gz")
    following = Recorder(PLAIN)
    following.start()
    assert following.is_recording
    following.discard()


def test_a_second_recording_is_a_problem_and_not_an_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Recorder(PLAIN), Recorder(PLAIN)
    first.start()
    second.start()
    second.step()
    second.stop()
    _work()

    assert first.save(tmp_path / "trace.json.gz").exists()
    assert second.problem is not None
    assert capsys.readouterr().err == f"stepscope: {second.problem}\n"
    with pytest.raises(UsageError, match="another recording of stepscope is running"):
        second.save(tmp_path / "other.json.gz")


def test_a_users_own_profiler_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        recorder = Recorder(PLAIN)
        recorder.start()
        torch.ones(3)
        recorder.stop()

    assert "another profiler of torch is running" in capsys.readouterr().err
    assert "aten::ones" in {event.name for event in own.events()}
    following = Recorder(PLAIN)
    following.start()
    assert following.is_recording
    following.discard()


def test_a_failing_profiler_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(torch.profiler._KinetoProfile, "start_trace", broken)
    recorder = Recorder(PLAIN)
    recorder.start()
    recorder.step()
    recorder.stop()
    monkeypatch.undo()

    assert capsys.readouterr().err == "stepscope: the recording could not be started: no counters\n"
    torch.autograd.profiler._is_profiler_enabled = False  # what the broken start left behind
    torch._C._autograd._disable_profiler()


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(PLAIN)
    recorder.start()
    _work()

    with pytest.raises(UsageError, match="the trace cannot be written to"):
        recorder.save(tmp_path / "file" / "trace.json.gz")
