"""Learn how wide ranges must be to hold four of five cases on GPUs that were left out: conformal prediction.

    OMP_NUM_THREADS=1 python -m scripts.predictor.ranges FOLDER TRACES [--write]

FOLDER holds the published timings, TRACES public traces. A case's score is how many of its band's half-widths lie
between prediction and measurement (Romano, Patterson and Candès, 2019, for bands that differ from case to case). Cases
of one GPU err alike, so the GPU is the unit, and there are few: one case is drawn from each (Dunn, Wasserman and
Ramdas, 2023), which `width_of` explains. Widths are printed with the share of cases that they hold, nested: the width
is chosen by the other GPUs' cases, of models that saw neither. With --write they become
`src/stepscope/data/ranges.csv`, by all GPUs' cases. GPUs outside of the timings are only tested.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from benchmarks.unmeasured_makers import SHORTEST_NS, predicted_operators, trace_paths
from scripts.predictor import convolution, matrix, matrix_timings, memory
from scripts.predictor.graphs import Iteration, derived_iteration, iterations, latencies
from scripts.predictor.iterations import GPUS, donor_ns, learned_models
from scripts.predictor.timings import Numbers, public_device, vector_operations, vector_timings
from scripts.predictor.unseen import CASES, NAMES
from stepscope.errors import StepscopeError
from stepscope.machine.devices import DevicePeaks, is_nvidia, named_device, with_measured_shares
from stepscope.predict import matrix_times, memory_times
from stepscope.predict.matrix_laws import TileLaw
from stepscope.predict.operation_times import (
    LONG_LOSS,
    convolution_times,
    guessed_band,
    operation_times,
    shipped_convolution_model,
    sustained_ns,
)
from stepscope.predict.operations import UNMEASURED, Operations, OperationTimes
from stepscope.predict.ranges import GUESSED, HELD, HOST, STEP, half_widths, joint_band, step_band
from stepscope.predict.trace_operations import different_calls
from stepscope.predict.work_times import are_alike, ratios_of
from stepscope.readers import open_trace
from stepscope.whatif.experiment import Experiment

DATA: Final = Path(__file__).resolve().parents[2] / "src" / "stepscope" / "data" / "ranges.csv"
LONG_NS: Final = 100_000.0
"""What is shorter consists of the launch, in these timings."""
FEWEST: Final = 3  # devices whose recordings tell the width of a kind that was not timed
DRAWS: Final = 2000
_EVERY: Final = 20
CASE: Final = ("gpu", "model", "mode", "length", "batch", "iteration_ms")
Predict = Callable[[Operations, DevicePeaks], OperationTimes]


def without(folder: Path, gpus: set[str]) -> Predict:
    """Predicts as `operation_times` does, from models that never saw these GPUs; bands are the shipped ones."""
    of_products, traffic = learned_models(folder, gpus)
    shipped = matrix_times.shipped_model()
    assert isinstance(of_products.law, TileLaw)
    products = replace(shipped, trees={**shipped.trees, "vector": of_products.trees}, tiles=of_products.law)
    traffic = replace(traffic, bands=memory_times.shipped_model().bands)
    others = {gpu: of_gpu for gpu, of_gpu in convolution.timings(folder, every=4).items() if gpu not in gpus}
    convolutions = convolution.fit(others, {gpu: convolution.measured_device(folder, gpu) for gpu in others})
    convolutions = replace(convolutions, band=shipped_convolution_model().band)

    others_times = {
        "matrix": partial(matrix_times.matrix_times, model=products),
        "convolution": partial(convolution_times, model=convolutions),
    }

    def predict(operations: Operations, device: DevicePeaks) -> OperationTimes:
        found = memory_times.memory_times(operations, device, traffic)
        for kind, times in others_times.items():
            mine = operations.kind == kind
            if mine.any():
                found = found.replaced(mine, times(operations.select(mine), device))
        return found

    return predict


def measured(folder: Path, gpu: str) -> Iterator[tuple[Operations, Numbers]]:
    """Operations and how long they took on a GPU, without the host's part."""
    [products] = [one for one in matrix_timings.vector_timings(folder) if one.gpu == gpu]
    products = products.select(np.arange(0, len(products.latency_ns), _EVERY))
    vectors = vector_timings(folder, every=_EVERY)
    vectors = vectors.select(vectors.gpu == gpu)
    host = memory.fit_host(vectors, [gpu])
    found = [
        (products.operations, products.latency_ns - matrix.BEFORE_SHARE * products.host_ns),
        (vectors.operations, host.kernel(vectors.latency_ns, vectors.operator, host.floors[gpu])),
    ]
    if gpu in convolution.GPUS:
        found.append(convolution.timings(folder, every=_EVERY)[gpu])
    for operations, latency in found:
        long = latency > LONG_NS
        yield operations.select(long), latency[long]


