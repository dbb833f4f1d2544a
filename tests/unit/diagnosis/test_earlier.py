"""A second diagnosis takes what the first one found, gives the same answer, and notices whatever would change it."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope import open_trace
from stepscope.diagnosis import diagnose_view, earlier
from stepscope.diagnosis.view import View
from stepscope.report.diagnosis import json_report, trace_report
from stepscope.report.document import compact_json
from stepscope.trace import Trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.metadata import Device
from stepscope.trace.naming import UserCode

SAMPLE = Path(__file__).parents[3] / "examples/gpt2_per_token_loss_cpu.json.gz"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))


def sample() -> Trace:
    return open_trace(SAMPLE, cache=TraceCache())


def report(trace: Trace, **settings: Any) -> Any:
    top, share = settings.pop("top", 20), settings.pop("minimum_share", 0.01)
    return compact_json(json_report(trace_report(View(trace, **settings), rules=None, top=top, minimum_share=share)))


def kept() -> list[Path]:
    return list(earlier.folder().iterdir()) if earlier.folder().exists() else []


def test_a_second_diagnosis_asks_no_rule_and_reads_no_table(asked: list[str]) -> None:
    first = report(sample())
    assert asked
    asked.clear()
    again = sample()
    assert report(again) == first
    assert (asked, again._loaded) == ([], {})


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_other_findings_are_shown_as_a_first_diagnosis_shows_them(share: float) -> None:
    report(sample())
    second = report(sample(), minimum_share=share, top=3)
    shutil.rmtree(earlier.folder())
    assert second == report(sample(), minimum_share=share, top=3)


def test_changes_of_kept_findings_are_replayed(asked: list[str]) -> None:
    first = diagnose_view(View(sample())).findings
    asked.clear()
    view = View(sample())
    second = diagnose_view(view).findings
    replayed = [number for number, each in enumerate(first) if each.change is not None]
    assert replayed
    assert not asked
    for number in replayed:
        mine, its = first[number].change, second[number].change
        assert mine is not None
        assert its is not None
        assert view.saved_ns(its) == View(sample()).saved_ns(mine)
    assert set(asked) == {first[number].rule for number in replayed}


def changed(trace: Trace, **metadata: Any) -> Trace:
    return replace(trace, metadata=replace(trace.metadata, **metadata))


@pytest.mark.parametrize("what", ["user_code", "device", "devices", "window", "package", "processors"])
def test_whatever_changes_the_answer_makes_a_new_one(
    what: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report(sample())
    asked.clear()
    trace, settings = sample(), dict[str, Any]()
    if what == "user_code":
        settings = {"user_code": UserCode(also=("torch",))}
    elif what == "device":
        settings = {"device": "cuda:1"}
    elif what == "devices":
        trace = changed(trace, devices=(Device("0", "NVIDIA L4"),))
    elif what == "window":
        trace = replace(trace, identity=trace.identity + "1")
    elif what == "package":
        monkeypatch.setattr(earlier, "package_state", lambda: [(1, 1)])
    elif what == "processors":
        monkeypatch.setattr(os, "cpu_count", lambda: 999)
    report(trace, **settings)
    assert asked
    assert len(kept()) == 2


@pytest.mark.parametrize(
    ("threshold", "again"),
    [("loop-in-step.repetitions", {"loop-in-step", "fusible-chain"}), ("input-bound.share", {"input-bound"})],
)
def test_another_threshold_asks_the_rules_that_look_it_up(threshold: str, again: set[str], asked: list[str]) -> None:
    first = report(sample())
    asked.clear()
    other = report(sample(), settings={threshold: 0.9})
    assert again <= set(asked)
    assert len(set(asked)) < 10
    asked.clear()
    assert report(sample()) == first
    assert set(asked) >= again
    shutil.rmtree(earlier.folder())
    assert report(sample(), settings={threshold: 0.9}) == other


def test_nothing_is_kept_of_a_trace_that_is_not_in_the_cache() -> None:
    report(open_trace(SAMPLE))
    assert kept() == []


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_is_damaged_or_not_ours_is_not_believed(tmp_path: Path, asked: list[str]) -> None:
    first = report(sample())
    [place] = kept()
    whole = place.read_bytes()
    attack = pickle.dumps({"no operators": _Attack(tmp_path / "made")})
    unknown = pickle.dumps({"diagnosis": Path("x")})
    for data in (
        b"",
        whole[:40],
        whole[:-1] + bytes([whole[-1] ^ 1]),
        *(hashlib.sha256(each).digest() + each for each in (attack, unknown, whole[32:-9], b"c")),
    ):
        place.write_bytes(data)
        asked.clear()
        assert report(sample()) == first
        assert asked
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("stepscope.remedies.allocators", "subprocess.Popen"),  # of a module that it imports
        ("stepscope.files", "Path"),
        ("stepscope.trace.cache", "TraceCache"),  # no record
        ("stepscope.files", "cache_folder"),
        ("numpy", "dtype"),
        ("os", "system"),
    ],
)
def test_nothing_but_records_is_built(module: str, name: str) -> None:
    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    with pytest.raises(pickle.UnpicklingError):
        earlier._Plain(io.BytesIO(b"\x80\x05" + text(module) + text(name) + b"\x93.")).load()


def test_numbers_of_numpy_are_kept_as_plain_ones() -> None:
    value = {"a": np.float64(1.5), "b": (np.int64(-3), np.bool_(True)), "c": [np.str_("x")]}
    first = View(sample()).earlier
    first.value("numbers", lambda: value)
    first.keep()
    again: dict[str, Any] = View(sample()).earlier.value("numbers", dict)
    assert again == value
    assert type(again["a"]) is float


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier.folder().parent.mkdir(parents=True)
    earlier.folder().write_text("a file")
    first = report(sample())
    assert report(sample()) == first
