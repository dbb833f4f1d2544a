"""torch.compile's log: what is read of a hand-written one, and of real, damaged and huge ones."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import pytest

from stepscope.errors import NotATraceError, UsageError
from stepscope.readers import open_trace
from stepscope.readers.compile_log import compile_logs, read_compile_log
from stepscope.trace.metadata import CodePlace, Compilation, CompiledGraph, GraphBreak

BREAK = """\
Graph break in user code at /work/job/model.py:13
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Unsupported Tensor.item() call with capture_scalar_outputs=False
  Explanation: Dynamo does not support tracing it.
  Hint: Set capture_scalar_outputs.

  Developer debug context: call_method

User code traceback:
  File "/work/job/train.py", line 21, in <module>
    loss = f(x)
  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/work/job/model.py", line 13, in forward
    if h.item() > 1:

Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/_dynamo/symbolic_convert.py", line 1, in wrapper
"""
CODE = """\
from torch import empty
cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*'], r\'\'\'
triton_poi_fused_1 = async_compile.triton(
"""
STACK = [
    {"line": 21, "name": "<module>", "filename": 3},
    {"line": 9, "name": "forward", "filename": "/work/job/model.py"},
]
GUARD = "0/0: tensor 'x' size mismatch at index 0. expected 32, actual 33"
METRICS = {
    "co_name": "forward",
    "co_filename": "/work/job/model.py",
    "co_firstlineno": 9,
    "start_time_us": 5_000_000,
    "duration_us": 1_500_000,
    "structured_logging_overhead_us": 20_000,
    "guard_count": 34,
    "graph_op_count": 3,
    "recompile_reason": None,
    "fail_reason": None,
}


def record(content: dict[str, object], payload: str = "", frame: int = 0, compilation: int = 0) -> str:
    numbers = {"frame_id": frame, "frame_compile_id": compilation, "attempt": 0}
    head = f"V1128 03:50:48.915000 4321 torch/_dynamo/utils.py:2009] {json.dumps({**content, **numbers})}\n"
    return head + "".join(f"\t{line}\n" for line in payload.split("\n") if payload)


def artifact(name: str, payload: str, **numbers: int) -> str:
    return record({"artifact": {"name": name, "encoding": "string"}}, payload, **numbers)


LOG = (
    record({"str": ["/work/job/train.py", 3]}).replace(', "frame_id": 0, "frame_compile_id": 0, "attempt": 0', "")
    + record({"dynamo_start": {"stack": STACK}})
    + artifact("dynamo_graph_break_reason", BREAK)
    + record({"inductor_output_code": {"filename": "x.py"}}, CODE)
    + artifact("fx_graph_cache_miss", '{"key": "fabcdefghijklmnop", "components": []}')
    + record({"compilation_metrics": METRICS})
    + record({"bwd_compilation_metrics": {"duration_us": 500_000}})
    + record({"compilation_metrics": {**METRICS, "recompile_reason": f"{GUARD}\nmore"}}, compilation=1)
)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_log_tells_of_each_compilation(tmp_path: Path) -> None:
    first, second = read_compile_log(written(tmp_path / "torch.log", LOG)).compiled

    assert first == Compilation(
        process="4321",
        number="0/0",
        function="forward",
        file="/work/job/model.py",
        line=9,
        called_from=(CodePlace("<module>", "/work/job/train.py", 21),),
        start_unix_ns=5_000_000_000,
        compile_ns=1_500_000_000,
        backward_ns=500_000_000,
        cached=False,
        guards=34,
        operators=3,
        graphs=(CompiledGraph("fabcdefghijklmnop", ("cpp_fused_relu_0", "triton_poi_fused_1")),),
        breaks=(
            GraphBreak(
                "/work/job/model.py",
                13,
                "Unsupported Tensor.item() call with capture_scalar_outputs=False",
                "Dynamo does not support tracing it.",
                "Set capture_scalar_outputs.",
                (CodePlace("forward", "/work/job/model.py", 13), CodePlace("<module>", "/work/job/train.py", 21)),
            ),
        ),
        logging_ns=20_000_000,
    )
    assert (second.number, second.cached) == ("0/1", None)
    assert second.reason == GUARD


def test_the_reason_of_a_function_that_is_given_up_follows_the_introduction(tmp_path: Path) -> None:
    text = (
        "Graph Break in user code at model.py:13\n"
        "Graph Break Reason: Failed to handle graph break gracefully. Graph break encountered:\n\n"
        "Call to `graph_break()`"
    )
    log = artifact("dynamo_graph_break_reason", text) + record({"compilation_metrics": METRICS})

    (only,) = read_compile_log(written(tmp_path / "torch.log", log)).compiled
    assert [each.reason for each in only.breaks] == ["Call to `graph_break()`"]


def test_a_packed_log_with_ranks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dedicated_log_torch_trace_rank_0_x.log.gz"
    path.write_bytes(gzip.compress(LOG.replace("V1128", "[rank0]:V1128").encode()))

    assert len(read_compile_log(path).compiled) == 2
    assert compile_logs(tmp_path) == [path]


def test_damage_costs_only_the_damaged_records(tmp_path: Path) -> None:
    lines = LOG.split("\n")
    lines[1] = lines[1][:60]  # the first record of the stack
    damaged = "\tlost payload\n" + "\n".join(lines) + "V1128 03:50:48.915000 1 a.py:1] " + "[" * 5000 + "\n{\n\udcff"
    path = tmp_path / "torch.log"
    path.write_bytes(damaged.encode("utf-8", "surrogateescape"))

    first, second = read_compile_log(path).compiled
    assert (first.called_from, first.compile_ns, second.number) == ((), 1_500_000_000, "0/1")


@pytest.mark.parametrize("cut", range(0, len(LOG), 97))
def test_any_beginning_of_a_log_is_read_or_refused(cut: int, tmp_path: Path) -> None:
    path = written(tmp_path / "torch.log", LOG[:cut])
    with contextlib.suppress(UsageError, NotATraceError):
        assert len(read_compile_log(path).compiled) <= 2


def test_wrong_types_are_unknown(tmp_path: Path) -> None:
    wrong = {name: [{}] for name in METRICS} | {"co_name": "forward", "co_filename": "m.py", "co_firstlineno": 3}
    text = record({"compilation_metrics": wrong}) + record({"dynamo_start": {"stack": [1, {"line": "x"}]}})
    text += record({"artifact": 3}) + record({"str": [1]}) + artifact("recompile_reasons", "")
    text += "".join(record({"artifact": {"name": name}}) for name in ([], {}, None, 7))

    (only,) = read_compile_log(written(tmp_path / "torch.log", text)).compiled
    assert only == Compilation(process="4321", number="0/0", function="forward", file="m.py", line=3)


def test_payloads_do_not_fill_the_memory(tmp_path: Path) -> None:
    huge = artifact("dynamo_graph_break_reason", BREAK + "x" * 4_000_000 + "\n" + "y" * 4_000_000)

    (only,) = read_compile_log(
        written(tmp_path / "torch.log", huge + record({"compilation_metrics": METRICS}))
    ).compiled
    assert [each.line for each in only.breaks] == [13]


@pytest.mark.parametrize("text", ["hello\n", '{"traceEvents": []}', "V1128 nonsense\n"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a log of torch\.compile"):
        read_compile_log(written(tmp_path / "other.log", text))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"contains no log of torch\.compile"):
        compile_logs(tmp_path)


def test_a_log_given_as_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotATraceError, match="--compile-log"):
        open_trace(written(tmp_path / "torch.log", LOG))
