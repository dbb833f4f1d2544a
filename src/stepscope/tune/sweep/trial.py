"""One running trial of a sweep: its folder, its environment, its metric values, and how it is ended.

    <folder>/trial-0007/run.json          the run folder that the program's telemetry goes to
    <folder>/trial-0007/parameters.json   the values it was given
    <folder>/trial-0007/output.log        what it printed
    <folder>/trial-0007/values.jsonl      the values of the metric: iteration, step, value
    <folder>/trial-0007/result.json       how it ended

A trial's values of the metric are counted from 1 in order of arrival: that number is its iteration, whatever the
program calls its steps, as W&B counts for its Hyperband.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stepscope.compare.bench import end_programs, last_lines
from stepscope.errors import UsageError
from stepscope.files import private_file, whole_file
from stepscope.record.launch import command_of, environment_of
from stepscope.record.manifest import RunManifest, without_secrets
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.run_process import RunOptions
from stepscope.tune.sweep.file import Metric, Sweep, nested

LOG: Final = "output.log"
PARAMETERS: Final = "parameters.json"
RESULT: Final = "result.json"
VALUES: Final = "values.jsonl"
_WANDB: Final = "wandb-config.yaml"
_ENERGY_STEPS: Final = 5
_MOST_NAMES: Final = 8
_MOST_BYTES: Final = 4 << 20
"""Bytes of a log read at once; the rest is read at the next look."""
_LONGEST_LINE: Final = 4096
_MOST_KEPT: Final = 10_000
"""Most values kept for the plot of a trial; beyond that, every second one is dropped."""
_NUMBER: Final = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?nan|[-+]?inf(?:inity)?"
_ENDS: Final = re.compile(rb"[\r\n]")
_SOURCES: Final = ("log", "throughput", "optimizer", "gradient", "activation")
"""Sources in order of preference for series of the same name."""
_NEW: Final = """
SELECT samples.rowid, step, value FROM samples
WHERE series = ? AND samples.rowid > ? AND value IS NOT NULL ORDER BY samples.rowid LIMIT 100000"""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the metric; `step` is the program's own count, None if it reports none."""

    value: float
    step: int | None = None


@dataclass
class Values:
    """The values of a trial so far; last and best are exact however many there are.

    Attributes:
        kept: [iteration, step, value] of a sample for plots.
        count: number of all values.
        last, best: None without values. `best` is NaN only if all values are.
        total: sum of all values.
    """

    metric: Metric
    kept: list[tuple[int, int | None, float]] = field(default_factory=list)
    count: int = 0
    last: float | None = None
    best: float | None = None
    total: float = 0.0
    _every: int = 1

    def add(self, value: Value) -> None:
        self.count += 1
        self.last = value.value
        self.total += value.value
        if self.best is None or math.isnan(self.best) or self.metric.better(value.value, self.best):
            self.best = value.value
        if (self.count - 1) % self._every == 0:
            self.kept.append((self.count, value.step, value.value))
        if len(self.kept) >= _MOST_KEPT:
            self.kept = self.kept[::2]
            self._every *= 2

    @property
    def result(self) -> float | None:
        """The value that counts, by the metric's `use`; None without any."""
        if not self.count:
            return None
        return {"last": self.last, "best": self.best, "mean": self.total / self.count}[self.metric.use]


class MetricReader:
    """Reads the values of a running trial's metric as they arrive."""

    def __init__(self, metric: Metric, folder: Path, log: Path) -> None:
        self.metric = metric
        readers: dict[str, _Printed | _Logged] = {}
        if metric.source in ("auto", "log"):
            readers["log"] = _Logged(metric.name, folder)
        if metric.source in ("auto", "stdout"):
            readers["stdout"] = _Printed(metric, log)
        self._readers = readers
        self._folder = folder
        self._waiting: dict[str, list[Value]] = {name: [] for name in readers}
        self._chosen: str | None = next(iter(readers)) if len(readers) == 1 else None

    def new(self, *, is_over: bool = False) -> list[Value]:
        """The values since the last call.

        What the program logs has priority over what it prints: while it runs it may print before it has logged, so with
        two sources one is chosen only once logged values exist, or when it has ended (`is_over`) without any.
        """
        if self.metric.source == "measure":
            return _measured(self.metric.name, self._folder) if is_over else []
        for name, reader in self._readers.items():
            if self._chosen in (None, name):
                self._waiting[name] += reader.new(is_over=is_over)
        if self._chosen is None:
            if self._waiting["log"]:
                self._chosen = "log"
            elif is_over or len(self._waiting["stdout"]) >= _ENOUGH or not self._may_log():
                self._chosen = "stdout" if self._waiting["stdout"] else None
        if self._chosen is None:
            return []
        found, self._waiting[self._chosen] = self._waiting[self._chosen], []
        return found

    def _may_log(self) -> bool:
        return next(self._folder.glob("rank*/telemetry"), None) is not None


