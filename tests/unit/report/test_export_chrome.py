"""`export --format chrome`: the very events, what other readers of Kineto's traces see, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.readers import open_trace
from stepscope.report.exports.chrome import chrome
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.simulator import write_kineto
from tests.simulator.programs import backward_thread
from tests.unit.recording import Recording


def document(trace: Trace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(b"".join(chrome(trace)))
    return found


def test_the_events_of_an_empty_trace() -> None:
    found = document(Trace.from_tables({}))

    nothing = {"name": "stepscope", "ph": "M", "pid": 0, "tid": 0, "ts": 0, "args": {}}
    assert found == {"schemaVersion": 1, "displayTimeUnit": "ms", "deviceProperties": [], "traceEvents": [nothing]}


def test_events_are_in_kinetos_words() -> None:
    recording = Recording(
        Metadata(origin_unix_ns=10**18, rank=1, world_size=2, devices=(Device("0", "H100", 2**36, "9.0", 132),))
    )
    recording.operator(0, 2_001, "aten::mm", input_shapes="[[2, 3]]", sequence_number=7, source_file="train.py")
    recording.launch(5, 2, 9)
    recording.work(
        1_234_567, 20, "gemm", 9, grid="[4, 1, 1]", occupancy=0.5, registers=32, collective="allreduce", group="0"
    )

    found = document(recording.trace())

    assert found["baseTimeNanoseconds"] == 10**18
    assert found["distributedInfo"] == {"rank": 1, "world_size": 2}
    assert found["deviceProperties"] == [{"id": 0, "name": "H100", "totalGlobalMem": 2**36, "numSms": 132}]
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert slices == [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": 1,
            "tid": 1,
            "ts": 0.0,
            "dur": 2.001,
            "args": {"Sequence number": 7, "Input Dims": [[2, 3]], "source_file": "train.py"},
        },
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1,
            "tid": 1,
            "ts": 0.005,
            "dur": 0.002,
            "args": {"correlation": 9},
        },
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": 1234.567,
            "dur": 0.02,
            "args": {
                "device": 0,
                "stream": 7,
                "correlation": 9,
                "grid": [4, 1, 1],
                "registers per thread": 32,
                "est. achieved occupancy %": 50.0,
                "Collective name": "allreduce",
                "Process Group Name": "0",
            },
        },
    ]
    flows = [(event["ph"], event["cat"], event["id"], event["ts"]) for event in found["traceEvents"] if "id" in event]
    assert flows == [("s", "ac2g", 0, 0.005), ("f", "ac2g", 0, 1234.567)]


def test_readers_of_kinetos_traces_see_the_same(tmp_path: Path) -> None:
    trace = open_trace(write_kineto(backward_thread(), tmp_path / "simulated.json"))
    (tmp_path / "plain.json").write_bytes(b"".join(chrome(trace)))

    plain = open_trace(tmp_path / "plain.json")

    for table in ("operators", "launches", "device_work", "annotations", "synchronisations", "links"):
        assert plain.table(table).drop("lane", strict=False).equals(trace.table(table).drop("lane", strict=False)), (
            table
        )


@pytest.mark.parametrize("kind", ["timeline", "speedscope", "folded", "tensorboard"])
def test_a_trace_without_anything_to_draw_says_so(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "memory"
    recording = Recording(Metadata(path=str(path)))
    recording.allocation(5, 512)
    recording.trace().save(path)

    assert main(["export", str(path), str(tmp_path / "out"), "--format", kind, "--no-cache"]) == 2

    assert f"{path} has nothing to draw: no operator, call, frame" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_flame_graphs_of_queues_alone_show_their_work(tmp_path: Path) -> None:
    recording = Recording()
    recording.work(0, 20, "gemm")
    recording.work(30, 5, "copy", queue="8")
    (tmp_path / "queues.json").write_bytes(b"".join(chrome(recording.trace())))
    out = tmp_path / "out.json"

    assert main(["export", str(tmp_path / "queues.json"), str(out), "--format", "speedscope", "--no-cache"]) == 0

    found = json.loads(out.read_text())
    names = [frame["name"] for frame in found["shared"]["frames"]]
    (profile,) = found["profiles"]
    stacks = [[names[frame] for frame in sample] for sample in profile["samples"]]
    assert [(stack[0], stack[-1]) for stack in stacks] == [("(no line of yours)", name) for name in ("gemm", "copy")]
    assert profile["weights"] == [20, 5]
