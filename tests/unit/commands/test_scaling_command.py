"""`stepscope predict --devices`: what it prints for people and for programs, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.commands.plan import predict
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.prediction import StepPrediction, StepPredictor
from tests.unit.predict.test_prediction import copying
from tests.unit.predict.test_scaling import device_steps
from tests.unit.recording import saved
from tests.unit.small_traces import complete
from tests.unit.whatif.test_graph import waiting_step


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    device_steps().save(tmp_path / "trace")
    return str(tmp_path / "trace")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["predict", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


def test_several_of_the_recorded_device(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", trace, "--devices", "1,2,2", "--link", "10GB/s"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("What a step would take on several devices over 10GB/s (10 GB/s), each with a batch as")
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert lines[4].startswith("  efficiency: ")


def test_programs_get_everything(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", trace, "--devices", "2", "--link", "nvlink4", "--json", "-"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["predictions"] == []
    [scaled] = answer["scaling"]
    assert scaled["link"]["name"] == "nvlink4"
    [step] = scaled["steps"]
    assert step["devices"] == 2
    # 3 MiB over 367.6 GB/s, and the latencies of two messages.
    assert step["communication_ns"] == pytest.approx(2 * 14_000 + 4 * 1_900 + 3 * 2**20 / 367.6 / 0.92, rel=0.3)


def test_without_devices_nothing_is_scaled(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", trace, "--to", "L4", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["scaling"] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--link", "nvlink4"], "--link needs a number of devices"),
        (["--devices", "2"], "name the link that joins the devices, such as nvlink4"),
        (["--devices", "2", "--link", "string"], "'string' is neither a link in the table nor a bandwidth"),
        (["--devices", "2", "--link", "0GB/s"], "'0GB/s' is neither a link in the table nor a bandwidth"),
        (["--devices", "0", "--link", "nvlink4"], "'0' is not a list of numbers of devices"),
        (["--devices", "2,", "--link", "nvlink4"], "'2,' is not a list of numbers of devices"),
        (["--devices", "99999", "--link", "nvlink4"], "99999 devices are not possible; the number must be 1 to 65,536"),
    ],
)
def test_what_is_not_possible_is_refused(
    options: list[str], sentence: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, trace, *options)


def test_a_link_that_the_device_lacks_is_refused_with_what_it_has(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, trace, "--from", "A100-SXM4-80GB", "--to", "L4", "--devices", "2", "--link", "nvlink5")

    assert "the L4 has no nvlink5: it has pcie3, pcie4; " in said
    assert "has no nvlink4: it has nvlink3, pcie3" in refused(
        capsys, trace, "--from", "A100-SXM4-80GB", "--devices", "2", "--link", "nvlink4"
    )


@pytest.mark.parametrize(("device", "link"), [("A100-SXM4-80GB", "nvlink3"), ("L4", "pcie4")])
def test_without_a_link_the_devices_own_is_taken(
    device: str, link: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", trace, "--from", device, "--devices", "2", "--json", "-"]) == 0

    [scaled] = json.loads(capsys.readouterr().out)["scaling"]
    assert scaled["link"]["name"] == link


def test_a_trace_without_gradients_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting_step().save(tmp_path / "inference")

    assert "has no gradients" in refused(capsys, str(tmp_path / "inference"), "--devices", "2", "--link", "pcie4")


def test_why_no_step_time_is_given_is_said_for_several_as_well(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, trace, "--to", "L4", "--devices", "2", "--link", "pcie4")

    assert "so several of them have none either: for 100% of the device's time there is no model for the L4: " in said


@pytest.mark.parametrize("broken", ["a.json", "c.json"])
def test_a_rank_that_cannot_be_read_is_named_and_left_out(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [complete(f"ProfilerStep#{at}", "user_annotation", 1000 * at, 900) for at in range(3)]
    events += [complete("aten::mm", "cpu_op", 1000 * at + 10, 800) for at in range(3)]
    (tmp_path / "b.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    (tmp_path / broken).write_text("no trace")

    assert main(["plan", str(tmp_path), "--iterations", "1e5", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trace"]["path"] == str(tmp_path / "b.json")
    assert [each["path"] for each in answer["unreadable"]] == [str(tmp_path / broken)]
    assert main(["plan", str(tmp_path), "--iterations", "1e5"]) == 0
    assert broken in capsys.readouterr().out

    (tmp_path / "b.json").write_text("no trace")
    assert main(["plan", str(tmp_path), "--iterations", "1e5"]) == 2


def test_a_further_choice_predicts_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, predicted = saved(tmp_path, copying()), list[str]()

    def on(self: StepPredictor, target: DevicePeaks) -> StepPrediction:
        predicted.append(target.name)
        return predict_on(self, target)

    predict_on = StepPredictor._on
    monkeypatch.setattr(StepPredictor, "_on", on)

    def asked(*words: str) -> argparse.Namespace:
        return predict.PLAN.parsed([trace, "--iterations", "1e5", *words])

    basis = predict.opened(asked())
    plans = [predict.plan_of(asked(*words), basis) for words in ((), ("--iterations", "2e6"), ("--gpus", "1"))]
    assert len(predicted) == len(set(predicted)) > 1
    first, longer, _ = ({each.price.instance: each.hours for each in plan.machines} for plan in plans)
    assert longer == pytest.approx({name: hours * 20 for name, hours in first.items()})
