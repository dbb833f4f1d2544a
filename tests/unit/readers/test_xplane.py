"""Reading XLA's profiles: small ones written by hand, whose tables are known."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.attribution import work_places
from stepscope.errors import NotATraceError, TooLargeError, UnreadableTraceError, UsageError
from stepscope.readers import open_trace, trace_files
from stepscope.trace import Trace
from stepscope.trace.metadata import Device
from stepscope.trace.window import StepRange, Window
from tests.unit.xplanes import PlaneWriter, Text, part, program, space

COPY_IN = "%copy-start = (f32[8]{0:T(8)}, f32[8]{0:T(8)S(5)}, u32[]{:S(2)}) copy-start(f32[8]{0:T(8)S(5)} %p)"
COPY_OUT = "%copy-start.1 = (f32[8]{0:T(8)S(5)}, f32[8]{0:T(8)}, u32[]{:S(2)}) copy-start(f32[8]{0:T(8)} %p)"
ALL_REDUCE = "%all-reduce.3 = bf16[4,8]{1,0} all-reduce(bf16[4,8]{1,0} %x), replica_groups=[4,2]<=[2,4]T(1,0)"


def opened(folder: Path, *planes: PlaneWriter, host: str = "") -> Trace:
    """The profile of these planes, read."""
    path = folder / "made.xplane.pb"
    path.write_bytes(space(*planes, host=host))
    trace = open_trace(path)
    trace.check()
    return trace


def host_plane() -> PlaneWriter:
    plane = PlaneWriter("/host:CPU", stats={"process_id": 77})
    plane.event("python", "train", 0, 1000, _r=1, step_num=5)
    plane.event("python", "load_batch", 10, 100)
    plane.event("python", "$train.py:12 step", 120, 800)
    plane.event("python", "$lax.py:99 add", 130, 10)
    plane.event("python", "PjitFunction(step)", 150, 300)
    plane.event("python", "np.asarray(jax.Array)", 500, 200)
    return plane


def tpu_plane() -> PlaneWriter:
    plane = PlaneWriter(
        "/device:TPU:3",
        stats={
            "device_type_string": "TPU v6 Lite",
            "peak_teraflops_per_second": 918.0,
            "peak_hbm_bw_gigabytes_per_second": 1638.0,
        },
    )
    plane.event("XLA Modules", "jit_step(42)", 1000, 500, run_id=6, _ct=12, _c=-77)
    plane.event("XLA Ops", "%while.1 = (s32[]) while((s32[]) %t)", 1000, 300)
    plane.event("XLA Ops", "%fusion.2 = f32[8] fusion(f32[8] %a)", 1010, 100)
    plane.event("XLA Ops", "%fusion.2 = f32[8] fusion(f32[8] %a)", 1150, 100)
    plane.event("XLA Ops", ALL_REDUCE, 1300, 150)
    plane.event("XLA Ops", COPY_IN, 1460, 5)
    plane.event("Async XLA Ops", COPY_IN, 1000, 200, _a=1)
    plane.event("Async XLA Ops", COPY_OUT, 1100, 300, _a=1)
    plane.event("XLA TraceMe", "barrier-cores", 1290, 10)
    plane.about("%while.1 = (s32[]) while((s32[]) %t)", "while.1", hlo_category="while")
    plane.about("%fusion.2 = f32[8] fusion(f32[8] %a)", "fusion.2", hlo_category="loop fusion", program_id=42)
    plane.about(ALL_REDUCE, "all-reduce.3", hlo_category="all-reduce")
    plane.about(COPY_IN, "copy-start", hlo_category="copy-start", bytes_accessed=64)
    plane.about(COPY_OUT, "copy-start.1", hlo_category="copy-start", bytes_accessed=32)
    return plane


def test_host_events_go_to_the_tables_they_belong_to(tmp_path: Path) -> None:
    trace = opened(tmp_path, host_plane(), host="worker-1")

    assert trace.annotations.select("start_ns", "duration_ns", "name", "kind", "step").rows() == [
        (0, 1000, "train", "host", 5),
        (10, 100, "load_batch", "host", None),
    ]
    assert trace.frames.select("name", "file", "line", "function", "parent").rows() == [
        ("train.py(12): step", "train.py", 12, "step", None),
        ("<library>/lax.py(99): add", "<library>/lax.py", 99, "add", 0),  # JAX has a file of that name
    ]
    assert trace.operators.select("start_ns", "duration_ns", "name").rows() == [(150, 300, "PjitFunction(step)")]
    assert trace.launches.select("start_ns", "duration_ns", "name", "kind").rows() == [
        (500, 200, "np.asarray(jax.Array)", "synchronise")
    ]
    assert trace.lanes.select("kind", "process", "process_name", "thread", "name").rows() == [
        ("host_thread", "77", "worker-1", "77", "python")
    ]
    assert (trace.metadata.format, trace.metadata.host, trace.metadata.recorded) == ("xplane", "worker-1", ("stacks",))


def test_a_tpu_does_what_its_operations_line_says_and_copies_beside_it(tmp_path: Path) -> None:
    host = host_plane()
    host.event("worker/9", "DoEnqueueProgram", 900, 20, run_id=6, device_ordinal=3, _pt=12, _p=-77)

    trace = opened(tmp_path, host, tpu_plane())

    columns = ("start_ns", "duration_ns", "name", "kind", "device", "queue", "bytes", "launch")
    assert trace.device_work.select(columns).sort("start_ns", "queue", "name").rows() == [
        (1000, 200, "copy-start", "copy_in", "3", "Async XLA Ops", 64, 1),
        (1000, 10, "while.1", "other", "3", "XLA Ops", None, 1),
        (1010, 100, "fusion.2", "compute", "3", "XLA Ops", None, 1),
        (1100, 300, "copy-start.1", "copy_out", "3", "Async XLA Ops", 32, 1),
        (1110, 40, "while.1", "other", "3", "XLA Ops", None, 1),
        (1150, 100, "fusion.2", "compute", "3", "XLA Ops", None, 1),
        (1250, 50, "while.1", "other", "3", "XLA Ops", None, 1),
        (1300, 150, "all-reduce.3", "communication", "3", "XLA Ops", None, 1),
        (1460, 5, "copy-start", "copy_in", "3", "XLA Ops", None, 1),  # begins the copy, which moves its bytes later
    ]
    collective = trace.device_work.filter(pl.col("kind") == "communication")
    assert collective.select("collective", "group", "group_size", "message_elements", "message_type").rows() == [
        ("allreduce", "[4,2]<=[2,4]T(1,0)", 2, 32, "BFloat16")
    ]
    assert trace.launches["name"][1] == "DoEnqueueProgram"
    assert trace.annotations.filter(pl.col("kind") == "device").select("name").rows() == [
        ("jit_step(42)",),
        ("barrier-cores",),
    ]
    assert trace.metadata.devices == (Device("3", "TPU v6 Lite", peak_flops_s=918e12, bandwidth_bytes_s=1638e9),)


def test_executions_are_known_by_their_number_where_nothing_else_ties_them_to_calls(tmp_path: Path) -> None:
    device = PlaneWriter("/device:TPU:1")
    device.event("XLA Modules", "jit_f(1)", 100, 50, run_id=9, core_type=0)
    device.event("XLA Ops", "add.1", 110, 10)
    host = PlaneWriter("/host:CPU")
    host.event("main/5", "DoEnqueueProgram", 50, 5, run_id=8, device_ordinal=1, core_type=0)
    host.event("main/5", "DoEnqueueProgram", 60, 5, run_id=9, device_ordinal=0, core_type=0)
    host.event("main/5", "DoEnqueueProgram", 70, 5, run_id=9, device_ordinal=1, core_type=0)

    assert opened(tmp_path, host, device).device_work["launch"].to_list() == [2]


def test_a_gpu_tells_of_kernels_and_copies_beside_their_events(tmp_path: Path) -> None:
    device = PlaneWriter(
        "/device:GPU:0",
        stats={"core_count": 132, "memory_size": 80 << 30, "compute_cap_major": 9, "compute_cap_minor": 0},
    )
    details = "regs:40 static_shared:16 dynamic_shared:4 grid:8,2,1 block:256,1,1 occ_pct:25"
    device.event("Stream #7(Compute)", "fusion.kd", 100, 30, correlation_id=5, kernel_details=details)
    device.event("Stream #7(Compute)", "ncclDevKernel_AllReduce_Sum", 140, 30, correlation_id=6)
    copied = "kind_src:pageable kind_dst:device size:1024 dest:0 async:1"
    device.event("Stream #9(MemcpyH2D)", "MemcpyH2D", 90, 5, correlation_id=4, memcpy_details=copied)
    device.event("XLA Ops", "fusion", 100, 30)  # what TensorBoard derives is no work of its own
    host = PlaneWriter("/host:CPU")
    for number, name in ((4, "cuMemcpyHtoDAsync"), (5, "cuLaunchKernel"), (6, "cuLaunchKernelEx")):
        host.event("Host Threads/3", name, number * 10, 5, correlation_id=number)

    work = opened(tmp_path, host, device).device_work

    assert work.select("start_ns", "name", "kind", "queue", "bytes", "launch", "collective").rows() == [
        (50, "Memcpy HtoD (Pageable -> Device)", "copy_in", "9", 1024, 0, None),
        (60, "fusion", "compute", "7", None, 1, None),
        (100, "ncclDevKernel_AllReduce_Sum", "communication", "7", None, 2, "allreduce"),
    ]
    assert work.select("grid", "block", "registers", "shared_memory_bytes", "occupancy").rows()[1] == (
        "8,2,1", "256,1,1", 40, 20, 0.25,
    )  # fmt: skip


def test_compiled_work_has_the_lines_and_the_scope_that_its_program_keeps(tmp_path: Path) -> None:
    frames = [("/srv/ada/train.py", 4, "main", 0), ("/srv/ada/model.py", 9, "loss", 1)]
    metadata = PlaneWriter("/host:metadata")
    metadata.event("none", "jit_step(42)", 0, 1)
    proto = program({"fusion.2": ("jit(step)/transpose(jvp(Net))/dense/dot", 2)}, frames)
    metadata.about("jit_step(42)", **{"Hlo Proto": proto})

    trace = opened(tmp_path, tpu_plane(), metadata)

    written = trace.device_work.filter(pl.col("name") == "fusion.2").select("call_stack", "scope").unique()
    assert written.rows() == [
        ("/srv/ada/model.py(9): loss;/srv/ada/train.py(4): main", "jit(step)/transpose(jvp(Net))/dense/dot")
    ]
    placed = work_places(trace).filter(pl.col("file").is_not_null()).unique()
    assert placed.rows() == [("/srv/ada/model.py", 9, "loss", True, "Net.dense", "backward")]


def test_operations_on_the_cpu_are_operators_with_their_lines(tmp_path: Path) -> None:
    metadata = PlaneWriter("/host:metadata")
    metadata.event("none", "jit_step(42)", 0, 1)
    metadata.about(
        "jit_step(42)", **{"Hlo Proto": program({"dot.1": ("jit(step)/dot", 1)}, [("/srv/train.py", 8, "f", 0)])}
    )
    host = PlaneWriter("/host:CPU")
    host.event("tf_XLAEigen/1", "dot.1", 10, 20, hlo_op="dot.1", hlo_module="jit_step", program_id=42)
    host.event("tf_XLAEigen/1", "other.1", 40, 20, hlo_op=Text("dot.1"), hlo_module=Text("jit_step"))
    host.event("tf_XLAEigen/1", "add.1", 70, 20, hlo_op="add.1", hlo_module="jit_step", program_id=42)

    operators = opened(tmp_path, metadata, host).operators

    assert operators.select("name", "call_stack", "scope").rows() == [
        ("dot.1", "/srv/train.py(8): f", "jit(step)/dot"),
        ("other.1", "/srv/train.py(8): f", "jit(step)/dot"),
        ("add.1", None, None),
    ]


def test_allocations_are_paired_with_releases_that_do_not_tell_their_size(tmp_path: Path) -> None:
    host = PlaneWriter("/host:CPU")
    host.event("python", "train", 0, 100)
    host.event("python", "MemoryAllocation", 10, None, allocator_name="GPU_1_bfc", addr=4096, allocation_bytes=512,
               bytes_allocated=512)  # fmt: skip
    host.event("worker/2", "MemoryDeallocation", 30, None, allocator_name="GPU_1_bfc", addr=4096, bytes_allocated=0)
    host.event("worker/2", "MemoryDeallocation", 40, None, allocator_name="GPU_1_bfc", addr=8192, bytes_allocated=0)
    host.event("python", "MemoryAllocation", 50, None, allocator_name="xla_gpu_host_bfc", addr=1, allocation_bytes=9)

    assert opened(tmp_path, host).memory.select("start_ns", "device", "address", "bytes", "total_allocated").rows() == [
        (10, "1", 4096, 512, 512),
        (30, "1", 4096, -512, 0),
        (50, "cpu", 1, 9, None),
    ]


def test_a_part_can_be_read(tmp_path: Path) -> None:
    host = PlaneWriter("/host:CPU")
    for step in range(4):
        host.event("python", "train", step * 100, 90, step_num=step)
        host.event("python", "PjitFunction(f)", step * 100 + 10, 20)
    path = tmp_path / "made.xplane.pb"
    path.write_bytes(space(host))

    assert open_trace(path, steps=StepRange(1, 2)).operators["start_ns"].to_list() == [110, 210]
    assert open_trace(path, window=Window(300, 400)).operators["start_ns"].to_list() == [310]
    with pytest.raises(UsageError, match="steps 0 to 3"):
        open_trace(path, steps=StepRange(7, 9))


def test_the_wall_clock_is_known(tmp_path: Path) -> None:
    environment = PlaneWriter("Task Environment", stats={"profile_start_time": 1_771_595_650_217_823_548})
    relative = PlaneWriter("/host:CPU")
    relative.event("python", "a", 500, 1)
    absolute = PlaneWriter("/host:CPU", origin_ns=1_771_595_650_000_000_000)
    absolute.event("python", "a", 1_500, 1)
    path = tmp_path / "made.xplane.pb"

    path.write_bytes(space(relative, environment))
    assert open_trace(path).metadata.origin_unix_ns == 1_771_595_650_217_824_048
    path.write_bytes(space(absolute, environment))
    assert open_trace(path).metadata.origin_unix_ns == 1_771_595_650_000_001_500


def test_events_without_a_name_and_damaged_ones_are_counted(tmp_path: Path) -> None:
    host = host_plane()
    host.raw("python", part(1, 999) + part(2, 5000) + part(3, 1000))
    host.raw("python", part(1, 1) + part(2, 2**63) + part(3, 1000))
    host.raw("python", part(1, 1) + b"\x22\x7f")
    host.raw("python", part(3, 7000) + part(2, 2_000_000) + part(1, 2))  # in another order, but whole

    trace = opened(tmp_path, host)

    assert {warning.kind: warning.count for warning in trace.warnings} == {"damaged_event": 2, "unnamed_event": 1}
    assert trace.annotations.filter(pl.col("start_ns") == 2000)["duration_ns"].to_list() == [7]


def test_a_profile_without_events_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "made.xplane.pb"
    path.write_bytes(space(PlaneWriter("/host:CPU"), PlaneWriter("Task Environment")))

    with pytest.raises(NotATraceError, match=r"without a single event \(its planes: '/host:CPU', 'Task Environment'\)"):
        open_trace(path)


def test_of_an_event_with_endless_statistics_the_first_are_read(tmp_path: Path) -> None:
    host = PlaneWriter("/host:CPU")
    many = {f"more{number}": 1 for number in range(3_000)}
    host.event("python", "step", 1_000, 500, step_num=7, **many)
    host.event("python", "late", 2_000, 500, **many, step_num=8)
    path = tmp_path / "made.xplane.pb"
    path.write_bytes(space(host))

    trace = open_trace(path)

    rows = trace.annotations.select("name", "start_ns", "duration_ns", "step").rows()
    assert rows == [("step", 0, 500, 7), ("late", 1_000, 500, None)]


def test_more_lines_than_any_profile_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "made.xplane.pb"
    planes = [PlaneWriter("/host:CPU"), PlaneWriter("/device:GPU:0")]
    for number in range(25_001):
        for plane in planes:
            plane.line(f"line {number}")
    path.write_bytes(space(*planes))

    with pytest.raises(TooLargeError, match=r"--limit lines=100000"):
        open_trace(path)


def test_a_profile_that_was_taken_for_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "made.xplane.pb"
    many = host_plane()
    for number in range(300):
        many.event("python", "PjitFunction(step)", 5000 + number * 200, 150)
    path.write_bytes(space(many, host="x").decode("utf-8", "replace").encode())

    with pytest.raises(UnreadableTraceError, match="converted as if it were text") as raised:
        open_trace(path)
    assert "\n" not in str(raised.value)


def test_a_cut_profile_keeps_the_planes_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "made.xplane.pb"
    whole, cut = space(host_plane()), space(tpu_plane())
    path.write_bytes(whole + cut[: len(cut) // 2])

    trace = open_trace(path)

    assert [warning.kind for warning in trace.warnings] == ["truncated"]
    assert trace.device_work.is_empty()
    assert trace.frames.height == 2


def test_the_hosts_of_a_run_are_its_ranks(tmp_path: Path) -> None:
    run = tmp_path / "logs" / "plugins" / "profile" / "2026_01_02_03_04_05"
    older = run.parent / "2025_01_02_03_04_05"
    for folder in (run, older):
        folder.mkdir(parents=True)
        for host in ("host_10", "host_2"):
            (folder / f"{host}.xplane.pb").write_bytes(space(host_plane()))
            (folder / f"{host}.trace.json.gz").write_bytes(b"{}")

    expected = [run / "host_2.xplane.pb", run / "host_10.xplane.pb"]
    for place in (tmp_path / "logs", run.parent, run):
        assert trace_files(place) == expected
    assert [(trace.metadata.rank, trace.metadata.world_size) for trace in map(open_trace, expected)] == [(0, 2), (1, 2)]


def test_profiles_that_lie_side_by_side_elsewhere_are_no_ranks(tmp_path: Path) -> None:
    for name in ("a.xplane.pb", "b.xplane.pb"):
        (tmp_path / name).write_bytes(space(host_plane()))
    (tmp_path / "a.trace.json.gz").write_bytes(b"{}")

    assert [path.name for path in trace_files(tmp_path)] == ["a.xplane.pb", "b.xplane.pb"]
    assert open_trace(tmp_path / "a.xplane.pb").metadata.rank is None


def test_a_device_event_without_a_name_does_not_shift_the_others(tmp_path: Path) -> None:
    device = PlaneWriter("/device:GPU:0")
    device.event("Stream #7", "a.kd", 0, 5, hlo_op="a.1", hlo_module="jit_f", correlation_id=1)
    device.raw("Stream #7", part(1, 999) + part(2, 5000) + part(3, 1000))
    device.event("Stream #7", "b.kd", 10, 5, hlo_op="b.1", hlo_module="jit_f", correlation_id=2)

    trace = opened(tmp_path, device)

    assert trace.device_work.select("start_ns", "name", "correlation").rows() == [(0, "a", 1), (10, "b", 2)]
    assert [(warning.kind, warning.count) for warning in trace.warnings] == [("unnamed_event", 1)]