_ENOUGH: Final = 5
"""After this many printed values, none is expected to be logged."""


class _Printed:
    """Values in a program's output: by a pattern, from lines of JSON, or as "name: value" or "name=value"."""

    def __init__(self, metric: Metric, log: Path) -> None:
        self._log = log
        self._name = metric.name
        self._own = metric.pattern is not None
        name = re.escape(metric.name)
        text = metric.pattern or rf"(?<![\w./-])[\"']?{name}[\"']?\s*[:=]\s*({_NUMBER})(?![\w])"
        self._pattern = re.compile(text, 0 if self._own else re.IGNORECASE)
        self._read = 0
        self._rest = b""

    def new(self, *, is_over: bool) -> list[Value]:
        """Values in the lines written since the last call; at the end also in an unfinished line."""
        found: list[Value] = []
        while True:
            try:
                with self._log.open("rb") as file:
                    file.seek(self._read)
                    data = file.read(_MOST_BYTES)
            except OSError:
                return found
            self._read += len(data)
            *lines, self._rest = _ENDS.split(self._rest + data)
            if is_over and len(data) < _MOST_BYTES:
                lines.append(self._rest)
                self._rest = b""
            self._rest = self._rest[-_LONGEST_LINE * 4 :]
            for line in lines:
                found += self._of_line(line[:_LONGEST_LINE].decode("utf-8", "replace"))
            if len(data) < _MOST_BYTES or not is_over:
                return found

    def _of_line(self, line: str) -> Iterator[Value]:
        if not self._own and line.lstrip().startswith("{"):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                value = number_of(content.get(self._name))
                if value is not None:
                    yield Value(value, _step_of(content))
                return
        for match in self._pattern.finditer(line):
            value = number_of(match[match.lastindex or 1] if self._own else match[1])
            if value is not None:
                yield Value(value)


class _Logged:
    """Values in the program's telemetry: of its lowest rank, of the first process that has the metric."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._file: Path | None = None
        self._series: int | None = None
        self._row = 0

    def new(self, *, is_over: bool) -> list[Value]:
        files = [self._file] if self._file else sorted(self._folder.glob("rank*/telemetry/*.sqlite"), key=_by_rank)
        for file in files:
            try:
                with contextlib.closing(
                    sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=1)
                ) as database:
                    database.text_factory = lambda text: text.decode("utf-8", "replace")
                    found = self._of_file(database)
            except sqlite3.Error:  # incomplete or damaged: retried next time
                continue
            if self._series is not None:
                self._file = file
                return found
        return []

    def _of_file(self, database: sqlite3.Connection) -> list[Value]:
        if self._series is None:
            rows = database.execute("SELECT id, source FROM series WHERE name = ?", (self._name,)).fetchall()
            known = [(_SOURCES.index(source), number) for number, source in rows if source in _SOURCES]
            if not known:
                return []
            self._series = min(known)[1]
        found = []
        for row, step, value in database.execute(_NEW, (self._series, self._row)):
            self._row = row
            number = number_of(value)
            if number is not None:
                found.append(Value(number, step if type(step) is int else None))
        return found


def number_of(value: Any) -> float | None:
    """The value as a number, including NaN and infinities; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _by_rank(path: Path) -> tuple[int, str]:
    rank = path.parts[-3].removeprefix("rank")
    return (int(rank) if rank.isdecimal() else sys.maxsize, path.name)


