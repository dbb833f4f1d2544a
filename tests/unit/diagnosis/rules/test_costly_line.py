"""costly-line: a line does work that can be avoided."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.diagnosis import diagnose
from stepscope.diagnosis.rules.costly_line import RULE as rule
from stepscope.diagnosis.rules.loop_in_step import RULE as LOOP
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import (
    BackwardFacts,
    BindingFacts,
    ConstantFacts,
    LoopFacts,
    OperationFacts,
    ProgramFacts,
    SparseFacts,
    StepFacts,
    ValueFacts,
)
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, places_of, the_finding
from tests.unit.recording import Recording

NODE = "autograd::engine::evaluate_function: MulBackward0"
GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def run_backward(times: int, *, inner_number: int | None = None, steps: int = 2) -> Trace:
    """Steps of 1000 ns: a product of 100 ns, whose node of 100 ns runs so many times on line 9, each time before 20 ns
    of accumulated gradient.
    """
    recording = Recording()
    for step in range(steps):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 150, "train.py(8): train")
        recording.line(begin + 150, 850, "train.py(9): train")
        recording.operator(begin + 10, 100, "aten::mul", sequence_number=step, forward_thread=0)
        for run in range(times):
            now = begin + 150 + 130 * run
            recording.operator(now, 100, NODE, sequence_number=step, forward_thread=1)
            recording.operator(now + 10, 50, "aten::mul", sequence_number=inner_number, forward_thread=0)
            recording.operator(now + 100, 20, GRADIENT)
        recording.operator(begin + 150 + 130 * times, 20, "aten::add")
    return recording.trace()


def validating(*, with_graph: bool = True, is_used: bool = False, steps: int = 2) -> Trace:
    """Steps of 1000 ns: a call of a model that is trained, and one of 400 ns on line 20 that evaluates it."""
    facts = [StepFacts(index=step, duration_ns=1000, thread_system_ns=400) for step in range(steps)]
    recording = Recording(Metadata(program=ProgramFacts(steps=tuple(facts))))
    for step in range(steps):
        begin, number = 1000 * step, 10 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 400, "train.py(8): train")
        recording.line(begin + 400, 600, "train.py(20): evaluate")
        recording.module(begin + 10, 100, "Net")
        recording.operator(begin + 20, 50, "aten::mul", sequence_number=number, forward_thread=0)
        recording.operator(begin + 150, 100, NODE, sequence_number=number, forward_thread=1)
        recording.module(begin + 410, 400, "Net")
        evaluated = {"sequence_number": number + 1, "forward_thread": 0} if with_graph else {}
        recording.operator(begin + 420, 300, "aten::mul", **evaluated)
        recording.allocation(begin + 430, 4096)
        if is_used:
            recording.operator(begin + 850, 50, NODE, sequence_number=number + 1, forward_thread=1)
        recording.operator(begin + 950, 10, "aten::add", sequence_number=number + 2, forward_thread=0)
    return recording.trace()


def decoding(calls: int = 10, *, grows: bool = True, steps: int = 2) -> Trace:
    """Steps of 10,000 ns: calls of a model, each with one position more and 50 ns longer than the one before."""
    recording = Recording()
    for step in range(steps):
        begin = 10_000 * step
        recording.step(begin, 10_000, step)
        recording.line(begin, 10_000, "serve.py(30): generate")
        for call in range(calls):
            length, now = (10 + call if grows else 10), begin + 10 + 900 * call
            recording.module(now, 300 + 50 * call, "Decoder")
            shapes = f"[[4, {length}, 8], [8, 8], [8]]"
            recording.operator(now + 5, 200 + 50 * call, "aten::linear", input_shapes=shapes)
            recording.operator(now + 220 + 50 * call, 20, "aten::argmax")
    return recording.trace()


def with_a_window(*, carried: tuple[str, ...] = ("tokens",), chosen: int = 2, calls: int = 10) -> Trace:
    """Two steps of 10,000 ns: a loop of calls of 600 ns for 2 sequences of 20 tokens, after each of which so many rows
    are chosen from.
    """
    loop = LoopFacts(file="serve.py", line=30, first=31, last=32, carried=carried)
    recording = Recording(Metadata(program=ProgramFacts(loops=(loop,))))
    for step in (0, 1):
        recording.step(10_000 * step, 10_000, step)
        recording.line(10_000 * step, 10, "serve.py(30): generate")
        for call in range(calls):
            now = 10_000 * step + 10 + 900 * call
            recording.line(now, 700, "serve.py(31): generate")
            recording.line(now + 700, 190, "serve.py(32): generate")
            recording.line(now + 890, 10, "serve.py(30): generate")
            recording.module(now, 650, "Decoder")
            recording.operator(now + 5, 20, "aten::embedding", input_shapes="[[99, 8], [2, 20], []]")
            recording.operator(now + 40, 600, "aten::linear", input_shapes="[[2, 20, 8], [8, 8], [8]]")
            recording.operator(now + 720, 20, "aten::argmax", input_shapes=f"[[{chosen}, 99], []]")
    return recording.trace()


def by_broadcasting(
    *,
    last: str = "[[64, 32, 16], [], [], []]",
    name: str = "aten::mul",
    inputs: str = "[[64, 1, 16], [1, 32, 16]]",
    dimensions: str | None = None,
    expanded: tuple[str, ...] = (),
) -> Trace:
    """In 1000 ns a product or difference of (64, 1, 16) and (1, 32, 16) of 400 ns, and its sum of 200 ns.

    Args:
        expanded: shapes of tensors that are expanded before.
    """
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(7): scores")
    recording.operator(5, 20, "aten::mm", input_shapes="[[64, 16], [16, 32]]")
    for number in range(4):
        recording.operator(30 + 3 * number, 2, "aten::add", input_shapes="[[2], [2]]")
    for number, shapes in enumerate(expanded):
        recording.operator(44 + 2 * number, 1, "aten::expand", input_shapes=shapes)
    recording.operator(50, 400, name, input_shapes=inputs)
    values = None if dimensions is None else f'["", "{dimensions}", "False", ""]'
    recording.operator(480, 200, "aten::sum", input_shapes=last, input_values=values)
    return recording.trace()


OUTER = {"inputs": "[[6, 16, 64, 1], [6, 16, 1, 32]]", "last": "[[6, 16, 64, 32], [], [], []]"}
"""Outer products of 16 pairs of vectors."""


def averaging(tensors: int = 12, *, name: str = "aten::mul", shapes: int = 4, steps: int = 1) -> Trace:
    """In 10,000 ns two operators on each of so many tensors, of so many different shapes."""
    recording = Recording()
    for step in range(steps):
        begin = 10_000 * step
        recording.step(begin, 10_000, step)
        recording.frame(begin, 10_000, "train.py(40): average")
        for number in range(tensors):
            shape = f"[[{8 + number % shapes}, 8], []]"
            recording.operator(begin + 200 * number, 80, name, input_shapes=shape)
            recording.operator(begin + 200 * number + 100, 80, "aten::add", input_shapes=shape)
    return recording.trace()


FIRES: Cases = {
    "a graph run backward again": lambda: run_backward(3),
    "a graph that nothing runs backward": validating,
    "a prefix computed again": decoding,
    "a window computed again": with_a_window,
    "a product by broadcasting": by_broadcasting,
    "one tensor after the other": averaging,
}
SILENT: Cases = {
    "nothing": empty_trace,
    "a busy device": busy_device,
    "a graph run backward once": lambda: run_backward(1),
    "a backward pass that is differentiated": lambda: run_backward(3, inner_number=5),
    "an evaluation without a graph": lambda: validating(with_graph=False),
    "two graphs that are both used": lambda: validating(is_used=True),
    "decoding with a cache": lambda: decoding(grows=False),
    "few growing calls": lambda: decoding(7),
    "batches of which none needs another": lambda: with_a_window(carried=()),
    "every position is chosen": lambda: with_a_window(chosen=40),
    "few calls of one length": lambda: with_a_window(calls=7),
    "a broadcast product that something else uses": lambda: by_broadcasting(last="[[64, 32], [], [], []]"),
    "few tensors": lambda: averaging(7),
    "tensors of one shape": lambda: averaging(shapes=1),
    "layers": lambda: averaging(name="aten::linear"),
}


def test_all_runs_of_a_graph_but_the_first_are_counted() -> None:
    finding = the_finding(rule, run_backward(3))

    assert finding.saving_ns_per_step == 2 * (100 + 20 + 10)  # with the pause after each
    assert places_of(finding) == [("train.py", 9, "train")]
    assert finding.confidence == "medium"


def test_an_unused_graph_costs_its_part_of_the_kernels_time() -> None:
    finding = the_finding(rule, validating())

    assert places_of(finding) == [("train.py", 20, "evaluate")]
    assert finding.saving_share == pytest.approx(0.4, abs=0.01)  # 40 % in the kernel, all memory is allocated there
    assert "torch.no_grad()" in finding.remedy.code


def test_with_a_cache_each_call_takes_the_part_of_its_time_that_is_new() -> None:
    trace = decoding()
    finding = the_finding(rule, trace)

    assert places_of(finding) == [("serve.py", 30, "generate")]
    times = {10 + call: 200 + 50 * call for call in range(10)}
    known = sum(ns - max(ns / length, 20) for length, ns in times.items() if length > 10)  # the first one is needed
    assert finding.saving_ns_per_step == pytest.approx(known, rel=0.01)
    assert not asked(LOOP, trace).findings


def test_of_a_window_one_position_is_new_in_each_call_but_the_first() -> None:
    finding = the_finding(rule, with_a_window())

    assert places_of(finding) == [("serve.py", 31, "generate")]
    assert finding.saving_ns_per_step == 9 * 600 * 19 // 20  # a lookup is as short as calls get


def test_a_sequence_that_grows_from_step_to_step_is_computed_again_too() -> None:
    """Steps of 1000 ns with a call of 400 ns for one position more than the step before."""

    def serving(*lengths: int) -> Trace:
        recording = Recording()
        for step, length in enumerate(lengths):
            recording.step(1000 * step, 1000, step)
            recording.line(1000 * step, 1000, "serve.py(30): generate")
            recording.module(1000 * step + 10, 900, "Decoder", evaluates=True)
            shapes = f"[[1, {length}, 8], [8, 8], [8]]"
            recording.operator(1000 * step + 20, 400, "aten::linear", input_shapes=shapes)
            recording.operator(1000 * step + 500, 8, "aten::argmax")
        return recording.trace()

    finding = the_finding(rule, serving(100, 101, 102, 103, 104))
    assert finding.saving_ns_per_step == pytest.approx(400 - 8, abs=2)
    assert not asked(rule, serving(100, 101, 102, 104, 105)).findings
    assert not asked(rule, serving(100, 100, 100, 100, 100)).findings


def test_a_broadcast_product_takes_as_long_as_the_traces_matrix_products() -> None:
    finding = the_finding(rule, by_broadcasting())

    assert places_of(finding) == [("model.py", 7, "scores")]
    assert finding.saving_ns_per_step == 400 + 200 - 20
    assert "matrix product" in finding.remedy.text
    assert "cdist" in the_finding(rule, by_broadcasting(name="aten::sub")).remedy.text


def test_what_another_finding_explains_is_left_to_it() -> None:
    found = diagnose(run_backward(3)).findings
    assert [each.rule for each in found][:1] == ["costly-line"]

    loops = averaging(40)
    assert {each.rule for each in diagnose(loops).findings} & {"loop-in-step", "costly-line"} == {"loop-in-step"}


def carrying(*names: str) -> Trace:
    """In 1000 ns 40 repetitions of line 5 in a loop that carries these names."""
    loop = LoopFacts(file="train.py", line=4, first=5, last=5, carried=names)
    recording = Recording(Metadata(program=ProgramFacts(loops=(loop,))))
    recording.step(0, 1000, 1)
    for number in range(40):
        recording.line(20 * number, 15, "train.py(5): sample")
        recording.line(20 * number + 15, 5, "train.py(4): sample")
        recording.operator(20 * number + 2, 6, "aten::mul")
        recording.operator(20 * number + 9, 5, "aten::add")
    return recording.trace()


def test_repetitions_that_need_one_another_are_not_told_to_batch() -> None:
    assert the_finding(LOOP, carrying()).where[0].line == 5
    assert not asked(LOOP, carrying("state")).findings


def with_values(*values: ValueFacts, bindings: tuple[BindingFacts, ...] = (), changing: bool = True) -> Trace:
    """Two steps of 1000 ns: positions() takes 310 ns at line 5, forward() 110 at line 20, two calls of Net.body 380."""
    other = ValueFacts(file="model.py", function="forward", line=18, last=30, name="x", calls=1, distinct=1)
    facts = (*values, *([other] if changing else []))
    recording = Recording(Metadata(program=ProgramFacts(values=facts, bindings=bindings)))
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 310, "model.py(5): positions")
        recording.operator(begin + 5, 300, "aten::sin")
        recording.line(begin + 310, 110, "model.py(20): forward")
        recording.operator(begin + 315, 100, "aten::cos")
        recording.line(begin + 420, 580, "model.py(21): forward")
        for call in (0, 200):
            recording.module(begin + 430 + call, 190, "Net.body")
            recording.operator(begin + 435 + call, 180, "aten::relu")
    return recording.trace()


def result(function: str = "positions", *, calls: int = 1, distinct: int = 1, constant: bool = True) -> ValueFacts:
    return ValueFacts(
        file="model.py", function=function, line=3, last=9, calls=calls, distinct=distinct, is_constant=constant
    )


FIRES["the same result in each step"] = lambda: with_values(result())
SILENT["a program that repeats one step"] = lambda: with_values(result(), changing=False)
SILENT["a result that changes"] = lambda: with_values(result(constant=False))


def test_a_result_that_is_the_same_in_each_step_can_be_kept() -> None:
    finding = the_finding(rule, with_values(result()))

    assert places_of(finding) == [("model.py", 5, "positions")]
    assert finding.saving_ns_per_step == 310


def test_of_equal_results_within_a_step_one_is_needed() -> None:
    finding = the_finding(rule, with_values(result(calls=4, distinct=1, constant=False)))
    assert finding.saving_ns_per_step == pytest.approx(310 * 3 / 4, abs=2)


def test_a_variable_is_placed_at_the_statement_that_binds_it() -> None:
    variable = ValueFacts(
        file="model.py", function="forward", line=18, last=30, name="table", calls=1, distinct=1, is_constant=True
    )
    binding = BindingFacts(file="model.py", function=18, name="table", first=20, last=20)

    finding = the_finding(rule, with_values(variable, bindings=(binding,)))

    assert places_of(finding) == [("model.py", 20, "forward")]
    assert finding.saving_ns_per_step == 110
    again = BindingFacts(file="model.py", function=18, name="table", first=21, last=21)
    assert not asked(rule, with_values(variable, bindings=(binding, again))).findings


@pytest.mark.parametrize(("constant", "saved"), [(True, 380), (False, 190)])
def test_calls_of_a_module_with_equal_results_can_be_left_out(constant: bool, saved: int) -> None:
    facts = ValueFacts(module="Net.body", calls=2, distinct=1, is_constant=constant)

    finding = the_finding(rule, with_values(facts))

    assert places_of(finding) == [("model.py", 21, "forward")]
    assert finding.saving_ns_per_step == saved


def test_lines_that_no_finding_explains_are_told_with_what_half_their_time_would_save() -> None:
    recording = Recording()
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 600, "model.py(7): forward")
        recording.operator(begin, 600, "aten::mm")
        recording.line(begin + 600, 400, "train.py(3): train")
        recording.operator(begin + 600, 30, "aten::add")
    diagnosis = diagnose(recording.trace())

    first = diagnosis.lines[0]
    assert (first.file, first.line, first.share, first.faster_share) == ("model.py", 7, 0.6, 0.3)
    assert (first.runs, first.backward_share) == (1.0, 0.0)


def test_a_line_that_a_finding_explains_is_not_told_again() -> None:
    diagnosis = diagnose(run_backward(6))
    assert ("train.py", 9) in [(place.file, place.line) for place in diagnosis.findings[0].where]
    assert ("train.py", 9) not in [(line.file, line.line) for line in diagnosis.lines]


def with_a_frozen_part(*backward: BackwardFacts) -> Trace:
    """Steps of 1000 ns: layers of 50 ns on lines 5 and 6, whose backward takes 100 ns each and their gradients 20."""
    recording = Recording(Metadata(program=ProgramFacts(backward=backward)))
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        for number in range(3):
            now, sequence = begin + 100 * number, 10 * step + number
            recording.line(now, 100, f"model.py({5 + number // 2}): forward")
            recording.operator(now + 20, 50, "aten::linear", sequence_number=sequence, forward_thread=0)
        for number in (2, 1, 0):
            now, sequence = begin + 700 - 200 * number, 10 * step + number
            recording.operator(now, 100, NODE, sequence_number=sequence, forward_thread=1)
            recording.operator(now + 100, 20, GRADIENT)
        recording.operator(begin + 900, 50, "aten::add_")
    return recording.trace()


def needless(*, first: int = 0, last: int = 1, nodes: int = 3, order: int = 0, cleared: bool = False) -> BackwardFacts:
    modules = ("Net.body.0", "Net.body.1")
    ranges = ((first, last),)
    return BackwardFacts(nodes=nodes, order=order, needless=ranges, modules=modules, parameters=8, is_cleared=cleared)


FIRES["gradients that no optimizer uses"] = lambda: with_a_frozen_part(needless())
FIRES["gradients that are cleared"] = lambda: with_a_frozen_part(needless(cleared=True))
SILENT["parameters that are all trained"] = with_a_frozen_part
SILENT["passes with other graphs"] = lambda: with_a_frozen_part(needless(nodes=4))
SILENT["a second pass like that"] = lambda: with_a_frozen_part(needless(order=1))


def test_the_nodes_that_lead_only_to_unused_gradients_are_needless() -> None:
    finding = the_finding(rule, with_a_frozen_part(needless()))

    assert places_of(finding) == [("model.py", 5, "forward")]
    assert finding.saving_ns_per_step == 2 * (100 + 20 + 80)  # with the pause after each
    assert "Net.body" in finding.title
    assert the_finding(rule, with_a_frozen_part(needless(last=0))).saving_ns_per_step == 200
    assert "detach" in the_finding(rule, with_a_frozen_part(needless(cleared=True))).remedy.code


def test_of_a_product_with_a_frozen_weight_half_is_needless() -> None:
    facts = BackwardFacts(nodes=3, halves=((1, 2),), modules=("Net.body.0",), parameters=8)
    finding = the_finding(rule, with_a_frozen_part(facts))

    assert finding.saving_ns_per_step == 2 * 100 // 2
    assert places_of(finding) == [("model.py", 5, "forward"), ("model.py", 6, "forward")]


def inside_a_library() -> Trace:
    """In 10,000 ns two operators on each of 12 tensors, on a line that a step comes to once."""
    recording = Recording()
    recording.step(0, 10_000, 1)
    recording.line(0, 10_000, "train.py(40): average")
    for number in range(12):
        shape = f"[[{8 + number % 4}, 8], []]"
        recording.operator(200 * number, 80, "aten::mul", input_shapes=shape)
        recording.operator(200 * number + 100, 80, "aten::add", input_shapes=shape)
    return recording.trace()


SILENT["a loop inside a library"] = inside_a_library


def with_constants(*facts: ConstantFacts) -> Trace:
    """Two steps of 1000 ns: 300 ns of operators on line 5, and 100 (arange), 150 (sin) and 50 (add) on line 6."""
    recording = Recording(Metadata(program=ProgramFacts(constants=facts)))
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 400, "model.py(5): positions")
        recording.operator(begin + 50, 300, "aten::arange")
        recording.line(begin + 400, 600, "model.py(6): positions")
        for start, duration, name in ((400, 100, "arange"), (500, 150, "sin"), (650, 50, "add")):
            recording.operator(begin + start, duration, f"aten::{name}")
    return recording.trace()


def constant_calls(line: int, calls: tuple[str, ...], *constant: int) -> ConstantFacts:
    return ConstantFacts(file="model.py", function="positions", line=line, calls=calls, constant=constant)


WHOLE = constant_calls(5, ("arange",), 0)
PARTLY = constant_calls(6, ("arange", "sin", "add"), 0, 1)
FIRES["operators with the same inputs in each step"] = lambda: with_constants(WHOLE, PARTLY)
SILENT["operators with other inputs"] = with_constants
SILENT["a call whose operator is not found"] = lambda: with_constants(constant_calls(6, ("arange", "cos", "add"), 0))


def test_of_lines_with_other_operators_too_only_the_constant_ones_count() -> None:
    assert the_finding(rule, with_constants(PARTLY)).saving_ns_per_step == 100 + 150
    assert the_finding(rule, with_constants(WHOLE)).saving_ns_per_step == 400
    both = the_finding(rule, with_constants(WHOLE, PARTLY))

    assert both.saving_ns_per_step == 400 + 250
    assert places_of(both) == [("model.py", 6, "positions"), ("model.py", 5, "positions")]
    assert "positions()" in both.title


def checkpointing(*values: ValueFacts, memory: int = 100 * 2**20, layer: str = "aten::linear") -> Trace:
    """Two steps of 1000 ns: a block called on line 30, whose node of 300 ns first runs its two layers again in 150 ns.

    They allocate 1 MiB of so much memory.
    """
    recording = Recording(Metadata(program=ProgramFacts(process={"memory_bytes": memory}, values=values)))
    for step in range(2):
        begin, number = 1000 * step, 10 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 50, "model.py(30): forward")
        recording.module(begin + 40, 200, "Net.block")
        recording.line(begin + 50, 200, "model.py(10): forward")
        recording.operator(begin + 60, 100, "aten::linear", sequence_number=number, forward_thread=0)
        recording.line(begin + 250, 750, "train.py(8): train")
        recording.operator(begin + 500, 300, NODE, sequence_number=number, forward_thread=1)
        recording.module(begin + 505, 170, "Net.block")
        recording.operator(begin + 510, 100, layer, sequence_number=number + 5, forward_thread=0)
        recording.block(begin + 520, begin + 900, 2**20, device="cpu")
        recording.operator(begin + 620, 40, "aten::gelu", sequence_number=number + 6, forward_thread=0)
        recording.operator(begin + 700, 90, "aten::mm")
        recording.operator(begin + 900, 50, "aten::add_")
    return recording.trace()


FIRES["checkpointing although memory is ample"] = checkpointing
SILENT["checkpointing that memory needs"] = lambda: checkpointing(memory=3 * 2**20)
SILENT["a node that makes others"] = lambda: checkpointing(layer="aten::mm")


def test_checkpointing_is_told_where_the_memory_would_do() -> None:
    finding = the_finding(rule, checkpointing())

    assert finding.saving_ns_per_step == 150
    assert places_of(finding) == [("model.py", 30, "forward")]
    figures = {each.name: each.value for each in finding.evidence.figures}
    assert figures["share of the memory in use if all of it is kept"] == pytest.approx(2 / 100)


def test_what_checkpointing_calls_again_is_not_a_result_to_keep() -> None:
    facts = ValueFacts(module="Net.block", calls=2, distinct=1)
    assert not asked(rule, checkpointing(facts, ValueFacts(module="Net"), memory=3 * 2**20)).findings


def merging(*, thin: int = 4, then: str = "[[8, 64], [64, 64]]") -> Trace:
    """In 1000 ns a thin product (200), its scaling (50), the sum with the weight (100), and a product with it (100)."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(7): forward")
    factors, weights = f"[[64, {thin}], [{thin}, 64]]", "[[64, 64], [64, 64]]"
    calls = (("matmul", 200, factors), ("mul", 50, "[[64, 64], []]"), ("add", 100, weights), ("matmul", 100, then))
    now = 0
    for name, duration, shapes in calls:
        recording.operator(now, duration, f"aten::{name}", input_shapes=shapes)
        now += duration
    return recording.trace()


