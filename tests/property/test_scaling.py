"""The replay of messages against the timeline that one would write down by hand, for any gradients and links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.predict.limits import Link, Protocol
from stepscope.predict.scaling import data_parallel
from stepscope.trace import Trace
from stepscope.whatif import Experiment
from tests.unit.predict.test_scaling import MIB, gradient
from tests.unit.whatif.test_graph import US, Machine

GRADIENTS = st.lists(st.tuples(st.integers(5, 300), st.integers(1, 12 * MIB)), min_size=1, max_size=12)


def on_the_host(gradients: list[tuple[int, int]], after: int) -> tuple[Trace, list[int]]:
    """One step whose backward operators take so many microseconds each; and when each gradient is there."""
    machine = Machine()
    machine.operator(0, 100 * US, "aten::forward")
    moment, ready = 100, []
    for length, elements in gradients:
        machine.operator(moment * US, (length - 3) * US, "MmBackward0")
        moment += length
        gradient(machine, moment, elements)
        ready.append(moment * US)
    machine.operator(moment * US, after * US, "aten::optimizer")
    machine.step(0, (moment + after) * US, 0)
    return machine.trace(), ready


def on_a_device(gradients: list[tuple[int, int]]) -> tuple[Trace, list[int]]:
    """One step whose backward kernels, launched ahead, take so many microseconds each; and when each of them ends."""
    machine = Machine()
    moment, ready = 1000, []
    for number, (length, elements) in enumerate(gradients):
        machine.kernel(10 + 10 * number, moment, length, number)
        moment += length
        gradient(machine, 18 + 10 * number, elements)
        ready.append(moment * US)
    machine.kernel(10 + 10 * len(gradients), moment, 50, 100)
    machine.call(400, moment + 60 - 400, 101, "cudaDeviceSynchronize", "synchronise")
    machine.step(0, (moment + 100) * US, 0)
    return machine.trace(), ready


def exposed_by_hand(gradients: list[tuple[int, int]], ready: list[int], link: Link, devices: int) -> float:
    """End of the last message after the last gradient: each begins when it is there and the one before has ended."""
    end, held, limit = 0.0, 0, MIB
    for number, ((_, elements), moment) in enumerate(zip(gradients, ready, strict=True)):
        held += 4 * elements
        if held >= limit or number + 1 == len(gradients):
            end = max(end, moment) + link.transfer_ns("all_reduce", held, devices)
            held, limit = 0, 25 * MIB
    return max(end - ready[-1], 0.0)


@settings(max_examples=40, deadline=None)
@given(GRADIENTS, st.floats(1e8, 1e12), st.integers(0, 50_000), st.integers(2, 64), st.booleans())
def test_messages_as_one_would_write_them_down(
    gradients: list[tuple[int, int]], bandwidth: float, hop: int, devices: int, has_device: bool
) -> None:
    link = Link("any", bandwidth, (Protocol(0.0, float(hop)),))
    trace, ready = on_a_device(gradients) if has_device else on_the_host(gradients, 400)

    [step] = data_parallel(Experiment(trace), [devices], link)

    expected = exposed_by_hand(gradients, ready, link, devices)
    assert step.exposed_ns == pytest.approx(expected, abs=len(gradients) + 1)
    assert step.low_ns <= step.step_ns <= step.high_ns
