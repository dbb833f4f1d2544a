import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import polars as pl
import pytest

import stepscope.diagnosis
import stepscope.diagnosis.ranks
import stepscope.diagnosis.rules
from stepscope.commands import COMMANDS, main
from stepscope.commands.machine import parsed_size
from stepscope.commands.read.diagnose import parsed_share
from stepscope.commands.read.documents import Room
from stepscope.commands.read.tables import parsed_setting
from stepscope.commands.shared import output
from stepscope.commands.shared.options import Command
from stepscope.diagnosis.rule import Answers, Limits, Rule, Threshold
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.report.document import json_bytes
from stepscope.trace import Metadata, Trace
from stepscope.trace.naming import UserCode
from tests.unit.hand_built import FULL, empty, full
from tests.unit.rendered import documents_in, json_report


class DocumentedRule(Rule):
    page = "The device waits for data.\n\nWhat to do\n    Use workers."


def finds_nothing(view: View, limits: Limits) -> Answers:
    yield from ()


RULES = [
    DocumentedRule(
        "input-bound",
        "Data loading",
        {"minimum_share": Threshold(0.05, "share", "idle time that counts")},
        finds_nothing,
    ),
    DocumentedRule("launch-bound", "Launches", {}, finds_nothing),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepscope.diagnosis.rules, "RULES", RULES)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    frame = pl.DataFrame(
        {
            "start_ns": [0, 5, 9],
            "duration_ns": [5, 1, 2],
            "name": ["aten::mm", "aten::add", "aten::mm"],
            "lane": [0, 0, 0],
        }
    )
    lanes = pl.DataFrame({"lane": [0], "kind": ["host_thread"], "process_name": ["python /home/alice/x.py"]})
    Trace.from_tables({"operators": frame, "lanes": lanes}, Metadata(format="kineto")).save(tmp_path / "trace")
    return str(tmp_path / "trace")


def module_with(**content: Any) -> ModuleType:
    module = ModuleType("fake")
    module.__dict__.update(content)
    return module


def tables(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., pl.DataFrame]) -> None:
    monkeypatch.setitem(sys.modules, f"stepscope.analysis.{name}", module_with(**functions))


def diagnose_as(monkeypatch: pytest.MonkeyPatch, *diagnoses: Any) -> list[dict[str, Any]]:
    """Let the diagnoses be these, one after the other; returns what they were asked with."""
    calls: list[dict[str, Any]] = []

    def diagnose_view(view: View, **arguments: Any) -> Any:
        arguments.pop("progress")
        calls.append({**arguments, "settings": view.settings, "user_code": view.user_code})
        return diagnoses[len(calls) - 1]

    monkeypatch.setattr(stepscope.diagnosis, "diagnose_view", diagnose_view, raising=False)
    return calls


