"""Which of a trace's steps is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stepscope.analysis.picture import typical_step
from stepscope.analysis.steps import STEP_SCHEMA
from stepscope.trace import Window

CAUSES = {"device": pl.String, "start_ns": pl.Int64, "duration_ns": pl.Int64, "cause": pl.String}


def steps(*lengths_ns: int, complete: Sequence[bool] | None = None) -> pl.DataFrame:
    starts = [100 + sum(lengths_ns[:at]) for at in range(len(lengths_ns))]
    whole = complete or [True] * len(lengths_ns)
    rows = [(at, starts[at], lengths_ns[at], whole[at], "annotation") for at in range(len(lengths_ns))]
    return pl.DataFrame(rows, schema=STEP_SCHEMA, orient="row")


def causes(*rows: tuple[str, int, int, str]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=CAUSES, orient="row")


def test_no_step_is_typical_of_none() -> None:
    assert typical_step(steps(), causes()) is None


def test_the_middle_length_is_typical() -> None:
    assert typical_step(steps(10, 30, 20), causes()) == Window(140, 160)


def test_incomplete_steps_count_only_where_all_are() -> None:
    assert typical_step(steps(20, 20, 5, complete=[False, True, True]), causes()) == Window(120, 140)
    assert typical_step(steps(20, 10, complete=[False, False]), causes()) == Window(100, 120)


def test_a_step_whose_time_went_elsewhere_is_not_typical() -> None:
    waits = causes(*(("0", at, 40, "input") for at in (210, 310, 410)))
    assert typical_step(steps(100, 101, 101, 99), waits) == Window(200, 301)


def test_stretches_are_cut_at_the_steps_bounds() -> None:
    # Of one stretch from before the first step to behind the last each step has all its time.
    around = causes(("0", 0, 1000, "input"), ("1", 105, 10, "input"))
    assert typical_step(steps(10, 10, 10), around) == Window(100, 110)
    assert typical_step(steps(10, 10, 10, 10, 10), around) == Window(120, 130)
