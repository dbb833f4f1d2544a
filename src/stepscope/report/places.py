"""What lines and modules cost, for the terminal and for programs."""

from __future__ import annotations

from typing import Any, Final

import polars as pl

from stepscope import __version__
from stepscope.analysis.formats import XLA_FORMATS
from stepscope.analysis.place_costs import PHASE_COLUMNS, PlaceCosts
from stepscope.report.format import count, duration, share
from stepscope.report.json_report import SCHEMA
from stepscope.report.tables import showing, table_lines

_SMALLEST_PHASE: Final = 0.01
"""Share of the whole below which a phase gets no column of its own in text."""
_OUTSIDE: Final = {"lines": "(no line of yours)", "modules": "(outside of modules)"}
_OPTIONAL: Final = ("optimizer_ns", "input_ns", "other_ns", "idle_ns", "calls", "bytes_allocated")
"""Columns that are left out of text where they hold nothing."""


_HOW: Final = {
    "lines": "it has no Python stacks either. stepscope run records lines; torch.profiler needs with_stack=True.",
    "modules": "stepscope run records their calls; torch.profiler needs with_stack=True.",
}
_HOW_IN_XLA: Final = {
    "lines": "let JAX's Python tracer record frames; PyTorch/XLA tells lines with XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1.",
    "modules": "XLA tells those of compiled code, by the names that JAX's libraries (or jax.named_scope) give them; "
    "PyTorch/XLA with XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1.",
}
_LIBRARIES: Final = (
    "its Python frames are those of libraries. --user-code PATTERN says which files of theirs are yours."
)


def places_text(costs: PlaceCosts, table: pl.DataFrame, things: str, *, width: int, top: int) -> str:
    """A heading and the table of lines or modules, with times for one step.

    Args:
        things: "lines" or "modules".
        top: rows to show, 0 for all; the row of what has no place is always there.
    """
    if table[table.columns[0]].null_count() == table.height:
        has_frames = things == "lines" and costs.attribution.trace.frames.height > 0
        how = _HOW_IN_XLA if costs.attribution.trace.metadata.format in XLA_FORMATS else _HOW
        return f"No {things} of yours are known in this trace: {_LIBRARIES if has_frames else how[things]}\n"
    shown = table.head(top) if top else table
    rest = table[shown.height :].filter(pl.col(table.columns[0]).is_null())  # often most of the time: never cut off
    shown = pl.concat([shown, rest])
    rows = table_lines(_for_reading(shown, costs, things), width=width)
    rest_ns = int(table.filter(pl.col(table.columns[0]).is_null())["total_ns"].sum())
    title = heading(costs) if things == "lines" else heading(costs, costs.total_ns - rest_ns, "modules")
    lines = [title, "", *(row.replace("--format csv", "--csv -") if row[:1] == "(" else row for row in rows)]
    lines += ["", *filter(None, [showing(shown.height, table.height, things), *_notes(shown, things)])]
    return "\n".join(lines).rstrip("\n") + "\n"


def places_report(costs: PlaceCosts, table: pl.DataFrame, things: str, *, top: int) -> dict[str, Any]:
    """The table for programs: sums over the steps, in whole nanoseconds."""
    shown = table.head(top) if top else table
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "trace": costs.attribution.trace.metadata.path,
        "basis": costs.basis,
        "steps": costs.steps,
        "total_ns": costs.total_ns,
        "attributed_ns": costs.attributed_ns,
        "idle_ns": costs.idle_ns,
        f"{things[:-1]}_count": table.height,
        things: shown.rows(named=True),
    }


def heading(costs: PlaceCosts, placed_ns: int | None = None, where: str = "lines of yours") -> str:
    """What the times are, over what, and how much of them has a place, in one sentence."""
    placed_ns = costs.attributed_ns if placed_ns is None else placed_ns
    steps = max(costs.steps, 1)
    over = f"per step, mean of {count(costs.steps)}" if costs.steps > 1 else "of one step" if costs.steps else "in all"
    what = "Device time" if costs.basis == "device" else "Operators’ own time"
    devices = costs.attribution.trace.device_work["device"].n_unique() if costs.basis == "device" else 0
    what += f" of {count(devices)} devices together" if devices > 1 else ""
    idle = f", idle {duration(costs.idle_ns / steps)}" if costs.idle_ns else ""
    part = share(placed_ns / max(costs.total_ns, 1))
    return f"{what} {over}: {duration(costs.total_ns / steps)}{idle}; {part} of it in {where}."


def per_step(table: pl.DataFrame, costs: PlaceCosts) -> pl.DataFrame:
    """The table with its sums divided by the steps."""
    summed = [name for name in table.columns if name.endswith("_ns") or name in ("calls", "bytes_allocated")]
    return table.with_columns(pl.col(summed) / max(costs.steps, 1))


def worth_showing(table: pl.DataFrame) -> list[str]:
    """The columns of costs, without those that hold nothing and phases that are next to nothing."""
    always = ("total_ns", "self_ns", "share", "forward_ns", "backward_ns")
    least = dict.fromkeys(PHASE_COLUMNS, _SMALLEST_PHASE * float(table["total_ns"].sum()))
    return [
        name
        for name in (*always, *_OPTIONAL)
        if name in table.columns and (name in always or table[name].fill_null(0).sum() > least.get(name, 0))
    ]


def _for_reading(table: pl.DataFrame, costs: PlaceCosts, things: str) -> pl.DataFrame:
    outside = pl.lit(_OUTSIDE[things])
    if things == "lines":
        place = pl.format("{}:{}", pl.col("file"), pl.col("line"))
        mark = pl.when(pl.col("exact_line")).then(pl.lit("")).otherwise(pl.lit("*"))
        names = [pl.coalesce(place + mark, outside).alias("line"), pl.col("function").fill_null("")]
    else:
        indent = pl.concat_str(pl.lit("  ").repeat_by("depth").list.join(""), "name")
        names = [pl.coalesce(indent, outside).alias("module")]
    means = per_step(table, costs)
    columns = worth_showing(means)
    cells = [pl.col(name) if name in ("total_ns", "share") else _or_blank(name) for name in columns]
    return means.select(*names, *cells).rename({"bytes_allocated": "allocated_bytes"}, strict=False)


def _or_blank(name: str) -> pl.Expr:
    return pl.when(pl.col(name) != 0).then(pl.col(name))


def _notes(table: pl.DataFrame, things: str) -> list[str]:
    if things == "lines" and (~table["exact_line"]).any():
        return ["* a function: the trace tells which, not which of its lines. stepscope run records lines."]
    return []
