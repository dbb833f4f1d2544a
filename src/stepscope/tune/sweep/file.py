"""A sweep: what is run with which hyperparameters, what is measured, and how the best is searched for.

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.tune.sweep.command import Command, parse_command, read_yaml
from stepscope.tune.sweep.parameters import Parameter, check_keys, parse_parameters

METHODS: Final = ("grid", "random", "tpe", "hyperband")
GOALS: Final = ("minimize", "maximize")
SOURCES: Final = ("auto", "log", "stdout", "measure")
USES: Final = ("last", "best", "mean")
MEASURED: Final = ("step_ms", "step_energy_j")
"""What stepscope measures itself."""
TRIALS: Final = 30
"""Where neither the file nor the user says how many, nor how long."""
_KEYS: Final = (
    *("command", "program", "method", "metric", "parameters", "trials", "run_cap", "early_terminate", "name"),
    *("description", "jobs", "budget", "seed", "steps"),
)
_MEANINGLESS: Final = {
    "entity": "nothing is sent to W&B",
    "project": "nothing is sent to W&B",
    "apiVersion": "it is about W&B's own files",
    "kind": "it is about W&B's own files",
    "controller": "the search is made here",
    "scheduler": "the search is made here",
    "job": "it is of W&B's Launch",
    "image_uri": "it is of W&B's Launch",
}
_TIMES: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Metric:
    """What is minimised or maximised.

    Attributes:
        name: as the program logs or prints it, or one of MEASURED.
        goal: "minimize" or "maximize".
        target: a value that is good enough: no trial begins after one that reached it; None where there is none.
        source: "log" for what the program logs, "stdout" for what it prints, "measure" for what stepscope measures,
            "auto" for the first of log and stdout that has it.
        pattern: a regular expression whose first group is the value, for stdout; None for "name: value" and the like.
        use: which of a trial's values counts: the last, the best or the mean.
    """

    name: str
    goal: str = "minimize"
    target: float | None = None
    source: str = "auto"
    pattern: str | None = None
    use: str = "last"

    @property
    def is_maximized(self) -> bool:
        """Whether more is better."""
        return self.goal == "maximize"

    def better(self, first: float, second: float) -> bool:
        """Whether the first value is better than the second."""
        return first > second if self.is_maximized else first < second


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """When a trial is ended because others were better at its iteration.

    Attributes:
        min_iter: the first iteration at which trials are compared; None where max_iter and s tell it.
        max_iter: of a whole trial; None where unknown.
        eta: one in so many goes on, and comparisons are so many times apart.
        s: comparisons, counted back from max_iter; None where min_iter is given.
        strict: whether the value at that iteration is compared, not the best until then.
    """

    min_iter: int | None = None
    max_iter: int | None = None
    eta: float = 3
    s: int | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """A whole sweep file.

    Attributes:
        name: of the study.
        command: what is run.
        trials: at most so many; None for all of a grid, or without end within the budget.
        budget_s: seconds after which no trial begins; None for no limit.
        jobs: trials at the same time.
        seed: of the search; None for another one each time.
        steps: for a metric that stepscope measures: steps of each trial.
        description: the user's text.
        warnings: what the file says that has no meaning here, a sentence each.
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
        """Those parameters that are no constants."""
        return tuple(each for each in self.parameters if not each.is_constant)

    def to_json(self) -> dict[str, Any]:
        """For the study, so that a report can be made of it alone."""
        return {**asdict(self), "command": self.command.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Sweep:
        """The reverse of `to_json`."""
        early = content["early"]
        return cls(
            **{
                **content,
                "command": Command.from_json(content["command"]),
                "metric": Metric(**content["metric"]),
                "parameters": tuple(Parameter.from_json(each) for each in content["parameters"]),
                "early": None if early is None else EarlyEnd(**early),
                "warnings": tuple(content["warnings"]),
            }
        )


def read_sweep(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep of a file.

    Args:
        changes: values of top-level keys that go before the file's, as the command line gives them; None leaves the
            file's.

    Raises:
        UsageError: it cannot be read or carried out; the message says which file and key.
    """
    content = read_yaml(path)
    try:
        given = {name: value for name, value in (changes or {}).items() if value is not None}
        known = content.get("metric")
        if "metric" in given and isinstance(known, dict) and known.get("name") == given["metric"]:
            del given["metric"]  # its goal and where it is from stand in the file
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
    """The sweep of a file's content.

    Raises:
        UsageError: it cannot be carried out; the message begins with the key's path.
    """
    check_keys(content, (*_KEYS, *_MEANINGLESS, "metrics", "goal"), "")
    if "metrics" in content:
        raise UsageError("metrics: only one metric can be searched for; give it as metric")
    if "parameters" not in content:
        raise UsageError("parameters is missing: it names what is searched, such as lr: {min: 0.001, max: 0.1}")
    method, warned = _method(content.get("method"), [])
    parameters = parse_parameters(content["parameters"])
    if method == "grid":
        for each in parameters:
            if not each.is_constant:
                each.grid()
    metric = _metric(content, warned)
    early = _early(content.get("early_terminate"))
    command = parse_command(content.get("command"), content.get("program"), [each.name for each in parameters])
    if command.left_out:
        warned.append(
            f"the command does not name {', '.join(command.left_out)}: only wandb.config has it in the program"
        )
    trials = _trials(content)
    budget = content.get("budget")
    budget_s = None if budget is None else seconds(budget)
    if trials is None and budget_s is None and method != "grid":
        trials = TRIALS
    if early is not None and metric.source == "measure":
        raise UsageError(f"early_terminate: {metric.name} is known only at the end of a trial")
    if method == "hyperband" and metric.source == "measure":
        raise UsageError(f"method: {metric.name} is known only at the end of a trial, too late for hyperband")
    sweep = Sweep(
        name=_name(content.get("name"), default_name),
        command=command,
        method=method,
        metric=metric,
        parameters=parameters,
        trials=trials,
        budget_s=budget_s,
        jobs=_whole(content, "jobs", 1, 1, 1000),
        seed=None if content.get("seed") is None else _whole(content, "seed", 0, 0, 2**32 - 1),
        steps=_whole(content, "steps", 50, 3, 10**9),
        early=early,
        description=str(content.get("description") or "")[:2000],
    )
    return replace(sweep, warnings=tuple(_warnings(content) + warned))


def seconds(text: object) -> float:
    """A time such as 90s, 20m or 2h; a number alone is in seconds.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(s|m|min|h|d|)\s*", str(text), re.ASCII)
    value = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if value <= 0:
        raise UsageError(f"budget: {text!r} is no time: write 90s, 20m or 2h")
    return value


def _method(given: object, warned: list[str]) -> tuple[str, list[str]]:
    if given is None:
        return "tpe", warned
    if given == "bayes":
        warned.append("method bayes: W&B models the metric by Gaussian processes; here it is TPE, as method: tpe")
        return "tpe", warned
    if given not in METHODS:
        raise UsageError(f"method: there is no {given!r}; there are {', '.join(METHODS)}, and bayes, which is tpe")
    return str(given), warned


def _metric(content: dict[Any, Any], warned: list[str]) -> Metric:
    given = content.get("metric")
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not given["name"]:
        raise UsageError(
            "metric is missing: say what is measured, as metric: val_loss in the file or --metric val_loss"
        )
    check_keys(given, ("name", "goal", "target", "from", "pattern", "use", "impute", "impute_while_running"), "metric")
    for key in ("impute", "impute_while_running"):
        if key in given:
            warned.append(
                f"metric.{key} has no meaning here: a failed trial has no value, and the search leaves it out"
            )
    goal = content.get("goal") or given.get("goal") or "minimize"
    for key, value, known in (
        ("goal", goal, GOALS),
        ("from", given.get("from", "auto"), SOURCES),
        ("use", given.get("use", "last"), USES),
    ):
        if value not in known:
            raise UsageError(f"metric.{key}: there is no {value!r}; there are {', '.join(known)}")
    source, pattern = given.get("from", "auto"), given.get("pattern")
    if given["name"] in MEASURED and source == "auto" and pattern is None:
        source = "measure"
    if source == "measure" and given["name"] not in MEASURED:
        raise UsageError(f"metric.name: stepscope itself measures {' and '.join(MEASURED)}, not {given['name']}")
    if pattern is not None:
        if source in ("log", "measure"):
            raise UsageError(f"metric.pattern is for what the program prints: from: stdout, not {source}")
        source = "stdout"
        _check_pattern(pattern)
    target = given.get("target")
    if target is not None and (isinstance(target, bool) or not isinstance(target, (int, float))):
        raise UsageError(f"metric.target must be a number, not {target!r}")
    return Metric(given["name"], str(goal), target, source, pattern, given.get("use", "last"))


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str) or len(pattern) > 1000:
        raise UsageError("metric.pattern must be a regular expression of at most 1,000 characters")
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"metric.pattern is no regular expression: {error}") from error
    if not groups:
        raise UsageError(r"metric.pattern needs a group around the number, such as loss ([-+.\deE]+)")


