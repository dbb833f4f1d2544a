"""What a sweep found, for programs: schema 1, to which keys may be added."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from stepscope import __version__
from stepscope.tuning.sweep_parameters import Parameter
from stepscope.tuning.sweep_results import SweepResults, SweepTrial

SCHEMA: Final = 1


def sweep_json(results: SweepResults) -> dict[str, Any]:
    """Everything as plain values: times in seconds, shares from 0 to 1, null for what is not known."""
    sweep, best = results.sweep, results.best
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "name": sweep.name,
        "command": sweep.command.shown,
        "program": sweep.command.program,
        "method": sweep.method,
        "metric": dataclasses.asdict(sweep.metric),
        "parameters": [_parameter(each) for each in sweep.parameters],
        "asked_trials": sweep.trials,
        "counts": {
            **{state: len(results.of_state(state)) for state in ("complete", "pruned", "failed", "running", "waiting")},
            "repeated": results.abandoned,
        },
        "best": None if best is None else _trial(best),
        "effects": [
            {
                "parameter": each.parameter.name,
                "importance": each.importance,
                "correlation": each.correlation,
                "trials": each.trials,
            }
            for each in results.effects
        ],
        "trials": [_trial(each) for each in results.trials],
        "warnings": list(sweep.warnings),
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    """What is said of it: what its distribution has nothing to do with is null."""
    content = parameter.to_json()
    normal, beta = "normal" in parameter.distribution, "beta" in parameter.distribution
    unused = {"mu": not normal, "sigma": not normal, "a": not beta, "b": not beta}
    for name in ("values", "probabilities"):
        unused[name] = not content[name]
    return {name: None if unused.get(name) else value for name, value in content.items()}


def _trial(trial: SweepTrial) -> dict[str, Any]:
    content = dataclasses.asdict(trial)
    content["values"] = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in trial.values.items()
    }
    return content
