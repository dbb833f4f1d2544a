"""What PyTorch's profiler writes today, diagnosed: the training below is recorded in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import environment, run_here

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TRAINING = """\
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile, schedule

LENGTH, WIDTH, WORDS = 48, 32, 64


class Batches(torch.utils.data.Dataset):
    def __init__(self, wait_s):
        self.wait_s = wait_s

    def __len__(self):
        return 6

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.randn(4, LENGTH, WIDTH), torch.randint(WORDS, (4, LENGTH))


def per_token_loss(logits, targets):
    total = 0.0
    for token in range(LENGTH):
        total = total + torch.nn.functional.cross_entropy(logits[:, token], targets[:, token])
    return total / LENGTH


def batched_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(kind, path):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 128), torch.nn.GELU(), torch.nn.Linear(128, WORDS))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = per_token_loss if kind == "per-token" else batched_loss
    loader = torch.utils.data.DataLoader(Batches(0.03 if kind == "slow-data" else 0.0), batch_size=None)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=4),
        with_stack=True,
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for inputs, targets in loader:
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(path)


main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "tiny_training.py"
    path.write_text(TRAINING)
    return path


def recorded(script: Path, kind: str) -> Path:
    """The trace of one kind of training, recorded once."""
    path = script.with_name(f"{kind}.json.gz")
    if not path.exists():
        arguments = [sys.executable, str(script), kind, str(path)]
        subprocess.run(arguments, check=True, capture_output=True, env=environment(), timeout=300)
    return path


def diagnosed(trace: Path) -> dict[str, Any]:
    outcome = run_here("diagnose", trace, "--json", "-", "--all", "--top", "0")
    assert (outcome.code, outcome.err) == (0, "")
    report: dict[str, Any] = json.loads(outcome.out)
    return report


def line_of(text: str) -> int:
    return TRAINING.splitlines().index(text) + 1


def finding(report: dict[str, Any], rule: str) -> dict[str, Any]:
    found = [each for each in report["findings"] if each["rule"] == rule]
    assert len(found) == 1, [each["title"] for each in report["findings"]]
    result: dict[str, Any] = found[0]
    return result


@pytest.mark.parametrize("kind", ["per-token", "batched", "slow-data"])
def test_everything_that_was_recorded_is_read(kind: str, script: Path) -> None:
    report = diagnosed(recorded(script, kind))
    assert report["trace"]["format"] == "kineto"
    assert report["trace"]["warnings"] == []
    assert report["devices"] == []
    assert report["steps"]["source"] == "annotation"
    assert [step["index"] for step in report["steps"]["list"]] == [2, 3, 4, 5]
    assert sum(piece["share"] for piece in report["host"]) == pytest.approx(1)
    assert {"aten::linear", "aten::addmm"} & {row["name"] for row in report["operators"]}
    tables = run_here("query", recorded(script, kind), "--format", "json").json()
    rows = {table["table"]: table["rows"] for table in tables}
    assert min(rows["operators"], rows["frames"], rows["memory"], rows["annotations"]) > 0
    shapes = run_here(
        "operators", recorded(script, kind), "--group-by", "name,input_shapes", "--format", "json", "--top", "0"
    ).json()
    assert any(row["name"] == "aten::addmm" and row["input_shapes"] for row in shapes)


def test_the_loop_over_tokens_is_found_in_its_function(script: Path) -> None:
    loop = finding(diagnosed(recorded(script, "per-token")), "loop-in-step")
    assert "48 times" in loop["title"]
    assert loop["saving_share"] > 0.1
    place = loop["where"][0]
    assert Path(place["file"]).name == "tiny_training.py"
    assert place["function"] == "per_token_loss"
    first = line_of("def per_token_loss(logits, targets):")
    assert first <= place["line"] <= first + 4


@pytest.mark.parametrize("kind", ["batched", "slow-data"])
def test_the_batched_loss_is_no_loop(kind: str, script: Path) -> None:
    assert "loop-in-step" not in {each["rule"] for each in diagnosed(recorded(script, kind))["findings"]}


def test_a_slow_dataset_comes_first_and_is_named(script: Path) -> None:
    report = diagnosed(recorded(script, "slow-data"))
    first = report["findings"][0]
    assert first["rule"] == "input-bound"
    assert first["saving_share"] > 0.5
    place = first["where"][0]
    assert (Path(place["file"]).name, place["function"]) == ("tiny_training.py", "__getitem__")
    assert place["line"] in range(
        line_of("    def __getitem__(self, index):"), line_of("def per_token_loss(logits, targets):")
    )
    text = run_here("diagnose", recorded(script, "slow-data")).out
    assert re.search(r"1\. for \d+% of the step the main thread spends its time on the data loader", text)


def test_a_fast_dataset_is_not_to_blame(script: Path) -> None:
    rules = [each["rule"] for each in diagnosed(recorded(script, "per-token"))["findings"]]
    assert rules[0] == "loop-in-step"
    assert "input-bound" not in rules[:1]
