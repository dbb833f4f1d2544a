"""prefill-stall: prompts stop the requests that are being decoded."""

from __future__ import annotations

from stepscope.diagnosis.rules.prefill_stall import RULE as rule
from stepscope.trace import Trace
from tests.simulator.serving_faults import prefill_stall
from tests.unit.diagnosis.rules.cases import US, Cases, busy_device, empty_trace, figures_of, recorded, the_finding
from tests.unit.recording import Recording


def iterations(*marks: tuple[int, str]) -> Trace:
    """Iterations one after the other, of these microseconds."""
    recording, now = Recording(), 0
    for length, name in marks:
        recording.annotation(now * US, length * US, f"step[{name}]")
        now += length
    return recording.trace()


DECODES = [(10, "DECODE bs=4")] * 4

FIRES: Cases = {
    "a long prompt": lambda: recorded(prefill_stall(fault=True)),
    "a large piece": lambda: iterations(*DECODES, (200, "MIXED bs=5 toks=8000"), *DECODES),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "in pieces": lambda: recorded(prefill_stall(fault=False)),
    "nobody waits": lambda: iterations(*DECODES, (200, "EXTEND bs=4 toks=8000"), *DECODES),
    "a short prompt": lambda: iterations(*DECODES, (8, "EXTEND bs=1 toks=90"), *[(10, "DECODE bs=5")] * 4),
    "too few tokens to know what is usual": lambda: iterations(
        (10, "DECODE bs=4"), (200, "EXTEND bs=1 toks=8000"), (10, "DECODE bs=5")
    ),
}


def test_the_longest_token_is_told_beside_the_usual_one() -> None:
    trace = iterations(*DECODES, (200, "EXTEND bs=1 toks=8000"), *[(10, "DECODE bs=5")] * 4)
    finding = the_finding(rule, trace)

    assert figures_of(finding) == [
        ("times that tokens waited for prompts", 1, "count", None),
        ("longest time from a token to the next", 210 * US, "ns", 30 * US),
        ("usual time from a token to the next", 10 * US, "ns", None),
        ("share of the decoding time by which tokens come late", 200 / 270, "share", 0.05),
        ("tokens of prompts and others in the longest", 8000, "count", None),
    ]
    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert "--chunked-prefill-size" in finding.remedy.code
