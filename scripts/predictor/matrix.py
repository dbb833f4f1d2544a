"""Learn how long matrix products take, and check it on GPUs that were held out.

The FP32 timings hold what the host needed between two products. Half of it passes before the kernel starts and the
rest beside it: a short kernel does not show at all. To learn, what passes before is subtracted; to compare with a
held-out GPU's timings, the other machines' mean host is put in again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from scripts.predictor import tiles
from scripts.predictor.accuracy import Accuracy, mean_error
from scripts.predictor.boosting import fit_trees
from scripts.predictor.graphs import timed_products
from scripts.predictor.matrix_timings import Timings, measured_device, tensor_timings, thinned, vector_timings
from scripts.predictor.memory import MEASURED, PUBLIC, RATIO
from scripts.predictor.timings import wave_ratio
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_laws import Law, TensorLaw, TileLaw, rates_of
from stepscope.predict.matrix_times import SIZES_NS, START_NS, MatrixModel, base_and_features, kernels_ns
from stepscope.predict.operations import Numbers, Operations, roofline_ns

LONG_NS: Final = 50_000.0
MODELS_WEIGHT: Final = 3.0
"""What the few products of models count over all those of random shapes of the same GPU."""
BEFORE_SHARE: Final = 0.55
"""Of what the host needs for a product, what passes before its kernel starts: products of one wave, whose time grows by
a straight line with the inner dimension, tell 0.5 to 0.8 with the kernel's own start."""
_SHOWS: Final = 1.12
"""Times the host's part, from where on a timing is the kernel's."""
_TINY_NS: Final = 6e3
"""What the kernels of tiny products take."""
_SHORTEST_NS: Final = 500.0
_TILES_ROWS: Final = 6000
_TENSOR_ROWS: Final = 1200
LEAVES: Final = {"vector": 31, "tensor": 15}


# Learning


def fit_trees_of(timings: Sequence[Timings], folder: Path) -> BoostedTrees:
    """Trees for the unit of these timings; each GPU and number type counts as much as another.

    The FP32 timings have random shapes; those GPUs' products in models, whose dimensions are round, count besides.
    """
    features, targets, weights = [], [], []
    for one in timings:
        device = measured_device(one, folder)
        parts = [(*_for_trees(one), 1e4)]
        if one.unit == "vector":
            parts.append((*timed_products(folder, one.gpu), MODELS_WEIGHT * 1e4))
        for operations, ns, weight in parts:
            base, shape = base_and_features(operations, device, rates_of(device, one.kind), one.unit)
            features.append(shape)
            targets.append(np.minimum(np.log(base / (ns - START_NS) * 1e9), 0.0))
            weights.append(np.full(len(base), weight / len(base)))
    shapes, target, weights_of_rows = (np.concatenate(arrays) for arrays in (features, targets, weights))
    return fit_trees(
        shapes,
        target,
        weight=weights_of_rows,
        loss="absolute_error",
        trees=150,
        leaves=LEAVES[timings[0].unit],
        least_rows=40,
    )


def _for_trees(timings: Timings) -> tuple[Operations, Numbers]:
    """Products that clearly show, and nanoseconds of their kernels, all but the tiny kernels' own part of the host
    subtracted: trees that learned otherwise erred more over iterations, and the law of tiles knows better anyway."""
    host = np.maximum(timings.host_ns - _TINY_NS, 0.0)
    usable = timings.latency_ns > 1.3 * host
    kernels = np.maximum(timings.latency_ns - host, START_NS + _SHORTEST_NS)
    return timings.operations.select(usable), kernels[usable]


def timed_ns(kernels: Numbers, host_ns: Numbers) -> Numbers:
    """What timings show of kernels that run on a machine with such a host."""
    return np.maximum(host_ns, BEFORE_SHARE * host_ns + kernels)


def fit_law_of(timings: Sequence[Timings], folder: Path) -> Law:
    """What products take with the tiles that the library chooses."""
    return fit_tiles_of(timings, folder) if timings[0].unit == "vector" else fit_tensor_of(timings, folder)


def fit_tiles_of(timings: Sequence[Timings], folder: Path) -> TileLaw:
    found = []
    for whole in timings:
        device, one = measured_device(whole, folder), thinned(whole, _TILES_ROWS)
        before = BEFORE_SHARE * one.host_ns
        found.append(tiles.Kernels(one.operations, device, one.tile, one.splits, one.latency_ns, before, one.host_ns))
        of_models, ns = timed_products(folder, one.gpu)
        none = np.zeros(len(ns))
        if len(ns):
            found.append(tiles.Kernels(of_models, device, none.astype(np.int64), none + 1, ns, none, none, True))
    return tiles.fit_tiles(found)