def _step_of(content: dict[str, Any]) -> int | None:
    found = (content.get(name) for name in ("step", "global_step", "iteration", "epoch"))
    return next((each for each in found if type(each) is int), None)


def _measured(name: str, folder: Path) -> list[Value]:
    """The mean over the steps that stepscope timed after their warm-up, or the mean energy of a step."""
    if name == "step_ms":
        from itertools import pairwise

        from stepscope.compare.bench import job_ends_ns, read_records
        from stepscope.compare.statistics import warm_up

        step_ns = [second - first for first, second in pairwise(job_ends_ns(read_records(RunFolder(folder))))]
        steady = step_ns[warm_up(step_ns).dropped :] if step_ns else []
        return [Value(sum(steady) / len(steady) / 1e6)] if steady else []
    from stepscope.trace.energy_records import step_energies

    energies = step_energies([RunFolder(folder).recordings()])
    kinds = [runs[0] for runs in energies.values() if runs[0]]
    return [Value(sum(sum(windows) / len(windows) for windows in kinds))] if kinds else []


class TrialProgram:
    """The program of one trial, from its start to its end.

    Attributes:
        folder: the trial's own.
        seen: the values of the metric.
        is_pruned: whether it was ended because others were better.

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
        """(iteration, value to compare the trial by) since the last look; empty once its end has begun."""
        if self._ending is not None:
            return []
        is_over = self.has_ended  # checked first, so that everything it wrote before its end is read
        found = []
        for value in self._reader.new(is_over=is_over):
            self.seen.add(value)
            found.append((self.seen.count, self._compared(value.value)))
        if is_over:
            self.end()
        return found

    def end(self) -> None:
        """Begin to end the program and all its children: SIGINT, then SIGTERM, then SIGKILL; returns at once."""
        if self._ending is None:
            self._ending = threading.Thread(target=self._end, daemon=True)
            self._ending.start()

    @property
    def has_ended(self) -> bool:
        """Whether the program itself has ended; its children may still run."""
        return self._child.poll() is not None

    @property
    def is_over(self) -> bool:
        return self._ending is not None and not self._ending.is_alive()

    def wait(self) -> None:
        if self._ending is not None:
            self._ending.join()

    def failure(self) -> str | None:
        """Why there is no value, after its end; None if there is one."""
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
            return f"it gave no {name}{self._logged_instead()}"
        if not math.isfinite(result):
            return f"its {name} is {result}"
        return None

    def keep(self, state: str, reason: str | None) -> None:
        """Write the result into its folder. Raises UsageError if that cannot be written."""
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
        """The value itself or the best so far, as `early_terminate` says; for Hyperband the one that `use` selects."""
        early, best, result = self._sweep.early, self.seen.best, self.seen.result
        assert best is not None
        assert result is not None
        if self._sweep.method == "hyperband" or early is None:
            return result
        return value if early.strict else best

    def _end(self) -> None:
        end_programs(self._child, str(self.folder))
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):  # for children that removed the run folder from their environment
                os.killpg(self._child.pid, signal.SIGKILL)

    def _logged_instead(self) -> str:
        """What was logged instead, so that a wrong name can be corrected."""
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
    """End the running program of a trial whose stepscope process is gone."""
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
                start_new_session=True,  # Ctrl-C goes to stepscope alone, which ends the program in its own way
            )
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}") from error


def _environment(place: RunFolder, sweep: Sweep) -> dict[str, str]:
    """The program's environment, besides the variables of its command."""
    if sweep.metric.source == "measure":
        options = RunOptions(steps=_ENERGY_STEPS, telemetry=False, energy=True, exit_after=True)
        if sweep.metric.name == "step_ms":
            options = RunOptions(steps=sweep.steps, telemetry=False, measure=True)
        return environment_of(place, options, os.environ)
    return {
        **environment_of(place, RunOptions(trackers=True), os.environ),
        "PYTHONUNBUFFERED": os.environ.get(
            "PYTHONUNBUFFERED", "1"
        ),  # otherwise its output is buffered in blocks of 8 KiB
        "WANDB_SWEEP_PARAM_PATH": str(place.path / _WANDB),
    }


def _logged_names(folder: Path) -> list[str]:
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
    return f"{name} (often for lack of memory)" if name == "SIGKILL" else name
