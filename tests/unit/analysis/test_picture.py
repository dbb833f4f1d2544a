"""The picture of a step: depths, cuts, what is left out and what never is."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analysis.picture import (
    MAXIMUM_THREADS,
    NAME_LENGTH,
    PathPiece,
    PictureGap,
    PictureLane,
    PictureSlice,
    Shown,
    StepPicture,
    step_picture,
)
from stepscope.trace import Trace, Window

Rows = list[dict[str, Any]]
IDLE = {
    "device": pl.String,
    "gap": pl.Int64,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "cause": pl.String,
    "trigger": pl.String,
    "lane": pl.Int32,
    "next_work": pl.UInt32,
    "launch": pl.UInt32,
    "slice_table": pl.String,
    "slice_row": pl.UInt32,
}


def trace_of(**tables: Rows) -> Trace:
    trace = Trace.from_tables({name: pl.DataFrame(rows) for name, rows in tables.items()})
    trace.check()
    return trace


def idle_of(*pieces: tuple[str, int, int, str, str | None]) -> pl.DataFrame:
    names = ("device", "start_ns", "duration_ns", "cause", "trigger")
    rows = [dict(zip(names, piece, strict=True)) for piece in pieces]
    return pl.DataFrame(rows, schema_overrides=IDLE).select(names) if rows else pl.DataFrame(schema=IDLE)


def at(start: int, duration: int, name: str, lane: int = 0, **more: object) -> dict[str, Any]:
    return {"start_ns": start, "duration_ns": duration, "name": name, "lane": lane, **more}


def thread(lane: int, name: str | None = None, process: str = "1") -> dict[str, Any]:
    return {"lane": lane, "kind": "host_thread", "process": process, "thread": str(10 + lane), "name": name}


def queue(lane: int, device: str, number: str) -> dict[str, Any]:
    return {"lane": lane, "kind": "queue", "process": "0", "device": device, "queue": number}


def test_a_trace_without_anything_is_an_empty_picture() -> None:
    # Given, when
    picture = step_picture(trace_of(), Window(5, 105), idle_of())

    # Then
    nothing = Shown(0, 0)
    assert picture == StepPicture(5, 100, (), (), (), nothing, nothing, nothing, nothing)
    assert picture.dropped == 0


def test_slices_of_all_tables_nest_and_are_cut_at_the_window() -> None:
    # Given
    trace = trace_of(
        lanes=[thread(0, "main"), queue(1, "0", "7"), {"lane": 2, "kind": "other", "process": "p"}],
        annotations=[at(100, 100, "step 1", kind="host"), at(100, 900, "profiler", 2, kind="profiler")],
        frames=[at(110, 50, "train.py(3): loss")],
        operators=[at(110, 50, "aten::mm"), at(170, 60, "aten::add")],
        launches=[at(120, 5, "cudaLaunchKernel", kind="launch"), at(20, 5, "before", kind="launch")][::-1],
        device_work=[at(90, 20, "early", 1, kind="copy_in", device="0"), at(130, 500, "gemm", 1, kind="compute")],
    )

    # When
    picture = step_picture(
        trace, Window(100, 200), idle_of(("0", 50, 40, "input", None), ("0", 110, 20, "python", "x"))
    )

    # Then
    assert picture.lanes == (PictureLane("main", "host", "", 4), PictureLane("queue 7", "queue", "0", 1))
    assert picture.slices == (
        PictureSlice(0, 0, 0, 100, "step 1", "annotation"),
        PictureSlice(0, 1, 10, 50, "train.py(3): loss", "frame"),
        PictureSlice(0, 2, 10, 50, "aten::mm", "operator"),
        PictureSlice(0, 3, 20, 5, "cudaLaunchKernel", "launch"),
        PictureSlice(0, 1, 70, 30, "aten::add", "operator"),
        PictureSlice(1, 0, 0, 10, "early", "copy_in"),
        PictureSlice(1, 0, 30, 70, "gemm", "compute"),
    )
    assert picture.gaps == (PictureGap("0", 10, 20, "python", "x"),)
    assert (picture.host_slices, picture.device_slices) == (Shown(5, 5, 5), Shown(2, 2, 10))
    assert (picture.threads, picture.queues) == (Shown(1, 1), Shown(1, 1))


def test_frames_around_the_whole_window_are_named_not_drawn() -> None:
    # Given
    trace = trace_of(
        lanes=[thread(0)],
        frames=[at(0, 1000, "<module>"), at(10, 980, "main"), at(20, 960, "train"), at(110, 20, "loss")],
        annotations=[at(100, 100, "step", kind="host")],
    )

    # When
    picture = step_picture(trace, Window(100, 200), idle_of())

    # Then
    assert picture.lanes == (PictureLane("thread 10", "host", "", 3, ("<module>", "main")),)
    assert [(each.name, each.depth) for each in picture.slices] == [("train", 0), ("step", 1), ("loss", 2)]


def test_the_shortest_slices_are_left_out_and_counted() -> None:
    # Given
    trace = trace_of(
        lanes=[thread(0, "main"), queue(1, "0", "7")],
        operators=[at(10 * number, 1 + number % 5, f"op {number}") for number in range(100)],
        device_work=[at(5, 4, "a", 1, kind="compute"), at(15, 2, "b", 1, kind="compute")],
    )
    every_gap = [("0", 20 + 2 * number, 1, "dispatch", None) for number in range(50)]

    # When
    picture = step_picture(trace, Window(0, 1000), idle_of(*every_gap), maximum_slices=22)

    # Then
    assert picture.host_slices == Shown(20, 100, 5)
    assert {each.duration_ns for each in picture.slices if each.lane == 0} == {5}
    assert picture.device_slices == Shown(2, 2, 2)
    assert picture.dropped == 80
    assert len(picture.gaps) == 50


def test_many_device_slices_leave_half_the_room_to_the_host() -> None:
    # Given
    trace = trace_of(
        lanes=[thread(0, "main"), queue(1, "0", "7")],
        operators=[at(number, 1, "op") for number in range(30)],
        device_work=[at(10 * number, 9, "kernel", 1, kind="compute") for number in range(30)],
    )

    # When
    picture = step_picture(trace, Window(0, 1000), idle_of(), maximum_slices=20)

    # Then
    assert (picture.host_slices, picture.device_slices) == (Shown(10, 30, 1), Shown(10, 30, 9))


def test_the_busiest_threads_come_first_and_the_rest_is_counted() -> None:
    # Given: thread n works for n nanoseconds; the last one only waits
    last = MAXIMUM_THREADS + 2
    trace = trace_of(
        lanes=[thread(number, f"worker {number}") for number in range(last + 1)],
        operators=[at(0, number, "op", number) for number in range(1, last)],
        frames=[at(0, 100, "wait", last)],
    )

    # When
    picture = step_picture(trace, Window(0, 100), idle_of())

    # Then: lane 0 has nothing in the window
    labels = [lane.label for lane in picture.lanes]
    assert labels == [f"worker {number}" for number in range(last - 1, last - 1 - MAXIMUM_THREADS, -1)]
    assert picture.threads == Shown(MAXIMUM_THREADS, last)


def test_a_lane_of_which_nothing_is_left_is_not_drawn() -> None:
    # Given
    work = [at(10 * number, 9, "op") for number in range(10)] + [at(100, 1, "tiny", 1)]
    trace = trace_of(lanes=[thread(0, "main"), thread(1, "other")], operators=work)

    # When
    picture = step_picture(trace, Window(0, 200), idle_of(), maximum_slices=10)

    # Then
    assert [lane.label for lane in picture.lanes] == ["main"]
    assert (picture.threads, picture.host_slices) == (Shown(1, 2), Shown(10, 11, 9))


def test_threads_of_several_processes_say_which() -> None:
    # Given
    described = [{**thread(0, "main"), "process_name": "python"}, thread(1, "main", process="2")]
    trace = trace_of(lanes=described, operators=[at(0, 5, "a", 0), at(1, 4, "b", 1)])

    # When
    picture = step_picture(trace, Window(0, 10), idle_of())

    # Then
    assert [lane.label for lane in picture.lanes] == ["main (python 1)", "main (process 2)"]


def test_work_that_overlaps_on_one_queue_is_stacked() -> None:
    # Given
    work = [at(0, 10, "a", kind="compute"), at(5, 10, "b", kind="compute"), at(15, 5, "c", kind="compute")]
    trace = trace_of(lanes=[queue(0, "1", "7")], device_work=work)

    # When
    picture = step_picture(trace, Window(0, 100), idle_of())

    # Then
    assert [(each.name, each.depth, each.duration_ns) for each in picture.slices] == [
        ("a", 0, 10),
        ("b", 1, 10),
        ("c", 0, 5),
    ]


def test_touching_gaps_of_one_cause_and_trigger_are_one() -> None:
    # Given
    pieces = [("0", 0, 5, "python", None), ("0", 5, 5, "python", None), ("0", 10, 5, "python", "synchronisation")]

    # When
    picture = step_picture(trace_of(), Window(2, 100), idle_of(*pieces, ("1", 15, 5, "python", "synchronisation")))

    # Then
    assert picture.gaps == (
        PictureGap("0", 0, 8, "python", None),
        PictureGap("0", 8, 5, "python", "synchronisation"),
        PictureGap("1", 13, 5, "python", "synchronisation"),
    )


def test_names_are_cut_and_may_be_missing() -> None:
    # Given
    trace = trace_of(lanes=[thread(0)], operators=[at(0, 9, "x" * 5000), {**at(10, 5, ""), "name": None}])

    # When
    picture = step_picture(trace, Window(0, 100), idle_of())

    # Then
    assert [len(each.name) for each in picture.slices] == [NAME_LENGTH, 0]


def test_deep_stacks_keep_every_level() -> None:
    # Given
    trace = trace_of(lanes=[thread(0)], operators=[at(number, 100 - 2 * number, f"{number}") for number in range(37)])

    # When
    picture = step_picture(trace, Window(0, 100), idle_of())

    # Then
    assert [each.depth for each in picture.slices] == list(range(37))


def test_the_critical_path_is_cut_at_the_window_and_pieces_of_one_name_are_one() -> None:
    # Given
    rows = [
        (0, 60, "host", "input", "next"),
        (60, 20, "host", "input", "next"),
        (80, 10, "launch_latency", None, "gemm"),
        (90, 100, "compute", None, "gemm"),
        (190, 50, "host", "python", None),
    ]
    columns = ["start_ns", "duration_ns", "kind", "cause", "name"]
    path = pl.DataFrame(rows, schema=columns, orient="row")

    # When
    picture = step_picture(trace_of(), Window(50, 200), idle_of(), path=path)
    cut = step_picture(trace_of(), Window(50, 200), idle_of(), 2, path)

    # Then
    assert picture.path == (
        PathPiece(0, 30, "host", "input", "next"),
        PathPiece(30, 10, "launch_latency", None, "gemm"),
        PathPiece(40, 100, "compute", None, "gemm"),
        PathPiece(140, 10, "host", "python", ""),
    )
    assert picture.path_pieces == Shown(4, 4, 10)
    assert [piece.kind for piece in cut.path] == ["host", "compute"]
    assert cut.path_pieces == Shown(2, 4, 30)


def test_too_many_pieces_of_the_critical_path_lose_their_names_first() -> None:
    # Given
    rows = [(10 * number, 10, "host", "python" if number < 8 else "input", f"f{number}") for number in range(9)]
    path = pl.DataFrame(rows, schema=["start_ns", "duration_ns", "kind", "cause", "name"], orient="row")

    # When
    picture = step_picture(trace_of(), Window(0, 90), idle_of(), 5, path)

    # Then
    assert picture.path == (PathPiece(0, 80, "host", "python", ""), PathPiece(80, 10, "host", "input", "f8"))
    assert picture.path_pieces == Shown(2, 2, 10)
