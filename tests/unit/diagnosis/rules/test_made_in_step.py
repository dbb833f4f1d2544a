"""made-in-step: models and the like that are made anew in each step."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.made_in_step import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import MadeFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, places_of, the_finding
from tests.unit.recording import Recording

MODEL = MadeFacts(kind="module", name="Net", file="serve.py", line=10, function="load", calls=1, ns=120)


def serving(*made: MadeFacts, steps: int = 3) -> Trace:
    """Requests of 1000 ns from the model's call on: it is called on line 17 for 200 ns; then line 16 calls load() for
    500 ns, which makes a model on line 10 and reads its parameters on line 11.
    """
    recording = Recording(Metadata(program=ProgramFacts(made=made)))
    for step in range(steps):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.module(begin, 180, "Net", evaluates=True)
        recording.operator(begin + 10, 100, "aten::linear")
        for start, length, name in (
            (0, 200, "serve.py(17): handle"),
            (200, 50, "serve.py(18): handle"),
            (250, 20, "serve.py(25): main"),
            (270, 180, "serve.py(24): main"),
            (450, 20, "serve.py(25): main"),
            (470, 30, "serve.py(16): handle"),
            (500, 150, "serve.py(10): load"),
            (650, 300, "serve.py(11): load"),
            (950, 20, "serve.py(16): handle"),
            (970, 30, "serve.py(17): handle"),
        ):
            recording.line(begin + start, length, name)
        recording.operator(begin + 510, 100, "aten::normal_")
        recording.operator(begin + 700, 200, "aten::copy_")
    return recording.trace()


POOL = MadeFacts(kind="pool", name="ThreadPoolExecutor", file="serve.py", line=11, function="load", calls=1, ns=90)

FIRES: Cases = {"a model": lambda: serving(MODEL), "a pool": lambda: serving(POOL)}
SILENT: Cases = {
    "nothing": empty_trace,
    "a busy device": busy_device,
    "a model that was made before": serving,
    "a small module that a library makes in a line which does more": lambda: serving(
        MadeFacts(kind="module", name="Loss", file="serve.py", line=10, function="load", calls=1, ns=12)
    ),
    "something that costs nothing": lambda: serving(MadeFacts(kind="pool", name="Pool", file="serve.py", line=10,
                                                              function="load", calls=1, ns=2)),
}  # fmt: skip


def test_the_line_that_makes_a_model_is_the_outermost_that_does_not_use_it() -> None:
    finding = the_finding(rule, serving(MODEL))

    assert places_of(finding) == [("serve.py", 16, "handle"), ("serve.py", 10, "load")]
    assert finding.saving_ns_per_step == pytest.approx(500, abs=1)


def test_of_a_pool_the_constructor_counts() -> None:
    finding = the_finding(rule, serving(POOL))

    assert places_of(finding) == [("serve.py", 11, "load")]
    assert finding.saving_ns_per_step == pytest.approx(90, abs=2)
    assert not asked(rule, serving(POOL), share=0.1).findings
