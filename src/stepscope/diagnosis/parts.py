"""Parts that a recording may lack, which rules need them, and how to record them with the profiler that wrote the
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import polars as pl

from stepscope.diagnosis.rule import PartName
from stepscope.diagnosis.view import View
from stepscope.trace import Trace

PROFILE: Final = "torch.profiler.profile({}schedule=torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1))"
_RECORDED_BY_TORCH: Final = "record the program with stepscope run, or with torch.profiler"
_NOT_IN_JAX: Final = "these rules know PyTorch's operators; `stepscope operators` and `kernels` show what XLA compiled"
_NVTX_STEP: Final = 'torch.cuda.nvtx.range_push(f"step {i}") ... torch.cuda.nvtx.range_pop()'
_JAX_STEP: Final = 'mark each iteration: with jax.profiler.StepTraceAnnotation("train", step_num=i)'
_JAX_LINES: Final = (
    "let the Python tracer record frames: options = jax.profiler.ProfileOptions(); options.python_tracer_level = 1"
)
_JAX_MEMORY: Final = "jax.profiler.save_device_memory_profile(FILE) shows in pprof what holds memory"
_XLA_GRIDS: Final = "XLA records grids of GPUs only, not of TPUs"
_XLA_HOSTS: Final = "record every host of the job, and diagnose the profile's folder"
_TORCH_XLA_LINES: Final = "run with XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1, so that compiled work knows its lines"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a recording that may be missing.

    Attributes:
        question: what cannot be answered without it.
        why: the reason, in words.
        how: reader's name or program's framework -> how to record the part with that profiler, or what to record
            instead; "" for all others.
    """

    question: str
    why: str
    is_missing: Callable[[Trace], bool]
    how: Mapping[str, str]

    def how_for(self, trace_format: str, framework: str | None = None) -> str:
        """How to record this part in a program of this framework, with the profiler that writes this format."""
        return how_to_record(self.how, trace_format, framework)


def _has(table: pl.DataFrame, *columns: str) -> bool:
    return any(table[column].null_count() < table.height for column in columns)


def _no_lines(trace: Trace) -> bool:
    in_operators = _has(trace.operators, "call_stack", "source_line")
    return trace.frames.is_empty() and trace.lines.is_empty() and not in_operators


def _no_operators(trace: Trace) -> bool:
    custom = pl.col("name").str.contains(r"^[a-z_]\w*::[a-z_]\w*$") & pl.col("input_shapes").is_not_null()
    return trace.operators.filter(pl.col("name").str.starts_with("aten::") | custom).is_empty()


def _no_messages(trace: Trace) -> bool:
    work = trace.device_work.filter(pl.col("kind") == "communication")
    if work.is_empty() or work["message_elements"].null_count() < work.height:
        return False
    calls = trace.operators.filter(pl.col("name").str.contains(r"^c10d::|^record_param_comms$"))
    return calls["input_shapes"].null_count() == calls.height


