"""Traces of Intel Gaudi. No file of a real machine was at hand: these follow what is known of its form."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import idle_time
from stepscope.commands import main
from stepscope.diagnosis import diagnose
from stepscope.errors import StepscopeError
from stepscope.readers import gaudi, open_trace
from stepscope.readers.gaudi import columns as names
from stepscope.trace import Trace, Window
from stepscope.trace.metadata import Device
from tests.simulator import programs
from tests.simulator.gaudi import GaudiOptions, gaudi_bytes
from tests.simulator.kineto import kineto_bytes
from tests.simulator.machine import Machine

DEVICE_CAUSES = ("launch_latency", "dependency", "unknown")


def opened(folder: Path, data: bytes, name: str = "trace.json", **more: Any) -> Trace:
    path = folder / name
    path.write_bytes(data)
    trace = open_trace(path, **more)
    trace.check()
    return trace


def event(
    name: str, start: float, duration: float, row: tuple[int, int], cat: str = "hpu_op", **args: Any
) -> dict[str, Any]:
    """A complete event, in microseconds."""
    return {
        "args": args,
        "cat": cat,
        "dur": duration,
        "name": name,
        "ph": "X",
        "pid": row[0],
        "tid": row[1],
        "ts": start,
    }


def named(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": f"{kind}_name", "ph": "M", "ts": 0.0, "pid": process, "tid": thread, "args": {"name": name}}


def document(*events: dict[str, Any], **header: Any) -> bytes:
    return json.dumps({**header, "traceEvents": list(events)}, separators=(",", ":")).encode()


def device_work(trace: Trace) -> list[tuple[Any, ...]]:
    return trace.device_work.select("start_ns", "duration_ns", "name", "kind", "device", "queue").rows()


def causes(trace: Trace) -> dict[str, int]:
    """Idle time by cause; what is the device's doing together, for that depends on which queue is which."""
    cause = pl.when(pl.col("cause").is_in(DEVICE_CAUSES)).then(pl.lit("device")).otherwise("cause").alias("cause")
    return dict(idle_time(trace).group_by(cause).agg(pl.col("duration_ns").sum()).iter_rows())


