"""What recording the user's lines costs on top of a recording without them.

    python benchmarks/line_tracking.py --loss batched
    python benchmarks/line_tracking.py --loss per-token

Trains the small GPT-2 of examples/gpt2_training.py on one thread under one running profiler, and switches the tracker
on and off from one step to the next, so that both see the same machine. Printed is the CPU time of a step with lines
over that without: the median over pairs of neighbouring steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from stepscope.record.lines import LineTracker
from stepscope.record.recorder import Recorder
from stepscope.record.schedule import RecordOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import gpt2_training

WARM_UP = 4


class Alternation:
    """Called after each step: notes its CPU time, and switches the tracker for the next."""

    def __init__(self, recorder: Recorder) -> None:
        self.with_lines: list[int] = []
        self.without: list[int] = []
        self.notes = 0
        self._recorder = recorder
        self._tracker: LineTracker | None = None
        self._step = 0
        self._began_ns = 0

    def __call__(self) -> None:
        took_ns = time.process_time_ns() - self._began_ns
        self._step += 1
        if self._step > WARM_UP:
            (self.without if self._tracker is None else self.with_lines).append(took_ns)
        if self._step == WARM_UP:
            self._recorder.start()
        elif self._step > WARM_UP:
            self._recorder.step()
        if self._tracker is not None:
            self._tracker.stop()
            records = self._tracker.records()
            self.notes += sum(len(thread.times) // 8 for thread in records.threads) if records is not None else 0
            self._tracker = None
        elif self._step >= WARM_UP:
            self._tracker = LineTracker()
            self._tracker.start()
        self._began_ns = time.process_time_ns()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the CPU time that recording lines takes.")
    parser.add_argument("--loss", choices=sorted(gpt2_training.LOSSES), default="batched")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.set_num_threads(1)
    recorder = Recorder(RecordOptions(lines=False))
    alternation = Alternation(recorder)
    loss = gpt2_training.LOSSES[options.loss]
    gpt2_training.train(torch.device("cpu"), loss, WARM_UP + options.steps, alternation)
    with tempfile.TemporaryDirectory() as folder:
        recorder.save(Path(folder) / "trace.json.gz")
    pairs = list(zip(alternation.with_lines, alternation.without, strict=False))
    ratio = statistics.median(lines / plain for lines, plain in pairs)
    notes = alternation.notes / max(1, len(alternation.with_lines))
    print(f"{options.loss} loss, {len(pairs)} pairs of steps, Python {sys.version.split()[0]}")
    print(f"CPU time of a step: {statistics.median(alternation.without) / 1e6:.1f} ms without lines")
    print(f"with lines: {ratio:.3f} times that; {notes:.0f} notes a step")


if __name__ == "__main__":
    main()
