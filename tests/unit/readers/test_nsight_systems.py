"""Exports of Nsight Systems: what their tables become, table by table, by hand-written rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.device_time import device_time
from stepscope.analysis.module_paths import node_source
from stepscope.analysis.steps import step_table
from stepscope.commands import main
from stepscope.compare import compare_traces
from stepscope.readers import open_trace
from stepscope.trace import Trace, Window
from stepscope.trace.metadata import Device
from stepscope.trace.window import StepRange
from stepscope.whatif.host_waits import device_waits
from tests.unit.nsight_databases import NAMES, Row, call, in_range, kernel, process, thread, work, written
from tests.unit.small_traces import counted, rows

RUNTIME, KERNEL = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
SYNCHRONIZATION = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"


def opened(tmp_path: Path, how: dict[str, Any] | None = None, **tables: list[Row]) -> Trace:
    trace = open_trace(written(tmp_path / "run.sqlite", **tables), **(how or {}))
    trace.check()
    return trace


def test_a_kernel_its_launch_and_the_operator_around_it(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        **{
            "NVTX_EVENTS": [in_range(1000, 1900, "aten::mm, seq = 4, op_id = 9, sizes = [[2, 3], [3, 4], []]")],
            RUNTIME: [call(1100, 1200, 7)],
            KERNEL: [kernel(1500, 2500, 7)],
        },
    )

    assert trace.metadata.format == "nsight_systems"
    assert trace.metadata.recorded == ("shapes",)
    assert rows(trace, "operators", "start_ns", "duration_ns", "name", "sequence_number", "input_shapes") == [
        (0, 900, "aten::mm", 4, "[[2, 3], [3, 4], []]")
    ]
    assert rows(trace, "launches", "start_ns", "duration_ns", "name", "kind", "correlation", "operator") == [
        (100, 100, "cudaLaunchKernel", "launch", 7, 0)
    ]
    assert rows(trace, "device_work", "start_ns", "duration_ns", "name", "kind", "device", "queue", "launch") == [
        (500, 1000, "gemm", "compute", "0", "7", 0)
    ]
    assert rows(
        trace, "device_work", "grid", "block", "registers", "shared_memory_bytes", "occupancy", "correlation"
    ) == [("4,2,1", "128,1,1", 32, 1536, None, 7)]
    assert trace.warnings == ()


def test_an_export_is_not_taken_for_telemetry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run.sqlite", **{RUNTIME: [call(1100, 1200, 7)], KERNEL: [kernel(1500, 2500, 7)]})
    page = tmp_path / "report.html"

    assert main(["diagnose", str(tmp_path / "run.sqlite"), "--html", str(page), "--no-cache"]) == 0

    assert capsys.readouterr().err == f"stepscope: wrote {page}\n"
    assert "device 0: <" not in page.read_text()  # the file tells no name


def test_names_come_from_the_short_one_and_else_are_said_to_be_missing(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        **{KERNEL: [kernel(0, 1, demangledName=None), kernel(2, 3, demangledName=99), kernel(4, 5, demangledName=5)]},
    )

    assert rows(trace, "device_work", "name", "kind") == [
        ("gemm", "compute"),
        ("(no name in the file)", "compute"),
        (NAMES[5], "communication"),
    ]


def test_copies_and_sets_are_named_as_pytorchs_profiler_names_them(tmp_path: Path) -> None:
    copies = [
        work(10 * kind, 10 * kind + 5, bytes=64, copyKind=kind, srcKind=source, dstKind=target)
        for kind, source, target in (
            (1, 1, 2),
            (2, 2, 0),
            (8, 2, 2),
            (9, 0, 0),
            (10, 2, 2),
            (11, 4, 4),
            (0, 0, 2),
            (0, 7, 7),
        )
    ]
    trace = opened(tmp_path, **{MEMCPY: copies, MEMSET: [work(200, 201, bytes=8, memKind=2)]})

    assert sorted(rows(trace, "device_work", "kind", "name", "bytes")) == [
        ("copy_in", "Memcpy HtoD (Pageable -> Device)", 64),
        ("copy_in", "Memcpy HtoD (Pinned -> Device)", 64),
        ("copy_in", "Memcpy HtoD, unified memory (Managed -> Managed)", 64),
        ("copy_on_device", "Memcpy DtoD (Device -> Device)", 64),
        ("copy_on_device", "Memcpy PtoP (Device -> Device)", 64),
        ("copy_out", "Memcpy DtoH (Device -> Pageable)", 64),
        ("other", "Memcpy HtoH (Pageable -> Pageable)", 64),
        ("other", "Memcpy Unknown (Unknown -> Unknown)", 64),
        ("set", "Memset (Device)", 8),
    ]


def test_two_processes_may_use_the_same_correlation_numbers_and_streams(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        **{
            RUNTIME: [call(0, 10, 1), call(5, 15, 1, globalTid=thread(201, 200))],
            KERNEL: [kernel(20, 30, 1), kernel(40, 50, 1, globalPid=process(200))],
        },
    )

    lanes = dict(rows(trace, "lanes", "lane", "process"))
    launches = rows(trace, "launches", "lane")
    assert [lanes[launches[row][0]] for (row,) in rows(trace, "device_work", "launch")] == ["100", "200"]
    assert rows(trace, "device_work", "device", "queue") == [("0", "7"), ("0", "7 of process 200")]


def test_a_process_waits_for_its_own_work(tmp_path: Path) -> None:
    other = {"globalTid": thread(200, 200)}
    trace = opened(
        tmp_path,
        **{
            RUNTIME: [
                call(0, 10, 1),
                call(30, 10_130, 2, name=4),
                call(50, 60, 1, **other),
                call(70, 80, 2, name=7, **other),
            ],
            KERNEL: [kernel(20, 10_120, 1), kernel(100, 10_125, 1, globalPid=process(200), deviceId=1)],
        },
    )
    waits = device_waits(trace)

    assert [
        (trace.launches["name"][row], trace.device_work["device"][work])
        for row, work in zip(waits.launch.tolist(), waits.work.tolist(), strict=True)
    ] == [("cudaStreamSynchronize", "0")]


def test_one_graph_launch_has_many_kernels_or_one_record_of_the_whole(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        **{
            RUNTIME: [call(0, 10, 1, name=6), call(20, 30, 2, name=6)],
            KERNEL: [kernel(40, 50, 1, graphNodeId=11), kernel(50, 60, 1, graphNodeId=12)],
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [work(70, 90, 2, graphId=5, graphExecId=6)],
        },
    )

    assert rows(trace, "launches", "name", "kind") == [("cudaGraphLaunch", "graph_launch")] * 2
    assert rows(trace, "device_work", "name", "duration_ns", "launch") == [
        ("gemm", 10, 0),
        ("gemm", 10, 0),
        ("CUDA graph 5", 20, 1),
    ]


def test_waits_are_on_the_device_of_their_context_and_not_on_the_device_0_that_they_carry(tmp_path: Path) -> None:
    no_stream = 0xFFFFFFFF
    trace = opened(
        tmp_path,
        **{
            KERNEL: [kernel(0, 10, 1, deviceId=3, contextId=2)],
            SYNCHRONIZATION: [
                work(20, 30, 2, contextId=2, syncType=3, eventSyncId=0),
                work(31, 35, 3, contextId=2, streamId=no_stream, syncType=1, eventSyncId=0),
                work(40, 41, 4, contextId=2, streamId=8, syncType=2, eventSyncId=77),
                work(50, 51, 5, contextId=9, streamId=7, syncType=4, eventSyncId=0),
            ],
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT": [
                {"correlationId": 6, "eventSyncId": 77} | work(0, 0, contextId=2) | {"correlationId": 6}
            ],
        },
    )

    assert rows(trace, "synchronisations", "kind", "device", "queue", "waited_queue", "waited_correlation") == [
        ("queue", "3", "7", None, None),
        ("event", "3", None, None, None),
        ("queue_wait", "3", "8", "7", 6),
        ("device", None, None, None, None),
    ]


class TestDevices:
    GPUS: tuple[Row, ...] = tuple(
        {"id": number, "name": name, "totalMemory": 80, "smCount": 4, "computeMajor": 9, "computeMinor": 0}
        for number, name in ((0, "H100"), (1, "H200"))
    )

    def test_processes_that_each_see_one_gpu_as_their_device_0(self, tmp_path: Path) -> None:
        trace = opened(
            tmp_path,
            **{
                KERNEL: [kernel(0, 10), kernel(0, 20, globalPid=process(200))],
                "TARGET_INFO_GPU": list(self.GPUS),
                "TARGET_INFO_CUDA_DEVICE": [
                    {"gpuId": 1, "cudaId": 0, "pid": 100},
                    {"gpuId": 0, "cudaId": 0, "pid": 200},
                ],
            },
        )

        assert sorted(rows(trace, "device_work", "device", "duration_ns")) == [("0", 20), ("1", 10)]
        assert trace.metadata.devices == (Device("0", "H100", 80, "9.0", 4), Device("1", "H200", 80, "9.0", 4))
        assert rows(trace, "device_work", "blocks_per_multiprocessor") == [(2.0,), (2.0,)]

    def test_different_gpus_stay_unnamed_where_nothing_tells_which_is_which(self, tmp_path: Path) -> None:
        trace = opened(tmp_path, **{KERNEL: [kernel(0, 10)], "TARGET_INFO_GPU": list(self.GPUS)})

        assert trace.metadata.devices == (Device("0"),)
        assert rows(trace, "device_work", "blocks_per_multiprocessor") == [(None,)]

    def test_equal_gpus_are_described_all_the_same(self, tmp_path: Path) -> None:
        gpus = [self.GPUS[0], self.GPUS[0] | {"id": 1}]
        trace = opened(tmp_path, **{KERNEL: [kernel(0, 10, deviceId=1)], "TARGET_INFO_GPU": gpus})

        assert trace.metadata.devices == (Device("1", "H100", 80, "9.0", 4),)


class TestHost:
    def test_threads_and_processes_have_their_names_and_ranks(self, tmp_path: Path) -> None:
        trace = opened(
            tmp_path,
            **{
                RUNTIME: [call(0, 1, 1), call(2, 3, 2, globalTid=thread(105))],
                "PROCESSES": [{"globalPid": process(100), "pid": 100, "name": "python3"}],
                "ThreadNames": [{"nameId": 8, "priority": 20, "globalTid": thread(100)}],
                "MPI_RANKS": [{"globalTid": thread(100), "rank": 3}],
            },
        )

        assert rows(trace, "lanes", "kind", "process", "process_name", "thread", "name", "rank") == [
            ("host_thread", "100", "python3", "100", "main thread", 3),
            ("host_thread", "100", "python3", "105", "thread 105", 3),
        ]
        assert trace.metadata.rank == 3

    def test_ranges_become_what_their_names_say(self, tmp_path: Path) -> None:
        texts = [
            "aten::add",
            "MulBackward0, seq = 5, op_id = 6",
            "autograd::engine::evaluate_function: MulBackward0, op_id = 7",
            "my own range, op_id = 8",
            "forward",
            "cudaLooksLikeACall",
            "Optimizer.step#Adam.step, op_id = 9",
            "{'Module': 'model.layers.0', 'TrainableParams': {'weight': [4, 4]}}",
            "model.py(12): forward",
        ]
        trace = opened(tmp_path, NVTX_EVENTS=[in_range(10 * n, 10 * n + 5, text) for n, text in enumerate(texts)])

        assert rows(trace, "operators", "name", "sequence_number") == [
            ("aten::add", None),
            ("MulBackward0", 5),
            ("autograd::engine::evaluate_function: MulBackward0", None),
        ]
        assert rows(trace, "annotations", "name", "kind") == [
            ("my own range", "host"),
            ("forward", "host"),
            ("cudaLooksLikeACall", "host"),
            ("Optimizer.step#Adam.step", "host"),
        ]
        assert rows(trace, "frames", "module", "file", "line") == [
            ("model.layers.0", None, None),
            (None, "model.py", 12),
        ]
        assert rows(trace, "launches", "name") == []

    def test_sequence_numbers_join_forward_and_backward_of_each_process(self, tmp_path: Path) -> None:
        events = []
        for number, of_process in enumerate((100, 200)):
            where = {"globalTid": thread(of_process, of_process)}
            events += [in_range(10 + number, 20, "aten::mul, seq = 5", **where)]
            events += [in_range(30 + number, 40, "MulBackward0, seq = 5", **where)]
        trace = opened(tmp_path, NVTX_EVENTS=events)

        assert rows(trace, "operators", "start_ns", "name") == [
            (0, "aten::mul"),
            (1, "aten::mul"),
            (20, "MulBackward0"),
            (21, "MulBackward0"),
        ]
        assert node_source(trace).tolist() == [-1, -1, 0, 1]

    def test_registered_names_marks_open_ranges_and_rows_that_only_name_things(self, tmp_path: Path) -> None:
        trace = opened(
            tmp_path,
            NVTX_EVENTS=[
                in_range(0, 100, None, textId=2),
                in_range(50, None, "instant", eventType=34),
                in_range(60, None, "never ended"),
                in_range(0, None, "NCCL", eventType=75),
            ],
            ANALYSIS_DETAILS=[{"startTime": 0, "stopTime": 500}],
        )

        assert rows(trace, "annotations", "start_ns", "duration_ns", "name") == [
            (0, 100, "gemm"),
            (50, 0, "instant"),
            (60, 440, "never ended"),
        ]
        assert counted(trace) == {"open_range": 1}

    def test_overhead_is_the_profilers_where_it_stops_the_program_and_a_compilation_where_cuda_loads(
        self, tmp_path: Path
    ) -> None:
        def overhead(start: int, kind: int, of: int = 100) -> Row:
            return {"start": start, "end": start + 5, "globalTid": thread(of), "nameId": 9, "overheadType": kind}

        trace = opened(
            tmp_path,
            **{
                RUNTIME: [call(0, 100, 1)],
                "PROFILER_OVERHEAD": [overhead(10, 3), overhead(20, 3, of=111)],
                "CUPTI_ACTIVITY_KIND_OVERHEAD": [overhead(30, 7), overhead(40, 8)],
            },
        )

        assert rows(trace, "annotations", "start_ns", "kind") == [(10, "overhead"), (20, "profiler"), (40, "host")]
        assert rows(trace, "launches", "start_ns", "name", "kind") == [
            (0, "cudaLaunchKernel", "launch"),
            (30, "Lazy function loading", "compile"),
        ]

    def test_calls_of_the_system_scheduling_memory_and_sampled_counters(self, tmp_path: Path) -> None:
        trace = opened(
            tmp_path,
            **{
                RUNTIME: [call(0, 100, 1)],
                "OSRT_API": [{"start": 10, "end": 90, "globalTid": thread(100), "nameId": 7}],
                "SCHED_EVENTS": [
                    {"start": 11, "cpu": 2, "isSchedIn": 0, "globalTid": thread(100)},
                    {"start": 80, "cpu": 3, "isSchedIn": 1, "globalTid": thread(100)},
                    {"start": 80, "cpu": 3, "isSchedIn": 1, "globalTid": thread(999, 9)},
                ],
                "CUDA_GPU_MEMORY_USAGE_EVENTS": [
                    {"start": 20 + kind, "globalPid": process(100), "deviceId": 0, "address": 4096, "bytes": 64}
                    | {"memKind": kind, "memoryOperationType": operation}
                    for kind, operation in ((2, 0), (1, 0), (2, 1))
                ],
                "GPU_METRICS": [{"timestamp": 50, "typeId": 0x1234_01, "metricId": 4, "value": 37}],
                "TARGET_INFO_GPU_METRICS": [{"typeId": 0x1234_01, "metricId": 4, "metricName": "SMs Active [%]"}],
            },
        )

        assert rows(trace, "annotations", "start_ns", "duration_ns", "name") == [(10, 80, "poll")]
        assert rows(trace, "counters", "start_ns", "name", "series", "value") == [
            (11, "on a processor", "", 0.0),
            (50, "SMs Active [%]", "GPU 1", 37.0),
            (80, "on a processor", "", 1.0),
        ]
        assert sorted(rows(trace, "memory", "device", "address", "bytes")) == [
            ("0", 4096, -64),
            ("0", 4096, 64),
            ("cpu", 4096, 64),
        ]
        assert trace.metadata.recorded == ("memory",)

    def test_events_that_have_no_place_are_told_of(self, tmp_path: Path) -> None:
        trace = opened(tmp_path, **{RUNTIME: [call(0, 1, 1)], "COMPOSITE_EVENTS": [{"id": 1, "start": 5, "cpu": 0}]})

        assert [warning.detail for warning in trace.warnings] == [
            "events of kinds that a trace has no table for were left out: COMPOSITE_EVENTS"
        ]


class TestSteps:
    @pytest.mark.parametrize(
        "names",
        [
            ["step 3", "step 4", "step 5"],
            ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"],
            ["train_step_3", "train_step_4", "train_step_5"],
            ["Iteration=3", "Iteration=4", "Iteration=5"],
            ["engine/step-3", "engine/step-4", "engine/step-5"],
            ["batch 3 (of 9)", "batch 4 (of 9)", "batch 5 (of 9)"],
            ["step 3, op_id = 17", "step 4, op_id = 18", "step 5, op_id = 19"],
        ],
    )
    def test_ranges_with_numbers_that_grow_are_steps(self, names: list[str], tmp_path: Path) -> None:
        trace = opened(tmp_path, NVTX_EVENTS=[in_range(10 * n, 10 * n + 9, name) for n, name in enumerate(names)])

        assert rows(trace, "annotations", "start_ns", "step") == [(0, 3), (10, 4), (20, 5)]
        assert step_table(trace)["index"].to_list() == [3, 4, 5]

    @pytest.mark.parametrize(
        "names",
        [
            ["layer 3", "layer 4", "layer 5"],
            ["timestep 9", "timestep 5", "timestep 1"],
            ["batch 1", "forward", "backward"],
            ["train_step", "train_step", "forward"],
            ["optimizer step", "optimizer step", "optimizer step"],
        ],
    )
    def test_other_ranges_are_none(self, names: list[str], tmp_path: Path) -> None:
        trace = opened(tmp_path, NVTX_EVENTS=[in_range(10 * n, 10 * n + 9, name) for n, name in enumerate(names)])

        assert rows(trace, "annotations", "step") == [(None,)] * 3

    def test_the_iterations_are_steps_and_not_the_batches_inside(self, tmp_path: Path) -> None:
        events = []
        for n in range(3):
            events += [in_range(100 * n, 100 * n + 90, f"iteration {n}")]
            events += [in_range(100 * n + 10 * m, 100 * n + 10 * m + 9, f"batch {4 * n + m}") for m in range(4)]
        trace = opened(tmp_path, NVTX_EVENTS=events)

        told = [(name, step) for name, step in rows(trace, "annotations", "name", "step") if step is not None]
        assert told == [("iteration 0", 0), ("iteration 1", 1), ("iteration 2", 2)]

    def test_ranges_without_numbers_are_counted(self, tmp_path: Path) -> None:
        name = "[pl][profile]run_training_batch"
        trace = opened(tmp_path, NVTX_EVENTS=[in_range(10 * n, 10 * n + 9, name) for n in range(3)])

        assert rows(trace, "annotations", "step") == [(0,), (1,), (2,)]

    def test_some_steps_can_be_read(self, tmp_path: Path) -> None:
        events = [in_range(100 * n, 100 * n + 90, f"step {n}") for n in range(5)]
        trace = opened(tmp_path, {"steps": StepRange(2, 3)}, NVTX_EVENTS=events)

        assert trace.metadata.window == Window(200, 390)
        assert rows(trace, "annotations", "name") == [("step 2",), ("step 3",)]


class TestWindow:
    def test_a_window_takes_what_reaches_into_it_and_what_belongs_to_that(self, tmp_path: Path) -> None:
        trace = opened(
            tmp_path,
            {"window": Window(1000, 2000)},
            **{
                "NVTX_EVENTS": [in_range(5000, 9000, "all of it"), in_range(5000, 5500, "before")]
                + [in_range(5000 + 1000 * n, 5900 + 1000 * n, "train_step") for n in range(4)],
                RUNTIME: [call(5100, 5200, 1), call(6100, 6200, 2), call(7100, 7200, 3), call(5900, 5950, 4)],
                KERNEL: [kernel(5300, 5400, 1), kernel(8300, 8400, 2), kernel(7300, 7400, 3), kernel(6300, 6400, 4)],
            },
        )

        assert rows(trace, "annotations", "name", "start_ns", "step") == [
            ("all of it", 0, None),
            ("train_step", 1000, 1),
        ]
        assert rows(trace, "launches", "start_ns") == [(900,), (1100,)]
        assert rows(trace, "device_work", "start_ns", "launch") == [(1300, 0), (3300, 1)]

    def test_the_same_rows_as_without_a_window_around_all(self, tmp_path: Path) -> None:
        tables = {
            "NVTX_EVENTS": [in_range(5000, 9000, "all of it")],
            RUNTIME: [call(5100, 5200, 1), call(6100, 6200, 2)],
            KERNEL: [kernel(5300, 5400, 1), kernel(8300, 8400, 2)],
        }
        path = written(tmp_path / "run.sqlite", **tables)
        whole, part = open_trace(path), open_trace(path, window=Window(0, 2**62))

        for table in ("annotations", "launches", "device_work", "lanes"):
            assert part.table(table).equals(whole.table(table))


class TestTimes:
    START = "TARGET_INFO_SESSION_START_TIME"

    def test_the_wall_clock_counts_from_the_start_of_the_capture(self, tmp_path: Path) -> None:
        trace = opened(tmp_path, **{RUNTIME: [call(250, 260, 1)], self.START: [{"utcEpochNs": 10**18}]})

        assert trace.metadata.origin_unix_ns == 10**18 + 250

    def test_where_the_clock_is_the_machines_its_time_at_the_start_is_told(self, tmp_path: Path) -> None:
        start = {"utcEpochNs": 10**18, "systemClockNs": 200}
        trace = opened(tmp_path, **{RUNTIME: [call(250, 260, 1)], self.START: [start]})

        assert trace.metadata.origin_unix_ns == 10**18 + 50

    def test_nanoseconds_beyond_what_a_double_holds_are_kept(self, tmp_path: Path) -> None:
        start = 1_779_782_330_176_752_435
        trace = opened(tmp_path, **{RUNTIME: [call(start, start + 1, 1), call(start + 3, start + 10, 2)]})

        assert rows(trace, "launches", "start_ns", "duration_ns") == [(0, 1), (3, 7)]


@pytest.mark.traces
class TestRealFiles:
    """Sums by SQL over the tables themselves, worked out once outside of stepscope."""

    @pytest.fixture
    def folder(self) -> Path:
        if not (folder := Path(os.environ.get("STEPSCOPE_TRACES", "")) / "nsys").is_dir():
            pytest.skip("STEPSCOPE_TRACES does not name the folder of real traces")
        return folder

    @pytest.mark.parametrize(
        ("name", "counts", "busy"),
        [
            (
                "before",
                (18_522, 7466, 5299, 602, 366),
                {"0": (273_817_787, 299_848_812), "1": (267_275_916, 298_661_551)},
            ),
            (
                "after",
                (16_573, 6682, 4733, 546, 334),
                {"0": (240_108_749, 299_251_215), "1": (254_000_754, 299_269_422)},
            ),
        ],
    )
    def test_two_gpus(self, name: str, counts: tuple[int, ...], busy: dict[str, tuple[int, int]], folder: Path) -> None:
        trace = open_trace(folder / f"two_gpu_{name}.sqlite")
        trace.check()

        tables = ("operators", "launches", "device_work", "annotations", "synchronisations")
        assert tuple(trace.table(table).height for table in tables) == counts
        assert trace.warnings == ()
        for device, (busy_ns, window_ns) in busy.items():
            row = device_time(trace).filter(device=device)
            assert (row["busy_ns"][0], row["window_ns"][0]) == (busy_ns, window_ns)

    def test_before_and_after(self, folder: Path) -> None:
        """Of one device on both sides: the busiest before, though after it is the other one."""
        before, after = (open_trace(folder / f"two_gpu_{name}.sqlite") for name in ("before", "after"))
        found = compare_traces(before, after)

        assert found.samples.verdict == "slower"
        assert (found.before.step_count, found.after.step_count) == (16, 15)
        assert (found.before.total_ns, found.after.total_ns) == (280_486_112, 298_496_272)
        busy = found.causes.filter(kind="busy")
        assert (busy["before_total_ns"].sum(), busy["after_total_ns"].sum()) == (260_745_557, 239_443_424)
        assert found.causes.select("kind", "name").rows()[:2] == [("idle", "dispatch"), ("idle", "launch_latency")]
