"""slow-input-function: one function makes batches slow, and workers would not hide it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.rules.slow_input_function import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import (
    FunctionFacts,
    InputStageFacts,
    ListFacts,
    ProgramFacts,
    ValueFacts,
    WorkFacts,
)
from tests.unit.diagnosis.rules import loaders
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.diagnosis.rules.loaders import ALONE, MS, facts, loading
from tests.unit.recording import Recording


def slow_collate(processors: int = 2) -> Trace:
    """A batch takes 180 ms, of which the collate function takes 150, before a computation of 60 ms."""
    return loading(180, facts(processors=processors, item_ms=30, collate_ms=150, busy_ms=240)).trace()


def with_workers() -> Trace:
    """Two workers on two processors make a batch in 200 ms, 160 of them in the transform."""
    program = facts(workers=2, processors=2, item_ms=200, transform_ms=160, busy_ms=60)
    return loading(70, program, workers=True).trace()


def by_frames() -> Trace:
    """Two steps of 100 ns, of which a loader without workers takes 80, and 60 of those one of its functions."""
    recording = loading([0, 0], compute_ms=0)
    for begin in (0, 100):
        recording.step(begin, 100, begin)
        recording.annotation(begin, 80, ALONE)
        recording.frame(begin + 1, 78, "torch/utils/data/_utils/fetch.py(25): fetch")
        recording.frame(begin + 2, 60, "data.py(30): join")
        recording.operator(begin + 85, 15, "aten::mm")
    return recording.trace()


FIRES: Cases = {
    "collate, and no processors for workers": slow_collate,
    "a transform in workers": with_workers,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "workers would hide it": lambda: slow_collate(8),
    "without knowing the processors workers are the remedy": by_frames,
    "no function is known": lambda: loading(180).trace(),
    "the workers that are there make batches fast enough": lambda: loading(
        [200, 1, 1, 1], facts(workers=2, processors=4, item_ms=80, busy_ms=60), workers=True
    ).trace(),
    "loading is quick": lambda: loading(2, facts(processors=2, item_ms=2)).trace(),
}


def test_the_collate_function_and_what_the_step_loses_to_it() -> None:
    finding = the_finding(rule, slow_collate())

    assert finding.title == (
        "the collate function join takes 83% of the time to make a batch, for which the step waits 75% of its time"
    )
    assert finding.saving_ns_per_step == pytest.approx((150 - 8 * 0.01) * MS)  # of 240 ms, but for 10 us a sample
    assert figures_of(finding) == [
        ("share of the step lost to waiting for this function", pytest.approx(149.92 / 240), "share", 0.05),
        ("share of the step waiting for data", 0.75, "share", None),
        ("share of the time to make a batch", 150 / 180, "share", 0.5),
        ("time of one call", 150 * MS, "ns", None),
        ("calls per batch", 1.0, "count", None),
        ("worker processes", 0, "count", None),
        ("processors the program may use", 2, "count", None),
        ("time to make a batch", 180 * MS, "ns", None),
    ]
    assert places_of(finding) == [("train.py", 7, "main")]  # the line at which the process was
    assert "torch.stack(inputs)" in finding.remedy.code


def test_in_workers_the_waits_that_remain_are_not_saved() -> None:
    finding = the_finding(rule, with_workers())

    # A step of 130 ms; without the transform a batch takes 40 ms, or 20 with two workers, and the computation 60.
    assert finding.saving_ns_per_step == 70 * MS
    assert finding.title.startswith("the transform Blur.__call__ takes 80% of the time to make a batch")
    assert places_of(finding) == [("data.py", 20, "__call__")]
    assert "self.cache[index] = self.__call__(index)" in finding.remedy.code


def test_it_takes_the_place_of_the_general_finding() -> None:
    rules = [finding.rule for finding in diagnose(slow_collate()).findings]

    assert "slow-input-function" in rules
    assert "input-bound" not in rules


def test_the_threshold_decides() -> None:
    assert asked(rule, slow_collate(), share=0.62).findings
    assert asked(rule, slow_collate(), share=0.63).findings == ()


def read_in_source(*works: WorkFacts, functions: tuple[FunctionFacts, ...] = (), **more: Any) -> ProgramFacts:
    """A data set in data.py whose `__getitem__` ends at line 19, and calls `clean` of line 40."""
    known = (
        FunctionFacts(file="data.py", name="Images.__getitem__", line=10, last=19, calls=("clean",)),
        FunctionFacts(file="data.py", name="clean", line=40, last=45),
        FunctionFacts(file="train.py", name="main", line=1, last=20),
        *functions,
    )
    facts_ = facts(processors=8, item_ms=180, batches_of_an_epoch=20)
    return msgspec.structs.replace(facts_, functions=known, works=works, **more)


def by_lines(program: ProgramFacts, *lines: tuple[int, float], function: str = "__getitem__") -> Trace:
    """Steps of 200 ms, 180 of them for a batch, so many milliseconds a line; those from 100 on are of tables.py."""
    recording = Recording(metadata=Metadata(program=program))
    for number in range(4):
        begin = number * 200 * MS
        recording.step(begin, 200 * MS, number)
        recording.annotation(begin, 180 * MS, ALONE)
        recording.line(begin, 1 * MS, "train.py(7): main")
        at = begin + 1 * MS
        for line, ms in lines:
            recording.line(
                at, int(ms * MS), f"data.py({line}): {function}" if line < 100 else f"tables.py({line}): build"
            )
            at += int(ms * MS)
        recording.line(at, begin + 200 * MS - at, "train.py(8): main")
        recording.operator(begin + 180 * MS, 20 * MS, "aten::mm")
    return recording.trace()


def work(
    kind: str, first: int, last: int, name: str = "", function: int = 10, calls: tuple[str, ...] = ()
) -> WorkFacts:
    return WorkFacts(file="data.py", function=function, kind=kind, name=name, first=first, last=last, calls=calls)


LINES = ((12, 9), (13, 90), (15, 72))
"""13 takes half of a batch's 180 ms, 15 takes 40 %, 12 takes 5 %."""
WORKS = {
    "a constant": (work("constant", 13, 13, "mean"), "mean", 0.5, 90),
    "a table's row": (work("row", 13, 13, "self.frame"), "self.frame", 0.5, 85.5),
    "a list": (work("lookup", 13, 13, "self.words"), "self.words", 0.5, 85.5),
    "slices": (work("growing", 13, 13, "x"), "x", 0.5, 85.5),
    "a mask": (work("masked", 13, 13, "self.table"), "self.table", 0.5, 85.5),
    "a draw": (work("shuffled", 13, 13), "", 0.5, 81),
    "a weighted draw": (work("weighted", 13, 13, "self.chances"), "self.chances", 0.5, 81),
    "a conversion": (work("converted", 13, 13, "self.rows"), "self.rows", 0.5, 85.5),
    "a loop": (work("loop", 12, 15), "", 0.95, 153.9),
}


