"""How the Kineto reader joins events, and how it reads a part of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.trace import Window
from stepscope.trace.window import StepRange
from tests.unit.small_traces import complete, counted, flow, kernel, launch, opened, rows

# Links


def test_of_operators_that_share_a_sequence_number_the_last_has_the_backward(tmp_path: Path) -> None:
    def numbered(name: str, start: float, duration: float, thread: int = 0, tid: int = 2) -> dict[str, Any]:
        return complete(name, "cpu_op", start, duration, tid=tid, args={"Sequence number": 5, "Fwd thread id": thread})

    events = [
        numbered("aten::linear", 10, 20),
        numbered("aten::t", 12, 2),
        numbered("aten::addmm", 15, 9),
        numbered("AddmmBackward0", 50, 9, thread=1, tid=3),
        flow("s", 1, "fwdbwd", 15),
        flow("f", 1, "fwdbwd", 50, tid=3, bp="e"),
        flow("s", 2, "fwdbwd", 99),
    ]
    trace = opened(tmp_path, events)
    assert rows(trace, "links", "kind", "source", "target") == [("forward_backward", 2, 3)]
    assert counted(trace) == {"unmatched_forward_backward": 1}


def test_a_graph_launch_gives_several_kernels(tmp_path: Path) -> None:
    events = [launch(1, 9, "cudaGraphLaunch"), kernel(5, 1, 9), kernel(7, 1, 9), kernel(9, 1, 9), kernel(0, 1, 3)]
    trace = opened(tmp_path, events)
    assert rows(trace, "launches", "kind", "correlation") == [("graph_launch", 9)]
    assert rows(trace, "device_work", "correlation", "launch") == [(3, None), (9, 0), (9, 0), (9, 0)]


def test_the_call_that_launches_is_preferred_to_others_of_its_correlation(tmp_path: Path) -> None:
    events = [launch(1, 9, "cudaEventQuery"), launch(3, 9), kernel(5, 1, 9)]
    assert rows(opened(tmp_path, events), "device_work", "launch") == [(1,)]


def test_without_correlation_numbers_flows_tell_the_launch(tmp_path: Path) -> None:
    events = [
        complete("cudaLaunchKernel", "cuda_runtime", 1, 2),
        complete("cudaLaunchKernel", "cuda_runtime", 4, 2),
        kernel(10, 2),
        kernel(20, 2),
        kernel(30, 2),
        flow("s", 1, "async_cpu_to_gpu", 4),
        flow("f", 1, "async_cpu_to_gpu", 10, pid=0, tid=7),
        flow("s", 2, "async_cpu_to_gpu", 1),
        flow("f", 2, "async_cpu_to_gpu", 20, pid=0, tid=7),
    ]
    assert rows(opened(tmp_path, events), "device_work", "launch") == [(1,), (0,), (None,)]


def test_without_correlation_numbers_and_flows_external_ids_tell_the_launch(tmp_path: Path) -> None:
    def named(name: str, start: float, external: int, **place: int) -> dict[str, Any]:
        category = "kernel" if place else "cuda_runtime"
        args = {"External id": external, **({"device": 0, "stream": 7} if place else {})}
        return complete(name, category, start, 2, args=args, **place)

    events = [
        named("cudaLaunchKernel", 1, 100),
        named("cudaLaunchKernel", 4, 101),
        named("cudaLaunchKernel", 6, 101),
        named("cudaLaunchKernel", 8, 102),
        *(named("gemm", start, external, pid=0, tid=7) for start, external in ((10, 101), (20, 101), (30, 100))),
        named("split", 40, 102, pid=0, tid=7),
        named("sum", 50, 102, pid=0, tid=7),  # two works of one launch: which is whose is unknown
    ]
    assert rows(opened(tmp_path, events), "device_work", "launch") == [(1,), (2,), (0,), (None,), (None,)]


def test_work_before_its_launch_is_counted(tmp_path: Path) -> None:
    trace = opened(tmp_path, [launch(5, 1), kernel(3, 1, 1)])
    assert rows(trace, "device_work", "start_ns", "launch") == [(0, 0)]
    assert counted(trace) == {"work_before_launch": 1}


# A part of a trace


def stepped() -> list[dict[str, Any]]:
    """Two steps of 100 us; each launches work that runs after it has ended."""
    events = []
    for number, start in ((3, 0), (4, 100)):
        events += [
            complete(f"ProfilerStep#{number}", "user_annotation", start, 100),
            complete("aten::mm", "cpu_op", start + 10, 20),
            launch(start + 12, number),
            kernel(start + 110, 40, number),
        ]
    return [*events, complete("aten::add", "cpu_op", 300, 10)]


def test_a_window_keeps_what_happens_in_it_and_work_launched_in_it(tmp_path: Path) -> None:
    trace = opened(tmp_path, stepped(), window=Window(5_000, 90_000))
    assert rows(trace, "annotations", "step") == [(3,)]
    assert rows(trace, "operators", "start_ns") == [(10_000,)]
    assert rows(trace, "device_work", "start_ns", "launch") == [(110_000, 0)]
    assert trace.metadata.window == Window(5_000, 90_000)
    assert trace.metadata.events == 9


def test_the_launch_of_work_in_the_window_is_kept(tmp_path: Path) -> None:
    trace = opened(tmp_path, stepped(), window=Window(200_000, 240_000))
    assert trace.operators.is_empty()
    assert rows(trace, "launches", "start_ns", "operator") == [(112_000, None)]
    assert rows(trace, "device_work", "start_ns", "launch") == [(210_000, 0)]


def test_an_empty_window_gives_empty_tables(tmp_path: Path) -> None:
    trace = opened(tmp_path, stepped(), window=Window(900_000, 950_000))
    assert trace.operators.is_empty()
    assert trace.device_work.is_empty()


def test_chosen_steps_are_a_window(tmp_path: Path) -> None:
    trace = opened(tmp_path, stepped(), steps=StepRange(4, 9))
    assert trace.metadata.window == Window(100_000, 200_000)
    assert rows(trace, "annotations", "step") == [(4,)]
    assert rows(trace, "operators", "start_ns") == [(110_000,)]
    assert rows(trace, "device_work", "start_ns", "correlation") == [(110_000, 3), (210_000, 4)]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (stepped(), "no step of the trace is in the requested range: it has steps 3 to 4"),
        ([complete("aten::mm", "cpu_op", 1, 2)], "the trace has no step annotations to choose steps by"),
        ([complete("mine", "user_annotation", 1, 2)], "the trace has no step annotations to choose steps by"),
    ],
)
def test_steps_that_do_not_exist_are_a_mistake(tmp_path: Path, events: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        opened(tmp_path, events, steps=StepRange(7, 9))
