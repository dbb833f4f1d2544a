"""Nested holding out: an inner loop chooses the constants, an outer loop judges them on GPUs that it never saw.

For each GPU, then each generation, everything is learned from the others. To choose, each of those others is held out
too: what predicts its iterations best from what is left is taken. Chosen are the weight of the law of tiles against the
trees, and how much longer an iteration takes than its operators one by one. There are timings of one maker only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from scripts.predictor import iterations, matrix_timings
from scripts.predictor.accuracy import Accuracy, mean_error
from scripts.predictor.graphs import BEFORE_NS, latencies
from scripts.predictor.graphs import iterations as graphs
from scripts.predictor.matrix import BEFORE_SHARE, LONG_NS, Learned
from scripts.predictor.timings import DEVICES, Numbers, public_device
from stepscope.predict.matrix_laws import rates_of
from stepscope.predict.matrix_times import TILES_SHARE
from stepscope.predict.memory_times import MemoryModel, memory_times
from stepscope.predict.operation_times import sustained_ns
from stepscope.predict.operations import Operations

ITERATIONS: Final = "whole iterations, fp32, nested"
PRODUCTS: Final = "matrix products, fp32, above 50 us, nested"
SHARES: Final = (0.3, TILES_SHARE, 0.7)
LOSSES: Final = tuple(0.01 * percent for percent in range(21))
_CLOCK: Final = 1.15
"""Operators that together exceed their iteration by more than that were timed at another clock."""
_PRODUCTS: Final = 4000
Fitted = Callable[[frozenset[str]], tuple[Learned, MemoryModel]]


def validate(folder: Path, *, quick: bool = False) -> list[Accuracy]:
    """Errors of iterations and long products of each GPU, and each generation, with what the others chose."""

    @cache
    def fitted(without: frozenset[str]) -> tuple[Learned, MemoryModel]:
        families = len({public_device(gpu).architecture for gpu in without}) < len(without)
        return iterations.learned_models(folder, set(without), families=families)

    by_generation: dict[str, set[str]] = {}
    for gpu in DEVICES:
        by_generation.setdefault(public_device(gpu).architecture, set()).add(gpu)
    splits = {
        "gpu": [frozenset([gpu]) for gpu in DEVICES],
        "family": [frozenset(one) for one in by_generation.values()],
    }
    found = []
    for split in ("gpu",) if quick else splits:
        for held in splits[split]:
            others = [one - held for one in splits[split] if one - held]
            share, loss = _chosen_share(folder, held, others, fitted), _chosen_loss(folder, set(DEVICES) - held)
            for gpu in sorted(held):
                found += _judged(folder, gpu, split, fitted(held), share, loss)
    return found


def _chosen_share(folder: Path, held: frozenset[str], others: list[frozenset[str]], fitted: Fitted) -> float:
    """The weight of the law that predicts the others best, each held out too."""
    errors = dict.fromkeys(SHARES, 0.0)
    for inner in others:
        models = fitted(held | inner)
        for gpu in sorted(inner):
            goal, totals = _totals(folder, gpu, models)
            for share, total in totals.items():
                errors[share] += mean_error(total, goal)
    return min(errors, key=lambda share: errors[share])


def _chosen_loss(folder: Path, gpus: set[str]) -> float:
    """What makes the GPUs' own operators add up best to their iterations."""
    pairs = [_operators_and_iterations(folder, gpu) for gpu in sorted(gpus)]
    return min(LOSSES, key=lambda loss: sum(mean_error(_longer(ns, loss), goal) for ns, goal in pairs))


def _longer(ns: Numbers, loss: float) -> Numbers:
    return np.array([sustained_ns(one, loss) for one in ns.tolist()])


@cache
def _operators_and_iterations(folder: Path, gpu: str) -> tuple[Numbers, Numbers]:
    """Nanoseconds of all operators' kernels as timed one by one, and of the iteration."""
    pairs = []
    for config, ms in _known(folder, gpu):
        graph, timed = graphs(folder)[config], latencies(folder, gpu, config)
        once = dict(zip(graph.places, graph.repeats.tolist(), strict=True))
        ns = sum(max(timed.get(place, 0.0) - BEFORE_NS, 0.0) * count for place, count in once.items())
        if 0 < ns < _CLOCK * ms * 1e6:
            pairs.append((ns, ms * 1e6))
    together, whole = np.array(pairs).T
    return together, whole


def _known(folder: Path, gpu: str) -> list[tuple[str, float]]:
    table = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("gpu") == gpu)
    configs = graphs(folder)
    return [row for row in table.select("config", "iteration_ms").rows() if row[0] in configs]


def _totals(folder: Path, gpu: str, models: tuple[Learned, MemoryModel]) -> tuple[Numbers, dict[float, Numbers]]:
    """Nanoseconds measured of each iteration, and predicted with each of SHARES by public peaks."""
    known = _known(folder, gpu)
    totals: dict[float, list[float]] = {share: [] for share in SHARES}
    for config, _ in known:
        graph = graphs(folder)[config]
        chosen = graph.operations.kind == "matrix"
        ns = memory_times(graph.operations, public_device(gpu), models[1]).ns
        for share, mine in _products(graph.operations.select(chosen), gpu, models[0]).items():
            ns[chosen] = mine
            totals[share].append(float(graph.repeats @ ns))
    return np.array([ms * 1e6 for _, ms in known]), {share: np.array(total) for share, total in totals.items()}


def _products(operations: Operations, gpu: str, learned: Learned) -> dict[float, Numbers]:
    device = public_device(gpu)
    by_trees = Learned(learned.trees, None).ns(operations, device, "fp32", "vector")
    assert learned.law is not None
    by_law = learned.law.seconds(operations, device, rates_of(device, "fp32")) * 1e9
    return {share: by_trees ** (1 - share) * by_law**share for share in SHARES}


def _judged(
    folder: Path, gpu: str, split: str, models: tuple[Learned, MemoryModel], share: float, loss: float
) -> list[Accuracy]:
    goal, totals = _totals(folder, gpu, models)
    ways = {
        "sum of operators, law and trees alike": totals[TILES_SHARE],
        "sum of operators, weight chosen": totals[share],
        "both chosen": _longer(totals[share], loss),
    }
    found = [Accuracy(ITERATIONS, split, gpu, way, len(goal), mean_error(ns, goal)) for way, ns in ways.items()]
    timed, whole = _operators_and_iterations(folder, gpu)
    for way, ns in {"own operators as timed": timed, "own operators, length chosen": _longer(timed, loss)}.items():
        found.append(Accuracy(ITERATIONS, split, gpu, way, len(whole), mean_error(ns, whole)))
    mine = next(one for one in matrix_timings.vector_timings(folder) if one.gpu == gpu)
    mine = matrix_timings.thinned(mine.select(mine.latency_ns > LONG_NS), _PRODUCTS)
    ns = _products(mine.operations, gpu, models[0])[share]
    error = mean_error(ns, np.maximum(mine.latency_ns - BEFORE_SHARE * mine.host_ns, 1.0))
    found.append(Accuracy(PRODUCTS, split, gpu, "weight chosen", len(ns), error))
    return found
