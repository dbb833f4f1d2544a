"""How much of what predictions err on a GPU, all of one kind of work has in common: what a step's range stands on.

    python benchmarks/error_correlation.py FOLDER [GPU ...]

FOLDER holds matmul_fp32.parquet and vector_fp32.parquet: operators' latencies on five GPUs (sitar-lab/NeuSight, MIT).
For each GPU the models are fitted without it, which takes a minute or two. Of the errors e = ln(predicted / measured)
of calls of more than SHORTEST_NS, the mean is what the kind has in common on that GPU, and the share of the common part
is mean(e)^2 / mean(e^2). The last row of a kind is over all GPUs: sum of mean(e)^2 over sum of mean(e^2).

Before that stands how many of the whole iterations in iterations_fp32.parquet lie in the range that the joint band
gives, and how wide it is beside the step: with the shipped models, and with models that never saw the iteration's GPU.
The bands of single operations are the shipped ones: what every GPU was off when it was held out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from scripts.predictor import matrix, matrix_timings
from scripts.predictor.graphs import Iteration
from scripts.predictor.iterations import GPUS, iterations, learned, learned_models
from scripts.predictor.timings import public_device, vector_timings
from stepscope.machine.devices import DevicePeaks
from stepscope.predict import matrix_times, memory_times
from stepscope.predict.operation_times import operation_times
from stepscope.predict.operations import Operations, OperationTimes
from stepscope.predict.trace_operations import different_calls
from stepscope.predict.work_times import joint_band

SHORTEST_NS: Final = 100_000.0
"""What is shorter consists of the launch, in these timings."""
_EVERY: Final = 20
Numbers = npt.NDArray[np.float64]


def main(folder: Path, gpus: tuple[str, ...]) -> None:
    """Print the tables."""
    _coverage(folder)
    print(f"{'kind':<15}{'held out':<10}{'calls':>7}{'mean':>8}{'rms':>8}{'common':>9}")
    sums: dict[str, list[tuple[float, float]]] = {}
    for gpu in gpus:
        predict = learned(folder, {gpu})
        for operations, latency in _measured(folder, gpu):
            error = np.log(predict(operations, public_device(gpu)) / latency)
            for kind in np.unique(operations.kind).tolist():
                mine = error[(operations.kind == kind) & np.isfinite(error)]
                parts = float(mine.mean()) ** 2, float((mine**2).mean())
                sums.setdefault(kind, []).append(parts)
                print(_row(kind, gpu, len(mine), float(mine.mean()), parts), flush=True)
    for kind, found in sums.items():
        common, whole = (sum(each[place] for each in found) for place in range(2))
        print(_row(kind, "all", len(found), float("nan"), (common / len(found), whole / len(found))))


def _coverage(folder: Path) -> None:
    """Print how many iterations are in their range, of GPUs that the models saw and of GPUs that they did not."""
    graphs = iterations(folder)
    table = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("config").is_in(list(graphs)))
    for seen, words in ((True, "by the shipped models"), (False, "by models that never saw the GPU")):
        inside, widths = [], []
        for gpu in GPUS:
            times = operation_times if seen else _held_out(folder, gpu)
            known = table.filter(pl.col("gpu") == gpu).select("config", "iteration_ms").drop_nulls()
            for config, measured in known.iter_rows():
                low, expected, high = _range(graphs[config], times(graphs[config].operations, public_device(gpu)))
                inside.append(low <= measured * 1e6 <= high)
                widths.append((high - low) / expected)
        width = f"{np.mean(widths):.0%} of the step wide"
        print(f"{sum(inside)} of {len(inside)} iterations in the range, which is {width}: {words}", flush=True)
    print()


def _held_out(folder: Path, gpu: str) -> Callable[[Operations, DevicePeaks], OperationTimes]:
    """Predicts as `operation_times` does, from models that never saw the GPU; bands are the shipped ones."""
    of_products, memory = learned_models(folder, {gpu})
    shipped = matrix_times.shipped_model()
    products = replace(shipped, trees={**shipped.trees, "vector": of_products.trees}, tiles=of_products.tiles)
    traffic = replace(memory, bands=memory_times.shipped_model().bands)

    def predict(operations: Operations, device: DevicePeaks) -> OperationTimes:
        found = memory_times.memory_times(operations, device, traffic)
        mine = operations.kind == "matrix"
        return found.replaced(mine, matrix_times.matrix_times(operations.select(mine), device, products))

    return predict


def _range(graph: Iteration, found: OperationTimes) -> tuple[float, float, float]:
    """Nanoseconds of an iteration at the low end, as expected, and at the high end."""
    times = [np.nan_to_num(each) * graph.repeats for each in (found.ns, found.low_ns, found.high_ns)]
    calls = different_calls(graph.operations)
    low, high = joint_band(*times, graph.operations.kind, calls, np.arange(len(calls)))
    return float(low.sum()), float(times[0].sum()), float(high.sum())


def _measured(folder: Path, gpu: str) -> Iterator[tuple[Operations, Numbers]]:
    """Operations and how long they took on a GPU, without the host's part."""
    [products] = [one for one in matrix_timings.vector_timings(folder) if one.gpu == gpu]
    products = products.select(np.arange(0, len(products.latency_ns), _EVERY))
    vectors = vector_timings(folder, every=_EVERY)
    vectors = vectors.select(vectors.gpu == gpu)
    least = float(vectors.latency_ns.min())
    for operations, latency in (
        (products.operations, products.latency_ns - matrix.BEFORE_SHARE * products.host_ns),
        (vectors.operations, vectors.latency_ns - least),
    ):
        long = latency > SHORTEST_NS
        yield operations.select(long), latency[long]


def _row(kind: str, gpu: str, calls: int, mean: float, parts: tuple[float, float]) -> str:
    common = parts[0] / parts[1] if parts[1] else 0.0
    return f"{kind:<15}{gpu:<10}{calls:>7}{mean:>8.3f}{parts[1] ** 0.5:>8.3f}{common:>9.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or GPUS)
