"""The examples: what their flags change and what not, and that `stepscope run` names their slow lines."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.e2e.conftest import run_here

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
FIXES = ["--batched-loss", "--deferred-logging", "--loader-workers=1", "--fused-optimizer"]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(name: str, *arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        example(name).main(["--device=cpu", *arguments])
    return output.getvalue()


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\d{4}", text)]


@pytest.fixture(scope="module")
def naive() -> str:
    return printed("naive_gpt2", "--steps=3")


@pytest.mark.parametrize("fix", FIXES)
def test_no_fix_changes_what_is_learned(naive: str, fix: str) -> None:
    fixed = printed("naive_gpt2", "--steps=3", fix)

    assert naive.startswith("3 steps of ")
    assert len(losses(naive)) == 2
    assert losses(fixed) == pytest.approx(losses(naive), abs=1e-3)


def test_a_cache_writes_the_same_text() -> None:
    whole = printed("inference", "--tokens=8")
    cached = printed("inference", "--tokens=8", "--cache")

    assert whole.startswith("8 tokens of ")
    assert cached.split(" the last ")[1] == whole.split(" the last ")[1]


class Diagnosed:
    """A program of examples/ that ran under `stepscope run`: what it printed, and the report of its run."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._variables = {
            **os.environ,
            "STEPSCOPE_DATA_DIR": str(folder / "data"),
            "STEPSCOPE_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.run = self._stepscope("run", "--name", "tried", *command)
        folders = {name: each for name, each in self._variables.items() if name.startswith("STEPSCOPE_")}
        report = run_here("diagnose", "tried", "--json", "-", folder=EXAMPLES.parent, **folders).json()
        self.findings: dict[str, dict[str, Any]] = {
            finding["rule"]: finding for finding in reversed(report["findings"])
        }

    def _stepscope(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stepscope", *words],
            cwd=EXAMPLES.parent,
            env=self._variables,
            capture_output=True,
            text=True,
            check=True,
        )

    def places(self, rule: str) -> list[tuple[str, int]]:
        return [(Path(place["file"]).name, place["line"]) for place in self.findings[rule]["where"]]


def line_of(name: str, text: str) -> tuple[str, int]:
    """The only line of an example that holds the text."""
    lines = (EXAMPLES / name).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, start=1) if text in line]
    return name, number


def test_the_naive_loops_lines_are_named(tmp_path: Path) -> None:
    done = Diagnosed(tmp_path, "--warmup", "2", "--steps", "3", "examples/naive_gpt2.py", "--steps", "8")

    assert done.run.stdout.startswith("8 steps of ")
    loop, reading = (
        line_of("naive_gpt2.py", "F.cross_entropy(logits[:, position]"),
        line_of("naive_gpt2.py", "history.append(loss.item())"),
    )
    assert loop in done.places("loop-in-step")
    assert done.findings["loop-in-step"]["saving_ns_per_step"] > 0
    assert done.places("host-synchronisation") == [reading]
    assert done.findings["host-synchronisation"]["severity"] == "note"
    for _, line in (loop, reading):
        assert f"naive_gpt2.py:{line} " in done.run.stderr


def test_the_mended_loop_has_neither(tmp_path: Path) -> None:
    command = ["--warmup", "2", "--steps", "3", "examples/naive_gpt2.py", "--steps", "8", *FIXES]
    done = Diagnosed(tmp_path, *command)

    assert {"loop-in-step", "host-synchronisation"} & set(done.findings) == set()


def test_inference_is_recorded_by_its_forward_calls(tmp_path: Path) -> None:
    done = Diagnosed(tmp_path, "--warmup", "3", "--exit-after", "examples/inference.py", "--tokens", "2000")

    assert done.places("host-synchronisation") == [line_of("inference.py", "scores.argmax(dim=-1).item()")]
