"""One profiled run of each benched command, and where the difference between them comes from.

<folder>/<label>-profile/     a run folder, as `stepscope run` makes it
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping

from stepscope.capture.applying import applied_outcomes
from stepscope.capture.bench import LOG, Bench
from stepscope.capture.bench_programs import BenchCommand, run_logged
from stepscope.capture.bootstrap_plan import RunOptions
from stepscope.capture.launch import environment_of
from stepscope.capture.manifest import RunManifest
from stepscope.capture.run_folder import RunFolder
from stepscope.capture.run_settings import settings_of_run
from stepscope.compare import Comparison, Side, compare_sides
from stepscope.trace import Trace


def profile_commands(bench: Bench, say: Callable[[str], None]) -> dict[str, RunFolder]:
    """Record a few steps of each command, by its label; one of which nothing could be recorded is left out.

    Args:
        say: is told what begins, and what went wrong, a sentence each.

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
    settings = bench.settings
    options = RunOptions(
        exit_after=True, telemetry=False, quiet=settings.quiet, seed=settings.seed, apply=command.apply
    )
    manifest = RunManifest.begin(command.words, time.time(), options=options.to_json(), redact=False)
    folder = RunFolder.create(bench.folder, f"{command.label}-profile", manifest)
    end = run_logged(
        command.words,
        environment_of(folder, options, {**os.environ, **command.variables}),
        None if settings.show_output else folder.path / LOG,
        limit_s=settings.budget_s,
        is_done=lambda: _all_recorded(folder),
    )
    applied = [outcome.to_json() for outcome in applied_outcomes(options.apply, folder)]
    folder.write_manifest(manifest.ended(time.time(), end.exit_code, folder.recordings(), applied))
    return folder, end.exit_code


def _all_recorded(folder: RunFolder) -> bool:
    done = [one for one in folder.recordings() if one.get("trace")]
    return bool(done) and len(done) >= int(done[0].get("world_size", 1))


def explanations(
    bench: Bench, folders: Mapping[str, RunFolder], open_trace: Callable[[str], Trace]
) -> list[Comparison]:
    """Each profiled command against the first, by the steps that the bench timed and the times of the profiles.

    Args:
        folders: from `profile_commands`.
        open_trace: opens the trace at a path.

    Raises:
        TraceError: a trace cannot be read.
    """
    sides = [
        _side(bench, command, folders[command.label], open_trace)
        for command in bench.commands
        if command.label in folders
    ]
    if len(sides) < 2 or bench.commands[0].label not in folders:
        return []
    return compare_sides(sides[0], sides[1:], confidence=bench.settings.confidence(len(bench.commands)))


def _side(bench: Bench, command: BenchCommand, folder: RunFolder, open_trace: Callable[[str], Trace]) -> Side:
    def traces() -> Iterator[Trace]:
        for path in folder.latest_traces():
            yield open_trace(str(path))

    return Side(
        name=command.label,
        traces=traces(),
        settings={**command.variables, **settings_of_run(folder.manifest())},
        unprofiled=[run.steady_ns for run in bench.runs_of(command.label)],
    )
