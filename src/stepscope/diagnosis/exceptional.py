"""What belongs to no typical step: what happens once, and steps that are nothing like the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.idle import clipped
from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.view import View
from stepscope.trace import Window


@dataclass(frozen=True, slots=True)
class Once:
    """Something that the process does once, which no saving counts.

    Attributes:
        what: "first launch", "initialisation", "graph capture", or "operator": inside one, before its work.
        name: the call or operator that took longest.
        ns: time of all of it in the steps; the device was idle meanwhile.
        count: number of calls.
        where: the user's lines that led to it.
    """

    what: str
    name: str
    ns: int
    count: int
    where: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class SetApart:
    """A step that is nothing like the others, which the typical step leaves out.

    Attributes:
        what: what took most of it: a kind of device work or a cause of idle or host time.
        share: part of the step that it took, 0 to 1.
    """

    index: int
    duration_ns: int
    what: str
    share: float


def once(view: View) -> tuple[Once, ...]:
    """What the process did once in the time of the steps, the longest first; empty if nothing."""
    found = view.pieces_of("once")
    rows = view.activity.once
    if found.is_empty():
        return ()
    starts = rows.select("lane", "what", "name", begin="start_ns", last=pl.col("start_ns") + pl.col("duration_ns"))
    pieces = found.sort("start_ns").join_asof(
        starts.sort("begin"),
        left_on="start_ns",
        right_on="begin",
        by="lane",
        strategy="backward",
        check_sortedness=False,
    )
    kinds = [
        Once(
            str(what),
            str(mine.sort("duration_ns", descending=True)["name"][0]),
            int(mine["duration_ns"].sum()),
            mine.select("lane", "begin").n_unique(),
            view.locations(mine),
        )
        for (what,), mine in pieces.group_by("what")
    ]
    return tuple(sorted(kinds, key=lambda each: (-each.ns, each.what)))


def set_apart(view: View) -> tuple[SetApart, ...]:
    """Complete steps that are not among those measured, in order, with what took most of each."""
    measured = view.complete_steps["index"].implode()
    gone = view.steps.filter(pl.col("complete") & ~pl.col("index").is_in(measured))
    steps = gone.sort("start_ns").select("index", "start_ns", "duration_ns").iter_rows()
    return tuple(_described(view, index, Window(start, start + length)) for index, start, length in steps)


def _described(view: View, index: int, window: Window) -> SetApart:
    parts: dict[str, int] = {}
    if view.device is None:
        causes = view.activity.cut(view.lane or 0, np.array([window.start_ns]), np.array([window.end_ns]))
        causes = causes.select(cause=pl.col("cause").cast(pl.String), ns=pl.col("end") - pl.col("start"))
    else:
        work = view.trace.device_work.filter(pl.col("device") == view.device)
        parts = {str(kind): busy_intervals(mine, window).total_ns for (kind,), mine in work.group_by("kind")}
        idle = clipped(view.idle.filter(pl.col("device") == view.device), window)
        causes = idle.select("cause", ns="duration_ns")
    for cause, ns in causes.group_by("cause").agg(pl.col("ns").sum()).iter_rows():
        parts[cause] = parts.get(cause, 0) + ns
    what = max(parts, key=lambda name: parts[name], default="unknown")
    return SetApart(index, window.duration_ns, what, parts.get(what, 0) / max(window.duration_ns, 1))
