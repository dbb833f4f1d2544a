"""Findings about a recording without steps say nothing of steps."""

import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Interval, Remedy
from stepscope.diagnosis.rules import launch_bound
from stepscope.diagnosis.view import View, for_any_device, without_steps
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS
from tests.unit.diagnosis.rules.test_launch_bound import late_launches


def without_step_annotations(trace: Trace) -> Trace:
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["annotations"] = tables["annotations"].filter(pl.col("step").is_null())
    return Trace.from_tables(tables, trace.metadata)


def test_words() -> None:
    evidence = Evidence((Figure("share of the step lost", 0.2, "share", 0.1), Figure("calls per step", 2, "count")))
    title, basis, changed = without_steps(
        "12% of the step: 3 times a step, for which the step waits in each step", "time within the step", evidence
    )

    assert title == ("12% of the recording: 3 times in the recording, for which the program waits in the recording")
    assert basis == "time within the recording"
    assert changed == Evidence(
        (Figure("share of the recording lost", 0.2, "share", 0.1), Figure("calls in the recording", 2, "count"))
    )
    assert without_steps("steps, stepscope", "", Evidence((), (Interval(0, 1, "step 3"),))) == (
        "steps, stepscope", "", Evidence((), (Interval(0, 1, "step 3"),)),
    )  # fmt: skip


def test_a_finding_about_a_recording_with_steps_keeps_its_words() -> None:
    with_steps = launch_bound.check(View(late_launches())).findings[0]
    without = launch_bound.check(View(without_step_annotations(late_launches()))).findings[0]

    assert "of the step the device waits for launches: 4 launches a step" in with_steps.title
    assert "of the recording the device waits for launches: 3 launches in the recording" in without.title
    assert [figure.name for figure in without.evidence.figures][:2] == [
        "share of the recording lost to late launches",
        "launches in the recording",
    ]


def test_the_names_of_cuda_have_others_for_every_device() -> None:
    remedy = Remedy("Remove torch.cuda.synchronize().", "with torch.cuda.stream(copying):   # torch.cuda.Stream()")

    assert for_any_device("torch.cuda.synchronize() waits", remedy) == (
        "torch.accelerator.synchronize() waits",
        Remedy("Remove torch.accelerator.synchronize().", "with copying:   # torch.Stream()"),
    )
