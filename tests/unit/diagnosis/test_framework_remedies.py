"""Findings in programs of JAX and PyTorch/XLA prescribe what helps there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.diagnosis.diagnosis import diagnose
from stepscope.diagnosis.view import framework_of
from stepscope.trace import Metadata, Trace
from tests.unit.recording import Recording


def named(trace_format: str, *names: str) -> Trace:
    recording = Recording()
    for number, name in enumerate(names):
        recording.operator(10 * number, 5, name)
    return replace(recording.trace(), metadata=Metadata(format=trace_format))


@pytest.mark.parametrize(
    ("trace_format", "name", "framework"),
    [
        ("xplane", "PjitFunction(train_step)", "jax"),
        ("xla_json", "jit(train_step)", "jax"),
        ("xplane", "SyncTensorsGraphInternal", "torch_xla"),
        ("xplane", "XLAGraphExecutor::SyncTensorsGraphInternal", "torch_xla"),
        ("xplane", "StepMarker", "torch_xla"),
        ("xplane", "aten::mm", None),
        ("kineto", "PjitFunction(train_step)", None),
        ("gaudi", "SyncTensorsGraphInternal", "hpu"),
    ],
)
def test_the_framework_is_told_by_what_only_it_records(trace_format: str, name: str, framework: str | None) -> None:
    assert framework_of(named(trace_format, "something", name)) == framework


def test_a_jax_program_that_compiles_in_each_step_is_told_what_helps_in_jax() -> None:
    recording = Recording()
    for step in range(4):
        recording.step(1_000 * step, 1_000, step)
        recording.operator(1_000 * step, 900, "PjitFunction(train_step)")
        recording.operator(1_000 * step + 10, 600, "PjRtCpuClient::CompileAndLoad")
    trace = replace(recording.trace(), metadata=Metadata(format="xplane"))

    (finding,) = [each for each in diagnose(trace).findings if each.rule == "recompilation"]
    assert "jax_explain_cache_misses" in finding.remedy.code
    assert "torch" not in finding.remedy.code + finding.remedy.text


def test_what_a_compilers_threads_do_is_one_compilation() -> None:
    recording = Recording()
    pool = recording.thread("2")
    for step in range(4):
        recording.step(1_000 * step, 1_000, step)
        recording.operator(1_000 * step + 10, 600, "PjRtCpuClient::CompileAndLoad")
        for part in range(5):
            recording.operator(1_000 * step + 20 + 100 * part, 90, "FusionCompiler::Compile", lane=pool)
    recording.operator(3_800, 100, "FusionCompiler::Compile", lane=pool)
    trace = replace(recording.trace(), metadata=Metadata(format="xplane"))

    (finding,) = [each for each in diagnose(trace).findings if each.rule == "recompilation"]
    assert "5 compilations in 4 of 4 steps" in finding.title
