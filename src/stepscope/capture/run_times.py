"""The step times that run folders hold, and what each run ran with: what `stepscope history` reads.

Cheapest first: `run.json` has the times of the steps around a recording, and of the recorded ones; a folder of
`stepscope bench` has a file of times; only the traces of `stepscope.profile` must be read for theirs, once: they are
kept beside them.

    <root>/<name>/trace-steps.json    times of the steps in the traces, by the traces' sizes and dates
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from stepscope.capture.batch_runs import NAME as BATCH_SIZES
from stepscope.capture.manifest import RunManifest
from stepscope.capture.run_folder import RunFolder, write_json
from stepscope.capture.runs import RunRecord
from stepscope.capture.step_times import Stretch, are_durations
from stepscope.compare.history import Source, TimedRun
from stepscope.errors import StepscopeError, UsageError
from stepscope.kept_json import readable, with_checksum

KEPT: Final = "trace-steps.json"
FEWEST_STEPS: Final = 3
"""A run of which fewer steps were timed does not count."""
_BENCH_FILES: Final = "steps-*.json"
_NUMBER: Final = re.compile(r"[-_.+=@]([0-9]+|(?=[a-f]*[0-9])[0-9a-f]{7,40})$", re.ASCII)
"""What tells the runs of a series apart: a number, a date and time, or a commit at the end of the name."""


def series_of(name: str) -> str:
    """The name without the numbers, dates and commits at its end: "train" of "train-20260102-120000" and "train-7"."""
    while found := _NUMBER.search(name):
        if not found.start():
            break
        name = name[: found.start()]
    return name


def timed_run(record: RunRecord, *, by_command: bool = False) -> TimedRun:
    """What a run's folder tells; where it cannot be read, the problem says why.

    Args:
        by_command: make the command the name of the series, instead of the run's name without its number.
    """
    try:
        return _timed_run(record, by_command=by_command)
    except StepscopeError as error:
        series = record.command if by_command else series_of(record.name)
        return TimedRun(record.name, series, "", record.started_unix_s, {}, {}, str(error))


def _timed_run(record: RunRecord, *, by_command: bool) -> TimedRun:
    if record.is_gone:
        raise UsageError("its folder is gone; stepscope runs remove takes it out of the list")
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
    """What a run ran with and on, each setting as text: the command, the commit, versions, variables, devices."""
    git = manifest.git if isinstance(manifest.git, dict) else {}
    commit = str(git.get("commit") or "")
    found = {
        "command": manifest.command_line,
        "git commit": commit[:12] + (" with changes" if commit and git.get("dirty") else ""),
        "device": ", ".join(_counted(manifest.devices)) or "none",
        "processes": str(max([1, *_world_sizes(manifest.recordings)])),
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


def _world_sizes(recordings: Iterable[object]) -> Iterator[int]:
    for one in recordings:
        size = one.get("world_size") if isinstance(one, Mapping) else None
        if type(size) is int:
            yield size


def _counted(names: tuple[str, ...]) -> Iterator[str]:
    for name in dict.fromkeys(map(str, names)):
        number = sum(str(each) == name for each in names)
        yield f"{number} x {name}" if number > 1 else name


def _flat(options: object) -> dict[str, Any]:
    """Options of the recording, those of what is recorded among them, without those that were left alone."""
    if not isinstance(options, Mapping):
        return {}
    inner = options.get("record")
    flat = {**options, **(inner if isinstance(inner, Mapping) else {})}
    return {name: value for name, value in flat.items() if name != "record" and value is not None}


def _step_times(folder: RunFolder, manifest: RunManifest) -> dict[Source, list[float]]:
    """Of the first rank that has any."""
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


def _stretches_of_first_rank(recordings: tuple[Any, ...]) -> list[Stretch]:
    """Of the first rank's process that has most steps: one that only evaluates, say, has fewer."""
    by_rank: dict[int, list[list[Stretch]]] = {}
    for one in recordings:
        if not isinstance(one, Mapping):
            continue
        times = one.get("step_times")
        parts = [part for each in times if (part := Stretch.from_json(each))] if isinstance(times, list) else []
        if parts:
            rank = one.get("rank")
            by_rank.setdefault(rank if type(rank) is int else 0, []).append(parts)
    if not by_rank:
        return []
    return max(by_rank[min(by_rank)], key=lambda parts: sum(len(part.durations_ns) for part in parts))


def _bench_times(folder: RunFolder) -> list[float]:
    """What `stepscope bench` noted in the first rank's folder."""
    for rank in folder.ranks():
        times = [_between_ends(path) for path in sorted((folder.path / f"rank{rank}").glob(_BENCH_FILES))]
        longest = max(times, key=len, default=[])
        if longest:
            return longest
    return []


def _between_ends(path: Path) -> list[float]:
    content = readable(path)
    ends = content.get("ends_ns")
    if not isinstance(ends, list) or not all(type(each) is int and abs(each) < 2**63 for each in ends):
        return []
    return [float(second - first) for first, second in pairwise(ends) if second >= first]


def _times_in_traces(folder: RunFolder) -> list[float]:
    """Of the complete steps in the first rank's traces; read once, then kept."""
    rank = next((rank for rank in folder.ranks() if folder.traces_of(rank)), None)
    if rank is None:
        return []
    traces = folder.traces_of(rank)
    state = [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in traces]
    kept = readable(folder.path / KEPT, only_whole=True)
    times = kept.get("ns")
    if kept.get("traces") == state and are_durations(times):
        return [float(each) for each in times]
    read = [ns for path in traces for ns in _steps_in(path)]
    with contextlib.suppress(UsageError):  # a folder that cannot be written is read anew each time
        write_json(folder.path / KEPT, with_checksum({"traces": state, "ns": read}))
    return [float(each) for each in read]


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
    return f"fewer than {FEWEST_STEPS} steps of it were timed" + ("" if folder.traces() else ", and it has no trace")
