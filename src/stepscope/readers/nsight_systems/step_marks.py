"""Which ranges mark steps: those of one name that come one after the other, with numbers that grow.

Frameworks and users name them as they like: "step 3", "train_step_12", "Iteration=5", "batch 7", or again and again
"run_training_batch". What PyTorch's and stepscope's own marks say is worked out for every format alike (readers.names).
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

_NUMBERED: Final = re.compile(
    r"(?P<label>(?:.*[^a-zA-Z]|.*[a-z](?=[SIB]))?(?:step|iteration|iter|batch))[\s#_:=/.\-\[(]{0,3}(?P<number>\d{1,18})(?:\D.*)?",
    re.IGNORECASE | re.DOTALL,
)
_UNNUMBERED: Final = re.compile(
    r"(?:\[pl\]\[profile\])?(?:(?:\[Strategy\])?\w+\.)?"
    r"(?:run_training_batch|train(?:ing)?[ _]?(?:step|iteration|batch))"
    r"|step|iteration|train_batch",
    re.IGNORECASE,
)
_FEWEST_UNNUMBERED: Final = 3
_LONGEST_NAME: Final = 200
_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "name": pl.String,
    "lane": pl.Int32,
}


def may_mark_steps(name: str) -> bool:
    """Whether a range of this name can be a step."""
    return len(name) <= _LONGEST_NAME and (_NUMBERED.fullmatch(name) or _UNNUMBERED.fullmatch(name)) is not None


class StepMarks:
    """Ranges whose names can mark steps, until all are known."""

    def __init__(self) -> None:
        self._parts = [pl.DataFrame(schema=_SCHEMA)]

    def add(self, frame: pl.DataFrame) -> None:
        """Add ranges: columns start_ns, duration_ns, name, lane."""
        self._parts.append(frame.select(pl.col(name).cast(dtype) for name, dtype in _SCHEMA.items()))

    def numbered(self) -> pl.DataFrame:
        """All of them with `step`: its number for those of the label that marks steps, null for others.

        Of several labels that could, the one that covers the most time does: an iteration, not the batches inside.
        """
        rows = pl.concat(self._parts).sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
        told = pl.DataFrame(
            [(name, *_told(name)) for name in rows["name"].unique()],
            schema={"name": pl.String, "label": pl.String, "number": pl.Int64},
            orient="row",
        )
        rows = rows.join(told, on="name", how="left", maintain_order="left")
        for with_number in (True, False):
            candidates = rows.filter(pl.col("number").is_not_null() == with_number)
            best = _best(candidates, with_number)
            if best is not None:
                mine = (pl.col("label") == best) & (pl.col("number").is_not_null() == with_number)
                order = pl.int_range(pl.len()).over("lane")
                number = pl.col("number") if with_number else order
                marked = rows.filter(mine).with_columns(step=number)
                others = rows.filter(~mine).with_columns(step=pl.lit(None, pl.Int64))
                return pl.concat([marked, others]).select(*_SCHEMA, "step")
        return rows.select(*_SCHEMA, step=pl.lit(None, pl.Int64))


def _told(name: str) -> tuple[str, int | None]:
    match = _NUMBERED.fullmatch(name)
    return (match["label"].lower(), int(match["number"])) if match else (name, None)


def _best(candidates: pl.DataFrame, with_number: bool) -> str | None:
    """The label whose ranges follow each other on every thread and cover the most time; None where there is none."""
    candidates = candidates.filter(pl.col("duration_ns") > 0)
    if candidates.is_empty():
        return None
    end = pl.col("start_ns") + pl.col("duration_ns")
    follows = (pl.col("start_ns") >= end.shift(1)).fill_null(True).all()
    grows = (pl.col("number").diff() > 0).fill_null(True).all() if with_number else pl.lit(True)
    fewest = 1 if with_number else _FEWEST_UNNUMBERED
    by_thread = candidates.group_by("label", "lane").agg(
        pl.len().alias("count"), follows.alias("follows"), grows.alias("grows"), pl.col("duration_ns").sum()
    )
    labels = (
        by_thread.group_by("label")
        .agg(pl.col("count").max(), pl.col("follows", "grows").all(), pl.col("duration_ns").max())
        .filter((pl.col("count") >= fewest) & pl.col("follows") & pl.col("grows"))
        .filter((pl.col("count") > 1) | ~pl.col("label").str.ends_with("batch"))
        .sort("duration_ns", "count", "label", descending=[True, True, False])
    )
    return None if labels.is_empty() else str(labels["label"][0])
