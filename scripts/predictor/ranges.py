"""Learn how wide ranges must be to hold four of five cases on GPUs that were left out: conformal prediction.

    OMP_NUM_THREADS=1 python -m scripts.predictor.ranges FOLDER TRACES [--write]

FOLDER holds the published timings, TRACES public traces. A case's score is how many of its band's half-widths lie
between prediction and measurement (Romano, Patterson and Candès, 2019, for bands that differ from case to case), and
a kind's width is what four of five scores do not exceed, each GPU counting as much as another. Widths are printed
with the share of cases that they hold, nested: the width is chosen by the other GPUs' cases, of models that saw
neither. With --write they become `src/stepscope/data/ranges.csv`, by all GPUs' cases. GPUs outside of the timings are
only tested.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from benchmarks.unmeasured_makers import SHORTEST_NS, predicted_operators, trace_paths
from scripts.predictor import matrix, matrix_timings
from scripts.predictor.graphs import Iteration, derived_iteration, iterations
from scripts.predictor.iterations import GPUS, learned_models
from scripts.predictor.timings import Numbers, public_device, vector_timings
from scripts.predictor.unseen import CASES, NAMES
from stepscope.errors import StepscopeError
from stepscope.machine.devices import DevicePeaks, is_nvidia, named_device
from stepscope.predict import matrix_times, memory_times
from stepscope.predict.operation_times import guessed_band, operation_times, sustained_ns
from stepscope.predict.operations import UNMEASURED, Operations, OperationTimes
from stepscope.predict.ranges import GUESSED, HELD, HOST, STEP, half_widths, joint_band, step_band
from stepscope.predict.trace_operations import different_calls
from stepscope.readers import open_trace
from stepscope.whatif.experiment import Experiment

DATA: Final = Path(__file__).resolve().parents[2] / "src" / "stepscope" / "data" / "ranges.csv"
LONG_NS: Final = 100_000.0
"""What is shorter consists of the launch, in these timings."""
FEWEST: Final = 3  # devices whose recordings tell the width of a kind that was not timed
TIMED: Final = ("matrix", "elementwise", "normalisation", "softmax", "convolution", "attention")
"""Kinds whose bands traces do not tell: they were timed, or bands differ by far more than what they hold."""
_EVERY: Final = 20
CASE: Final = ("gpu", "model", "mode", "length", "batch", "iteration_ms")
Predict = Callable[[Operations, DevicePeaks], OperationTimes]


def without(folder: Path, gpus: set[str]) -> Predict:
    """Predicts as `operation_times` does, from models that never saw these GPUs; bands are the shipped ones."""
    of_products, memory = learned_models(folder, gpus)
    shipped = matrix_times.shipped_model()
    assert isinstance(of_products.law, matrix_times.TileLaw)
    products = replace(shipped, trees={**shipped.trees, "vector": of_products.trees}, tiles=of_products.law)
    traffic = replace(memory, bands=memory_times.shipped_model().bands)

    def predict(operations: Operations, device: DevicePeaks) -> OperationTimes:
        found = memory_times.memory_times(operations, device, traffic)
        mine = operations.kind == "matrix"
        return found.replaced(mine, matrix_times.matrix_times(operations.select(mine), device, products))

    return predict


def measured(folder: Path, gpu: str) -> Iterator[tuple[Operations, Numbers]]:
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
        long = latency > LONG_NS
        yield operations.select(long), latency[long]


def distances(ns: Numbers, expected: Numbers, low: Numbers, high: Numbers, *, is_guessed: bool = False) -> Numbers:
    """Scores: the logarithm of measured over predicted, in half-widths of the band, without sign."""
    error = np.log(ns / expected)
    below, above = half_widths(expected, low, high, np.full(len(ns), is_guessed))
    return np.asarray(np.abs(error) / np.where(error < 0, below, above))


def scores_of_kinds(folder: Path, gpu: str, predict: Predict) -> dict[str, Numbers]:
    """Of single operations on a GPU, by kind."""
    found: dict[str, list[Numbers]] = {}
    for operations, latency in measured(folder, gpu):
        times = predict(operations, public_device(gpu))
        scores = distances(latency, times.ns, times.low_ns, times.high_ns)
        for kind in np.unique(operations.kind).tolist():
            found.setdefault(kind, []).append(scores[(operations.kind == kind) & np.isfinite(scores)])
    return {kind: np.concatenate(parts) for kind, parts in found.items()}


@dataclass(frozen=True, slots=True)
class Steps:
    """Whole iterations on one GPU, and what each of their operations takes by models that never saw it."""

    measured_ns: list[float]
    graphs: list[Iteration]
    times: list[OperationTimes]

    def ranges(self, widths: Mapping[str, float]) -> Numbers:
        """Shape (iterations, 3): nanoseconds at the low end, expected and at the high end; without widths, of bands."""
        return np.array([_range(graph, times, widths) for graph, times in zip(self.graphs, self.times, strict=True)])

    def scores(self, widths: Mapping[str, float]) -> Numbers:
        """Of the iterations in their ranges, with STEP's width of 1."""
        low, expected, high = self.ranges({**widths, STEP: 1.0}).T
        return distances(np.array(self.measured_ns), expected, low, high)


