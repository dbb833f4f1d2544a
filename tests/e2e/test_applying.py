"""`stepscope run --apply` and `bench --apply` on real programs."""

from __future__ import annotations

import json
import runpy
import textwrap
from pathlib import Path

import pytest

from tests.e2e.conftest import Outcome, run_here, run_stepscope

TRAINING = '''
    """Trains a little, seeded, and writes its losses."""
    import json, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def train(steps):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        losses = []
        while len(losses) < steps:
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                optimizer.zero_grad(set_to_none=False)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    if __name__ == "__main__":
        with open("losses.json", "w") as file:
            json.dump(train(int(sys.argv[1])), file)
'''
APPLIED = [
    "fuse-optimizer: AdamW made at training.py:11 now runs fused",
    "workers: DataLoader made at training.py:14 has 1 worker instead of none",
    "zero-grad: zero_grad at training.py:15 now sets gradients to None",
    "threads: PyTorch computes with 1 thread",
    "static-graph, not applied: no DistributedDataParallel was made",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with programs in it."""
    (tmp_path / "training.py").write_text(textwrap.dedent(TRAINING))
    (tmp_path / "plain.py").write_text("print('neither torch nor steps')")
    (tmp_path / "waiting.py").write_text(
        "import time, stepscope\nfor _ in range(9):\n    with stepscope.step():\n        time.sleep(0.001)\n"
    )
    return tmp_path


def stepscope(place: Path, *words: str) -> Outcome:
    start = run_stepscope if words[0] == "run" and words[-1] != "list" else run_here  # a program shares our output
    return start(*words, folder=place, STEPSCOPE_DATA_DIR=str(place / "data"))


def test_a_run_says_what_was_applied_and_trains_as_ever(place: Path) -> None:
    ended = stepscope(
        place, "run", "--name", "once", "--no-diagnose", "--warmup", "1", "--steps", "2",
        "--apply", "fuse-optimizer,workers=1,zero-grad", "--apply", "threads=1,static-graph", "training.py", "12",
    )  # fmt: skip

    assert ended.code == 0, ended
    said = [line.removeprefix("stepscope: ") for line in ended.err.splitlines() if line.startswith("stepscope: ")]
    assert said[: len(APPLIED)] == APPLIED
    assert "recorded 2 steps" in said[len(APPLIED)]
    manifest = json.loads((place / "data" / "runs" / "once" / "run.json").read_text())
    assert [each["flag"] for each in manifest["applied"] if each["applied"]] == [
        *("fuse-optimizer", "workers", "zero-grad", "threads")
    ]
    assert manifest["options"]["apply"] == ["fuse-optimizer", "workers=1", "zero-grad", "threads=1", "static-graph"]
    assert manifest["environment"]["OMP_NUM_THREADS"] == "1"
    losses = json.loads((place / "losses.json").read_text())
    assert losses == pytest.approx(runpy.run_path(str(place / "training.py"))["train"](12), rel=1e-5)


def test_a_bench_applies_to_the_command_that_is_named(place: Path) -> None:
    ended = stepscope(
        place, "bench", "waiting.py", "training.py 200", "--steps", "3", "--rounds", "2", "--precision", "500%",
        "--apply", "B=fuse-optimizer,static-graph", "--json", "bench.json",
    )  # fmt: skip

    assert ended.code == 0, ended
    assert "B  training.py 200  (applied: fuse-optimizer, static-graph)" in ended.out
    assert f"B, {APPLIED[0]}." in ended.out
    commands = json.loads((place / "bench.json").read_text())["commands"]
    assert [(each["command"], each["apply"]) for each in commands] == [
        ("waiting.py", []),
        ("training.py 200", ["fuse-optimizer", "static-graph"]),
    ]
    assert [each["applied"] for each in commands[1]["runs"][0]["applied"]] == [True, False]


def test_a_program_without_torch(place: Path) -> None:
    ended = stepscope(place, "run", "--apply", "bf16", "plain.py")

    assert (ended.code, ended.out) == (0, "neither torch nor steps\n")
    assert "stepscope: bf16, not applied: no process of the program imported torch\n" in ended.err


def test_mistakes(place: Path) -> None:
    assert (
        "there is no 'bf61' to apply; did you mean bf16?"
        in stepscope(place, "run", "--apply", "bf61", "plain.py").mistake()
    )
    assert (
        "--apply C=bf16 names none of the commands A, B"
        in stepscope(place, "bench", "waiting.py", "waiting.py", "--apply", "C=bf16").mistake()
    )
    assert not (place / "data").exists()


def test_the_list_of_flags(place: Path) -> None:
    ended = stepscope(place, "run", "--apply", "list")

    assert ended.code == 0, ended
    assert ended.out.startswith("fuse-optimizer ")
    assert "\nworkers=N " in ended.out
    assert "\ncompile[=default|reduce-overhead|max-autotune]\n   " in ended.out
