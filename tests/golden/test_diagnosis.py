"""Real traces diagnosed: what is known about them must be found, and nothing that is not there."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import polars as pl
import pytest

from stepscope.diagnosis import Diagnosis, Finding, diagnose
from tests.golden.opened import check_findings, check_the_law, opened

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_TRACES = {
    "per_token_loss": REPOSITORY / "examples/gpt2_per_token_loss_cpu.json.gz",
    "batched_loss": REPOSITORY / "tests/fixtures/gpt2_batched_loss_cpu.json.gz",
}
POINT = 0.01
"""One percentage point."""

needs_traces = pytest.mark.traces


@lru_cache(maxsize=2)
def diagnosed(path: Path) -> Diagnosis:
    return diagnose(opened(path))


def kineto(traces_folder: Path, name: str) -> Path:
    return traces_folder / "kineto" / f"{name}.json.gz"


def rules_of(diagnosis: Diagnosis) -> list[str]:
    return [finding.rule for finding in diagnosis.findings]


def the_finding(diagnosis: Diagnosis, rule: str) -> Finding:
    [found] = [finding for finding in diagnosis.findings if finding.rule == rule]
    return found


def figures_of(finding: Finding) -> dict[str, float]:
    return {figure.name: figure.value for figure in finding.evidence.figures}


def idle_shares(diagnosis: Diagnosis) -> dict[str, float]:
    """Cause -> share of the only device's window."""
    assert len(diagnosis.devices) == 1
    return dict(diagnosis.idle.group_by("cause").agg(pl.col("share").sum()).iter_rows())


def idle_share(diagnosis: Diagnosis) -> float:
    [device] = diagnosis.devices
    return device.idle_ns / device.window_ns


@pytest.mark.parametrize("name", OWN_TRACES)
def test_the_projects_own_traces_are_diagnosed(name: str) -> None:
    diagnosis = diagnosed(OWN_TRACES[name])

    check_the_law(opened(OWN_TRACES[name]), diagnosis)
    check_findings(diagnosis)
    assert (diagnosis.step_source, diagnosis.step_count, diagnosis.devices) == ("annotation", 3, ())


def check_per_token_loss(diagnosis: Diagnosis, file: str, function: str) -> None:
    loop = diagnosis.findings[0]
    assert loop.rule == "loop-in-step"
    assert (loop.where[0].file, loop.where[0].function) == (file, function)
    assert figures_of(loop)["repetitions per step"] == 64
    assert "cross_entropy" in loop.remedy.code
    assert 0.6 < loop.saving_share < 0.95


def test_a_loss_computed_token_by_token_is_the_first_finding() -> None:
    check_per_token_loss(diagnosed(OWN_TRACES["per_token_loss"]), "examples/gpt2_training.py", "per_token_loss")


def test_a_loss_computed_at_once_has_no_loop() -> None:
    assert "loop-in-step" not in rules_of(diagnosed(OWN_TRACES["batched_loss"]))


def test_the_loop_is_what_the_two_steps_differ_by() -> None:
    slow, fast = diagnosed(OWN_TRACES["per_token_loss"]), diagnosed(OWN_TRACES["batched_loss"])
    predicted = slow.step_ns - slow.findings[0].saving_ns_per_step

    assert abs(predicted - fast.step_ns) < 0.1 * slow.step_ns


@needs_traces
def test_loading_in_the_training_process_comes_first(traces_folder: Path) -> None:
    diagnosis = diagnosed(kineto(traces_folder, "v100_resnet50_workers0"))
    first = diagnosis.findings[0]

    # A public analyser says 33.4 % of the step, and giving the loader workers really took 26.9 % off the window.
    assert first.rule == "input-bound"
    assert 0.24 < first.saving_share < 0.33
    assert (first.where[0].file, first.where[0].line) == ("resnet50_profiler_api.py", 42)
    assert "num_workers" in first.remedy.code


@needs_traces
def test_loading_in_worker_processes_is_no_finding(traces_folder: Path) -> None:
    assert "input-bound" not in rules_of(diagnosed(kineto(traces_folder, "v100_resnet50_workers4")))


