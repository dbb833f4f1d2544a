"""Reading a TOML file that may be anyone's, and its values one by one, with complaints that name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.small_files import read_small

LONGEST_TEXT: Final = 1000
_LARGEST_MIB: Final = 1
_LARGEST_NUMBER: Final = 1e9
_MOST_TEXTS: Final = 100


def read_toml(path: Path) -> dict[str, Any]:
    """What stands in a TOML file of at most 1 MiB.

    Raises:
        UsageError: it cannot be read, is larger, or is no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    data = read_small(path, _LARGEST_MIB, ", more than a file of devices has")
    try:
        content: dict[str, Any] = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no TOML file: it is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file: {' '.join(str(error).split())}") from error
    return content


class Values:
    """The values of one TOML table; each method raises `UsageError` where a value is not what it should be."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = table
        self._where = where

    def text(self, key: str) -> str:
        """A string, empty where there is none."""
        value = self._table.get(key, "")
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise self._wrong(key, f"a text of at most {LONGEST_TEXT:,} characters", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty where there is none."""
        value = self._table.get(key, [])
        if (
            not isinstance(value, list)
            or len(value) > _MOST_TEXTS
            or any(not isinstance(one, str) or not 0 < len(one) <= LONGEST_TEXT for one in value)
        ):
            raise self._wrong(key, f'a list of at most {_MOST_TEXTS} texts, such as ["one", "two"]', value)
        return tuple(value)

    def number(self, key: str, unit: float) -> float | None:
        """A positive number times a unit; None where there is none."""
        value = self._table.get(key)
        return None if value is None else self._positive(key, value) * unit

    def whole(self, key: str) -> int | None:
        """A positive whole number; None where there is none."""
        value = self._table.get(key)
        if value is None:
            return None
        if not float(self._positive(key, value)).is_integer():
            raise self._wrong(key, "a whole number", value)
        return int(value)

    def rates(self, key: str, kinds: Sequence[str]) -> dict[str, float]:
        """Operations per second by number type, from a table of tera-operations per second."""
        table = self._table.get(key, {})
        if not isinstance(table, dict):
            raise self._wrong(key, "a table of numbers, such as { bf16 = 312 }", table)
        for kind in table:
            if kind not in kinds:
                raise UsageError(f"{self._where}: {kind!r} is no number type of {key!r}; they are {', '.join(kinds)}")
        return {kind: self._positive(f"{key}.{kind}", table[kind]) * 1e12 for kind in kinds if kind in table}

    def _positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST_NUMBER:
            raise self._wrong(key, "a positive number", value)
        return value

    def _wrong(self, key: str, expected: str, value: object) -> UsageError:
        found = repr(value)
        shown = found if len(found) <= 40 else f"{found[:40]}..."
        return UsageError(f"{self._where}: {key!r} should be {expected}, not {shown}")