def _early(given: object) -> EarlyEnd | None:
    if given is None:
        return None
    path = "early_terminate"
    if not isinstance(given, dict):
        raise UsageError(f"{path} must be a mapping, such as {{type: hyperband, min_iter: 3}}")
    check_keys(given, ("type", "min_iter", "max_iter", "s", "eta", "strict"), path)
    if given.get("type", "hyperband") != "hyperband":
        raise UsageError(f"{path}.type: there is no {given['type']!r}; there is hyperband")
    eta = given.get("eta", 3)
    if isinstance(eta, bool) or not isinstance(eta, (int, float)) or not 1 < eta <= 1000:
        raise UsageError(f"{path}.eta must be a number above 1, not {eta!r}")
    if not isinstance(given.get("strict", False), bool):
        raise UsageError(f"{path}.strict must be true or false, not {given['strict']!r}")
    early = EarlyEnd(
        min_iter=_whole(given, "min_iter", None, 1, 10**9, path),
        max_iter=_whole(given, "max_iter", None, 1, 10**9, path),
        eta=eta,
        s=_whole(given, "s", None, 1, 100, path),
        strict=given.get("strict", False),
    )
    if early.min_iter is None and (early.max_iter is None or early.s is None):
        raise UsageError(f"{path} needs min_iter, or max_iter with s")
    if early.min_iter is not None and early.max_iter is not None and early.max_iter <= early.min_iter:
        raise UsageError(f"{path}.max_iter must be above min_iter")
    return early


def _trials(content: dict[Any, Any]) -> int | None:
    key = "trials" if content.get("trials") is not None else "run_cap"
    return None if content.get(key) is None else _whole(content, key, None, 1, 10**6)


def _whole(content: dict[Any, Any], key: str, default: Any, low: int, high: int, path: str = "") -> Any:
    value = content.get(key)
    if value is None:
        return default
    where = f"{path}.{key}" if path else key
    if type(value) is not int or not low <= value <= high:
        raise UsageError(f"{where} must be a whole number from {low} to {high:,}, not {value!r}")
    return value


def _name(given: object, default: str) -> str:
    text = str(given) if given else default
    cleaned = re.sub(r"[^A-Za-z0-9._+=@-]+", "-", text).strip("-.")
    return cleaned[:80] or "sweep"


def _warnings(content: dict[Any, Any]) -> list[str]:
    named: dict[str, list[str]] = {}
    for key, why in _MEANINGLESS.items():
        if key in content:
            named.setdefault(why, []).append(key)
    return [
        f"{' and '.join(keys)} {'have' if len(keys) > 1 else 'has'} no meaning here: {why}"
        for why, keys in named.items()
    ]