def distances(ns: Numbers, expected: Numbers, low: Numbers, high: Numbers, *, is_guessed: bool = False) -> Numbers:
    """Scores: the logarithm of measured over predicted, in half-widths of the band, without sign."""
    error = np.log(ns / expected)
    below, above = half_widths(expected, low, high, np.full(len(ns), is_guessed))
    return np.asarray(np.abs(error) / np.where(error < 0, below, above))


def scores_of_kinds(folder: Path, gpu: str, predict: Predict) -> tuple[dict[str, Numbers], dict[str, float]]:
    """Of single operations on a GPU, by kind, and the median half-width of their bands."""
    scores: dict[str, Numbers] = {}
    bands: dict[str, float] = {}
    for operations, latency in measured(folder, gpu):
        times = predict(operations, public_device(gpu))
        found = distances(latency, times.ns, times.low_ns, times.high_ns)
        half, _ = half_widths(times.ns, times.low_ns, times.high_ns, np.zeros(len(found), np.bool_))
        for kind in np.unique(operations.kind).tolist():
            mine = (operations.kind == kind) & np.isfinite(found)
            scores[kind], bands[kind] = found[mine], float(np.median(half[mine]))
    return scores, bands


def scores_of_bandwidths(predict: Predict) -> dict[str, Numbers]:
    """What moves along lines is as fast as the memory: a case of each device whose bandwidth others measured."""
    copy = vector_operations(np.array([memory.COPY]), np.ones(1), np.array([1e8]))
    found = {}
    for device in memory.measured_by_others():
        times = predict(copy, replace(device, sustained_bandwidth_bytes_s=None))
        found[device.name] = distances(predict(copy, device).ns, times.ns, times.low_ns, times.high_ns)
    return found


@dataclass(frozen=True, slots=True)
class Steps:
    """Whole iterations on one GPU, and what each of their operations takes by models that never saw it.

    Attributes:
        loss: of long ones, as `sustained_ns` has it.
    """

    measured_ns: list[float]
    graphs: list[Iteration]
    times: list[OperationTimes]
    loss: float = LONG_LOSS

    def ranges(self, widths: Mapping[str, float]) -> Numbers:
        """Shape (iterations, 3): nanoseconds at the low end, expected and at the high end; without widths, of bands."""
        sums = [_range(graph, times, widths) for graph, times in zip(self.graphs, self.times, strict=True)]
        return np.array([[sustained_ns(ns, self.loss) for ns in ends] for ends in sums])

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
    return float(together[0].sum()), float(ns.sum()), float(together[1].sum())


def steps_of(folder: Path, gpu: str, predict: Predict) -> Steps:
    """The published iterations of a GPU of the timings."""
    graphs = iterations(folder)
    table = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("config").is_in(list(graphs)))
    rows = table.filter(pl.col("gpu") == gpu).select("config", "iteration_ms").drop_nulls().rows()
    chosen = [graphs[config] for config, _ in rows]
    return Steps([ms * 1e6 for _, ms in rows], chosen, [predict(one.operations, public_device(gpu)) for one in chosen])


def recorded_steps(folder: Path, gpu: str, predict: Predict) -> Steps:
    """The iterations of a GPU from those of every other that ran them, each operation's time there times the ratio."""
    graphs, target = iterations(folder), public_device(gpu)
    table = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("config").is_in(list(graphs)))
    goals = dict(table.filter(pl.col("gpu") == gpu).select("config", "iteration_ms").rows())
    found = Steps([], [], [], loss=0.0)
    for donor, config, ms in table.select("gpu", "config", "iteration_ms").drop_nulls().rows():
        if donor == gpu or not goals.get(config):
            continue
        graph, source = graphs[config], public_device(donor)
        before, after = predict(graph.operations, source), predict(graph.operations, target)
        took = donor_ns(graph, latencies(folder, donor, config), before.ns)
        took *= ms * 1e6 / (graph.repeats @ took)
        ns, low, high = (took * each for each in ratios_of(took, before, after, alike=are_alike(source, target)))
        found.measured_ns.append(goals[config] * 1e6)
        found.graphs.append(graph)
        found.times.append(OperationTimes(ns, low, high, np.full(len(ns), "learned")))
    return found


