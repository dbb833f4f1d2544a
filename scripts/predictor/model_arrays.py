"""The arrays that a model is kept as, in an npz file; each model reads its own by `from_arrays`."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.predict.boosted_trees import BoostedTrees
from stepscope.predict.matrix_laws import TensorLaw, TileLaw
from stepscope.predict.matrix_times import MODEL_RANGES, MatrixModel
from stepscope.predict.memory_times import MemoryModel
from stepscope.predict.operation_times import ConvolutionModel

Arrays = dict[str, npt.NDArray[Any]]


@singledispatch
def arrays_of(model: object, prefix: str = "") -> Arrays:
    """The arrays of a model by their names, which begin with the prefix."""
    raise TypeError(f"{type(model).__name__} is not a model")


@arrays_of.register
def _(trees: BoostedTrees, prefix: str = "") -> Arrays:
    """In single precision, which no prediction shows in its first six digits."""
    leaf = np.isposinf(trees.thresholds)
    return {
        f"{prefix}head": np.array([trees.baseline, trees.depth, trees.width], np.float64),
        f"{prefix}roots": trees.roots,
        f"{prefix}features": np.where(leaf, -1, trees.features).astype(np.int8),
        f"{prefix}thresholds": trees.thresholds[~leaf].astype(np.float32),
        f"{prefix}values": trees.values[leaf].astype(np.float32),
    }


@arrays_of.register
def _(model: MemoryModel, prefix: str = "") -> Arrays:
    return {
        "generations": np.array(model.generations, np.str_),
        "shares": np.append(model.shares, [model.older, model.newer]),
        "rows": model.rows,
        "bands": model.bands,
        "largest": model.largest,
    }


@arrays_of.register
def _(model: ConvolutionModel, prefix: str = "") -> Arrays:
    rest = {"range": np.stack([model.lowest, model.highest]), "band": model.band}
    return {**arrays_of(model.trees, "trees_"), **rest}


@arrays_of.register
def _(law: TileLaw, prefix: str = "") -> Arrays:
    arrays: Arrays = {"tiles.constants": law.constants}
    for place, trees in enumerate(law.choices):
        arrays |= arrays_of(trees, f"tiles.{place}.")
    return arrays


@arrays_of.register
def _(law: TensorLaw, prefix: str = "") -> Arrays:
    return {"tensor.blocks": law.blocks, "tensor.steps": law.steps}


@arrays_of.register
def _(model: MatrixModel, prefix: str = "") -> Arrays:
    arrays: Arrays = {f"bands.{kind}": band for kind, band in model.bands.items()}
    for unit, trees in model.trees.items():
        arrays |= arrays_of(trees, f"{unit}.")
        arrays |= {f"{unit}.{name}": getattr(model, name)[unit] for name in MODEL_RANGES}
    for law in (model.tiles, model.tensor):
        arrays |= arrays_of(law) if law else {}
    return arrays
