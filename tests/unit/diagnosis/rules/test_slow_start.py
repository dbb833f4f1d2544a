"""slow-start: the program takes long to its first step."""

from __future__ import annotations

from stepscope.diagnosis.rules.slow_start import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import CompilationFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.diagnosis.rules.host_steps import counted

S = 1_000_000_000


def starting(first: int = 90 * S, *, compiling: int = 0) -> Trace:
    """The process starts 100 s before the trace does, which is 1 ms after 1970."""
    start = {"torch_imported_ns": 4 * S, "first_step_ns": first, "recording_ns": 100 * S}
    compilations = tuple(
        CompilationFacts(
            function="forward", file="model.py", line=12, start_unix_ns=1_000_000 - 50 * S, duration_ns=compiling
        )
        for _ in range(1 if compiling else 0)
    )
    return counted(start=start, compilations=compilations)


FIRES: Cases = {"slow": starting, "compiling": lambda: starting(compiling=40 * S)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "soon": lambda: starting(60 * S - 1),
    "not known": counted,
}


def test_the_start_is_a_note() -> None:
    finding = the_finding(rule, starting())

    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert finding.title == "the first step ended after 90 s"
    assert figures_of(finding) == [
        ("time to the first step", 90 * S, "ns", 60 * S),
        ("one step", 1000, "ns", None),
        ("until torch was imported", 4 * S, "ns", None),
    ]
    assert finding.where == ()


def test_the_compiler_is_named() -> None:
    finding = the_finding(rule, starting(compiling=40 * S))

    assert finding.title == "the first step ended after 90 s, 40 s of them compiling"
    assert figures_of(finding)[-1] == ("of it compiling", 40 * S, "ns", None)
    assert places_of(finding) == [("model.py", 12, "forward")]
    assert "TORCHINDUCTOR_CACHE_DIR" in finding.remedy.code


def test_a_compilation_that_is_a_small_part_is_not_blamed() -> None:
    finding = the_finding(rule, starting(compiling=20 * S))

    assert finding.where == ()
    assert finding.remedy.code.startswith("python -X importtime")


def test_the_thresholds_decide() -> None:
    assert len(asked(rule, starting(60 * S)).findings) == 1
    assert asked(rule, starting(), start=91e9).findings == ()
    assert asked(rule, starting(), steps=90 * S).findings == ()


def test_less_than_a_second_of_compiling_is_not_worth_a_clause() -> None:
    assert the_finding(rule, starting(compiling=S // 10)).title == "the first step ended after 90 s"
