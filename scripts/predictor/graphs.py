"""The published graphs of language models: which operations one iteration is made of, and what each took."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from scripts.predictor.timings import Numbers, products, vector_operations
from stepscope.predict.operations import Operations

BEFORE_NS: Final = 15_000.0
"""Of an operator's latency, what passes before its kernel starts."""
PHASES: Final = {"FwOps": "fw_latency", "BwOps": "bw_latency", "AccOps": "acc_latency"}
_REPEATED: Final = re.compile(r"_(layer|layers|h)_0_")
_WITHOUT_WORK: Final = ("getitem", "misc", "output")
_DROPOUT_BACKWARD: Final = 5.0
"""Tensors that PyTorch's dropout of separate kernels moves backward: the mask made floating, then two products."""
_AGREE: Final = 0.1
"""How far a model's operators may be off its iteration together: some were timed at another clock."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of one configuration.

    Attributes:
        config: as in the timings.
        operations: all that it does on the device.
        repeats: how often each is done, shape (n,).
        places: name of the graph's node that each belongs to, and one of PHASES.
    """

    config: str
    operations: Operations
    repeats: Numbers
    places: tuple[tuple[str, str], ...]


@lru_cache(maxsize=2)
def iterations(folder: Path) -> dict[str, Iteration]:
    """Each configuration with a graph."""
    graphs = pl.read_parquet(folder / "iteration_graphs.parquet")
    layers = dict(pl.read_parquet(folder / "iterations_fp32.parquet").select("config", "num_layer").iter_rows())
    found = {}
    for config in graphs["config"].unique().sort().to_list():
        nodes = graphs.filter(pl.col("config") == config).to_dicts()
        found[config] = iteration(config, nodes, layers.get(config) or 0)
    return found


def iteration(config: str, nodes: list[dict[str, Any]], layers: int) -> Iteration:
    """What the nodes of a graph do; the block of one layer as often as there are layers, once where there are none."""
    first, end = repeated_nodes([node["Name"] for node in nodes]) if layers else (0, 0)
    parts, repeats, places = [], [], []
    for index, node in enumerate(nodes):
        if node["OpName"] in _WITHOUT_WORK and not _is_maximum(node):  # views and shapes: nothing runs on the device
            continue
        for phase in PHASES:
            for operation in _node_operations(node, phase):
                parts.append(operation)
                repeats.append(layers if first <= index < end else 1)
                places.append((node["Name"], phase))
    return Iteration(config, Operations.joined(parts), np.array(repeats, np.float64), tuple(places))


# Graphs that were not published


_BACKWARD: Final = {
    "VECsoftmax": ("VECmul", "VECsoftmax"), "VECln": ("VECmul",), "VECtanh": ("VECmulu", "VECaddu"),
    "VECpowu": ("VECpowu", "VECmul", "VECmulu"), "VECdiv": ("VECdiv",) * 2, "VECmul": ("VECmul",) * 2,
}  # fmt: skip
"""What the published training graphs do backward for an operator; others do the same once more."""


def derived_iteration(folder: Path, model: str, mode: str, length: int, batch: int) -> Iteration:
    """A configuration as published, else made from those of the same model.

    Numbers that differ between the graphs of two batches are proportional to the batch. A training is the inference
    with what `_BACKWARD` says, products by both operands, gradients added to each weight, and dropout.
    """
    config = f"{model}-{mode}-{length}-{batch}"
    if known := iterations(folder).get(config):
        return known
    return derived(folder, config)


def derived(folder: Path, config: str) -> Iteration:
    """The configuration made from the inference graphs of its model, even if it was published."""
    model, mode, length, batch = config.split("-")
    graphs = pl.read_parquet(folder / "iteration_graphs.parquet").filter(
        pl.col("config").str.starts_with(f"{model}-inf-{length}-")
    )
    by_batch = {int(name[0].rsplit("-", 1)[1]): part.to_dicts() for name, part in graphs.group_by("config")}
    small, large = sorted(by_batch)
    nodes = by_batch.get(int(batch)) or [
        _at_batch(one, other, small, large, int(batch))
        for one, other in zip(by_batch[small], by_batch[large], strict=True)
    ]
    if mode == "train":
        last = next(node for node in reversed(nodes) if node["OpName"] == "Linear")
        vocabulary = ast.literal_eval(last["FwOps"])[0][1][2]
        nodes = [_trained(node, vocabulary) for node in nodes]
    layers = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("model") == model)["num_layer"]
    return iteration(config, nodes, max(layers.drop_nulls()))