@pytest.mark.parametrize("name", WORKS)
def test_the_line_in_the_function_and_the_kind_of_its_work(name: str) -> None:
    """Although workers would hide it: eight processors are there."""
    fact, called, share, saved_ms = WORKS[name]

    lines = [(line, ms / 72) for line, ms in LINES] * 72
    finding = the_finding(
        rule,
        by_lines(read_in_source(fact), *lines),
    )

    assert places_of(finding)[0] == ("data.py", 13, "__getitem__")
    assert ("share of the time to make a batch", pytest.approx(share, rel=1e-4), "share") in [
        each[:3] for each in figures_of(finding)
    ]
    assert finding.saving_ns_per_step == pytest.approx(saved_ms * MS, rel=1e-4)
    assert (finding.saving_from, finding.confidence) == ("replayed", "medium")
    assert called in finding.remedy.text
    assert "num_workers" in finding.remedy.text


def test_what_a_constant_calls_belongs_to_it() -> None:
    program = read_in_source(work("constant", 12, 12, "table", calls=("clean",)))

    finding = the_finding(rule, by_lines(program, (12, 9), (42, 90), (15, 72)))

    assert places_of(finding)[:2] == [("data.py", 12, "__getitem__"), ("data.py", 42, "clean")]
    assert finding.saving_ns_per_step == 99 * MS


def test_a_value_whose_hashes_differ_is_no_constant() -> None:
    values = (ValueFacts(file="data.py", function="__getitem__", line=10, last=19, name="x", calls=8, distinct=8),)
    program = read_in_source(work("constant", 13, 13, "x"), values=values)

    assert asked(rule, by_lines(program, *LINES)).findings == ()