PROGRAMS: list[Callable[[], Machine]] = [
    programs.input_bound_training,
    programs.item_every_step,
    programs.launch_bound_training,
    programs.recompilation,
    programs.exposed_all_reduce,
    programs.backward_thread,
    programs.graph_decode,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("options", [GaudiOptions(), GaudiOptions(flows=True, kineto=True)], ids=["recipes", "flows"])
def test_idle_time_has_the_same_causes_as_in_the_same_run_on_a_gpu(
    program: Callable[[], Machine], options: GaudiOptions, tmp_path: Path
) -> None:
    machine = program()

    trace = opened(tmp_path, gaudi_bytes(machine, options))

    assert trace.metadata.format == "gaudi"
    assert trace.warnings == ()
    assert trace.device_work["launch"].null_count() == 0
    assert causes(trace) == causes(opened(tmp_path, kineto_bytes(machine), "gpu.json"))


def test_a_thread_of_synapse_is_known_by_the_calls_around_its_own(tmp_path: Path) -> None:
    machine = programs.launch_bound_training()

    trace = opened(tmp_path, gaudi_bytes(machine, GaudiOptions(synapse_thread=False)))

    assert causes(trace) == causes(opened(tmp_path, kineto_bytes(machine), "gpu.json"))


def test_a_diagnosis_of_the_slow_loader(tmp_path: Path) -> None:
    diagnosis = diagnose(opened(tmp_path, gaudi_bytes(programs.input_bound_training())))

    assert diagnosis.findings[0].rule == "input-bound"
    assert [time.engine for time in diagnosis.engine_uses[0].engines] == ["MME", "TPC", "DMA"]
    assert diagnosis.device_uses[0].low_precision_ratio == 1.0
    assert trace_devices(diagnosis.metadata.devices) == [("0", "GAUDI2", 101_468_602_368)]


def trace_devices(devices: tuple[Device, ...]) -> list[tuple[str, str | None, int | None]]:
    return [(device.device, device.name, device.memory_bytes) for device in devices]


MATRIX, VECTOR, DMA = "MMEH_WB0_MON_TS_BIT1", "TPC_SPU_START_TO_SPU_HALT", "DBG_DMA_TRC_WR_DATA_LAST"


def measured(name: str, start: float, duration: float, row: int, hardware: str, **args: Any) -> dict[str, Any]:
    """What the hardware tracer wrote of one unit."""
    return event(name, start, duration, (0, row), **{"HW event name": hardware, **args})


HLTV = document(
    measured("GEMM", 100, 40, 6000, MATRIX, recipeHandle="7", dataType="bf16"),
    measured("GEMM", 101, 4, 6000, "MMEH_SOMETHING_ELSE", recipeHandle="7"),
    measured("add_fwd_bf16", 130, 20, 7001, VECTOR, recipeHandle="7", **{"Original Nodes": "a"}),
    measured("add_fwd_bf16", 132.5, 20, 7002, VECTOR, recipeHandle="7", **{"Original Nodes": "a"}),
    measured("add_fwd_bf16", 135, 5, 7003, VECTOR, recipeHandle="7", **{"Original Nodes": "b"}),
    measured("memcpy", 150, 10, 4002, DMA, **{"Module id": "0"}),
    {**event("DmaTranspose", 165, 5, (0, 4003)), "args": None},
    event("send", 170, 8, (0, 14001)),
    event("rx", 190, 2, (0, 3000)),
    event("unknown thing", 200, 1, (0, 12)),
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_a_hardware_trace_by_the_numbers_of_its_rows(packed: bool, tmp_path: Path) -> None:
    trace = opened(tmp_path, gzip.compress(HLTV) if packed else HLTV, "model.hltv")

    assert device_work(trace) == [
        (0, 40_000, "GEMM (bf16)", "compute", "0", "MME"),
        (30_000, 22_500, "add_fwd_bf16", "compute", "0", "TPC"),  # two units of one node at once
        (35_000, 5_000, "add_fwd_bf16", "compute", "0", "TPC"),
        (50_000, 10_000, "memcpy", "copy_on_device", "0", "EDMA"),
        (65_000, 5_000, "DmaTranspose", "copy_on_device", "0", "EDMA"),
        (70_000, 8_000, "send", "communication", "0", "NIC"),
        (90_000, 2_000, "rx", "copy_out", "0", "PDMA"),
    ]
    assert [(warning.kind, warning.count) for warning in trace.warnings] == [("hardware_mark", 1)]
    assert trace.operators["name"].to_list() == ["unknown thing"]
    assert set(trace.lanes.filter(pl.col("kind") == "queue")["queue"]) == {"MME", "TPC", "EDMA", "NIC", "PDMA"}


def test_rows_are_known_by_their_names_before_their_numbers(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        document(
            named("process", "/device:HPU:3", 1),
            named("thread", "**MME 1", 1, 1001),
            named("thread", "*TPC 12", 1, 2012),
            named("thread", "KDMA", 1, 5),
            named("thread", "PSOC", 1, 8000),
            event("spatial_convolution", 0, 5, (1, 1001), "Kernel", dataType="float32"),
            event("relu", 5, 5, (1, 2012), "Kernel", dataType="bf16"),
            event("memset", 10, 5, (1, 5), "Memset"),
            event("boot", 20, 5, (1, 8000), "Runtime"),
        ),
    )

    assert device_work(trace) == [
        (0, 5000, "spatial_convolution (fp32)", "compute", "3", "MME"),
        (5000, 5000, "relu (bf16)", "compute", "3", "TPC"),
        (10_000, 5000, "memset", "set", "3", "KDMA"),
        (20_000, 5000, "boot", "other", "3", "PSOC"),
    ]


def recipe_trace(folder: Path, enqueued: list[float], ran: list[float]) -> list[tuple[int, float | None]]:
    """When each run of a recipe of two nodes began, and when the call that started it: microseconds."""
    calls = [event("enqueueWithExternalEventsExt", at, 1, (2, -1000), recipeId=5, recipeName="step") for at in enqueued]
    works = [event("GEMM", at, 3, (0, 6000), recipeId=5) for at in ran]
    works += [event("relu", at + 4, 3, (0, 7000), recipeId=5) for at in ran]
    trace = opened(folder, document(named("thread", "Synapse/main", 2, -1000), *calls, *works))
    start = pl.Series(trace.launches["start_ns"].to_list(), dtype=pl.Int64).gather(trace.device_work["launch"])
    first = min([*enqueued, *ran])
    found = zip(trace.device_work["start_ns"] / 1000 + first, start / 1000 + first, strict=True)
    return [(int(work), call) for work, call in found]


@pytest.mark.parametrize(
    ("enqueued", "ran", "expected"),
    [
        # The host is two steps ahead: the last call before the first run is that of the third.
        ([0, 10, 20], [100, 200, 300], [(100, 0), (104, 0), (200, 10), (204, 10), (300, 20), (304, 20)]),
        # The first run was enqueued before the recording began.
        ([110, 120], [100, 200, 300], [(100, None), (104, None), (200, 110), (204, 110), (300, 120), (304, 120)]),
        # Each launch runs the recipe twice.
        ([0, 150], [1, 9, 200, 209], [(1, 0), (5, 0), (9, 0), (13, 0), (200, 150), (204, 150), (209, 150), (213, 150)]),
        # The recording ended before the last run.
        ([0, 10, 20], [100, 200], [(100, 0), (104, 0), (200, 10), (204, 10)]),
    ],
)  # fmt: skip
def test_runs_of_a_recipe_belong_to_its_launches_in_order(
    enqueued: list[float], ran: list[float], expected: list[tuple[int, float | None]], tmp_path: Path
) -> None:
    assert recipe_trace(tmp_path, enqueued, ran) == expected


def test_calls_and_the_bridges_own_work_stand_on_the_real_thread(tmp_path: Path) -> None:
    def pair(name: str, start: float, end: float, process: int) -> list[dict[str, Any]]:
        row = {"cat": "Runtime", "pid": process, "tid": 4242}
        return [{"name": name, "ph": "B", "ts": start, **row}, {"name": name, "ph": "E", "ts": end, **row}]

    trace = opened(
        tmp_path,
        document(
            event("aten::linear", 0, 100, (4242, 4242), "cpu_op"),
            named("process", "Synapse Logger", 14_242),
            named("process", "Bridge Logs", 24_242),
            *pair("SyncTensorsGraphInternal", 10, 90, 24_242),
            *pair("compileGraph", 20, 60, 14_242),
            *pair("synLaunchWithExternalEvents", 70, 80, 14_242),
            *pair("synEventSynchronize", 92, 99, 14_242),
            {"name": "cut off", "ph": "B", "ts": 95, "cat": "Runtime", "pid": 24_242, "tid": 4242},
            {"name": "begun before", "ph": "E", "ts": 96, "cat": "Runtime", "pid": 24_242, "tid": 4242},
            event("relu", 85, 5, (0, 7000), "Kernel"),
            named("thread", "TPC 0", 0, 7000),
        ),
    )

    assert trace.operators.select("name", "lane", "parent").rows() == [
        ("aten::linear", 0, None),
        ("SyncTensorsGraphInternal", 0, 0),
    ]
    assert trace.launches.select("name", "kind", "lane", "operator").rows() == [
        ("compileGraph", "compile", 0, 1),
        ("synLaunchWithExternalEvents", "graph_launch", 0, 1),
        ("synEventSynchronize", "synchronise", 0, 0),
    ]
    assert [(warning.kind, warning.count) for warning in trace.warnings] == [("unclosed", 1), ("unopened", 1)]


def test_graphs_that_are_compiled_in_every_step_are_found(tmp_path: Path) -> None:
    events = [named("process", "Synapse Logger", 11), named("process", "/device:HPU:0", 0)]
    for step in range(4):
        begin = 1000 * step
        events += [
            event(f"ProfilerStep#{step}", begin, 1000, (1, 1), "user_annotation"),
            event("compileGraph", begin + 100, 600, (10_001, 1), "Runtime"),
            event("synLaunchWithExternalEvents", begin + 720, 10, (10_001, 1), "Runtime", recipeId=step + 1),
            event("GEMM", begin + 740, 200, (0, 6000), "Kernel", recipeId=step + 1),
        ]

    diagnosis = diagnose(opened(tmp_path, document(named("process", "Synapse Logger", 10_001), *events)))

    [finding] = [finding for finding in diagnosis.findings if finding.rule == "recompilation"]
    assert finding.title.startswith("60% of the time goes to compiling code: 4 compilations in 4 of 4 steps")


def test_memory_of_the_device(tmp_path: Path) -> None:
    args = {"Addr": 64, "Bytes": 512, "Device Id": 0, "Device Type": 1, "Total Allocated": 512, "Total Reserved": 1024}
    instant = {
        "args": args,
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "ph": "i",
        "pid": 30_001,
        "s": "t",
        "tid": 1,
        "ts": 5,
    }

    trace = opened(tmp_path, document(named("process", "Memory Logs", 30_001), event("GEMM", 0, 9, (0, 6000)), instant))

    assert trace.memory.select("start_ns", "device", "bytes", "total_reserved").rows() == [(5000, "0", 512, 1024)]


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    data = gaudi_bytes(programs.input_bound_training())
    whole = opened(tmp_path, data)
    step = whole.annotations.filter(pl.col("step") == 2)
    start, end = int(step["start_ns"][0]), int(step["start_ns"][0] + step["duration_ns"][0])

    part = opened(tmp_path, data, window=Window(start, end))

    assert part.device_work.filter(pl.col("start_ns").is_between(start, end)).height == 8
    assert part.device_work.height < whole.device_work.height
    assert part.device_work["launch"].null_count() == 0
    assert set(causes(part)) == set(causes(whole))


@pytest.mark.parametrize(
    ("text", "is_gaudi"),
    [
        (gaudi_bytes(programs.graph_decode()), True),
        (HLTV, True),
        (b'{"schemaVersion": 1, "deviceProperties": [{"name": "GAUDI3", "totalGlobalMem": 1}], "traceEvents": [', True),
        (b'[{"ph": "X", "cat": "hpu_op", "name": "x"', True),
        (kineto_bytes(programs.graph_decode()), False),
        (b'{"traceEvents": [{"ph": "X", "name": "say \\"cat\\": \\"hpu_op\\" twice"}]}', False),
        (b'{"deviceProperties": [{"name": "NVIDIA H100"}], "traceEvents": [{"ph": "X", "name": "GAUDI2"}]}', False),
        (b'{"cat": "hpu_op"}', False),
        (b"", False),
    ],
    ids=range(9),
)
def test_the_content_tells(text: bytes, is_gaudi: bool) -> None:
    assert gaudi.recognises(text) is is_gaudi


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("synLaunchWithExternalEventsExt", "graph_launch"),
        ("enqueueWithExternalEventsExt", "graph_launch"),
        ("synMemCopyAsync", "copy"),
        ("synMemsetD32Async", "set"),
        ("synEventRecord", "event"),
        ("synEventSynchronize", "synchronise"),
        ("synchronizeEvent", "synchronise"),
        ("synStreamWaitEvent", "queue_wait"),
        ("synDeviceMalloc", "allocate"),
        ("synGraphCompile", "compile"),
        ("compileGraph", "compile"),
        ("synTensorCreate", "other"),
        ("SyncTensorsGraphInternal", None),
        ("ExecuteCachedGraph", None),
        ("LaunchSyncTensorsGraph", None),
        ("LaunchRecipeTask", None),
        ("launch_recipe", None),
        ("add_new_recipe", None),
        ("hpu_lazy::add", None),
    ],
)
def test_what_host_rows_are(name: str, kind: str | None) -> None:
    assert names.call_kind(name) == kind


