"""Which call started which work: by flows where the file has them, else by the recipe that both name, or by order."""

from __future__ import annotations

from typing import Final

import polars as pl

_COPYING: Final = ("PDMA", "DMA")
"""Engines that copy between host and device."""
_NODE: Final = ("home", "recipe", "name", "node")


def with_launches(work: pl.DataFrame, calls: pl.DataFrame, flows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Both tables with `correlation`, a number that a call shares with the work it started.

    The work that one node of a graph does on several units of an engine at once becomes one piece of work.

    Args:
        work: the device's rows, with row, lane, home, recipe, node, name.
        calls: the host's rows, with row, written_lane and call.
        flows: ends of flows as `Sorting` gives them, or empty.
    """
    work, calls = work.sort("start_ns", "row"), calls.sort("start_ns", "row")
    calls = calls.with_columns(correlation=pl.lit(None, pl.Int64))
    if flows.width and flows.height:
        work = joined_units(_by_flow(work, calls, flows))
        started = work["correlation"].drop_nulls().unique()
        calls = calls.with_columns(
            correlation=pl.when(pl.col("row").cast(pl.Int64).is_in(started.implode())).then(
                pl.col("row").cast(pl.Int64)
            )
        )
        return work, calls
    work = joined_units(work.with_columns(correlation=pl.lit(None, pl.Int64)))
    launching = calls.filter((pl.col("call") == "graph_launch") & pl.col("recipe").is_not_null())
    if launching.height and work.height:
        work = _by_recipe(work, launching)
    copies = calls.filter(pl.col("call") == "copy")
    work = _copies_in_order(work, copies)
    starts = pl.concat([launching["row"], copies["row"]])
    is_start = pl.col("row").is_in(starts.implode())
    return work, calls.with_columns(correlation=pl.when(is_start).then(pl.col("row").cast(pl.Int64)))


def joined_units(work: pl.DataFrame) -> pl.DataFrame:
    """Rows of the same node, call and engine that overlap, as one from the first start to the last end.

    An engine has several units, such as 24 TPCs, that do parts of the same node at once. When any of them works is
    the same before and after.
    """
    keys = [*_NODE, "correlation"]
    work = work.sort([*keys, "start_ns", "row"], nulls_last=True)
    end = pl.col("start_ns") + pl.col("duration_ns")
    same = pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in keys)
    before = end.cum_max().over(keys).shift(1)
    joins = same & (pl.col("start_ns") < before)
    work = work.with_columns(_end=end, _piece=(~joins.fill_null(False)).cast(pl.UInt32).cum_sum())
    others = [name for name in work.columns if name not in ("_piece", "_end", "duration_ns", "bytes")]
    whole = work.group_by("_piece", maintain_order=True).agg(
        *(pl.col(name).first() for name in others),
        pl.col("_end").max(),
        bytes=pl.when(pl.col("bytes").is_not_null().any()).then(pl.col("bytes").sum()),
    )
    whole = whole.with_columns(duration_ns=pl.col("_end") - pl.col("start_ns")).drop("_piece", "_end")
    return whole.sort("start_ns", "row")


def _by_flow(work: pl.DataFrame, calls: pl.DataFrame, flows: pl.DataFrame) -> pl.DataFrame:
    """The row of the call at which the flow to each work begins."""
    sources = calls.select("row", source_lane="written_lane", source_ns="start_ns").unique(
        ["source_lane", "source_ns"], keep="first", maintain_order=True
    )
    targets = (
        flows.join(sources, on=["source_lane", "source_ns"])
        .select(lane="target_lane", start_ns="target_ns", correlation=pl.col("row").cast(pl.Int64))
        .unique(["lane", "start_ns"], keep="first", maintain_order=True)
    )
    return work.join(targets, on=["lane", "start_ns"], how="left", maintain_order="left")


def _copies_in_order(work: pl.DataFrame, copies: pl.DataFrame) -> pl.DataFrame:
    """Copies between host and device belong to the calls in order, where there are as many and none came too early."""
    is_copy = work["engine"].is_in(_COPYING) & work["recipe"].is_null() & work["correlation"].is_null()
    started = work.filter(is_copy)
    if not 0 < started.height == copies.height or (started["start_ns"] < copies["start_ns"]).any():
        return work
    told = started.select("row", _call=copies["row"].cast(pl.Int64))
    work = work.join(told, on="row", how="left", maintain_order="left")
    return work.with_columns(correlation=pl.coalesce("correlation", "_call")).drop("_call")


def _by_recipe(work: pl.DataFrame, launching: pl.DataFrame) -> pl.DataFrame:
    """The call that started each work: recipes run in the order in which they were enqueued.

    A recipe does the same work each time it runs. Where its launches divide the times that a node ran, the n-th of them
    belongs to the n-th launch; where the recording cut some off, to those that are left at its end. Where that would
    put work before its launch, the last launch of the recipe before it is taken.
    """
    starts = launching.select("recipe", called="start_ns", row="row").sort("called")
    starts = starts.with_columns(ordinal=pl.int_range(pl.len(), dtype=pl.Int64).over("recipe"))
    counts = starts.group_by("recipe").agg(launches=pl.len().cast(pl.Int64))
    node = list(_NODE)
    told = work.join(counts, on="recipe", how="left", maintain_order="left").with_columns(
        occurrence=pl.int_range(pl.len(), dtype=pl.Int64).over(node), occurrences=pl.len().cast(pl.Int64).over(node)
    )
    divides = pl.col("occurrences") % pl.col("launches") == 0
    times = pl.when(divides).then(pl.col("occurrences") // pl.col("launches")).otherwise(1)
    missing = pl.when(divides).then(0).otherwise((pl.col("occurrences") - pl.col("launches")).clip(lower_bound=0))
    told = told.with_columns(ordinal=((pl.col("occurrence") - missing) / times).floor().cast(pl.Int64))
    told = told.join(starts, on=["recipe", "ordinal"], how="left", maintain_order="left", suffix="_of_call")
    causal = (pl.col("called") <= pl.col("start_ns")).fill_null(True).all().over(node)
    told = told.with_columns(causal=causal, in_order=pl.col("row_of_call")).drop("called", "row_of_call")
    last = starts.select("recipe", start_ns="called", last="row")
    told = told.sort("start_ns", "row").join_asof(
        last.sort("start_ns"), on="start_ns", by="recipe", check_sortedness=False
    )
    chosen = pl.when("causal").then("in_order").otherwise("last").cast(pl.Int64)
    return told.with_columns(correlation=chosen).select(work.columns)
