"""`stepscope compare` as users run it: a process, files, pipes and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import BATCHED, PER_TOKEN, Stepscope


def test_a_slower_program_fails_the_build(run: Stepscope, tmp_path: Path) -> None:
    report, page = tmp_path / "comparison.json", tmp_path / "comparison.md"

    done = run("compare", BATCHED, PER_TOKEN, "--fail-if-slower", "3%", "--json", report, "--markdown", page)

    assert done.code == 1
    assert "Slower: a step takes " in done.out
    assert "per_token_loss" in done.out
    assert "--fail-if-slower 3.0 %" in done.err
    (found,) = json.loads(report.read_text())["comparisons"]
    assert found["verdict"] == "slower"
    assert sum(row["before_total_ns"] for row in found["causes"]) == found["before"]["total_ns"]
    heading, *_, verdict = page.read_text().partition("**Slower: a step takes ")
    assert heading.startswith("### ")
    assert " against " in heading
    assert verdict
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.json", "comparison.md"]


def test_a_faster_program_does_not(run: Stepscope) -> None:
    done = run("compare", PER_TOKEN, BATCHED, "--fail-if-slower", "3%", "--markdown", "-")

    assert done.code == 0
    assert done.out.startswith("### ")
    assert "**Faster: a step takes " in done.out


def test_standard_input_can_be_one_side(run: Stepscope) -> None:
    done = run("compare", PER_TOKEN, "-", "--json", "-", stdin=PER_TOKEN.read_bytes())

    assert done.json()["comparisons"][0]["verdict"] == "no difference shown"


def test_mistakes(run: Stepscope, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(PER_TOKEN.read_bytes()[:40])

    assert "name two things to compare" in run("compare", PER_TOKEN).mistake()
    assert str(cut) in run("compare", PER_TOKEN, cut).mistake()
    assert "cannot be written" in run("compare", PER_TOKEN, PER_TOKEN, "--json", tmp_path / "no" / "x").mistake()
