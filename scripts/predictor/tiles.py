"""Learn which tiles kernels have, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy.optimize import least_squares, minimize
from sklearn.ensemble import HistGradientBoostingClassifier

from scripts.predictor.boosting import exported
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_laws import (
    BLOCK_CONSTANTS,
    CHOSEN,
    TensorLaw,
    TileLaw,
    best_splits,
    choice_features,
    rates_of,
    tile_seconds,
    weight_bytes,
)
from stepscope.predict.operations import Numbers, Operations

FIRST: Final = np.array([1.7] * 6 + [1.2] * 6 + [1.2, 0.0, 3.0, 0.0, -0.5, -3.0, 0.0, 1.0, -0.5])
"""Where the search for the constants starts; far from it they cost a little."""
_ROUNDS: Final = 2
_COST: Final = 1e-3
_MODELS_WEIGHT: Final = 0.3
"""What the products of models on a GPU count over its products of random shapes."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Products of one GPU and the kernels that ran; arrays of shape (n,).

    Attributes:
        tile: place in CHOSEN of each; -1 for kernels whose name tells none.
        splits: into how many parts the inner dimension was cut.
        before_ns: of each timing, what passed before the kernel started.
        host_ns: the least that the host took.
    """

    operations: Operations
    device: DevicePeaks
    tile: npt.NDArray[np.int64]
    splits: Numbers
    latency_ns: Numbers
    before_ns: Numbers
    host_ns: Numbers
    is_guessed: bool = False
    kind: str = "fp32"

    def select(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Kernels:
        return replace(
            self,
            operations=self.operations.select(which),
            tile=self.tile[which],
            splits=self.splits[which],
            latency_ns=self.latency_ns[which],
            before_ns=self.before_ns[which],
            host_ns=self.host_ns[which],
        )


def places(kernels: pl.Series) -> npt.NDArray[np.int64]:
    """Place in CHOSEN of each kernel by its name, such as volta_sgemm_32x128_nn."""
    sides = [kernels.str.extract(r"sgemm_(\d+)x(\d+)_", side).cast(pl.Int64).fill_null(0).to_list() for side in (1, 2)]
    known = {tile: place for place, tile in enumerate(CHOSEN)}
    return np.array([known.get(tile, -1) for tile in zip(*sides, strict=True)], np.int64)


def fit_tiles(kernels: Sequence[Kernels]) -> TileLaw:
    """Constants by the least mean error of the logarithm, each GPU as much as another; then the choice."""
    choices = _fit_choice([one for one in kernels if not one.is_guessed])
    groups = [_by_tile(_guessed(one, choices) if one.is_guessed else one) for one in kernels]
    constants = FIRST
    for _ in range(_ROUNDS):
        options = {"maxiter": 4, "xtol": 1e-2, "ftol": 1e-3}
        constants = minimize(_loss, constants, args=(groups,), method="Powell", options=options).x
    return TileLaw(constants, choices)


def _guessed(kernels: Kernels, choices: tuple[BoostedTrees, ...]) -> Kernels:
    """With the tile that is most probable, and the best way to cut the inner dimension."""
    rates = rates_of(kernels.device, "fp32")
    features = choice_features(kernels.operations, kernels.device, rates)
    tile = np.argmax(np.stack([trees.predict(features) for trees in choices]), axis=0)
    splits = np.ones(len(tile))
    for place in np.unique(tile).tolist():
        mine = tile == place
        splits[mine] = best_splits(FIRST, kernels.operations.select(mine), kernels.device, rates, CHOSEN[place])
    return replace(kernels, tile=tile, splits=splits)


def _by_tile(kernels: Kernels) -> list[tuple[int, Kernels]]:
    few = kernels if kernels.is_guessed else kernels.select(np.arange(0, len(kernels.tile), 4))
    return [(int(tile), few.select(few.tile == tile)) for tile in np.unique(few.tile) if tile >= 0]


def _loss(constants: Numbers, groups: Sequence[Sequence[tuple[int, Kernels]]]) -> float:
    total = 0.0
    for parts in groups:
        errors = []
        for tile, one in parts:
            rates = rates_of(one.device, "fp32")
            ns = 1e9 * tile_seconds(constants, one.operations, one.device, rates, CHOSEN[tile], one.splits)
            errors.append(np.abs(np.log(np.maximum(one.host_ns, one.before_ns + ns) / one.latency_ns)))
        counts = _MODELS_WEIGHT if parts[0][1].is_guessed else 1.0
        total += counts * float(np.mean(np.concatenate(errors)))
    return total / len(groups) + _COST * float(np.mean((constants - FIRST) ** 2))


def _fit_choice(kernels: Sequence[Kernels]) -> tuple[BoostedTrees, ...]:
    known = [one.select(one.tile >= 0) for one in kernels]
    features = [choice_features(one.operations, one.device, rates_of(one.device, "fp32")) for one in known]
    weight = np.concatenate([np.full(len(one.tile), 1e4 / len(one.tile)) for one in known])
    model = HistGradientBoostingClassifier(
        max_iter=40, max_leaf_nodes=15, learning_rate=0.15, min_samples_leaf=100, early_stopping=False, random_state=0
    )
    model.fit(np.concatenate(features), np.concatenate([one.tile for one in known]), sample_weight=weight)
    found = {int(tile): exported(model, place) for place, tile in enumerate(model.classes_)}
    return tuple(found.get(tile, _never(features[0].shape[1])) for tile in range(len(CHOSEN)))


def _never(width: int) -> BoostedTrees:
    """For a tile that no kernel had."""
    whole, real = np.empty(0, np.int32), np.empty(0)
    return BoostedTrees(-50.0, whole, np.empty(0, np.int16), real, whole, real, 0, width)


FIRST_BLOCKS: Final = np.log([[1.7, 3.0, 1.0, 3.0, 3.0, 1.5, 2.4], [1.7, 2.5, 0.4, 1.2, 1.2, 1.0, 2.4]])
FIRST_STEPS: Final = np.log([0.95, 14.0, 0.45, 0.25, 0.12, 3.0])
"""Where the search for the constants of tensor cores starts."""
_SHORTEST_NS: Final = 2.5e3
_COPIES: Final = 5
"""Weights that the timings of tensor cores took in turn, so that caches keep them only where all of them fit."""
_STAYS: Final = 0.015


def fit_tensor(products: Sequence[Kernels]) -> TensorLaw:
    """Constants by robust least squares of the logarithm, each GPU and number type as much as another.

    First all constants from products in 16 bits, then what is FP8's own from its products.
    """
    known = [one.select(_from_memory(one)) for one in products]
    constants = np.concatenate([FIRST_BLOCKS.ravel(), FIRST_STEPS])
    of_bytes = np.arange(len(constants)) % len(BLOCK_CONSTANTS) == BLOCK_CONSTANTS.index("of_a_byte")
    of_bytes[FIRST_BLOCKS.size :] = False
    for chosen, kind in ((~of_bytes, "bf16"), (of_bytes, "fp8")):
        mine = [one for one in known if one.kind == kind]
        if mine:
            options = {"loss": "soft_l1", "f_scale": 0.1, "max_nfev": 20, "diff_step": 1e-3}
            fitted = least_squares(_errors, constants[chosen], args=(constants, chosen, mine), **options)
            constants = _filled(constants, chosen, fitted.x)
    return _tensor_law(constants)


def _from_memory(products: Kernels) -> npt.NDArray[np.bool_]:
    """Those whose weights the timings did not leave in the cache, unless they are a small part of the traffic."""
    weights = weight_bytes(products.operations)
    cached = (_COPIES * weights < (products.device.cache_bytes or 0)) & (3 * weights > products.operations.bytes)
    return np.asarray(~cached & (products.latency_ns > _SHORTEST_NS))


def _errors(some: Numbers, constants: Numbers, chosen: npt.NDArray[np.bool_], products: Sequence[Kernels]) -> Numbers:
    law = _tensor_law(_filled(constants, chosen, some))
    found = [_STAYS * np.sqrt(len(products)) * (some - constants[chosen])]
    for one in products:
        ns = 1e9 * law.seconds(one.operations, one.device, rates_of(one.device, one.kind))
        found.append(np.log(ns / one.latency_ns) / np.sqrt(len(ns)))
    return np.asarray(np.sqrt(1e3) * np.concatenate(found))


def _filled(constants: Numbers, chosen: npt.NDArray[np.bool_], some: Numbers) -> Numbers:
    filled = constants.copy()
    filled[chosen] = some
    return np.asarray(filled)


def _tensor_law(constants: Numbers) -> TensorLaw:
    blocks, steps = np.split(constants, [FIRST_BLOCKS.size])
    return TensorLaw(blocks.reshape(FIRST_BLOCKS.shape), steps)
