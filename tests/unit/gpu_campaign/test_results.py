"""Results can be carried away: few files, none large, traces packed and thinned."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_campaign import results
from benchmarks.gpu_campaign.plan import PARTS, chosen, gpu_tests, items
from benchmarks.gpu_campaign.results import PACKS, Results, packed, problems, thinned
from stepscope import open_trace

zstandard = pytest.importorskip("zstandard")


def trace() -> dict[str, Any]:
    """Three steps of an operator, its launch and its kernel, which runs in the step after it."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
    for number in range(3):
        begin = 1000 * number
        common = {"ph": "X", "pid": 1, "tid": 1}
        step = {"name": f"ProfilerStep#{number}", "cat": "user_annotation", "ts": begin, "dur": 900}
        operator = {"name": "aten::mm", "cat": "cpu_op", "ts": begin + 10, "dur": 100, "args": {}}
        launch = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": begin + 20, "dur": 10}
        kernel = {"name": "gemm", "cat": "kernel", "ts": begin + 1100, "dur": 50, "pid": 0, "tid": 7}
        events += [common | step, common | operator]
        events += [common | each | {"args": {"correlation": number}} for each in (launch, kernel)]
    return {"schemaVersion": 1, "traceEvents": events}


def test_a_thinned_trace_has_whole_steps_and_their_kernels() -> None:
    thin = json.loads(thinned(json.dumps(trace()).encode(), 2))

    names = [event["name"] for event in thin["traceEvents"]]
    assert thin["schemaVersion"] == 1
    assert names.count("gemm") == names.count("cudaLaunchKernel") == 2
    assert [name for name in names if name.startswith("Profiler")] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert "process_name" in names


def test_a_trace_without_steps_stays_as_it_is() -> None:
    assert thinned(b'{"traceEvents": []}', 2) == b'{"traceEvents": []}'


def test_a_packed_trace_can_be_opened(tmp_path: Path) -> None:
    file = tmp_path / "trace-1.json.gz"
    file.write_bytes(gzip.compress(json.dumps(trace()).encode()))

    name, content = packed(file)

    assert name == "trace-1.json.zst"
    (tmp_path / name).write_bytes(content)
    assert open_trace(tmp_path / name).device_work.height == 3


def test_a_large_trace_is_thinned_and_what_the_recorder_knows_stays_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "LARGEST_TRACE", 100)
    monkeypatch.setattr(results, "KEPT_STEPS", 1)
    for name in ("trace-1.json.gz", "trace-1.json.gz.lines"):
        (tmp_path / name).write_bytes(gzip.compress(json.dumps(trace()).encode()))

    name, content = packed(tmp_path / "trace-1.json.gz")

    assert json.loads(zstandard.decompress(content))["traceEvents"].__len__() == 5
    assert packed(tmp_path / "trace-1.json.gz.lines")[0] == f"{name}.lines"


def test_packs_stay_below_the_limit_and_say_what_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MOST_BYTES", 5000)
    kept, out = tmp_path / "keep", tmp_path / "out"
    kept.mkdir()
    for number in range(8):
        (kept / f"trace-{number}.json").write_bytes(os.urandom(1500))
    (kept / "large.parquet").write_bytes(bytes(6000))
    (kept / "small.parquet").write_bytes(bytes(10))
    found = Results.opened(out)

    left_out = found.carry("faults/one", kept)

    assert left_out == ["large.parquet", "trace-4.json", "trace-5.json", "trace-6.json", "trace-7.json"]
    assert found.carry("prediction/gpt2", kept)[-2:] == ["trace-6.json", "trace-7.json"]
    assert list(problems(out)) == []
    names = {pack: zipfile.ZipFile(out / pack).namelist() for pack in PACKS}
    assert [name for pack in PACKS[:2] for name in names[pack]] == [f"faults/one/trace-{i}.json.zst" for i in range(4)]
    assert names[PACKS[2]] == [f"prediction/gpt2/trace-{number}.json.zst" for number in range(2)]


def test_a_folder_that_cannot_be_carried_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MOST_BYTES", 10)
    (tmp_path / "deep").mkdir()
    for number in range(9):
        (tmp_path / "deep" / f"{number}").write_bytes(bytes(11 if number == 0 else 1))

    said = list(problems(tmp_path))

    assert sum("lies in a folder" in each for each in said) == 9
    assert sum("9 files" in each for each in said) == sum("11 bytes" in each for each in said) == 1


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format": 7, "about": {}, "items": {}}'])
def test_a_summary_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)

    with pytest.raises(ValueError, match=r"summary\.json"):
        Results.opened(tmp_path)


@pytest.mark.slow
def test_every_part_has_items_and_their_functions_exist() -> None:
    from importlib import import_module

    for is_dry in (False, True):
        found = items(is_dry=is_dry)
        assert {item.part for item in found} == set(PARTS)
        assert len({item.path for item in found}) == len(found)
        for item in found:
            module, _, function = item.work.partition(".")
            assert callable(getattr(import_module(f"benchmarks.gpu_campaign.{module}"), function))
    assert sum(PARTS.values()) == 25
    assert len(gpu_tests()) >= 10


def test_parts_and_items_are_chosen_by_name() -> None:
    assert {item.part for item in chosen(["tests", "faults/small_model"], is_dry=False)} == {"tests", "faults"}
    with pytest.raises(ValueError, match="no part or item 'test'"):
        chosen(["test"], is_dry=False)
