"""A program at several power limits: what each costs in time and saves in energy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from stepscope.record.energy import LimitRun
from stepscope.report.comparison import change_words
from stepscope.report.energy import energy
from stepscope.report.tables import table_lines


def limits_text(runs: Sequence[LimitRun], *, width: int) -> str:
    """A line for each limit, and which needs the least energy."""
    return "\n".join([*table_lines(_table(runs), width=width), *_sentences(runs)]) + "\n"


def _table(runs: Sequence[LimitRun]) -> pl.DataFrame:
    first = _most(runs)
    rows = []
    for run in runs:
        time = energy_change = ""
        if first is not None and run is not first and run.step_ns and run.joules and first.step_ns and first.joules:
            time = change_words(run.step_ns / first.step_ns - 1)
            energy_change = change_words(run.joules / first.joules - 1)
        used = "not measured" if run.joules is None else energy((run.joules, run.joules))
        rows.append((f"{run.limit_w:g} W", run.step_ns, time, used, energy_change, run.exit_code))
    schema = {
        "limit": pl.String,
        "step_ns": pl.Float64,
        "time": pl.String,
        "energy a step": pl.String,
        "energy": pl.String,
        "exit_code": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _sentences(runs: Sequence[LimitRun]) -> Iterator[str]:
    most = _most(runs)
    if most is None or most.step_ns is None or most.joules is None:
        yield "Nothing was measured, so that nothing tells which limit is best."
        return
    least = min((run for run in runs if run.joules is not None), key=lambda run: run.joules or 0)
    if least is most:
        yield f"The highest limit, {most.limit_w:g} W, needs the least energy."
    elif least.step_ns is not None and least.joules is not None:
        time = change_words(least.step_ns / most.step_ns - 1)
        saved = change_words(least.joules / most.joules - 1)
        yield f"{least.limit_w:g} W needs the least energy: {saved} than {most.limit_w:g} W, with {time} time."


def _most(runs: Sequence[LimitRun]) -> LimitRun | None:
    """The highest limit at which something was measured: what the others are held against."""
    return max((run for run in runs if run.step_ns and run.joules), key=lambda run: run.limit_w, default=None)
