"""The command that a sweep runs for one set of values: W&B's form, or a line with {names} in it; no shell is used."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.files import read_small

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
        left_out: parameters that do not appear in it; a program of W&B's has them in wandb.config all the same.
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
        names: of the parameters.

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
                why = "stands for whole words, so nothing may stand beside it" if inside else "is not known"
                raise UsageError(f"command: ${{{each}}} {why}; there are {', '.join(MACROS)} and envvar:NAME")
        if macro is not None and macro[1] == "program" and command.program is None:
            raise UsageError("program is missing, which ${program} in the command stands for")
        if macro is not None and macro[1] in _OF_ALL:
            named |= set(names)
        for each in _PLACE.findall(word):
            if each not in names:
                guess = difflib.get_close_matches(each, names, n=1)
                hint = f"did you mean {{{guess[0]}}}?" if guess else f"there are {', '.join(names)}"
                raise UsageError(f"command: {{{each}}} is no parameter; {hint}")
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
    data = read_small(path, _LARGEST_MIB, ": it is no sweep file")
    content = _parsed(path, data)
    if content is None:
        raise UsageError(f"{path} is empty: a sweep file has at least parameters, a metric and a command or a program")
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {_kind(content)}: a sweep file has keys such as command, metric, parameters")
    if _count(content, 0, 0) > _MOST_VALUES:
        raise UsageError(f"{path} holds more than {_MOST_VALUES:,} values: it is no sweep file")
    return content


def _parsed(path: Path, data: bytes) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"sweep files need PyYAML: pip install 'stepscope[tune]' ({error})") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Loads plain values only; see the module."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key, _ in node.value:
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise UsageError(f"{path}, line {key.start_mark.line + 1}: {key.value} is there twice")
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
        raise UsageError(f"{path}{where} is no YAML: {what}") from error
    except (RecursionError, ValueError, TypeError, UnicodeError) as error:
        raise UsageError(f"{path} is no YAML of a sweep: {str(error).splitlines()[0]}") from error


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
