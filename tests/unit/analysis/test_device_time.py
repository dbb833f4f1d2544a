"""How devices and queues spent their time."""

from __future__ import annotations

from stepscope.analysis.device_time import DEVICE_TIME_SCHEMA, device_time, queue_time, step_busy_shares
from stepscope.analysis.steps import step_table
from stepscope.trace import Metadata, Trace, Window
from tests.unit.recording import Recording


def two_queues(metadata: Metadata | None = None) -> Recording:
    """Device 0: compute 10-30 and 50-60, communication 20-40, copies 38-45 and 55-58, a set 70-75."""
    recording = Recording(metadata or Metadata())
    recording.work(10, 20, "gemm", 1)
    recording.work(20, 20, "ncclAllReduce", 2, queue="8", kind="communication")
    recording.work(38, 7, "Memcpy HtoD", 3, queue="9", kind="copy_in")
    recording.work(50, 10, "gemm", 4)
    recording.work(55, 3, "Memcpy DtoD", 5, queue="9", kind="copy_on_device")
    recording.work(70, 5, "Memset", 6, kind="set")
    return recording


def test_no_device() -> None:
    devices = device_time(Trace.from_tables({}))

    assert dict(devices.schema) == {name: dtype() for name, dtype in DEVICE_TIME_SCHEMA.items()}
    assert devices.height == 0
    assert queue_time(Trace.from_tables({})).height == 0


def test_each_figure_is_a_union_over_queues() -> None:
    assert device_time(two_queues().trace()).rows(named=True) == [
        {
            "device": "0",
            "window_ns": 65,
            "busy_ns": 35 + 10 + 5,
            "idle_ns": 5 + 10,
            "compute_ns": 30,
            "communication_ns": 20,
            "copy_ns": 10,
            "exposed_communication_ns": 10,
            "exposed_copy_ns": 7,
        }
    ]


def test_a_window_cuts_work_and_counts_what_lies_around_it() -> None:
    devices = device_time(two_queues().trace(), window=Window(0, 25))

    assert devices.select("window_ns", "busy_ns", "idle_ns", "compute_ns", "communication_ns").rows() == [
        (25, 15, 10, 15, 5)
    ]


def test_the_window_that_was_read_is_the_window() -> None:
    read = device_time(two_queues(Metadata(window=Window(0, 80))).trace())
    open_ended = device_time(two_queues(Metadata(window=Window(5, 2**62))).trace())

    assert (read["window_ns"][0], read["idle_ns"][0]) == (80, 30)
    assert (open_ended["window_ns"][0], open_ended["idle_ns"][0]) == (65, 15)


def test_devices_do_not_mix() -> None:
    recording = Recording()
    recording.work(0, 10, "gemm", 1, device="1")
    recording.work(50, 10, "gemm", 2, device="0")

    assert device_time(recording.trace()).select("device", "window_ns", "busy_ns").rows() == [
        ("0", 10, 10),
        ("1", 10, 10),
    ]


def test_work_of_no_length() -> None:
    recording = Recording()
    recording.work(7, 0, "nothing", 1)

    assert device_time(recording.trace()).select("window_ns", "busy_ns", "idle_ns").rows() == [(0, 0, 0)]
    assert queue_time(recording.trace()).rows() == [("0", "7", 1, 0, 0.0)]


def test_queues() -> None:
    assert queue_time(two_queues().trace()).rows() == [
        ("0", "7", 3, 35, 35 / 65),
        ("0", "8", 1, 20, 20 / 65),
        ("0", "9", 2, 10, 10 / 65),
    ]


def test_the_duty_cycle_of_each_step_and_device() -> None:
    recording = Recording()
    for number, start in enumerate((0, 100, 200)):
        recording.step(start, 100, number)
    recording.work(10, 50, "gemm", device="0")
    recording.work(40, 40, "gemm", device="0", queue="9")
    recording.work(180, 40, "gemm", device="0")
    recording.work(100, 100, "gemm", device="1")
    trace = recording.trace()

    shares = step_busy_shares(trace, step_table(trace))

    assert shares.to_dict(as_series=False) == {
        "device_0_busy_share": [0.7, 0.2, 0.2],
        "device_1_busy_share": [0.0, 1.0, 0.0],
    }


def test_without_a_device_or_a_step_there_is_no_duty_cycle() -> None:
    recording = Recording()
    recording.operator(0, 5, "aten::mm")
    trace = recording.trace()
    assert step_busy_shares(trace, step_table(trace)).is_empty()
    recording.work(0, 5, "gemm")
    trace = recording.trace()
    assert step_busy_shares(trace, step_table(trace)).rows() == []