def unseen_steps(folder: Path) -> dict[str, Steps]:
    """The iterations of GPUs that are in no timings, by the shipped models."""
    found: dict[str, Steps] = {}
    for gpu, model, mode, length, batch, ms in pl.read_csv(CASES).select(CASE).rows():
        device = with_measured_shares(named_device(NAMES.get(gpu, gpu)))
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
    """Of public traces: kinds of work, by device; other makers' work together, by trace; and hosts.

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
            if ns > SHORTEST_NS:
                of_kind = kinds.setdefault(kind, {})
                of_kind[one.device.name] = np.append(of_kind.get(one.device.name, np.empty(0)), score)
    for path in trace_paths(folder):
        try:
            steps = Experiment(open_trace(path)).steps["duration_ns"].to_numpy().astype(np.float64)
        except StepscopeError:
            continue
        if len(steps) > 3:
            hosts[path.name] = np.abs(np.log([steps[::2].mean() / steps[1::2].mean()]))
    return kinds, guessed, hosts


def width_of(scores: Mapping[str, Numbers]) -> float:
    """What HELD of the cases of one more group do not exceed, if it is like these.

    Of n cases, one of each group, the one at place HELD * (n + 1) in their order holds HELD of further ones; of fewer
    than four groups it is the largest, which holds n / (n + 1). Each draw gives another; the width holds as much of
    all cases, each group counting as much as another, as those do on average.
    """
    random = np.random.default_rng(0)
    drawn = np.stack([random.choice(mine, DRAWS) for mine in scores.values()])
    placed = np.quantile(drawn, HELD, axis=0, method="weibull")
    values = np.concatenate(list(scores.values()))
    weight = np.concatenate([np.full(len(mine), 1 / len(mine)) for mine in scores.values()])
    order = np.argsort(values)
    reached = np.cumsum(weight[order]) / weight.sum()
    share = np.interp(placed, values[order], reached).mean()
    return float(np.interp(share, reached, values[order]))


def left_out_in_turn(scores: Mapping[str, Numbers]) -> dict[str, float]:
    """Share of each group's cases in the range of the width that others chose."""
    others = {group: {name: mine for name, mine in scores.items() if name != group} for group in scores}
    return {group: float((mine <= width_of(others[group])).mean()) for group, mine in scores.items()}


@dataclass(frozen=True, slots=True)
class Unseen:
    """What models that never saw some GPUs say of them.

    Attributes:
        kinds, bands: of each GPU the scores of single operations by kind, and the median half-width of their bands.
        steps, recorded: of each GPU its steps from shapes, and from another GPU's.
        bandwidths: scores of devices whose bandwidth others measured.
    """

    kinds: Mapping[str, Mapping[str, Numbers]]
    bands: Mapping[str, Mapping[str, float]]
    steps: Mapping[str, Steps]
    recorded: Mapping[str, Steps]
    bandwidths: Mapping[str, Numbers]


Sets = Mapping[frozenset[str], Unseen]


def _unseen_by_models(job: tuple[Path, frozenset[str]]) -> Unseen:
    folder, gpus = job
    predict = without(folder, set(gpus)) if gpus else operation_times
    found = {gpu: scores_of_kinds(folder, gpu, predict) for gpu in gpus}
    return Unseen(
        {gpu: scores for gpu, (scores, _) in found.items()},
        {gpu: bands for gpu, (_, bands) in found.items()},
        {gpu: steps_of(folder, gpu, predict) for gpu in gpus},
        {gpu: recorded_steps(folder, gpu, predict) for gpu in gpus if len(gpus) == 1},
        scores_of_bandwidths(predict),
    )


def all_sets(folder: Path, processes: int) -> Sets:
    """No GPU, every GPU and every pair of GPUs."""
    sets = [frozenset(gpus) for count in (0, 1, 2) for gpus in combinations(GPUS, count)]
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(sets, pool.map(_unseen_by_models, [(folder, one) for one in sets]), strict=True))


def scores_without(sets: Sets, outer: str | None = None) -> dict[str, dict[str, Numbers]]:
    """Of each kind the scores of all GPUs, or of all but one, of models that saw neither."""
    held = frozenset(() if outer is None else {outer})
    found: dict[str, dict[str, Numbers]] = {}
    for gpu in sorted(set(GPUS) - held):
        for kind, scores in sets[held | {gpu}].kinds[gpu].items():
            found.setdefault(kind, {})[gpu] = scores
    found["elementwise"].update(sets[held].bandwidths)
    return found


