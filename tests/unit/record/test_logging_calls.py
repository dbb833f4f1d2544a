"""Calls that log, named in the trace while a recording is made."""

from __future__ import annotations

import builtins
import io
import json
import logging
import sys
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from stepscope.record.annotations import LOADER_START, PREFIX, LoggingCalls
from stepscope.trace.naming import cause_of_name

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402


def names_recorded(folder: Path, program: Any) -> list[str]:
    """The operators of a program that was profiled while its logging was named."""
    calls = LoggingCalls()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        calls.start()
        program()
        calls.stop()
        program()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith((PREFIX, LOADER_START))]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: another test's torch.compile counts for the whole process."""
    if "torch._dynamo.utils" in sys.modules:
        monkeypatch.setattr(sys.modules["torch._dynamo.utils"], "counters", defaultdict(Counter))


def test_a_call_is_named_only_while_it_is_asked_for(tmp_path: Path) -> None:
    printed = io.StringIO()

    with redirect_stdout(printed):
        names = names_recorded(tmp_path, lambda: print("loss", 3, sep="="))

    assert names == ["stepscope.logging#print"]
    assert printed.getvalue() == "loss=3\nloss=3\n"


def test_only_messages_that_are_written_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("train")
    caplog.set_level(logging.INFO, "train")

    def program() -> None:
        log.debug("not shown")
        log.info("step %d", 3)

    assert names_recorded(tmp_path, program) == ["stepscope.logging#logging"]
    assert [record.funcName for record in caplog.records] == ["program", "program"]


def test_making_an_iterator_over_a_loader_is_named(tmp_path: Path) -> None:
    loader = DataLoader([1, 2, 3, 4], batch_size=2)

    names = names_recorded(tmp_path, lambda: list(loader))

    assert names == ["DataLoader.__iter__"]


def test_progress_bars_are_named(tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm")

    def program() -> None:
        for _ in tqdm.tqdm(range(2), file=io.StringIO(), mininterval=0):
            pass

    names = names_recorded(tmp_path, program)

    assert set(names) == {"stepscope.logging#tqdm"}
    assert len(names) >= 2


def test_the_functions_are_the_programs_own_again() -> None:
    before = builtins.print, logging.Logger.handle, DataLoader.__iter__
    calls = LoggingCalls()

    calls.start()
    during = builtins.print, logging.Logger.handle, DataLoader.__iter__
    calls.stop()
    calls.stop()

    assert all(one is not other for one, other in zip(before, during, strict=True))
    assert (builtins.print, logging.Logger.handle, DataLoader.__iter__) == before


def test_what_the_program_replaced_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = LoggingCalls()
    original = builtins.print

    def own(*_: Any) -> None:
        raise AssertionError

    calls.start()
    builtins.print = own
    calls.stop()
    kept = builtins.print
    builtins.print = original

    assert kept is own


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("stepscope.logging#print", "logging"),
        ("torchmetrics/metric.py(210): forward", "logging"),
        ("sklearn/metrics/_classification.py(150): accuracy_score", "logging"),
        ("<built-in method write of _io.TextIOWrapper object at 0x7f00>", "logging"),
        ("<built-in method writerow of _csv.writer object at 0x7f00>", "logging"),
        ("rich/progress.py(80): track", None),
        ("DataLoader.__iter__", "input"),
        ("torch/utils/data/dataloader.py(430): _get_iterator", "input"),
    ],
)
def test_the_names_give_the_cause_away(name: str, cause: str | None) -> None:
    assert cause_of_name(name) == cause
