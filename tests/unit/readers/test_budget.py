"""What is made to exhaust a machine is refused in one sentence that names what allows more."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.errors import TooLargeError, UsageError
from stepscope.readers import open_trace
from stepscope.readers.plain_values import load
from stepscope.readers.side_files import lines
from stepscope.readers.source import LIMITS, VARIABLE, Budget, current, parse_limits
from tests.unit.small_traces import complete


def _file(folder: Path) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": [complete(f"op{n}", "cpu_op", n * 10, 5) for n in range(100)]}))
    return path


@pytest.mark.parametrize("limit", ["rows=99", "bytes=1k", "strings=50", "memory=1MiB"])
def test_a_file_above_a_limit_is_refused_and_may_be_allowed(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = limit.partition("=")[0]
    monkeypatch.setattr("stepscope.readers.source._LOOK_S", 0)
    monkeypatch.setenv(VARIABLE, limit)
    with pytest.raises(TooLargeError, match=f"--limit {name}="):
        open_trace(_file(tmp_path))
    monkeypatch.setenv(VARIABLE, "rows=1000,bytes=1M,strings=10k")
    assert open_trace(_file(tmp_path)).operators.height == 100


def test_events_that_are_skipped_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rows=1k")
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + "{}," * 2000 + json.dumps(complete("op", "cpu_op", 1, 5)) + "]}")
    with pytest.raises(TooLargeError, match="--limit rows=2000"):
        open_trace(path)


@pytest.mark.parametrize("name", LIMITS)
def test_each_refusal_names_its_option(name: str) -> None:
    limit = 2.0**30 if name in ("bytes", "memory") else 10
    budget = Budget("file", {name: limit})
    with pytest.raises(TooLargeError) as caught:
        budget.require(name, 2**50)
    option, _, amount = str(caught.value).partition("--limit ")[2].split()[0].partition("=")
    assert (option, parse_limits(f"{option}={amount}")) == (name, {name: 2 * limit})


def test_the_option_sets_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert main(["steps", str(_file(tmp_path)), "--no-cache", "--limit", "rows=99"]) == 2
    assert "--limit rows=198" in capsys.readouterr().err


def test_a_reading_that_nothing_comes_of_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = Budget("file")
    for passed in (59, 59, 61):
        now += passed
        if passed > 60:
            with pytest.raises(TooLargeError, match="--limit idle=120"):
                budget.tick()
        else:
            budget.spend("rows", 1)
            budget.unpack(2**20, 2**20)


def test_time_between_two_files_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    open_trace(_file(tmp_path))
    now += 1
    current().tick()
    now += 3600
    beside = tmp_path / "report.txt"
    beside.write_text("one\ntwo\n")
    assert list(lines(beside)) == ["one", "two"]


def test_values_of_a_pickle_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "values=1k")
    Budget.of("file")
    with pytest.raises(TooLargeError, match="--limit values=2000"):
        load(b"\x80\x04" + b"]" * 1001 + b".", "file")


@pytest.mark.parametrize("text", ["colour=3", "rows", "rows=many", "rows=-1", "rows=1e9", "rows=1Zi"])
def test_an_unknown_limit_is_a_mistake(text: str) -> None:
    with pytest.raises(UsageError, match="rows=1G"):
        parse_limits(text)


def test_the_defaults_let_a_trace_of_2_gb_through() -> None:
    assert LIMITS["rows"].default() >= 15_000_000 * 4
    assert LIMITS["bytes"].default() >= 2 * 10**9 * 10


def test_the_help_lists_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "--help"]) == 0
    assert ", ".join(LIMITS) in " ".join(capsys.readouterr().out.split())
