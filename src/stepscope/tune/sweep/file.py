"""A sweep: the program and its hyperparameters, the metric, the search method, and the command for one set of values.

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

import difflib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from stepscope.errors import UsageError
from stepscope.files import read_small
from stepscope.tune.sweep.parameters import Parameter, check_keys, checked, parse_parameters

_DEFAULT: Final = ("${env}", "${interpreter}", "${program}", "${args}")
MACROS: Final = (
    *("env", "interpreter", "program", "args", "args_no_boolean_flags", "args_no_equals", "args_no_hyphens"),
    *("args_append_hydra", "args_override_hydra", "args_json", "args_json_file"),
)
_OF_ALL: Final = tuple(name for name in MACROS if name.startswith("args"))
_MACRO: Final = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE: Final = re.compile(r"\$\{envvar:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
_PLACE: Final = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_.-]*)\}", re.ASCII)
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
_MOST_WORDS: Final = 1000
_PREFIXES: Final = {"args": "--", "args_no_hyphens": "", "args_append_hydra": "+", "args_override_hydra": "++"}
"""Macro -> prefix of each name=value."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command before the values are filled in.

    Attributes:
        words: each a word, a macro such as "${args}", or with {names} in it.
        left_out: parameters that do not appear in it; a W&B program still has them in wandb.config.
    """

    words: tuple[str, ...]
    program: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables), *map(_quoted, self.words)])

    def filled(self, values: Mapping[str, Any], json_file: Path) -> tuple[list[str], dict[str, str]]:
        """Return (words of the command, environment variables) for these values."""
        words: list[str] = []
        for word in self.words:
            macro = _MACRO.fullmatch(word)
            if macro is not None and macro[1] in MACROS:
                words += self._macro(macro[1], values, json_file)
            else:
                words.append(_put_in(word, values))
        return words, {name: _put_in(value, values) for name, value in self.variables}

    def _macro(self, name: str, values: Mapping[str, Any], json_file: Path) -> list[str]:
        if name in _PREFIXES:
            return [f"{_PREFIXES[name]}{each}={value}" for each, value in values.items()]
        match name:
            case "env":
                return ["/usr/bin/env"] if os.name == "posix" else []
            case "interpreter":
                return ["python" if shutil.which("python") else sys.executable]
            case "program":
                return [str(self.program)]
            case "args_no_equals":
                return [word for each, value in values.items() for word in (f"--{each}", str(value))]
            case "args_no_boolean_flags":
                return [_flag(each, value) for each, value in values.items() if value is not False]
            case "args_json":
                return [json.dumps(nested(values))]
            case _:
                return [str(json_file)]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those of nested parameters in mappings of their own, as in the sweep file."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        place = found
        for each in outer:
            inner = place.setdefault(each, {})
            if not isinstance(inner, dict):  # a parameter has the same name as a group: it keeps its whole name
                place, last = found, name
                break
            place = inner
        place[last] = value
    return found


def parse_command(given: object, program: object, names: Sequence[str]) -> Command:
    """Parse the command of a sweep file.

    Args:
        given: the value of `command`: a line, or W&B's list of words and macros; None for W&B's default.
        program: the value of `program`.
        names: the parameters' names.

    Raises:
        UsageError: there is no command, or it names an unknown parameter or macro.
    """
    if program is not None and (not isinstance(program, str) or not program):
        raise UsageError(f"program must be the name of a script, not {program!r}")
    if given is None:
        if program is None:
            raise UsageError("command is missing: say what to run, as command: python train.py --lr {lr}, or program")
        return Command(_DEFAULT, program)
    words = _words(given)
    variables = []
    while isinstance(given, str) and words and _ASSIGNMENT.match(words[0]):
        name, value = words.pop(0).split("=", 1)
        variables.append((name, value))
    if not words:
        raise UsageError("command is empty")
    if len(words) > _MOST_WORDS:
        raise UsageError(f"command has more than {_MOST_WORDS:,} words")
    command = Command(tuple(words), program, tuple(variables))
    named = _named(command, names)
    missing = [name for name in names if name not in named]
    if missing and isinstance(given, str):
        raise UsageError(
            f"command: it leaves out {', '.join(missing)}; write {{{missing[0]}}} where the value belongs, or "
            "${args} for all of them as --name=value"
        )
    return replace(command, left_out=tuple(missing))


def _words(given: object) -> list[str]:
    if isinstance(given, str):
        try:
            return shlex.split(given)
        except ValueError as error:
            raise UsageError(f"command: {str(error).lower()}") from error
    if not isinstance(given, list) or any(isinstance(each, (dict, list)) or each is None for each in given):
        raise UsageError("command must be a line, or a list of words")
    return [str(each) for each in given]


def _named(command: Command, names: Sequence[str]) -> set[str]:
    """The parameters that appear in the command; unknown macros and names are refused."""
    named: set[str] = set()
    for word in (*command.words, *(value for _, value in command.variables)):
        macro = _MACRO.fullmatch(word)
        for each in _MACRO.findall(_VARIABLE.sub("", word)):
            if each not in MACROS or macro is None:
                inside = each in MACROS
                why = "must be a word of its own" if inside else "is not known"
                raise UsageError(f"command: ${{{each}}} {why}; there are {', '.join(MACROS)} and envvar:NAME")
        if macro is not None and macro[1] == "program" and command.program is None:
            raise UsageError("program is missing, which ${program} in the command refers to")
        if macro is not None and macro[1] in _OF_ALL:
            named |= set(names)
        for each in _PLACE.findall(word):
            if each not in names:
                guess = difflib.get_close_matches(each, names, n=1)
                hint = f"did you mean {{{guess[0]}}}?" if guess else f"there are {', '.join(names)}"
                raise UsageError(f"command: {{{each}}} is not a parameter; {hint}")
            named.add(each)
    return named


def _put_in(word: str, values: Mapping[str, Any]) -> str:
    """Fill the values of parameters and environment variables into the word."""
    filled = _VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), word)
    return _PLACE.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], filled)


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def _quoted(word: str) -> str:
    return word if _MACRO.fullmatch(word) or _PLACE.search(word) else shlex.quote(word)


_LARGEST_MIB: Final = 1
_DEEPEST: Final = 20
_MOST_VALUES: Final = 100_000
"""Counted with repetitions: repeated YAML anchors could expand to billions of values."""
_FLOAT: Final = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
    re.ASCII,
)
"""Also matches 1e-5, a number in YAML 1.2 but a string in YAML 1.1, which PyYAML implements."""


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read the mapping in a YAML file.

    Raises:
        UsageError: PyYAML is missing, or the file cannot be read, is too large, is not YAML or holds something else.
    """
    data = read_small(path, _LARGEST_MIB, ": it is not a sweep file")
    content = _parsed(path, data)
    if content is None:
        raise UsageError(f"{path} is empty: a sweep file has at least parameters, a metric and a command or a program")
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {_kind(content)}: a sweep file has keys such as command, metric, parameters")
    if _count(content, 0, 0) > _MOST_VALUES:
        raise UsageError(f"{path} has more than {_MOST_VALUES:,} values: it is not a sweep file")
    return content


