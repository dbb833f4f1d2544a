"""Which loops can be put into one batch, by the source's loops and how often their lines were reached."""

from __future__ import annotations

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