def test_in_workers_the_source_alone_tells_the_kind_of_work() -> None:
    program = facts(workers=2, processors=2, item_ms=200, transform_ms=160, busy_ms=60)
    blur = FunctionFacts(file="data.py", name="Blur.__call__", line=20, last=29)
    loop = WorkFacts(file="data.py", function=20, kind="loop", first=22, last=25)
    program = msgspec.structs.replace(program, functions=(blur,), works=(loop,))

    finding = the_finding(rule, loading(70, program, workers=True).trace())

    assert places_of(finding) == [("data.py", 22, "__call__"), ("data.py", 20, "__call__")]
    assert "whole arrays" in finding.remedy.text
    assert finding.saving_ns_per_step == 70 * MS


def test_a_loop_in_a_worker_is_named_although_more_workers_would_hide_it() -> None:
    program = facts(workers=1, processors=8, item_ms=200, transform_ms=160, busy_ms=60)
    blur = FunctionFacts(file="data.py", name="Blur.__call__", line=20, last=29)
    loop = WorkFacts(file="data.py", function=20, kind="loop", first=22, last=25)
    known = msgspec.structs.replace(program, functions=(blur,), works=(loop,))

    assert asked(rule, loading(70, program, workers=True).trace()).findings == ()
    assert places_of(the_finding(rule, loading(70, known, workers=True).trace()))[0] == ("data.py", 22, "__call__")


def test_a_constructor_that_makes_the_same_calls_is_not_blamed() -> None:
    """No line of `__init__` runs in the steps, but it calls what `__getitem__` does."""
    program = read_in_source(
        work("loop", 6, 6, function=5, calls=("clean",)),
        work("loop", 42, 45, function=40),
        functions=(FunctionFacts(file="data.py", name="Images.__init__", line=5, last=8, calls=("clean",)),),
    )
    finding = the_finding(rule, by_lines(program, *[(12, 0.125), (43, 2.25)] * 72))

    assert places_of(finding)[0] == ("data.py", 43, "clean")


def test_functions_of_other_files_belong_to_what_calls_them() -> None:
    program = read_in_source(
        work("constant", 12, 12, "table", calls=(".build",)),
        functions=(FunctionFacts(file="tables.py", name="build", line=101, last=109),),
    )
    finding = the_finding(rule, by_lines(program, (12, 9), (103, 81)))

    assert places_of(finding)[:2] == [("data.py", 12, "__getitem__"), ("tables.py", 103, "build")]


def test_a_function_noted_as_a_whole_is_spread_over_its_sampled_lines() -> None:
    program = read_in_source(work("lookup", 13, 13, "self.words"))

    finding = the_finding(rule, by_lines(program, (10, 90), (13, 60), (15, 20)))

    assert ("share of the time to make a batch", pytest.approx(127.5 / 180), "share", 0.3) in figures_of(finding)
    assert finding.saving_ns_per_step == pytest.approx(0.95 * 127.5 * MS, rel=1e-6)


def test_equal_values_are_the_first_evidence() -> None:
    values = (
        ValueFacts(file="data.py", function="clean", line=40, last=45, calls=8, distinct=1, is_constant=True),
        ValueFacts(file="data.py", function="other", line=50, last=55, calls=8, distinct=8),
    )
    program = read_in_source(work("loop", 42, 43, function=40), values=values)

    finding = the_finding(rule, by_lines(program, (12, 9), (42, 90), (15, 72)))

    assert finding.title.startswith("clean() has one value in 8 calls a step")
    assert finding.saving_ns_per_step == 90 * MS


def test_steps_that_repeat_the_same_samples_compute_nothing_again() -> None:
    """Where each sample of a step has another value, as in a recording of one batch that is loaded again and again."""
    values = (
        ValueFacts(file="data.py", function="clean", line=40, last=45, calls=8, distinct=8, is_constant=True),
        ValueFacts(file="data.py", function="other", line=50, last=55, calls=8, distinct=8),
    )

    assert asked(rule, by_lines(read_in_source(values=values), (12, 9), (42, 162))).findings == ()


def test_a_list_that_the_recorder_saw_is_told_with_its_length() -> None:
    lists = (ListFacts(file="data.py", function=10, name="words", length=3_000),)
    program = read_in_source(work("maybe_lookup", 13, 13, "words"), lists=lists)

    finding = the_finding(rule, by_lines(program, *LINES))

    assert ("entries of the list", 3_000, "count", None) in figures_of(finding)