def _range(graph: Iteration, found: OperationTimes, widths: Mapping[str, float]) -> tuple[float, float, float]:
    ns, low, high = (np.nan_to_num(each) * graph.repeats for each in (found.ns, found.low_ns, found.high_ns))
    kinds = np.where(found.basis == "learned", graph.operations.kind, GUESSED)
    calls = different_calls(graph.operations)
    rows = np.arange(len(calls))
    together = (
        step_band(ns, low, high, kinds, calls, rows, widths)
        if widths
        else joint_band(ns, low, high, kinds, calls, rows)
    )
    low, high = together
    return sustained_ns(float(low.sum())), sustained_ns(float(ns.sum())), sustained_ns(float(high.sum()))


def steps_of(folder: Path, gpu: str, predict: Predict) -> Steps:
    """The published iterations of a GPU of the timings."""
    graphs = iterations(folder)
    table = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("config").is_in(list(graphs)))
    rows = table.filter(pl.col("gpu") == gpu).select("config", "iteration_ms").drop_nulls().rows()
    chosen = [graphs[config] for config, _ in rows]
    return Steps([ms * 1e6 for _, ms in rows], chosen, [predict(one.operations, public_device(gpu)) for one in chosen])


def unseen_steps(folder: Path) -> dict[str, Steps]:
    """The iterations of GPUs that are in no timings, by the shipped models."""
    found: dict[str, Steps] = {}
    for gpu, model, mode, length, batch, ms in pl.read_csv(CASES).select(CASE).rows():
        device = named_device(NAMES.get(gpu, gpu))
        graph = derived_iteration(folder, model, mode, length, batch)
        times = operation_times(graph.operations, device)
        if not is_nvidia(device):
            low, high = guessed_band(times.ns, times.low_ns, times.high_ns, device)
            times = replace(times, low_ns=low, high_ns=high, basis=np.full(len(low), "roofline"))
        of_gpu = found.setdefault(gpu, Steps([], [], []))
        of_gpu.measured_ns.append(ms * 1e6)
        of_gpu.graphs.append(graph)
        of_gpu.times.append(times)
    return found


def recorded_scores(folder: Path) -> tuple[dict[str, dict[str, Numbers]], dict[str, Numbers], dict[str, Numbers]]:
    """Of public traces: kinds that no timings have, by device; other makers' work together, by trace; and hosts.

    The last are logarithms of the mean of every other step over the mean of the rest, of traces of four and more.
    """
    kinds: dict[str, dict[str, Numbers]] = {}
    guessed, hosts = {}, {}
    for one in predicted_operators(folder):
        if not is_nvidia(one.device):
            low, high = (np.array([one.predicted.sum() * factor]) for factor in UNMEASURED[one.device.vendor])
            took, expected = np.array([one.measured.sum()]), np.array([one.predicted.sum()])
            guessed[one.name] = distances(took, expected, low, high, is_guessed=True)
            continue
        scores = distances(one.measured, one.predicted, one.low, one.high)
        for kind, score, ns in zip(one.kinds, scores.tolist(), one.measured.tolist(), strict=True):
            if kind not in TIMED and ns > SHORTEST_NS:
                of_kind = kinds.setdefault(kind, {})
                of_kind[one.device.name] = np.append(of_kind.get(one.device.name, np.empty(0)), score)
    for path in trace_paths(folder):
        try:
            steps = Experiment(open_trace(path)).steps["duration_ns"].to_numpy().astype(np.float64)
        except StepscopeError:
            continue
        if len(steps) > 3:
            hosts[path.name] = np.abs(np.log([steps[::2].mean() / steps[1::2].mean()]))
    return {kind: scores for kind, scores in kinds.items() if len(scores) >= FEWEST}, guessed, hosts


def width_of(scores: Mapping[str, Numbers]) -> float:
    """What HELD of the scores do not exceed, each group counting as much as another."""
    values = np.concatenate(list(scores.values()))
    weight = np.concatenate([np.full(len(mine), 1 / max(len(mine), 1)) for mine in scores.values()])
    order = np.argsort(values)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(values[order][min(int(np.searchsorted(reached, HELD - 1e-9)), len(order) - 1)])


