"""Whole iterations of language models on GPUs that were held out: from shapes alone, and from another GPU's times.

An iteration is the sum of its kernels, each repeated layer as often as the model has it: these iterations keep the
device busy, and their kernels measured one by one add up to them within a few percent on the V100 and P100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from scripts.predictor import matrix, matrix_timings, memory
from scripts.predictor.accuracy import Accuracy, mean_error
from scripts.predictor.graphs import BEFORE_NS, Iteration, iterations, latencies
from scripts.predictor.memory import MEASURED, PUBLIC
from scripts.predictor.timings import DEVICES, Numbers, public_device, vector_timings, wave_ratio
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.memory_times import MemoryModel, memory_times
from stepscope.predict.operations import Operations, roofline_ns

KIND: Final = "whole iterations, fp32"
TRANSFER: Final = "whole iterations, fp32, from another GPU's"
GPUS: Final = tuple(DEVICES)
Predictor = Callable[[Operations, DevicePeaks], Numbers]


# Predicting


def learned_models(folder: Path, without: set[str], *, families: bool = False) -> tuple[matrix.Learned, MemoryModel]:
    """What is learned of matrix products, and the model of memory traffic, its bands empty.

    They never saw these GPUs, nor with `families` any of their generations.
    """
    others = [one for one in matrix_timings.vector_timings(folder) if one.gpu not in without]
    products = matrix.learned(others, folder)
    timings = vector_timings(folder, every=2)
    unseen = {public_device(gpu).architecture for gpu in without} if families else set[str]()
    model, _ = memory.fit(timings.select(~np.isin(timings.gpu, sorted(without))), folder, unseen=unseen)
    return products, model


def learned(folder: Path, without: set[str], *, families: bool = False) -> Predictor:
    """Times of operations by `learned_models`."""
    of_products, model = learned_models(folder, without, families=families)

    def predict(operations: Operations, device: DevicePeaks) -> Numbers:
        ns = memory_times(operations, device, model).ns
        products = operations.kind == "matrix"
        ns[products] = of_products.ns(operations.select(products), device, "fp32", "vector")
        return ns

    return predict


@lru_cache(maxsize=8)
def measured_device(folder: Path, gpu: str) -> DevicePeaks:
    """The GPU with what one large copy and one large matrix product say of it."""
    timings = vector_timings(folder, every=2)
    host = memory.fit_host(timings, [gpu])
    copies = memory.measured_device(timings, gpu, host)
    product = next(one for one in matrix_timings.vector_timings(folder) if one.gpu == gpu)
    return replace(copies, sustained_flops_s=matrix_timings.measured_device(product, folder).sustained_flops_s)


def validate(folder: Path, *, quick: bool = False) -> list[Accuracy]:
    """Errors of whole iterations on each GPU, and each generation, that was held out."""
    table = pl.read_parquet(folder / "iterations_fp32.parquet")
    graphs = iterations(folder)
    known = table.filter(pl.col("config").is_in(list(graphs)))
    found, splits = [], ("gpu",) if quick else ("gpu", "family")
    predictors: dict[tuple[frozenset[str], str], Predictor] = {}
    for gpu in GPUS:
        for split in splits:
            held = frozenset(one for one in GPUS if one == gpu or (split == "family" and _same_family(one, gpu)))
            if (held, split) not in predictors:
                predictors[held, split] = learned(folder, set(held), families=split == "family")
            predict = predictors[held, split]
            found += _from_shapes(folder, known, graphs, gpu, split, predict)
            if split == "gpu":
                found += _from_donors(folder, known, graphs, gpu, predict)
    return found


def _same_family(one: str, other: str) -> bool:
    return public_device(one).architecture == public_device(other).architecture


def _from_shapes(
    folder: Path, known: pl.DataFrame, graphs: dict[str, Iteration], gpu: str, split: str, predict: Predictor
) -> list[Accuracy]:
    rows = known.filter(pl.col("gpu") == gpu).select("config", "iteration_ms").rows()
    goal = np.array([ms for _, ms in rows]) * 1e6
    public = public_device(gpu)
    methods: dict[str, tuple[Predictor, DevicePeaks]] = {
        PUBLIC: (predict, public),
        MEASURED: (predict, measured_device(folder, gpu)),
        "roofline": (roofline_ns, public),
    }
    found = []
    for method, (times, device) in methods.items():
        totals = [float(graphs[config].repeats @ times(graphs[config].operations, device)) for config, _ in rows]
        found.append(Accuracy(KIND, split, gpu, method, len(rows), mean_error(np.array(totals), goal)))
    return found


# From another GPU's measured iteration


def _from_donors(
    folder: Path, known: pl.DataFrame, graphs: dict[str, Iteration], gpu: str, predict: Predictor
) -> list[Accuracy]:
    """Every other GPU that ran the same configuration is a donor; its step is scaled operation by operation."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    goals = dict(known.filter(pl.col("gpu") == gpu).select("config", "iteration_ms").rows())
    for donor, config, ms in known.select("gpu", "config", "iteration_ms").rows():
        if donor == gpu or config not in goals:
            continue
        graph = graphs[config]
        for method, ratio in _ratios(folder, graph, donor, gpu, predict).items():
            pairs.setdefault(method, []).append((ms * ratio, goals[config]))
    found = []
    for method, values in pairs.items():
        predicted, goal = np.array(values).T
        found.append(Accuracy(TRANSFER, "gpu", gpu, method, len(values), mean_error(predicted, goal)))
    return found


def _ratios(folder: Path, graph: Iteration, donor: str, gpu: str, predict: Predictor) -> dict[str, float]:
    """Target's iteration over the donor's, by each method."""
    source, target = public_device(donor), public_device(gpu)
    here, there = (measured_device(folder, one) for one in (donor, gpu))
    own = predict(graph.operations, source)
    weight = graph.repeats * donor_ns(graph, latencies(folder, donor, graph.config), own)
    learned_ratio = predict(graph.operations, target) / own
    sustained = predict(graph.operations, there) / predict(graph.operations, here)
    return {
        PUBLIC: _mean_ratio(weight, learned_ratio),
        MEASURED: _mean_ratio(weight, sustained),
        "wave scaling": _mean_ratio(weight, wave_ratio(graph.operations, source, target)),
        "ratio of FP32 peaks": source.flops_s["fp32"] / target.flops_s["fp32"],
        "ratio of bandwidths": source.bandwidth_bytes_s / target.bandwidth_bytes_s,
    }


def _mean_ratio(weight: Numbers, ratio: Numbers) -> float:
    return float(weight @ ratio / weight.sum())


def donor_ns(graph: Iteration, timed: dict[tuple[str, str], float], own: Numbers) -> Numbers:
    """What each operation took on the donor: a node's latency without the host's part, shared out as predicted."""
    together: dict[tuple[str, str], float] = {}
    for place, ns in zip(graph.places, own.tolist(), strict=True):
        together[place] = together.get(place, 0.0) + ns
    found = [
        (timed[place] - BEFORE_NS) * ns / together[place] if timed.get(place, 0.0) > 2 * BEFORE_NS else ns
        for place, ns in zip(graph.places, own.tolist(), strict=True)
    ]
    return np.array(found)
