"""The order of runs, when there are enough of them, and what is said of them; with runs written by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.compare.bench import Bench, BenchCommand, BenchFailure, BenchRun, BenchSettings, order_of, stop_of
from stepscope.compare.statistics import WarmUp
from stepscope.report.bench import bench_document, bench_json, bench_table, how, noise_of, verdicts
from stepscope.report.text import markdown_of, text_of
from tests.unit.rendered import written

MS = 1_000_000
RUNS_DIFFER = (
    "Runs of {} differ more than their steps explain: something changes from run to run, such as the clock, "
    "memory placement or other load; the intervals include it. --quiet-machine helps."
)
SPREAD = (0, 200_000, -200_000, 100_000, -100_000, 300_000, -300_000, 0, 50_000, -50_000)


def test_two_commands_take_turns() -> None:
    assert [order_of(2, number) for number in range(1, 5)] == [[0, 1], [1, 0], [1, 0], [0, 1]]


def test_each_of_three_commands_comes_first_last_and_between() -> None:
    rounds = [order_of(3, number) for number in range(1, 7)]
    assert rounds == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1], [1, 0, 2]]
    assert [sorted(places) for places in zip(*rounds, strict=True)] == [[0, 0, 1, 1, 2, 2]] * 3


def run(label: str, number: int, mean_ms: float, *, count: int = 20, dropped: int = 0, **more: object) -> BenchRun:
    step_ns = tuple(int(mean_ms * MS) + SPREAD[place % len(SPREAD)] for place in range(count))
    settings: dict[str, object] = {
        "warm_up": WarmUp(dropped, 2, True),
        "source": "optimizer",
        "clock": "host",
        "ranks": 1,
        "complete": True,
        "seconds": 3.0,
        **more,
    }
    return BenchRun(label, number, Path("nowhere"), step_ns, **settings)  # type: ignore[arg-type]


def bench(*means_ms: Sequence[float], stop: str = "precision", precision: float = 0.02) -> Bench:
    """For each command the mean steps of its runs."""
    texts = (f"{sys.executable} -c pass", f"{sys.executable} -c '1|2'", f"{sys.executable} -c 3")
    commands = tuple(
        BenchCommand.parse(label, text) for label, text in zip("ABC", texts[: len(means_ms)], strict=False)
    )
    runs = [
        run(command.label, number, mean)
        for number, means in enumerate(zip(*means_ms, strict=True), start=1)
        for command, mean in zip(commands, means, strict=True)
    ]
    settings = BenchSettings(steps=20, precision=precision)
    return Bench(commands, settings, Path("/bench"), runs, stop, seconds=12.0)  # type: ignore[arg-type]


def test_the_verdict_names_the_faster_one_with_its_interval() -> None:
    measured = bench((50.0, 50.2, 49.9), (40.0, 40.1, 39.8))
    [(command, found)] = measured.comparisons()
    assert (command.label, found.verdict, found.before_runs, found.after_steps) == ("B", "faster", 3, 60)
    assert found.change_low is not None
    assert found.change_high is not None
    assert found.change_low < 40 / 50 - 1 < found.change_high
    first = next(iter(verdicts(measured)))
    assert first.startswith(
        "B against A: faster: a step takes 40.0 ms instead of 50.0 ms, 20.1 % less (95 % interval: "
    )


def test_equal_commands_show_no_difference() -> None:
    measured = bench((50.0, 50.4, 49.8), (50.1, 49.9, 50.3))
    [(_, found)] = measured.comparisons()
    assert found.verdict == "no difference shown"
    assert next(iter(verdicts(measured))).startswith("B against A: no difference shown: a step takes 50.1 ms")


def test_warm_up_steps_do_not_count() -> None:
    slow = BenchRun("A", 1, Path(), (900 * MS, 50 * MS, 50 * MS), WarmUp(1, 1, True), "optimizer", "host", 1, True, 1.0)
    assert slow.steady_ns == (50 * MS, 50 * MS)


def test_several_commands_are_compared_with_the_first_and_hold_together() -> None:
    measured = bench((50.0, 50.2), (40.0, 40.1), (60.0, 60.1))
    table = bench_table(measured)
    assert table["run"].to_list() == ["A", "B", "C"]
    assert table["verdict"].to_list() == ["", "faster", "slower"]
    assert [found.confidence for _, found in measured.comparisons()] == [0.975, 0.975]
    said = list(verdicts(measured))
    assert said[-1] == "Each interval is one of 97.5 %, so that all of them hold together in 95 % of such benches."
    assert "Few runs: 2 of A and 2 of C. More runs narrow the interval." in said


def test_it_stops_when_it_was_precise_after_two_rounds_in_succession() -> None:
    precise = bench((50.0, 50.1, 50.0), (40.0, 40.1, 40.0))
    assert stop_of(precise) == "precision"
    del precise.runs[4:]
    assert stop_of(precise) is None
    wavering = bench((50.0, 60.0, 50.0), (40.0, 40.1, 40.0))
    assert stop_of(wavering) is None


def test_it_stops_at_the_rounds_and_at_the_budget() -> None:
    measured = bench((50.0, 60.0), (40.0, 45.0))
    assert stop_of(measured) is None
    measured.settings = replace(measured.settings, rounds=2)
    assert stop_of(measured) == "rounds"
    measured.settings = replace(measured.settings, rounds=None, budget_s=18.1)
    assert stop_of(measured) is None
    measured.settings = replace(measured.settings, budget_s=17.9)  # two rounds took 12 s
    assert stop_of(measured) == "budget"
    del measured.runs[2:]
    assert stop_of(measured) is None


def test_how_it_was_measured() -> None:
    assert list(how(bench((50.0, 50.2, 49.9), (40.0, 40.1, 39.8)))) == [
        "Stopped after 3 rounds in 12.00 s: the change is known to ±0.6 % of a step of A; ±2.0 % was requested.",
        "A step ends with an optimizer's step, by the host's clock.",
        "Warm-up, by MSER-5: of 20 timed steps a run, the first were dropped (A 0, B 0); the very first step is not "
        "timed.",
        "Noise (standard deviation): from step to step A 0.3 %, B 0.4 %, from run to run A 0.3 %, B 0.4 %.",
        RUNS_DIFFER.format("A and B"),
    ]


def test_what_stands_out_is_said() -> None:
    measured = bench((50.0, 50.2), (40.0, 40.1), stop="budget", precision=0.0001)
    measured.runs[1] = run("B", 1, 40.0, source="loader", count=12, complete=False, own_profiler=True)
    measured.runs[3] = run("B", 2, 40.0, source="loader", ranks=2, dropped=10, warm_up=WarmUp(10, 2, False))
    measured.runs[0] = run("A", 1, 50.0, clock="device", other_cores=1.25, said=("Quiet machine: 12 done.",))
    measured.runs[2] = run("A", 2, 50.0, clock="device", other_cores=0.0)
    said = list(how(measured))

    assert said[0].startswith(
        "Stopped after 2 rounds in 12.00 s: another round exceeds the budget; the change is known"
    )
    assert said[1:6] == [
        "A step of A ends with an optimizer's step, by the device's clock.",
        "A step of B ends with a batch asked of a DataLoader on the last of 2 ranks, by the host's clock.",
        "The commands' steps were detected by different signs, so they may not be the same work.",
        "B ended by itself after 12 of 20 timed steps.",
        "B runs torch.profiler itself, which slows its steps.",
    ]
    assert "(A 0, B 0 to 10)" in said[6]
    assert said[6].endswith("In 1 of 2 runs of B the steps still changed after it: a larger --steps would show more.")
    assert said[-2:] == [
        "Other processes kept 0.0 to 1.2 cores busy meanwhile; without them the intervals would be narrower.",
        "Quiet machine: 12 done.",
    ]


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("rounds", "Stopped after 1 round in 12.00 s: as many rounds as requested"),
        ("interrupted", "Interrupted after 1 round in 12.00 s; what was measured until then is shown."),
        ("failed", "Ended after 1 round in 12.00 s because a command failed; what was measured before is shown."),
    ],
)
def test_why_it_stopped(stop: str, said: str) -> None:
    assert next(iter(how(bench((50.0,), (40.0,), stop=stop)))).startswith(said)


def test_the_text_begins_with_the_commands_and_their_steps() -> None:
    lines = text_of(bench_document(bench((50.0, 50.2, 49.9), (40.0, 40.1, 39.8))), width=120).splitlines()
    assert lines[:6] == [
        f"A  {sys.executable} -c pass",
        f"B  {sys.executable} -c '1|2'",
        "",
        "run     step      low     high  change       interval               verdict  steps  runs",
        "A    50.0 ms  49.7 ms  50.4 ms                                                  60     3",
        "B    40.0 ms  39.6 ms  40.3 ms  20.1 % less  19.5 % to 20.8 % less  faster      60     3",
    ]
    assert max(map(len, text_of(bench_document(bench((50.0, 50.2), (40.0, 40.1))), width=80).splitlines())) <= 120


def test_markdown_is_escaped() -> None:
    text = markdown_of(bench_document(bench((50.0, 50.2, 49.9), (40.0, 40.1, 39.8))))
    assert text.startswith(f"- **A** `{sys.executable} -c pass`\n- **B** `{sys.executable} -c '1|2'`\n")
    assert "| run | step | low | high | change | interval | verdict | steps | runs |\n| --- | ---: |" in text
    assert "- B against A: faster: a step takes 40.0 ms instead of 50.0 ms" in text


def test_json_holds_every_step() -> None:
    measured = bench((50.0, 50.2), (40.0, 40.1), stop="failed")
    measured.failure = BenchFailure("B", 3, "failed with exit code 1", None)
    content = written(bench_json(measured))

    assert (content["schema"], content["stop"], content["rounds"], content["warm_up"]) == (1, "failed", 2, "MSER-5")
    assert content["failure"] == {"label": "B", "round": 3, "sentence": "failed with exit code 1"}
    assert [each["label"] for each in content["commands"]] == ["A", "B"]
    assert content["commands"][0]["runs"][0]["step_ns"][:3] == [50_000_000, 50_200_000, 49_800_000]
    assert content["comparisons"][0]["verdict"] == "faster"
    assert content["profile"] is None


def test_noise_of_one_run_and_of_none() -> None:
    assert noise_of([]) is None
    assert noise_of([run("A", 1, 50.0, count=1)]) is None
    alone = noise_of([run("A", 1, 50.0)])
    assert alone is not None
    assert (round(alone.within, 5), alone.between, alone.runs_differ) == (0.00346, None, False)


def test_runs_that_differ_as_their_steps_let_expect() -> None:
    step_ns = [tuple((100 + (number * place * 37) % 11) * MS for place in range(1, 21)) for number in (1, 2, 3, 4)]
    runs = [
        BenchRun("A", number, Path(), each, WarmUp(0, 2, True), "optimizer", "host", 1, True, 1.0)
        for number, each in enumerate(step_ns)
    ]
    noise = noise_of(runs)
    assert noise is not None
    assert not noise.runs_differ


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.py"], "bench compares two or more commands, each quoted as one argument: 'a.py --x' 'b.py'"),
        (["-m a"] * 27, "bench compares at most 26 commands, not 27"),
        (["-m a", "gone.py"], "command B, gone.py: there is no script gone.py"),
        (["-m a", "-m b", "--budget", "soon"], "argument --budget: 'soon' is not a time: write 90s, 10m or 1h"),
        (["-m a", "-m b", "--budget", "0"], "argument --budget: '0' is not a time: write 90s, 10m or 1h"),
        (["-m a", "-m b", "--precision", "0"], "argument --precision: '0' is not a share"),
        (["-m a", "-m b", "--rounds", "1"], "argument --rounds: '1' is not a whole number from 2 on"),
        (["-m a", "-m b", "--steps", "2"], "argument --steps: '2' is not a whole number from 3 on"),
        (["-m a", "-m b", "--seed", "1"], "--seed needs --quiet-machine"),
        (["-m a", "-m b", "--json", "-", "--markdown", "-"], "only one report can go to standard output"),
        (["-m a", "-m b", "--folder", __file__], "no folder can be made in "),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"stepscope: {said}")
    assert err.count("\n") == 1
