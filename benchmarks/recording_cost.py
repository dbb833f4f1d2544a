"""What recording costs: a step under stepscope's recorder beside a step under torch.profiler with the same options.

    python benchmarks/recording_cost.py [--rounds 7] [--steps 20] [--cycles 100] [--device cuda --bound device]

One process trains a small model (with `--bound device` one whose kernels take longer than their launches). In every
round its steps are timed without a profiler, under torch.profiler, and under the controller and recorder of
`stepscope run`; the order changes from round to round, and printed are the medians over the rounds and of the ratios
to torch.profiler. The line records, which torch.profiler does not have, are measured on their own, beside its stacks.
At the end, recordings are started and stopped many times over, and the growth of the process's memory is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

from stepscope.record.controller import CaptureRequest, StepController
from stepscope.record.recorder import Recorder, profiler_is_active
from stepscope.record.schedule import RecordOptions

SAME_OPTIONS = RecordOptions(lines=False)
WITH_LINES = RecordOptions(lines=True)
MIB = 2**20


def training_step(device: torch.device, width: int, rows: int) -> Callable[[], None]:
    """A step of many operators, the smaller the more a profiler costs."""
    torch.manual_seed(0)
    block = (lambda: torch.nn.Linear(width, width), torch.nn.GELU, lambda: torch.nn.LayerNorm(width))
    layers = [make() for _ in range(12) for make in block]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(rows, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], steps: int, after_step: Callable[[], None]) -> float:
    """Milliseconds a step takes; the device has finished its work at both ends."""
    finish()
    began = time.perf_counter()
    for _ in range(steps):
        step()
        after_step()
    finish()
    return (time.perf_counter() - began) / steps * 1000


def finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def under_nothing(step: Callable[[], None], steps: int) -> float:
    return timed(step, steps, lambda: None)


def under_torch(step: Callable[[], None], steps: int, with_stack: bool = False) -> float:
    """torch.profiler with the options that `SAME_OPTIONS` stands for."""
    profiler = torch.profiler.profile(
        activities=[*torch.profiler.supported_activities()],
        record_shapes=True,
        profile_memory=True,
        with_stack=with_stack,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps + 1, repeat=1),
    )
    with profiler:
        step()
        profiler.step()
        return timed(step, steps, profiler.step)


def under_torch_with_stack(step: Callable[[], None], steps: int) -> float:
    return under_torch(step, steps, with_stack=True)


def under_stepscope(options: RecordOptions) -> Callable[[Callable[[], None], int], float]:
    def measured(step: Callable[[], None], steps: int) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=100)
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
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for name in kinds:
        kinds[name](step, 5)  # what is done only once
    for number in range(options.rounds):
        names = list(kinds)[number % len(kinds) :] + list(kinds)[: number % len(kinds)]
        for name in names:
            times[name].append(kinds[name](step, options.steps))
    if options.json:
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        options.json.write_text(json.dumps({"ms": medians, "rounds": options.rounds, "steps": options.steps}))
    print("| | ms a step | of torch.profiler |")
    print("|---|---:|---:|")
    for name, taken in times.items():
        ratios = [mine / theirs for mine, theirs in zip(taken, times["torch.profiler"], strict=True)]
        print(f"| {name} | {statistics.median(taken):.2f} | {statistics.median(ratios):.3f} |")
    for save in (False, True) if options.cycles else ():
        grown = leak_mib(step, options.cycles, save)
        print(f"\n{options.cycles} recordings, {'saved' if save else 'thrown away'}: {grown:+.1f} MiB")


if __name__ == "__main__":
    main()
