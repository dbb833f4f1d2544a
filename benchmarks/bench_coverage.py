"""How often the interval of `stepscope bench` holds the truth, although it looks after every round whether to stop.

    python benchmarks/bench_coverage.py

Steps are simulated: those of a run scatter around the run's mean, and the runs' means around the truth. Each bench
stops as `stepscope bench` does, by its precision or after 25 rounds. Intervals of 95 % should hold it in about 95 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from stepscope.compare.bench import Bench, BenchCommand, BenchRun, BenchSettings, stop_of
from stepscope.compare.statistics import WarmUp

LEAST = 0.90
STEPS = 40
MOST_ROUNDS = 25
CASES = (  # standard deviation of the runs' means, and of steps, as shares; precision; true change
    (0.005, 0.02, 0.01, -0.2),
    (0.01, 0.05, 0.01, 0.0),
    (0.01, 0.05, 0.005, 0.0),
    (0.02, 0.10, 0.01, 0.05),
    (0.03, 0.05, 0.02, 0.0),
)


def simulated_run(
    label: str, number: int, mean_ns: float, case: tuple[float, ...], random: np.random.Generator
) -> BenchRun:
    between, within, _, _ = case
    of_run = mean_ns * (1 + random.normal(0, between))
    step_ns = tuple(int(step) for step in random.normal(of_run, mean_ns * within, STEPS))
    return BenchRun(label, number, Path(), step_ns, WarmUp(0, 1, True), "optimizer", "host", 1, True, 1.0)


def simulated_bench(case: tuple[float, ...], random: np.random.Generator) -> Bench:
    _, _, precision, change = case
    commands = tuple(BenchCommand(label, label, (label,), {}) for label in "AB")
    bench = Bench(commands, BenchSettings(STEPS, precision, rounds=MOST_ROUNDS), Path())
    while bench.stop is None:
        number = bench.rounds + 1
        bench.runs += [
            simulated_run("A", number, 1e8, case, random),
            simulated_run("B", number, 1e8 * (1 + change), case, random),
        ]
        bench.stop = stop_of(bench)
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate benches and count how often their interval holds the truth.")
    parser.add_argument("--benches", type=int, default=200, help="of each kind")
    options = parser.parse_args()

    random, worst = np.random.default_rng(0), 1.0
    print("runs differ  steps differ  precision  change  holds the truth  rounds")
    for case in CASES:
        held, rounds = [], []
        for _ in range(options.benches):
            bench = simulated_bench(case, random)
            [(_, found)] = bench.comparisons()
            held.append((found.change_low or 0) <= case[3] <= (found.change_high or 0))
            rounds.append(bench.rounds)
        worst = min(worst, float(np.mean(held)))
        spread, within, precision, change = (f"{100 * value:.1f} %" for value in case)
        print(
            f"{spread:>11}  {within:>12}  {precision:>9}  {change:>6}  {np.mean(held):>15.1%}  {np.mean(rounds):>6.1f}"
        )
    sys.exit(worst < LEAST)


if __name__ == "__main__":
    main()