def looking_up(*makers: tuple[str, str], table: str = "[[4, 16, 100], [100, 8]]") -> Trace:
    """In 1000 ns operators of 100 ns each that make a table, and a product with it; then a few small sums."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(9): embed")
    for number, (name, shapes) in enumerate((*makers, ("aten::matmul", table))):
        recording.operator(100 * number, 100, name, input_shapes=shapes)
    for number in range(4):
        recording.operator(800 + 20 * number, 10, "aten::add", input_shapes="[[2000], [2000]]")
    return recording.trace()


ONE_HOT = ("aten::one_hot", "[[4, 16], []]"), ("aten::to", "[[4, 16, 100], []]")
COMPARED = ("aten::eq", "[[4, 16, 1], [100]]"), ("aten::to", "[[4, 16, 100], []]")
SCATTERED = ("aten::zeros", "[[]]"), ("aten::scatter_", "[[64, 100], [], [64, 1], []]")
FIRES["a merged weight"] = merging
FIRES["a one-hot table"] = lambda: looking_up(*ONE_HOT)
FIRES["a table of comparisons"] = lambda: looking_up(*COMPARED)
FIRES["a scattered table"] = lambda: looking_up(*SCATTERED, table="[[64, 100], [100, 8]]")
SILENT["a product of large matrices"] = lambda: merging(thin=32)
SILENT["a merged weight that nothing multiplies"] = lambda: merging(then="[[8, 32], [32, 64]]")
SILENT["a merged weight for many rows"] = lambda: merging(then="[[4000, 64], [64, 64]]")
SILENT["a one-hot table of few classes"] = lambda: looking_up(*ONE_HOT, table="[[4, 16, 8], [8, 8]]")
SILENT["another table"] = lambda: looking_up(*ONE_HOT, table="[[4, 32, 100], [100, 8]]")
SILENT["a scatter of values"] = lambda: looking_up(
    ("aten::scatter_", "[[64, 100], [], [64, 1], [64, 1]]"), table="[[64, 100], [100, 8]]"
)


def test_a_merged_weight_costs_what_two_thin_products_do_not_need() -> None:
    finding = the_finding(rule, merging())

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert figures["operations of the products that take their place per step"] == 2 * 8 * 4 * (64 + 64)
    assert 0.2 < finding.saving_share < 0.35  # of the 350 ns
    assert places_of(finding) == [("model.py", 7, "forward")]


def test_a_lookup_moves_the_rows_that_it_takes() -> None:
    finding = the_finding(rule, looking_up(*ONE_HOT))

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert figures["elements that are moved instead per step"] == (2 * 64 + 100) * 8
    assert 250 < finding.saving_ns_per_step < 300


FIRES["outer products that are summed"] = lambda: by_broadcasting(**OUTER, dimensions="[1]")
FIRES["outer products that are summed over several dimensions"] = lambda: by_broadcasting(**OUTER, dimensions="[0, -3]")
FIRES["a difference of expanded tensors"] = lambda: by_broadcasting(
    name="aten::sub", inputs="[[64, 32, 16], [64, 32, 16]]", expanded=("[[64, 1, 16], []]", "[[1, 32, 16], []]")
)
SILENT["a difference of tensors of one shape"] = lambda: by_broadcasting(
    name="aten::sub", inputs="[[64, 32, 16], [64, 32, 16]]"
)
SILENT["outer products of which rows are summed"] = lambda: by_broadcasting(**OUTER, dimensions="[3]")


def unfolding(then: str = "[[24, 216], [8, 216, 1024]]", *, name: str = "aten::matmul") -> Trace:
    """In 1000 ns patches of 8 images of 24 channels (300 ns), and a product with them (400 ns); then a small one."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(5): forward")
    recording.operator(0, 300, "aten::im2col", input_shapes="[[8, 24, 32, 32], [], [], [], []]")
    recording.operator(300, 400, name, input_shapes=then)
    recording.operator(800, 100, "aten::mm", input_shapes="[[512, 1024], [1024, 512]]")
    for number in range(4):
        recording.operator(910 + 3 * number, 2, "aten::add", input_shapes="[[2], [2]]")
    return recording.trace()


