"""`stepscope predict` as users run it: processes, pipes, files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import PER_TOKEN, Stepscope


def test_a_processors_recording_on_two_devices(run: Stepscope, tmp_path: Path) -> None:
    done = run("predict", PER_TOKEN, "--to", "L4,H100-SXM", "--json", "answer.json", folder=tmp_path)

    assert done.code == 0
    assert done.out.startswith("gpt2_per_token_loss_cpu.json.gz: a step takes ")
    assert "no device's work was recorded" in done.out
    found = json.loads((tmp_path / "answer.json").read_text())
    assert {each["device"] for each in found["predictions"]} == {"L4", "H100-SXM"}
    for each in found["predictions"]:
        assert 0 < each["low_ns"] <= each["step_ns"] <= each["high_ns"] < found["step_ns"]


def test_from_a_pipe_on_the_device_that_was_recorded(run: Stepscope, gpu: Path) -> None:
    found = run("predict", "-", "--from", "T4", "--to", "T4,L4", "--json", "-", stdin=gpu.read_bytes()).json()

    [own] = [each for each in found["predictions"] if each["device"] == "T4"]
    assert own["step_ns"] == own["low_ns"] == own["high_ns"] == found["step_ns"]
    assert own["limit"] == "input"


def test_an_unknown_device(run: Stepscope, gpu: Path) -> None:
    assert "'H1000'" in run("predict", gpu, "--to", "H1000").mistake()
