"""one-request: requests are generated one after the other."""

from __future__ import annotations

from stepscope.diagnosis.rules.one_request import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ModelCallFacts, ProgramFacts, WaitingFacts
from tests.simulator.serving_faults import TOKENS, one_request, unequal_batches
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    recorded,
    the_finding,
)
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


def engine(most: int = 1, *, pause: int = 0, prompts: int = 6, known: bool = True) -> Trace:
    """Calls of an engine that forms batches, of 10 us for a token and 16 us for a prompt of 7, in a step of 1 ms."""
    calls, now = [], 0
    for _ in range(prompts):
        calls.append((now, most, most, 7 * most))
        now += 16 * US
        for _ in range(4):
            calls.append((now, most, 0, most))
            now += 10 * US
        now += pause * US
    files = ("/lib/transformers/generation/continuous_batching/continuous_api.py",) if known else ("serve.py",)
    program = ProgramFacts(
        model_calls=ModelCallFacts(files=files, calls=tuple(calls)),
        waiting=(WaitingFacts(file="ask.py", line=7, function="main"),),
    )
    recording = Recording(metadata=Metadata(program=program, origin_unix_ns=0))
    recording.step(0, 1000 * US, 1)
    recording.operator(10, now, "aten::linear")
    return recording.trace()


def decoding(*batches: int, captured: int = 0) -> Trace:
    """Iterations of 10 us that decode so many requests each, and a graph that was captured before."""
    recording, now = Recording(), 0
    if captured:
        recording.annotation(0, 9, f"capture_{captured}_FULL")
    for requests in batches:
        now += 10 * US
        recording.annotation(now, 10 * US, f"execute_context_0(0)_generation_{requests}({requests})")
    return recording.trace()


FIRES: Cases = {
    "unequal batches": lambda: recorded(unequal_batches(fault=True)),
    "far below what was captured": lambda: decoding(*[8] * 8, captured=64),
    "a loop": lambda: recorded(one_request(fault=True)),
    "generate()": lambda: generations(3),
    "an engine with one": engine,
    "an engine with two": lambda: engine(2),
}
SILENT: Cases = {
    "full batches": lambda: recorded(unequal_batches(fault=False)),
    "few iterations": lambda: decoding(1, 1, 1, 32),
    "most of what was captured": lambda: decoding(*[48] * 8, captured=64),
    "a small limit": lambda: decoding(*[1] * 7, 4),
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "a batch": lambda: recorded(one_request(fault=False)),
    "batches": lambda: generations(3, requests=4),
    "one generation": lambda: generations(1),
    "an engine serves what arrives": served_alone,
    "an engine with many": lambda: engine(5),
    "the next request comes later": lambda: engine(pause=100),
    "few requests": lambda: engine(prompts=1),
}


def test_decoding_is_shared_by_the_generations() -> None:
    finding = the_finding(rule, generations(3))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["generations"] == 3
    assert figures["tokens decoded one by one"] == 12
    decoding_ns = 3 * 4 * 15 * US
    steps = 15
    assert finding.saving_ns_per_step == int(decoding_ns * (1 - 1 / 3)) // steps
    assert "model.generate(**batch" in finding.remedy.code


def test_the_loops_tokens_are_counted() -> None:
    finding = the_finding(rule, recorded(one_request(fault=True)))
    assert {name: value for name, value, *_ in figures_of(finding)}["tokens decoded one by one"] == 4 * (TOKENS - 1)


def test_an_engine_could_decode_more_requests_at_once() -> None:
    finding = the_finding(rule, engine())

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["most requests in a call of the model"] == 1
    assert (figures["prompts that were begun"], figures["requests that are assumed at once"]) == (6, 6)
    assert (figures["time of a decoding call"], figures["time that a further token adds"]) == (10 * US, US)
    assert places_of(finding) == [("ask.py", 7, "main")]
    assert "max_requests_per_batch" in finding.remedy.code


def test_batches_are_compared_with_the_largest_one() -> None:
    finding = the_finding(rule, recorded(unequal_batches(fault=True)))

    assert finding.severity == "note"
    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert (figures["the largest batch seen"], figures["most requests in such an iteration"]) == (32, 32)
    assert figures["requests in an iteration that decodes, median"] == 4
    assert figures["share of the largest batch that iterations decode on average"] == (2 * 32 + 8 * 4) / (10 * 32)
    assert figures["work of the device in an iteration with the median batch"] == 20 * 30 * US


def test_a_captured_size_is_the_limit_of_a_batch() -> None:
    figures = {name: value for name, value, *_ in figures_of(the_finding(rule, decoding(*[8] * 8, captured=64)))}
    assert figures["the largest size for which a graph was captured"] == 64
