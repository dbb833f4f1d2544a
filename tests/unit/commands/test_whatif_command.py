"""`stepscope whatif`: its options, what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.commands.read.whatif import megabytes, nanoseconds, parsed_scale
from stepscope.trace import Trace
from tests.simulator.job import Rank, job, write_job
from tests.simulator.ranks import write_ranks
from tests.unit.recording import Recording, saved
from tests.unit.rendered import golden
from tests.unit.waiting_twice import US, alone, waiting_twice


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return saved(tmp_path, waiting_twice())


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["whatif", *arguments, "--json", "-"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["whatif", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


AS_MEASURED = """\
trace.json: a step takes 1.0 ms (mean of 4).
Replayed without a change the trace gives the measured time; the device never waits for something that the trace does
not show.

What the step waits for: the critical path, per step
  resource                   time   share  what it means
  device: computation    400.0 us  40.0 %  the device computed
  host: input            300.0 us  30.0 %  the host was loading data
  host: python           275.0 us  27.5 %  the host was running Python code between operators
  launch latency          20.0 us   2.0 %  launched work had not yet reached the device
  host: synchronisation    5.0 us   0.5 %  the host waited for a value from the device, or for the device to finish

The host limits the step: its work is 58.0 % of the critical path, most of it input (30.0 %).

What the step would save without each cause; savings overlap
  cause                took  took share     saves  saves share
  synchronisation    5.0 us       0.5 %  385.0 us       38.5 %
  input            300.0 us      30.0 %  300.0 us       30.0 %
  python           275.0 us      27.5 %  275.0 us       27.5 %
  launch_latency    20.0 us       2.0 %   20.0 us        2.0 %
  took: the device's idle time by cause, with copies and communication that no computation hides; saves: what the replay
  without it gives

