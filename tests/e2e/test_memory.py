"""`stepscope memory`, `stepscope run --batch-sizes` and `stepscope batch-size` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Outcome, run_here, run_stepscope
from tests.simulator.allocator import training

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "examples/gpt2_per_token_loss_cpu.json.gz"
PROGRAM = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
size = parser.parse_args().batch_size
if size > 1000:
    raise SystemExit("out of memory")
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(20):
    loss = model(torch.randn(size, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def stepscope(folder: Path, *words: str) -> Outcome:
    start = run_stepscope if words[0] == "run" else run_here
    folders = {f"STEPSCOPE_{kind}_DIR": str(folder / kind.lower()) for kind in ("DATA", "CACHE")}
    return start(*words, folder=folder, COLUMNS="160", **folders)


def test_the_screen_of_a_trace(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "memory", str(SAMPLE))

    assert (done.code, done.err) == (0, "")
    first, *_, peak = [line for line in done.out.splitlines() if line][:2]
    assert "The host's memory" in first
    assert peak.split()[0] == "peak"
    assert "Alive at the peak, by category\n" in done.out
    assert "Allocated in the steps, by operator\n" in done.out
    assert "per_token_loss" in done.out
    assert "\n  (outside of modules) " in done.out


def test_what_operators_allocate(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "memory", str(SAMPLE), "--by", "operator", "--format", "json")

    rows = {row["operator_name"]: row for row in json.loads(done.out)}
    # The loss of each token needs the gradient of all logits, forward and backward, layer by layer.
    largest = max(rows.values(), key=lambda row: row["per_step_bytes"])
    assert largest["per_call_bytes"] * largest["calls"] == pytest.approx(
        largest["allocated_bytes"], abs=largest["calls"]
    )
    assert largest["calls_per_step"] >= 64


def test_levels_over_time_as_csv(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "memory", str(SAMPLE), "--over-time", "--format", "csv")

    assert done.out.splitlines()[0] == "device,start_ns,allocated_bytes,reserved_bytes"


def test_a_snapshot_that_ran_out_of_memory(tmp_path: Path) -> None:
    training(60, capacity=6 << 20).dump(tmp_path / "snapshot.pickle")

    shown = stepscope(tmp_path, "memory", "snapshot.pickle")
    told = json.loads(stepscope(tmp_path, "memory", "snapshot.pickle", "--format", "json").out)
    diagnosed = stepscope(tmp_path, "diagnose", "snapshot.pickle")

    assert "failed    400.0 KiB asked for at train.py:10, 0 B were free" in shown.out
    assert told["devices"][0]["out_of_memory"][0]["asked_bytes"] == 400 << 10
    assert "1. device 0 ran out of memory: 400.0 KiB were asked for while 5.5 MiB were held" in diagnosed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory", str(SAMPLE), "--device", "7"), "no memory events of device '7', only of cpu"),
        (("memory", str(SAMPLE), "--format", "csv"), "--format csv needs --by or --over-time"),
        (("memory", str(SAMPLE), "--sort", "bytes"), "--sort needs --by or --over-time"),
        (("batch-size", str(SAMPLE)), "does not contain its batch size"),
        (("batch-size", str(SAMPLE), "--batch", "8,16"), "--batch names 2 sizes, but there are 1 traces"),
        (("batch-size", str(SAMPLE), "--batch", "8"), "at least two different batch sizes"),
        (("batch-size", str(SAMPLE), "--batch", "8,x"), "'8,x' is not a list of batch sizes"),
        (("batch-size", str(SAMPLE), "--memory-limit", "much"), "'much' is not an amount of memory"),
        (("batch-size", str(SAMPLE), "--keep-free", "100%"), "'100%' is not a share of the memory"),
        (("run", "--batch-sizes", "8,16", "train.py"), "--batch-flag names the program's own option"),
        (("run", "--batch-flag", "batch", "train.py"), "at least two different batch sizes"),
        (("run", "--batch-sizes", "8,8", "--batch-flag", "batch", "train.py"), "at least two different batch sizes"),
    ],
)
def test_mistakes_end_in_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = stepscope(tmp_path, *words)

    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_batch_sizes_are_recorded_and_those_that_fail_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("--batch-sizes", "16,64,2000", "--batch-flag", "batch-size", "--name", "sizes", "--no-telemetry")

    done = stepscope(tmp_path, "run", *options, "--warmup", "2", "train.py")
    again = stepscope(tmp_path, "batch-size", "sizes", "--memory-limit", "1GiB", "--format", "json")

    assert done.code == 0
    assert done.out == ""
    assert "batch size 2000: the program ended with exit code 1 before steps were recorded" in done.err
    assert "2 of 3 sizes" in done.err
    assert "The fastest of the measured sizes is" in done.err
    told = json.loads(again.out)
    assert [row["batch_size"] for row in told["measurements"]] == [16, 64]
    # 64 floats of input, output, square and gradients of each: more memory with a larger batch.
    assert told["memory"]["slope"] >= 64 * 4
    assert told["capacity_bytes"] == 1 << 30
    assert told["largest_batch"] > 1000


def test_an_option_that_the_program_does_not_have(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROGRAM)

    done = stepscope(tmp_path, "run", "--batch-sizes", "8,16", "--batch-flag", "size", "train.py")

    assert done.code == 2
    assert "batch size 16: the program ended with exit code 2 before steps were recorded" in done.err
    assert done.err.splitlines()[-1].startswith("stepscope: at least two different batch sizes")


def test_a_snapshot_is_said_to_tell_nothing_of_time(tmp_path: Path) -> None:
    training().dump(tmp_path / "snapshot.pickle")

    done = stepscope(tmp_path, "diagnose", "snapshot.pickle")

    assert done.code == 0
    assert done.out.startswith("A memory snapshot: ")
    assert "What this trace cannot answer" not in done.out
