"""Gradient-boosted regression trees, evaluated with numpy alone; `scripts/predictor` fits them.

Source of the method: Friedman, "Greedy function approximation: a gradient boosting machine", 2001.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepscope.errors import StepscopeError

_AT_ONCE: Final = 1 << 15  # rows times trees evaluated together, so that they stay in the processor's cache
_BROKEN: Final = (
    "a model in stepscope/data belongs to another version; reinstall stepscope, or fit it with scripts/predictor"
)


@dataclass(frozen=True, slots=True)
class BoostedTrees:
    """Boosted trees whose leaf values are summed; the nodes of all trees are concatenated, each tree's level by level.

    Attributes:
        thresholds: a row goes left up to this value, shape (nodes,), float64; infinity in a leaf.
        left: the node to the left, shape (nodes,), int32; the right child follows it. A leaf refers to itself.
    """

    baseline: float  # start of the sum
    roots: npt.NDArray[np.int32]  # index of each tree's first node, shape (trees,), int32
    features: npt.NDArray[np.int16]  # feature that the node compares, shape (nodes,), int16; 0 in a leaf
    thresholds: npt.NDArray[np.float64]
    left: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]  # value that a leaf adds, shape (nodes,), float64
    depth: int  # most steps from a root to a leaf
    width: int  # number of features in a row

    def predict(self, features: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum the trees for each row of features, shape (n, width): float64 of shape (n,).

        Not-a-number for rows with a feature that is not-a-number.

        Raises:
            StepscopeError: the trees were fitted to another number of features.
        """
        if features.shape[1] != self.width:
            raise StepscopeError(
                f"the trees were fitted to {self.width} features, and rows have {features.shape[1]}: {_BROKEN}"
            )
        rows = len(features)
        total = np.full(rows, self.baseline)
        rows_at_once = max(1, min(rows, _AT_ONCE))
        trees_at_once = max(1, _AT_ONCE // rows_at_once)
        for start in range(0, rows, rows_at_once):
            part = np.ascontiguousarray(features[start : start + rows_at_once], np.float64)
            for first in range(0, len(self.roots), trees_at_once):
                # Add trees one after another, as they were fitted: another order changes the last digits.
                for leaves in self._leaves(part, self.roots[first : first + trees_at_once]):
                    total[start : start + rows_at_once] += self.values[leaves]
        return np.where(np.isnan(features).any(axis=1), np.nan, total)

    def _leaves(self, features: npt.NDArray[np.float64], roots: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        flat = features.ravel()
        offsets = np.arange(len(features), dtype=np.int64) * self.width
        nodes = np.repeat(roots.astype(np.int64)[:, None], len(features), axis=1)
        for _ in range(self.depth):
            goes_right = flat[offsets + self.features[nodes]] > self.thresholds[nodes]
            nodes = self.left[nodes] + goes_right
        return nodes

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], prefix: str = "") -> BoostedTrees:
        """Build the trees from arrays whose names begin with the prefix, in a dictionary or a `numpy.load` file.

        The arrays are `features` (-1 in a leaf), `thresholds` (of inner nodes) and `values` (of leaves); `left`
        follows from the order of the nodes.

        Raises:
            StepscopeError: a tree uses a feature that rows do not have.
        """
        baseline, depth, width = arrays[f"{prefix}head"].tolist()
        roots, features = (arrays[prefix + name] for name in ("roots", "features"))
        looked_at = int(features.max(initial=-1)) + 1
        if looked_at > width:
            which = f"trees {prefix.rstrip('._')}".rstrip()
            raise StepscopeError(f"the {which} look at {looked_at} features of rows that have {width:g}: {_BROKEN}")
        leaf = features < 0
        before: npt.NDArray[np.int64] = np.cumsum(~leaf) - ~leaf  # inner nodes before each node
        tree = np.repeat(np.arange(len(roots)), np.diff(roots, append=len(features)))
        left = np.where(leaf, np.arange(len(features)), roots[tree] + 1 + 2 * (before - before[roots][tree]))
        thresholds, values = np.full(len(features), np.inf), np.zeros(len(features))
        thresholds[~leaf], values[leaf] = arrays[f"{prefix}thresholds"], arrays[f"{prefix}values"]
        features = np.where(leaf, 0, features).astype(np.int16)
        return cls(baseline, roots, features, thresholds, left.astype(np.int32), values, int(depth), int(width))


def shipped_arrays(name: str) -> dict[str, npt.NDArray[Any]]:
    """Load data/NAME.npz as arrays by name, without unpickling."""
    with files("stepscope").joinpath(f"data/{name}.npz").open("rb") as file, np.load(file) as arrays:
        return dict(arrays)
