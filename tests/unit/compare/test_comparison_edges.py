"""Which of a recording's first and last steps count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.compare import compare_traces
from stepscope.compare.trace_record import LeftOut, far_edges, left_out, trace_record
from stepscope.trace import Trace, Window
from tests.unit.recording import Recording

MS = 1_000_000
V100 = [160, 122, 123, 118, 127, 206]
"""Milliseconds of the steps of a real recording, of which the first waited and the last holds the profiler's stop."""


@pytest.mark.parametrize(
    ("steps", "far"),
    [
        ([], ()),
        ([5], ()),
        ([500, 100, 100, 500], ()),  # two steps between tell nothing
        ([160, 100, 100, 100, 206], ("first", "last")),
        ([100, 100, 100, 100, 206], ("last",)),
        ([20, 100, 100, 100, 100], ("first",)),  # too short is as far off as too long
        ([119, 100, 100, 100, 120], ()),  # no further than a fifth
        ([160, 98, 103, 100, 206], ("last",)),  # of three, 24 times 1.4826 * 2
        ([160, 90, 110, 100, 206], ()),  # three that differ as much as these
        ([100, 100, 900, 100, 100, 100], ()),  # a step in the middle counts, however long
        ([700, 100, 900, 100, 100, 700], ()),  # no longer than one in the middle
        ([700, 100, 600, 100, 100, 500], ("first",)),
        (V100, ("first", "last")),
        ([176, 174, 177, 181, 176, 164], ()),
        ([130, 80, 120, 90, 110, 140], ()),
    ],
)
def test_edges_that_are_far_from_the_steps_between(steps: list[int], far: tuple[str, ...]) -> None:
    assert far_edges(steps) == far


def test_what_is_told_of_them() -> None:
    steps = {number + 7: ns * MS for number, ns in enumerate(V100)}

    assert list(left_out(steps, trace=2)) == [
        LeftOut(2, 7, "first", 160 * MS, 118 * MS, 127 * MS),
        LeftOut(2, 12, "last", 206 * MS, 118 * MS, 127 * MS),
    ]


def trace(lengths: list[int]) -> Trace:
    """Steps one after the other, of which the device computes for 50 ns and idles for the rest."""
    made, time = Recording(), 1000
    for number, length in enumerate(lengths):
        made.operator(time, 10, "aten::mm")
        made.launched(time + 2, time + 10, 50, "gemm", number + 1)
        made.step(time, length, number)
        time += length
    return made.trace()


def test_the_verdict_and_every_table_are_about_the_steps_that_count() -> None:
    before, after = trace([300, 300, 300, 300, 300]), trace([160, 100, 100, 100, 100, 500])

    found = compare_traces(before, after)

    assert (found.before.step_count, found.before.left_out) == (5, ())
    assert [step.edge for step in found.after.left_out] == ["first", "last"]
    assert (found.after.step_count, found.after.total_ns) == (4, 400)
    assert (found.samples.after_steps, found.samples.after_ns) == (4, 100)
    assert found.samples.verdict == "faster"
    assert found.causes["after_total_ns"].sum() == 400
    assert found.operators["after_calls"].to_list() == [1.0]
    assert found.kernels["after_total_ns"].to_list() == [200]
    assert found.notes == (
        "After, the first step (0.2 us) and the last step (0.5 us) are left out: they are far from the 0.1 us of those "
        "between, and a recording begins or ends there. --all-steps counts all.",
    )


def test_all_steps_count_where_that_is_asked_for() -> None:
    found = compare_traces(trace([100] * 5), trace([160, 100, 100, 100, 100, 500]), all_steps=True)

    assert (found.after.step_count, found.after.total_ns, found.after.left_out) == (6, 1060, ())
    assert not found.samples.is_shown
    assert found.notes == ()


def test_steps_that_the_user_chose_all_count() -> None:
    whole = trace([160, 100, 100, 100, 100, 500])
    chosen = replace(whole, metadata=replace(whole.metadata, window=Window(0, 5000)))

    assert compare_traces(chosen, chosen).before.step_count == 6


def test_steps_that_were_timed_without_the_profiler_all_count() -> None:
    from stepscope.compare import Side

    timed = [[160.0, 100.0, 100.0, 100.0, 100.0, 500.0]]
    sides = [Side(name, [trace([100] * 5)], unprofiled=timed) for name in ("a", "b")]

    found = compare_traces(*sides)

    assert (found.is_unprofiled, found.samples.before_steps) == (True, 6)


def test_edges_of_several_traces_are_told_together() -> None:
    runs = [trace([160, 100, 100, 100, last]) for last in (100, 400)]

    found = compare_traces(runs, runs)

    assert [(step.trace, step.edge) for step in found.before.left_out] == [(0, "first"), (1, "first"), (1, "last")]
    assert found.notes[0] == (
        "Before, the first step of 2 traces (0.2 us) and the last step (0.4 us) are left out: they are far from the "
        "0.1 us of those between, and a recording begins or ends there. --all-steps counts all."
    )


def test_a_step_that_begins_with_a_wait_for_work_from_before_begins_after_it() -> None:
    recording = Recording()
    recording.step(0, 100 * MS, 3)
    recording.work(0, 40 * MS, "gemm", 1)  # its launch was not recorded
    recording.launch(0, 40 * MS, 9, kind="synchronise", name="cudaDeviceSynchronize")
    recording.launched(41 * MS, 42 * MS, 5 * MS, "gemm", 10)

    record = trace_record(recording.trace(), all_steps=True)

    assert (record.steps, record.total_ns) == ({3: 60 * MS}, 60 * MS)
