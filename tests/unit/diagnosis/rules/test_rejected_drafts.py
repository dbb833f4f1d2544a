"""rejected-drafts: speculative decoding costs more than it brings."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.rejected_drafts import RULE as rule
from stepscope.trace import Trace
from tests.simulator.programs import launch_bound_training
from tests.simulator.serving_faults import rejected_drafts
from tests.unit.diagnosis.rules.cases import (
    US,
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    recorded,
    the_finding,
)
from tests.unit.recording import Recording


def on_the_host(gained: int = 2, *, requests: int = 2) -> Trace:
    """Iterations of 30 us that check 4 tokens of each request, then 20 us of drafting, without a device."""
    recording, keys, now = Recording(), 100, 0
    for _ in range(6):
        tokens = 4 * requests
        name = f"execute_context_0(sq0sk0)_generation_{requests}(sq{tokens}sk{keys + tokens})"
        recording.annotation(now, 30 * US, name)
        recording.operator(now, 30 * US, "aten::mm")
        recording.annotation(now + 30 * US, 20 * US, "gpu_model_runner: draft")
        recording.operator(now + 30 * US, 20 * US, "aten::addmm")
        keys += gained
        now += 50 * US
    return recording.trace()


def of_transformers(accepted: int = 0, *, drafting: int = 20) -> Trace:
    """Assisted generation for one request on a processor: 3 tokens are drafted and checked with a fourth in 30 us."""
    recording, now, keys = Recording(), 0, 7
    length = drafting + 30
    recording.frame(0, 8 * length * US, "transformers/generation/utils.py(2000): generate")
    for number in range(8):
        new = 4 if number else 10
        recording.frame(now, drafting * US, "transformers/generation/candidate_generator.py(198): get_candidates")
        for index in range(3):
            at, each = now + drafting * US * index // 3, drafting * US // 3
            recording.frame(at, each, "nn.Module: Draft_1", module="Draft_1")
            recording.operator(at, each, "aten::embedding", input_shapes="[[50257, 768], [1, 1]]")
        now += drafting * US
        recording.frame(now, 30 * US, "nn.Module: Model_0", module="Model_0")
        recording.operator(now, US, "aten::embedding", input_shapes=f"[[50257, 768], [1, {new}]]")
        shapes = f"[[1, 4, {new}, 32], [1, 4, {keys + (4 if number else 3)}, 32], []]"
        recording.operator(now + 2 * US, 28 * US, "aten::scaled_dot_product_attention", input_shapes=shapes)
        now += 30 * US
        keys += accepted + 1 if number else 1
    return recording.trace()


def of_sglang(*, drafting_us: int = 30) -> Trace:
    """SGLang's ranges, which tell no lengths of requests."""
    recording, now = Recording(), 0
    for number in range(6):
        recording.annotation(now, drafting_us * US, "draft")
        recording.annotation(now + 1, 10, "step[DECODE bs=2]")
        recording.launched(now + 2, now + 3, drafting_us * US - 3, "draft_gemm", 3 * number)
        now += drafting_us * US
        recording.annotation(now, 50 * US, "step[TARGET_VERIFY bs=2]")
        recording.launched(now + 2, now + 3, 50 * US - 3, "gemm", 3 * number + 1)
        now += 50 * US
        recording.annotation(now, 5 * US, "step[DRAFT_EXTEND bs=2]")
        recording.launched(now + 2, now + 3, 5 * US - 3, "extend_gemm", 3 * number + 2)
        now += 5 * US
    return recording.trace()


FIRES: Cases = {
    "none is accepted": lambda: recorded(rejected_drafts(fault=True)),
    "drafting is not marked": lambda: recorded(rejected_drafts(fault=True, marked=False)),
    "without a device": on_the_host,
    "without ranges": of_transformers,
    "a slow draft model that is right": lambda: of_transformers(3, drafting=200),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "all are accepted": lambda: recorded(rejected_drafts(fault=True, accepted=3)),
    "nothing is drafted": lambda: recorded(rejected_drafts(fault=False)),
    "a draft model that is slow, but not clearly too slow": lambda: of_transformers(3, drafting=100),
    "without ranges, and accepted": lambda: of_transformers(2),
    "two of three are accepted": lambda: on_the_host(6),
    "requests come and go": lambda: on_the_host(9),
    "lengths are unknown": of_sglang,
    "a training": lambda: recorded(launch_bound_training()),
}


def test_drafting_is_charged_by_what_is_rejected() -> None:
    finding = the_finding(rule, recorded(rejected_drafts(fault=True)))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["share of the drafted tokens that are rejected"] == 1
    assert figures["drafted tokens of a request that an iteration checks"] == 3
    assert figures["of them accepted"] == 0
    drafting_ns, checking_ns = 3 * 60 * US, 20 * 20 * US
    assert figures["time of an iteration that checks"] == checking_ns
    assert figures["tokens that a request must gain in an iteration for drafting to pay"] == pytest.approx(
        1 + drafting_ns / checking_ns, rel=0.01
    )
    assert finding.title.endswith("decoding without drafts would be faster")
    assert "--speculative-config" in finding.remedy.code


def test_part_of_the_drafts_may_be_accepted() -> None:
    # Each of two requests gains 2 of 4 tokens: one of three drafted tokens is accepted, which pays for drafting.
    finding = the_finding(rule, on_the_host(4))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["of them accepted"] == 1
    assert figures["tokens that a request must gain in an iteration for drafting to pay"] == round(1 + 20 / 30, 2)
    assert figures["time of drafting for an iteration"] == 20 * US
    assert "faster" not in finding.title


def test_unmarked_drafting_is_a_note() -> None:
    finding = the_finding(rule, recorded(rejected_drafts(fault=True, marked=False)))
    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)


def test_unknown_lengths_are_a_question_where_drafting_takes_long() -> None:
    [question] = asked(rule, of_sglang()).not_answered
    assert "accepted" in question.question
    assert not asked(rule, of_sglang(drafting_us=1), share=0.2).not_answered


def test_functions_that_draft_are_told_from_the_models_calls() -> None:
    finding = the_finding(rule, of_transformers())

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["drafted tokens of a request that an iteration checks"] == 3
    assert figures["of them accepted"] == 0
    assert figures["time of drafting for an iteration"] == 20 * US
    assert "assistant_model" in finding.remedy.code


def test_drafting_may_take_longer_than_what_it_saves() -> None:
    # Each iteration drafts for 210 us and checks for 30; 4 tokens alone would take 120.
    finding = the_finding(rule, of_transformers(3, drafting=210))

    figures = {name: value for name, value, *_ in figures_of(finding)}
    assert figures["share of the drafted tokens that are rejected"] == 0
    assert figures["tokens that a request must gain in an iteration for drafting to pay"] == 8
    assert "would be faster" in finding.title
    assert finding.saving_ns_per_step == pytest.approx(120 * US, rel=0.15)
