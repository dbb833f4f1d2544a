"""Recording by XLA's profiler when it fails or is called out of order; what it records is in tests/e2e/test_jax.py."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.errors import UsageError
from stepscope.record.controller import StepSource, new_recording
from stepscope.record.schedule import RecordOptions
from stepscope.record.xla import JaxProfiler, TorchXlaProfiler, XlaRecorder


class Profiler:
    """Writes what it was asked to do, and into the file which steps were open."""

    def __init__(self, *, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails
        self._folder = Path()

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self._fails:
            raise RuntimeError("no such luck")

    def start(self, folder: Path, options: RecordOptions) -> None:
        self._called("start")
        self._folder = folder

    def stop(self) -> None:
        self._called("stop")
        place = self._folder / "plugins" / "profile" / "now"
        place.mkdir(parents=True)
        (place / "host.xplane.pb").write_text(" ".join(self.calls))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._called(f"step {number}")
        yield
        self.calls.append(f"end {number}")

    def wait(self) -> None:
        self._called("wait")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where recordings are kept until they are saved."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_steps_are_marked_between_a_start_for_warm_up_and_the_devices_end(tmp_path: Path, temporary: Path) -> None:
    recorder = XlaRecorder(Profiler(), RecordOptions(), first_step=7)
    recorder.prepare()
    recorder.start()
    recorder.step()
    recorder.stop()

    saved = recorder.save(tmp_path / "rank0" / "trace-1.json.gz")

    assert saved == tmp_path / "rank0" / "trace-1.xplane.pb"
    assert saved.read_text() == "start stop start step 7 end 7 step 8 end 8 wait stop"
    assert list(temporary.iterdir()) == []
    with pytest.raises(UsageError, match="nothing was recorded"):
        recorder.save(tmp_path / "again.json.gz")


def test_a_program_that_marks_its_steps_keeps_its_own_marks(tmp_path: Path) -> None:
    recorder = XlaRecorder(Profiler(), RecordOptions(), marks_steps=False)
    recorder.start()
    recorder.step()
    assert recorder.save(tmp_path / "trace.json").read_text() == "start stop start wait stop"


def test_what_is_discarded_leaves_nothing(temporary: Path) -> None:
    recorder = XlaRecorder(Profiler(), RecordOptions())
    recorder.start()
    assert recorder.is_recording
    recorder.discard()
    recorder.step()
    assert not recorder.is_recording
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("fails", "problem"),
    [
        ("start", "the profiler could not be prepared: no such luck"),
        ("stop", "the profiler could not be prepared: no such luck"),
        ("step 0", "the recording could not be started: no such luck"),
        ("wait", "the devices could not be waited for: no such luck"),
    ],
)
def test_no_failure_reaches_the_program(
    fails: str, problem: str, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = XlaRecorder(Profiler(fails=fails), RecordOptions())
    recorder.start()
    recorder.step()
    recorder.stop()

    assert recorder.problem == problem
    assert capsys.readouterr().err == f"stepscope: {problem}\n"
    with contextlib.suppress(UsageError):
        recorder.save(tmp_path / "trace.json.gz")
    recorder.discard()
    assert list(temporary.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_and_the_recording_kept(tmp_path: Path) -> None:
    recorder = XlaRecorder(Profiler(), RecordOptions())
    recorder.start()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="the trace cannot be written to"):
        recorder.save(tmp_path / "file" / "trace.json.gz")
    assert recorder.save(tmp_path / "trace.json.gz").is_file()


@pytest.mark.parametrize(
    ("modules", "source", "uses_jax", "profiler"),
    [
        (("jax",), StepSource.EXPLICIT, False, JaxProfiler),
        (("jax",), StepSource.JITTED, True, JaxProfiler),
        (("jax", "torch"), StepSource.LOADER, True, JaxProfiler),
        (("jax", "torch"), StepSource.EXPLICIT, True, JaxProfiler),
        (("jax", "torch"), StepSource.LOADER, False, None),
        (("jax", "torch"), StepSource.OPTIMIZER, True, None),
        (("torch",), StepSource.EXPLICIT, False, None),
        (("torch", "torch_xla"), StepSource.OPTIMIZER, False, TorchXlaProfiler),
    ],
)
def test_the_profiler_is_that_of_what_does_the_steps(
    modules: tuple[str, ...],
    source: StepSource,
    uses_jax: bool,
    profiler: type | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    runs = SimpleNamespace(_XLAC=SimpleNamespace(_xla_runtime_is_initialized=lambda: True))
    for name in ("jax", "torch", "torch_xla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, runs)
    if profiler is None:
        monkeypatch.setattr("stepscope.record.recorder.Recorder", lambda *_, **__: None)

    recording = new_recording(RecordOptions(), 3, source, uses_jax=uses_jax)

    assert (type(recording._profiler) if isinstance(recording, XlaRecorder) else None) is profiler
