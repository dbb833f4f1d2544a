"""One trial of a sweep as a program that runs: its folder, its environment, its values, and how it is ended.

<folder>/trial-0007/run.json          the run folder that the program's telemetry goes to
<folder>/trial-0007/parameters.json   the values it was given
<folder>/trial-0007/output.log        what it printed
<folder>/trial-0007/values.jsonl      the values of the metric: iteration, step, value
<folder>/trial-0007/result.json       how it ended
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stepscope.compare.bench_programs import end_programs, last_lines
from stepscope.errors import UsageError
from stepscope.files import private_file, whole_file
from stepscope.record.launch import command_of, environment_of
from stepscope.record.manifest import RunManifest, without_secrets
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.run_process import RunOptions
from stepscope.tune.sweep.command import nested
from stepscope.tune.sweep.file import Sweep
from stepscope.tune.sweep.metrics import MetricReader, Values

LOG: Final = "output.log"
PARAMETERS: Final = "parameters.json"
RESULT: Final = "result.json"
VALUES: Final = "values.jsonl"
_WANDB: Final = "wandb-config.yaml"
_ENERGY_STEPS: Final = 5
_MOST_NAMES: Final = 8


class TrialProgram:
    """The program of one trial, from its start to its end.

    Attributes:
        folder: the trial's own.
        seen: the values of the metric.
        is_pruned: whether it is ended because others were better.

    Raises:
        UsageError: it cannot be started, or the folder cannot be written.
    """

    def __init__(self, sweep: Sweep, root: Path, number: int, values: Mapping[str, Any], devices: str | None) -> None:
        self._sweep = sweep
        self.begun_s = time.monotonic()
        self.seen = Values(sweep.metric)
        place = RunFolder.create(root, None, RunManifest((), None), suggestion=f"trial-{number:04d}")
        self.folder = place.path
        json_file = self.folder / PARAMETERS
        write_json(json_file, nested(values))
        words, variables = sweep.command.filled(values, json_file)
        words = command_of(words)
        place.write_manifest(RunManifest(tuple(without_secrets(words)), os.getcwd(), started_unix_s=time.time()))
        write_json(self.folder / _WANDB, {"wandb_version": 1, **{n: {"value": v} for n, v in nested(values).items()}})
        environment = _environment(place, sweep) | variables
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        self.log = self.folder / LOG
        self._reader = MetricReader(sweep.metric, self.folder, self.log)
        self._child = _started(words, environment, self.log)
        self._ending: threading.Thread | None = None
        self.is_pruned = False

    def look(self) -> list[tuple[int, float]]:
        """What the trial is compared by at each iteration since the last look; none once its end has begun."""
        if self._ending is not None:
            return []
        is_over = self.has_ended  # asked first: what it wrote until its end is then all there
        found = []
        for value in self._reader.new(is_over=is_over):
            self.seen.add(value)
            found.append((self.seen.count, self._compared(value.value)))
        if is_over:
            self.end()
        return found

    def end(self) -> None:
        """Begin to end it with all that it started: SIGINT, then SIGTERM, then SIGKILL; returns at once."""
        if self._ending is None:
            self._ending = threading.Thread(target=self._end, daemon=True)
            self._ending.start()

    @property
    def has_ended(self) -> bool:
        """Whether the program itself has ended; what it started may still run."""
        return self._child.poll() is not None

    @property
    def is_over(self) -> bool:
        return self._ending is not None and not self._ending.is_alive()

    def wait(self) -> None:
        if self._ending is not None:
            self._ending.join()

    def failure(self) -> str | None:
        """Why there is no value, after its end; None where there is one."""
        code = self._child.wait()
        name = self._sweep.metric.name
        if self._sweep.metric.source == "measure" and self.seen.count:
            return None  # it was ended after its steps
        if code:
            how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            last = last_lines(self.log, 1)
            return f"it ended with {how}" + (f": {last[-1]}" if last else "")
        result = self.seen.result
        if result is None:
            return f"it gave no {name}{self._what_it_gave()}"
        if not math.isfinite(result):
            return f"its {name} is {result}"
        return None

    def keep(self, state: str, reason: str | None) -> None:
        """Write how it went into its folder. Raises UsageError where that cannot be written."""
        result = {
            "state": state,
            "metric": self._sweep.metric.name,
            "value": self.seen.result if state == "complete" else None,
            "iterations": self.seen.count,
            "seconds": time.monotonic() - self.begun_s,
            "exit_code": self._child.poll(),
            "reason": reason,
        }
        lines = [
            json.dumps({"iteration": iteration, "step": step, "value": value if value == value else None})
            for iteration, step, value in self.seen.kept
        ]
        try:
            with whole_file(self.folder / VALUES, private=True) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            raise UsageError(f"{self.folder / VALUES} cannot be written: {error.strerror}") from error
        write_json(self.folder / RESULT, result)

    def _compared(self, value: float) -> float:
        """The value itself or the best so far, as `early_terminate` has it; for Hyperband what counts of the values."""
        early, best, result = self._sweep.early, self.seen.best, self.seen.result
        assert best is not None
        assert result is not None
        if self._sweep.method == "hyperband" or early is None:
            return result
        return value if early.strict else best

    def _end(self) -> None:
        end_programs(self._child, str(self.folder))
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):  # what took the run folder out of its environment
                os.killpg(self._child.pid, signal.SIGKILL)

    def _what_it_gave(self) -> str:
        """What was logged instead, so that a wrong name can be mended."""
        source = self._sweep.metric.source
        if source == "measure":
            return ": no step of it could be seen" if self._sweep.metric.name == "step_ms" else ", for want of counters"
        names = _logged_names(self.folder)
        if names:
            shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
            return f"; it logged {shown}"
        if source == "stdout":
            return ": no line of its output has it"
        return ": neither did it log it by stepscope.log, nor print it as name: value"


def end_left_over(folder: Path) -> None:
    """End what still runs of a trial whose process of stepscope is gone."""
    gone = subprocess.Popen(["true"], stdin=subprocess.DEVNULL) if os.name == "posix" else None
    if gone is not None:
        gone.wait()
        end_programs(gone, str(folder))


def _started(words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    try:
        with private_file(log).open("wb") as output:
            return subprocess.Popen(
                words,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to stepscope alone, which ends the program in its own way
            )
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from error


def _environment(place: RunFolder, sweep: Sweep) -> dict[str, str]:
    """What the program finds in its environment, besides the variables of its command."""
    if sweep.metric.source == "measure":
        options = RunOptions(steps=_ENERGY_STEPS, telemetry=False, energy=True, exit_after=True)
        if sweep.metric.name == "step_ms":
            options = RunOptions(steps=sweep.steps, telemetry=False, measure=True)
        return environment_of(place, options, os.environ)
    return {
        **environment_of(place, RunOptions(trackers=True), os.environ),
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),  # else what it prints comes in pieces of 8 KiB
        "WANDB_SWEEP_PARAM_PATH": str(place.path / _WANDB),
    }


def _logged_names(folder: Path) -> list[str]:
    import sqlite3

    names = set()
    for file in sorted(folder.glob("rank*/telemetry/*.sqlite")):
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as database,
        ):
            rows = database.execute("SELECT name FROM series WHERE source IN ('log', 'throughput') LIMIT 100")
            names |= {str(name) for (name,) in rows}
    return sorted(names)


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    return f"{name} (often for want of memory)" if name == "SIGKILL" else name
