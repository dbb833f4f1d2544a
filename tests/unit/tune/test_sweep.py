"""A sweep's search, its metrics, the trials it runs, and what its report says; programs are tiny and need no torch."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import scipy.stats

from stepscope.errors import UsageError
from stepscope.record.telemetry.store import Sample, Series, TelemetryStore
from stepscope.report.document import json_bytes
from stepscope.report.html import html_of
from stepscope.report.redaction import Redactor
from stepscope.report.sweep import sweep_document, sweep_json
from stepscope.report.text import text_of
from stepscope.tune.sweep.file import Metric, Sweep, parse_sweep
from stepscope.tune.sweep.run import SweepResults, SweepRun, SweepTrial, TrialEnd, devices_of, results_of, spearman
from stepscope.tune.sweep.study import SILENT_S, SweepStudy, is_behind, iterations_to_compare
from stepscope.tune.sweep.trial import MetricReader, TrialProgram, Value, Values
from tests.unit.rendered import written

PRINTING = """
import sys, time
x = float(sys.argv[1])
if x > 0.9:
    print("out of patience")
    sys.exit(3)
if x > 0.8:
    print("loss: nan")
    sys.exit()
for step in range(3):
    print(f"step {step} loss={x + 1 / (step + 1):.6f}", flush=True)
"""
SLOW_IF_BAD = """
import sys, time
x = float(sys.argv[1])
print(f"loss={x}", flush=True)
while x > 0.5:
    time.sleep(0.02)
