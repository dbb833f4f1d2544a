"""What files beside the trace add to a diagnosis: figures, places and notes, and never a saving that no time shows."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.rules.cpu_fallback import RULE as cpu_fallback
from stepscope.diagnosis.rules.host_synchronisation import RULE as host_synchronisation
from stepscope.diagnosis.rules.recompilation import RULE as recompilation
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.trace import Metadata, Trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.metadata import CodePlace, Fallback, RunCounts, Tally, Trigger
from tests.simulator import programs
from tests.simulator.kineto import kineto_bytes
from tests.unit.recording import Recording

SECOND = 1_000_000_000
STACK = (
    CodePlace("sync", "/opt/lib/python3.11/site-packages/torch_xla/torch_xla.py", 87),
    CodePlace("train", "train.py", 48),
)


def traced(evidence: RunCounts, compiling_ns: int = 0) -> Trace:
    """Two steps of 1000 ns on a device that is busy but for what compiling takes."""
    recording = Recording(metadata=Metadata(evidence=evidence))
    for step in (0, 1):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.operator(begin, 999, "aten::mm")
        if compiling_ns:
            recording.operator(begin + 5, compiling_ns, "compileGraph")
        recording.launched(begin + compiling_ns + 6, begin + compiling_ns + 10, 985 - compiling_ns, "gemm", step)
    return recording.trace()


def findings_of(rule: Rule, trace: Trace) -> tuple[Finding, ...]:
    return rule.ask(View(trace)).findings


def figures_of(finding: Finding) -> list[tuple[str, float]]:
    return [(figure.name, figure.value) for figure in finding.evidence.figures]


COMPILING = RunCounts(
    steps=20,
    compilations=Tally(30, 90 * SECOND, 4 * SECOND),
    compile_triggers=(Trigger("user mark_step", STACK, 3), Trigger("dynamo", (STACK[0],), 1)),
)


@pytest.mark.parametrize("rule", [recompilation, cpu_fallback, host_synchronisation])
def test_without_evidence_nothing_is_said(rule: Rule) -> None:
    result = rule.ask(View(traced(RunCounts())))

    assert (result.findings, result.not_answered) == ((), ())


def test_compilations_that_the_trace_does_not_show_are_a_note() -> None:
    [note] = findings_of(recompilation, traced(COMPILING))

    assert note.title == "Graphs were compiled 30 times in 20 steps of the whole run"
    assert (note.severity, note.saving_ns_per_step) == ("note", 0)
    assert [(place.file, place.line, place.share, place.exact_line) for place in note.where] == [
        ("train.py", 48, 0.75, True)
    ]
    assert figures_of(note) == [
        ("compilations of graphs in the whole run", 30),
        ("time of all compilations of graphs", 90 * SECOND),
        ("longest of the compilations of graphs", 4 * SECOND),
        ("steps in the whole run", 20),
        ("steps to warm up", 10),
    ]


def test_what_the_trace_shows_gets_the_counts_and_the_line() -> None:
    [finding] = findings_of(recompilation, traced(COMPILING, compiling_ns=400))

    assert finding.title == "40% of the time goes to compiling code: 2 compilations in 2 of 2 steps"
    assert finding.saving_ns_per_step > 0
    assert figures_of(finding)[-3:] == figures_of(findings_of(recompilation, traced(COMPILING))[0])[:3]
    assert [(place.file, place.line) for place in finding.where] == [("train.py", 48)]


def test_compilations_after_the_first_steps_alone() -> None:
    gaudi = RunCounts(steps=30, compilations=Tally(40), late_compilations=15)

    [note] = findings_of(recompilation, traced(gaudi))

    assert note.title == "Graphs were compiled 40 times in 30 steps of the whole run, 15 of them after the first 10"


def test_long_compilations_and_executions_are_notes() -> None:
    evidence = RunCounts(compilations=Tally(1, None, 301 * SECOND), executions=Tally(9, None, 31 * SECOND))

    titles = [note.title for note in findings_of(recompilation, traced(evidence))]

    assert titles == ["One graph took very long to compile", "One graph took very long to run"]
    assert findings_of(recompilation, traced(RunCounts(executions=Tally(9, None, 30 * SECOND)))) == ()


def test_counts_without_steps_are_a_question() -> None:
    [question] = recompilation.ask(View(traced(RunCounts(compilations=Tally(57, 41 * SECOND))))).not_answered

    assert question.question == "Are graphs still compiled once training runs steadily?"
    assert "57 compilations" in question.why


def fallen() -> Trace:
    """Of two aten::digamma one copies to the host and back, and one stays on the device."""
    evidence = RunCounts(fallbacks=(Fallback("aten::digamma", 12), Fallback("aten::median", 1)))
    recording = Recording(metadata=Metadata(evidence=evidence))
    recording.step(0, 1000, 1)
    recording.launched(0, 5, 95, "gemm", 1)
    recording.operator(20, 10, "aten::digamma")
    recording.launched(22, 100, 100, "digamma", 2)
    recording.operator(50, 460, "aten::digamma.out")
    recording.launched(60, 200, 10, "Memcpy DtoH", 3, kind="copy_out")
    recording.launched(500, 510, 10, "Memcpy HtoD", 4, kind="copy_in")
    recording.launched(515, 520, 480, "gemm", 5)
    return recording.trace()


def test_a_fallback_that_the_trace_shows_is_weighed_by_its_times() -> None:
    [finding] = findings_of(cpu_fallback, fallen())

    # 300 ns idle before the copy back and both copies of 10 ns; the other aten::digamma is none of it.
    assert finding.title == "aten::digamma.out: operators fall back to the CPU"
    assert figures_of(finding)[0] == ("share of the step lost around operators on the CPU", 0.32)
    assert figures_of(finding)[-2:] == [
        ("times aten::digamma ran on the CPU in the whole run", 12),
        ("times aten::median ran on the CPU in the whole run", 1),
    ]


@pytest.mark.parametrize(
    ("fallbacks", "title"),
    [
        (
            (Fallback("aten::digamma", 12, "self=HPU"),),
            "aten::digamma runs on the CPU 12 times in the whole run: the device cannot run it (with self=HPU)",
        ),
        (
            (Fallback("aten::a"), Fallback("aten::b"), Fallback("aten::c"), Fallback("aten::d"), Fallback("aten::e")),
            "aten::a, aten::b, aten::c and 2 others run on the CPU: the device cannot run them",
        ),
    ],
)
def test_fallbacks_that_only_a_file_tells_are_a_note(fallbacks: tuple[Fallback, ...], title: str) -> None:
    [note] = findings_of(cpu_fallback, traced(RunCounts(fallbacks=fallbacks)))

    assert (note.title, note.severity, note.saving_ns_per_step) == (title, "note", 0)


ACCESS = Trigger("most likely user code trying to access tensor value before mark_step", STACK, 14)


@pytest.mark.parametrize(
    ("evidence", "title"),
    [
        (
            RunCounts(steps=14, transfers_out=Tally(14, 15), scalar_reads=9, execute_triggers=(ACCESS,)),
            "Values are read from the device 14 times in 14 steps of the run, 9 of them single values",
        ),
        (RunCounts(execute_triggers=(ACCESS,)), "Reading values ends graphs early: 14 times in the whole run"),
    ],
)
def test_reads_that_the_trace_does_not_show_are_a_note(evidence: RunCounts, title: str) -> None:
    [note] = findings_of(host_synchronisation, traced(evidence))

    assert (note.title, note.severity) == (title, "note")
    assert [(place.file, place.line) for place in note.where] == [("train.py", 48)]


def test_waits_that_the_trace_shows_get_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(kineto_bytes(programs.item_every_step()))
    trace = open_trace(path)
    evidence = RunCounts(steps=4, transfers_out=Tally(4))
    view = View(replace(trace, metadata=replace(trace.metadata, evidence=evidence)))

    [finding] = host_synchronisation.ask(view).findings

    assert finding.saving_ns_per_step > 0
    assert figures_of(finding)[-1] == ("reads from the device in the whole run", 4)


REPORT = "Metric: CompileTime\n  TotalSamples: 30\n  Accumulator: 14s152ms226.398us\nCounter: MarkStep\n  Value: 20\n"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(kineto_bytes(programs.item_every_step()))
    return path


def test_the_command_gives_a_trace_its_evidence_and_keeps_none_of_it(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.txt"
    report.write_text(REPORT)

    assert main(["diagnose", str(trace_file), "--xla-metrics", str(report), "--json", "-"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["trace"]["evidence"]["sources"] == [str(report)]
    assert told["trace"]["evidence"]["compilations"] == {"count": 30, "total_ns": 14_152_226_398, "longest_ns": None}
    assert "Graphs were compiled 30 times in 20 steps of the whole run" in [each["title"] for each in told["findings"]]
    assert open_trace(trace_file, cache=TraceCache()).metadata.evidence is None
    assert main(["diagnose", str(trace_file), "--json", "-"]) == 0
    assert "evidence" not in json.loads(capsys.readouterr().out)["trace"]


def test_the_command_shows_a_note_and_redacts_it(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "Execution Analysis: Execution Cause\n"
        f"Execution Analysis:   {ACCESS.cause}\n"
        "Execution Analysis: Python Frame Triggered Execution: \n"
        "Execution Analysis:   step (/home/alice/secret/train.py:12)\n"
        "Execution Analysis: ----\n"
    )

    assert main(["diagnose", str(trace_file), "--xla-debug-log", str(log), "--redact", "--json", "-"]) == 0

    out = capsys.readouterr().out
    assert "train.py" in out
    assert "alice" not in out
    assert str(tmp_path) not in out


def test_a_file_of_a_rank_joins_its_trace_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        header = {"distributedInfo": {"rank": rank, "world_size": 2}}
        text = kineto_bytes(programs.item_every_step()).decode()
        (folder / f"{rank}.json").write_text(json.dumps(header)[:-1] + "," + text.lstrip()[1:])
    metrics = '[{"metric_name": "cpu_fallback", "statistics": {"FallbackOps": {"aten::digamma": 3}}}]'
    for rank in (1, 7):
        (tmp_path / f"metrics-rank{rank}.json").write_text(metrics)

    arguments = [
        "--gaudi-metrics",
        str(tmp_path / "metrics-rank1.json"),
        "--gaudi-metrics",
        str(tmp_path / "metrics-rank7.json"),
    ]
    assert main(["diagnose", str(folder), *arguments, "--rule", "cpu-fallback", "--json", "-"]) == 0

    captured = capsys.readouterr()
    ranks = json.loads(captured.out)["ranks"]
    assert ["evidence" in rank["trace"] for rank in ranks] == [False, True]
    assert re.search(r"metrics-rank7\.json .*rank 7", captured.err)


def test_mistakes_end_in_a_sentence(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.txt"
    report.write_text(REPORT)

    assert main(["diagnose", str(trace_file), "--fallback-log", str(report)]) == 2
    assert "report.txt contains no log of operators on the CPU" in capsys.readouterr().err
    assert main(["diagnose", str(trace_file), "--xla-metrics", str(tmp_path / "nowhere")]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (REPORT, "--xla-metrics"),
        ("loss 1\nCompilation Analysis: ====\n", "--xla-debug-log"),
        ('[{"metric_name": "graph_compilation", "triggered_by"', "--gaudi-metrics"),
        ("step 1\nCPU fallback digamma : self=HPUBFloat16Type\n", "--fallback-log"),
        ('V1128 03:50:48.913000 9315 torch/_dynamo/utils.py:2009] {"compilation_metrics": {}}', "--compile-log"),
    ],
)
def test_such_a_file_alone_is_told_how_to_be_given(
    text: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "alone.txt"
    path.write_text(text)

    assert main(["diagnose", str(path)]) == 2
    error = capsys.readouterr().err
    assert "not a trace: give it beside one" in error
    assert f"stepscope diagnose TRACE {option} FILE" in error


def test_a_tar_archive_is_told_to_be_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "trace.json").write_text("{}")
    archive = shutil.make_archive(str(tmp_path / "profile"), "gztar", tmp_path / "inside")

    assert main(["diagnose", archive]) == 2
    assert "is a tar archive: unpack it and give the trace inside" in capsys.readouterr().err