FIRES["a convolution by unfold"] = unfolding
FIRES["a convolution by unfold, the other way around"] = lambda: unfolding("[[8, 1024, 216], [216, 24]]")
SILENT["patches that nothing multiplies"] = lambda: unfolding("[[24, 100], [8, 100, 1024]]")


def test_a_convolution_takes_as_long_as_its_operations_in_products() -> None:
    finding = the_finding(rule, unfolding())

    figures = {each.name: each.value for each in finding.evidence.figures}
    operations = 2 * 8 * 24 * 216 * 1024
    assert figures["operations of the products that take their place per step"] == operations
    assert figures["elements that are moved instead per step"] == 8 * 24 * (32 * 32 + 1024)
    assert "conv2d" in finding.title
    assert 300 < finding.saving_ns_per_step < 700 - 100 * operations / (2 * 512 * 1024 * 512)


def copying(names: str = "deepcopy state_dict", *, every: int = 1) -> Trace:
    """Four steps of 1000 ns; line 9 takes 400 ns of every so many of them."""
    operations = OperationFacts(file="train.py", names=(*[""] * 8, names))
    recording = Recording(Metadata(program=ProgramFacts(operations=(operations,))))
    for step in range(4):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 600, "train.py(7): train")
        recording.operator(begin, 500, "aten::mm")
        recording.line(begin + 600, 400, f"train.py({9 if step % every == 0 else 7}): train")
        recording.operator(begin + 990, 5, "aten::add")
    return recording.trace()


