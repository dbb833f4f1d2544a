"""Where a difference comes from, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from stepscope.compare import Comparison, compare_samples
from stepscope.compare.comparison import contradict
from stepscope.compare.trace_record import SideSummary
from stepscope.report.comparison import comparison_document, comparison_json, overview, redacted_comparison
from stepscope.report.comparison_words import advice, cause_phrase, side_sentence, verdict_sentence, where_sentences
from stepscope.report.text import markdown_of, text_of
from stepscope.trace import Trace
from tests.unit.rendered import written

MS = 1_000_000
TIMES = {
    "match": pl.String, "before_total_ns": pl.Int64, "after_total_ns": pl.Int64, "before_ns": pl.Float64,
    "after_ns": pl.Float64, "difference_ns": pl.Float64, "share": pl.Float64,
}  # fmt: skip
CALLS = {"before_calls": pl.Float64, "after_calls": pl.Float64}
LINE = {"file": pl.String, "line": pl.Int64, "function": pl.String, "exact_line": pl.Boolean,
        "after_file": pl.String, "after_line": pl.Int64}  # fmt: skip
OPERATOR = {"name": pl.String, "module": pl.String, "input_shapes": pl.String,
            "after_module": pl.String, "after_input_shapes": pl.String}  # fmt: skip
INPUT = "idle time in which the host was loading data (input)"


def times(before_ms: float, after_ms: float, match: str = "same", step_ms: float = 100) -> tuple[Any, ...]:
    before, after = before_ms * MS, after_ms * MS
    return (match, int(before), int(after), before, after, after - before, (after - before) / (step_ms * MS))


def table(schema: dict[str, Any], *rows: tuple[Any, ...]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.sort(pl.col("difference_ns").abs(), descending=True, maintain_order=True)


def side(name: str, step_ms: float, **changes: Any) -> SideSummary:
    made = SideSummary(
        name, (f"{name}.json",), 1, 1, "device", ("H100",), "annotation", 1, int(step_ms * MS), Trace.from_tables({})
    )
    return replace(made, **changes)


def comparison(before_ms: float, after_ms: float, causes: list[tuple[Any, ...]], **more: Any) -> Comparison:
    """Of one step a side, which takes so long; causes are (kind, name, before, after)."""
    noise = [0.001 * MS * (number % 3) for number in range(30)]
    samples = compare_samples([[before_ms * MS + each for each in noise]], [[after_ms * MS + each for each in noise]])
    rows = [(kind, name, *times(*both, step_ms=before_ms)) for kind, name, *both in causes]
    messages = {"kind": pl.String, "ranks": pl.Int64, "bytes": pl.Int64, "after_bytes": pl.Int64, **TIMES, **CALLS}
    sizes = dict.fromkeys(("before_bytes", "after_bytes", "difference_bytes"), pl.Int64)
    given: dict[str, Any] = {
        "before": side("a", before_ms), "after": side("b", after_ms), "samples": samples, "basis": "device",
        "causes": table({"kind": pl.String, "name": pl.String, **TIMES}, *rows),
        "operators": table({**OPERATOR, **TIMES, **CALLS}), "kernels": table({**OPERATOR, **TIMES, **CALLS}),
        "lines": table({**LINE, **TIMES}), "modules": table({"module": pl.String, **TIMES}),
        "communication": table(messages),
        "memory": pl.DataFrame(schema={"category": pl.String, "match": pl.String, **sizes}),
        "settings": pl.DataFrame(schema=dict.fromkeys(("name", "before", "after"), pl.String)),
    }  # fmt: skip
    return Comparison(**{**given, **more})


def lines(*rows: tuple[Any, ...]) -> pl.DataFrame:
    """Rows of line, line after, match, before, after."""
    filled = [
        ("train.py", line, "main", True, None, moved, *times(before, after, match))
        for line, moved, match, before, after in rows
    ]
    return table({**LINE, **TIMES}, *filled)


def operators(name: str, before: float, after: float, match: str, *calls: float) -> pl.DataFrame:
    return table({**OPERATOR, **TIMES, **CALLS}, (name, None, None, None, None, *times(before, after, match), *calls))


def test_nothing_differs() -> None:
    found = comparison(100, 100, [("busy", "computing", 99, 99.5), ("idle", "input", 1, 0.5)])

    assert where_sentences(found) == ["No cause of busy or idle time differs by 1 % of a step or more."]


def test_one_cause_makes_it() -> None:
    found = comparison(120, 90, [("idle", "input", 30, 2), ("busy", "computing", 90, 88)])

    assert where_sentences(found) == [f"Of 30.0 ms less a step, 28.0 ms are {INPUT}."]


def test_two_causes_make_it() -> None:
    found = comparison(90, 130, [("idle", "input", 0, 28), ("busy", "computing", 90, 102)])

    assert where_sentences(found)[0] == (
        f"Of 40.0 ms more a step, 28.0 ms are {INPUT} and 12.0 ms are time in which the device computed."
    )


def test_one_cause_works_against_the_others() -> None:
    found = comparison(100, 80, [("idle", "input", 50, 0), ("busy", "computing", 50, 80)])

    assert where_sentences(found) == [
        f"A step takes 20.0 ms less: 50.0 ms less {INPUT}, but 30.0 ms more time in which the device computed."
    ]


def test_causes_that_make_up_for_each_other() -> None:
    found = comparison(100, 100, [("idle", "input", 50, 0), ("busy", "computing", 50, 100)])

    assert where_sentences(found) == [f"A step takes as long: 50.0 ms less {INPUT}."]


def test_what_is_not_shown_may_be_chance() -> None:
    found = comparison(100, 80, [("idle", "input", 20, 0)], samples=compare_samples([[100 * MS]], [[80 * MS]]))

    assert where_sentences(found) == [f"Of 20.0 ms less a step, 20.0 ms are {INPUT}; all of it may be chance."]
    assert advice(found) == ["To be surer, let stepscope bench run both programs in turn, or record more steps."]


def test_nothing_is_to_be_done_where_less_than_a_hundredth_would_have_been_shown() -> None:
    steps = [100 * MS + number % 2 * MS / 10 for number in range(40)]
    alike = compare_samples([steps], [[*steps[:-1], steps[-1] + 1]])

    assert alike.verdict == "no difference shown"
    assert advice(comparison(100, 100, [], samples=alike)) == []
    assert advice(comparison(100, 50, [])) == []  # faster is shown


def test_steps_that_are_not_marked() -> None:
    found = comparison(100, 80, [], samples=compare_samples([[]], [[80 * MS]]))

    assert ["stepscope.step()" in each for each in advice(found)] == [True]


@pytest.mark.parametrize(
    ("timed", "recorded", "expected"),
    [
        (([100.0] * 9, [130.0] * 9), -0.2, True),  # slower is shown, and recorded steps are shorter
        (([100.0] * 9, [70.0] * 9), -0.2, False),
        (([100.0, 101.0] * 5, [101.0, 102.5, 99.0, 103.0] * 2), -0.5, True),  # not shown, but no room for half
        (([100.0, 101.0] * 5, [101.0, 107.0, 96.0, 103.0] * 2), -0.015, False),  # within what may be chance, as below
        (([100.0] * 9, [130.0] * 9), -0.005, False),
    ],
)
def test_when_recorded_steps_contradict_the_others(
    timed: tuple[list[float], list[float]], recorded: float, expected: bool
) -> None:
    samples = compare_samples(*([[ns * MS for ns in side]] for side in timed))

    assert samples.change is not None
    assert contradict(samples, samples.change, recorded) == expected


def test_a_contradiction_is_the_verdict() -> None:
    samples = compare_samples([[100.0 * MS, 101.0 * MS] * 5], [[130.0 * MS, 131.0 * MS] * 5])
    samples = replace(samples, verdict="contradictory")

    found = comparison(100, 80, [("idle", "input", 100, 80)], samples=samples, is_unprofiled=True)

    assert verdict_sentence(samples).startswith("Contradictory: timed without the profiler, a step takes 130.5 ms")
    assert where_sentences(found)[0].startswith("A recorded step takes 80.0 ms instead of 100.0 ms.")
    assert len(advice(found)) == 1


def test_recorded_steps_that_differ_the_other_way_by_chance() -> None:
    samples = compare_samples([[100.0 * MS, 101.0 * MS] * 5], [[101.0 * MS, 107.0 * MS, 96.0 * MS, 103.0 * MS] * 2])

    found = comparison(100, 98.5, [("idle", "input", 100, 98.5)], samples=samples, is_unprofiled=True)

    assert where_sentences(found)[0].startswith("The recorded steps differ the other way")
    assert where_sentences(found)[1] == f"Of 1.5 ms less a recorded step, 1.5 ms are {INPUT}; all of it may be chance."


def test_where_the_verdict_stands_elsewhere_only_the_reasons_are_told() -> None:
    samples = compare_samples([[100 * MS, 140 * MS]], [[80 * MS, 120 * MS]])
    found = [comparison(100, 80, [("idle", "input", 20, 0)], samples=samples, notes=("A note.",))] * 2

    text = text_of(comparison_document(found, only_why=True), width=200, top=5)
    page = markdown_of(comparison_document(found, only_why=True), top=5)

    for shown in (text, page):
        assert "No difference shown" not in shown
        assert "To be surer" not in shown
        assert "Few steps" not in shown
        assert f"20.0 ms are {INPUT}" in shown.replace("\\", "")
        assert shown.count("A note.") == 2
    assert text.startswith("Before  a: 1 step (annotated), H100\n")


def test_the_line() -> None:
    causes = [("idle", "input", 50, 0)]
    moved = comparison(100, 50, causes, lines=lines((10, 12, "other line", 50, 1), (20, None, "same", 1, 9)))
    gone = comparison(100, 50, causes, lines=lines((10, None, "only before", 50, 0), (14, None, "only after", 0, 1)))
    small = comparison(100, 50, causes, lines=lines((10, None, "same", 5, 1)))

    assert where_sentences(moved)[1] == (
        "The line behind most of it is train.py:10 main (line 12 after): 1.0 ms a step instead of 50.0 ms."
    )
    assert where_sentences(gone)[1] == (
        "train.py:10 main, 50.0 ms a step, is there only before; train.py:14 main, 1.0 ms, only after."
    )
    assert len(where_sentences(small)) == 1


def test_a_line_that_came() -> None:
    came = comparison(50, 100, [("idle", "input", 0, 50)], lines=lines((10, None, "only after", 0, 50)))

    assert where_sentences(came)[1] == "train.py:10 main, 50.0 ms a step, is there only after."


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (("mm", 50, 9, "same", 4, 4), "mm changed most: 9.0 ms a step instead of 50.0 ms."),
        (("mm", 50, 9, "other shapes", 64, 1),
         "mm changed most: 9.0 ms a step instead of 50.0 ms, in 1 call instead of 64 (other shapes)."),
        (("mm", 50, 0, "only before", 1, 0), "mm changed most: it is there only before, 50.0 ms a step."),
        (("m\x1bm", 50, 0, "only before", 1, 0), "m\x1bm changed most: it is there only before, 50.0 ms a step."),
    ],
)  # fmt: skip
def test_the_operator(made: tuple[Any, ...], sentence: str) -> None:
    found = comparison(100, 50, [("busy", "computing", 90, 40)], operators=operators(*made))

    assert where_sentences(found)[-1] == f"Of the operators {sentence}"


def test_operators_are_left_out_where_nothing_was_computed_otherwise() -> None:
    found = comparison(100, 50, [("idle", "input", 50, 0)], operators=operators("mm", 50, 9, "same", 4, 4))

    assert where_sentences(found) == [f"Of 50.0 ms less a step, 50.0 ms are {INPUT}."]


@pytest.mark.parametrize(
    ("kind", "name", "phrase"),
    [
        ("busy", "copies", "time in which the device only copied"),
        ("host", "compute", "time in which the host computed"),
        ("host", "input", "time in which the host was loading data (input)"),
        ("idle", "unknown", "idle time that the trace does not explain"),
        ("idle", "new\x1bcause", "idle time with the cause new\x1bcause"),
    ],
)
def test_causes_in_words(kind: str, name: str, phrase: str) -> None:
    assert cause_phrase(kind, name) == phrase


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "a: 1 step (annotated), H100"),
        ({"step_count": 1234, "ranks": 8}, "a: 1,234 steps of 8 ranks together (annotated), H100"),
        (
            {"step_count": 12, "ranks": 2, "runs": 3, "devices": ()},
            "a: 12 steps of 3 runs of 2 ranks together (annotated)",
        ),
        ({"step_source": "none", "basis": "host", "devices": ()}, "a: no steps found, no device recorded"),
    ],
)
def test_a_side_in_words(changes: dict[str, Any], sentence: str) -> None:
    assert side_sentence(side("a", 100, **changes)) == sentence


def test_the_text_shows_control_characters_and_fits() -> None:
    settings = pl.DataFrame({"name": ["x\x1b[2J"], "before": ["1"], "after": [None]})
    found = comparison(100, 80, [("idle", "input", 20, 0)], settings=settings, before=side("a\x1b", 100))

    text = text_of(comparison_document([found]), width=60, top=5)

    assert "\x1b" not in text
    assert "x\\x1b[2J" in text
    assert max(map(len, text.splitlines())) <= 80
    assert overview([found, found])["verdict"].to_list() == ["the baseline", "faster", "faster"]


def test_redaction_takes_paths_and_the_machine_out() -> None:
    settings = pl.DataFrame(
        {"name": ["machine", "option --data"], "before": ["node7", "/home/alice/data"], "after": ["b", "x"]}
    )
    found = comparison(
        100, 80, [("idle", "input", 20, 0)], settings=settings,
        before=side("/home/alice/runs/base", 100, paths=("/home/alice/runs/base/trace.json",)),
        lines=lines((10, None, "same", 20, 0)).with_columns(file=pl.lit("/home/alice/train.py")),
        notes=("Passed over: /home/alice/runs/x.json is empty",),
    )  # fmt: skip

    report = str(written(comparison_json([redacted_comparison(found)])))

    assert "alice" not in report
    assert "node7" not in report
    assert "train.py" in report
    assert "'base'" in report
