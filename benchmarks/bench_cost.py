"""What `stepscope bench` costs the steps that it times.

    python benchmarks/bench_cost.py

First, calls of an optimizer's step are measured in one process, in turn plain and while their ends are noted, and small
backward passes, plain and while their losses are noted, as `stepscope tune` has it. Then a
small training program is run in turn plain and as the bench runs it, and measures its own steps in both. All of it is
processor time, of all threads, which other load on the machine disturbs less than time by the clock; the bench waits
for nothing. Held to 1 % of a step of that program.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stepscope.compare import compare_samples
from stepscope.record.bench_steps import BackwardLosses, BenchSteps
from stepscope.record.controller import StepController
from stepscope.record.launch import environment_of
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RunOptions
from stepscope.report.comparison_words import verdict_sentence

LIMIT = 0.01
CALLS = 500
PROGRAM = """
import json, sys, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, ends = torch.ones(64, 256), []
for _ in range(int(sys.argv[1])):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ends.append(time.process_time_ns())
print(json.dumps([second - first for first, second in zip(ends, ends[1:])]))
"""


def optimizer_steps_ns(folder: RunFolder, rounds: int) -> tuple[float, float]:
    """Nanoseconds of processor time a small optimizer's step takes plain, and with its end noted; the least of all."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    plain = noted = float("inf")
    for _ in range(rounds):
        plain = min(plain, call_ns(optimizer.step))
        controller = StepController()
        steps = BenchSteps(controller, folder, RunOptions(steps=10 * CALLS, measure=True))
        controller.listener = steps
        steps.watch_torch()
        noted = min(noted, call_ns(optimizer.step))
        steps.let_go()
    return plain, noted


def backward_passes_ns(rounds: int) -> tuple[float, float]:
    """Nanoseconds of processor time a small backward pass takes plain, and with its loss noted; the least of all."""
    import torch

    weight = torch.nn.Parameter(torch.ones(1))
    plain = noted = float("inf")
    for _ in range(rounds):
        plain = min(plain, call_ns(lambda: (weight * 2).sum().backward()))
        losses = BackwardLosses()
        losses.start()
        noted = min(noted, call_ns(lambda: (weight * 2).sum().backward()))
        if len(losses.stop()) != CALLS + 1:
            raise SystemExit("the losses were not noted")
    return plain, noted


def call_ns(function: Callable[[], object]) -> float:
    function()
    begin = time.process_time_ns()
    for _ in range(CALLS):
        function()
    return (time.process_time_ns() - begin) / CALLS


def own_times(script: Path, steps: int, root: Path | None, number: int) -> list[int]:
    """The steps' processor time that the program itself measures, its first tenth left out."""
    environment = dict(os.environ)
    if root is not None:
        folder = RunFolder.create(root, f"run-{number}", RunManifest((str(script),)))
        environment = environment_of(folder, RunOptions(steps=10 * steps, measure=True), environment)
    words = [sys.executable, str(script), str(steps)]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    if root is not None and not list(folder.path.glob("rank0/steps-*.json")):
        raise SystemExit("the steps of the program were not noted")
    return list(json.loads(done.stdout))[steps // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what stepscope bench costs the steps that it times.")
    parser.add_argument("--rounds", type=int, default=10, help="runs of the program each way")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = RunFolder.create(root, "calls", RunManifest(("calls",)))
        plain_ns, noted_ns = optimizer_steps_ns(folder, 10 * options.rounds)
        cost_ns = noted_ns - plain_ns
        print(
            f"noting the end of a step: {cost_ns:,.0f} ns more than the {plain_ns:,.0f} ns of a small optimizer's step"
        )
        small_ns, with_loss_ns = backward_passes_ns(10 * options.rounds)
        print(f"noting a loss: {with_loss_ns - small_ns:,.0f} ns more than the {small_ns:,.0f} ns of a small pass")
        script = root / "program.py"
        script.write_text(PROGRAM)
        plain, measured = [], []
        for number in range(options.rounds):
            for is_measured in (False, True) if number % 2 == 0 else (True, False):
                times = own_times(script, options.steps, root if is_measured else None, number)
                (measured if is_measured else plain).append(times)
        found = compare_samples(plain, measured)
    print(f"processor time, as the bench runs the program against plain: {verdict_sentence(found)}")
    share = cost_ns / statistics.median(step for times in plain for step in times)
    print(f"share of its median step: {share:.4%}; limit {LIMIT:.0%}")
    sys.exit(share >= LIMIT or (found.change_low or 0) >= LIMIT)


if __name__ == "__main__":
    main()