FIRES["a deep copy in each step"] = copying
SILENT["another call"] = lambda: copying("clone")
SILENT["a deep copy now and then"] = lambda: copying(every=4)


def test_a_deep_copy_can_be_left_out() -> None:
    finding = the_finding(rule, copying())

    assert places_of(finding) == [("train.py", 9, "train")]
    assert finding.saving_ns_per_step == pytest.approx(400, abs=10)


def test_the_loop_of_a_deep_copy_is_not_the_programs() -> None:
    recording = Recording(copying().metadata)
    for step in range(2):
        recording.step(1000 * step, 1000, step)
        recording.line(1000 * step, 1000, "train.py(9): train")
        for number in range(40):
            recording.operator(1000 * step + 20 * number, 10, "aten::clone")

    assert [each.rule for each in diagnose(recording.trace()).findings] == ["costly-line"]


def multiplied(*, nonzero: int = 4096, shape: tuple[int, int] = (1024, 1024), learns: bool = True) -> Trace:
    """In 10,000 ns a product of such a tensor with (1024, 64), of 4000 ns and as long backward, and a dense one."""
    facts = (SparseFacts(file="train.py", line=7, shape=shape, nonzero=nonzero),)
    recording = Recording(Metadata(program=ProgramFacts(sparse=facts)))
    recording.step(0, 10_000, 1)
    recording.frame(0, 4100, "train.py(7): forward")
    recording.operator(50, 4000, "aten::matmul", input_shapes="[[1024, 1024], [1024, 64]]", sequence_number=1)
    recording.frame(4200, 100, "train.py(8): forward")
    # 2 x 100 x 64 x 64 operations in 8 ns, the best rate.
    recording.operator(4210, 8, "aten::mm", input_shapes="[[100, 64], [64, 64]]")
    if learns:
        recording.operator(5000, 4000, "MmBackward0", sequence_number=1, forward_thread=1)
        recording.link(0, 2)
    return recording.trace()


