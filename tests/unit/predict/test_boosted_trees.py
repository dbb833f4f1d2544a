"""Boosted trees: what numpy alone computes from the arrays of fitted ones."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from scripts.predictor.model_arrays import arrays_of
from stepscope.errors import StepscopeError
from stepscope.predict.boosted_trees import BoostedTrees

TWO_TREES = BoostedTrees(
    baseline=1.0,
    roots=np.array([0, 5], np.int32),
    features=np.array([0, 0, 1, 0, 0, 1, 0, 0], np.int16),
    thresholds=np.array([2.0, np.inf, 5.0, np.inf, np.inf, 0.0, np.inf, np.inf]),
    left=np.array([1, 1, 3, 3, 4, 6, 6, 7], np.int32),
    values=np.array([0.0, 10.0, 0.0, 20.0, 30.0, 0.0, 0.25, 0.5]),
    depth=2,
    width=2,
)
"""x0 <= 2: 10, else x1 <= 5: 20, else 30; and x1 <= 0: 0.25, else 0.5."""


def test_no_rows_give_no_sums() -> None:
    assert TWO_TREES.predict(np.empty((0, 2))).tolist() == []


def test_each_row_gets_the_sum_of_its_leaves() -> None:
    features = np.array([[2.0, -1.0], [2.5, 5.0], [2.5, 6.0], [0.0, 1.0]])
    assert TWO_TREES.predict(features).tolist() == [11.25, 21.5, 31.5, 11.5]


def test_an_unknown_feature_gives_no_number() -> None:
    assert np.isnan(TWO_TREES.predict(np.array([[2.0, np.nan], [2.0, 1.0]]))).tolist() == [True, False]


def test_many_rows_are_as_one_by_one() -> None:
    features = np.random.default_rng(0).normal(2, 3, (70_000, 2))
    together = TWO_TREES.predict(features)
    some = [0, 1, 32_767, 32_768, 65_536, 69_999]
    assert together[some].tolist() == [TWO_TREES.predict(features[[row]])[0] for row in some]


def test_they_outlive_a_file() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays_of(TWO_TREES, "some."))
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as arrays:
        again = BoostedTrees.from_arrays(arrays, "some.")
    features = np.array([[2.0, -1.0], [9.0, 9.0]])
    assert again.predict(features).tolist() == TWO_TREES.predict(features).tolist() == [11.25, 31.5]


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_fitted_trees_are_exactly_those_of_scikit_learn(loss: str) -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    from scripts.predictor.boosting import exported

    random = np.random.default_rng(1)
    features = random.normal(size=(800, 5))
    target = features[:, 0] * features[:, 1] + np.abs(features[:, 2]) + random.normal(0, 0.1, 800)
    model = ensemble.HistGradientBoostingRegressor(
        loss=loss, max_iter=40, max_leaf_nodes=12, random_state=0, early_stopping=False
    ).fit(features, target)
    fresh = random.normal(size=(500, 5))
    assert exported(model).predict(fresh).tolist() == model.predict(fresh).tolist()
    assert exported(model).predict(features).tolist() == model.predict(features).tolist()


def test_trees_of_other_features_are_refused_by_name() -> None:
    """A model of another version: where its trees look at more features than it says, and where rows have fewer."""
    with pytest.raises(StepscopeError, match=r"^the trees some look at 2 features of rows that have 1: a model in "):
        BoostedTrees.from_arrays(arrays_of(replace(TWO_TREES, width=1), "some."), "some.")
    with pytest.raises(StepscopeError, match=r"^the trees were fitted to 2 features, and rows have 3: a model in "):
        TWO_TREES.predict(np.zeros((4, 3)))