PARTS: Final[dict[PartName, Part]] = {
    "steps": Part(
        "How long is a step, and what varies between steps?",
        "the trace has no step annotations, and nothing repeats regularly enough to infer steps",
        lambda trace: False,  # `missing` asks the view whether steps can be inferred
        {
            "": "call profiler.step() once per iteration",
            "nsight_systems": f"mark each iteration: {_NVTX_STEP}",
            "rocprof": f"mark each iteration, and record with --marker-trace: {_NVTX_STEP}",
            "xplane": _JAX_STEP,
            "xla_json": _JAX_STEP,
            "torch_xla": 'mark each iteration: with torch_xla.debug.profiler.StepTrace("train_step", step_num=i)',
        },
    ),
    "lines": Part(
        "Which lines of the code are to blame?",
        "the trace holds no Python frames",
        _no_lines,
        {
            "": f"record with {PROFILE.format('with_stack=True, ')}",
            "nsight_systems": f"Nsight Systems records no Python lines here: {_RECORDED_BY_TORCH} and with_stack=True",
            "rocprof": f"rocprofv3 records no lines of Python: {_RECORDED_BY_TORCH} and with_stack=True",
            "xplane": _JAX_LINES,
            "xla_json": _JAX_LINES,
            "torch_xla": _TORCH_XLA_LINES,
        },
    ),
    "operators": Part(
        "Which of the program's operators could be replaced by faster ones?",
        "the trace holds no operators of PyTorch",
        _no_operators,
        {
            "": f"{_RECORDED_BY_TORCH}, with the CPU among the activities",
            "nsight_systems": "let PyTorch mark its operators: nsys profile --pytorch=autograd-shapes-nvtx ..., "
            "or torch.autograd.profiler.emit_nvtx(record_shapes=True)",
            "rocprof": "let PyTorch mark its operators: torch.autograd.profiler.emit_nvtx(record_shapes=True), with "
            "rocprofv3 --marker-trace",
            "xplane": _NOT_IN_JAX,
            "xla_json": _NOT_IN_JAX,
        },
    ),
    "shapes": Part(
        "Which sizes of tensors are slow?",
        "the trace holds no input shapes",
        lambda trace: not _has(trace.operators, "input_shapes"),
        {
            "": f"record with {PROFILE.format('record_shapes=True, ')}, or stepscope run --shapes",
            "nsight_systems": "nsys profile --pytorch=autograd-shapes-nvtx ..., or "
            "torch.autograd.profiler.emit_nvtx(record_shapes=True)",
            "rocprof": "torch.autograd.profiler.emit_nvtx(record_shapes=True), with rocprofv3 --marker-trace",
            "xplane": _NOT_IN_JAX,
            "xla_json": _NOT_IN_JAX,
        },
    ),
    "types": Part(
        "Which sizes of tensors are slow for the type of their numbers?",
        "the trace holds input shapes, but no types of inputs",
        lambda trace: _has(trace.operators, "input_shapes") and not _has(trace.operators, "input_types"),
        {
            "": f"record with {PROFILE.format('record_shapes=True, ')}",
            "nsight_systems": f"emit_nvtx records shapes without types: {_RECORDED_BY_TORCH} and record_shapes=True",
            "rocprof": f"emit_nvtx records shapes without types: {_RECORDED_BY_TORCH} and record_shapes=True",
        },
    ),
    "messages": Part(
        "Do ranks wait in collectives for one that comes late?",
        "the trace does not show how much data collectives exchange",
        _no_messages,
        {
            "": f"{_RECORDED_BY_TORCH} and record_shapes=True; or record every rank, and diagnose them together",
            "xplane": _XLA_HOSTS,
            "xla_json": _XLA_HOSTS,
        },
    ),
    "memory": Part(
        "What is memory used for, and does it grow?",
        "the trace holds no allocations",
        lambda trace: trace.memory.is_empty(),
        {
            "": f"record with {PROFILE.format('profile_memory=True, ')}, or take a snapshot: docs/memory.md",
            "nsight_systems": "nsys profile --cuda-memory-usage=true ..., or take a snapshot of torch's allocator",
            "rocprof": f"{_RECORDED_BY_TORCH} and profile_memory=True, or take a snapshot of torch's allocator",
            "xplane": _JAX_MEMORY,
            "xla_json": _JAX_MEMORY,
            "torch_xla": "torch_xla.core.xla_model.get_memory_info(device) gives how much is used, not what for",
        },
    ),
    "grids": Part(
        "Do the kernels have enough thread blocks to fill the device?",
        "the trace holds no grids of kernels",
        lambda trace: trace.device_work.height > 0 and not _has(trace.device_work, "grid"),
        {
            "": f"{_RECORDED_BY_TORCH}, on a device of NVIDIA or AMD",
            "gaudi": "Gaudi's engines have none; `stepscope kernels --group-by queue` shows how long each worked",
            "xplane": _XLA_GRIDS,
            "xla_json": _XLA_GRIDS,
        },
    ),
}
"""Parts in the order in which reports list missing ones. A rule `needs` the parts without which it cannot run."""
LAUNCHES: Final[Mapping[str, str]] = {
    "": "record CPU activities too, with warm-up steps before the recorded ones",
    "nsight_systems": "record with --trace=cuda,nvtx,osrt, from the program's start or with warm-up steps before",
    "rocprof": "record with rocprofv3 --runtime-trace, which takes HIP's calls, from the program's start",
    "xplane": "record the host too: options.host_tracer_level = 2, with warm-up steps before",
    "xla_json": "record the host too: options.host_tracer_level = 2, with warm-up steps before",
}
"""Reader's name -> how to record the calls that launch work on a device; "" for all others."""
HOST: Final[Mapping[str, str]] = {
    "": f"record with {PROFILE.format('with_stack=True, ')}, and every rank if there are several",
    "nsight_systems": "record NVTX ranges around the program's parts, and --trace=cuda,nvtx,osrt",
    "rocprof": "record roctx ranges around the program's parts: rocprofv3 --runtime-trace",
    "xplane": f"{_JAX_LINES}; stepscope attach does so with --stacks",
    "xla_json": f"{_JAX_LINES}; stepscope attach does so with --stacks",
    "torch_xla": 'name the parts of the step: with torch_xla.debug.profiler.Trace("forward")',
}
"""Reader's name -> how to record more of the host's activity; "" for all others."""


def how_to_record(what: Mapping[str, str], trace_format: str, framework: str | None = None) -> str:
    """The entry of LAUNCHES, HOST or a part's `how` for the framework, otherwise for the profiler of this format."""
    return next(what[key] for key in (framework, trace_format, "") if key is not None and key in what)


def missing(view: View) -> list[PartName]:
    """The parts that the view's trace lacks; "shapes" is left out where "operators" is missing."""
    absent = [name for name, part in PARTS.items() if part.is_missing(view.trace)]
    if "operators" in absent:
        absent = [name for name in absent if name != "shapes"]
    return absent if view.summary.source != "none" else ["steps", *absent]
