"""Compiled programs: `stepscope run` records what torch.compile did, and a graph break is found at its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Stepscope, run_stepscope

PROGRAM = """\
import sys
import torch

layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
limit, broken = torch.ones(()), sys.argv[1] == "break"

def scores(x):
    x = torch.tanh(layers[0](x))
    if broken and limit.item() < 0:
        raise ValueError("the limit is negative")
    x = torch.tanh(layers[1](x))
    if broken and limit.item() < 0:
        raise ValueError("the limit is negative")
    return layers[3](torch.tanh(layers[2](x))).square().mean()

compiled = torch.compile(scores, backend="eager")
optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
for step in range(24):
    optimizer.zero_grad()
    compiled(torch.randn(8, 16)).backward()
    optimizer.step()
print("done")
"""
BREAKS = [line for line, text in enumerate(PROGRAM.splitlines(), 1) if "limit.item()" in text]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program's runs with and without breaks; what they print is what they print without stepscope."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "train.py").write_text(PROGRAM)
    for twin in ("break", "clean"):
        options = ("--name", twin, "--folder", folder / "runs", "--no-diagnose", "--no-telemetry")
        ended = run_stepscope("run", *options, "train.py", twin, folder=folder)
        assert (ended.code, ended.out) == (0, "done\n"), ended
    return {twin: folder / "runs" / twin for twin in ("break", "clean")}


def diagnosed(run: Stepscope, *words: str | Path) -> Any:
    return run("diagnose", *words, "--json", "-", "--all", "--no-cache").json()


def test_breaks_are_found_at_their_lines(run: Stepscope, recorded: dict[str, Path]) -> None:
    report = diagnosed(run, recorded["break"], "--set", "graph-break.share=0%")

    assert [each["line"] for each in report["compile"]["breaks"]] in (BREAKS, BREAKS[::-1])
    assert all(each["per_step"] == 1 and each["lost_ns_per_step"] > 0 for each in report["compile"]["breaks"])
    found = {place["line"] for each in report["findings"] if each["rule"] == "graph-break" for place in each["where"]}
    assert found
    assert found <= set(BREAKS)
    page = run("diagnose", recorded["break"], "--no-cache").out
    assert "What torch.compile did" in page
    assert f"train.py:{BREAKS[0]}" in page


def test_the_twin_without_a_break_is_silent(run: Stepscope, recorded: dict[str, Path]) -> None:
    report = diagnosed(run, recorded["clean"])

    assert report["compile"]["breaks"] == []
    assert report["compile"]["compilations"] == 1
    assert report["compile"]["functions"][0]["recompilations"] == []
    assert "graph-break" not in {each["rule"] for each in report["findings"]}


def test_a_log_may_be_given_beside_a_trace(run: Stepscope, recorded: dict[str, Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes((recorded["break"] / "rank0" / "trace-1.json.gz").read_bytes())
    alone = diagnosed(run, trace)
    assert "compile" not in alone
    assert any("--compile-log" in each["how"] for each in alone["not_answered"])

    report = diagnosed(run, trace, "--compile-log", recorded["break"] / "compile")
    assert [each["line"] for each in report["compile"]["breaks"]] in (BREAKS, BREAKS[::-1])


def test_what_is_no_log_is_one_sentence(run: Stepscope, recorded: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "broken.log").write_text("V1128 03:50:48.913000 9315 torch/")
    (tmp_path / "empty").mkdir()
    for wrong in ("broken.log", "empty", "missing.log"):
        said = run("diagnose", recorded["clean"], "--compile-log", tmp_path / wrong).mistake()
        assert wrong in said
