"""A YAML file as plain values: only those, of bounded size, with no key twice, and 1e-5 as a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.small_files import read_small

_LARGEST_MIB: Final = 1
_DEEPEST: Final = 20
_MOST_VALUES: Final = 100_000
"""Counted with repetitions: an anchor that is named again and again could stand for billions of values."""
_FLOAT: Final = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
    re.ASCII,
)
"""Also 1e-5, which YAML 1.2 takes for a number and YAML 1.1, as PyYAML has it, for a text."""


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds.

    Raises:
        UsageError: PyYAML is missing, or the file cannot be read, is too large, is no YAML or holds something else.
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
        """Plain values only; see the module."""

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
    """As a compiled expression, whose `match` is of the whole text."""

    def match(self, text: str) -> object:
        """Whether the text is a number."""
        return _FLOAT.fullmatch(text)


def _count(value: Any, depth: int, counted: int) -> int:
    """How many values there are in a value, itself among them; more than the most where there are too many."""
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