def calibrated(sets: Sets, outer: str | None = None) -> dict[str, float]:
    """Widths of kinds and of steps by the cases of all GPUs, or of all but one, of models that saw neither."""
    held = frozenset(() if outer is None else {outer})
    widths = {kind: width_of(scores) for kind, scores in scores_without(sets, outer).items()} | {GUESSED: 1.0}
    steps = {gpu: sets[held | {gpu}].steps[gpu] for gpu in sorted(set(GPUS) - held)}
    return {**widths, STEP: width_of({gpu: mine.scores(widths) for gpu, mine in steps.items()})}


def nested(sets: Sets, widths: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of each kind, and of steps, the share of each group's cases that the others' widths hold."""
    found: dict[str, dict[str, float]] = {STEP: {}}
    for gpu in GPUS:
        own = sets[frozenset({gpu})]
        for kind, scores in own.kinds[gpu].items():
            found.setdefault(kind, {})[gpu] = float((scores <= widths[gpu][kind]).mean())
        found[STEP][gpu] = float((own.steps[gpu].scores(widths[gpu]) <= widths[gpu][STEP]).mean())
    of_devices = left_out_in_turn(scores_without(sets)["elementwise"])
    found["elementwise"].update({name: share for name, share in of_devices.items() if name not in GPUS})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--write", action="store_true", help="renew the table that comes with the package")
    parser.add_argument("--processes", type=int, default=2, help="models learned at a time, each a minute's work")
    arguments = parser.parse_args()
    sets = all_sets(arguments.folder, arguments.processes)
    widths, of_others = calibrated(sets), {gpu: calibrated(sets, gpu) for gpu in GPUS}
    kinds, guessed, hosts = recorded_scores(arguments.traces)
    timed = {kind: scores for kind, scores in kinds.items() if kind in widths}
    recorded = {kind: scores for kind, scores in kinds.items() if kind not in widths and len(scores) >= FEWEST}
    recorded |= {GUESSED: guessed, HOST: hosts}
    widths |= {of: width_of(scores) for of, scores in recorded.items()}
    shares = {**nested(sets, of_others), **{of: left_out_in_turn(scores) for of, scores in recorded.items()}}
    print("of | width | range, times or over | groups left out | cases held, each group alike\n---|---:|---:|---:|---:")
    for of, share in shares.items():
        held = np.mean(list(share.values()))
        print(f"{of} | {widths[of]:.2f} | {_usual(sets, of_others, of)} | {len(share)} | {held:.0%}")
    print("\ntimed kinds in public traces, each together | devices | traces | held\n---|---:|---:|---:")
    for of, scores in timed.items():
        of_traces = np.concatenate(list(scores.values()))
        print(f"{of} | {len(scores)} | {len(of_traces)} | {(of_traces <= widths[of]).sum()}")
    _print_steps("iterations of", {gpu: sets[frozenset({gpu})].steps[gpu] for gpu in GPUS}, of_others)
    _print_steps("from another GPU's", {gpu: sets[frozenset({gpu})].recorded[gpu] for gpu in GPUS}, of_others)
    unseen = unseen_steps(arguments.folder)
    _print_steps("GPUs in no timings", unseen, dict.fromkeys(unseen, widths))
    if arguments.write:
        rows = [f"{of},{width:.3f}" for of, width in sorted(widths.items())]
        DATA.write_text("\n".join(["of,width", *rows]) + "\n", encoding="utf-8")


def _usual(sets: Sets, widths: Mapping[str, Mapping[str, float]], kind: str) -> str:
    """The least and greatest factor of a kind's range on GPUs that were left out."""
    bands = {gpu: sets[frozenset({gpu})].bands[gpu].get(kind) for gpu in GPUS}
    factors = [float(np.exp(widths[gpu][kind] * band)) for gpu, band in bands.items() if band is not None]
    return f"{min(factors):.2f} to {max(factors):.2f}" if factors else ""


def _print_steps(title: str, steps: Mapping[str, Steps], widths: Mapping[str, Mapping[str, float]]) -> None:
    print(f"\n{title} | {_COLUMNS}")
    for gpu, mine in steps.items():
        print(_line(gpu, mine, widths[gpu]))


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
