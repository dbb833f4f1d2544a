"""`export --format csv|parquet`: a file a table, with row numbers, in a folder that is complete or not there."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import polars as pl
import pytest

from stepscope.commands import main
from stepscope.report.tables import write_tables
from stepscope.trace import Metadata, Trace, TraceWarning
from stepscope.trace.tables import SCHEMAS
from tests.unit.recording import Recording

HOSTILE = 'a,"b"\n=cmd|\x1b[31m'


def recorded() -> Trace:
    recording = Recording(Metadata(path="t.json", rank=3), (TraceWarning("truncated", 1, "it ends early"),))
    recording.operator(0, 10, "aten::mm")
    recording.operator(2, 3, HOSTILE, call_stack="")
    return recording.trace()


def test_an_empty_trace_has_files_of_headers_alone(tmp_path: Path) -> None:
    write_tables(Trace.from_tables({}), tmp_path, "csv")

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["trace.json", *(f"{t}.csv" for t in SCHEMAS)])
    assert (tmp_path / "links.csv").read_text() == "row,kind,source,target\n"


def test_csv_keeps_text_and_tells_null_from_nothing(tmp_path: Path) -> None:
    write_tables(recorded(), tmp_path, "csv")

    with (tmp_path / "operators.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["name"], row["parent"]) for row in rows] == [("0", "aten::mm", ""), ("1", HOSTILE, "0")]
    assert (tmp_path / "operators.csv").read_text().splitlines()[1] == "0,0,10,aten::mm,0" + "," * 12
    assert ',"",' in (tmp_path / "operators.csv").read_text()  # the call stack that is there and empty
    about = json.loads((tmp_path / "trace.json").read_text())
    assert (about["metadata"]["rank"], about["warnings"][0]["kind"]) == (3, "truncated")


def test_parquet_is_the_tables_with_row_numbers(tmp_path: Path) -> None:
    trace = recorded()

    write_tables(trace, tmp_path, "parquet")

    for table in SCHEMAS:
        found = pl.read_parquet(tmp_path / f"{table}.parquet")
        assert found["row"].to_list() == list(range(found.height))
        assert found.drop("row").equals(trace.table(table))
    operators = pl.read_parquet(tmp_path / "operators.parquet")
    joined = operators.join(operators, left_on="parent", right_on="row")
    assert joined.select("name", "name_right").rows() == [(HOSTILE, "aten::mm")]


@pytest.mark.parametrize("kind", ["csv", "parquet", "tensorboard"])
def test_a_folder_is_never_written_over_nor_half(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.json"
    trace.write_text('[{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]')
    arguments = ["export", str(trace), "OUT", "--format", kind, "--no-cache"]

    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert main([*arguments[:2], "-", *arguments[3:]]) == 2
    (tmp_path / "file").write_text("mine")
    assert main([*arguments[:2], "file", *arguments[3:]]) == 2
    assert main([*arguments[:2], "no/such/place", *arguments[3:]]) == 2
    assert main([*arguments[:2], "n" * 300, *arguments[3:]]) == 2

    told = capsys.readouterr().err
    assert "already exists: name a new or an empty folder" in told
    assert f"--format {kind} writes a folder, which cannot go to standard output" in told
    assert "no/such/place cannot be written: No such file or directory" in told
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["OUT", "file", "t.json"]
