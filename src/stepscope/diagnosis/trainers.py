"""Libraries that run a training loop, and what a remedy is called among their own options: `data/trainers.toml`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files

import msgspec

from stepscope.diagnosis.finding import Remedy


class Trainer(msgspec.Struct, frozen=True):
    """One library of data/trainers.toml, which says what its fields mean."""

    name: str
    files: str
    call: str = "{options}"
    separator: str = ", "
    flags: Mapping[str, str] = {}
    rules: Mapping[str, str] = {}

    def remedy(self, rule: str, remedy: Remedy) -> Remedy:
        """The remedy with the library's own option as its code; unchanged if the library has none for it."""
        code = self.rules.get(rule, "").strip("\n")
        if not code:
            given = dict(word.partition("=")[::2] for word in remedy.apply)
            options = [self.flags[flag].format(value=value) for flag, value in given.items() if flag in self.flags]
            code = self.call.format(options=self.separator.join(dict.fromkeys(options))) if options else ""
        return replace(remedy, code=f"# {self.name}:\n{code}", diff="") if code else remedy


class _Trainers(msgspec.Struct, frozen=True):
    trainers: tuple[Trainer, ...]


@cache
def trainers() -> tuple[Trainer, ...]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = files("stepscope").joinpath("data/trainers.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Trainers).trainers


def trainer_of(paths: Iterable[str]) -> Trainer | None:
    """The library whose files are among these; None if it is none that is known."""
    known = [path.replace("\\", "/") for path in paths]
    return next((one for one in trainers() if any(re.search(one.files, path) for path in known)), None)