def left_out_in_turn(scores: Mapping[str, Numbers]) -> dict[str, float]:
    """Share of each group's cases in the range of the width that others chose."""
    others = {group: {name: mine for name, mine in scores.items() if name != group} for group in scores}
    return {group: float((mine <= width_of(others[group])).mean()) for group, mine in scores.items()}


Sets = Mapping[frozenset[str], Mapping[str, tuple[Mapping[str, Numbers], Steps]]]
"""Of each set of GPUs that models never saw: of each GPU in it scores of single operations by kind, and its steps."""


def _unseen_by_models(job: tuple[Path, frozenset[str]]) -> Mapping[str, tuple[Mapping[str, Numbers], Steps]]:
    folder, gpus = job
    predict = without(folder, set(gpus))
    return {gpu: (scores_of_kinds(folder, gpu, predict), steps_of(folder, gpu, predict)) for gpu in sorted(gpus)}


def all_sets(folder: Path, processes: int) -> Sets:
    """Every GPU and every pair of GPUs."""
    sets = [frozenset(gpus) for count in (1, 2) for gpus in combinations(GPUS, count)]
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(sets, pool.map(_unseen_by_models, [(folder, one) for one in sets]), strict=True))


def calibrated(sets: Sets, outer: str | None = None) -> dict[str, float]:
    """Widths of kinds and of steps by the cases of all GPUs, or of all but one, of models that saw neither."""
    others = [gpu for gpu in GPUS if gpu != outer]
    found = {gpu: sets[frozenset({gpu} if outer is None else {gpu, outer})][gpu] for gpu in others}
    kinds = sorted({kind for scores, _ in found.values() for kind in scores})
    widths = {kind: width_of({gpu: scores[kind] for gpu, (scores, _) in found.items()}) for kind in kinds}
    widths[GUESSED] = 1.0
    return {**widths, STEP: width_of({gpu: steps.scores(widths) for gpu, (_, steps) in found.items()})}


def _nested(sets: Sets) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each kind, and of steps, the share of each GPU's cases that the others' widths hold."""
    widths = {gpu: calibrated(sets, gpu) for gpu in GPUS}
    own = {gpu: sets[frozenset({gpu})][gpu] for gpu in GPUS}
    for kind in own[GPUS[0]][0]:
        yield kind, {gpu: float((own[gpu][0][kind] <= widths[gpu][kind]).mean()) for gpu in GPUS}
    yield STEP, {gpu: float((own[gpu][1].scores(widths[gpu]) <= widths[gpu][STEP]).mean()) for gpu in GPUS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--write", action="store_true", help="renew the table that comes with the package")
    parser.add_argument("--processes", type=int, default=2, help="models learned at a time, each a minute's work")
    arguments = parser.parse_args()
    sets = all_sets(arguments.folder, arguments.processes)
    widths = calibrated(sets)
    kinds, guessed, hosts = recorded_scores(arguments.traces)
    recorded = {**kinds, GUESSED: guessed, HOST: hosts}
    widths |= {of: width_of(scores) for of, scores in recorded.items()}
    shares = {**dict(_nested(sets)), **{of: left_out_in_turn(scores) for of, scores in recorded.items()}}
    print("of | width | groups left out | cases held, each group alike\n---|---:|---:|---:")
    for of, share in shares.items():
        print(f"{of} | {widths[of]:.2f} | {len(share)} | {np.mean(list(share.values())):.0%}")
    _print_steps(sets)
    _print_unseen(arguments.folder, widths)
    if arguments.write:
        rows = [f"{of},{width:.3f}" for of, width in sorted(widths.items())]
        DATA.write_text("\n".join(["of,width", *rows]) + "\n", encoding="utf-8")


def _print_steps(sets: Sets) -> None:
    print(f"\niterations of | {_COLUMNS}")
    for gpu in GPUS:
        mine, own = sets[frozenset({gpu})][gpu][1], calibrated(sets, gpu)
        print(_line(gpu, mine, own))


def _print_unseen(folder: Path, widths: Mapping[str, float]) -> None:
    print(f"\nGPUs in no timings | {_COLUMNS}")
    for gpu, mine in unseen_steps(folder).items():
        print(_line(gpu, mine, widths))


_COLUMNS: Final = "cases | held | range | as wide as the bands of nine of ten\n---|---:|---:|---:|---:"


def _line(name: str, steps: Steps, widths: Mapping[str, float]) -> str:
    low, expected, high = steps.ranges(widths).T
    least, _, most = steps.ranges({}).T
    took = np.array(steps.measured_ns)
    inside = int(((low <= took) & (took <= high)).sum())
    width, wide = np.mean((high - low) / expected), np.mean((most - least) / expected)
    ends = f"{np.mean(low / expected):.2f} to {np.mean(high / expected):.2f}"
    return f"{name} | {len(took)} | {inside} | {ends} | {width / wide:.0%}"


if __name__ == "__main__":
    main()
