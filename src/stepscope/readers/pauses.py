"""Making annotations of the garbage collector's pauses that a recording keeps in its facts.

The profiler does not see Python's collector: where it ran, its time would count as the code's that it interrupted.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.trace.model import Metadata
from stepscope.trace.store import StoreWriter
from stepscope.trace.tables import conform

NAME: Final = "Garbage collection"
CALLED_NAME: Final = "Garbage collection (gc.collect)"


def join_pauses(writer: StoreWriter, metadata: Metadata) -> None:
    """Add the pauses to the annotations that `writer` has written, each on the thread that it stopped."""
    pauses = _pauses(writer, metadata)
    if pauses.is_empty() or _are_there(writer):  # a trace that was exported has them as annotations
        return
    rows = writer.scan("annotations").select(pl.len()).collect().item()
    if not rows:
        writer.write_part("annotations", pauses)
        return

    def merged(part: pl.DataFrame, first: int) -> pl.DataFrame:
        nonlocal pauses
        until = None if first + part.height >= rows or part.is_empty() else part["start_ns"][-1]
        mine = pauses if until is None else pauses.filter(pl.col("start_ns") < until)
        pauses = pauses.slice(mine.height)
        return pl.concat([part, mine]).sort("start_ns", maintain_order=True)

    writer.change("annotations", merged)


def _are_there(writer: StoreWriter) -> bool:
    named = writer.scan("annotations").filter(pl.col("name").is_in([NAME, CALLED_NAME]))
    return not named.head(1).collect().is_empty()


def _pauses(writer: StoreWriter, metadata: Metadata) -> pl.DataFrame:
    """The pauses as rows of the table, in order of time; those of threads that the trace does not have are left out."""
    origin_ns = metadata.origin_unix_ns
    found = metadata.program.pauses if metadata.program is not None else ()
    if origin_ns is None or not found:
        return conform("annotations", pl.DataFrame())
    lanes = writer.scan("lanes").filter(pl.col("kind") == "host_thread").select("thread", "lane").collect()
    times = [(pause.start_unix_ns - origin_ns, pause.duration_ns) for pause in found]
    rows = pl.DataFrame(
        [
            (str(pause.thread), start, duration, CALLED_NAME if pause.called else NAME)
            for pause, (start, duration) in zip(found, times, strict=True)
            if 0 <= start < 2**62 and 0 <= duration < 2**62
        ],
        schema={"thread": pl.String, "start_ns": pl.Int64, "duration_ns": pl.Int64, "name": pl.String},
        orient="row",
    )
    window = metadata.window
    if window is not None:
        inside = (pl.col("start_ns") < window.end_ns) & (pl.col("start_ns") + pl.col("duration_ns") > window.start_ns)
        rows = rows.filter(inside)
    rows = rows.join(lanes.unique("thread", keep="first", maintain_order=True), on="thread", how="inner")
    return conform("annotations", rows.with_columns(kind=pl.lit("host")).sort("start_ns"))
