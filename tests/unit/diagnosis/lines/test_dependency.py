"""Which loops can be put into one batch, by the source's loops and how often their lines were reached."""

from __future__ import annotations

from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.rules.loop_in_step import RULE as LOOP
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import LoopFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import asked, the_finding
from tests.unit.recording import Recording


def nested(turns: int, *, inner: tuple[str, ...] = (), outer: tuple[str, ...] = ()) -> Trace:
    """Two operators on line 6, inside 12 repetitions of line 5 that also call line 20, inside so many of line 3."""
    loops = (
        LoopFacts(file="train.py", line=3, first=4, last=6, carried=outer),
        LoopFacts(file="train.py", line=4, first=5, last=6, carried=inner),
    )
    recording, now = Recording(Metadata(program=ProgramFacts(loops=loops))), 0
    recording.step(0, 40 * 12 * turns + 40, 1)
    for turn in range(turns):
        recording.line(now, 5, "train.py(3): collect")
        for number in range(12):
            begin = now + 40 * number
            recording.line(begin + 5, 5, "train.py(4): collect")
            recording.line(begin + 10, 5, "train.py(5): collect")
            recording.line(begin + 15, 5, "train.py(20): step")
            recording.line(begin + 20, 5, "train.py(5): collect")
            recording.line(begin + 25, 15, "train.py(6): collect")
            recording.operator(begin + 26, 6, "aten::mul")
            recording.operator(begin + 33, 5, "aten::add")
        now += 40 * 12
        recording.line(now, 4 if turn < turns - 1 else 40, "train.py(4): collect")
        now += 5
    return recording.trace()


def test_a_loop_that_calls_functions_is_told_apart_from_the_one_around_it() -> None:
    assert not asked(LOOP, nested(3, inner=("h",), outer=("h",))).findings

    finding = the_finding(LOOP, nested(3, outer=("states",)))
    share_left = next(each.value for each in finding.evidence.figures if "at once" in each.name)
    cost = finding.saving_ns_per_step / (1 - share_left) / (33 / 36)

    assert finding.where[0].line == 6
    assert 36 * 11 <= round(cost) <= 36 * 40  # the operators, and the time between them


def served(
    *, carried: tuple[str, ...] = (), first: int = 1, comprehension: bool = False, learns: bool = False
) -> Trace:
    """In 4000 ns eight calls of a model by one line of a loop, 400 ns each, of which the products take 100 ns.

    Args:
        first: first dimension of each call's input.
        learns: each repetition ends with a backward pass.
    """
    loop = LoopFacts(
        file="serve.py",
        line=3,
        first=3 if comprehension else 4,
        last=5,
        carried=carried,
        is_comprehension=comprehension,
    )
    recording = Recording(Metadata(program=ProgramFacts(loops=(loop,))))
    recording.step(0, 4000, 1)
    recording.line(0, 50, "serve.py(2): serve")
    for number in range(8):
        now = 50 + 450 * number
        recording.line(now, 20, "serve.py(3): serve")
        recording.line(now + 20, 10, "serve.py(4): serve")
        recording.line(now + 30, 380, "serve.py(20): embed")
        recording.line(now + 410, 20, "serve.py(4): serve")
        recording.line(now + 430, 20, "serve.py(5): serve")
        recording.module(now + 40, 360, "Encoder")
        recording.operator(
            now + 60, 100, "aten::linear", input_shapes=f"[[{first}, 8, 8], [8, 8], [8]]", sequence_number=number
        )
        # No short sequence of operators repeats itself.
        for place in range(number):
            recording.operator(now + 200 + 10 * place, 5, f"aten::other_{number}")
        if learns:
            recording.operator(now + 412, 10, "AddmmBackward0", sequence_number=number, forward_thread=1)
    recording.line(3650, 350, "serve.py(6): serve")
    return recording.trace()


def repetitions_of(finding: Finding) -> float:
    return next(each.value for each in finding.evidence.figures if each.name == "repetitions per step")


def test_a_model_called_on_one_sample_after_another_wants_a_batch() -> None:
    finding = the_finding(LOOP, served())

    share_left = next(each.value for each in finding.evidence.figures if "at once" in each.name)
    assert finding.where[0].line == 4
    assert repetitions_of(finding) == 8
    # Line 4 with what it calls takes 410 ns each time; the products remain, and of the rest one repetition.
    assert finding.saving_ns_per_step == round(8 * 410 * (1 - share_left)) * 7 // 8
    assert 0.2 < share_left < 0.3


def test_a_comprehension_is_a_loop_too() -> None:
    assert repetitions_of(the_finding(LOOP, served(comprehension=True))) == 8


def test_calls_on_batches_or_on_earlier_results_or_with_a_backward_pass_each_are_left_alone() -> None:
    for trace in (served(first=2), served(carried=("state",)), served(learns=True)):
        assert not asked(LOOP, trace).findings


def chosen_by_row(*, comprehension: bool) -> Trace:
    """Of 40 rows each is chosen by `argmax` in a comprehension, or on a line outside of loops."""
    loops = (LoopFacts(file="train.py", line=3, first=3, last=3, is_comprehension=True),) if comprehension else ()
    recording = Recording(Metadata(program=ProgramFacts(loops=loops)))
    recording.step(0, 2000, 1)
    recording.line(0, 2000, "train.py(3): choose")
    for number in range(40):
        recording.operator(40 * number + 5, 10, "aten::select", input_values=f'["", "0", "{number}"]')
        recording.operator(40 * number + 20, 15, "aten::argmax")
    return recording.trace()


def test_what_is_chosen_in_a_comprehension_is_no_later_rows_input() -> None:
    assert the_finding(LOOP, chosen_by_row(comprehension=True)).saving_ns_per_step > 0
    assert not asked(LOOP, chosen_by_row(comprehension=False)).findings
