"""The same collectives in several ranks' traces: who came last, who waited, how long the data took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

MATCHED_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "step": pl.Int64,
    "kind": pl.String,
    "bytes": pl.Int64,
    "last": pl.Int64,  # place of the rank that came last, in the order in which ranks were given
    "late_ns": pl.Int64,  # how much later it came than the one before it
    "waiting_ns": pl.Int64,  # of the rank that came first
    "transfer_ns": pl.Int64,  # from the last arrival to the end
}


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """One rank's collectives: columns step, kind, group, bytes, start_ns, duration_ns, in order of time.

    Attributes:
        clock_ns: what to add for the wall clock; 0 where it is unknown.
    """

    table: pl.DataFrame
    clock_ns: int = 0


def matched_collectives(ranks: Sequence[RankCollectives]) -> pl.DataFrame:
    """Each collective that all ranks took part in.

    Collectives match by step, kind, group and order in the step. Ranks' clocks differ; a collective ends everywhere at
    nearly the same time, so that each rank's clock is shifted by the median of its ends against the first rank's.

    Returns:
        Columns as in MATCHED_SCHEMA.
    """
    if len(ranks) < 2:
        return pl.DataFrame(schema=dict(MATCHED_SCHEMA))
    keys = ["step", "kind", "group", "order"]
    tables = [_numbered(rank).select(*keys, "bytes", start=pl.col("start_ns") + rank.clock_ns, length="duration_ns")
              for rank in ranks]  # fmt: skip
    joined = tables[0].select(*keys, "bytes", start0="start", length0="length")
    for place, table in enumerate(tables[1:], start=1):
        mine = table.select(*keys, **{f"start{place}": "start", f"length{place}": "length"})
        joined = joined.join(mine, on=keys, how="inner", maintain_order="left")
    if joined.is_empty():
        return pl.DataFrame(schema=dict(MATCHED_SCHEMA))
    starts = np.stack([joined[f"start{place}"].to_numpy() for place in range(len(ranks))])
    ends = starts + np.stack([joined[f"length{place}"].to_numpy() for place in range(len(ranks))])
    shift = np.median(ends - ends[0], axis=1).astype(np.int64)[:, None]
    arrivals, ends = starts - shift, ends - shift
    order = np.sort(arrivals, axis=0)
    columns = {
        "step": joined["step"],
        "kind": joined["kind"],
        "bytes": joined["bytes"],
        "last": np.argmax(arrivals, axis=0),
        "late_ns": order[-1] - order[-2],
        "waiting_ns": np.minimum(order[-1] - order[0], np.max(ends - arrivals, axis=0)),
        "transfer_ns": np.maximum(np.median(ends, axis=0).astype(np.int64) - order[-1], 0),
    }
    return pl.DataFrame(columns, schema=dict(MATCHED_SCHEMA))


def _numbered(rank: RankCollectives) -> pl.DataFrame:
    order = pl.int_range(pl.len()).over("step", "kind", "group")
    return rank.table.sort("start_ns").with_columns(pl.col("group").fill_null(""), order=order)
