"""Visits of lines: how long each takes with what it calls, and who called it."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.diagnosis.lines.costs import Visits


def visits(*names: str) -> Visits:
    """A thread that comes to such lines, each for 10 ns: "function:line"."""
    rows = [{"file": "a.py", "function": name.partition(":")[0], "line": int(name.partition(":")[2])} for name in names]
    times = pl.DataFrame({"start_ns": [10 * row for row in range(len(rows))], "duration_ns": [10] * len(rows)})
    return Visits(pl.concat([pl.DataFrame(rows), times], how="horizontal"))


def test_nothing() -> None:
    assert len(Visits(pl.DataFrame(schema={"file": pl.String, "function": pl.String, "line": pl.Int64,
                                           "start_ns": pl.Int64, "duration_ns": pl.Int64})).rows) == 0  # fmt: skip


def test_a_call_belongs_to_the_line_that_makes_it_and_a_return_to_it_is_no_visit() -> None:
    found = visits("f:2", "f:3", "g:8", "g:9", "f:3", "f:4", "f:2", "f:3", "g:8", "f:3")

    assert found.rows.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert found.parents.tolist() == [-1, -1, 1, 1, -1, -1, -1, 6]
    assert (found.starts[1], found.ends[1]) == (10, 50)  # the call, from line 3 until line 4
    assert (found.starts[6], found.ends[6]) == (70, 100)


def test_what_was_open_before_the_recording_is_returned_to() -> None:
    found = visits("g:9", "f:3", "f:4", "f:2", "f:3", "g:8", "g:9", "f:3")

    assert found.parents.tolist() == [-1, -1, -1, -1, -1, 4, 4]
    assert found.place(5) == ("a.py", 8, "g")


def test_the_outermost_line_in_which_nothing_of_a_kind_begins() -> None:
    found = visits("f:2", "f:3", "g:8", "h:20", "h:21", "g:8", "g:9", "f:3", "f:4")
    innermost = found.at(45)

    assert found.place(innermost) == ("a.py", 21, "h")
    outside = {1000: 3, 65: 8, 25: 21}
    for time_ns, line in outside.items():
        assert found.place(found.outermost(innermost, np.array([time_ns])))[1] == line


def test_a_line_that_library_code_leaves_for_another_line_and_back_is_not_called_by_that() -> None:
    found = visits("main:100", "len:21", "main:100", "len:21", "main:100")

    assert found.place(found.outermost(found.at(45), np.array([1000]))) == ("a.py", 100, "main")