class TestFrame:
    def test_help_lists_every_command_and_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        help_text = capsys.readouterr().out
        listed = [line.split()[0] for line in help_text.splitlines() if re.match(r"  [a-z][\w-]+ +[A-Z]", line)]
        assert listed == [command.name for command in COMMANDS]
        assert "stepscope diagnose trace.json" in help_text
        assert "stepscope run train.py" in help_text

    def test_alone_it_prints_a_screen_with_what_matters(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 24
        words = " ".join(lines)
        for wanted in ("run", "diagnose", "compare", "tune", "predict", "doctor", "--help"):
            assert f"{wanted} " in words

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_every_command_has_help_with_examples(self, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command.name, "--help"]) == 0
        assert f"  stepscope {command.name}" in capsys.readouterr().out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"stepscope {stepscope.__version__}\n"

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["diagnos", "x"], "'diagnos' is not a command; did you mean diagnose?"),
            (["zzz"], "'zzz' is not a command; the commands are "),
            (
                ["diagnose", "x", "--jsn", "y"],
                "there is no option --jsn; did you mean --json? (see stepscope diagnose --help)",
            ),
            (["--verison"], "there is no option --verison; did you mean --version?"),
            (["cache", "list", "1", "2"], "'2' is one argument too many"),
            (["cache", "lst"], "did you mean list?"),
            (["export"], "the following arguments are required: TRACE"),
            (["kernels", "x", "--format", "jsn"], "did you mean json?"),
            (["kernels", "x", "--top", "many"], "'many' is not a whole number"),
            (["diagnose", "x", "--fail-on", "10"], "'10' is not a share of a step: write 10% or 0.1"),
            (["diagnose", "x", "--window", "1:2", "--steps", "1"], "not allowed with argument"),
            (["diagnose", "x", "--rule", "input-bond"], "there is no rule 'input-bond'; did you mean input-bound?"),
            (["diagnose", "x", "--json", "-", "--html", "-"], "only one report can go to standard output"),
            (["explain", "nothing"], "there is no rule 'nothing' (stepscope rules lists them)"),
        ],
    )
    def test_a_mistake_is_one_sentence_and_exit_2(
        self, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("stepscope: ")
        assert message in err

    def test_a_trace_without_a_command_gets_the_command(self, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([trace]) == 2
        assert capsys.readouterr().err.endswith(f"is not a command; to explain a trace: stepscope diagnose {trace}\n")

    def test_a_bad_file_is_one_sentence_without_its_control_characters(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bad = tmp_path / "a\x1b[31m.json"
        bad.write_text("no trace")
        assert main(["query", str(bad)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "a\\x1b[31m.json" in err

    def test_interrupting_is_quiet(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def interrupt(*arguments: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr("stepscope.commands.machine._list", interrupt)
        assert main(["cache"]) == 130
        assert capsys.readouterr().err == "\n"

    def test_a_closed_pipe_is_quiet(self) -> None:
        program = "import sys; from stepscope.commands import main; sys.exit(main(['cache', 'limit']))"
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait() == 141

    def test_nothing_heavy_is_imported_before_a_command_runs(self) -> None:
        program = (
            "import sys; from stepscope.commands import main; main(['diagnose', '--help']); main(['nonsense'])\n"
            "sys.exit(len({'polars', 'numpy', 'rich', 'msgspec', 'jinja2', 'torch'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (0, 1)


class TestDiagnose:
    def test_the_text_report_goes_to_the_terminal(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        calls = diagnose_as(monkeypatch, full())
        assert main(["diagnose", trace]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("Rank 3, device 0 (NVIDIA H100): a step takes 100.0 ms")
        assert "\x1b" not in out
        assert err == ""
        assert calls == [{"rules": None, "settings": {}, "top": 20, "minimum_share": 0.01, "user_code": UserCode()}]

    def test_options_reach_the_diagnosis(self, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = diagnose_as(monkeypatch, full(), full())
        argv = ["diagnose", trace, "--rule", "input-bound", "--set", "input-bound.minimum_share=7%", "--top", "0"]
        argv += ["--user-code", "megatron", "--not-user-code", "src/utils"]
        assert main([*argv, "--all"]) == 0
        assert main([*argv, "--fail-on", "0.5%"]) == 1
        expected = {"rules": ["input-bound"], "settings": {"input-bound.minimum_share": 0.07}, "top": 0}
        expected["user_code"] = UserCode(("megatron",), ("src/utils",))
        assert calls == [{**expected, "minimum_share": 0.0}, {**expected, "minimum_share": 0.005}]

    def test_reports_go_to_files_and_the_text_still_to_the_terminal(
        self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diagnose_as(monkeypatch, full())
        report, markdown = tmp_path / "report.json", tmp_path / "report.md"
        assert main(["diagnose", trace, "--json", str(report), "--markdown", str(markdown)]) == 0
        assert json.loads(report.read_bytes())["findings"][0]["rule"] == "input-bound"
        assert markdown.read_text(encoding="utf-8").startswith("**Rank 3")
        assert capsys.readouterr().out.startswith("Rank 3")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md", "trace"]

    def test_a_report_to_standard_output_stands_there_alone(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diagnose_as(monkeypatch, full())
        assert main(["diagnose", trace, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == 1

    def test_html_names_what_did_not_fit(self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, part = (tmp_path / f"{name}.html" for name in ("whole", "part"))
        assert main(["diagnose", trace, "--html", str(whole)]) == 0
        everything = documents_in(whole.read_text())
        least = 3 * len(json.dumps(everything["steps"]))
        monkeypatch.setattr("stepscope.commands.read.documents.Room", lambda: Room(least))
        assert main(["diagnose", trace, "--html", str(part)]) == 0
        found = documents_in(part.read_text())

        gone = [name for name in everything if name not in found and "?" not in name]
        assert "steps" in found
        assert "timeline" in gone
        said = found["session"]["left_out"]
        assert len(said) >= len(gone)
        path = everything["diagnosis"]["trace"]["path"]
        assert [sentence for sentence in said if f"stepscope view {shlex.quote(path)}" in sentence]

    def test_html_holds_the_documents_of_the_trace(
        self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        diagnose_as(monkeypatch, full())
        assert main(["diagnose", trace, "--html", str(tmp_path / "report.html")]) == 0
        found = documents_in((tmp_path / "report.html").read_text())
        assert found["diagnosis"] == json.loads(json_bytes(json_report(full())))
        assert {"session", "timeline", "operators", "lines", "links"} <= found.keys()
        assert set(found["session"]["documents"]) == {name.partition("?")[0] for name in found} - {"session"}

    def test_ranks_are_sorted_and_a_folder_stands_for_its_traces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]
        for name in ("b.json", "a.json"):
            (tmp_path / name).write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        (tmp_path / "notes.txt").write_text("not looked at")
        (tmp_path / "settings.json").write_text('{"no": "trace"}')
        diagnose_as(monkeypatch, full(metadata=Metadata(rank=1)), full(metadata=Metadata(rank=0)))
        assert main(["diagnose", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("2 ranks\n")
        assert err == ""
        assert "settings.json is not a trace: no list of trace events was found in it." in " ".join(out.split())
        assert re.findall(r"^  ([01]) +cut off +120\.3 ms", out, flags=re.MULTILINE) == ["0", "1"]

    def test_a_folder_without_a_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "settings.json").write_text('{"no": "trace"}')
        assert main(["diagnose", str(tmp_path)]) == 2
        assert capsys.readouterr().err == (
            f"stepscope: the only file in {tmp_path} cannot be read: "
            f"{tmp_path / 'settings.json'} is not a trace: no list of trace events was found in it\n"
        )

    def test_fail_on_is_exit_1_with_the_reason(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diagnose_as(monkeypatch, full(), full(), empty(), full(findings=FULL["findings"][1:]))
        assert main(["diagnose", trace, "--fail-on", "33%"]) == 1
        assert capsys.readouterr().err == "stepscope: input-bound would save 33.2 %, --fail-on 33.0 %\n"
        assert main(["diagnose", trace, "--fail-on", "34%"]) == 0
        assert main(["diagnose", trace, "--fail-on", "0"]) == 0
        assert main(["diagnose", trace, "--fail-on", "0"]) == 0  # a note saves nothing

    def test_what_the_ranks_tell_together_is_judged_too(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diagnose_as(monkeypatch, empty())
        late = FULL["findings"][0]
        monkeypatch.setattr(stepscope.diagnosis.ranks, "across_ranks", lambda records: (late,))
        assert main(["diagnose", trace, "--fail-on", "33%"]) == 1
        assert capsys.readouterr().err == "stepscope: input-bound would save 33.2 %, --fail-on 33.0 %\n"

    def test_redact_reaches_every_report(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diagnose_as(monkeypatch, full(), full(), full())
        for options in ([], ["--json", "-"], ["--markdown", "-"]):
            assert main(["diagnose", trace, "--redact", *options]) == 0
            out = capsys.readouterr().out
            assert "train.py" in out
            assert not re.search("jane|node7|/home", out)

    def test_the_trace_is_kept_unless_told_otherwise(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from stepscope.trace.cache import TraceCache

        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]
        (tmp_path / "a.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        assert main(["query", str(tmp_path / "a.json"), "select * from operators", "--no-cache"]) == 0
        assert TraceCache().entries() == []
        assert main(["query", str(tmp_path / "a.json"), "select * from operators"]) == 0
        assert len(TraceCache().entries()) == 1

    @pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.25", 0.25), (" 5 % ", 0.05), ("1", 1.0), ("0", 0.0)])
    def test_a_share(self, text: str, value: float) -> None:
        assert parsed_share(text) == pytest.approx(value)

    @pytest.mark.parametrize("text", ["10", "-1%", "101%", "ten", "", "nan", "1e3"])
    def test_what_is_no_share(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError):
            parsed_share(text)

    @pytest.mark.parametrize(
        ("text", "value"), [("5%", 0.05), ("0.5", 0.5), ("2ms", 2e6), ("3 MiB", 3 * 2**20), ("-1", -1.0)]
    )
    def test_a_setting(self, text: str, value: float) -> None:
        assert parsed_setting(f"input-bound.minimum_share={text}") == (
            "input-bound.minimum_share",
            pytest.approx(value),
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("minimum_share=1", "write RULE.THRESHOLD=VALUE"),
            ("input-bound.minimum_share=lots", "write RULE.THRESHOLD=VALUE"),
            ("input-bound.minimum_share=1 mile", "write RULE.THRESHOLD=VALUE"),
            ("input-bound.minimum_shar=1", "has no threshold 'minimum_shar'; did you mean minimum_share?"),
            ("launch-bound.x=1", "the rule launch-bound has no threshold 'x'; it has none"),
            ("inpt-bound.minimum_share=1", "there is no rule 'inpt-bound'; did you mean input-bound?"),
        ],
    )
    def test_what_is_no_setting(self, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            parsed_setting(text)


class TestTables:
    FRAME = pl.DataFrame({"name": ["a", "b", "c"], "calls": [2, 30, 1], "self_ns": [3_000, 2_000, None]})

    def run(self, monkeypatch: pytest.MonkeyPatch, trace: str, *options: str) -> int:
        tables(monkeypatch, "operators", operator_table=lambda trace, group_by, user_code: self.FRAME)
        return main(["operators", trace, *options])

    def test_a_table(self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(monkeypatch, trace) == 0
        assert capsys.readouterr().out == "name  calls    self\na         2  3.0 us\nb        30  2.0 us\nc         1\n"

    def test_an_empty_table_is_said_to_be_empty(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tables(monkeypatch, "operators", kernel_table=lambda trace, group_by: self.FRAME.clear())
        assert main(["kernels", trace]) == 0
        assert capsys.readouterr().out == "There are no kernels in this trace.\n"
        assert main(["kernels", trace, "--format", "csv"]) == 0
        assert capsys.readouterr().out == "name,calls,self_ns\n"

    def test_what_was_cut_is_said(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, trace, "--top", "1", "--sort", "calls") == 0
        assert capsys.readouterr().out == (
            "name  calls    self\nb        30  2.0 us\nshowing 1 of 3 operators, --top 0 for all\n"
        )

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            (["--sort", "self_ns"], ["a", "b", "c"]),
            (["--sort", "self_ns", "--ascending"], ["b", "a", "c"]),
            (["--sort", "calls"], ["b", "a", "c"]),
            (["--sort", "name"], ["a", "b", "c"]),
        ],
    )
    def test_sorting_puts_what_is_unknown_last(
        self,
        options: list[str],
        names: list[str],
        trace: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert self.run(monkeypatch, trace, *options, "--format", "json") == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)] == names

    def test_an_unknown_column(
        self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, trace, "--sort", "cals") == 2
        assert (
            "there is no column 'cals'; did you mean calls?; the columns are name, calls, self_ns"
            in capsys.readouterr().err
        )

    def test_every_format_to_a_file(self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("o.csv", "o.json", "o.parquet", "o.txt"):
            assert self.run(monkeypatch, trace, "--output", str(tmp_path / name)) == 0
        assert (tmp_path / "o.csv").read_text() == "name,calls,self_ns\na,2,3000\nb,30,2000\nc,1,\n"
        assert json.loads((tmp_path / "o.json").read_bytes()) == self.FRAME.to_dicts()
        assert pl.read_parquet(tmp_path / "o.parquet").equals(self.FRAME)
        assert (tmp_path / "o.txt").read_text().startswith("name  calls")

    def test_grouping_reaches_the_analysis(self, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []

        def table(trace: Trace, group_by: tuple[str, ...], user_code: UserCode | None = None) -> pl.DataFrame:
            seen.append(group_by)
            return self.FRAME

        tables(monkeypatch, "operators", operator_table=table, kernel_table=table)
        assert main(["operators", trace, "--group-by", "name, input_shapes"]) == 0
        assert main(["kernels", trace]) == 0
        assert seen == [("name", "input_shapes"), ("name",)]

    def test_steps(self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        steps = {"index": [3], "start_ns": [2_000_000], "duration_ns": [5_000_000]}
        tables(monkeypatch, "steps", step_table=lambda trace: pl.DataFrame(steps))
        assert main(["steps", trace]) == 0
        assert capsys.readouterr().out == "index     start  duration\n    3  2.000 ms    5.0 ms\n"

    def test_idle(self, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        pieces = pl.DataFrame(
            {
                "device": ["0", "0", "0"],
                "cause": ["input", "input", "python"],
                "trigger": [None, None, "sync"],
                "duration_ns": [1, 2, 1],
            }
        )
        tables(monkeypatch, "idle", idle_time=lambda trace: pieces)
        assert main(["idle", trace, "--format", "csv"]) == 0
        assert capsys.readouterr().out == (
            "device,cause,trigger,count,ns,idle_share\n0,input,,2,3,0.75\n0,python,sync,1,1,0.25\n"
        )
        assert main(["idle", trace, "--pieces", "--format", "csv", "--top", "1"]) == 0
        assert capsys.readouterr().out == "device,cause,trigger,duration_ns\n0,input,,1\n"
        assert main(["idle", trace, "--group-by", "caus", "--format", "csv"]) == 2
        assert "there is no column 'caus'; did you mean cause?" in capsys.readouterr().err


class TestExport:
    def test_the_timeline_is_written_piece_by_piece(
        self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = module_with(timeline=lambda trace, idle, path: iter([b"{", b"}"]))
        monkeypatch.setitem(sys.modules, "stepscope.report.exports.chrome", module)
        assert main(["export", trace, str(tmp_path / "out.json")]) == 0
        assert (tmp_path / "out.json").read_bytes() == b"{}"
        assert main(["export", trace, "-"]) == 0
        assert capsys.readouterr().out == "{}"

    def test_a_timeline_that_cannot_be_finished_leaves_no_file(
        self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def timeline(trace: Trace, idle: object, path: pl.DataFrame) -> Any:
            yield b"{"
            raise UsageError("no more")

        monkeypatch.setitem(sys.modules, "stepscope.report.exports.chrome", module_with(timeline=timeline))
        assert main(["export", trace, str(tmp_path / "out.json")]) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["trace"]


class TestQuery:
    def test_without_a_query_the_tables_are_listed(self, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["query", trace]) == 0
        assert "\noperators: 3 rows\n    row, start_ns, duration_ns, name, lane, parent" in capsys.readouterr().out
        assert main(["query", trace, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)[1]["rows"] == 3

    def test_the_query_may_stand_behind_the_options(self, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["query", trace, "--format", "csv", "--no-cache", "select count(*) as n from operators"]) == 0
        assert capsys.readouterr().out == "n\n3\n"
        assert main(["query", trace, "--format", "csv", "select 1 as n from operators", "another"]) == 2
        assert "'another' is one argument too many" in capsys.readouterr().err

    def test_a_query(self, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
        sql = "select name, count(*) as calls, max(row) as last from operators group by name order by calls desc"
        assert main(["query", trace, sql, "--format", "csv"]) == 0
        assert capsys.readouterr().out == "name,calls,last\naten::mm,2,2\naten::add,1,1\n"

    @pytest.mark.parametrize(
        "sql",
        [
            "select * from read_csv('{secret}')",
            "SELECT * FROM Read_CSV ('{secret}')",
            "select * from \"read_csv\"('{secret}')",
            "select * from read_csv/**/('{secret}')",
            "select * from read_csv /* a */ /* ( */ ('{secret}')",
            "select * from read_csv -- a\n('{secret}')",
            "with q as (select * from read_csv('{secret}')) select * from q",
            "select name from operators where name in (select a from read_csv('{secret}'))",
            "select * from operators o join read_csv('{secret}') r on o.name = r.a",
            "-- it's\nselect * from read_csv('{secret}')",
            "select $$'$$ as x from read_csv('{secret}')",
            "select * from '{secret}'",
            "select * from read_csv/* /* */ */('{secret}')",
            "explain select * from read_csv('{secret}')",
            "create table t as select * from operators",
            "drop table operators",
            "delete from operators",
            "select 1; select 2",
            "copy operators to '{secret}.out'",
        ],
    )
    def test_nothing_but_the_trace_can_be_reached(
        self, sql: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        secret = tmp_path / "secret.csv"
        secret.write_text("a,b\nhidden,value\n")
        assert main(["query", trace, sql.format(secret=secret)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert "hidden" not in err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.csv", "trace"]

    def test_a_plan_that_reads_other_files_is_refused_whatever_its_text(
        self, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("a.csv", "b.parquet"):
            frame = pl.DataFrame({"a": [1]})
            frame.write_csv(tmp_path / name) if name == "a.csv" else frame.write_parquet(tmp_path / name)
            monkeypatch.setattr("stepscope.commands.read.export._refuse_more_than_reading", lambda sql: None)
            assert main(["query", trace, f"select * from read_{name[2:]}('{tmp_path / name}')"]) == 2
            assert "the query reads other files" in capsys.readouterr().err

    def test_the_names_of_functions_may_be_searched_for(self, trace: str) -> None:
        assert main(["query", trace, "select * from operators where name = 'read_csv' or (row = 1)"]) == 0

    @pytest.mark.parametrize(
        ("sql", "message"),
        [
            ("select * from operator", "there is no table 'operator'; did you mean operators?"),
            ("select nam from operators", "there is no column 'nam'; did you mean name?"),
            (
                "select name from operators where step = 3",
                "'step' is not a column of the tables in the query, but of annotations",
            ),
            ("select from", "the query cannot be answered: "),
            ("select * from operators where", "the query cannot be answered: "),
            ("select name + 1 from operators", "the query cannot be answered: "),
            ("", "a query must begin with select"),
        ],
    )
    def test_a_wrong_query_is_one_sentence(
        self, sql: str, message: str, trace: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["query", trace, sql]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize("options", [["--format", "json"], ["--format", "json", "--output", "FILE"]])
    def test_json_turns_no_text_around(
        self, options: list[str], trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = [str(tmp_path / "rows.json") if option == "FILE" else option for option in options]
        assert main(["query", trace, "select 'a\u202eb' as name from operators limit 1", *options]) == 0
        out = capsys.readouterr().out or (tmp_path / "rows.json").read_text(encoding="utf-8")
        assert out == '[\n{"name":"a\\u202eb"}\n]\n'

    def test_redact(self, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["query", trace, "select process_name, kind from lanes", "--redact", "--format", "csv"]) == 0
        assert capsys.readouterr().out == "process_name,kind\n[redacted],host_thread\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lines", "TRACE", ""], "the name of the source file is empty"),
        (["lines", "TRACE", "", "--all"], "the name of the source file is empty"),
        (["lines", "TRACE", "--source-root", ""], "--source-root and --all need a FILE"),
        (["steps", "TRACE", "--window", ""], "a window is START:END, such as 2s:4s or 150ms:, not ''"),
        (["steps", "TRACE", "--steps", ""], "steps are FIRST:LAST, such as 3:5, or one number, not ''"),
        (["steps", "TRACE", "--sort", ""], "there is no column ''; the columns are "),
        (["diagnose", "TRACE", "--json", ""], "the name of the output file is empty"),
    ],
)
def test_what_an_empty_variable_leaves_is_not_taken_for_nothing(
    words: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([trace if word == "TRACE" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


class TestRulesAndCache:
    def test_rules(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["rules"]) == 0
        assert capsys.readouterr().out == "rule          title\ninput-bound   Data loading\nlaunch-bound  Launches\n"

    def test_explain(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "input-bound"]) == 0
        assert capsys.readouterr().out == (
            "# Data loading\n\nRule `input-bound`\n\nThe device waits for data.\n\nWhat to do\n    Use workers.\n\n"
            "## Thresholds\n\n| threshold | default | meaning |\n|---|---|---|\n"
            "| `input-bound.minimum_share` | 0.05 (a share: 5%) | idle time that counts |\n\n"
            "Set one when diagnosing:\n\n    stepscope diagnose TRACE --set input-bound.minimum_share=0.05\n"
        )

    def test_the_cache_is_listed_limited_and_cleared(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from stepscope.trace.cache import default_root

        def said(*argv: str) -> str:
            assert main(["cache", *argv]) == 0
            return capsys.readouterr().out

        assert said() == f"{default_root()}: 0 B of at most 10.00 GiB\n"
        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]
        (tmp_path / "a.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        assert main(["query", str(tmp_path / "a.json"), "select 1 as x from operators"]) == 0
        capsys.readouterr()
        assert re.search(r"size|bytes +last used +format +trace\n.* kineto +.*a\.json\n$", said("list"))
        assert said("limit", "2GiB") == said("limit") == "The cache keeps at most 2.00 GiB.\n"
        assert re.fullmatch(r"Removed 1 trace, \d.*B, and \d kept answers?\.\n", said("clear"))
        assert said("clear") == "Removed 0 traces, 0 B, and 0 kept answers.\n"
        assert main(["cache", "clear", "2GiB"]) == 2

    @pytest.mark.parametrize(
        ("text", "amount"), [("0", 0), ("2GiB", 2**31), ("1.5 gb", 1_500_000_000), ("10MB", 10**7)]
    )
    def test_a_size(self, text: str, amount: int) -> None:
        assert parsed_size(text) == amount

    @pytest.mark.parametrize("text", ["", "much", "-1", "2 GiBs", "1e9"])
    def test_what_is_no_size(self, text: str) -> None:
        with pytest.raises(UsageError, match="is not a size"):
            parsed_size(text)


class TestOutput:
    def test_a_file_is_replaced_whole_and_keeps_its_permissions(self, tmp_path: Path) -> None:
        place, link = tmp_path / "report.json", tmp_path / "link"
        place.write_bytes(b"old")
        place.chmod(0o640)
        link.symlink_to(place)
        output.write_atomically(link, [b"n", b"ew"])
        assert link.is_symlink()
        assert place.read_bytes() == b"new"
        assert place.stat().st_mode & 0o777 == 0o640
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "report.json"]

    def test_a_failure_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = tmp_path / "report.json"
        place.write_bytes(b"old")

        def fail(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(UsageError, match=r"report\.json cannot be written: No space left on device"):
            output.write_atomically(place, [b"new"])
        assert place.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [place]

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file or directory"):
            output.write_atomically(tmp_path / "none" / "report.json", [])

    def test_a_device_is_written_to(self) -> None:
        output.write_atomically(Path(os.devnull), [b"data"])
        assert not Path(os.devnull).is_file()

    def test_a_terminal_without_the_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        output.print_text("██… ü\n")
        sys.stdout.flush()
        assert raw.getvalue() == b"##~ \\xfc\n"

    def test_colour_only_on_a_terminal_and_never_with_no_color(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        assert not output.colour()
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
        assert output.colour()
        monkeypatch.setenv("NO_COLOR", "1")
        assert not output.colour()

    def test_width(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert output.width() == 120
        monkeypatch.setenv("COLUMNS", "70")
        assert output.width() == 70
        monkeypatch.setenv("COLUMNS", "3")
        assert output.width() == 20
