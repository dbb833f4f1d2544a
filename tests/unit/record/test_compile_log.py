"""torch's log of compilation in a run's folder: its own handler writes it, and a failure ends only the log."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record import run_process
from stepscope.record.run_folder import RunFolder


class Handler(logging.StreamHandler[Any]):
    """As torch's: makes a file in its folder with the first record."""

    def __init__(self, root_dir: str | None) -> None:
        logging.Handler.__init__(self)
        self.root_dir = root_dir
        self.stream = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None and self.root_dir is not None:
            self.stream = tempfile.NamedTemporaryFile("w+", dir=self.root_dir, suffix=".log", delete=False)  # noqa: SIM115
        if self.stream is not None:
            super().emit(record)

    def _close_stream(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None


RECORD = logging.LogRecord("torch.__trace", logging.DEBUG, "a.py", 1, "compiled", None, None)


@pytest.fixture
def torch_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    module = SimpleNamespace(LOG_TRACE_HANDLER=Handler(None))
    monkeypatch.setitem(sys.modules, "torch._logging._internal", module)
    yield module
    module.LOG_TRACE_HANDLER._close_stream()


def written(folder: RunFolder) -> list[str]:
    return [path.read_text() for path in folder.compile_logs.glob("*.log")]


def test_the_log_begins_with_the_first_record(torch_logging: SimpleNamespace, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    run_process.keep_compile_log(folder)
    assert not folder.compile_logs.exists()

    torch_logging.LOG_TRACE_HANDLER.emit(RECORD)

    assert written(folder) == ["compiled\n"]
    assert folder.compile_logs.stat().st_mode & 0o777 == 0o700


def test_a_program_that_has_its_own_log_keeps_it(
    torch_logging: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Handler(str(tmp_path))
    monkeypatch.setattr(torch_logging, "LOG_TRACE_HANDLER", own)

    run_process.keep_compile_log(RunFolder(tmp_path / "run"))

    assert "emit" not in vars(own)


def test_a_torch_without_such_a_handler_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch._logging._internal", SimpleNamespace())
    run_process.keep_compile_log(RunFolder(tmp_path))


def test_a_folder_that_cannot_be_made_ends_only_the_log(
    torch_logging: SimpleNamespace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compile").write_text("a file in its place")
    run_process.keep_compile_log(RunFolder(tmp_path))

    torch_logging.LOG_TRACE_HANDLER.emit(RECORD)
    torch_logging.LOG_TRACE_HANDLER.emit(RECORD)

    assert "emit" not in vars(torch_logging.LOG_TRACE_HANDLER)
    assert torch_logging.LOG_TRACE_HANDLER.root_dir is None
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_ends_only_the_log(
    torch_logging: SimpleNamespace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_process.keep_compile_log(RunFolder(tmp_path))
    handler = torch_logging.LOG_TRACE_HANDLER
    handler.emit(RECORD)
    handler._close_stream()
    with Path("/dev/full").open("w") as full:
        handler.stream = full
        handler.emit(RECORD)

    assert "emit" not in vars(handler)
    assert capfd.readouterr() == ("", "")


def test_a_log_that_grows_too_large_ends(
    torch_logging: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_process, "MOST_LOG_BYTES", 20)
    folder = RunFolder(tmp_path)
    run_process.keep_compile_log(folder)
    for _ in range(10):
        torch_logging.LOG_TRACE_HANDLER.emit(RECORD)

    assert written(folder) == ["compiled\n" * 3]
