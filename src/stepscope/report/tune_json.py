"""What `stepscope tune` found, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from stepscope import __version__
from stepscope.capture.manifest import without_secrets
from stepscope.report.tune_sentences import command_line, how, outcome_sentence, outcome_words, remedies
from stepscope.tuning.tune import TuneResult
from stepscope.tuning.tune_trials import Trial

SCHEMA: Final = 1


def tune_json(result: TuneResult, command: Sequence[str]) -> dict[str, Any]:
    """The best, its proof and every trial; keys may be added within schema 1, never removed."""
    has_best = bool(result.best.settings)
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "command": without_secrets(command),
        "outcome": outcome_sentence(result),
        "is_proven": result.is_proven,
        "best": None
        if not has_best
        else {
            "settings": dict(result.best.settings),
            "apply": list(result.space.apply_words(result.best)),
            "arguments": list(result.space.arguments(result.best)),
            "variables": result.space.variables(result.best),
            "command_line": command_line(result, command),
            "remedies": [
                {"setting": shown, "source": knob.source, "why": knob.why, "code": code, "diff": diff}
                for knob, shown, code, diff in remedies(result)
            ],
        },
        "proof": None if result.proof is None else _trial(result, result.proof),
        "stop": result.stop,
        "seconds": result.seconds,
        "space": result.space.to_json(),
        "trials": [_trial(result, trial) for trial in result.trials],
        "how": list(how(result)),
    }


def _trial(result: TuneResult, trial: Trial) -> dict[str, Any]:
    measured = trial.measured
    return {
        "number": trial.number,
        "purpose": trial.proposal.purpose,
        "configuration": dict(trial.proposal.configuration.settings),
        "reference": dict(trial.proposal.reference.settings),
        "state": trial.state,
        "outcome": "" if trial.state == "running" else outcome_words(result, trial),
        "reason": trial.reason,
        "machine": trial.machine,
        "folder": trial.folder,
        "measured": None if measured is None else measured.to_json(),
    }
