"""How a device's time divides among engines: to the nanosecond, each moment once."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.device_time import EngineTime, EngineUse, device_uses, engine_uses
from stepscope.diagnosis import diagnose
from stepscope.trace import Trace
from tests.unit.recording import Recording
from tests.unit.rendered import json_report, markdown_report, text_report

KINDS = {"MME": "compute", "TPC": "compute", "EDMA": "copy_on_device", "PDMA": "copy_in", "NIC": "communication"}


def side_by_side() -> Recording:
    """100 ns: MME 0 to 40, TPC from 30, then DMA in two parts and the NIC behind it, a pause, and a last bit of TPC."""
    recording = Recording()
    recording.operator(0, 20, "aten::mm")
    for start, duration, name, queue in (
        (0, 40, "GEMM (bf16)", "MME"),
        (30, 30, "relu_fwd_bf16", "TPC"),
        (50, 20, "DmaTranspose", "EDMA"),
        (65, 15, "memcpy H2D", "PDMA"),
        (75, 20, "all_reduce", "NIC"),
        (98, 2, "cast_f32", "TPC"),
    ):
        recording.work(start, duration, name, queue=queue, kind=KINDS[queue])
    return recording


def test_nothing_without_engines() -> None:
    recording = Recording()
    recording.work(0, 10, "gemm", queue="7")
    recording.work(0, 10, "copy", queue="NIC", kind="communication")

    assert engine_uses(Trace.from_tables({})) == ()
    assert engine_uses(recording.trace()) == ()


def test_engines_by_their_queues_names() -> None:
    recording = Recording()
    for start, queue in enumerate(("MME", "KDMA", "7")):
        recording.work(10 * start, 10, "work", queue=queue)

    [use] = engine_uses(recording.trace())
    assert [(each.engine, each.busy_ns) for each in use.engines] == [("MME", 10), ("DMA", 10), ("other", 10)]


def test_each_moment_is_the_first_engines() -> None:
    assert engine_uses(side_by_side().trace()) == (
        EngineUse(
            device="0",
            window_ns=100,
            idle_ns=3,
            computing_together_ns=10,
            engines=(
                EngineTime("MME", 40, 40),
                EngineTime("TPC", 32, 22),
                EngineTime("DMA", 30, 20),
                EngineTime("NIC", 20, 15),
            ),
        ),
    )


def test_an_engine_of_another_kind_comes_last() -> None:
    recording = side_by_side()
    recording.work(90, 10, "decode", queue="VIDEO_DECODER", kind="other")

    [use] = engine_uses(recording.trace())

    assert (use.engines[-1], use.idle_ns) == (EngineTime("other", 10, 3), 0)


works = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60), st.sampled_from([*KINDS, "PSOC"])), min_size=1)


@settings(deadline=None, max_examples=60)
@given(works)
def test_the_parts_are_the_window_whatever_the_engines_do(work: list[tuple[int, int, str]]) -> None:
    recording = Recording()
    recording.work(0, 1, "gemm", queue="MME")
    for start, duration, queue in work:
        recording.work(start, duration, "work", queue=queue, kind=KINDS.get(queue, "other"))

    [use] = engine_uses(recording.trace())

    assert sum(time.exposed_ns for time in use.engines) + use.idle_ns == use.window_ns
    assert all(0 <= time.exposed_ns <= time.busy_ns for time in use.engines)


def test_what_the_matrix_engine_does_is_matrix_work() -> None:
    recording = Recording()
    recording.work(0, 60, "spatial_dedw (bf16)", queue="MME")
    recording.work(60, 20, "spatial_dedw (fp32)", queue="MME")
    recording.work(80, 20, "gemm_epilogue_f32", queue="TPC")

    [use] = device_uses(recording.trace())

    assert (use.matrix_ns, use.vector_ns, use.low_precision_ratio) == (80, 20, 0.75)


def test_reports_show_the_engines() -> None:
    diagnosis = diagnose(side_by_side().trace())
    text = text_report(diagnosis, width=100, colour=False, top=5)

    assert json_report(diagnosis)["summary"]["engines"] == [
        {
            "device": "0",
            "window_ns": 100,
            "idle_ns": 3,
            "computing_together_ns": 10,
            "engines": [
                {"engine": "MME", "busy_ns": 40, "exposed_ns": 40},
                {"engine": "TPC", "busy_ns": 32, "exposed_ns": 22},
                {"engine": "DMA", "busy_ns": 30, "exposed_ns": 20},
                {"engine": "NIC", "busy_ns": 20, "exposed_ns": 15},
            ],
        }
    ]
    section = text.split("Engines of device 0\n")[1].split("\n\n")[0]
    assert [re.sub(r"\s+", " ", line).strip() for line in section.splitlines()] == [
        "MME 40.0 % 40 ns, matrix products; 10 ns of it together with TPC",
        "exposed TPC 22.0 % 22 ns, all other computation; 10 ns more behind other engines",
        "exposed DMA 20.0 % 20 ns, moving data; 10 ns more behind other engines",
        "exposed NIC 15.0 % 15 ns, between devices; 5 ns more behind other engines",
        "idle 3.0 % 3 ns, no engine at work",
    ]
    assert "vector work" not in text
    assert "exposed TPC" in markdown_report(diagnosis, top=5)
