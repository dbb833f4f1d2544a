"""What `stepscope bench` measured, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from stepscope import __version__
from stepscope.capture.bench import Bench, BenchRun
from stepscope.compare.comparison import Comparison
from stepscope.compare.warm_up import NAME as WARM_UP_RULE
from stepscope.report.comparison_json import comparison_report

SCHEMA: Final = 1


def bench_json(bench: Bench, profiled: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Every run with all its steps, and the comparisons; keys may be added within schema 1, never removed.

    Args:
        profiled: of the commands' profiles; what `stepscope compare --json` writes of them stands under "profile".
    """
    failure = bench.failure
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "folder": str(bench.folder),
        "stop": bench.stop,
        "failure": None
        if failure is None
        else {"label": failure.label, "round": failure.round, "sentence": failure.sentence},
        "rounds": bench.rounds,
        "seconds": bench.seconds,
        "settings": asdict(bench.settings),
        "warm_up": WARM_UP_RULE,
        "commands": [
            {
                "label": command.label,
                "command": replace(command, apply=()).shown,
                "apply": list(command.apply),
                "runs": [_run(run) for run in bench.runs_of(command.label)],
            }
            for command in bench.commands
        ],
        "comparisons": [{"label": command.label, **asdict(found)} for command, found in bench.comparisons()],
        "profile": comparison_report(profiled) if profiled else None,
    }


def _run(run: BenchRun) -> dict[str, Any]:
    return {
        "round": run.round,
        "step_ns": list(run.step_ns),
        "dropped": run.warm_up.dropped,
        "steady": run.warm_up.steady,
        "source": run.source,
        "clock": run.clock,
        "ranks": run.ranks,
        "complete": run.complete,
        "seconds": run.seconds,
        "other_cores": run.other_cores,
        "applied": [outcome.to_json() for outcome in run.applied],
    }
