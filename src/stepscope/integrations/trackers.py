"""Log a diagnosis beside a run of Weights & Biases, MLflow or Aim:

log_diagnosis(wandb.run)  # or mlflow, or an aim.Run
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from stepscope.errors import StepscopeError, UsageError

__all__ = ["log_diagnosis", "numbers_of"]

_MOST_SECONDS: Final = 600.0
_PREFIX: Final = "stepscope"


def log_diagnosis(tracker: Any, trace: str | os.PathLike[str] = "latest") -> bool:
    """Log the numbers of a diagnosis, and its page as a file, to a run of an experiment tracker.

    The numbers, those of `numbers_of`, go into the summary of a run of Weights & Biases, the metrics of MLflow's active
    run, or the parameters of an Aim run; the page becomes an artifact (for Aim, the report as text). Traces are
    diagnosed in a process of their own. What cannot be logged is said in one line, and nothing is raised.

    Args:
        tracker: `wandb.run`, the module `mlflow`, or an `aim.Run`.
        trace: a trace, a folder of ranks, or a run's name; by default the latest run of `stepscope run` or
            `stepscope.profile`.

    Returns:
        Whether it was logged.

    Raises:
        UsageError: the tracker is another object than these, or the trace's name is none.
    """
    if tracker is None:  # as wandb.run is on all but one rank
        print("stepscope: nothing is logged: there is no run of a tracker here", file=sys.stderr)
        return False
    kind = tracker.__name__ if isinstance(tracker, type(sys)) else type(tracker).__module__.partition(".")[0]
    log = _TRACKERS.get(kind)
    if log is None:
        raise UsageError(
            f"log_diagnosis takes wandb.run, the module mlflow or an aim.Run, not {type(tracker).__name__}"
        )
    if os.fspath(trace)[:1] in ("", "-"):
        raise UsageError(f"{os.fspath(trace)!r} names no trace")
    try:
        with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
            report = _diagnosed(os.fspath(trace), Path(folder))
            log(tracker, numbers_of(report), Path(folder))
    except StepscopeError as error:
        print(f"stepscope: nothing is logged: {error}", file=sys.stderr)
        return False
    except Exception as error:  # noqa: BLE001 - of the tracker, which may be offline, full or closed
        print(f"stepscope: the diagnosis was not logged to {kind}: {error}", file=sys.stderr)
        return False
    return True


def numbers_of(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a JSON report that are worth a column among runs, by name.

    `step_ms`; `idle_share/CAUSE` and `busy_share` of the first device's steps; `saving_share` of all findings together
    and `saving_share/RULE` of each. Of several ranks, those of the first one, and the findings about all of them.
    """
    first = report["ranks"][0] if "ranks" in report else report
    found: dict[str, float] = {}
    step_ns = first["steps"].get("step_ns")
    if step_ns is not None:
        found["step_ms"] = step_ns / 1e6
    if first["accounting"]:
        accounting = first["accounting"][0]
        found["busy_share"] = accounting["busy_ns"] / max(accounting["window_ns"], 1)
        for piece in accounting["idle"]:
            name = f"idle_share/{piece['cause']}"
            found[name] = found.get(name, 0.0) + piece["share"]
    for finding in [*report.get("across_ranks", []), *first["findings"]]:
        name = f"saving_share/{finding['rule']}"
        found[name] = max(found.get(name, 0.0), finding["saving_share"])
    if first["together"]:
        found["saving_share"] = first["together"]["share"]
    return found


def _diagnosed(trace: str, folder: Path) -> dict[str, Any]:
    """Write report.json, report.html and report.md into a folder, and return the first.

    Raises:
        UsageError: the trace cannot be diagnosed, or that takes too long.
    """
    files = [f"--{form}={folder / f'report.{ending}'}" for form, ending in (("json", "json"), ("html", "html"))]
    command = [sys.executable, "-m", "stepscope", "diagnose", trace, "--quiet", *files]
    command.append(f"--markdown={folder / 'report.md'}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"the diagnosis took more than {_MOST_SECONDS:g} s") from error
    if done.returncode not in (0, 1):
        said = done.stderr.strip().splitlines()
        raise UsageError(said[-1].removeprefix("stepscope: ") if said else "the diagnosis failed")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def _to_wandb(run: Any, numbers: Mapping[str, float], folder: Path) -> None:
    run.summary.update({f"{_PREFIX}/{name}": value for name, value in numbers.items()})
    artifact = import_module("wandb").Artifact(f"{_PREFIX}-{run.id}", type="diagnosis")
    for name in ("report.html", "report.json"):
        artifact.add_file(str(folder / name))
    run.log_artifact(artifact)


def _to_mlflow(mlflow: Any, numbers: Mapping[str, float], folder: Path) -> None:
    mlflow.log_metrics({f"{_PREFIX}/{name}": value for name, value in numbers.items()})
    for name in ("report.html", "report.json"):
        mlflow.log_artifact(str(folder / name), _PREFIX)


def _to_aim(run: Any, numbers: Mapping[str, float], folder: Path) -> None:
    run[_PREFIX] = {name.replace("/", "."): value for name, value in numbers.items()}
    run.track(import_module("aim").Text((folder / "report.md").read_text(encoding="utf-8")), name=_PREFIX)


_TRACKERS: Final[dict[str, Callable[[Any, Mapping[str, float], Path], None]]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "aim": _to_aim,
}