@needs_traces
@pytest.mark.parametrize(
    ("name", "idle", "causes"),
    [
        # Of the 3 % that passed after launches the independent attribution calls 2 launch latency, 1 dependency; here
        # no gap is one that the work of another queue ended just before, so the two are held together.
        ("v100_resnet50_workers0", 0.394, {"input": 0.285, "dispatch": 0.053, "optimizer": 0.025, "device": 0.030}),
        ("v100_resnet50_workers4", 0.160, {"input": 0.0}),
        ("v100_dlrm_rank1of2", 0.4226, {"dispatch": 0.275, "launch_latency": 0.063, "optimizer": 0.033}),
    ],
)
def test_an_independent_attribution_agrees(
    traces_folder: Path, name: str, idle: float, causes: dict[str, float]
) -> None:
    diagnosis = diagnosed(kineto(traces_folder, name))
    shares = idle_shares(diagnosis)
    shares["device"] = shares.get("launch_latency", 0.0) + shares.get("dependency", 0.0)

    assert idle_share(diagnosis) == pytest.approx(idle, abs=0.0005)
    assert {cause: shares.get(cause, 0.0) for cause in causes} == pytest.approx(causes, abs=POINT)


@needs_traces
def test_a_host_bound_inference(traces_folder: Path) -> None:
    diagnosis = diagnosed(kineto(traces_folder, "h100_owlv2"))
    shares = idle_shares(diagnosis)

    assert idle_share(diagnosis) == pytest.approx(0.474, abs=0.0005)
    assert max(shares, key=lambda cause: shares[cause]) == "input"
    assert shares["input"] == pytest.approx(0.456, abs=0.001)
    assert {"launch_latency", "python", "dispatch", "synchronisation"} <= set(shares)
    assert "unknown" not in shares
    assert rules_of(diagnosis)[0] == "input-bound"


@needs_traces
def test_a_recommendation_model_on_two_ranks(traces_folder: Path) -> None:
    diagnosis = diagnose(opened(kineto(traces_folder, "v100_dlrm_rank1of2")), minimum_share=0.0)

    assert idle_share(diagnosis) == pytest.approx(0.4226, abs=0.00005)
    assert {"launch-bound", "exposed-communication"} <= set(rules_of(diagnosis))
    communication = the_finding(diagnosis, "exposed-communication")
    # The host never waits in the steps, so nothing that only the device does decides how long they take.
    assert (communication.saving_from, communication.saving_ns_per_step) == ("replayed", 0)
    # 357 ms of all-reduce in five steps, and the all-to-all besides
    assert figures_of(communication)["communication in all per step"] >= 357e6 / 5
    assert [question.rule for question in diagnosis.not_answered].count("exposed-communication") == 1


@needs_traces
def test_a_recorded_graph_leaves_nothing_to_say_about_idle_time(traces_folder: Path) -> None:
    diagnosis = diagnosed(kineto(traces_folder, "mi300x_vllm_graph_decode"))
    about_idle = {"input-bound", "host-synchronisation", "launch-bound", "exposed-copy", "exposed-communication"}

    assert idle_share(diagnosis) < 0.01
    assert not about_idle & set(rules_of(diagnosis))


@needs_traces
def test_the_recorded_loops(traces_folder: Path) -> None:
    diagnosis = diagnosed(kineto(traces_folder, "cpu_gpt2_per_token_loss"))

    check_per_token_loss(diagnosis, "naive_gpt2.py", "naive_loss")
    assert "loop-in-step" not in rules_of(diagnosed(kineto(traces_folder, "cpu_gpt2_batched_loss")))


@needs_traces
def test_matrix_products_in_fp32_are_found_where_they_are(traces_folder: Path) -> None:
    assert "low-precision" in rules_of(diagnosed(kineto(traces_folder, "v100_resnet50_workers4")))
    for name in ("h100_qwen_chat", "mi300x_vllm_graph_decode", "a100_ddp_rank3of8"):
        assert "low-precision" not in rules_of(diagnosed(kineto(traces_folder, name)))
