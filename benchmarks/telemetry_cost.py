"""What telemetry costs a program: a call of log, the sampler's share of a core, norms, and bytes on disk.

    python benchmarks/telemetry_cost.py [--seconds 20] [--device cuda]

Calls are timed in blocks, and the median block is shown; the sampler is measured as the CPU time of a process that does
nothing else. Steps with and without telemetry are taken in turn, and the median of the pairs' differences is shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stepscope.record.telemetry.log import Telemetry

CALLS = 200
BLOCKS = 30


def per_call_us(call: Callable[[int], object]) -> float:
    """Microseconds of one call: the median of blocks."""
    blocks = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for number in range(CALLS):
            call(number)
        blocks.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(blocks)


def idle_cpu_share(folder: Path, seconds: float, interval_s: float | None) -> tuple[float, int]:
    """Share of a core that the process takes while it only samples, and the bytes it wrote."""
    run = Telemetry(folder, interval_s=interval_s)
    run.log({"begin": 1.0})
    time.sleep(2.5)  # the first samples import and open what they need
    began, cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    run.close()
    return share, sum(path.stat().st_size for path in run.folder.iterdir())


def step_costs(folder: Path, device: str, pairs: int) -> tuple[float, float]:
    """Milliseconds of a training step without telemetry, and what telemetry of everything adds to it."""
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(256, 512, device=device)
    run = Telemetry(folder)

    def step(number: int, logged: bool) -> float:
        began = time.perf_counter()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if logged:
            run.log({"loss": loss}, step=number)
            run.throughput(samples=256)
        if device != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - began) * 1e3

    differences, bare = [], []
    for number in range(pairs):
        bare.append(step(number, False))
        watches = [run.watch(model, activations=True, every=1), run.watch_optimizer(optimizer)]
        differences.append(step(number, True) - bare[-1])
        for watch in watches:
            watch.remove()
    run.close()
    return statistics.median(bare[10:]), statistics.median(differences[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Telemetry(folder / "calls", interval_s=None) as run:
            tensor = torch.tensor(1.0, device=options.device)
            print("| a call of log with | us |\n|---|---:|")
            print(f"| one number | {per_call_us(lambda number: run.log({'x': 1.5}, step=number)):.2f} |")
            values = {f"x{number}": float(number) for number in range(10)}
            print(f"| ten numbers | {per_call_us(lambda number: run.log(values, step=number)):.2f} |")
            one = per_call_us(lambda number: run.log({"x": tensor}, step=number))
            print(f"| one tensor on {options.device} | {one:.2f} |")
        bare, added = step_costs(folder / "steps", options.device, options.pairs)
        print(f"\na step of {bare:.2f} ms with everything watched at every step: {added:+.3f} ms")
        print("\n| sampling every | share of a core | bytes a day |\n|---|---:|---:|")
        empty = 0
        for interval in (None, 1.0, 0.1):
            share, size = idle_cpu_share(folder / f"idle{interval}", options.seconds, interval)
            empty = empty or size  # a file's first pages, which do not grow
            day = (size - empty) / (options.seconds + 2.5) * 86400 / 2**20
            label = "nothing" if interval is None else f"{interval:g} s"
            print(f"| {label} | {share:.3%} | {f'{day:.0f} MiB' if interval else '-'} |")


if __name__ == "__main__":
    main()