def test_of_a_product_with_zeros_the_rest_remains_at_a_tenth_of_the_rate() -> None:
    finding = the_finding(rule, multiplied(learns=False))

    operations = 2 * 4096 * 64 * 10
    left_ns = operations * 8 / (2 * 100 * 64 * 64)
    assert finding.saving_ns_per_step == pytest.approx(4000 - left_ns, rel=0.01)
    assert [each.value for each in finding.evidence.figures if each.unit == "count"][:2] == [1024 * 1024, 4096]
    assert "sparse" in finding.remedy.text
    assert finding.where[0].line == 7


def test_rows_with_one_number_each_are_looked_up() -> None:
    assert "embedding" in the_finding(rule, multiplied(nonzero=1024)).remedy.code


def test_a_product_with_another_shape_than_the_zeros_had_is_left_alone() -> None:
    assert not asked(rule, multiplied(shape=(1024, 512))).findings


def extended(times: int, *, again: bool = True) -> Trace:
    """In 1000 ns `times` concatenations of 20 ns each; each with one part more than the one before if `again`."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 900, "train.py(7): collect")
    for number in range(times):
        before = number if again else 3
        recording.operator(10 + 40 * number, 20, "aten::cat", input_shapes=f"[[[{before}, 8], [1, 8]], []]")
    return recording.trace()


def test_a_tensor_that_is_extended_part_by_part_is_copied_each_time() -> None:
    finding = the_finding(rule, extended(20))

    # 1 + 2 + ... + 20 rows are copied, 20 would do.
    assert finding.saving_ns_per_step == round(400 * (1 - 20 / 210))
    assert "parts.append" in finding.remedy.code


@pytest.mark.parametrize("trace", [extended(7), extended(20, again=False)])
def test_a_few_concatenations_or_of_other_parts_are_left_alone(trace: Trace) -> None:
    assert not asked(rule, trace).findings


def in_order(*products: str) -> Trace:
    """In 1000 ns products of 300 ns each with these inputs, and one of 100 ns at twice the rate."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(7): attend")
    for number, inputs in enumerate(products):
        recording.operator(300 * number, 300, "aten::matmul", input_shapes=inputs)
    recording.operator(850, 100, "aten::mm", input_shapes="[[512, 1024], [1024, 512]]")
    return recording.trace()


