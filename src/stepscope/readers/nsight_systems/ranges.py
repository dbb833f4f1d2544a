"""NVTX ranges, with which PyTorch, frameworks and users label spans of a thread's time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import polars as pl

from stepscope.readers import event_names
from stepscope.readers.nsight_systems.places import TableReader

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
    """Whether a range of this name may be a step."""
    return len(name) <= _LONGEST_NAME and (_NUMBERED.fullmatch(name) or _UNNUMBERED.fullmatch(name)) is not None


class StepMarks:
    """Ranges whose names may mark steps, collected until all of them are known."""

    def __init__(self) -> None:
        self._parts = [pl.DataFrame(schema=_SCHEMA)]

    def add(self, frame: pl.DataFrame) -> None:
        """Add ranges with columns start_ns, duration_ns, name and lane."""
        self._parts.append(frame.select(pl.col(name).cast(dtype) for name, dtype in _SCHEMA.items()))

    def numbered(self) -> pl.DataFrame:
        """Return all ranges with `step`, the number for ranges whose label marks steps, null for others.

        Of several possible labels, the one that covers the most time wins, so iterations win over the batches inside
        them.
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
    """The label whose ranges do not overlap on any thread and cover the most time, or None."""
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


NVTX: Final = "NVTX_EVENTS"
_RANGES: Final = (35, 37, 59, 60, 66, 68, 70, 71)
"""eventType of ranges: push/pop and start/end, each also from imported files."""
_MARKS: Final = (34, 65)
"""eventType of instants."""
_EMITTED: Final = (
    r"(?s)^(?<name>.+?)(?:, seq = (?<sequence>-?\d{1,18}))?(?:, op_id = (?<id>\d{1,18}))?"
    r"(?:, sizes = (?<shapes>\[[\[\]\d, -]*\]))?(?:, input_op_ids = \[.*\])?$"
)
"""Format of an operator written by torch.autograd.profiler.emit_nvtx."""
_OPERATOR: Final = re.compile(r"[A-Za-z_][\w.]*(?:::[\w.~<>]+)*(?:: [\w.:<>]+)?")
_MODULE: Final = re.compile(r"\{'Module': '([^'\n]{1,500})'")
"""Format of an nn.Module call written by the layer-wise hooks of NVIDIA and vLLM."""
_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    **dict.fromkeys(("start", "end", "eventType", "globalTid", "textId"), pl.Int64),
    "text": pl.String,
}


@dataclass
class Ranges(TableReader):
    """Reads NVTX ranges; call `read` once, then `finish` when everything else was gathered."""

    _marks: StepMarks = field(default_factory=StepMarks)
    _open: list[pl.DataFrame] = field(default_factory=list)
    has_shapes: bool = False

    def read(self) -> Iterator[None]:
        """Gather all ranges except those that may mark steps, yielding now and then to let the caller show progress."""
        where, parameters = self._selection.of_ranges(NVTX)
        for batch in self._database.batches(NVTX, _COLUMNS, where=where, parameters=parameters):
            batch = self._with_times(batch)
            text = self._strings.series(batch["textId"]).alias("registered")
            batch = batch.with_columns(
                self._places.threads(batch["globalTid"]).alias("lane"), pl.coalesce("text", text).alias("text")
            ).filter(pl.col("text").is_not_null())
            never_ended = batch.filter(pl.col("end").is_null())
            if not never_ended.is_empty():
                self._open.append(never_ended)
            self._add(self._selection.complete(NVTX, batch.filter(pl.col("end").is_not_null())))
            yield

    def finish(self, end: Callable[[], int]) -> None:
        """Gather the remaining ranges; those never ended are closed at `end`."""
        for batch in self._open:
            batch = batch.with_columns(end=pl.max_horizontal("start", pl.lit(end())))
            self._gathering.damage["open_range"] += batch.height
            self._add(self._selection.complete(NVTX, batch))
        self._add_annotations(self._marks.numbered())

    def _with_times(self, batch: pl.DataFrame) -> pl.DataFrame:
        kind = pl.col("eventType")
        if batch["eventType"].null_count() == batch.height:  # some exports lack the column
            return batch
        batch = batch.filter(kind.is_in(_RANGES + _MARKS))
        return batch.with_columns(end=pl.when(kind.is_in(_MARKS)).then("start").otherwise("end"))

    def _add(self, batch: pl.DataFrame) -> None:
        if batch.is_empty():
            return
        described = _described(batch["text"].unique())
        batch = batch.join(described, on="text", how="left", maintain_order="left")
        self.has_shapes |= batch["shapes"].null_count() < batch.height
        by_table = {str(table): part for (table,), part in batch.group_by("table", maintain_order=True)}
        if "operators" in by_table:
            self._gathering.add(
                "operators",
                by_table["operators"].select(
                    *("start_ns", "duration_ns", "name", "lane"), sequence_number="sequence", input_shapes="shapes"
                ),
            )
        if "frames" in by_table:
            self._gathering.add("frames", by_table["frames"].select("start_ns", "duration_ns", "name", "lane"))
        if "steps" in by_table:
            self._marks.add(by_table["steps"].select("start_ns", "duration_ns", "name", "lane"))
        if "annotations" in by_table:
            self._add_annotations(by_table["annotations"].with_columns(step=pl.lit(None, pl.Int64)))

    def _add_annotations(self, frame: pl.DataFrame) -> None:
        frame = frame.select("start_ns", "duration_ns", "name", "lane", kind=pl.lit("host"), step="step")
        self._gathering.add("annotations", frame)


def _described(texts: pl.Series) -> pl.DataFrame:
    """Parse the text of each range into columns text, name, sequence, shapes and table."""
    parts = texts.to_frame("text").with_columns(pl.col("text").str.extract_groups(_EMITTED).alias("parts"))
    parts = parts.unnest("parts").with_columns(
        pl.col("name").fill_null(pl.col("text")),
        pl.col("sequence").cast(pl.Int64, strict=False),
        emitted=pl.any_horizontal(pl.col("sequence", "id", "shapes").is_not_null()),
    )
    told = [_meaning(name, emitted) for name, emitted in parts.select("name", "emitted").iter_rows()]
    return parts.select("text", "sequence", "shapes").with_columns(
        pl.Series("table", [table for table, _ in told], dtype=pl.String),
        pl.Series("name", [name for _, name in told], dtype=pl.String),
    )


@lru_cache(maxsize=65536)
def _meaning(name: str, emitted: bool) -> tuple[str, str]:
    """Return a range's table ("steps" if it may mark steps) and name; `emitted` if emit_nvtx wrote it."""
    if module := _MODULE.match(name):
        return "frames", f"nn.Module: {module[1]}"
    table = event_names.host_slice_table(name)
    if table == "frames":
        return "frames", event_names.frame_name(name)
    if table in (None, "launches"):  # a range is never a device API call, whatever its name
        if may_mark_steps(name):
            return "steps", name
        table = "operators" if emitted and _OPERATOR.fullmatch(name) else "annotations"
    return table or "annotations", name
