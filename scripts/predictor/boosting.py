"""Fit boosted trees with scikit-learn and turn them into arrays that numpy alone evaluates.

Needs the extra `predictor`. Set OMP_NUM_THREADS=1: sums in another order give other last digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from stepscope.predict.boosted_trees import BoostedTrees


def fit_trees(
    features: npt.NDArray[np.float64],
    target: npt.NDArray[np.float64],
    *,
    weight: npt.NDArray[np.float64] | None = None,
    trees: int = 200,
    leaves: int = 31,
    rate: float = 0.1,
    least_rows: int = 20,
    loss: str = "squared_error",
    **more: Any,
) -> BoostedTrees:
    """Fit trees to a target, always to the same ones; `more` goes to scikit-learn.

    Args:
        features: shape (n, width), all finite.
        target: shape (n,).
        weight: how much each row counts, shape (n,).
        trees, leaves, rate, least_rows: how many trees of how many leaves, how much of each is added, and the fewest
            rows in a leaf.
    """
    model = HistGradientBoostingRegressor(
        loss=loss,
        max_iter=trees,
        max_leaf_nodes=leaves,
        learning_rate=rate,
        min_samples_leaf=least_rows,
        early_stopping=False,
        random_state=0,
        **more,
    )
    model.fit(features, target, sample_weight=weight)
    return exported(model)


def exported(model: HistGradientBoostingRegressor | HistGradientBoostingClassifier, place: int = 0) -> BoostedTrees:
    """The trees of a fitted model; those of every finite row of features give exactly the model's own predictions.

    Of a classifier of three or more classes, the score of the class at `place`.
    """
    # scikit-learn offers its trees under no public name.
    trees = [stage[place].nodes for stage in model._predictors]
    placed = [_placed(nodes) for nodes in trees]
    counts = [len(nodes) for nodes in trees]
    starts = np.cumsum([0, *counts])[:-1]
    parts = {name: [part[name] for part in placed] for name in ("features", "thresholds", "left", "values")}
    return BoostedTrees(
        baseline=float(np.ravel(model._baseline_prediction)[place]),
        roots=starts.astype(np.int32),
        features=_joined(parts["features"], np.int16),
        thresholds=_joined(parts["thresholds"], np.float64),
        left=_joined([left + start for left, start in zip(parts["left"], starts, strict=True)], np.int32),
        values=_joined(parts["values"], np.float64),
        depth=max((int(nodes["depth"].max()) for nodes in trees), default=0),
        width=int(model.n_features_in_),
    )


def _joined(parts: list[npt.NDArray[Any]], kind: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *parts]).astype(kind)


def _placed(nodes: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """One tree's nodes, level by level, so that the two below a node stand side by side."""
    order = [0]
    for node in order:
        if not nodes["is_leaf"][node]:
            order += [int(nodes["left"][node]), int(nodes["right"][node])]
    position = np.empty(len(nodes), np.int64)
    position[order] = np.arange(len(order))
    kept = nodes[order]
    leaf = kept["is_leaf"].astype(bool)
    return {
        "features": np.where(leaf, 0, kept["feature_idx"]),
        "thresholds": np.where(leaf, np.inf, kept["num_threshold"]),
        "left": np.where(leaf, np.arange(len(order)), position[kept["left"]]),
        "values": np.where(leaf, kept["value"], 0.0),
    }
