"""Every command and option as users run them: processes, pipes, exit codes, files, and traces that mean harm."""

from __future__ import annotations

import csv
import getpass
import gzip
import io
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.e2e.conftest import (
    BATCHED,
    PER_TOKEN,
    Outcome,
    Stepscope,
    device_steps,
    environment,
    run_here,
    run_stepscope,
    slice_event,
    write_events,
)

SCHEMA = {
    "trace": {"path", "format", "events", "rank", "world_size", "origin_unix_ns", "warnings"},
    "steps": {"source", "list"},
}
LISTED = {
    "devices": {
        "device", "name", "window_ns", "busy_ns", "idle_ns", "compute_ns", "communication_ns", "copy_ns",
        "exposed_communication_ns", "exposed_copy_ns",
    },
    "idle": {"device", "cause", "trigger", "ns", "share"},
    "findings": {
        "rule", "title", "severity", "saving_ns_per_step", "saving_share", "confidence", "evidence", "where", "remedy",
    },
    "not_answered": {"question", "why", "how"},
    "operators": {"name"},
    "kernels": {"name"},
}  # fmt: skip
HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07</script><img src=x onerror=alert(1)>[bold]rich[/bold]|pipe|`tick`\x00\u202ertl"
    "\u200b\u2028\r\nline'\"&=cmd @everyone"
)
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs signals and /dev")


def assert_schema(report: dict[str, Any]) -> None:
    """Schema 1: every key is there, and idle time adds up to the nanosecond."""
    assert report["schema"] == 1
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", report["stepscope"])
    for key, fields in SCHEMA.items():
        assert fields <= report[key].keys()
    for key, fields in LISTED.items():
        assert all(fields <= row.keys() for row in report[key]), key
    for step in report["steps"]["list"]:
        assert {"index", "start_ns", "duration_ns"} <= step.keys()
    idle: defaultdict[str, int] = defaultdict(int)
    for piece in report["idle"]:
        idle[piece["device"]] += piece["ns"]
    for device in report["devices"]:
        assert isinstance(device["device"], str)
        assert device["busy_ns"] + device["idle_ns"] == device["window_ns"]
        assert idle.pop(device["device"], 0) == device["idle_ns"]
    assert not idle
    savings = [finding["saving_ns_per_step"] for finding in report["findings"]]
    assert savings == sorted(savings, reverse=True)


def plain(text: str) -> bool:
    """Whether a text holds nothing that would move a cursor, colour or hide anything."""
    return all(character.isprintable() or character == "\n" for character in text)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Stepscope:
    """Runs stepscope in this process, but for what is about processes: starting one costs more than most commands."""
    return run_stepscope if request.cls is TestFiles else run_here


