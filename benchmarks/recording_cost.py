"""What recording costs: a step under stepscope's recorder beside a step under torch.profiler with the same options.

    python benchmarks/recording_cost.py [--rounds 12] [--steps 20] [--cycles 100] [--after 10000]
                                        [--device cuda --bound device] [--json FILE]

One process trains a small model (with `--bound device` one whose kernels take longer than their launches). In every
round its steps are timed without a profiler, under torch.profiler, and under the controller and recorder of
`stepscope run`, forwards in one round and backwards in the next, so that a machine that becomes slower favours none.
Printed are medians over the rounds, of the process's CPU and of elapsed time, and the median ratio to torch.profiler,
with the interval that holds it in 95 of 100 resamplings of the rounds. The line records, which torch.profiler does not
have, are measured on their own, beside its stacks. Then recordings are started and stopped many times over, and the
growth of the process's memory is printed.

At the end: what a recording that has ended costs the steps after it. Two processes train the same small model in turns
of 250 steps, ABBA; one of them is recorded as by `stepscope run` between so many steps before and after. Printed is its
step beside the other's, before and after the recording.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

from stepscope.record.bootstrap import FirstRecording, Phase
from stepscope.record.controller import CaptureRequest, StepController
from stepscope.record.hooks import AllHooks
from stepscope.record.manifest import RunManifest
from stepscope.record.recorder import Recorder, profiler_is_active
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RunOptions
from stepscope.record.schedule import RecordOptions

SAME_OPTIONS = RecordOptions(lines=False)
WITH_LINES = RecordOptions(lines=True)
MIB = 2**20
TURN = 250


class Taken(NamedTuple):
    """Milliseconds of a step."""

    cpu: float
    elapsed: float


def training_step(device: torch.device, width: int, rows: int, blocks: int = 12) -> Callable[[], None]:
    """A step of many operators, the smaller the more a profiler costs."""
    torch.manual_seed(0)
    block = (lambda: torch.nn.Linear(width, width), torch.nn.GELU, lambda: torch.nn.LayerNorm(width))
    layers = [make() for _ in range(blocks) for make in block]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(rows, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], steps: int, after_step: Callable[[], None] = lambda: None) -> Taken:
    """What a step takes; the device has finished its work at both ends."""
    finish()
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
        after_step()
    finish()
    cpu, elapsed = time.process_time() - began_cpu, time.perf_counter() - began
    return Taken(cpu / steps * 1000, elapsed / steps * 1000)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median ratio of pairs, and its interval by resampling them."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} ({medians[50]:.3f} to {medians[-51]:.3f})"


def finish() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def under_nothing(step: Callable[[], None], steps: int) -> Taken:
    return timed(step, steps)


def under_torch(step: Callable[[], None], steps: int, with_stack: bool = False) -> Taken:
    """torch.profiler with the options that `SAME_OPTIONS` stands for."""
    profiler = torch.profiler.profile(
        activities=[*torch.profiler.supported_activities()],  # type: ignore[no-untyped-call]
        record_shapes=True,
        profile_memory=True,
        with_stack=with_stack,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps + 1, repeat=1),
    )
    with profiler:
        step()
        profiler.step()
        return timed(step, steps, profiler.step)


def under_torch_with_stack(step: Callable[[], None], steps: int) -> Taken:
    return under_torch(step, steps, with_stack=True)


def under_stepscope(options: RecordOptions) -> Callable[[Callable[[], None], int], Taken]:
    def measured(step: Callable[[], None], steps: int) -> Taken:
        with tempfile.TemporaryDirectory() as folder:
            controller = StepController(lambda: Path(folder) / "trace.json.gz")
            handle = controller.request(CaptureRequest(options=options))
            for _ in range(2):  # the first boundary prepares, the second begins
                step()
                controller.step_boundary()
            taken = timed(step, steps, controller.step_boundary)
            handle.cancel()
            if not handle.wait(0).cancelled or profiler_is_active():
                raise SystemExit("the recording did not end")
            return taken

    return measured


def resident_mib() -> float:
    """The process's resident memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def leak_mib(step: Callable[[], None], cycles: int, save: bool) -> float:
    """How much memory so many recordings of two steps leave behind, after a few that fill the caches."""

    def cycle() -> None:
        recorder = Recorder(RecordOptions())
        recorder.start()
        step()
        recorder.step()
        step()
        recorder.stop()
        if save:
            with tempfile.TemporaryDirectory() as folder:
                recorder.save(Path(folder) / "trace.json.gz")
        else:
            recorder.discard()

    for _ in range(10):
        cycle()
    before = resident_mib()
    for _ in range(cycles):
        cycle()
    return resident_mib() - before