@pytest.mark.parametrize(
    ("engine", "category", "name", "kind"),
    [
        ("MME", "kernel", "GEMM", "compute"),
        ("TPC", "hpu_op", "cast", "compute"),
        ("NIC", "hpu_op", "send", "communication"),
        ("PDMA", "hpu_op", "pdma_tx_commands", "copy_in"),
        ("PDMA", "runtime", "memcpy D2H", "copy_out"),
        ("PDMA", "runtime", "PDMA", "other"),
        ("DMA", "runtime", "dma", "other"),
        ("EDMA", "runtime", "anything", "copy_on_device"),
        ("TPC", "gpu_memset", "memset", "set"),
        (None, "runtime", "PSOC", "other"),
    ],
)
def test_what_device_rows_are(engine: str | None, category: str, name: str, kind: str) -> None:
    assert names.work_kind(engine, category, name) == kind


@pytest.mark.parametrize(
    ("word", "type_"),
    [
        ("bf16", "bf16"),
        ("float32", "fp32"),
        ("FP16", "fp16"),
        ("fp8_143", "fp8"),
        ("", None),
        ("na", None),
        ("int32", "int32"),
    ],
)
def test_number_types(word: str, type_: str | None) -> None:
    assert names.number_type(word) == type_


@pytest.mark.slow
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_ends_in_a_sentence_or_a_trace(data: st.DataObject, tmp_path: Path) -> None:
    whole = data.draw(st.sampled_from([HLTV, gaudi_bytes(programs.graph_decode(), GaudiOptions(flows=True))]))
    place = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:place] + data.draw(st.binary(max_size=6)) + whole[place + data.draw(st.integers(0, 40)) :]

    with contextlib.suppress(StepscopeError):
        diagnose(opened(tmp_path, broken), rules=["launch-bound", "input-bound"])