class TestDiagnose:
    def test_the_loop_over_tokens_is_found_in_its_line(self, run: Stepscope) -> None:
        outcome = run("diagnose", PER_TOKEN)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("No device was recorded; a step takes ")
        first = outcome.out.split("\n\n")[1]
        assert "rule   loop-in-step (stepscope explain loop-in-step)" in first
        assert re.search(r"where +\S*gpt2_training\.py:\d+ ", first)
        assert "device self" not in outcome.out
        assert plain(outcome.out)

    def test_the_batched_loss_has_no_loop(self, run: Stepscope) -> None:
        report = run("diagnose", BATCHED, "--json", "-").json()
        assert "loop-in-step" not in {finding["rule"] for finding in report["findings"]}

    def test_a_device_that_waits_for_data(self, run: Stepscope, gpu: Path) -> None:
        outcome = run("diagnose", gpu)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("Device 0 (Simulated Device 80GB): a step takes ")
        assert "biggest cause: the host was loading data" in " ".join(outcome.out.split())
        assert "rule   input-bound " in outcome.out.split("\n\n")[1]
        assert "Why device 0 was idle" in outcome.out

    @pytest.mark.parametrize(
        "program", ["two_devices", "exposed_all_reduce", "item_every_step", "graph_decode", "recompilation"]
    )
    def test_json_holds_schema_1(self, program: str, run: Stepscope, simulated: Callable[[str], Path]) -> None:
        outcome = run("diagnose", simulated(program), "--json", "-", "--all")
        assert (outcome.code, outcome.err) == (0, "")
        report = outcome.json()
        assert_schema(report)
        assert len(report["devices"]) == (2 if program == "two_devices" else 1)

    def test_json_of_a_trace_without_a_device(self, run: Stepscope) -> None:
        report = run("diagnose", PER_TOKEN, "--json", "-", "--top", "3").json()
        assert_schema(report)
        assert report["devices"] == report["idle"] == report["kernels"] == []
        assert len(report["operators"]) == 3
        assert report["steps"]["source"] == "annotation"

    def test_reports_go_to_files_beside_the_text(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        names = ["r.json", "r.md", "r.html"]
        outcome = run("diagnose", gpu, "--json", names[0], "--markdown", names[1], "--html", names[2], folder=tmp_path)
        assert outcome.code == 0
        assert outcome.out.startswith("Device 0")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        assert_schema(json.loads((tmp_path / "r.json").read_text()))
        assert (tmp_path / "r.md").read_text().startswith("**Device 0 (Simulated Device 80GB): a step takes ")
        page = (tmp_path / "r.html").read_text()
        assert page.startswith("<!doctype html>")
        assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)

    @pytest.mark.parametrize(("option", "start"), [("--markdown", "**Device 0"), ("--html", "<!doctype html>")])
    def test_a_report_on_standard_output_replaces_the_text(
        self, option: str, start: str, run: Stepscope, gpu: Path
    ) -> None:
        outcome = run("diagnose", gpu, option, "-")
        assert outcome.code == 0
        assert outcome.out.startswith(start)
        assert "(stepscope explain " not in outcome.out

    def test_only_one_report_can_go_to_standard_output(self, run: Stepscope, gpu: Path) -> None:
        assert "only one report" in run("diagnose", gpu, "--json", "-", "--html", "-").mistake()

    @pytest.mark.parametrize("option", ["--json", "--markdown", "--html"])
    def test_redacted_reports_name_nobody_and_no_place(self, option: str, run: Stepscope, tmp_path: Path) -> None:
        folder = tmp_path / "secret folder of alice"
        folder.mkdir()
        events = device_steps(frame="/home/alice/project x/train.py(3): f")
        events.append({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python /home/alice/run.py"}})
        trace = write_events(folder / "t.json", events, hostname="node-of-alice")
        outcome = run("diagnose", trace, option, "-", "--redact")
        assert outcome.code == 0
        for word in ("alice", "secret folder", str(tmp_path), "/home/", "project x", "node-of"):
            assert word not in outcome.out
        assert "train.py" in outcome.out
        names = [name for name in (getpass.getuser(), platform.node()) if len(name) > 2 and name != "root"]
        assert not [name for name in names if re.search(rf"\b{re.escape(name)}\b", outcome.out)]

    def test_a_window(self, run: Stepscope, gpu: Path) -> None:
        report = run("diagnose", gpu, "--window", "1ms:9ms", "--json", "-").json()
        assert_schema(report)
        assert report["devices"][0]["window_ns"] == 8_000_000
        assert report["trace"]["window"] == {"start_ns": 1_000_000, "end_ns": 9_000_000}

    def test_a_window_behind_the_end_is_a_mistake(self, run: Stepscope, gpu: Path) -> None:
        said = run("diagnose", gpu, "--window", "100s:200s").mistake()
        assert "nothing was recorded in the window '100s:200s'" in said

    def test_steps(self, run: Stepscope, gpu: Path) -> None:
        report = run("diagnose", gpu, "--steps", "1:2", "--json", "-").json()
        assert_schema(report)
        assert [step["index"] for step in report["steps"]["list"]] == [1, 2]

    def test_rules_are_chosen_and_set(self, run: Stepscope, gpu: Path) -> None:
        def found(*options: str) -> set[str]:
            report = run("diagnose", gpu, "--json", "-", *options).json()
            return {finding["rule"] for finding in report["findings"]}

        assert "input-bound" in found()
        assert found("--rule", "input-bound") == {"input-bound"}
        assert found("--rule", "launch-bound", "--rule", "recompilation") <= {"launch-bound", "recompilation"}
        assert "input-bound" not in found("--set", "input-bound.share=99%")

    def test_fail_on(self, run: Stepscope, gpu: Path) -> None:
        failed = run("diagnose", gpu, "--fail-on", "10%")
        assert failed.code == 1
        assert failed.out == run("diagnose", gpu).out
        assert re.match(r"stepscope: input-bound would save \d+\.\d %, --fail-on 10\.0 %\n", failed.err)
        assert run("diagnose", gpu, "--fail-on", "100%").code == 0
        assert run("diagnose", gpu, "--rule", "recompilation", "--fail-on", "1%").code == 0

    @pytest.mark.parametrize("annotated", [True, False])
    def test_the_step_that_a_remedy_names_can_be_looked_at(
        self, annotated: bool, run: Stepscope, tmp_path: Path
    ) -> None:
        """Whether the steps carry numbers or were inferred from the optimizer's."""
        events = device_steps(steps=16)
        starts = [event["ts"] for event in events]
        for slow in (5 * 4, 5 * 9):  # a single slow step would be set apart
            for event, start in zip(events, starts, strict=True):
                event["ts"] += 20_000 if start >= starts[slow] + 200 else 0
            events[slow]["dur"] += 20_000
        for event in events:
            if not annotated and event["cat"] == "user_annotation":
                event["name"] = "Optimizer.step#SGD.step"
        trace = write_events(tmp_path / "t.json", events)
        report = run("diagnose", trace, "--rule", "step-variance", "--json", "-").json()
        assert report["steps"]["source"] == ("annotation" if annotated else "inferred")
        code = report["findings"][0]["remedy"]["code"].split()
        assert code[:3] == ["stepscope", "diagnose", str(trace)]
        outcome = run("diagnose", trace, *code[3:])
        assert (outcome.code, outcome.err) == (0, "")

    def test_top_and_all(self, run: Stepscope) -> None:
        assert "showing 2 of " in run("diagnose", PER_TOKEN, "--top", "2").out
        assert "showing " not in run("diagnose", PER_TOKEN, "--top", "0").out
        some, every = (run("diagnose", PER_TOKEN, "--json", "-", *more).json() for more in ((), ("--all",)))
        assert len(every["findings"]) == len(some["findings"]) + some["findings_hidden"]

    def test_a_folder_of_ranks(self, run: Stepscope, tmp_path: Path) -> None:
        for rank in (1, 0):
            head = {"distributedInfo": {"rank": rank, "world_size": 2}}
            write_events(tmp_path / f"rank{rank}.json", device_steps(steps=4 + rank), **head)
        (tmp_path / "config.json").write_text('{"a": 1}')
        (tmp_path / "notes.txt").write_text("no trace")
        outcome = run("diagnose", tmp_path)
        assert outcome.code == 0
        heading, columns = outcome.out.splitlines()[:2]
        assert (heading, columns.split()[0]) == ("2 ranks", "rank")
        assert outcome.err == ""
        assert "1 file is not in this report\n" in outcome.out
        assert "config.json is not a trace: " in outcome.out
        assert outcome.out.count("== rank ") == 1
        assert run("diagnose", tmp_path, "-v").out.count("== rank ") == 2
        outcome = run("diagnose", tmp_path, "--json", "-")
        reports = outcome.json()["ranks"]
        assert [report["trace"]["rank"] for report in reports] == [0, 1]
        for report in reports:
            assert_schema(report)
        assert [each["path"] for each in outcome.json()["unreadable"]] == [str(tmp_path / "config.json")]
        assert outcome.err.startswith(f"stepscope: skipped: {tmp_path / 'config.json'} is not a trace: ")

    def test_one_broken_rank_hides_no_other(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        ranks = tmp_path / "ranks of alice"
        ranks.mkdir()
        (ranks / "rank0.json.gz").write_bytes(gzip.compress(gpu.read_bytes())[:12])
        (ranks / "rank1.json").touch()
        assert run("diagnose", ranks).mistake() == (
            f"stepscope: none of the 2 files in {ranks} can be read: "
            f"{ranks / 'rank0.json.gz'} cannot be unpacked: the compressed data ends early\n"
        )
        (ranks / "rank2.json").write_bytes(gpu.read_bytes())
        outcome = run("diagnose", ranks)
        assert (outcome.code, outcome.err) == (0, "")
        listed = outcome.out.partition("\n2 files are not in this report\n")
        assert listed[0] == run("diagnose", ranks / "rank2.json").out
        assert " ".join(listed[2].split()) == (
            f"- {ranks / 'rank0.json.gz'} cannot be unpacked: the compressed data ends early. "
            f"- {ranks / 'rank1.json'} is empty."
        )
        for option in ("--json", "--markdown", "--html"):
            outcome = run("diagnose", ranks, option, "-", "--redact")
            assert "rank1.json is empty" in outcome.out.replace("\\_", "_")
            assert "alice" not in outcome.out + outcome.err
        (ranks / "rank2.json").unlink()
        (ranks / "rank0.json.gz").unlink()
        assert run("diagnose", ranks).mistake() == (
            f"stepscope: the only file in {ranks} cannot be read: {ranks / 'rank1.json'} is empty\n"
        )

    def test_the_same_file_counts_once(self, run: Stepscope, gpu: Path) -> None:
        outcome = run("diagnose", gpu, gpu, f"{gpu.parent}/./{gpu.name}")
        assert outcome.out == run("diagnose", gpu).out
        assert outcome.err.count("was named before\n") == 2

    def test_traces_without_a_rank_are_called_traces(self, run: Stepscope, gpu: Path) -> None:
        assert run("diagnose", gpu, BATCHED).out.startswith("2 traces\n")

    def test_one_broken_path_among_several(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        (tmp_path / "broken.json").write_text("hello")
        assert "broken.json is not a trace" in run("diagnose", gpu, tmp_path / "broken.json").mistake()
        assert "there is no file" in run("diagnose", gpu, tmp_path / "none.json").mistake()

    def test_standard_input(self, run: Stepscope, gpu: Path) -> None:
        assert run("diagnose", "-", stdin=gpu.read_bytes()).out == run("diagnose", gpu).out
        assert run("diagnose", "-").mistake() == "stepscope: standard input is empty\n"


class TestTables:
    @pytest.mark.parametrize("command", ["steps", "idle", "operators", "kernels", "roofline"])
    def test_the_formats_agree(self, command: str, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        rows = run(command, gpu, "--format", "json").json()
        assert rows
        table = run(command, gpu)
        assert (table.code, table.err) == (0, "")
        assert len(table.out.splitlines()) >= len(rows) + 1
        assert plain(table.out)
        text = run(command, gpu, "--format", "csv").out
        assert [list(row) for row in csv.DictReader(io.StringIO(text))] == [list(row) for row in rows]
        target = tmp_path / "t.parquet"
        assert run(command, gpu, "--output", target) == Outcome(0, "", f"stepscope: wrote {target}\n")
        assert pl.read_parquet(target).to_dicts() == rows
        assert len(run(command, gpu, "--top", "1", "--format", "json").json()) == 1

    def test_steps_that_were_not_recorded_are_told(self, run: Stepscope, gpu: Path) -> None:
        assert run("steps", gpu, "--steps", "1:9").err.startswith("stepscope: of the steps 1:9 only ")
        assert run("steps", gpu, "--steps", "1:").err == ""

    def test_a_single_row_stands_sideways_where_it_is_too_wide(self, run: Stepscope, gpu: Path) -> None:
        lines = run("operators", gpu, "--top", "1", COLUMNS="60").out.splitlines()
        assert [line.split("  ")[0] for line in lines[:3]] == ["name", "calls", "calls per step"]
        assert all(len(line) <= 60 for line in lines)

    def test_a_folder_of_traces_gives_its_first(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        folder = tmp_path / "ranks"
        folder.mkdir()
        for name in ("rank0.json", "rank1.json"):
            (folder / name).write_bytes(gpu.read_bytes())
        outcome = run("steps", folder, "--format", "csv")
        assert outcome.out == run("steps", gpu, "--format", "csv").out
        assert outcome.err == (
            f"stepscope: {folder} has 2 traces; this is rank0.json, {folder / 'rank1.json'} is the next\n"
        )

    def test_neither_a_file_nor_a_run(self, run: Stepscope) -> None:
        outcome = run("diagnose", "nosuchrun")
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err == (
            "stepscope: there is no file, folder or run 'nosuchrun'; stepscope runs lists the runs\n"
        )

    def test_steps(self, run: Stepscope, gpu: Path) -> None:
        rows = run("steps", gpu, "--format", "json").json()
        assert [(row["index"], row["source"]) for row in rows] == [(index, "annotation") for index in range(4)]
        slowest = run("steps", gpu, "--sort", "duration_ns", "--top", "1", "--format", "json").json()
        assert slowest[0]["duration_ns"] == max(row["duration_ns"] for row in rows)
        fastest = run("steps", gpu, "--sort", "duration_ns", "--ascending", "--format", "json").json()
        assert fastest[0]["duration_ns"] == min(row["duration_ns"] for row in rows)

    def test_input(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        assert run("input", gpu).out == "There are no functions of an input pipeline in this trace.\n"
        stage = {"stage": "collate", "name": "join", "file": "data.py", "line": 30, "calls": 2, "total_ns": 5_000_000}
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
        document = {"traceEvents": [event], "stepscope": {"input_stages": [{**stage, "in_workers": True}]}}
        trace = tmp_path / "measured.json"
        trace.write_text(json.dumps(document))

        [row] = run("input", trace, "--format", "json").json()

        assert (row["stage"], row["function"], row["line"], row["runs_in"]) == ("collate", "join", 30, "workers")
        assert (row["calls"], row["total_ns"], row["mean_ns"], row["share"]) == (2, 5_000_000, 2_500_000, 1.0)

    def test_idle(self, run: Stepscope, gpu: Path) -> None:
        idle_ns = run("diagnose", gpu, "--json", "-").json()["devices"][0]["idle_ns"]
        pieces = run("idle", gpu, "--pieces", "--format", "json").json()
        assert sum(piece["duration_ns"] for piece in pieces) == idle_ns
        causes = run("idle", gpu, "--group-by", "cause,cause", "--format", "json").json()
        assert sum(row["ns"] for row in causes) == idle_ns
        assert causes[0]["cause"] == "input"

    def test_idle_of_a_trace_without_a_device_says_so(self, run: Stepscope) -> None:
        outcome = run("idle", BATCHED)
        assert outcome.code == 0
        assert outcome.out.startswith("No device was recorded")

    def test_operators_and_kernels_can_be_grouped(self, run: Stepscope, gpu: Path) -> None:
        for command, columns in (("operators", "name,input_shapes"), ("kernels", "name,queue")):
            rows = run(command, gpu, "--group-by", columns, "--format", "json").json()
            assert set(columns.split(",")) <= rows[0].keys()

    def test_redact(self, run: Stepscope, tmp_path: Path) -> None:
        trace = write_events(tmp_path / "t.json", device_steps(frame="/home/alice/x/train.py(3): f"))
        out = run("query", trace, "select file, name from frames", "--redact", "--format", "csv").out
        assert "alice" not in out
        assert "train.py" in out

    def test_nothing_is_written_to_a_terminal_as_parquet_but_a_pipe_gets_it(self, gpu: Path) -> None:
        arguments = [sys.executable, "-m", "stepscope", "steps", str(gpu), "--format", "parquet"]
        data = subprocess.run(arguments, capture_output=True, env=environment(), check=True, timeout=60).stdout
        assert pl.read_parquet(io.BytesIO(data)).height == 4


class TestQuery:
    def test_select(self, run: Stepscope, gpu: Path) -> None:
        sql = "select name, count(*) as calls from operators group by name order by calls desc, name"
        rows = run("query", gpu, sql, "--format", "json").json()
        assert rows[0]["calls"] >= rows[-1]["calls"]
        total = run("query", gpu, "--format", "csv", "select count(*) as n from operators").out
        assert total == f"n\n{sum(row['calls'] for row in rows)}\n"

    def test_without_a_query_the_tables_are_listed(self, run: Stepscope, gpu: Path) -> None:
        assert re.search(r"^operators: \d+ rows\n    row, start_ns, ", run("query", gpu).out, re.MULTILINE)

    @pytest.mark.parametrize(
        "sql",
        [
            "select * from read_csv('{secret}')",
            "select * from \"read_parquet\"('{secret}')",
            "select * from '{secret}'",
            "copy operators to '{secret}'",
            "drop table operators",
            "select 1; drop table operators",
            "create table t as select * from operators",
            "explain analyze select * from read_csv('{secret}')",
        ],
    )
    def test_hostile_statements_are_refused(self, sql: str, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        secret = tmp_path / "secret.csv"
        secret.write_text("a\nhidden\n")
        assert "hidden" not in run("query", gpu, sql.format(secret=secret)).mistake()
        assert secret.read_text() == "a\nhidden\n"
        assert list(tmp_path.iterdir()) == [secret]


class TestExport:
    @pytest.mark.parametrize("trace", ["gpu", "cpu"])
    def test_what_viewers_need_is_there_with_its_types(self, trace: str, run: Stepscope, gpu: Path) -> None:
        outcome = run("export", gpu if trace == "gpu" else BATCHED, "-")
        assert (outcome.code, outcome.err) == (0, "")
        events = outcome.json()["traceEvents"]
        columns = ("name", "pid", "tid", "ts", "dur", "id")
        kinds = {(event["ph"], *(type(event.get(name)) for name in columns)) for event in events}
        for phase, name, process, thread, start, length, number in kinds:
            assert (name, process, thread) == (str, int, int)
            assert phase == "M" or start is float
            assert phase != "X" or length is float
            assert phase not in "sf" or number is int
        assert min(event.get("dur", 0) for event in events) >= 0
        assert {kind[0] for kind in kinds} == ({"M", "X", "s", "f"} if trace == "gpu" else {"M", "X"})

    def test_stepscope_opens_it_again(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        again = tmp_path / "again.json"
        assert run("export", gpu, again) == Outcome(0, "", f"stepscope: wrote {again}\n")
        for sql in ("select count(*) as n from operators", "select sum(duration_ns) as ns from frames"):
            assert run("query", again, sql, "--format", "csv").out == run("query", gpu, sql, "--format", "csv").out

    def test_a_part(self, run: Stepscope, gpu: Path) -> None:
        """The step before may still run on the device."""
        names = {event["name"] for event in run("export", gpu, "-", "--steps", "2").json()["traceEvents"]}
        steps = {name for name in names if name.startswith("ProfilerStep")}
        assert {"ProfilerStep#2"} <= steps <= {"ProfilerStep#1", "ProfilerStep#2"}


class TestRulesAndCache:
    def test_every_rule_is_listed_and_one_explained(self, run: Stepscope) -> None:
        rules = [row["rule"] for row in run("rules", "--format", "json").json()]
        assert "input-bound" in rules
        assert [line.split()[0] for line in run("rules").out.splitlines()[1:]] == rules
        outcome = run("explain", rules[-1])
        assert outcome.code == 0
        assert rules[-1] in outcome.out

    def test_the_cache(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        def said(*arguments: str | Path) -> str:
            outcome = run(*arguments, STEPSCOPE_CACHE_DIR=str(tmp_path))
            assert (outcome.code, outcome.err) == (0, "")
            return outcome.out

        assert said("cache").count("\n") == 1
        first = said("steps", gpu)
        assert gpu.name in said("cache", "list")
        assert said("steps", gpu) == first
        assert said("cache", "limit", "1MiB") == said("cache", "limit") == "The cache keeps at most 1.0 MiB.\n"
        assert said("cache", "clear").startswith("Removed 1 trace, ")
        said("steps", gpu, "--no-cache")
        assert gpu.name not in said("cache")

    def test_verbose_says_what_the_cache_does(self, run: Stepscope, gpu: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        outcome = run("steps", gpu, "-v", STEPSCOPE_CACHE_DIR=str(tmp_path / "file"))
        assert outcome.code == 0
        assert "cannot be written" in outcome.err
        assert run("steps", gpu, STEPSCOPE_CACHE_DIR=str(tmp_path / "file")) == Outcome(0, outcome.out, "")


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["diagnos", "TRACE"], "'diagnos' is not a command; did you mean diagnose?"),
            (["TRACE"], "to explain a trace: stepscope diagnose "),
            (["export"], "required: TRACE"),
            (["diagnose", "TRACE", "--jsn", "x"], "there is no option --jsn; did you mean --json?"),
            (["diagnose", "TRACE", "--json", ""], "the name of the output file is empty"),
            (["diagnose", "TRACE", "--rule", "inputbound"], "did you mean input-bound?"),
            (["diagnose", "TRACE", "--set", "nonsense"], "write RULE.THRESHOLD=VALUE"),
            (["diagnose", "TRACE", "--set", "input-bound.shar=1%"], "did you mean share?"),
            (["diagnose", "TRACE", "--set", "input-bound.share=nan"], "sets no threshold"),
            (["diagnose", "TRACE", "--fail-on", "10"], "write 10% or 0.1"),
            (["diagnose", "TRACE", "--top", "-1"], "is not a whole number"),
            (["diagnose", "TRACE", "--top", "9" * 30], "is not a whole number"),
            (["steps", "TRACE", "--top", "9" * 30], "is not a whole number"),
            (["diagnose", "TRACE", "--window", "5:4"], "ends before it begins"),
            (["diagnose", "TRACE", "--window", "1"], "a window is START:END"),
            (["diagnose", "TRACE", "--steps", "77"], "it has steps 0 to 3"),
            (["diagnose", "TRACE", "--steps", "1", "--window", "1:2"], "not allowed with"),
            (["diagnose", "no-such-file.json"], "there is no file no-such-file.json"),
            (["diagnose", "TRACE", "--json", "no-such-folder/x.json"], "cannot be written: No such file or directory"),
            (["steps", "TRACE", "TRACE"], "one argument too many"),
            (["steps", "TRACE", "--sort", "nope"], "there is no column 'nope'"),
            (["idle", "TRACE", "--group-by", "caus"], "did you mean cause?"),
            (["idle", "TRACE", "--pieces", "--group-by", "cause"], "not allowed with"),
            (["kernels", "TRACE", "--group-by", ","], "name at least one column"),
            (["operators", "TRACE", "--format", "cvs"], "did you mean csv?"),
            (["query", "TRACE", "select * from operator"], "did you mean operators?"),
            (["export", "TRACE"], "required: OUT"),
            (["explain", "inputbound"], "did you mean input-bound?"),
            (["cache", "limit", "much"], "is not a size"),
            (["cache", "cleer"], "did you mean clear?"),
        ],
    )
    def test_are_answered_in_one_sentence(self, arguments: list[str], said: str, run: Stepscope, gpu: Path) -> None:
        assert said in run(*(str(gpu) if word == "TRACE" else word for word in arguments)).mistake()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is empty"),
            (b"hello", "is not a trace"),
            (b'{"schemaVersion": 1, "traceEvents": []}', "without a single event"),
            (b"\x1f\x8b\x08\x00junk", "cannot be unpacked"),
            (b"SQLite format 3\x00" + bytes(100), "is "),
        ],
    )
    def test_what_is_no_trace(self, content: bytes, said: str, run: Stepscope, tmp_path: Path) -> None:
        (tmp_path / "bad.json").write_bytes(content)
        assert said in run("diagnose", tmp_path / "bad.json").mistake()

    def test_a_diagnosis_imports_nothing_slow_that_it_does_not_need(self, gpu: Path) -> None:
        script = (
            "import sys; from stepscope.commands import main; main(sys.argv[1:]); "
            "sys.exit(' '.join({'jinja2', 'scipy', 'torch', 'optuna', 'asyncio', 'http.client'} & sys.modules.keys()))"
        )
        words = [sys.executable, "-c", script, "diagnose", str(gpu)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
        assert done.stderr.strip() == ""
        assert "a step takes" in done.stdout

    def test_in_a_process_too(self) -> None:
        assert "did you mean diagnose?" in run_stepscope("diagnos", "trace.json").mistake()

    @pytest.mark.parametrize("run", [run_here, run_stepscope], ids=["here", "in a process"])
    def test_help_and_version(self, run: Stepscope) -> None:
        for arguments in ([], ["--help"], ["diagnose", "--help"], ["--version"]):
            outcome = run(*arguments)
            assert outcome.code == 0
            assert outcome.out
            assert outcome.err == ""


def _only_small_files() -> None:
    """Let writing fail in the middle of a file, as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


class TestFiles:
    def test_names_of_every_kind(self, run: Stepscope, tmp_path: Path) -> None:
        names = ["with space.json", "träce 跡 🚀.json", "-leading-dash.json", "a\nb.json"]
        for name in names:
            write_events(tmp_path / name, device_steps())
        outcome = run("diagnose", "--json", "-", "--", *names, folder=tmp_path)
        assert outcome.code == 0
        assert sorted(report["trace"]["path"] for report in outcome.json()["ranks"]) == sorted(names)

    @POSIX
    def test_a_name_that_is_no_utf_8(self, run: Stepscope, tmp_path: Path) -> None:
        name = os.fsdecode(b"\xff\xfe.json")
        try:
            write_events(tmp_path / name, device_steps())
        except OSError:
            pytest.skip("this file system takes only UTF-8")
        outputs = {"--json": tmp_path / "j", "--markdown": tmp_path / "m", "--html": tmp_path / "h"}
        options = [word for pair in outputs.items() for word in pair]
        assert run("diagnose", name, *options, folder=tmp_path).code == 0
        assert json.loads(outputs["--json"].read_text())["trace"]["path"] == "\\udcff\\udcfe.json"

    @POSIX
    @pytest.mark.parametrize("command", [["diagnose", "T", "--html", "O"], ["export", "T", "O"]])
    def test_a_target_that_cannot_be_written_keeps_what_it_held(
        self, command: list[str], run: Stepscope, gpu: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "report"
        target.write_text("old")
        run("steps", gpu)  # into the cache: from here on only the report is written
        words = [{"T": str(gpu), "O": str(target)}.get(word, word) for word in command]
        process = subprocess.run(
            [sys.executable, "-m", "stepscope", *words],
            capture_output=True,
            env=environment(PYTHONDONTWRITEBYTECODE="1"),  # a compiled module would be cut off, too
            preexec_fn=_only_small_files,
            check=False,
            timeout=60,
        )
        outcome = Outcome(process.returncode, process.stdout.decode(), process.stderr.decode())
        assert "cannot be written: File too large" in outcome.mistake()
        assert target.read_text() == "old"
        assert list(tmp_path.iterdir()) == [target]

    @POSIX
    def test_a_disk_too_small_for_the_tables_is_one_sentence(self, gpu: Path, tmp_path: Path) -> None:
        process = subprocess.run(
            [sys.executable, "-m", "stepscope", "steps", str(gpu)],
            capture_output=True,
            env=environment(
                STEPSCOPE_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path), PYTHONDONTWRITEBYTECODE="1"
            ),
            preexec_fn=_only_small_files,
            check=False,
            timeout=60,
        )
        outcome = Outcome(process.returncode, process.stdout.decode(), process.stderr.decode())
        assert "cannot hold the trace's tables: File too large" in outcome.mistake()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_without_a_home(self, run: Stepscope, gpu: Path) -> None:
        assert run("diagnose", gpu, HOME="", XDG_CACHE_HOME="", USER="", LOGNAME="", USERPROFILE="").code == 0


@POSIX
class TestStreams:
    def test_a_reader_that_has_seen_enough(self, gpu: Path) -> None:
        """As `stepscope export trace.json - | head -c 10` does."""
        for arguments in (
            ["export", str(gpu), "-"],
            ["operators", str(gpu), "--format", "csv"],
            ["diagnose", str(gpu)],
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "stepscope", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(),
            )
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(60) == 141

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
    def test_a_full_standard_output(self, gpu: Path) -> None:
        for arguments in (["diagnose", str(gpu)], ["export", str(gpu), "-"], ["rules"]):
            with open("/dev/full", "wb") as full:
                process = subprocess.run(
                    [sys.executable, "-m", "stepscope", *arguments],
                    stdout=full,
                    stderr=subprocess.PIPE,
                    env=environment(),
                    check=False,
                    timeout=60,
                )
            assert process.returncode == 2
            assert process.stderr == b"stepscope: standard output cannot be written: No space left on device\n"

    def test_a_closed_standard_output(self, gpu: Path) -> None:
        command = f'"{sys.executable}" -m stepscope diagnose "{gpu}" >&-'
        process = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(), check=False, timeout=60)
        assert (process.returncode, process.stderr) == (0, b"")

    def test_colour_only_on_a_terminal(self, gpu: Path) -> None:
        import pty

        def on_a_terminal(**variables: str) -> bytes:
            ours, theirs = pty.openpty()
            with subprocess.Popen(
                [sys.executable, "-m", "stepscope", "diagnose", str(gpu)],
                stdout=theirs,
                stderr=subprocess.DEVNULL,
                env=environment(**variables),
            ) as process:
                os.close(theirs)
                data = b""
                try:
                    while piece := os.read(ours, 65536):
                        data += piece
                except OSError:  # how Linux says that the other end is closed
                    pass
                os.close(ours)
            assert process.returncode == 0
            return data

        assert b"\x1b[" in on_a_terminal()
        assert b"\x1b[" not in on_a_terminal(NO_COLOR="1")
        assert b"\x1b[" not in on_a_terminal(TERM="dumb")

    def test_an_interrupt_leaves_nothing_behind(self, tmp_path: Path) -> None:
        """Ctrl-C while a trace arrives slowly on standard input."""
        process = subprocess.Popen(
            [sys.executable, "-m", "stepscope", "diagnose", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(TMPDIR=str(tmp_path), STEPSCOPE_CACHE_DIR=str(tmp_path / "cache")),
        )
        assert process.stdin is not None
        process.stdin.write(b'{"schemaVersion": 1, "traceEvents": [\n' + b" " * 100_000)
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.iterdir()), "nothing was begun"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert (out, err) == (b"", b"\n")
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose every name means harm, a lone surrogate among them."""
    events = device_steps(HOSTILE, frame=f"{HOSTILE}.py(3): {HOSTILE}", operator=HOSTILE)
    for name in ("process_name", "thread_name"):
        events.append({"ph": "M", "name": name, "pid": 1, "tid": 1, "args": {"name": HOSTILE}})
    text = json.dumps({"deviceProperties": [{"id": 0, "name": HOSTILE}], "traceEvents": events})
    path = tmp_path_factory.mktemp("hostile") / "hostile.json"
    path.write_text(text.replace("cmd", "cmd\\ud800"))
    return path


class TestHostileTraces:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["diagnose", "T"],
            ["diagnose", "T", "--markdown", "-"],
            ["steps", "T"],
            ["operators", "T"],
            ["kernels", "T"],
            ["roofline", "T"],
            ["roofline", "T", "--tensor-cores"],
            ["energy", "T", "--device-watts", "300", "--cpu-watts", "90", "--region", "FRA", "--json", "-"],
            ["idle", "T", "--pieces"],
            ["query", "T"],
            ["query", "T", "select name, file, function from frames"],
            ["query", "T", "select * from lanes"],
        ],
        ids=" ".join,
    )
    def test_nothing_in_a_name_reaches_the_terminal(self, arguments: list[str], run: Stepscope, hostile: Path) -> None:
        outcome = run(*(str(hostile) if word == "T" else word for word in arguments))
        assert outcome.code == 0
        assert plain(outcome.out)
        assert plain(outcome.err)

    def test_markdown_keeps_its_tables(self, run: Stepscope, hostile: Path) -> None:
        out = run("diagnose", hostile, "--markdown", "-").out
        rows = [line for line in out.splitlines() if line.startswith("| ")]
        assert rows
        for row in rows:
            assert len(re.findall(r"(?<!\\)\|", row)) in (4, 5, 6, 7)
        outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", out)
        assert "<img" not in outside_code
        assert "@everyone" not in outside_code

    def test_html_runs_nothing(self, run: Stepscope, hostile: Path) -> None:
        page = run("diagnose", hostile, "--html", "-").out
        assert "<img" not in page
        assert "</script><" not in page

    def test_machines_get_the_exact_names(self, run: Stepscope, hostile: Path) -> None:
        name = run("operators", hostile, "--format", "json").json()[0]["name"]
        assert name.startswith(HOSTILE[:40])
        assert run("diagnose", hostile, "--json", "-").json()["operators"][0]["name"] == name
        rows = list(csv.reader(io.StringIO(run("operators", hostile, "--format", "csv").out, newline="")))
        assert rows[1][0] == name
        assert any(event["name"] == name for event in run("export", hostile, "-").json()["traceEvents"])

    def test_names_of_a_megabyte(self, run: Stepscope, tmp_path: Path) -> None:
        name = "A" * 1_000_000
        trace = write_events(tmp_path / "t.json", device_steps(name, frame=f"{name}.py(1): {name}", operator=name))
        for command in ("operators", "kernels", "roofline"):
            outcome = run(command, trace)
            assert outcome.code == 0
            assert len(outcome.out) < 10_000
        assert run("diagnose", trace, "--html", tmp_path / "r.html").code == 0

    @pytest.mark.parametrize(
        "event",
        [
            slice_event("cpu_op", "aten::mm", 1, 2),
            slice_event("kernel", "k", 1, 2, pid=0, tid=7, device=0, stream=7),
            slice_event("python_function", "a.py(1): f", 1, 2),
            slice_event("user_annotation", "ProfilerStep#1", 1, 2),
            slice_event("cuda_runtime", "cudaLaunchKernel", 1, 2, correlation=1),
            slice_event("kernel", "k", 0, 0, pid=0, tid=7, device=0, stream=7),
        ],
        ids=["operator", "kernel", "frame", "step", "launch", "nothing long"],
    )
    def test_a_single_event(self, event: dict[str, Any], run: Stepscope, tmp_path: Path) -> None:
        trace = write_events(tmp_path / "t.json", [event])
        for command in ("steps", "idle", "operators", "kernels", "roofline", "query"):
            assert run(command, trace).code == 0
        outcome = run("diagnose", trace, "--json", "-", "--html", tmp_path / "r.html")
        assert outcome.code == 0
        assert_schema(outcome.json())

    @pytest.mark.parametrize(
        "change",
        [
            {"correlation": -5},
            {"correlation": 2**63},
            {"correlation": 10**30},
            {"device": "../../etc/passwd", "stream": "a|b"},
            {"device": 10**30, "stream": -(10**30)},
            {"device": None, "stream": None},
            {"ts": 20},
            {"dur": 0},
            {"dur": -7},
            {"ts": 1e18},
            {"ts": 5},
        ],
        ids=str,
    )
    def test_impossible_numbers(self, change: dict[str, Any], run: Stepscope, tmp_path: Path) -> None:
        events = device_steps()
        for event in events:
            if event["cat"] in ("kernel", "cuda_runtime"):
                event["args"].update({key: value for key, value in change.items() if key in event["args"]})
                event.update({key: value for key, value in change.items() if key in event})
        trace = write_events(tmp_path / "t.json", events)
        outcome = run("diagnose", trace, "--json", "-")
        assert (outcome.code, outcome.err) == (0, "")
        assert_schema(outcome.json())
        assert run("export", trace, "-").json()["traceEvents"]

    def test_two_devices_of_one_name(self, run: Stepscope, tmp_path: Path) -> None:
        more = slice_event("kernel", "k2", 50, 100, pid=1, tid=7, device=1, stream=7, correlation=77)
        names = [{"id": device, "name": "NVIDIA A"} for device in (0, 1)]
        trace = write_events(tmp_path / "t.json", [*device_steps(), more], deviceProperties=names)
        report = run("diagnose", trace, "--json", "-").json()
        assert_schema(report)
        assert [(device["device"], device["name"]) for device in report["devices"]] == [
            ("0", "NVIDIA A"),
            ("1", "NVIDIA A"),
        ]


class TestSize:
    """Shapes on which a careless algorithm takes minutes; each must take seconds."""

    @pytest.mark.parametrize("shape", ["ten thousand lanes", "deep frames", "deep operators", "partial overlaps"])
    def test_does_not_hang(self, shape: str, tmp_path: Path) -> None:
        trace = write_events(tmp_path / "t.json", SHAPES[shape]())
        begun = os.times()
        outcome = run_stepscope("diagnose", trace, "--json", "-", "--no-cache")
        ended = os.times()
        assert outcome.code == 0
        assert_schema(outcome.json())
        assert ended.children_user - begun.children_user < 60  # what other processes take does not count


def _lanes() -> list[dict[str, Any]]:
    return [
        event
        for lane in range(10_000)
        for event in (
            slice_event("cpu_op", "aten::mm", lane, 50, tid=lane),
            slice_event("cuda_runtime", "cudaLaunchKernel", lane + 1, 2, tid=lane, correlation=lane),
            slice_event("kernel", "k", lane + 20, 30, pid=0, tid=lane, device=0, stream=lane, correlation=lane),
        )
    ]


def _deep(category: str, depth: int = 40_000) -> list[dict[str, Any]]:
    """Slices in slices, then as many small ones in the innermost, and one kernel."""
    names = "f.py({}): f" if category == "python_function" else "aten::op{}"
    middle = depth * 0.001
    nested = [
        slice_event(category, names.format(level % 100), level * 0.001, (2 * depth - level) * 0.001 + 1)
        for level in range(depth)
    ]
    small = [slice_event("cpu_op", "aten::mm", middle + number * 0.0005, 0.0004) for number in range(depth)]
    return [*nested, *small, *_one_kernel(middle + 50)]


def _overlapping(count: int = 40_000) -> list[dict[str, Any]]:
    lengths = random.Random(1)
    slices = [slice_event("cpu_op", f"aten::op{at % 50}", at, lengths.randint(1, 100_000)) for at in range(count)]
    return [*slices, *_one_kernel(1000), *_one_kernel(count / 2, 2)]


def _one_kernel(at: float, correlation: int = 1) -> list[dict[str, Any]]:
    return [
        slice_event("cuda_runtime", "cudaLaunchKernel", at, 0.5, correlation=correlation),
        slice_event("kernel", "k", at + 10, 10, pid=0, tid=7, device=0, stream=7, correlation=correlation),
    ]


SHAPES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "ten thousand lanes": _lanes,
    "deep frames": lambda: _deep("python_function"),
    "deep operators": lambda: _deep("cpu_op"),
    "partial overlaps": _overlapping,
}
