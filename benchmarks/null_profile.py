"""What `stepscope.profile(enabled=False)` and annotations cost a program that is not recorded.

    python benchmarks/null_profile.py

Prints nanoseconds per call, the best of several rounds less the empty loop, and the modules that are imported. Held to
300 ns a step and no import outside of stepscope.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import stepscope

LIMIT_NS = 300


def nanoseconds_per_call(function: Callable[[], object], calls: int, rounds: int) -> float:
    """Of the fastest round, without what the loop itself takes."""
    return best_ns(function, calls, rounds) - best_ns(None, calls, rounds)


def best_ns(function: Callable[[], object] | None, calls: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        if function is None:
            for _ in range(calls):
                pass
        else:
            for _ in range(calls):
                function()
        best = min(best, (time.perf_counter_ns() - begin) / calls)
    return best


def annotated() -> None:
    with stepscope.annotate("forward"):
        pass


def marked() -> None:
    with stepscope.step("train", 1):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what stepscope costs where nothing is recorded.")
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    before = set(sys.modules)
    with stepscope.profile("nowhere.json.gz", enabled=False) as profile:
        imported = sorted(set(sys.modules) - before)
        step = nanoseconds_per_call(profile.step, options.calls, options.rounds)
    foreign = [name for name in imported if not name.startswith("stepscope.")]
    print(f"profile(enabled=False).step(): {step:.0f} ns (limit {LIMIT_NS})")
    print(f"imported for it: {', '.join(imported) or 'nothing'}")
    print(f"with annotate(...): {nanoseconds_per_call(annotated, options.calls, options.rounds):.0f} ns")
    print(f"with step(...): {nanoseconds_per_call(marked, options.calls, options.rounds):.0f} ns")
    if step > LIMIT_NS or foreign:
        sys.exit(f"too much: {step:.0f} ns, {foreign}")


if __name__ == "__main__":
    main()
