"""Step times and settings in run folders, as read by `stepscope history`.

Cheapest source first: `run.json` has the times of recorded steps and of those around a recording; a folder of
`stepscope bench` has a file of times; traces of `stepscope.profile` must be read, but only once: their times are then
cached in `trace-steps.json`, with the traces' sizes and dates.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from stepscope.compare import Comparison, Side, compare_sides
from stepscope.compare.bench import Bench, BenchCommand, run_command
from stepscope.compare.history import Source, TimedRun
from stepscope.compare.statistics import warm_up
from stepscope.errors import StepscopeError, UsageError
from stepscope.files import readable, with_checksum
from stepscope.record.apply import applied_outcomes
from stepscope.record.counters import ConsecutiveSteps, are_durations
from stepscope.record.launch import NAME as BATCH_SIZES
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.run_process import RunOptions
from stepscope.record.runs import RunRecord
from stepscope.trace import Trace

KEPT: Final = "trace-steps.json"
FEWEST_STEPS: Final = 3  # a run with fewer timed steps does not count
_BENCH_FILES: Final = "steps-*.json"
_NUMBER: Final = re.compile(r"[-_.+=@]([0-9]+|(?=[a-f]*[0-9])[0-9a-f]{7,40})$", re.ASCII)
"""Suffix that distinguishes the runs of a series: a number, a date and time, or a commit."""


def series_of(name: str) -> str:
    """Name without trailing numbers, dates and commits: "train" for "train-20260102-120000" and "train-7"."""
    while found := _NUMBER.search(name):
        if not found.start():
            break
        name = name[: found.start()]
    return name


def timed_run(record: RunRecord, *, by_command: bool = False) -> TimedRun:
    """Read a run's folder; if it cannot be read, `problem` says why.

    Args:
        by_command: name the series after the command instead of the run's name without its number.
    """
    try:
        return _timed_run(record, by_command=by_command)
    except StepscopeError as error:
        series = record.command if by_command else series_of(record.name)
        return TimedRun(record.name, series, "", record.started_unix_s, {}, {}, str(error))


def _timed_run(record: RunRecord, *, by_command: bool) -> TimedRun:
    if record.is_gone:
        raise UsageError("its folder is gone; stepscope runs remove removes it from the list")
    folder = RunFolder.open(record.path)
    manifest = folder.manifest()
    steps: Mapping[Source, list[float]] = {}
    problem: str | None = None
    try:
        steps = _step_times(folder, manifest)
        problem = None if any(steps.values()) else _why_none(folder, manifest)
    except StepscopeError as error:
        problem = str(error)
    return TimedRun(
        name=record.name,
        series=manifest.command_line if by_command else series_of(record.name),
        place=str(manifest.folder or ""),
        started_unix_s=record.started_unix_s,
        steps_ns=steps,
        settings=settings_of(manifest),
        problem=problem,
    )


def settings_of(manifest: RunManifest) -> dict[str, str]:
    """Settings of a run as text: command, commit, versions, variables, devices."""
    git = manifest.git if isinstance(manifest.git, dict) else {}
    commit = str(git.get("commit") or "")
    devices = Counter(map(str, manifest.devices))
    sizes = [one.get("world_size") for one in manifest.recordings if isinstance(one, Mapping)]
    found = {
        "command": manifest.command_line,
        "git commit": commit[:12] + (" with changes" if commit and git.get("dirty") else ""),
        "device": ", ".join(f"{n} x {name}" if n > 1 else name for name, n in devices.items()) or "none",
        "processes": str(max([1, *(size for size in sizes if type(size) is int)])),
        "machine": str(manifest.host or ""),
    }
    for group, values in (
        ("version of", manifest.versions),
        ("variable", manifest.environment),
        ("system", manifest.system),
        ("option", _flat(manifest.options)),
    ):
        if isinstance(values, Mapping):
            found.update({f"{group} {name}": str(value) for name, value in sorted(values.items())})
    return {name: value for name, value in found.items() if value}


def _flat(options: object) -> dict[str, Any]:
    """Recording options with nested ones flattened, without those left at None."""
    if not isinstance(options, Mapping):
        return {}
    inner = options.get("record")
    flat = {**options, **(inner if isinstance(inner, Mapping) else {})}
    return {name: value for name, value in flat.items() if name != "record" and value is not None}


def _step_times(folder: RunFolder, manifest: RunManifest) -> dict[Source, list[float]]:
    if (folder.path / BATCH_SIZES).exists():
        raise UsageError("it ran its program once for each of several batch sizes")
    recordings = manifest.recordings or tuple(folder.recordings())
    stretches = _stretches_of_first_rank(recordings)
    found: dict[Source, list[float]] = {"unprofiled": [], "profiled": []}
    for stretch in stretches:
        found["profiled" if stretch.recorded else "unprofiled"] += stretch.durations_ns
    if not found["unprofiled"]:
        found["unprofiled"] = _bench_times(folder)
    if not any(found.values()):
        found["profiled"] = _times_in_traces(folder)
    return {source: times for source, times in found.items() if len(times) >= FEWEST_STEPS}


def _stretches_of_first_rank(recordings: tuple[Any, ...]) -> list[ConsecutiveSteps]:
    """Stretches of the first rank's process with the most steps: a process that only evaluates has fewer."""
    by_rank: dict[int, list[list[ConsecutiveSteps]]] = {}
    for one in recordings:
        times = one.get("step_times") if isinstance(one, Mapping) else None
        parts = (
            [part for each in times if (part := ConsecutiveSteps.from_json(each))] if isinstance(times, list) else []
        )
        if parts:
            rank = one.get("rank")
            by_rank.setdefault(rank if type(rank) is int else 0, []).append(parts)
    of_first = by_rank[min(by_rank)] if by_rank else [[]]
    return max(of_first, key=lambda parts: sum(len(part.durations_ns) for part in parts))


