"""What a run's folder adds to its traces when runs are compared: settings, and steps timed without the profiler."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.capture.manifest import RunManifest
from stepscope.capture.run_folder import RunFolder
from stepscope.capture.run_times import settings_of, timed_run
from stepscope.capture.runs import RunRecord
from stepscope.compare.warm_up import warm_up


def settings_of_run(manifest: RunManifest) -> dict[str, str]:
    """What a run ran with and on, by name; the command's options each by itself, and what was not committed."""
    found = settings_of(manifest)
    found.pop("command", None)
    git = manifest.git if isinstance(manifest.git, dict) else {}
    changes = git.get("changes")
    if isinstance(changes, str) and changes:
        found["git changes"] = changes
    return {**options_of(manifest.command), **found}


def options_of(command: Sequence[str]) -> dict[str, str]:
    """A command's words by the option they belong to; the program and what belongs to none as "command".

    A word after an option is taken for its value unless it looks like an option itself.
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
    """The steady steps that were timed around the recording, nanoseconds each, as of one run; none where none were."""
    manifest = folder.manifest()
    record = RunRecord(folder.path, folder.name, manifest.command_line, manifest.started_unix_s, None, None, 0)
    steps = list(timed_run(record).steps_ns.get("unprofiled", ()))
    steady = steps[warm_up(steps).dropped :]
    return [steady] if steady else []
