"""one-request: requests are generated one after the other."""

from __future__ import annotations

from stepscope.diagnosis.rules.one_request import RULE as rule
from stepscope.trace import Trace
from tests.simulator.serving_faults import TOKENS, one_request
from tests.unit.diagnosis.rules.cases import US, Cases, busy_device, empty_trace, figures_of, recorded, the_finding
from tests.unit.recording import Recording


def generations(count: int, requests: int = 1, module: str = "GPT2LMHeadModel_0") -> Trace:
    """Calls of generate(), of 5 tokens each, on a processor alone."""
    recording = Recording()
    for number in range(count):
        begin = 100 * US * number
        recording.frame(begin, 90 * US, "transformers/generation/utils.py(2000): generate")
        for token in range(5):
            start = begin + 15 * US * token
            recording.frame(start, 12 * US, f"nn.Module: {module}", module=module)
            shape = [requests, 1 if token else 7]
            recording.operator(start, 10 * US, "aten::embedding", input_shapes=f"[[50257, 768], {shape}]")
    return recording.trace()


def served_alone() -> Trace:
    recording = Recording()
    for start in range(0, 600, 100):
        recording.annotation(start, 30, "step[EXTEND bs=1 toks=9]")
        recording.annotation(start + 40, 30, "step[DECODE bs=1]")
    return recording.trace()


FIRES: Cases = {
    "a loop": lambda: recorded(one_request(fault=True)),
    "generate()": lambda: generations(3),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a batch": lambda: recorded(one_request(fault=False)),
    "batches": lambda: generations(3, requests=4),
    "one generation": lambda: generations(1),
    "an engine serves what arrives": served_alone,
}


def test_decoding_is_shared_by_the_generations() -> None:
    finding = the_finding(rule, generations(3))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["generations"] == 3
    assert figures["tokens decoded one by one"] == 12
    decoding_ns = 3 * (3 * 15 + 30) * US
    steps = 15
    assert finding.saving_ns_per_step == int(decoding_ns * (1 - 1 / 3)) // steps
    assert "model.generate(**batch" in finding.remedy.code


def test_the_loops_tokens_are_counted() -> None:
    finding = the_finding(rule, recorded(one_request(fault=True)))
    assert {name: value for name, value, *_ in figures_of(finding)}["tokens decoded one by one"] == 4 * (TOKENS - 1)