def _bench_times(folder: RunFolder) -> list[float]:
    for rank in folder.ranks():
        paths = sorted((folder.path / f"rank{rank}").glob(_BENCH_FILES))
        if longest := max(map(_between_ends, paths), key=len, default=[]):
            return longest
    return []


def _between_ends(path: Path) -> list[float]:
    content = readable(path)
    ends = content.get("ends_ns")
    if not isinstance(ends, list) or not all(type(each) is int and abs(each) < 2**63 for each in ends):
        return []
    return [float(second - first) for first, second in pairwise(ends) if second >= first]


def _times_in_traces(folder: RunFolder) -> list[float]:
    """Complete steps in the first rank's traces; read once, then cached."""
    traces = next((found for rank in folder.ranks() if (found := folder.traces_of(rank))), [])
    if not traces:
        return []
    state = [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in traces]
    kept = readable(folder.path / KEPT, only_whole=True)
    times = kept.get("ns")
    if kept.get("traces") != state or not are_durations(times):
        times = [ns for path in traces for ns in _steps_in(path)]
        with contextlib.suppress(UsageError):  # a read-only folder is read anew each time
            write_json(folder.path / KEPT, with_checksum({"traces": state, "ns": times}))
    return [float(each) for each in times]


def _steps_in(path: Path) -> list[int]:
    import polars as pl

    from stepscope.analysis.steps import step_table
    from stepscope.readers import open_trace
    from stepscope.trace.cache import TraceCache

    steps = step_table(open_trace(path, cache=TraceCache()))
    return [int(each) for each in steps.filter(pl.col("complete"))["duration_ns"]]


def _why_none(folder: RunFolder, manifest: RunManifest) -> str:
    said = (one.get("problem") for one in manifest.recordings if isinstance(one, Mapping))
    problem = next(filter(None, said), None)
    if problem is not None:
        return str(problem)
    if manifest.ended_unix_s is None:
        return "it is still running, or was cut off before it left any step times"
    if manifest.exit_code:
        return f"its program ended with exit code {manifest.exit_code} before any step was timed"
    return f"fewer than {FEWEST_STEPS} of its steps were timed" + ("" if folder.traces() else ", and it has no trace")