"""


def sweep_of(parameters: object, **more: Any) -> Sweep:
    return parse_sweep({"program": "a.py", "metric": "loss", "parameters": parameters, **more}, default_name="try")


def program_of(text: str, folder: Path) -> list[str]:
    (folder / "program.py").write_text(text)
    return [sys.executable, str(folder / "program.py"), "{x}"]


def search(sweep: Sweep, folder: Path) -> tuple[str, list[TrialEnd], SweepResults]:
    study = SweepStudy(sweep, folder / "study.sqlite", folder)
    runner = SweepRun(study, folder, lambda end: None, lambda sentence: None)
    return runner.run(), runner.ended, results_of(sweep, study.study)


def results_with(sweep: Sweep, trials: list[tuple[dict[str, Any], float]]) -> SweepResults:
    """Of a study in memory in which these values gave these results."""
    study = optuna.create_study(direction=sweep.metric.goal)
    for values, value in trials:
        study.add_trial(
            optuna.create_trial(
                params=values,
                distributions={each.name: each.optuna_distribution() for each in sweep.searched},
                value=value,
                user_attrs={"values": values},
            )
        )
    return results_of(sweep, study)


class TestPruning:
    def test_only_the_best_third_goes_on(self) -> None:
        metric = Metric("loss")
        assert not is_behind(5.0, [5.0], 3, metric)
        assert not is_behind(2.0, [1.0, 2.0, 3.0], 3, metric)
        assert is_behind(3.0, [1.0, 2.0, 3.0], 3, metric)
        assert is_behind(1.0, [1.0, 2.0, 3.0], 3, Metric("score", "maximize"))
        assert is_behind(math.nan, [math.nan], 3, metric)

    @pytest.mark.parametrize(
        ("early", "method", "iterations"),
        [
            (None, "tpe", []),
            ({"min_iter": 3, "max_iter": 40}, "tpe", [3, 9, 27]),
            ({"min_iter": 1, "eta": 1.5, "max_iter": 6}, "random", [1, 2, 3, 5]),
            ({"max_iter": 27, "s": 2}, "grid", [3, 9]),
            ({"max_iter": 27, "s": 2}, "hyperband", [3, 9, 27]),
        ],
    )
    def test_when_trials_are_compared(self, early: object, method: str, iterations: list[int]) -> None:
        assert list(iterations_to_compare(sweep_of({"x": [1, 2]}, early_terminate=early, method=method))) == iterations

    @pytest.mark.parametrize(("strict", "compared"), [(True, [2.0, 9.0]), (False, [2.0, 2.0])])
    def test_what_a_trial_is_compared_by(self, strict: bool, compared: list[float], tmp_path: Path) -> None:
        sweep = sweep_of(
            {"x": [1, 2]},
            command=program_of("print('loss: 2'); print('loss: 9')", tmp_path),
            early_terminate={"min_iter": 1, "strict": strict},
        )
        program = TrialProgram(sweep, tmp_path, 0, {"x": 1}, None)
        found = []
        while not program.is_over:
            found += program.look()

        assert found == [(1, compared[0]), (2, compared[1])]
        assert program.failure() is None

    def test_a_hopeless_trial_is_ended(self, tmp_path: Path) -> None:
        sweep = sweep_of(
            {"x": [0.1, 0.2, 0.9]},
            command=program_of(SLOW_IF_BAD, tmp_path),
            method="grid",
            seed=1,
            early_terminate={"min_iter": 1},
        )

        stop, ended, _ = search(sweep, tmp_path)  # the bad one never ends by itself
        assert ended[0].values["x"] != 0.9, "the first trial has none to be compared with"
        assert (stop, len(ended)) == ("trials", 3)
        states = {end.values["x"]: end.state for end in ended}
        assert states == {0.1: "complete", 0.2: "complete", 0.9: "pruned"}


class TestMetrics:
    def reader(self, folder: Path, **metric: Any) -> MetricReader:
        return MetricReader(sweep_of({"x": [1, 2]}, metric={"name": "loss", **metric}).metric, folder, folder / "log")

    @pytest.mark.parametrize(
        ("line", "values"),
        [
            ("loss: 0.5", [0.5]),
            ("step 3, loss=1e-3 val_loss=9 my.loss=8 loss/train: 7", [0.001]),
            ("{'loss': 2.5, 'acc': 1}", [2.5]),
            ("Loss = -inf", [-math.inf]),
            ('{"loss": 3, "step": 7}', [3.0]),
            ('{"other": "loss: 4"}', []),
            ("\rloss: 1\rloss: 2", [1.0, 2.0]),
            ("loss: 5 6 loss: unknown", [5.0]),
            ("floss: 1 loss:", []),
        ],
    )
    def test_what_is_printed(self, line: str, values: list[float], tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(line.encode())

        assert [each.value for each in self.reader(tmp_path, **{"from": "stdout"}).new(is_over=True)] == values

    def test_a_line_that_comes_in_pieces(self, tmp_path: Path) -> None:
        reader = self.reader(tmp_path, **{"from": "stdout"})
        found = []
        for piece in ("loss: 1", "2\nlo", "ss: 3"):
            with (tmp_path / "log").open("a") as file:
                file.write(piece)
            found.append([each.value for each in reader.new()])
        found.append([each.value for each in reader.new(is_over=True)])

        assert found == [[], [12.0], [], [3.0]]

    def test_a_pattern(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("top1 91.5% top5 99%\n")

        assert [each.value for each in self.reader(tmp_path, pattern=r"top1 ([\d.]+)%").new()] == [91.5]

    def test_what_is_logged_goes_before_what_is_printed(self, tmp_path: Path) -> None:
        store = TelemetryStore(tmp_path / "rank0" / "telemetry" / "1.sqlite", {"rank": "0"})
        (tmp_path / "log").write_text("loss: 0.1\n")
        reader = self.reader(tmp_path)
        assert reader.new() == []  # it may still log it
        store.append([Sample(Series("log", "loss"), 1, 10, 0.125), Sample(Series("log", "loss"), 2, 20, math.nan)])
        first, second = reader.new()
        store.append([Sample(Series("log", "loss"), 3, None, 0.0625)])

        assert (first.value, first.step) == (0.125, 10)
        assert math.isnan(second.value)
        assert [(each.value, each.step) for each in reader.new(is_over=True)] == [(0.0625, None)]

    def test_which_value_counts(self) -> None:
        for use, result in (("last", 2.0), ("best", 1.0), ("mean", 2.0)):
            values = Values(Metric("loss", use=use))
            for value in (3.0, 1.0, 2.0):
                values.add(Value(value))
            assert values.result == result

    def test_many_values_are_thinned_and_their_result_is_exact(self) -> None:
        values = Values(Metric("loss", use="best"))
        for number in range(100_000):
            values.add(Value(float(abs(number - 77_777))))

        assert (values.count, values.result) == (100_000, 0.0)
        assert len(values.kept) < 10_000
        assert values.kept[1][0] - values.kept[0][0] == values.kept[-1][0] - values.kept[-2][0]


class TestRunning:
    def test_a_grid_with_failures_on_two_places(self, tmp_path: Path) -> None:
        values = [0.25, 0.5, 0.85, 0.95]
        sweep = sweep_of({"x": values}, command=program_of(PRINTING, tmp_path), method="grid", jobs=2)

        stop, ended, results = search(sweep, tmp_path)

        assert (stop, sorted(end.values["x"] for end in ended)) == ("trials", values)
        reasons = {trial.values["x"]: trial.reason for trial in results.of_state("failed")}
        assert reasons == {0.85: "its loss is nan", 0.95: "it ended with exit code 3: out of patience"}
        assert results.best is not None
        assert (results.best.values, results.best.value, results.best.iterations) == ({"x": 0.25}, 0.583333, 3)
        folder = tmp_path / str(results.best.folder)
        assert json.loads((folder / "parameters.json").read_text()) == {"x": 0.25}
        assert json.loads((folder / "result.json").read_text())["state"] == "complete"
        lines = [json.loads(line) for line in (folder / "values.jsonl").read_text().splitlines()]
        assert lines[0] == {"iteration": 1, "step": None, "value": 1.25}
        assert [each["iteration"] for each in lines] == [1, 2, 3]

        again, none, same = search(sweep, tmp_path)
        assert (again, none, len(same.trials)) == ("trials", [], 4)

    def test_other_parameters_need_another_study(self, tmp_path: Path) -> None:
        SweepStudy(sweep_of({"x": [1, 2]}), tmp_path / "study.sqlite", tmp_path)
        SweepStudy(sweep_of({"x": [1, 2]}, command="b.py {x}"), tmp_path / "study.sqlite", tmp_path)

        with pytest.raises(UsageError, match="the study try was begun with another x, y; use another --folder"):
            SweepStudy(sweep_of({"x": [1, 3], "y": [1, 2]}), tmp_path / "study.sqlite", tmp_path)
        with pytest.raises(UsageError, match="was begun to minimize loss, not to maximize loss"):
            SweepStudy(sweep_of({"x": [1, 2]}, goal="maximize"), tmp_path / "study.sqlite", tmp_path)

    def test_no_trial_begins_after_one_that_reached_the_target(self, tmp_path: Path) -> None:
        sweep = sweep_of(
            {"x": [0.25, 0.5]},
            command=program_of(PRINTING, tmp_path),
            method="random",
            metric={"name": "loss", "target": 10},
        )

        stop, ended, _ = search(sweep, tmp_path)
        assert (stop, len(ended)) == ("target", 1)

    def test_a_program_that_never_works(self, tmp_path: Path) -> None:
        sweep = sweep_of({"x": {"min": 0.91, "max": 1.0}}, command=program_of(PRINTING, tmp_path), jobs=5)

        stop, ended, results = search(sweep, tmp_path)
        assert (stop, {end.state for end in ended}) == ("failing", {"failed"})
        assert "No trial is complete yet" in text_of(sweep_document(results), width=100, top=10)

    def test_a_program_that_cannot_be_started(self, tmp_path: Path) -> None:
        sweep = sweep_of({"x": [1, 2]}, command="no-such-program {x}")

        with pytest.raises(UsageError, match="there is no program no-such-program"):
            search(sweep, tmp_path)

    def test_the_same_seed_draws_the_same_however_often_it_was_stopped(self, tmp_path: Path) -> None:
        def drawn(folder: Path, counts: list[int]) -> list[float]:
            found = []
            folder.mkdir()
            for count in counts:
                sweep = sweep_of({"x": {"min": 0.0, "max": 1.0}}, method="random", seed=7, trials=count)
                study = SweepStudy(sweep, folder / "study.sqlite", folder)
                while (trial := study.begin()) is not None:
                    found.append(trial.params["x"])
                    study.complete(trial, 0.0, 1)
            return found

        at_once = drawn(tmp_path / "a", [4])
        assert at_once == drawn(tmp_path / "b", [1, 4])
        assert len(set(at_once)) == 4

    def test_a_process_that_died_while_it_took_a_trial(self, tmp_path: Path) -> None:
        sweep = sweep_of({"x": [0.25, 0.5]}, method="grid")
        study = SweepStudy(sweep, tmp_path / "study.sqlite", tmp_path)
        study.study.ask(fixed_distributions={each.name: each.optuna_distribution() for each in sweep.searched})

        assert study.take_from_the_dead() == [0]
        taken = [trial.params["x"] for _ in range(2) if (trial := study.begin()) is not None]
        assert sorted(taken) == [0.25, 0.5]
        assert study.begin() is None

    def test_a_trial_that_was_taken_for_dead_counts_once(self, tmp_path: Path) -> None:
        sweep = sweep_of({"x": [0.25, 0.5]}, method="grid")
        ours, theirs = (SweepStudy(sweep, tmp_path / "study.sqlite", tmp_path) for _ in range(2))
        trial = ours.begin()
        assert trial is not None
        assert theirs.take_from_the_dead() == []
        trial.set_user_attr("owner", {"machine": "another", "process": 1, "started": "1"})
        assert theirs.take_from_the_dead() == []
        trial.set_user_attr("beat", time.time() - SILENT_S - 1)

        assert theirs.take_from_the_dead() == [0]
        repeat = theirs.begin()
        assert repeat is not None
        assert (repeat.number, repeat.params) == (1, trial.params)
        ours.beat(trial)
        assert not ours.is_behind(trial, 1, 9.0)
        ours.complete(trial, 9.0, 1)
        theirs.complete(repeat, 1.0, 1)
        other = ours.begin()
        assert other is not None
        assert other.params != trial.params
        assert ours.begin() is None
        results = results_of(sweep, theirs.study)
        assert [(each.number, each.value) for each in results.trials] == [(1, 1.0), (2, None)]
        assert results.abandoned == 1

    def test_each_place_has_its_share_of_the_devices(self) -> None:
        assert [devices_of(slot, 2, ["0", "1", "2"]) for slot in range(2)] == ["0,2", "1"]
        assert [devices_of(slot, 3, ["4", "5"]) for slot in range(3)] == ["4", "5", "4"]
        assert devices_of(0, 1, ["0", "1"]) is None
        assert devices_of(0, 2, []) is None


class TestReport:
    PLANTED = sweep_of({"strong": {"min": 0.0, "max": 1.0}, "weak": {"min": 0.0, "max": 1.0}, "kind": ["a", "b"]})

    def planted(self) -> SweepResults:
        """The first parameter decides, the second is noise, the third has no order."""
        spread = [(number * 0.61803398875) % 1 for number in range(40)]
        other = [(number * 0.7548776662) % 1 for number in range(40)]
        return results_with(
            self.PLANTED,
            [
                ({"strong": x, "weak": y, "kind": "ab"[number % 2]}, (x - 0.1) ** 2 + 0.01 * y)
                for number, (x, y) in enumerate(zip(spread, other, strict=True))
            ],
        )

    def test_a_planted_parameter_is_the_most_important(self) -> None:
        first, *rest = self.planted().effects

        assert first.parameter.name == "strong"
        assert first.importance is not None
        assert first.importance > 0.8
        assert first.correlation is not None
        assert first.correlation > 0.8
        assert sum(each.importance or 0 for each in (first, *rest)) == pytest.approx(1)
        correlations = {each.parameter.name: each.correlation for each in rest}
        assert correlations["kind"] is None
        assert abs(correlations["weak"] or 0) < 0.4

    def test_spearman(self) -> None:
        assert spearman([1, 2, 3, 4], [10, 20, 25, 80]) == pytest.approx(1)
        assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
        first, second = [3.0, 1.0, 2.0, 2.0, 5.0, 3.0], [1.0, 4.0, 4.0, 2.0, 0.0, 4.0]
        assert spearman(first, second) == pytest.approx(scipy.stats.spearmanr(first, second).statistic)
        assert spearman([1, 2], [1, 2]) is None
        assert spearman([1, 1, 1], [1, 2, 3]) is None

    def test_the_text(self) -> None:
        text = text_of(sweep_document(self.planted()), width=100, top=2)

        assert text.startswith("Sweep try, minimising loss by TPE: 40 trials: 40 complete.\nBest: loss ")
        assert re.search(r"\n  strong +\d+\.\d % +\+0\.\d+ +0\.\d+ +0 to 1\n", text)
        assert re.search(r"\n  kind +[\d.<]+ % +- +", text)
        assert "showing 2 of 40 complete trials, --top 0 for all" in text

    def test_an_empty_study(self) -> None:
        results = results_with(self.PLANTED, [])

        assert text_of(sweep_document(results), width=80, top=10) == (
            "Sweep try, minimising loss by TPE: 0 of 30 trials.\nNo trial is complete yet, so there is no best one.\n"
        )
        assert b"No trial is complete yet" in html_of(sweep_document(results))
        assert written(sweep_json(results))["best"] is None

    def test_the_page_has_a_line_for_each_trial_and_an_axis_for_each_parameter(self) -> None:
        page = html_of(sweep_document(self.planted())).decode()

        assert page.count('<polyline class="hit"') == 40
        names = re.findall(r'<b class="(?:metric)?" style="left:([\d.]+)%">(.+?)</b>', page)
        assert [name for _, name in names][::3] == ["strong", "loss"]
        assert [left for left, _ in names] == ["0.000", "33.333", "66.667", "100.000"]

    def test_no_name_or_value_is_markup(self) -> None:
        hostile = "</script><img src=x onerror=alert(1)>"
        sweep = sweep_of(
            {"x": [hostile, "b"]}, metric=hostile, name="n", command=f"a.py {{x}} '{hostile}'", description=hostile
        )
        trial = SweepTrial(0, "complete", {"x": hostile}, 1.0, 1, 2.0, None, hostile)
        failed = SweepTrial(1, "failed", {"x": "b"}, None, None, 2.0, hostile, None)
        done = results_with(sweep, [])
        results = SweepResults(sweep, (trial, failed), done.effects, 0)
        page = html_of(sweep_document(results)).decode()

        assert "<img" not in page
        assert page.count("</script>") == 1
        assert "&lt;img src=x onerror=alert(1)&gt;" in page

    def test_paths_are_taken_out(self) -> None:
        sweep = sweep_of({"x": ["/home/alice/a.txt", "b"]}, command="/home/alice/train.py {x}")
        trial = SweepTrial(0, "complete", {"x": "/home/alice/a.txt"}, 1.0, 1, 2.0, None, "trial-0000")
        failed = SweepTrial(1, "failed", {"x": "b"}, None, None, 2.0, "no /home/alice/data.csv", None)
        results = Redactor(["alice"]).redact(SweepResults(sweep, (trial, failed), results_with(sweep, []).effects, 0))

        for report in (html_of(sweep_document(results)).decode(), text_of(sweep_document(results), width=100, top=0)):
            assert "alice" not in report
            assert "a.txt" in report
            assert "no data.csv" in report

    def test_the_json(self) -> None:
        content = written(sweep_json(self.planted()))

        assert [content["parameters"][0][key] for key in ("low", "high", "mu", "values")] == [0.0, 1.0, None, None]
        assert (content["schema"], content["counts"]["complete"], len(content["trials"])) == (1, 40, 40)
        assert content["effects"][0]["parameter"] == "strong"
        assert json.loads(json_bytes(content))["best"] == content["best"]