@pytest.mark.parametrize(
    ("products", "operations"),
    [
        # 4 x (16 x 16 x (384 + 384)) instead of 4 x (384 x 384 x (16 + 16))
        (("[[4, 384, 16], [4, 16, 384]]", "[[4, 384, 384], [4, 384, 16]]"), 2 * 4 * 16 * 16 * 768),
        # A row times the product of two matrices.
        (("[[384, 384], [384, 384]]", "[[1, 384], [384, 384]]"), 2 * 384 * 768),
    ],
)
def test_products_in_the_costlier_order_take_the_operations_of_the_other(
    products: tuple[str, ...], operations: int
) -> None:
    finding = the_finding(rule, in_order(*products))

    figures = {each.name: each.value for each in finding.evidence.figures}
    assert figures["operations of the products that take their place per step"] == operations


@pytest.mark.parametrize(
    "products",
    [
        ("[[384, 384], [384, 384]]", "[[384, 384], [384, 384]]"),
        ("[[4, 384, 16], [4, 16, 384]]", "[[4, 384, 200], [4, 200, 16]]"),  # of something else
    ],
)
def test_other_products_stay_in_their_order(products: tuple[str, ...]) -> None:
    assert not asked(rule, in_order(*products)).findings


def ranked(used: str) -> Trace:
    """In 1000 ns a sort of 64 x 8000 numbers of 600 ns, a slice of it, and an operator on these inputs."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(7): recall")
    recording.operator(0, 600, "aten::argsort", input_shapes="[[64, 8000], [], []]")
    recording.operator(610, 10, "aten::slice", input_shapes="[[64, 8000], [], [], [], []]")
    recording.operator(630, 10, "aten::unsqueeze", input_shapes="[[64], []]")
    recording.operator(650, 10, "aten::eq", input_shapes=used)
    return recording.trace()


def test_of_a_sort_for_its_first_elements_they_are_enough() -> None:
    assert "topk" in the_finding(rule, ranked("[[64, 10], [64, 1]]")).remedy.code


@pytest.mark.parametrize("used", ["[[64, 4000], [64, 1]]", "[[64, 8000], [64, 1]]", "[[64], [64]]"])
def test_a_sort_that_is_used_is_left_alone(used: str) -> None:
    assert not asked(rule, ranked(used)).findings


def along_edges(*, weighted: bool = True, width: int = 16, added: str = "aten::index_add") -> Trace:
    """In 1000 ns rows of 100 nodes gathered for 900 edges (200 ns), weighted (100 ns) and added up (300 ns)."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "model.py(7): propagate")
    recording.operator(0, 200, "aten::index", input_shapes="[[100, 16], []]")
    if weighted:
        recording.operator(210, 100, "aten::mul", input_shapes=f"[[900, {width}], [900, 1]]")
    recording.operator(400, 300, added, input_shapes=f"[[100, {width}], [], [900], [900, {width}], []]")
    recording.operator(900, 10, "aten::add", input_shapes="[[14400], [14400]]")
    return recording.trace()