def settings_of_run(manifest: RunManifest) -> dict[str, str]:
    """Settings of a run by name, with each command option on its own and the uncommitted changes."""
    found = settings_of(manifest)
    found.pop("command", None)
    git = manifest.git if isinstance(manifest.git, dict) else {}
    changes = git.get("changes")
    if isinstance(changes, str) and changes:
        found["git changes"] = changes
    return {**options_of(manifest.command), **found}


def options_of(command: Sequence[str]) -> dict[str, str]:
    """Words of a command by option; the program and words without an option are under "command".

    A word after an option counts as its value unless it looks like an option itself.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in command:
        if word.startswith("-") and word.lstrip("-")[:1].isalpha():
            option, equals, value = word.partition("=")
            found.setdefault(f"option {option}", []).append(value if equals else "given")
            name = "" if equals else f"option {option}"
            continue
        if name:
            found[name][-1] = word
            name = ""
        else:
            found.setdefault("command", []).append(word)
    return {option: " ".join(words) for option, words in found.items()}


def unprofiled_steps(folder: RunFolder) -> list[list[float]]:
    """Steady steps timed around the recording, nanoseconds each, as one run; [] if there are none."""
    manifest = folder.manifest()
    record = RunRecord(folder.path, folder.name, manifest.command_line, manifest.started_unix_s, None, None, 0)
    steps = list(timed_run(record).steps_ns.get("unprofiled", ()))
    steady = steps[warm_up(steps).dropped :]
    return [steady] if steady else []


def profile_commands(bench: Bench, say: Callable[[str], None]) -> dict[str, RunFolder]:
    """Record a few steps of each command, by label, leaving out commands without a recording.

    Args:
        say: receives progress and problems, one sentence each.

    Raises:
        UsageError: a program cannot be started.
    """
    folders = {}
    for command in bench.commands:
        say(f"profiling {command.label}")
        folder, exit_code = _profile(bench, command)
        if folder.traces():
            folders[command.label] = folder
            continue
        problem = next((one["problem"] for one in folder.recordings() if one.get("problem")), None)
        say(f"{command.label} was not profiled: {problem or f'the program ended with exit code {exit_code}'}")
    return folders


def _profile(bench: Bench, command: BenchCommand) -> tuple[RunFolder, int]:
    quiet, seed = bench.settings.quiet, bench.settings.seed
    options = RunOptions(exit_after=True, telemetry=False, quiet=quiet, seed=seed, apply=command.apply)

    def all_recorded(folder: RunFolder) -> bool:
        done = [one for one in folder.recordings() if one.get("trace")]
        return bool(done) and len(done) >= int(done[0].get("world_size", 1))

    folder, manifest, end = run_command(bench, command, "profile", options, all_recorded)
    applied = [outcome.to_json() for outcome in applied_outcomes(options.apply, folder)]
    folder.write_manifest(manifest.ended(time.time(), end.exit_code, folder.recordings(), applied))
    return folder, end.exit_code


def explanations(
    bench: Bench, folders: Mapping[str, RunFolder], open_trace: Callable[[str], Trace]
) -> list[Comparison]:
    """Compare each profiled command with the first, by the benchmark's steps and the profiles' times.

    Args:
        folders: from `profile_commands`.

    Raises:
        TraceError: a trace cannot be read.
    """
    sides = [
        Side(
            name=command.label,
            traces=map(open_trace, map(str, folders[command.label].latest_traces())),
            settings={**command.variables, **settings_of_run(folders[command.label].manifest())},
            unprofiled=[run.steady_ns for run in bench.runs_of(command.label)],
        )
        for command in bench.commands
        if command.label in folders
    ]
    if len(sides) < 2 or bench.commands[0].label not in folders:
        return []
    return compare_sides(sides[0], sides[1:], confidence=bench.settings.confidence(len(bench.commands)))
