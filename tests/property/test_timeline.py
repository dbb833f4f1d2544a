"""A window of the timeline tells each slice or, of those narrower than a pixel, the exact time they cover in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.step_view import StepView
from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.trace.model import Part, Span
from stepscope.view import timeline
from stepscope.view.rows import Row, pixel_edges, slices_in_files, slices_of, value_of
from stepscope.view.slices import places_of, slice_of, stretch
from stepscope.view.timeline import TimelineIndex
from tests.tries import tries

Slice = tuple[int, int]


@st.composite
def rows(draw: st.DrawFn, scale: int = 20) -> list[Slice]:
    """Disjoint slices in order, with different starts."""
    pieces = draw(st.lists(st.tuples(st.integers(0, scale), st.integers(0, scale)), max_size=60))
    result: list[Slice] = []
    now = 0
    for gap, length in pieces:
        now += gap + (1 if result and result[-1][1] == 0 and gap == 0 else 0)
        result.append((now, length))
        now += length
    return result


windows = st.tuples(st.integers(-30, 400), st.integers(1, 900), st.integers(1, 60))


def covered(slices: list[Slice], start: int, end: int) -> int:
    return sum(max(min(begin + length, end) - max(begin, start), 0) for begin, length in slices)


def row_of(slices: list[Slice]) -> Row:
    return Row.of(*(np.array([each[part] for each in slices], np.int64) for part in (0, 1)))


@given(rows(), windows)
def test_wide_slices_stand_alone_and_pixels_hold_the_time_of_the_others(
    slices: list[Slice], window: tuple[int, int, int]
) -> None:
    # Given
    start, length, width = window
    edges = pixel_edges(start, start + length, width)
    pixel = max(max(np.diff(edges).tolist()), 1)

    # When
    rows, busy = row_of(slices).detail(edges)

    # Then
    alone = [
        number
        for number, (begin, size) in enumerate(slices)
        if size >= pixel and begin < start + length and begin + size > start
    ]
    assert rows.tolist() == alone
    others = [each for number, each in enumerate(slices) if number not in alone]
    expected = [covered(others, *pair) for pair in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    assert (busy.tolist() or [0] * width) == expected


@given(rows(), windows)
def test_a_whole_window_has_every_slice_that_touches_it(slices: list[Slice], window: tuple[int, int, int]) -> None:
    start, length, width = window
    end = start + length
    shown = row_of(slices).whole(pixel_edges(start, end, width)).rows.tolist()
    assert shown == [
        number
        for number, (begin, size) in enumerate(slices)
        if begin < end and (begin + size > start or begin == start)
    ]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Operators and launches on two threads, in any order and overlap, and work on a queue."""
    slices = st.tuples(st.integers(0, 200), st.integers(0, 60), st.sampled_from("abc"), st.integers(0, 1))
    lanes = pl.DataFrame(
        {"lane": [0, 1, 2], "kind": ["host_thread", "host_thread", "queue"], "device": [None, None, "0"]}
    )
    tables: dict[str, pl.DataFrame] = {"lanes": lanes}
    for table in ("operators", "launches", "device_work"):
        found = sorted(draw(st.lists(slices, max_size=30)))
        columns: dict[str, Any] = {
            "start_ns": [each[0] for each in found],
            "duration_ns": [each[1] for each in found],
            "name": [each[2] for each in found],
            "lane": [2 if table == "device_work" else each[3] for each in found],
        }
        if table != "operators":
            kind = "compute" if table == "device_work" else "launch"
            columns |= {"kind": [kind] * len(found), "device": ["0"] * len(found)}
        tables[table] = pl.DataFrame(columns).drop("device" if table == "launches" else [])
    return Trace.from_tables(tables)


@settings(max_examples=tries(40))
@given(traces(), windows, st.booleans())
def test_a_document_adds_up_to_the_slices(trace: Trace, window: tuple[int, int, int], whole: bool) -> None:
    # Given
    start, length, width = window
    index = TimelineIndex(StepView(trace))
    most = timeline.MOST_SLICES
    timeline.MOST_SLICES = most if whole else -1  # type: ignore[misc]

    # When
    try:
        document = index.window(start, start + length, width)
    finally:
        timeline.MOST_SLICES = most  # type: ignore[misc]

    # Then
    shown = 0
    for row in (row for lane in document["lanes"] for row in lane["rows"]):
        pieces = list(zip(row["start"], row["duration"], strict=True))
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(pieces))
        shown += covered(pieces, start, start + length) + sum(row["busy"])
    slices = [
        pair
        for table in ("operators", "launches", "device_work")
        for pair in trace.table(table).select("start_ns", "duration_ns").iter_rows()
    ]
    assert shown == covered(slices, start, start + length)
    assert document["whole"] is whole or not slices