def test_the_sampler_is_told_by_its_own_name_and_never_hidden_by_workers() -> None:
    sampler = InputStageFacts(
        stage="sampler", name="ByLength.__iter__", file="data.py", line=60, calls=4, total_ns=4 * 150 * MS
    )
    program = facts(processors=8, item_ms=30)
    stages = (*program.input_stages, sampler)
    functions = (FunctionFacts(file="data.py", name="ByLength.__iter__", line=60, last=70, changes_by_itself=True),)
    program = msgspec.structs.replace(program, input_stages=stages, functions=functions)

    finding = the_finding(rule, by_lines(program, (62, 150), (12, 29), function="__iter__"))

    assert finding.title.startswith("the sampler ByLength.__iter__ takes 83% of the time to make a batch")
    assert places_of(finding)[0] == ("data.py", 62, "__iter__")
    assert finding.saving_ns_per_step == pytest.approx(150 * MS)


def in_one_line(*, alone: bool) -> Trace:
    """Half of a batch's time is at a line with a comprehension, in it or in an operator that takes its list."""
    recording = Recording(metadata=Metadata(program=read_in_source(work("loop", 13, 13))))
    for number in range(4):
        begin = number * 200 * MS
        recording.step(begin, 200 * MS, number)
        recording.annotation(begin, 180 * MS, ALONE)
        recording.line(begin, 1 * MS, "train.py(7): main")
        recording.line(begin + 1 * MS, 150 * MS if alone else 10 * MS, "data.py(13): <listcomp>")
        rest = begin + (151 if alone else 11) * MS
        recording.line(rest, begin + 180 * MS - rest, "data.py(13): __getitem__")
        recording.operator(rest, begin + 180 * MS - rest, "aten::stack")
        recording.line(begin + 180 * MS, 20 * MS, "train.py(8): main")
        recording.operator(begin + 180 * MS, 20 * MS, "aten::mm")
    return recording.trace()


def test_a_comprehension_counts_by_its_own_time() -> None:
    assert places_of(the_finding(rule, in_one_line(alone=True)))[0] == ("data.py", 13, "__getitem__")
    assert asked(rule, in_one_line(alone=False)).findings == ()


OTHERS: Cases = {
    "a loop over the samples of a batch": lambda: by_lines(
        read_in_source(work("loop", 12, 15)), *[(12, 9), *[(13, 10), (15, 10)] * 8]
    ),
    "work of a part that takes little": lambda: by_lines(read_in_source(work("lookup", 12, 12, "x")), *LINES),
    "what may be no list": lambda: by_lines(read_in_source(work("maybe_lookup", 13, 13, "x")), *LINES),
    "the loop over batches": lambda: by_lines(
        read_in_source(WorkFacts(file="train.py", function=1, kind="loop", first=5, last=20)), *LINES
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_else_workers_are_the_remedy(name: str) -> None:
    assert asked(rule, OTHERS[name]()).findings == ()


@pytest.mark.parametrize(("draws", "transform"), [(False, True), (True, True), (False, False)])
def test_small_samples_that_never_change_are_made_once(draws: bool, transform: bool) -> None:
    """1000 samples of 60 us a batch, which no worker can make while a step computes on all processors."""
    facts_ = facts(processors=1, item_ms=60, transform_ms=40 if transform else 0, busy_ms=80)
    stages = tuple(
        msgspec.structs.replace(each, calls=each.calls * 125) if each.stage != "collate" else each
        for each in facts_.input_stages
    )
    functions = (
        FunctionFacts(file="data.py", name="Images.__getitem__", line=10, last=19, calls=("Images.transform",)),
        FunctionFacts(file="data.py", name="Blur.__call__", line=20, last=29, changes_by_itself=draws),
    )
    program = msgspec.structs.replace(facts_, input_stages=stages, functions=functions)
    lines = ("data.py(12): __getitem__", 20), ("data.py(22): __call__", 40)
    recording = loaders.by_lines(program, *lines, compute_ms=20)

    told = [each for each in asked(rule, recording.trace()).findings if "each sample anew" in each.title]

    assert bool(told) is (transform and not draws)
    assert all(each.saving_ns_per_step == 54 * MS and "split(batch_size)" in each.remedy.code for each in told)


def test_a_loop_whose_function_asks_for_the_batches_is_no_work_of_a_batch() -> None:
    """A comprehension of line 5 asks a generator for batches, where the loader's time passes."""
    program = read_in_source(
        WorkFacts(file="train.py", function=1, kind="loop", first=5, last=5, calls=("batches_of",)),
        functions=(FunctionFacts(file="train.py", name="batches_of", line=30, last=35),),
    )
    lines = ("train.py(32): batches_of", 180)
    recording = loaders.by_lines(program, lines, compute_ms=20, main="train.py(5): main")

    assert not any("Python loop" in each.title for each in asked(rule, recording.trace()).findings)
