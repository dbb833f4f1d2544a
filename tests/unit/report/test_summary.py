"""Device and host at a glance: exact times and the ratios that follow."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import polars as pl
import pytest

from stepscope.analysis.device_time import DeviceUse, HostUse, device_uses, host_use
from stepscope.analysis.host import host_time
from stepscope.diagnosis import diagnose
from stepscope.report.places import glances
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS
from tests.unit.recording import Recording
from tests.unit.rendered import json_report, markdown_report, text_report


def a_bit_of_everything() -> Trace:
    """A device's 1000 ns: matrix work 0 to 300, vector work beside and after it, a collective, copies, a set, idle."""
    recording = Recording()
    recording.frame(0, 1000, "train.py(12): step")
    recording.operator(10, 40, "aten::mm", input_types='["c10::BFloat16", "c10::BFloat16"]')
    recording.launched(20, 100, 200, "kernel_of_unknown_name", 1)
    recording.launched(60, 300, 100, "ampere_sgemm_128x64_nn", 2)
    recording.launched(70, 350, 100, "vectorized_elementwise_kernel", 3, queue="8")
    recording.launched(80, 440, 60, "ncclDevKernel_AllReduce", 4, queue="9", kind="communication")
    recording.launched(90, 480, 120, "Memcpy HtoD", 5, queue="10", kind="copy_in")
    recording.launched(95, 590, 20, "Memset", 6, queue="11", kind="set")
    recording.launch(100, 800, 99, name="cudaDeviceSynchronize", kind="synchronise")
    recording.launched(950, 1060, 40, "reduce_kernel", 7)
    return recording.trace()


def test_empty() -> None:
    empty = Trace.from_tables({})

    assert device_uses(empty) == ()
    assert host_use(host_time(empty)) is None


def test_the_parts_add_up() -> None:
    [use] = device_uses(a_bit_of_everything())

    # The host worked from 100 (where the device's window begins) on but for the synchronisation from 100 to 900.
    assert use == DeviceUse(
        device="0",
        window_ns=1000,
        busy_ns=550,
        host_ns=100,
        both_ns=0,
        matrix_ns=300,
        vector_ns=140,
        both_engines_ns=50,
        vector_only_ns=90,
        unknown_only_ns=0,
        communication_only_ns=50,
        copy_only_ns=100,
        other_ns=10,
        idle_ns=450,
        matrix_work_ns=300,
        low_precision_ns=200,
    )
    parts = (
        use.matrix_ns, use.vector_only_ns, use.unknown_only_ns, use.communication_only_ns, use.copy_only_ns,
        use.other_ns, use.idle_ns,
    )  # fmt: skip
    assert sum(parts) == use.window_ns
    assert (use.device_ratio, use.device_host_ratio, use.host_overlap) == (0.55, 5.5, 0.0)
    assert use.low_precision_ratio == pytest.approx(2 / 3)


def test_kernels_that_nothing_explains_are_no_vector_work() -> None:
    recording = Recording()
    recording.work(0, 100, "ampere_sgemm_128x64_nn", 1)
    recording.work(100, 50, "sqrt_kernel_cuda", 2)
    recording.work(150, 300, "_Z9mystery42Pf", 3)
    recording.operator(0, 10, "aten::add")
    recording.launched(1, 450, 50, "_Z9mystery43Pf", 4)

    [use] = device_uses(recording.trace())

    assert (use.matrix_ns, use.vector_only_ns, use.unknown_only_ns) == (100, 100, 300)


def test_ratios_that_cannot_be_told() -> None:
    nothing = dataclasses.replace(
        device_uses(a_bit_of_everything())[0], window_ns=0, busy_ns=0, host_ns=0, matrix_work_ns=0
    )

    assert nothing.device_ratio == 0.0
    assert (nothing.device_host_ratio, nothing.low_precision_ratio, nothing.host_overlap) == (None, None, None)


def test_the_host() -> None:
    recording = Recording()
    recording.frame(0, 1000, "train.py(12): step")
    recording.operator(100, 200, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recording.operator(300, 400, "aten::mm")
    recording.work(500, 10, "gemm")

    assert host_use(host_time(recording.trace())) == HostUse(
        window_ns=1000,
        graph_build_ns=800,
        loader_ns=200,
        input_copy_ns=0,
        compile_ns=0,
        waiting_ns=0,
        compute_ns=0,
    )


def test_reports_show_it() -> None:
    diagnosis = diagnose(a_bit_of_everything())

    device, host = glances(replace(diagnosis, by_device=True))
    assert device.heading == "Device 0 at a glance"
    assert [(label, value) for label, value, _ in device.rows] == [
        ("device ratio", "55.0 %"),
        ("device to host", "5.50"),
        ("host overlap", "0.0 %"),
        ("matrix work", "30.0 %"),
        ("vector work", "9.0 %"),
        ("communication", "5.0 %"),
        ("copies", "10.0 %"),
        ("other work", "1.0 %"),
        ("idle", "45.0 %"),
        ("low precision", "66.7 %"),
    ]
    assert host.heading == "The host at a glance"
    for report in (
        text_report(diagnosis, width=140, colour=False, top=5),
        markdown_report(diagnosis, top=5),
    ):
        assert "Device 0 at a glance" in report
        assert "products, convolutions and attention, 50 ns of it together with vector work" in report
    summary = json_report(diagnosis)["summary"]
    assert summary["devices"][0]["matrix_ns"] == 300
    assert summary["devices"][0]["device_ratio"] == 0.55
    assert summary["host"]["window_ns"] == 1000


def test_without_a_device_the_hosts_causes_say_as_much() -> None:
    recording = Recording()
    recording.operator(0, 10, "aten::mm")
    diagnosis = diagnose(recording.trace())

    assert glances(diagnosis) == ()
    assert json_report(diagnosis)["summary"]["devices"] == []
    assert json_report(diagnosis)["summary"]["host"]["compute_ns"] == 10


@pytest.mark.filterwarnings("error")
def test_work_that_a_damaged_file_leaves_without_a_device_takes_no_report_down() -> None:
    trace = a_bit_of_everything()
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["device_work"] = trace.device_work.with_columns(device=pl.when(pl.int_range(pl.len()) > 0).then("device"))
    damaged = Trace.from_tables(tables, trace.metadata)

    diagnosis = diagnose(damaged)

    assert [use.device for use in device_uses(damaged)] == ["0"]
    assert text_report(diagnosis, width=100, top=5)
    assert markdown_report(diagnosis, top=5)
    assert json_report(diagnosis)["devices"][0]["device"] == "0"
