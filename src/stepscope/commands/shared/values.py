"""Parse option values: numbers with and without units, lists of numbers, names."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Final

SHARES: Final = {"%": 0.01, "": 1.0}
SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}
_BUDGETS: Final = {unit: seconds for unit, seconds in SECONDS.items() if unit != "ms"}
HOURS: Final = {"s": 1 / 3600, "min": 1 / 60, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}
NANOSECONDS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "": 1}
BYTES: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LARGEST_WHOLE: Final = 999_999_999
_NO_UNIT: Final = {"": 1.0}
_NUMBER: Final = re.compile(
    r"\s*(?P<number>(?:\d{1,3}(?:,\d{3})+|\d{1,16})(?:\.\d{0,12})?(?P<exponent>[eE][+-]?\d{1,2})?|\.\d{1,12})"
    r"\s*(?P<unit>[A-Za-z]*|%)\s*",
    re.ASCII,
)


def number(
    problem: str,
    units: Mapping[str, float] = _NO_UNIT,
    *,
    least: float = 0.0,
    most: float = math.inf,
    above: float = -1.0,
    exponents: bool | None = None,
) -> Callable[[str], float]:
    """Make a parser of numbers such as 30, 1.5, 4e6, 1,200, 10% or 2GiB.

    Args:
        problem: completes the error about a text, such as "is no share: write 10% or 0.1".
        units: factor of each unit; "" for no unit.
        least, most: the range, both included.
        above: exclusive lower bound.
        exponents: whether 1e-3 is a number; None allows it only if no unit can follow.
    """
    takes_exponents = units is _NO_UNIT if exponents is None else exponents

    def read(text: str) -> float:
        match = _NUMBER.fullmatch(text)
        scale = units.get(match["unit"]) if match else None
        if match is not None and scale is not None and (takes_exponents or not match["exponent"]):
            value = float(match["number"].replace(",", "")) * scale
            if least <= value <= most and value > above:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} {problem}")

    return read


def whole(least: int, most: int | None = None, what: str = "whole number") -> Callable[[str], int]:
    """Make a parser of whole numbers in a range."""
    limits = f"from {least} on" if most is None else f"from {least} to {most}"
    largest = _LARGEST_WHOLE if most is None else most

    def read(text: str) -> int:
        text = text.strip()
        if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= largest:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what} {limits}")
        return int(text)

    return read


def whole_list(what: str, *, most: int, longest: int) -> Callable[[str], tuple[int, ...]]:
    """Make a parser of whole numbers from 1 to `most`, at most `longest` of them, separated by commas."""

    def read(text: str) -> tuple[int, ...]:
        words = [word.strip() for word in text.split(",")]
        if len(words) > longest or not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", word) for word in words):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {what}: write whole numbers, such as 8,16,32")
        if max(map(int, words)) > most:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {what}: the largest may be {most}")
        return tuple(map(int, words))

    return read


def row_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of rows")
    return int(text)


def column_names(text: str) -> tuple[str, ...]:
    """Parse column names separated by commas, without duplicates."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError("name at least one column")
    return names


def file_to_write(text: str) -> str:
    """Parse an output path; an empty one is refused, since it is most often a variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the file to write is empty")
    return text


share_of_step: Final = number("is no share of a step: write 10% or 0.1", SHARES, most=1)
relative_share: Final = number("is no share: write 3% or 0.03", SHARES, above=0, most=9.999)
budget_seconds: Final = number("is no time: write 90s, 10m or 1h", _BUDGETS, above=0)
