"""Which lines of the user's code host slices stand under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attribution import Attribution, parse, user_entries
from stepscope.analysis.host import TABLES, HostActivity
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows

__all__ = ["Place", "call_path", "parse", "places", "slice_index", "user_entries"]


_LONGEST_PATH: Final = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's code and what it cost.

    Attributes:
        exact_line: whether `line` is the statement's; otherwise it is the function's definition.
        ns: cost that stands under it.
        call_path: the user's frames that lead there, outermost first, as "file:line function".
    """

    file: str
    line: int
    function: str
    exact_line: bool
    ns: int
    call_path: tuple[str, ...]


def slice_index(activity: HostActivity, table: pl.Series, row: pl.Series) -> Rows:
    """Index into `activity` of slices given by table name and row; -1 where either is null. Shape (n,)."""
    result = np.full(len(table), -1, np.int64)
    for name in TABLES:
        mine = (table == name).fill_null(False).to_numpy()
        if mine.any():
            result[mine] = activity.slices_of(name)[row.to_numpy()[mine].astype(np.int64)]
    return result


def places(attribution: Attribution, slices: Rows, ns: Rows, top: int = 3) -> list[Place]:
    """The user's lines, or else functions, under which the slices stand, the costliest first.

    Backward work stands under the line of its forward; the path to each place is that of its costliest slice.

    Args:
        slices: indices into the attribution's activity, -1 for none; shape (n,).
        ns: cost of each; shape (n,).
    """
    known = slices >= 0
    placed = attribution.place[slices[known]] if known.any() else slices[known]
    costs = (
        pl.DataFrame({"place": placed, "slice": slices[known], "ns": ns[known]})
        .filter(pl.col("place") >= 0)
        .sort("ns", descending=True, maintain_order=True)
        .group_by("place", maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("slice").first())
        .sort("ns", descending=True, maintain_order=True)
        .head(top)
    )
    return [
        Place(*attribution.places[int(place)], cost, call_path(attribution, row))
        for place, cost, row in costs.iter_rows()
    ]


def call_path(attribution: Attribution, row: int) -> tuple[str, ...]:
    """The user's frames around the place of a slice, outermost first, as "file:line function"."""
    stack = int(attribution.stack[row])
    if stack >= 0:
        return _path_of_stack(attribution, stack)
    place, frame = attribution.places[attribution.place[row]], int(attribution.frame[row])
    frames = attribution.trace.frames
    around = parse(frames["name"][frame]) if frame >= 0 else None
    if around is None or around[2] != place.function:  # the frame of another function leads elsewhere
        return ()
    return _path_of_frame(frames, frame, attribution.activity)


def _path_of_stack(attribution: Attribution, stack: int) -> tuple[str, ...]:
    activity = attribution.activity
    table = attribution.trace.table(TABLES[activity.table[stack]])
    entries = user_entries(table["call_stack"][int(activity.row[stack])], activity.user_code)
    outer = map(_parsed, reversed(entries[1:]))
    return tuple(f"{file}:{line} {function}" for file, line, function in outer)


def _path_of_frame(frames: pl.DataFrame, frame: int, activity: HostActivity) -> tuple[str, ...]:
    path: list[str] = []
    above = frames["parent"][frame]
    while above is not None and len(path) < _LONGEST_PATH:
        outer = parse(frames["name"][above])
        if outer is not None and outer[0] in activity.user_code:
            path.append("{}:{} {}".format(*outer))
        above = frames["parent"][above]
    return tuple(reversed(path))


def _parsed(name: str) -> tuple[str, int, str]:
    return parse(name) or (name, 0, "")


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
