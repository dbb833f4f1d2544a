"""Which forward operator a backward operator belongs to."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, inherit

BACKWARD_NAME: Final = r"^autograd::engine|Backward\d*$"
"""Names of the autograd engine's operators."""


def backward_source(trace: Trace) -> Rows:
    """For each operator of the backward pass, the row of the forward operator that made its autograd node, -1 for none.

    The two carry the same sequence number, and the node the number of the forward operator's thread; numbers that come
    again belong to the nearest forward operator before. Each thread of each process counts for itself: where several
    threads count, the recorded link decides. What runs inside a node belongs to the node's. Shape (operators,).
    """
    parent = trace.operators["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    return inherit(node_source(trace), parent)


def node_source(trace: Trace) -> Rows:
    """As `backward_source`, but -1 also for what runs inside a node; shape (operators,)."""
    columns = ("row", "lane", "start_ns", "name", "sequence_number", "forward_thread")
    processes = trace.lanes.select("lane", pl.col("process").fill_null(""))
    operators = (
        trace.operators.with_row_index("row")
        .select(columns)
        .join(processes, on="lane", how="left", maintain_order="left")
    )
    result = np.full(operators.height, -1, np.int64)
    numbered = operators.filter(pl.col("sequence_number").is_not_null() & (pl.col("sequence_number") >= 0))
    is_node = pl.col("name").str.contains(BACKWARD_NAME)
    nodes = numbered.filter(is_node).select("row", "start_ns", "sequence_number", "process")
    forward = numbered.filter(~is_node & (pl.col("forward_thread").fill_null(0) == 0))
    if nodes.height and forward.height:
        # Of operators inside each other that carry one number the innermost, which comes last, made the node.
        joined = nodes.sort("start_ns").join_asof(
            forward.select("start_ns", "sequence_number", "process", source="row").sort("start_ns"),
            on="start_ns",
            by=["process", "sequence_number"],
            check_sortedness=False,
        )
        found = joined.drop_nulls("source")
        result[found["row"].to_numpy()] = found["source"].to_numpy()
    links = _links(trace, several=forward["lane"].n_unique() > 1, unknown=result < 0)
    result[links["target"].to_numpy()] = links["source"].to_numpy()
    return result


def _links(trace: Trace, *, several: bool, unknown: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pl.DataFrame:
    """The links from a forward operator to its node that say more than the numbers do."""
    starts = trace.operators["start_ns"]
    links = trace.links.filter(pl.col("kind") == "forward_backward").select("source", "target")
    forwards = (starts.gather(links["source"]) < starts.gather(links["target"])).fill_null(False)
    asked = pl.Series(unknown).gather(links["target"]) if not several else pl.repeat(True, links.height, eager=True)
    return links.filter(forwards & asked)
