"""How much of what predictions err on a GPU, all of one kind of work has in common: what a step's range stands on.

    python benchmarks/error_correlation.py FOLDER [GPU ...]

FOLDER holds matmul_fp32.parquet and vector_fp32.parquet: operators' latencies on five GPUs (sitar-lab/NeuSight, MIT).
For each GPU the models are fitted without it, which takes a minute or two. Of the errors e = ln(predicted / measured)
of calls of more than 0.1 ms, the mean is what the kind has in common on that GPU, and the share of the common part is
mean(e)^2 / mean(e^2). `scripts/predictor/ranges.py` tells how many steps the ranges hold.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from scripts.predictor.iterations import GPUS, learned
from scripts.predictor.ranges import measured
from scripts.predictor.timings import public_device


def main(folder: Path, gpus: tuple[str, ...]) -> None:
    """Print the table."""
    print(f"{'kind':<15}{'held out':<10}{'calls':>7}{'mean':>8}{'rms':>8}{'common':>9}")
    sums: dict[str, list[tuple[float, float]]] = {}
    for gpu in gpus:
        predict = learned(folder, {gpu})
        for operations, latency in measured(folder, gpu):
            error = np.log(predict(operations, public_device(gpu)) / latency)
            for kind in np.unique(operations.kind).tolist():
                mine = error[(operations.kind == kind) & np.isfinite(error)]
                parts = float(mine.mean()) ** 2, float((mine**2).mean())
                sums.setdefault(kind, []).append(parts)
                print(_row(kind, gpu, len(mine), float(mine.mean()), parts), flush=True)
    for kind, found in sums.items():
        common, whole = (sum(each[place] for each in found) for place in range(2))
        print(_row(kind, "all", len(found), float("nan"), (common / len(found), whole / len(found))))


def _row(kind: str, gpu: str, calls: int, mean: float, parts: tuple[float, float]) -> str:
    common = parts[0] / parts[1] if parts[1] else 0.0
    return f"{kind:<15}{gpu:<10}{calls:>7}{mean:>8.3f}{parts[1] ** 0.5:>8.3f}{common:>9.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or GPUS)
