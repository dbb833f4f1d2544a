"""What ran together, for the page."""

from __future__ import annotations

from typing import Any

from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.view.drawings import links_json
from tests.unit.recording import Recording


def named(document: dict[str, Any], part: str) -> list[tuple[object, ...]]:
    """Rows of a part with names in place of their numbers."""
    names, columns = document["names"], document[part]
    words = ("line", "module", "operator", "kernel", "cause")
    return list(
        zip(
            *[
                [(names[each] if each >= 0 else None) if name in words else each for each in values]
                for name, values in columns.items()
            ],
            strict=True,
        )
    )


def test_an_empty_trace_has_no_links() -> None:
    document = links_json(View(Trace.from_tables({})))

    assert document["names"] == []
    assert [named(document, part) for part in ("work", "idle", "steps")] == [[], [], []]


def test_device_work_belongs_to_its_line_operator_and_kernel_and_idle_time_to_the_line_that_caused_it() -> None:
    # Given two steps of 100 ns, in which a line that loads data keeps the device waiting
    recording = Recording()
    for step in (0, 1):
        begin = 100 * step
        recording.step(begin, 100, step)
        recording.frame(begin, 60, "train.py(5): load")
        recording.frame(begin + 60, 39, "train.py(9): forward")
        recording.operator(begin + 62, 20, "aten::mm")
        recording.launched(begin + 64, begin + 70, 30, "gemm", step + 1)

    # When
    document = links_json(View(recording.trace()))

    # Then
    assert named(document, "work") == [("train.py:9", None, "aten::mm", "gemm", 60)]
    steps = named(document, "steps")
    assert sum(ns for *_, ns in steps) == 200  # type: ignore[misc]
    assert [(step, ns) for step, cause, ns in steps if cause == "busy"] == [(0, 30), (1, 30)]
    idle = named(document, "idle")
    assert sum(ns for *_, ns in idle) == 140  # type: ignore[misc]
    assert {line for _, line, _ in idle} >= {"train.py:5"}


def test_without_a_device_operators_have_their_own_time() -> None:
    recording = Recording()
    recording.frame(0, 100, "train.py(9): forward")
    recording.operator(10, 50, "aten::linear")
    recording.operator(20, 30, "aten::mm")

    document = links_json(View(recording.trace()))

    assert sorted(named(document, "work"), key=str) == [
        ("train.py:9", None, "aten::linear", None, 20),
        ("train.py:9", None, "aten::mm", None, 30),
    ]
    assert sum(ns for *_, ns in named(document, "idle")) <= 100  # type: ignore[misc]
