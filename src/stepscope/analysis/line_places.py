"""Which lines of the user's code a thread was at during stretches of its time, where the recording kept lines."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analysis.host import HostActivity
from stepscope.analysis.where import Place
from stepscope.trace import Trace


def line_places(trace: Trace, activity: HostActivity, pieces: pl.DataFrame) -> list[Place]:
    """The user's lines during these pieces of threads' time, the costliest first.

    Args:
        pieces: columns lane, start_ns, duration_ns.
    """
    parts = []
    for (lane,), mine in pieces.drop_nulls("lane").group_by("lane"):
        timeline = activity.line_timelines.get(int(str(lane)))
        if timeline is None:
            continue
        start = mine["start_ns"].to_numpy()
        _, begins, ends, rows = timeline.cut(start, start + mine["duration_ns"].to_numpy())
        parts.append(pl.DataFrame({"row": rows, "ns": ends - begins}).filter(pl.col("row") >= 0))
    if not parts:
        return []
    costs = pl.concat(parts).group_by("row").agg(pl.col("ns").sum())
    lines = trace.lines.select("file", "line", "function")[costs["row"].to_numpy().astype(np.int64)]
    sums = (
        lines.with_columns(costs["ns"])
        .group_by("file", "line", "function")
        .agg(pl.col("ns").sum())
        .sort(["ns", "file", "line"], descending=[True, False, False])
    )
    return [Place(file, line, function, True, ns, ()) for file, line, function, ns in sums.iter_rows()]


def merged(found: list[Place]) -> list[Place]:
    """The places with those of one line as one, the costliest first."""
    lines: dict[tuple[str, int, str], Place] = {}
    for place in found:
        key = (place.file, place.line, place.function)
        known = lines.get(key)
        if known is None:
            lines[key] = place
        else:
            exact = known.exact_line or place.exact_line
            lines[key] = Place(*key, exact, known.ns + place.ns, known.call_path or place.call_path)
    return sorted(lines.values(), key=lambda place: (-place.ns, place.file, place.line))