def worker() -> None:
    """Train as standard input says: a number of steps to time, or "record"."""
    torch.set_num_threads(1)
    step = training_step(torch.device("cpu"), 128, 32, blocks=2)
    for line in sys.stdin:
        taken = record(step) if line.strip() == "record" else timed(step, int(line))
        print(json.dumps(taken), flush=True)


def record(step: Callable[[], None]) -> None:
    """Attach to this process as `stepscope run` does, and train until it has let go of it."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder), "run", RunManifest(command=("train.py",)))
        controller = StepController(lambda: run.new_trace_path(0))
        hooks = AllHooks(controller)
        recording = FirstRecording(controller, hooks, run, RunOptions(telemetry=False))
        controller.listener = recording
        hooks.install_in("torch")
        while recording.phase is not Phase.RESTING:
            step()
        if not run.traces():
            raise SystemExit("nothing was recorded")


class Worker:
    def __init__(self) -> None:
        command = [sys.executable, __file__, "--worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def asked(self, line: str) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        self._process.communicate()


def after_recording(steps: int) -> None:
    """Print the step of a process that was recorded beside that of one that was not."""
    recorded, other = Worker(), Worker()
    for each in (recorded, other):
        each.asked("1000")
    print(f"\n| {steps:,} steps | CPU | elapsed |\n|---|---:|---:|")
    for when in ("before the recording", "after it"):
        found: dict[Worker, list[Taken]] = {recorded: [], other: []}
        for number in range(steps // TURN):
            for each in (recorded, other) if number % 2 else (other, recorded):
                found[each].append(Taken(*each.asked(str(TURN))))
        pairs = zip(zip(*found[recorded], strict=True), zip(*found[other], strict=True), strict=True)
        columns = [ratio(ours, theirs) for ours, theirs in pairs]
        print(f"| {when} | {columns[0]} | {columns[1]} |", flush=True)
        if when != "after it":
            recorded.asked("record")
            other.asked("1000")
    for each in (recorded, other):
        each.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--after", type=int, default=10_000, help="steps after a recording, on the CPU; 0 for none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bound", choices=("launch", "device"), default="launch", help="what limits the step")
    parser.add_argument("--tiny", action="store_true", help="a small step whatever limits it")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    large = options.bound == "device" and not options.tiny
    step = training_step(torch.device(options.device), *((4096, 8192) if large else (128, 32)))
    kinds = {
        "no profiler": under_nothing,
        "torch.profiler": under_torch,
        "torch.profiler, with_stack": under_torch_with_stack,
        "stepscope, same options": under_stepscope(SAME_OPTIONS),
        "stepscope, with lines": under_stepscope(WITH_LINES),
    }
    times: dict[str, list[Taken]] = {name: [] for name in kinds}
    for name in kinds:
        kinds[name](step, 5)  # what is done only once
    for number in range(options.rounds):
        names = list(kinds)[number // 2 % len(kinds) :] + list(kinds)[: number // 2 % len(kinds)]
        for name in names[:: -1 if number % 2 else 1]:
            times[name].append(kinds[name](step, options.steps))
    if options.json:
        medians = {name: statistics.median(each.elapsed for each in taken) for name, taken in times.items()}
        options.json.write_text(json.dumps({"ms": medians, "rounds": options.rounds, "steps": options.steps}))
    print("| | CPU ms a step | of torch.profiler | elapsed ms | of torch.profiler |")
    print("|---|---:|---:|---:|---:|")
    for name, taken in times.items():
        pairs = zip(zip(*taken, strict=True), zip(*times["torch.profiler"], strict=True), strict=True)
        cells = [f"{statistics.median(ours):.2f} | {ratio(ours, theirs)}" for ours, theirs in pairs]
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)
    for save in (False, True) if options.cycles else ():
        grown = leak_mib(step, options.cycles, save)
        print(f"\n{options.cycles} recordings, {'saved' if save else 'thrown away'}: {grown:+.1f} MiB", flush=True)
    if options.after:
        after_recording(options.after)


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