Next: stepscope whatif TRACE --remove synchronisation, or --remove RULE for what a rule of stepscope diagnose found.
"""


def test_without_a_change_it_says_what_the_step_waits_for(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", trace]) == 0
    assert capsys.readouterr().out == AS_MEASURED


def test_several_changes_alone_and_together(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", trace, "--remove", "input", "--remove", "synchronisation"]) == 0
    text = capsys.readouterr().out
    assert text == golden("whatif_two_changes.txt", text)


def test_the_tables(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", trace, "--critical-path", "--slack", "--curve", "kernels"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{AS_MEASURED}\n")
    assert text == golden("whatif_tables.txt", text)


@pytest.mark.parametrize(
    ("arguments", "step_us"),
    [
        (["--remove", "input"], 700),
        (["--remove", "input-bound"], 700),  # the rule finds the same waits
        (["--scale", "gemm=0.5"], 800),
        (["--scale", "g*=2"], 1400),
        (["--scale", "aten::mm=0"], 600),  # latency, the call to wait and Python stay
        (["--scale", "train.py:12=0.5"], 512.5),  # host and device, but neither latency nor the call to wait
        (["--launch-overhead", "4us"], 1000),  # launching hides behind the device
        (["--sync-every", "2"], 807.5),  # 385 us less in every other step
        (["--graphs"], 1000),  # a graph of one kernel
        (["--loader-workers", "1"], 1000),  # to receive a batch takes as long as to load it
    ],
)
def test_each_change(trace: str, arguments: list[str], step_us: float, capsys: pytest.CaptureFixture[str]) -> None:
    [only] = answer(capsys, trace, *arguments)["changes"]
    assert only["change"] == " ".join(arguments)
    assert only["step_ns"] == step_us * US


def test_the_answer_for_programs(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, trace, "--remove", "input")

    assert {key: report[key] for key in ("schema", "trace", "steps", "step_ns", "replayed_step_ns", "why_not")} == {
        "schema": 1,
        "trace": {"path": "trace.json", "format": "kineto", "warnings": []},
        "steps": {"source": "recorded", "count": 4},
        "step_ns": 1_000_000.0,
        "replayed_step_ns": 1_000_000.0,
        "why_not": None,
    }
    alone = {"change": "--remove input", "step_ns": 700_000.0, "saving_ns": 300_000.0, "saving_share": 0.3}
    assert (report["changes"], report["together"]) == ([alone], {**alone, "change": "together"})
    assert [(each["kind"], each["cause"], each["ns"]) for each in report["resources_then"]] == [
        ("compute", None, 1_600_000),
        ("host", "python", 1_100_000),
        ("launch_latency", None, 80_000),
        ("host", "synchronisation", 20_000),
    ]
    assert [report[key] for key in ("causes", "critical_path", "slack", "curve")] == [None] * 4
    causes = answer(capsys, trace, "--critical-path", "--slack", "--curve", "operators")
    assert causes["causes"][0]["cause"] == "synchronisation"
    assert sum(piece["duration_ns"] for piece in causes["critical_path"]) == 4_000_000
    assert [each["slack_ns"] for each in causes["slack"]] == [0, 0, 0, 0]
    assert {each["name"] for each in causes["curve"]} == {"aten::mm"}
    assert main(["whatif", trace, "--json", str(tmp_path / "answer.json")]) == 0
    assert capsys.readouterr().out == AS_MEASURED
    assert json.loads((tmp_path / "answer.json").read_text())["changes"] == []


def test_a_machine_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = saved(tmp_path, alone())

    report = answer(capsys, trace, "--remove", "input", "--scale", "aten::mm=0.5")

    assert report["device"] is None
    assert [each["step_ns"] for each in report["changes"]] == [700_000, 800_000]
    assert report["together"]["step_ns"] == 500_000
    assert "was launched on a device" in refused(capsys, trace, "--graphs")


def test_a_recording_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = saved(tmp_path, waiting_twice(steps=1, annotated=False))

    assert main(["whatif", trace, "--remove", "launch_latency"]) == 0
    assert capsys.readouterr().out.startswith("trace.json: 1.0 ms recorded, without steps.\n")
    assert "has no steps" in refused(capsys, trace, "--sync-every", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--remove", "inpt"], "there is no cause or rule 'inpt'; did you mean input?"),
        (["--remove", "zzz"], "there is no cause or rule 'zzz'; the causes are input, synchronisation,"),
        (["--remove", "recompilation"], "the rule recompilation finds nothing to fix in this trace"),
        (["--scale", "nothing=0.5"], "the trace has no operator, kernel, module or line 'nothing'"),
        (["--overlap", "communication"], "communication"),
        (["--bucket-size", "25"], "all-reduces"),
        (["--curve", "all"], "invalid choice: 'all'"),
        (["--scale", "a=-1"], "'-1' is not a factor from 0"),
        (["--loader-workers", "-1"], "'-1' is not a whole number from 0 on"),
        (["--sync-every", "0"], "'0' is not a whole number from 1 on"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    trace: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = refused(capsys, trace, *arguments)

    assert written.startswith("stepscope: ")
    assert message in written
    assert written.count("\n") == 1


def test_a_trace_without_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.json").write_bytes(b"")
    (tmp_path / "nothing.json").write_text('{"traceEvents": []}')

    assert "empty" in refused(capsys, str(tmp_path / "empty.json"))
    assert "without a single event" in refused(capsys, str(tmp_path / "nothing.json"))
    assert "nothing to replay" in refused(capsys, saved(tmp_path, Trace.from_tables({})))


def test_factors_that_no_number_can_count(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    thrice = ["--scale", "*=1000000"] * 3

    assert "longer than 70 years" in refused(capsys, trace, *thrice)


def test_many_operators_inside_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording(unit_ns=1000)
    for _ in range(500):
        recording.operator(0, 100, "aten::mm")
    path = saved(tmp_path, recording.trace())

    assert answer(capsys, path, "--scale", "aten::mm=0.5")["together"]["step_ns"] == 50_000


def test_a_change_that_changes_nothing(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", trace, "--launch-overhead", "1500"]) == 0
    assert "\n--launch-overhead 1500ns: a step would still take 1.0 ms.\n" in capsys.readouterr().out


def test_of_several_ranks_the_first_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, us in enumerate((5, 9)):
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": us}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [event]}))

    assert main(["whatif", str(tmp_path), "--scale", "aten::mm=0.5"]) == 0

    written = capsys.readouterr()
    assert "\nrank0.json: 5.0 us recorded, without steps.\n" in written.out
    assert written.err == ""


def test_of_a_folder_the_job_is_answered_and_a_rule_is_sought_on_every_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given three ranks of which only the last waits for its data
    write_ranks(tmp_path, 3, late=lambda step: 2)

    # Then the job comes first, and what to ask next names the folder
    assert main(["whatif", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.index("The others wait for rank 2") < text.index("rank0.json.gz: a step takes")
    assert f"\nNext: stepscope whatif {shlex.quote(str(tmp_path))} --remove " in text
    # and the rule finds something, though not on the first rank
    report = answer(capsys, str(tmp_path), "--remove", "input-bound")
    assert report["job"]["changed"] == 1
    assert report["trace"]["path"].endswith("rank2.json.gz")
    assert "in any of the 3 traces" in refused(capsys, str(tmp_path), "--remove", "recompilation")


def test_a_rule_whose_saving_no_replay_gives(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.whatif import Experiment

    monkeypatch.setattr(Experiment, "unexplained_share", 0.4)

    assert "cannot be replayed: the device waited 40% of the time" in refused(capsys, trace, "--remove", "input-bound")
    assert main(["whatif", trace, "--remove", "input"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "Not certain: the device waited 40% of the time for something that the trace does not show."
    )


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("aten::mm=0.5", ("aten::mm", 0.5)),
        (" a=b = 2 ", ("a=b", 2.0)),
        ("train.py:12=0", ("train.py:12", 0.0)),
        ("*=1e-3", ("*", 0.001)),
    ],
)
def test_a_scale(text: str, scale: tuple[str, float]) -> None:
    assert parsed_scale(text) == scale


@pytest.mark.parametrize("text", ["", "a", "=1", "a=", "a=x", "a=-1", "a=nan", "a=inf", "a=1e99", "a=1_0", "a=١"])
def test_no_scale(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parsed_scale(text)


@pytest.mark.parametrize(("text", "ns"), [("2us", 2_000), ("500ns", 500), ("500", 500), (" 1.5 us", 1_500), ("0", 0)])
def test_a_time(text: str, ns: int) -> None:
    assert nanoseconds(text) == ns


@pytest.mark.parametrize("text", ["", "us", "-1", "1 h", "1e3", "nan", "11s", "9" * 13])
def test_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        nanoseconds(text)


def test_megabytes() -> None:
    assert (megabytes("25"), megabytes("0.5")) == (25.0, 0.5)
    for text in ("0", "-1", "nan", "inf", "", "25MB", "1e7"):
        with pytest.raises(argparse.ArgumentTypeError):
            megabytes(text)


@pytest.mark.traces
def test_the_guide_quotes_what_a_real_trace_gives(capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.environ.get("STEPSCOPE_TRACES")
    if not folder:
        pytest.skip("STEPSCOPE_TRACES names no folder of real traces")
    guide = (Path(__file__).parents[3] / "docs" / "whatif.md").read_text()
    quoted = re.findall(r"^```\n\$ stepscope whatif (\S+)(.*)\n((?s:.+?))^```$", guide, re.MULTILINE)

    assert len(quoted) == 2
    for name, arguments, output in quoted:
        assert main(["whatif", str(Path(folder) / "kineto" / name), *arguments.split()]) == 0
        assert capsys.readouterr().out == output


@pytest.mark.traces
def test_ranks_that_meet_are_replayed_together(traces_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = traces_folder / "kineto" / "ranks128_sampled"

    assert main(["whatif", str(folder), "--remove", "dispatch", "--json", "-"]) == 0

    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["name"] for rank in ranks] == ["rank 0", "rank 1"]
    assert all(rank["step_ns"] < rank["alone_step_ns"] < rank["measured_step_ns"] for rank in ranks)
    assert main(["whatif", str(folder), "--remove", "dispatch"]) == 0
    assert "The ranks together: each waits for the others in their collectives" in capsys.readouterr().out


def test_what_was_lost_while_reading_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    path = tmp_path / "cut.json"
    path.write_text(json.dumps({"traceEvents": [event] * 3})[:-60])

    assert main(["whatif", str(path)]) == 0
    assert "While reading: 1 x truncated: " in capsys.readouterr().out
    assert main(["whatif", str(path), "--json", "-"]) == 0
    kinds = [warning["kind"] for warning in json.loads(capsys.readouterr().out)["trace"]["warnings"]]
    assert "truncated" in kinds


def late_job(folder: Path) -> None:
    """Three ranks, of which the third waits longest for its batches."""

    def program(rank: Rank) -> None:
        for number in range(2):
            with rank.main.step(number):
                rank.main.data_loader((rank.number + 1) * 100 * US, workers=True)
                rank.reduce("0", range(3))
                rank.main.item(rank.queue)

    write_job(folder, job(3, program))


def test_a_folder_is_answered_for_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late_job(tmp_path)
    (tmp_path / "rank3.json").write_text("{")

    assert main(["whatif", str(tmp_path), "--remove", "input"]) == 0
    written = capsys.readouterr()
    assert "a step of the job would take" in written.out
    assert "skipped: " in written.err
    assert "rank3.json" in written.err
    every = answer(capsys, str(tmp_path), "--remove", "input")
    one = answer(capsys, str(tmp_path), "--remove", "input", "--rank", "2")
    none = answer(capsys, str(tmp_path), "--remove", "input", "--rank", "1")

    saved = [each["job"]["measured_step_ns"] - each["job"]["step_ns"] for each in (every, one, none)]
    assert saved == [300 * US, 100 * US, 0]
    assert [each["job"]["changed"] for each in (every, one, none)] == [3, 1, 1]
    assert one["trace"]["path"].endswith("rank2.json")
    assert one["together"]["saving_ns"] == 300 * US  # what its trace alone would promise


def test_a_rank_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late_job(tmp_path)
    said = refused(capsys, str(tmp_path), "--remove", "input", "--rank", "7")
    assert "has no trace of rank 7; it has 0, 1, 2" in said
