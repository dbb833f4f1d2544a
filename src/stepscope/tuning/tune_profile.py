"""The baseline, recorded and diagnosed, so that the search begins with what its findings prescribe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.capture.bench import Bench, BenchSettings
from stepscope.capture.bench_profile import profile_commands
from stepscope.capture.bench_programs import BenchCommand
from stepscope.diagnosis import diagnose
from stepscope.diagnosis.diffs import Diffs, UserSource
from stepscope.diagnosis.finding import Finding
from stepscope.errors import TraceError
from stepscope.trace import Trace


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a profile of the program as it is tells.

    Attributes:
        trace: of the first rank; None where nothing was recorded.
        findings: the largest saving first.
        facts: what the program's process said of itself.
        ranks: of the program.
    """

    trace: Trace | None = None
    findings: tuple[Finding, ...] = ()
    facts: dict[str, Any] | None = None
    ranks: int = 1


def baseline_of(
    command: Sequence[str],
    words: Sequence[str],
    folder: Path,
    settings: BenchSettings,
    open_trace: Callable[[str], Trace],
    read: Callable[[str], UserSource | None],
    say: Callable[[str], None],
) -> Baseline:
    """Record a few steps of the program and diagnose them; what cannot be recorded is said, and the search goes on.

    Args:
        read: a source file that the trace names, for diffs; None where there is none that may be read.

    Raises:
        UsageError: the program cannot be started.
        KeyboardInterrupt: Ctrl-C came.
    """
    bench = Bench((BenchCommand("baseline", " ".join(command), tuple(words), {}),), settings, folder)
    run = profile_commands(bench, say).get("baseline")
    if run is None:
        say("so there are no findings to begin with, and the standard knobs are tried")
        return Baseline()
    recordings = [one for one in run.recordings() if one.get("trace")]
    try:
        trace = open_trace(str(run.latest_traces()[0]))
        findings = Diffs(read).filled(diagnose(trace)).findings
    except TraceError as error:
        say(f"the profile cannot be read, so there are no findings to begin with: {error}")
        return Baseline()
    facts = recordings[0].get("facts") if recordings else None
    ranks = max([int(one.get("world_size", 1)) for one in recordings], default=1)
    return Baseline(trace, tuple(findings), facts if isinstance(facts, dict) else None, ranks)