def _parsed(path: Path, data: bytes) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Loads plain values only; see the module."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key, _ in node.value:
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise UsageError(f"{path}, line {key.start_mark.line + 1}: {key.value} appears twice")
                seen.add(key.value)
            mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return mapping

    Loader.yaml_implicit_resolvers = {
        mark: [each for each in resolvers if each[0] != "tag:yaml.org,2002:float"]
        for mark, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _Whole(), list("-+0123456789."))
    try:
        return yaml.load(data, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{path}{where} is not YAML: {what}") from error
    except (RecursionError, ValueError, TypeError, UnicodeError) as error:
        raise UsageError(f"{path} is not a sweep's YAML: {str(error).splitlines()[0]}") from error


class _Whole:
    """Acts as a compiled expression whose `match` must match the whole text."""

    def match(self, text: str) -> object:
        return _FLOAT.fullmatch(text)


def _count(value: Any, depth: int, counted: int) -> int:
    """Count a value and all values in it; stop and return more than the limit if there are too many."""
    counted += 1
    if depth > _DEEPEST:
        return _MOST_VALUES + 1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        counted = _count(each, depth + 1, counted)
        if counted > _MOST_VALUES:
            break
    return counted


def _kind(value: object) -> str:
    names = {list: "list", str: "text", int: "number", float: "number", bool: "yes or no"}
    return names.get(type(value), type(value).__name__)


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
        name: the study's name.
        trials: the most to run; None for all of a grid, or as many as the budget allows.
        budget_s: seconds after which no trial begins; None for no limit.
        jobs: number of trials at the same time.
        seed: the search's seed; None for another one each time.
        steps: steps of each trial, for a metric that stepscope measures.
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
        said = f"no trial ends early: {sweep.metric.name} is known only at its end"
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
        raise UsageError(f"budget: {text!r} is not a time: write 90s, 20m or 2h")
    return value


def _metric(file: _Given) -> Metric:
    given = {"name": file.metric} if isinstance(file.metric, str) else file.metric
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not given["name"]:
        raise UsageError("metric is missing: say what to measure, as metric: val_loss in the file or --metric val_loss")
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
        raise UsageError(f"metric.pattern is not a regular expression: {error}") from error
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
        yield f"the command does not name {', '.join(command.left_out)}: the program finds it only in wandb.config"