@settings(max_examples=tries(40))
@given(traces(), st.integers(1, 20))
def test_slices_in_files_are_the_same(trace: Trace, rows_in_part: int) -> None:
    # Given a trace whose tables are in parts
    def parts(table: str) -> list[Part]:
        rows = trace.table(table)
        pieces = [rows[first : first + rows_in_part] for first in range(0, rows.height, rows_in_part)]
        return [Part(Span.of(piece), lambda *columns, piece=piece: piece.select(columns)) for piece in pieces]

    # When
    expected, found = slices_of(trace, 0), slices_in_files(replace(trace, _parts=parts), 0)

    # Then
    assert found.lanes == expected.lanes
    for name in ("start", "duration", "before", "kind", "table", "row"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert [found.names[each] for each in found.name.tolist()] == [
        expected.names[each] for each in expected.name.tolist()
    ]


@settings(max_examples=tries(40))
@given(traces(), windows)
def test_gaps_and_work_fill_the_time_of_the_device(trace: Trace, window: tuple[int, int, int]) -> None:
    start, length, width = window
    document = TimelineIndex(StepView(trace)).window(start, start + length, width)
    work = list(trace.device_work.select("start_ns", "duration_ns").iter_rows())
    if not work:
        return
    first, last = min(each[0] for each in work), max(each[0] + each[1] for each in work)
    for gaps in document["gaps"]:
        idle = list(zip(gaps["start"], gaps["duration"], strict=True))
        within = covered(idle, start, start + length) + sum(map(sum, gaps["busy"].values()))
        busy = sum(
            any(a <= now < a + b for a, b in work) for now in range(max(first, start), min(last, start + length))
        )
        assert within + busy == max(min(last, start + length) - max(first, start), 0)


@settings(max_examples=tries(40))
@given(traces(), windows)
def test_a_stretch_has_the_time_of_each_name_and_of_each_thread(trace: Trace, window: tuple[int, int, int]) -> None:
    # Given
    start, end = window[0], window[0] + window[1]
    index = TimelineIndex(StepView(trace))

    # When
    found = stretch(index, start, end)

    # Then
    kinds = {"operators": "operator", "launches": "launch", "device_work": "compute"}
    expected: dict[tuple[str, str], int] = {}
    threads: dict[int, set[int]] = {}
    for table, kind in kinds.items():
        for begin, length, name, lane in (
            trace.table(table).select("start_ns", "duration_ns", "name", "lane").iter_rows()
        ):
            if begin < end and (begin + length > start or begin == start):
                inside = covered([(begin, length)], start, end)
                expected[kind, name] = expected.get((kind, name), 0) + inside
                if kind != "compute":
                    threads.setdefault(lane, set()).update(range(max(begin, start), min(begin + length, end)))
    assert {(each["kind"], each["name"]): each["ns"] for each in found["slices"]} == expected
    own = sum(each["self_ns"] or 0 for each in found["slices"])
    assert own == sum(map(len, threads.values()))


def test_a_slice_knows_what_it_launched_and_is_found_by_its_name() -> None:
    # Given
    trace = Trace.from_tables(
        {
            "lanes": pl.DataFrame(
                {"lane": [0, 1], "kind": ["host_thread", "queue"], "name": ["main", "stream 7"], "device": [None, "0"]}
            ),
            "operators": pl.DataFrame(
                {"start_ns": [0, 50], "duration_ns": [20, 10], "name": ["aten::mm", "MmBackward0"], "lane": [0, 0]}
            ),
            "launches": pl.DataFrame(
                {"start_ns": [5], "duration_ns": [5], "name": ["cudaLaunchKernel"], "lane": [0], "operator": [0]}
            ),
            "device_work": pl.DataFrame(
                {"start_ns": [30], "duration_ns": [10], "name": ["gemm"], "lane": [1], "device": ["0"], "launch": [0]}
            ),
            "links": pl.DataFrame({"kind": ["forward_backward"], "source": [0], "target": [1]}),
        }
    )
    index = TimelineIndex(StepView(trace))

    # When
    operator = slice_of(index, "operators", 0)
    places = places_of(index, "MM")

    # Then
    assert (operator["lane"], operator["depth"], operator["name"]) == ("0.0", 0, "aten::mm")
    links = [(each["link"], each["outgoing"], each["table"], each["lane"], each["start"]) for each in operator["links"]]
    assert links == [
        ("launch", True, "device_work", "1.0", 30),
        ("forward_backward", True, "operators", "0.0", 50),
    ]
    assert [each["table"] for each in slice_of(index, "device_work", 0)["links"]] == ["launches"]
    assert [(each["name"], each["depth"]) for each in places["places"]] == [
        ("aten::mm", 0),
        ("gemm", 0),
        ("MmBackward0", 0),
    ]
    assert places["lanes"] == [{"id": "0.0", "count": 2, "ns": 30}, {"id": "1.0", "count": 1, "ns": 10}]
    with pytest.raises(UsageError):
        slice_of(index, "operators", 2)


def test_long_names_have_the_value_that_the_page_gives_them() -> None:
    # The values are those of valueOf in web/src/selection.ts.
    assert value_of("x" * 400) == "x" * 400
    assert value_of("é😀x" * 150) == "é😀x" * 25 + "…c7hlgd"


def test_where_a_part_is_analysed_the_whole_is_drawn_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a trace of which the second half is analysed
    monkeypatch.setattr(timeline, "MOST_IN_MEMORY", 0)
    times = {
        "start_ns": [0, 100],
        "duration_ns": [50, 60],
        "lane": [0, 0],
        "kind": ["compute"] * 2,
        "device": ["0"] * 2,
    }
    lanes = pl.DataFrame({"lane": [0], "kind": ["queue"], "name": ["stream 7"], "device": ["0"]})
    work = pl.DataFrame({**times, "name": ["gemm", "softmax"]})
    whole = Trace.from_tables({"lanes": lanes, "device_work": work})
    part = Trace.from_tables({"lanes": lanes, "device_work": work[1:]})
    index = TimelineIndex(StepView(part), whole)

    # When
    document = index.window(mark="kernel:gemm\nline:train.py:3")
    found = stretch(index, 25, 130)

    # Then
    assert index.is_partial
    assert [row["start"] for row in document["lanes"][0]["rows"]] == [[0, 100]]
    assert document["lanes"][0]["rows"][0]["marked"] == [1, 0]
    assert {each["name"]: (each["ns"], each["self_ns"]) for each in found["slices"]} == {
        "gemm": (25, None),
        "softmax": (30, None),
    }
    assert slice_of(index, "device_work", 1)["name"] == "softmax"
    assert [each["start"] for each in places_of(index, "gemm")["places"]] == [0]
