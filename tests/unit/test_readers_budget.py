"""What is made to exhaust a machine is refused in one sentence that names what allows more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.errors import NotATraceError, UsageError
from stepscope.readers import open_trace
from stepscope.readers.budget import DEFAULTS, VARIABLE, limit
from stepscope.readers.torch_snapshot.plain_pickle import MOST_OPEN, load
from tests.unit.small_traces import complete


@pytest.mark.parametrize("limits", ["rows=99", "bytes=1K"])
def test_a_file_above_a_limit_is_refused_and_may_be_allowed(
    limits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [complete("op", "cpu_op", place * 10, 5) for place in range(100)]}))
    monkeypatch.setenv(VARIABLE, limits)
    with pytest.raises(NotATraceError, match=f"{VARIABLE}={limits.partition('=')[0]}="):
        open_trace(path)
    monkeypatch.setenv(VARIABLE, "rows=100,bytes=1M")
    assert open_trace(path).operators.height == 100


def test_values_of_a_pickle_that_are_thrown_away_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x80\x04" + b"N0" * 1000 + b"]."
    assert load(data, "file") == []
    monkeypatch.setenv(VARIABLE, "values=1K")
    with pytest.raises(NotATraceError, match="values="):
        load(data, "file")


def test_a_pickle_of_nothing_but_constants_ends_early() -> None:
    with pytest.raises(NotATraceError, match="values open"):
        load(b"\x80\x04(" + b"N" * (MOST_OPEN + 1) + b"l.", "file")


def test_an_unknown_limit_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "colour=3")
    with pytest.raises(UsageError, match="rows=50M"):
        limit("rows")


def test_the_defaults_let_a_trace_of_2_gb_through() -> None:
    assert DEFAULTS["rows"] >= 15_000_000 * 4
    assert DEFAULTS["bytes"] >= 2 * 10**9 * 10