def _at_batch(one: dict[str, Any], other: dict[str, Any], small: int, large: int, batch: int) -> dict[str, Any]:
    def scaled(here: Any, there: Any) -> Any:
        if isinstance(here, (list, tuple)):
            return type(here)(scaled(*pair) for pair in zip(here, there, strict=True))
        return here if here == there else here * batch // small if here * large == there * small else here

    columns = ("FwOps", "InputShapes", "OutputShape")
    return one | {name: repr(scaled(ast.literal_eval(one[name]), ast.literal_eval(other[name]))) for name in columns}


def _trained(node: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """An inference's node with the operations that training adds."""
    forward, output = ast.literal_eval(node["FwOps"]), ast.literal_eval(node["OutputShape"])
    name = node["OpName"]
    if name == "misc" and "dropout" in node["Name"]:
        name, forward = "dropout", [["MEM", (output, output)]]
    backward, added = list[Any](), list[Any]()
    for kind, shape in forward:
        if kind == "Linear":
            rows, inner, columns = shape
            backward += [[kind, (rows, columns, inner)], [kind, (columns, rows, inner)]]
            added += [["VECadd", [1, inner * columns]], ["VECadd", [1, columns]]]
        elif kind == "BMM":
            group, rows, inner, columns = shape
            backward += [[kind, (group, rows, columns, inner)], [kind, (group, inner, rows, columns)]]
        elif name == "EMBEDDING":
            weight = (vocabulary, output[-1])
            backward += [[kind, (weight,)]] * 2
            added.append(["VECadd", [1, prod(weight)]])
        elif kind == "MEM":
            backward += [[kind, shape[:-1]]] * 2
        else:
            backward += [[one, shape] for one in _BACKWARD.get(kind, (kind,))]
            added += [["VECadd", [1, shape[1]]]] * (2 if kind == "VECln" else 0)
    return node | {"OpName": name, "FwOps": repr(forward), "BwOps": repr(backward), "AccOps": repr(added)}


def repeated_nodes(names: Sequence[str]) -> tuple[int, int]:
    """The block of nodes that every layer repeats: from the first layer's first to before the next module after it."""
    inside = [index for index, name in enumerate(names) if _REPEATED.search(name)]
    model = names[inside[0]].split("_")[0] + "_"
    after = (index for index in range(inside[-1] + 1, len(names)) if names[index].startswith(model))
    return inside[0], next(after, len(names))


def _is_maximum(node: dict[str, Any]) -> bool:
    """Whether it is the larger of each number of a tensor and a limit: the graphs list no operation for it."""
    return bool(node["Name"].startswith("max") and prod(ast.literal_eval(node["OutputShape"])) > 1)


def _node_operations(node: dict[str, Any], phase: str) -> list[Operations]:
    name, backward = node["OpName"], phase == "BwOps"
    if backward and name in ("VECadd", "VECaddu", "contiguous"):
        return []  # gradients pass through
    if _is_maximum(node):
        output = ast.literal_eval(node["OutputShape"])
        return [_vector("max", (1, prod(output)), [output, output], False)] if phase == "FwOps" else []
    found = []
    for kind, shape in ast.literal_eval(node[phase]):
        if kind in ("Linear", "BMM"):
            found.append(_product(kind, shape, backward))
        elif kind == "MEM":
            found.append(_moved(name, _flat(shape), backward))
        else:
            shapes = None if phase != "FwOps" else [*ast.literal_eval(node["InputShapes"]), shape]
            found.append(_vector(kind.removeprefix("VEC"), shape, shapes, backward))
    return [one for one in found if one.bytes[0] > 0]


def _flat(shapes: Any) -> list[int]:
    return [prod(shape) for shape in shapes]


def _product(kind: str, shape: Sequence[int], backward: bool) -> Operations:
    """(rows, inner, columns) of a layer, or (batch, rows, inner, columns)."""
    sizes = (1, *shape) if kind == "Linear" else shape
    batch, rows, inner, columns = (np.array([float(size)]) for size in sizes)
    one = products(batch, rows, inner, columns, "fp32", kind == "Linear")
    return replace(one, is_backward=np.array([backward]))


def _vector(operator: str, shape: Sequence[int], shapes: list[Any] | None, backward: bool) -> Operations:
    rows, columns = (np.array([float(size)]) for size in shape)
    one = vector_operations(np.array([operator]), rows, columns)
    if shapes is not None and one.kind[0] == "elementwise":
        # Tensors that are spread over a larger one are read once.
        one = replace(one, bytes=np.array([4.0 * sum(_flat(shapes))]))
    return replace(one, is_backward=np.array([backward]))


def _moved(name: str, numbers: list[int], backward: bool) -> Operations:
    """Reads and writes as the node lists them; of an embedding the rows that are looked up, read and written."""
    total = 2.0 * numbers[-1] if name == "EMBEDDING" and not backward else float(sum(numbers))
    if name == "dropout" and backward:
        total *= _DROPOUT_BACKWARD / 2  # listed as two
    one = vector_operations(np.array([name]), np.array([1.0]), np.array([1.0]))
    columns = np.array([float(numbers[-1])])
    return replace(one, bytes=np.array([4.0 * total]), columns=columns, is_backward=np.array([backward]))


# What the operators took


@lru_cache(maxsize=2)
def _latencies(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "iteration_ops_fp32.parquet")


def latencies(folder: Path, gpu: str, config: str) -> dict[tuple[str, str], float]:
    """Nanoseconds of each node and phase as timed on a GPU, with the host's part; empty where they were not."""
    given = _latencies(folder).filter((pl.col("gpu") == gpu) & (pl.col("config") == config))
    return {
        (name, phase): ms * 1e6
        for phase, column in PHASES.items()
        for name, ms in given.select("Name", column).iter_rows()
    }


def timed_products(folder: Path, gpu: str) -> tuple[Operations, Numbers]:
    """The forward matrix products of models as they were timed on a GPU: operations and nanoseconds of the kernels.

    Only of configurations whose operators add up to their iteration.
    """
    known = pl.read_parquet(folder / "iterations_fp32.parquet").filter(pl.col("gpu") == gpu)
    none = np.empty(0)
    parts, ns = [products(none, none, none, none, "fp32", True)], list[float]()
    for config, whole in known.select("config", "iteration_ms").iter_rows():
        graph = iterations(folder).get(config)
        timed = latencies(folder, gpu, config)
        if graph is None or not timed or abs(_sum_ns(graph, timed, known, config) / (whole * 1e6) - 1) > _AGREE:
            continue
        chosen = [
            index
            for index, place in enumerate(graph.places)
            if place[1] == "FwOps" and graph.operations.kind[index] == "matrix" and timed[place] > 2 * BEFORE_NS
        ]
        parts.append(graph.operations.select(np.array(chosen)))
        ns += [timed[graph.places[index]] - BEFORE_NS for index in chosen]
    return Operations.joined(parts), np.array(ns)


def _sum_ns(graph: Iteration, timed: dict[tuple[str, str], float], known: pl.DataFrame, config: str) -> float:
    """Nanoseconds of all nodes' kernels, layers repeated."""
    names = list(dict.fromkeys(name for name, _ in timed))
    layers = int(known.filter(pl.col("config") == config)["num_layer"].item())
    first, end = repeated_nodes(names)
    repeated = set(names[first:end])
    return sum(max(ns - BEFORE_NS, 0.0) * (layers if name in repeated else 1) for (name, _), ns in timed.items())