def test_messages_along_edges_are_a_sparse_product() -> None:
    finding = the_finding(rule, along_edges())

    assert "to_sparse_csr" in finding.remedy.code
    figures = {each.name: each.value for each in finding.evidence.figures}
    assert figures["elements that are moved instead per step"] == 900 * 16
    assert figures["time of these operators per step"] == 600
    plain = {each.name: each.value for each in the_finding(rule, along_edges(weighted=False)).evidence.figures}
    assert plain["time of these operators per step"] == 500


@pytest.mark.parametrize("trace", [along_edges(width=8), along_edges(added="aten::index_put")])
def test_rows_that_are_not_added_up_are_no_messages(trace: Trace) -> None:
    assert not asked(rule, trace).findings


def on_repeated_rows(*, source: str = "[[40, 1, 64], []]", layer: str = "[[40, 50, 72], [96, 72], [96]]") -> Trace:
    """In 1000 ns 40 rows of 64 numbers repeated 50 times, joined with 8 numbers each and given to a layer of 96."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 900, "model.py(7): enter")
    recording.operator(0, 100, "aten::repeat", input_shapes=source)
    recording.operator(110, 100, "aten::cat", input_shapes="[[[40, 50, 64], [40, 50, 8]], []]")
    recording.operator(220, 400, "aten::linear", input_shapes=layer)
    recording.frame(900, 100, "model.py(8): enter")
    recording.operator(900, 10, "aten::mm", input_shapes="[[512, 1024], [1024, 512]]")
    recording.operator(950, 10, "aten::add", input_shapes="[[144000], [144000]]")
    return recording.trace()


def test_of_a_layer_on_repeated_rows_its_parts_on_the_rows_remain() -> None:
    figures = {each.name: each.value for each in the_finding(rule, on_repeated_rows()).evidence.figures}

    assert figures["time of these operators per step"] == 600
    assert figures["operations of the products that take their place per step"] == 2 * 96 * (40 * 64 + 2000 * 8)
    assert figures["elements that are moved instead per step"] == 2 * 2000 * 96


@pytest.mark.parametrize(
    "trace",
    [
        on_repeated_rows(source="[[40, 25, 64], []]"),  # repeated twice only
        on_repeated_rows(layer="[[40, 50, 128], [96, 128], [96]]"),  # another input
    ],
)
def test_a_layer_on_rows_of_their_own_is_left_alone(trace: Trace) -> None:
    assert not asked(rule, trace).findings
