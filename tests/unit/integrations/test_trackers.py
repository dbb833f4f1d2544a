"""Diagnoses beside the runs of experiment trackers, by the real packages, offline."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stepscope.errors import UsageError
from stepscope.integrations.trackers import log_diagnosis, numbers_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt2_per_token_loss_cpu.json.gz"
SAVED = "saving_share/loop-in-step"


def report(**changes: object) -> dict[str, object]:
    return {
        "steps": {"step_ns": 2_500_000},
        "accounting": [{"busy_ns": 1, "window_ns": 4, "idle": [
            {"cause": "input", "share": 0.25}, {"cause": "input", "share": 0.25}, {"cause": "python", "share": 0.25},
        ]}],
        "findings": [{"rule": "input-bound", "saving_share": 0.4}],
        "together": {"share": 0.45},
        **changes,
    }  # fmt: skip


def test_numbers_of_a_report_and_of_a_jobs() -> None:
    expected = {
        "step_ms": 2.5,
        "busy_share": 0.25,
        "idle_share/input": 0.5,
        "idle_share/python": 0.25,
        "saving_share/input-bound": 0.4,
        "saving_share": 0.45,
    }
    late = {"rule": "late-rank", "saving_share": 0.1}

    assert numbers_of(report()) == expected
    assert numbers_of({"ranks": [report(), report()], "across_ranks": [late]}) == {
        **expected,
        "saving_share/late-rank": 0.1,
    }
    assert numbers_of(report(steps={}, accounting=[], findings=[], together=None)) == {}


def test_other_objects_are_refused() -> None:
    with pytest.raises(UsageError, match=r"not Logger"):
        log_diagnosis(type("Logger", (), {})())


def test_what_fails_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mlflow = ModuleType("mlflow")

    assert not log_diagnosis(mlflow, tmp_path / "none.json")  # nothing to diagnose
    assert not log_diagnosis(mlflow, EXAMPLE)  # a module that cannot log
    assert not log_diagnosis(None)  # such as wandb.run where no run was begun
    nothing, refused, no_run = capsys.readouterr().err.splitlines()
    assert nothing.startswith("stepscope: nothing is logged: ")
    assert no_run == "stepscope: nothing is logged: there is no run of a tracker here"
    assert refused.startswith("stepscope: the diagnosis was not logged to mlflow: ")


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="test", dir=str(tmp_path)) as run:
        assert log_diagnosis(run, EXAMPLE)
        assert run.summary[f"stepscope/{SAVED}"] > 0.9

    [record] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = record.read_bytes()
    assert f"stepscope-{run.id}".encode() in written
    assert b"report.html" in written


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install mlflow-skinny")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.create_experiment("test", artifact_location=(tmp_path / "artifacts").as_uri())
    mlflow.set_experiment("test")
    with mlflow.start_run() as run:
        assert log_diagnosis(mlflow, EXAMPLE)

    kept = mlflow.MlflowClient().get_run(run.info.run_id)
    assert kept.data.metrics[f"stepscope/{SAVED}"] > 0.9
    [page] = (tmp_path / "artifacts").glob("**/stepscope/report.html")
    assert b"stepscope" in page.read_bytes()


@pytest.mark.slow
def test_aim(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim", reason="Aim is not installed: pip install aim")
    run = aim.Run(repo=str(tmp_path), system_tracking_interval=None, capture_terminal_logs=False)

    assert log_diagnosis(run, EXAMPLE)

    assert run["stepscope"][SAVED.replace("/", ".")] > 0.9
    run.close()


def test_an_artifact_has_the_whole_report(tmp_path: Path) -> None:
    kept: dict[str, str] = {}

    def log_artifact(path: str, folder: str) -> None:
        kept[f"{folder}/{Path(path).name}"] = Path(path).read_text(encoding="utf-8")

    mlflow = ModuleType("mlflow")
    mlflow.__dict__.update(log_metrics=kept.update, log_artifact=log_artifact, active=SimpleNamespace())

    assert log_diagnosis(mlflow, EXAMPLE)
    assert json.loads(kept["stepscope/report.json"])["findings"][0]["rule"] == "loop-in-step"
    assert "<html" in kept["stepscope/report.html"]