@pytest.mark.parametrize(
    "args",
    [
        {"recipeId": "x" * 5000, "dataType": "y" * 5000, "EventName": "z" * 50_000},
        {"recipeId": 2**70, "device": 2**70, "bytes": "9" * 50},
        {"recipeId": None, "dataType": None, "HW event name": None, "Original Nodes": [["a"]]},
        {"HW event name": 7, "dataType": {}, "recipeName": [1]},
    ],
    ids=range(4),
)
def test_arguments_of_any_kind(args: dict[str, Any], tmp_path: Path) -> None:
    trace = opened(tmp_path, document(event("GEMM", 0, 5, (0, 6000), **args), event("x", 0, 5, (2, 1), **args)))

    assert trace.device_work["queue"].to_list() == ["MME"]
    assert len(trace.device_work["name"][0]) < 100


def test_a_thread_that_is_called_like_an_engine_is_none(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        document(
            named("process", "Bridge Logs", 20_001),
            named("thread", "NIC watcher", 20_001, 3),
            event("watch", 0, 5, (20_001, 3), "Runtime"),
            event("GEMM", 0, 5, (0, 6000)),
        ),
    )

    assert trace.device_work["name"].to_list() == ["GEMM"]
    assert trace.operators["name"].to_list() == ["watch"]


def test_findings_prescribe_what_helps_on_gaudi(tmp_path: Path) -> None:
    diagnosis = diagnose(opened(tmp_path, gaudi_bytes(programs.item_every_step())))

    [finding] = [finding for finding in diagnosis.findings if finding.rule == "host-synchronisation"]
    assert finding.remedy.text.startswith("loss.item(), print(loss) and .cpu() end the graph")


def test_an_export_of_such_a_trace_has_the_same_device_time(tmp_path: Path) -> None:
    trace = opened(tmp_path, gaudi_bytes(programs.input_bound_training()))
    exported = tmp_path / "exported.json"

    assert main(["export", str(tmp_path / "trace.json"), str(exported), "--format", "chrome"]) == 0

    columns = ["device", "busy_ns", "idle_ns"]
    assert device_time(open_trace(exported))[columns].equals(device_time(trace)[columns])
