"""`stepscope memory --fit`, as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.commands import main
from tests.simulator.allocator import training


def test_a_limit_below_the_peak_and_one_above(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = str(training().dump(tmp_path / "snapshot.pickle"))

    answers = {}
    for limit in ("1MiB", "1GiB"):
        code = main(
            ["memory", snapshot, "--fit", "--memory-limit", limit, "--batch-factor", "0.25", "--format", "json"]
        )
        assert code == 0
        [device] = json.loads(capsys.readouterr().out)["devices"]
        answers[limit] = device

    assert answers["1GiB"]["limit_bytes"] == 1 << 30
    assert all(row["fits"] and row["failed_bytes"] is None for row in answers["1GiB"]["changes"])
    asked, recorded = answers["1GiB"]["changes"][:2]
    assert (asked["batch_factor"], recorded["batch_factor"]) == (0.25, 1.0)
    assert asked["peak_bytes"] < recorded["peak_bytes"]
    assert all(not row["fits"] and row["failed_bytes"] > 0 for row in answers["1MiB"]["changes"])


def test_as_text_the_failing_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = str(training().dump(tmp_path / "snapshot.pickle"))

    assert main(["memory", snapshot, "--fit", "--memory-limit", "1MiB"]) == 0
    assert "model.py:12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-factor", "2"], "--batch-factor needs --fit"),
        (["--memory-limit", "2GiB"], "--memory-limit needs --fit"),
        (["--fit", "--batch-factor", "-1"], "is not a factor"),
        (["--fit", "--checkpoint", "layers.*"], "do not show which modules made them"),
        (["--fit", "--sort", "peak_bytes"], "--sort needs"),
    ],
)
def test_what_cannot_be_replayed(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(training().dump(tmp_path / "snapshot.pickle"))

    assert main(["memory", snapshot, *words]) == 2
    assert message in capsys.readouterr().err
