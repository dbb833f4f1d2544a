"""How series are called where a name is all there is to tell them apart."""

from __future__ import annotations

from typing import Any

import polars as pl


def full_name(row: dict[str, Any]) -> str:
    """What was logged keeps its name; the rest says who measured it, and of which device: "device0/power_w"."""
    if row["source"] == "log":
        return str(row["name"])
    prefix = f"device{row['device']}" if row["device"] is not None else row["source"]
    return str(row["name"]) if row["source"] in ("gradient", "activation", "optimizer") else f"{prefix}/{row['name']}"


def named_series(samples: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The samples of one rank that have a value, by full name, in order of time."""
    kept = samples.filter(pl.col("value").is_not_null())
    groups = kept.partition_by("source", "name", "device", maintain_order=True)
    return {full_name(group.row(0, named=True)): group for group in groups}


def by_rank(samples: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """The samples of each rank, ascending; a file that names none counts as rank 0."""
    ranked = samples.with_columns(pl.col("rank").fill_null(0)).sort("rank", "unix_ns", maintain_order=True)
    return {group["rank"][0]: group for group in ranked.partition_by("rank", maintain_order=True)}
