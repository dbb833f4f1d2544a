"""A sweep: the program and its hyperparameters, the metric, and the search method.

`read_sweep` takes W&B's sweep files as they are, and a shorter form of its own:

    command: python train.py --lr {lr} --width {width}
    metric: val_loss
    method: tpe
    trials: 30
    parameters:
      lr: {min: 1e-5, max: 1e-1, log: true}
      width: [64, 128, 256]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from stepscope.errors import UsageError
from stepscope.tune.sweep.command import Command, parse_command, read_yaml
from stepscope.tune.sweep.parameters import Parameter, check_keys, checked, parse_parameters

METHODS: Final = ("grid", "random", "tpe", "hyperband")
MEASURED: Final = ("step_ms", "step_energy_j")
"""Metrics that stepscope itself measures."""
TRIALS: Final = 30
"""Number of trials if neither the file nor the user limits their number or the time."""
_MEANINGLESS: Final = {
    "entity": "nothing is sent to W&B",
    "project": "nothing is sent to W&B",
    "apiVersion": "it is about W&B's own files",
    "kind": "it is about W&B's own files",
    "controller": "the search is made here",
    "scheduler": "the search is made here",
    "job": "it belongs to W&B's Launch",
    "image_uri": "it belongs to W&B's Launch",
}
_TIMES: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_LARGEST: Final = 10**9


@dataclass(frozen=True, slots=True)
class Metric:
    """The quantity to minimise or maximise.

    Attributes:
        name: as the program logs or prints it, or one of MEASURED.
        target: a value that is good enough: no trial begins after one that reached it; None without a target.
        source: "log" for what the program logs, "stdout" for what it prints, "measure" for what stepscope measures,
            "auto" for the first of log and stdout that has it.
        pattern: a regular expression whose first group is the value, for stdout; None for "name: value" and the like.
        use: which of a trial's values counts.
    """

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"
    target: int | float | None = None
    source: Literal["auto", "log", "stdout", "measure"] = "auto"
    pattern: Annotated[str, Meta(max_length=1000)] | None = None
    use: Literal["last", "best", "mean"] = "last"

    @property
    def is_maximized(self) -> bool:
        return self.goal == "maximize"

    def better(self, first: float, second: float) -> bool:
        return first > second if self.is_maximized else first < second


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """When to end a trial because others were better at the same iteration.

    Attributes:
        min_iter: the first iteration at which trials are compared; None if max_iter and s determine it.
        max_iter: of a whole trial; None if unknown.
        eta: one trial in `eta` continues, and each comparison is at `eta` times the iteration of the last.
        s: number of comparisons, counted back from max_iter; None if min_iter is given.
        strict: whether the value at that iteration is compared, not the best until then.
    """

    min_iter: Annotated[int, Meta(ge=1, le=_LARGEST)] | None = None
    max_iter: Annotated[int, Meta(ge=1, le=_LARGEST)] | None = None
    eta: Annotated[int, Meta(gt=1, le=1000)] | Annotated[float, Meta(gt=1, le=1000)] = 3
    s: Annotated[int, Meta(ge=1, le=100)] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """The content of a sweep file.

    Attributes:
        name: of the study.
        trials: the most to run; None for all of a grid, or without end within the budget.
        budget_s: seconds after which no trial begins; None for no limit.
        jobs: trials at the same time.
        seed: of the search; None for another one each time.
        steps: of each trial, for a metric that stepscope measures.
        description: the user's text.
        warnings: keys of the file that have no meaning here, a sentence each.
    """

    name: str
    command: Command
    method: str
    metric: Metric
    parameters: tuple[Parameter, ...]
    trials: int | None = None
    budget_s: float | None = None
    jobs: int = 1
    seed: int | None = None
    steps: int = 50
    early: EarlyEnd | None = None
    description: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def searched(self) -> tuple[Parameter, ...]:
        return tuple(each for each in self.parameters if not each.is_constant)


@dataclass(frozen=True, slots=True)
class _Given:
    """The keys of a file, except those that only W&B uses (`_MEANINGLESS`)."""

    command: Any = None
    program: Any = None
    method: str = "tpe"
    metric: Any = None
    parameters: Any = None
    trials: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    run_cap: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    early_terminate: dict[Any, Any] | None = None
    name: Any = None
    description: Any = None
    jobs: Annotated[int, Meta(ge=1, le=1000)] = 1
    budget: Any = None
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    steps: Annotated[int, Meta(ge=3, le=_LARGEST)] = 50
    goal: Any = None


def read_sweep(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file.

    Args:
        changes: top-level keys that override the file's, as given on the command line; None keeps the file's.

    Raises:
        UsageError: it cannot be read or carried out; the message names the file and key.
    """
    content = read_yaml(path)
    try:
        given = {name: value for name, value in (changes or {}).items() if value is not None}
        known = content.get("metric")
        if "metric" in given and isinstance(known, dict) and known.get("name") == given["metric"]:
            del given["metric"]  # its goal and source are in the file
        both = {**content, **given}
        without_end = given.get("metric") in MEASURED and both.pop("early_terminate", None) is not None
        sweep = parse_sweep(both, default_name=path.stem)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if without_end:
        said = f"no trial is ended early: {sweep.metric.name} is known only at the end of one"
        return replace(sweep, warnings=(*sweep.warnings, said))
    return sweep


