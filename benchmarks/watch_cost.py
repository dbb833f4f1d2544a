"""What `stepscope watch` costs the training that it watches: by its own account, and by the training's clock.

    python benchmarks/watch_cost.py [--every 20] [--recordings 10]

The GPT-2 of `examples/gpt2_training.py` notes when each of its steps ends, and the processor time until then. By these
clocks a recording costs what the steps of the ten seconds after its request take longer than the median of all others:
recording, saving and, by the first, what the analysis on the same machine takes from them. Other programs lengthen
steps, but hardly their processor time. Shares are of the step time at the default interval. The first recording, which
loads the profiler, is printed apart.
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
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from stepscope.commands.watch.command import COMMAND  # noqa: E402

TRAINING = """\
import sys, time, torch
sys.path.insert(0, "examples")
import gpt2_training, stepscope
torch.set_num_threads(1)
stepscope.start_server(token="a-token-for-the-benchmark", socket=sys.argv[1])
ends = open(sys.argv[2], "w", buffering=1)
note = lambda: print(time.time(), time.process_time(), file=ends)
gpt2_training.train(torch.device("cpu"), gpt2_training.batched_loss, 20_000, note)
"""
WINDOW_S = 10.0
WARM_UP = 50


def costs(ends: list[list[float]], requests: list[float], clock: int) -> list[float]:
    """Seconds that each recording took from the steps, by one of the clocks read at their ends."""
    ends = ends[WARM_UP:]
    steps = [(now[0], now[clock] - before[clock]) for before, now in pairwise(ends)]
    inside = [[length for end, length in steps if 0 <= end - asked < WINDOW_S] for asked in requests]
    pace = statistics.median(length for end, length in steps if all(not 0 <= end - at < WINDOW_S for at in requests))
    return [sum(lengths) - len(lengths) * pace for lengths in inside]


def shown(name: str, seconds: list[float], every_s: float) -> None:
    first, *others = seconds
    median, mean = statistics.median(others), statistics.mean(others)
    print(
        f"{name}: a recording costs {median:.2f} s (median of {len(others)}; mean {mean:.2f} s, first {first:.2f} s): "
        f"{median / every_s:.2%} of the step time at one every {every_s / 60:.0f} min"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=20, metavar="SECONDS", help="between recordings (20)")
    parser.add_argument("--recordings", type=int, default=10)
    options = parser.parse_args()
    default_s = COMMAND.parsed(["localhost:1"]).every
    with tempfile.TemporaryDirectory() as folder:
        socket, ends, lines = (Path(folder) / name for name in ("agent", "ends", "lines.json"))
        variables = {**os.environ, "STEPSCOPE_DATA_DIR": folder, "STEPSCOPE_TOKEN": "a-token-for-the-benchmark"}
        training = subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(socket), str(ends)], cwd=REPOSITORY, env=variables
        )
        try:
            while not ends.exists() or len(ends.read_text().splitlines()) < WARM_UP:
                time.sleep(0.5)
            words = ["--every", f"{options.every}s", "--repeat", str(options.recordings + 1), "--most-cost", "100%"]
            command = [sys.executable, "-m", "stepscope", "watch", f"unix:{socket}", *words, "--json", str(lines)]
            subprocess.run(command, check=True, env=variables)
            time.sleep(WINDOW_S)
        finally:
            training.kill()
            training.wait()
        recordings = [json.loads(line)["recording"] for line in lines.read_text().splitlines()]
        ended = [[float(word) for word in line.split()] for line in ends.read_text().splitlines()]
    asked = [each["unix_s"] for each in recordings]
    asked[0] += min(options.every, 30)  # it counts steps before
    shown("by the watch's account", [each["cost_s"] or 0.0 for each in recordings], default_s)
    shown("by the training's clock", costs(ended, asked, 0), default_s)
    shown("by its processor time", costs(ended, asked, 1), default_s)


if __name__ == "__main__":
    main()
