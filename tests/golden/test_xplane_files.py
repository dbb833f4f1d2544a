"""What XLA's real profiles tell beyond times: kinds, lines, steps, duty cycles, where the main thread's time went."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.device_time import step_busy_shares
from stepscope.analysis.host import host_summary, host_time
from stepscope.analysis.places import line_table, module_table
from stepscope.analysis.steps import step_table
from stepscope.trace import Trace
from tests.golden.opened import opened

pytestmark = pytest.mark.traces
STRESS_TEST = "experimental/users/davelacey/host_offload_stress_test/host_offload_stress_test.py"


def checked(folder: Path, name: str) -> Trace:
    trace = opened(folder / "xplane" / f"{name}.xplane.pb")
    trace.check()
    assert trace.warnings == ()
    return trace


def host_causes(trace: Trace) -> dict[str, int]:
    return {cause: ns for cause, ns, _ in host_summary(host_time(trace)).iter_rows()}


def test_four_tpus(traces_folder: Path) -> None:
    trace = checked(traces_folder, "tpu_x4_inference")

    work = trace.device_work
    assert work.filter(pl.col("device") == "0")["kind"].value_counts().sort("kind").rows() == [
        ("communication", 3),
        ("compute", 301),
        ("copy_in", 900),
        ("copy_out", 900),
    ]
    moved = work.group_by("queue", "kind").agg(pl.col("bytes").sum()).filter(pl.col("bytes") > 0)
    assert sorted(moved.rows()) == [
        ("Async XLA Ops", "copy_in", 300 * 5_368_709_120),
        ("Async XLA Ops", "copy_out", 300 * 5_368_709_120),
    ]
    assert work["launch"].null_count() == 0
    assert work["call_stack"].drop_nulls().str.split(";").list.first().value_counts().sort("count").rows() == [
        (f"{STRESS_TEST}(37): main", 1),
        (f"{STRESS_TEST}(38): main", 12),
        (f"{STRESS_TEST}(29): main.<locals>.f.<locals>.process", 1200),
    ]
    collectives = work.filter(pl.col("kind") == "communication").select("collective", "group_size", "message_elements")
    assert collectives.unique().rows() == [("allreduce", 2, 5 * 1024 * 1024 * 256)]
    device = trace.metadata.devices[3]
    assert (device.device, device.name, device.peak_flops_s) == ("3", "TPU v6 Lite", 918e12)


def test_the_duty_cycle_of_four_tpus_in_each_execution_of_their_program(traces_folder: Path) -> None:
    trace = checked(traces_folder, "tpu_x4_inference")
    steps = step_table(trace)

    shares = step_busy_shares(trace, steps)

    assert (steps.height, steps["source"].unique().to_list()) == (99, ["inferred"])
    assert shares.columns == [f"device_{number}_busy_share" for number in range(4)]
    assert shares.min().row(0) > (0.999,) * 4


def test_jax_on_a_cpu(traces_folder: Path) -> None:
    trace = checked(traces_folder, "jax_cpu_train")

    assert step_table(trace).select("index", "duration_ns", "source").rows() == [
        (1, 74_219_399, "annotation"),
        (2, 56_634_572, "annotation"),
        (3, 3_707_586_475, "annotation"),
        (4, 62_418_387, "annotation"),
        (5, 38_473_093, "annotation"),
    ]
    causes = host_causes(trace)
    assert causes["compilation"] == 3_311_720_895  # two backend_compile_and_load: step 3 has other shapes
    assert causes["input"] == 119_899_150  # five times load_batch, which sleeps for 20 ms
    assert sum(causes.values()) == 3_939_890_942
    lines = line_table(trace).filter(pl.col("file").is_not_null())
    assert lines.select("line", "function").row(0) == (14, "loss_fn")
    assert module_table(trace)["module"].drop_nulls().to_list() == ["head", "mlp"]


def test_pytorch_xla_on_a_cpu(traces_folder: Path) -> None:
    causes = host_causes(checked(traces_folder, "torch_xla_cpu_train_hlo_debug"))

    assert causes["compilation"] == 3_460_791_106
    assert causes["input"] == 67_040_236  # the marks "data"
    assert causes["graph_tracing"] == 52_724_048
    assert causes["step_marker"] == 14_486_223


def test_pytorch_xla_without_a_complete_step_is_all_compilation(traces_folder: Path) -> None:
    trace = checked(traces_folder, "torch_xla_cpu_no_complete_step")

    assert step_table(trace).is_empty()
    causes = host_causes(trace)
    assert max(causes, key=causes.__getitem__) == "compilation"


def test_amd_gpus_copy_in_the_direction_that_their_calls_tell(traces_folder: Path) -> None:
    work = checked(traces_folder, "mi300x_jax_gemm").device_work

    copies = work.filter(pl.col("name").str.starts_with("__amd_rocclr_copyBuffer"))
    assert copies["kind"].value_counts().sort("kind").rows() == [("copy_in", 12), ("copy_on_device", 12)]
    assert work.filter(pl.col("name") == "wrapped_broadcast")["block"].unique().to_list() == ["256,1,1"]