def fit_tensor_of(timings: Sequence[Timings], folder: Path) -> TensorLaw:
    found = []
    for whole in timings:
        device, one = measured_device(whole, folder), thinned(whole, _TENSOR_ROWS)
        parts = (one.tile, one.splits, one.latency_ns, one.host_ns, one.host_ns)
        found.append(tiles.Kernels(one.operations, device, *parts, kind=one.kind))
    return tiles.fit_tensor(found)


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned of the products of one unit."""

    trees: BoostedTrees
    law: Law | None

    def ns(self, operations: Operations, device: DevicePeaks, kind: str, unit: str) -> Numbers:
        """Nanoseconds that the kernels are predicted to take on a device, without the host."""
        return kernels_ns(self.trees, self.law, operations, device, rates_of(device, kind), unit)

    def ns_of(self, timings: Timings, device: DevicePeaks) -> Numbers:
        """Nanoseconds of the kernels that were timed."""
        return self.ns(timings.operations, device, timings.kind, timings.unit)


def learned(timings: Sequence[Timings], folder: Path) -> Learned:
    """From all these timings of one unit."""
    return Learned(fit_trees_of(timings, folder), fit_law_of(timings, folder))


def all_timings(folder: Path, *, quick: bool = False) -> dict[str, list[Timings]]:
    """Those of each of UNITS; with `quick` a part of them."""
    found: dict[str, list[Timings]] = {"vector": list(vector_timings(folder)), "tensor": list(tensor_timings(folder))}
    return {unit: [thinned(one, 3000 if quick else 40_000) for one in mine] for unit, mine in found.items()}


def train(folder: Path) -> MatrixModel:
    """The model that is shipped: learned from all GPUs, its bands from what each was off when it was held out."""
    timings = all_timings(folder)
    return MatrixModel(
        trees={unit: fit_trees_of(mine, folder) for unit, mine in timings.items()},
        shortest={unit: _ends(mine, np.min) for unit, mine in timings.items()},
        longest={unit: _ends(mine, np.max) for unit, mine in timings.items()},
        tiles=fit_tiles_of(timings["vector"], folder),
        tensor=fit_tensor_of(timings["tensor"], folder),
        bands=_bands([one for mine in timings.values() for one in held_out(mine, folder)]),
    )


def _ends(timings: Sequence[Timings], end: Callable[..., Numbers]) -> Numbers:
    names = ("batch", "rows", "columns", "inner")
    lengths = [np.stack([getattr(one.operations, name) for name in names]) for one in timings]
    return np.asarray(end(np.concatenate(lengths, axis=1), axis=1))


# Holding out


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Products of a GPU, and what was learned without it.

    Attributes:
        expected_host_ns: what the other GPUs' hosts took on average.
    """

    timings: Timings
    learned: Learned
    expected_host_ns: Numbers
    known: dict[str, DevicePeaks]


def held_out(timings: Sequence[Timings], folder: Path, *, families: bool = False) -> Iterator[HeldOut]:
    """Each GPU's timings with trees that were learned without it, or without all of its generation."""
    for group in dict.fromkeys(_group(one, families) for one in timings):
        others = [one for one in timings if _group(one, families) != group]
        of_others = learned(others, folder)
        for one in timings:
            if _group(one, families) == group:
                known = {PUBLIC: one.device, MEASURED: measured_device(one, folder)}
                yield HeldOut(one, of_others, _expected_host(one, others), known)


def _group(timings: Timings, families: bool) -> str:
    return timings.device.architecture if families else timings.gpu


def _expected_host(timings: Timings, others: Sequence[Timings]) -> Numbers:
    expected = np.zeros(len(timings.latency_ns))
    for operator in np.unique(timings.operator):
        hosts = [other.host_ns[other.operator == operator] for other in others]
        expected[timings.operator == operator] = np.mean([host[0] for host in hosts if len(host)])
    return expected


def _bands(found: Sequence[HeldOut]) -> dict[str, Numbers]:
    """Measured over predicted that nine of ten lay between: sustained rates known or not, by size."""
    bands = {}
    for kind in sorted({one.timings.kind for one in found}):
        mine = [one for one in found if one.timings.kind == kind]
        bands[kind] = np.array([_band([_ratios(one, known) for one in mine]) for known in (MEASURED, PUBLIC)])
    return bands