def parse_sweep(content: dict[Any, Any], *, default_name: str) -> Sweep:
    """Parse the content of a sweep file.

    Raises UsageError if it cannot be carried out; the message begins with the key's path.
    """
    check_keys(content, (*(each.name for each in fields(_Given)), *_MEANINGLESS, "metrics"), "")
    if "metrics" in content:
        raise UsageError("metrics: only one metric can be searched for; give it as metric")
    if "parameters" not in content:
        raise UsageError("parameters is missing: it names what is searched, such as lr: {min: 0.001, max: 0.1}")
    given = checked(content, _Given)
    if given.method not in (*METHODS, "bayes"):
        raise UsageError(
            f"method: there is no {given.method!r}; there are {', '.join(METHODS)}, and bayes, which is tpe"
        )
    parameters = parse_parameters(content["parameters"])
    for each in parameters if given.method == "grid" else ():
        if not each.is_constant:
            each.grid()
    metric = _metric(given)
    early = None if given.early_terminate is None else _early(given.early_terminate)
    command = parse_command(given.command, given.program, [each.name for each in parameters])
    budget_s = None if given.budget is None else seconds(given.budget)
    trials = given.trials if given.trials is not None else given.run_cap
    if trials is None and budget_s is None and given.method != "grid":
        trials = TRIALS
    if metric.source == "measure" and early is not None:
        raise UsageError(f"early_terminate: {metric.name} is known only at the end of a trial")
    if metric.source == "measure" and given.method == "hyperband":
        raise UsageError(f"method: {metric.name} is known only at the end of a trial, too late for hyperband")
    return Sweep(
        name=_name(given.name, default_name),
        command=command,
        method="tpe" if given.method == "bayes" else given.method,
        metric=metric,
        parameters=parameters,
        trials=trials,
        budget_s=budget_s,
        jobs=given.jobs,
        seed=given.seed,
        steps=given.steps,
        early=early,
        description=str(given.description or "")[:2000],
        warnings=tuple(_warnings(content, command)),
    )


def seconds(text: object) -> float:
    """Parse a duration such as 90s, 20m or 2h; a bare number is in seconds. Raises UsageError for any other text."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(s|m|min|h|d|)\s*", str(text), re.ASCII)
    value = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if value <= 0:
        raise UsageError(f"budget: {text!r} is no time: write 90s, 20m or 2h")
    return value


def _metric(file: _Given) -> Metric:
    given = {"name": file.metric} if isinstance(file.metric, str) else file.metric
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not given["name"]:
        raise UsageError(
            "metric is missing: say what is measured, as metric: val_loss in the file or --metric val_loss"
        )
    check_keys(given, ("name", "goal", "target", "from", "pattern", "use", "impute", "impute_while_running"), "metric")
    metric = checked({**given, "goal": file.goal or given.get("goal")}, Metric, "metric", source="from")
    if metric.name in MEASURED and metric.source == "auto" and metric.pattern is None:
        metric = replace(metric, source="measure")
    if metric.source == "measure" and metric.name not in MEASURED:
        raise UsageError(f"metric.name: stepscope itself measures {' and '.join(MEASURED)}, not {metric.name}")
    if metric.pattern is not None:
        if metric.source in ("log", "measure"):
            raise UsageError(f"metric.pattern is for what the program prints: from: stdout, not {metric.source}")
        _check_pattern(metric.pattern)
        metric = replace(metric, source="stdout")
    return metric


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"metric.pattern is no regular expression: {error}") from error
    if not groups:
        raise UsageError(r"metric.pattern needs a group around the number, such as loss ([-+.\deE]+)")


def _early(given: dict[Any, Any]) -> EarlyEnd:
    path = "early_terminate"
    check_keys(given, ("type", *(each.name for each in fields(EarlyEnd))), path)
    if given.get("type", "hyperband") != "hyperband":
        raise UsageError(f"{path}.type: there is no {given['type']!r}; there is hyperband")
    early = checked(given, EarlyEnd, path)
    if early.min_iter is None and (early.max_iter is None or early.s is None):
        raise UsageError(f"{path} needs min_iter, or max_iter with s")
    if early.min_iter is not None and early.max_iter is not None and early.max_iter <= early.min_iter:
        raise UsageError(f"{path}.max_iter must be above min_iter")
    return early


def _name(given: object, default: str) -> str:
    text = str(given) if given else default
    cleaned = re.sub(r"[^A-Za-z0-9._+=@-]+", "-", text).strip("-.")
    return cleaned[:80] or "sweep"


def _warnings(content: dict[Any, Any], command: Command) -> Iterator[str]:
    """Keys of the file that have no meaning here, a sentence each."""
    for why in dict.fromkeys(_MEANINGLESS.values()):
        if keys := [key for key, reason in _MEANINGLESS.items() if reason == why and key in content]:
            yield f"{' and '.join(keys)} {'have' if len(keys) > 1 else 'has'} no meaning here: {why}"
    if content.get("method") == "bayes":
        yield "method bayes: W&B models the metric by Gaussian processes; here it is TPE, as method: tpe"
    for key in ("impute", "impute_while_running"):
        if isinstance(content["metric"], dict) and key in content["metric"]:
            yield f"metric.{key} has no meaning here: a failed trial has no value, and the search leaves it out"
    if command.left_out:
        yield f"the command does not name {', '.join(command.left_out)}: only wandb.config has it in the program"
