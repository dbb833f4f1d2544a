"""What the published graphs of models say of an iteration: layers repeated, views left out, tensors read once."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from scripts.predictor.graphs import derived, iteration, repeated_nodes, timed_products

NAMES = [
    "bert_embeddings",
    "bert_layer_0_query",
    "view",
    "matmul",
    "bert_layer_0_output",
    "add_1",
    "bert_pooler",
    "out",
]


def node(
    name: str, operator: str, forward: str, inputs: str = "[]", output: str = "(1,)", backward: str = "[]"
) -> dict:
    return {
        "Name": name, "OpName": operator, "FwOps": forward, "BwOps": backward, "AccOps": "[]",
        "InputShapes": inputs, "OutputShape": output,
    }  # fmt: skip


def test_a_layer_ends_before_the_models_next_module() -> None:
    assert repeated_nodes(NAMES) == (1, 6)


def test_a_layer_that_ends_the_graph_is_repeated_to_its_end() -> None:
    assert repeated_nodes(NAMES[:6]) == (1, 6)


def test_products_of_a_layer_come_as_often_as_there_are_layers() -> None:
    nodes = [
        node("model_layers_0_fc", "Linear", "[['Linear', (8, 16, 32)]]"),
        node("view", "misc", "[['MEM', ((8, 32), (8, 32))]]"),
        node("model_head", "Linear", "[['Linear', (8, 32, 64)]]"),
    ]

    found = iteration("one", nodes, 24)

    assert found.repeats.tolist() == [24, 1]
    assert found.operations.flops.tolist() == [2 * 8 * 16 * 32, 2 * 8 * 32 * 64]
    assert found.operations.bytes.tolist() == [4 * (8 * 16 + 16 * 32 + 8 * 32), 4 * (8 * 32 + 32 * 64 + 8 * 64)]
    assert found.places == (("model_layers_0_fc", "FwOps"), ("model_head", "FwOps"))


def test_a_mask_that_is_spread_over_a_tensor_is_read_once() -> None:
    nodes = [node("add", "VECadd", "[['VECadd', (64, 16)]]", "[(2, 32, 16), (2, 1, 16)]", "(2, 32, 16)")]

    assert iteration("one", nodes, 0).operations.bytes.tolist() == [4 * (1024 + 32 + 1024)]


def test_the_gradient_of_a_sum_is_no_work() -> None:
    nodes = [node("add", "VECadd", "[]", backward="[['MEM', ((64, 16),)], ['MEM', ((64, 16),)]]")]
    nodes.append(node("mul", "VECmul", "[['VECmul', (4, 4)]]", "[(4, 4), (4, 4)]", backward="[['VECmul', (4, 4)]]"))

    found = iteration("one", nodes, 0)

    assert found.places == (("mul", "FwOps"), ("mul", "BwOps"))
    assert found.operations.is_backward.tolist() == [False, True]


def test_the_larger_of_a_tensor_and_a_limit_counts_though_the_graph_lists_nothing() -> None:
    nodes = [
        node("max_1", "misc", "[]", "[(4, 8), (1,)]", "(4, 8)"),
        node("max_2", "misc", "[]", "[(1,)]", "(1,)"),
    ]

    assert iteration("one", nodes, 0).operations.bytes.tolist() == [4 * (32 + 32)]


@pytest.mark.parametrize(("whole_ms", "products"), [(10.0, [4_985_000.0]), (20.0, [])])
def test_products_of_models_are_learned_where_they_add_up_to_the_iteration(
    tmp_path: Path, whole_ms: float, products: list[float]
) -> None:
    """Two layers of one product of 5 ms, the host's part among it."""
    graph = [node("m_layers_0_fc", "Linear", "[['Linear', (8, 16, 32)]]") | {"config": "one"}]
    graph.append(node("m_layers_0_fc2", "misc", "[]") | {"config": "one"})
    pl.DataFrame(graph).write_parquet(tmp_path / "iteration_graphs.parquet")
    times = {"gpu": "P4", "config": "one", "fw_latency": 5.0, "bw_latency": 0.0, "acc_latency": 0.0}
    pl.DataFrame([times | {"Name": "m_layers_0_fc"}]).write_parquet(tmp_path / "iteration_ops_fp32.parquet")
    whole = {"gpu": "P4", "config": "one", "iteration_ms": whole_ms, "num_layer": 2}
    pl.DataFrame([whole]).write_parquet(tmp_path / "iterations_fp32.parquet")

    operations, ns = timed_products(tmp_path, "P4")

    assert ns.tolist() == products
    assert len(operations) == len(products)


def test_a_training_follows_from_the_inferences_of_two_batches(tmp_path: Path) -> None:
    graphs = []
    for batch in (2, 8):
        nodes = [
            node("m_layers_0_dropout", "misc", "[]", output=f"({batch}, 4)"),
            node("m_head", "Linear", f"[['Linear', ({batch * 16}, 4, 32)]]"),
        ]
        graphs += [one | {"config": f"m-inf-16-{batch}"} for one in nodes]
    pl.DataFrame(graphs).write_parquet(tmp_path / "iteration_graphs.parquet")
    layers = pl.DataFrame({"config": ["m-inf-16-2"], "model": ["m"], "num_layer": [0]})
    layers.write_parquet(tmp_path / "iterations_fp32.parquet")

    found = derived(tmp_path, "m-train-16-1").operations

    products = found.select(found.kind == "matrix")
    assert products.rows.tolist() == [16, 16, 32]
    assert products.inner.tolist() == [4, 32, 16]
    assert products.columns.tolist() == [32, 4, 4]
    assert products.is_backward.tolist() == [False, True, True]
    assert found.bytes[0] == 4 * (4 + 4)
