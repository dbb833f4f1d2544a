"""What ran together: the page filters every view by what is chosen in another one.

Each row sums the time of one combination of line, module, operator and kernel, or of one cause and line: choosing a
value keeps the rows that have it, and their other values are what it is related to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import HOST_SCHEMA, host_time
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.places import idle_places
from stepscope.diagnosis.view import View
from stepscope.trace.nesting import at, row_numbers

MOST_ROWS: Final = 50_000
"""Combinations with the most time; a trace has hundreds, one with generated names could have millions."""
BUSY: Final = "busy"


def links_json(view: View) -> dict[str, Any]:
    """The document "links" of the page; see `Links` in web/src/schema.ts.

    Times are in nanoseconds, over the steps: of the device's work, or operators' own where there is no device.
    """
    attribution = view.attribution
    lines = pl.Series([f"{place.file}:{place.line}" for place in attribution.places], dtype=pl.String)
    modules = pl.Series(attribution.modules, dtype=pl.String)
    work = _device_work(view) if view.trace.device_work.height else _operators(view)
    pieces = _pieces(view)
    names: dict[str, int] = {}
    named = work.select(
        line=_named(lines, work["place"]), module=_named(modules, work["module"]), operator="operator",
        kernel="kernel", ns="ns",
    )  # fmt: skip
    idle = pieces.select("cause", line=_named(lines, pl.Series(idle_places(attribution, pieces))), ns="duration_ns")
    return {
        "work": _numbered(named, names),
        "idle": _numbered(idle, names),
        "steps": _steps(view, pieces, names),
        "names": list(names),
    }


def _device_work(view: View) -> pl.DataFrame:
    trace, attribution = view.trace, view.attribution
    work = trace.device_work
    launched = trace.launches["start_ns"].gather(work["launch"])
    operator = at(row_numbers(trace.launches["operator"]), row_numbers(work["launch"]))
    rows = pl.DataFrame(
        {
            "start_ns": pl.select(pl.coalesce(launched, work["start_ns"])).to_series(),
            "place": attribution.work_place,
            "module": attribution.work_module,
            "operator": _named(trace.operators["name"], pl.Series(operator)),
            "kernel": work["name"],
            "ns": work["duration_ns"],
        }
    )
    return view.begin_in_span(rows)


def _operators(view: View) -> pl.DataFrame:
    trace, attribution = view.trace, view.attribution
    slices = attribution.operator_slices
    rows = pl.DataFrame(
        {
            "start_ns": trace.operators["start_ns"],
            "place": at(attribution.place, slices),
            "module": at(attribution.module, slices),
            "operator": trace.operators["name"],
            "kernel": pl.Series([None], dtype=pl.String).new_from_index(0, trace.operators.height),
            "ns": operator_costs(trace)["host_self_ns"],
        }
    )
    return view.begin_in_span(rows)


def _pieces(view: View) -> pl.DataFrame:
    """The time that findings explain, as in `View.pieces`, with the slices that the host was in."""
    if view.device is not None:
        return view.idle_in_steps.filter(pl.col("device") == view.device)
    if view.lane is None:
        return pl.DataFrame(schema=dict(HOST_SCHEMA))
    return host_time(view.trace, window=view.span, activity=view.activity)


def _steps(view: View, pieces: pl.DataFrame, names: dict[str, int]) -> dict[str, list[int]]:
    """Each step's time by cause, and what the device was busy."""
    starts, lengths = (view.steps[name].to_numpy() for name in ("start_ns", "duration_ns"))
    window = view.window
    first = np.clip(starts, window.start_ns, window.end_ns)
    last = np.clip(starts + lengths, window.start_ns, window.end_ns)
    parts = {
        str(cause): _before(rows, last) - _before(rows, first)
        for (cause,), rows in pieces.sort("start_ns").group_by("cause", maintain_order=True)
    }
    if view.device is not None:
        parts = {BUSY: last - first - sum(parts.values(), np.zeros(len(starts), np.int64)), **parts}
    tables = [
        pl.DataFrame({"step": view.steps["index"], "cause": [cause] * len(ns), "ns": ns}) for cause, ns in parts.items()
    ]
    if not tables:
        return {"step": [], "cause": [], "ns": []}
    return _columns(pl.concat(tables).filter(pl.col("ns") > 0).sort("step", maintain_order=True), ["cause"], names)


def _before(rows: pl.DataFrame, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Total duration of disjoint rows, sorted by time, before each of `times`."""
    starts, lengths = rows["start_ns"].to_numpy(), rows["duration_ns"].to_numpy()
    count = np.searchsorted(starts, times, side="right")
    sums = np.concatenate([[0], np.cumsum(lengths)])
    ends = np.concatenate([[times.min(initial=0)], starts + lengths])  # before the first row nothing has ended
    result: npt.NDArray[np.int64] = sums[count] - np.maximum(ends[count] - times, 0)
    return result


def _named(names: pl.Series, rows: pl.Series) -> pl.Series:
    """Names of rows, null for -1."""
    numbers = rows.cast(pl.Int64)
    return names.gather(pl.select(pl.when(numbers >= 0).then(numbers)).to_series())


def _numbered(rows: pl.DataFrame, names: dict[str, int]) -> dict[str, list[int]]:
    """Sums by all columns but ns, the largest first, as columns of numbers of names."""
    keys = rows.columns[:-1]
    sums = rows.group_by(keys).agg(pl.col("ns").sum()).filter(pl.col("ns") > 0)
    return _columns(sums.sort("ns", *keys, descending=[True, *[False] * len(keys)]).head(MOST_ROWS), keys, names)


def _columns(rows: pl.DataFrame, keys: Sequence[str], names: dict[str, int]) -> dict[str, list[int]]:
    numbers = {
        key: [-1 if name is None else names.setdefault(name, len(names)) for name in rows[key].to_list()]
        for key in keys
    }
    return {**{name: rows[name].to_list() for name in rows.columns}, **numbers}