def _ratios(found: HeldOut, known: str) -> tuple[Numbers, Numbers]:
    """Predicted nanoseconds of the kernels, and measured over predicted, where the host does not hide the kernels."""
    mine = found.timings
    predicted = found.learned.ns_of(mine, found.known[known])
    seen = timed_ns(predicted, mine.host_ns) > _SHOWS * mine.host_ns
    kernels = np.maximum(mine.latency_ns - BEFORE_SHARE * mine.host_ns, START_NS)
    return predicted[seen], (kernels / predicted)[seen]


def _band(parts: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
    """Quantiles 5 % and 95 % by size, each GPU as much as another; of sizes that few timings have, the next one's."""
    band = np.ones((len(SIZES_NS) + 1, 2))
    for size in range(len(SIZES_NS), -1, -1):
        chosen = [ratio[np.searchsorted(SIZES_NS, ns) == size] for ns, ratio in parts]
        chosen = [np.quantile(ratio, np.linspace(0, 1, 1001)) for ratio in chosen if len(ratio) >= 100]
        if chosen:
            low, high = np.quantile(np.concatenate(chosen), (0.05, 0.95))
            band[size] = min(low, 1.0), max(high, 1.0)
        elif size < len(SIZES_NS):
            band[size] = band[size + 1]
    return band


# Accuracy


def validate(folder: Path, *, quick: bool = False) -> list[Accuracy]:
    """Errors of every method on each GPU, and each generation, that was held out."""
    found = []
    for mine in all_timings(folder, quick=quick).values():
        for split in ("gpu", "family"):
            for one in held_out(mine, folder, families=split == "family"):
                found += _accuracies(one, split)
                if split == "gpu":
                    found += _from_donors(one, mine, folder)
    return found


def _accuracies(found: HeldOut, split: str) -> list[Accuracy]:
    mine = found.timings
    methods = {
        name: timed_ns(found.learned.ns_of(mine, device), found.expected_host_ns)
        for name, device in found.known.items()
    }
    methods["roofline"] = roofline_ns(mine.operations, mine.device)
    return [
        Accuracy(kind, split, mine.gpu, name, int(which.sum()), mean_error(ns[which], mine.latency_ns[which]))
        for kind, which in _kinds(mine).items()
        for name, ns in methods.items()
    ]


def _kinds(timings: Timings) -> dict[str, npt.NDArray[np.bool_]]:
    kind = f"matrix products, {timings.kind}"
    return {kind: timings.latency_ns > 0, f"{kind}, above 50 us": timings.latency_ns > LONG_NS}


def _from_donors(found: HeldOut, timings: Sequence[Timings], folder: Path) -> list[Accuracy]:
    """What another GPU's timing of the same product gives, the mean over all other GPUs."""
    mine, results = found.timings, []
    goal = found.learned.ns_of(mine, found.known[MEASURED])
    for kind, which in _kinds(mine).items():
        errors: dict[str, list[float]] = {"wave scaling": [], "ratio of peaks": [], RATIO: []}
        count = 0
        for donor in (one for one in timings if one.gpu != mine.gpu and one.kind == mine.kind):
            here, there = _same(mine, donor, which)
            latency, source = donor.latency_ns[there], donor.device
            measured = mine.latency_ns[here]
            ratio = source.flops_s[mine.kind] / mine.device.flops_s[mine.kind]
            waves = wave_ratio(mine.operations.select(here), source, mine.device, mine.kind)
            start = found.learned.ns_of(donor.select(there), measured_device(donor, folder))
            kernel = np.maximum(latency - BEFORE_SHARE * donor.host_ns[there], 0.3 * latency) * goal[here] / start
            errors["wave scaling"].append(mean_error(latency * waves, measured))
            errors["ratio of peaks"].append(mean_error(latency * ratio, measured))
            errors[RATIO].append(mean_error(timed_ns(kernel, found.expected_host_ns[here]), measured))
            count += len(here)
        results += [
            Accuracy(kind, "gpu", mine.gpu, name, count, float(np.mean(of))) for name, of in errors.items() if of
        ]
    return results


def _same(
    mine: Timings, donor: Timings, which: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of both that are the same product."""
    place = {shape: row for row, shape in enumerate(_shapes(donor))}
    pairs = [(row, place[shape]) for row, shape in enumerate(_shapes(mine)) if which[row] and shape in place]
    here, there = np.array(pairs, np.int64).reshape(-1, 2).T
    return here, there


def _shapes(timings: Timings) -> Iterator[tuple[object, ...]]:
    names = ("batch", "rows", "columns", "inner")
    lengths = (getattr(timings.operations, name).tolist() for name in names)
    return zip(timings.operator.tolist(), *lengths, strict=True)
