import dataclasses
from collections.abc import Sequence

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Location, NotAnswered
from stepscope.report.document import json_bytes
from stepscope.report.redaction import Redactor
from tests.unit.hand_built import FULL, INPUT_BOUND, empty, full
from tests.unit.rendered import json_report


def redact(diagnosis: Diagnosis, names: Sequence[str] = ()) -> Diagnosis:
    return Redactor.of(diagnosis, names).redact(diagnosis)


def redact_table(frame: pl.DataFrame, names: Sequence[str] = ()) -> pl.DataFrame:
    return Redactor(names).redact(frame)


def redact_text(text: str, *names: str) -> str:
    return str(redact_table(pl.DataFrame({"name": [text]}), names)["name"][0])


def test_nothing_stays_nothing() -> None:
    assert_frame_equal(redact_table(pl.DataFrame()), pl.DataFrame())
    assert json_report(redact(empty())) == json_report(empty())


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("/home/alice/project/train.py(88): main", "train.py(88): main"),
        ("/Users/alice b/project/train.py(88): main", "train.py(88): main"),
        ("C:\\Users\\alice b\\project\\train.py(88): main", "train.py(88): main"),
        ("D:/data/x.json is cut", "x.json is cut"),
        ("\\\\server\\share\\x.json", "x.json"),
        ("~/project/train.py", "train.py"),
        ("../project/train.py", "train.py"),
        ("file:///scratch/jane/x.json", "x.json"),
        ("project/models/net.py(3): forward", "net.py(3): forward"),
        ("torch/nn/modules/module.py(1501): _call_impl", "torch/nn/modules/module.py(1501): _call_impl"),
        ("logging/__init__.py(1776): getEffectiveLevel", "logging/__init__.py(1776): getEffectiveLevel"),
        ("/opt/env/lib/python3.11/site-packages/torch/_ops.py(9): f", "torch/_ops.py(9): f"),
        ("/usr/lib/python3.11/threading.py(973): run", "threading.py(973): run"),
        ("/a/train.py(8): main;/a/data.py(9): load", "train.py(8): main;data.py(9): load"),
        ("cannot read '/scratch/jane/x.json': denied", "cannot read 'x.json': denied"),
        ("12 tokens/s and/or 3 steps/epoch", "12 tokens/s and/or 3 steps/epoch"),
        ("aten::div / aten::mm <a/b>", "aten::div / aten::mm <a/b>"),
        ("void at::native::elementwise_kernel<128, 2>(int*)", "void at::native::elementwise_kernel<128, 2>(int*)"),
        ("ProfilerStep#3", "ProfilerStep#3"),
        ("", ""),
    ],
)
def test_paths_in_text(text: str, redacted: str) -> None:
    assert redact_text(text) == redacted


def test_names_go_as_whole_words() -> None:
    assert redact_text("jane on node7, janet", "jane", "node7") == "[redacted] on [redacted], janet"
    assert redact_text("root of the user", "root", "user", "of") == "root of the user"


def test_a_long_hostile_name_takes_no_time() -> None:
    for part in ("/" * 50_000, "a/" * 50_000, "../" * 50_000, "\\" * 50_000, "/home/" * 10_000, "C:\\Users\\x" * 5000):
        redact_text(part)


def test_a_table_keeps_its_shape_and_types() -> None:
    frame = pl.DataFrame(
        {
            "name": ["/scratch/a/b.py(1): f", None],
            "file": ["/scratch/My Project/b.py", "torch/x.py"],
            "host": ["node7", "node8"],
            "process_name": ["python /scratch/a/b.py --token x", None],
            "stack": [["/scratch/a/b.py"], []],
            "place": [{"file": "/scratch/a/b.py", "line": 1}, None],
            "self_ns": [1, 2],
        }
    )
    expected = pl.DataFrame(
        {
            "name": ["b.py(1): f", None],
            "file": ["b.py", "torch/x.py"],
            "host": pl.Series([None, None], dtype=pl.String),
            "process_name": ["[redacted]", None],
            "stack": [["b.py"], []],
            "place": [{"file": "b.py", "line": 1}, None],
            "self_ns": [1, 2],
        }
    )
    assert_frame_equal(redact_table(frame), expected)


def test_a_whole_diagnosis_holds_no_trace_of_who_and_where() -> None:
    named = dataclasses.replace(INPUT_BOUND, title="jane doe's /home/jane doe/project/train.py on node7 is slow")
    before = full(findings=(named,), not_answered=(NotAnswered("q", "/data/jane doe/x", "run /data/y/z on lab-pc"),))
    text = json_bytes(json_report(redact(before, names=["lab-pc"]))).decode()
    for secret in ("jane", "doe", "node7", "lab-pc", "/home", "/opt", '"/data', "project"):
        assert secret not in text
    for kept in ("train.py", "torch/utils/data/dataloader.py", "input-bound", "NVIDIA H100", "trace.json", "aten::mm"):
        assert kept in text


def test_a_redacted_diagnosis_differs_only_where_it_must() -> None:
    after = redact(full())
    assert after.findings[0].where == (
        Location("train.py", 88, "main", 0.9, True, ("train.py:1 <module>",)),
        Location("torch/utils/data/dataloader.py", 12, "__next__", 0.1),
    )
    assert after.warnings[0].detail == "trace.json ends early"
    assert after.metadata == dataclasses.replace(FULL["metadata"], path="trace.json", host=None)
    assert_frame_equal(after.idle, FULL["idle"])
    assert after.devices == FULL["devices"]


def test_stepscope_s_own_words_stay_whatever_a_user_is_called() -> None:
    after = redact(full(), names=["input", "high", "kineto", "truncated"])
    assert (after.findings[0].rule, after.findings[0].severity) == ("input-bound", "high")
    assert (after.metadata.format, after.warnings[0].kind) == ("kineto", "truncated")
