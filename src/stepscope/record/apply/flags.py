"""The flags of `stepscope run --apply`, and how a list of them is parsed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.files import readable, say_changed, say_passed_over
from stepscope.record.run_folder import MANIFEST, RunFolder, is_run_folder

LONGEST_NUMBER: Final = 9
"""Maximum digits of a value, far more than any flag needs."""

MOST_PROCESSES: Final = 1024
"""Maximum for workers or threads: more than any machine has cores, and few enough to start by mistake."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value after a flag's `=`: a whole number from `least` to `most`, or one of the choices.

    Attributes:
        shown: placeholder for help texts, such as "N" or "jemalloc|tcmalloc".
        default: used when no value is given; None if a value is required.
    """

    shown: str
    least: int | None = None
    most: int = 10**9
    choices: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """One word that `--apply` accepts.

    Attributes:
        help: what it changes, in one line that completes "it ...".
        unseen: the reason reported if the program never does what the flag changes.
        limits: when it cannot be applied, or behaves differently; shown on the documentation page.
        value: None if the flag takes no value.
        against: flags that it cannot be combined with.
    """

    name: str
    help: str
    unseen: str
    limits: str
    value: Value | None = None
    against: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Return the flag as users write it, such as "workers=N" or "compile[=default|reduce-overhead]"."""
        if self.value is None:
            return self.name
        behind = f"={self.value.shown}"
        return f"{self.name}[{behind}]" if self.value.default is not None else self.name + behind


def words_of(text: str, flags: Iterable[Flag]) -> tuple[str, ...]:
    """Split a list such as "fuse-optimizer,workers=4" into unique words, in their order.

    Raises UsageError if a flag is unknown, has an invalid value, or contradicts another.
    """
    known = {flag.name: flag for flag in flags}
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in known:
            raise UsageError(_unknown(part.strip(), name, list(known)))
        flag = known[name]
        value = _checked(flag, value.strip(), bool(equals))
        if found.setdefault(name, value) != value:
            raise UsageError(f"{name} is given twice, as {found[name]} and as {value}")
    _refuse_contradictions(found, known)
    return tuple(name if value in ("", _default(known[name])) else f"{name}={value}" for name, value in found.items())


def flag_rows(flags: Iterable[Flag]) -> str:
    """Return the flags as rows of a Markdown table."""
    cells = ([f"`{flag.shown}`", flag.help, flag.limits] for flag in flags)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells)


def values_of(words: Iterable[str], flags: Iterable[Flag]) -> dict[str, str]:
    """Map each flag in these words to its value, "" for none; unknown words are ignored."""
    known = {flag.name: flag for flag in flags}
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name in known:
            found[name] = value if equals else _default(known[name])
    return found


def _default(flag: Flag) -> str:
    return (flag.value.default or "") if flag.value is not None else ""


def _unknown(part: str, name: str, known: Sequence[str]) -> str:
    if not name:
        return "the list of what to apply has an empty entry: write it as fuse-optimizer,workers=4"
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return f"there is no {part!r} to apply{guess} (stepscope run --apply list shows all)"


def _checked(flag: Flag, value: str, is_given: bool) -> str:
    """Normalise a value: a number without leading zeros, or a choice.

    Raises UsageError if the value is invalid for this flag.
    """
    allowed = flag.value
    if allowed is None:
        if is_given:
            raise UsageError(f"{flag.name} takes no value, but {value!r} was given")
        return ""
    if not is_given:
        if allowed.default is None:
            raise UsageError(f"{flag.name} needs a value: {flag.shown}")
        return allowed.default
    if allowed.least is None:
        if value in allowed.choices:
            return value
        raise UsageError(f"{flag.name} must be one of {', '.join(allowed.choices)}, not {value!r}")
    is_number = value.isascii() and value.isdecimal() and len(value) <= LONGEST_NUMBER
    if not is_number or int(value) < allowed.least:
        raise UsageError(f"{flag.name} must be a whole number of at least {allowed.least}, not {value!r}")
    if int(value) > allowed.most:
        raise UsageError(f"{flag.name} must be at most {allowed.most:,}, not {value}")
    return str(int(value))


def _refuse_contradictions(found: dict[str, str], known: dict[str, Flag]) -> None:
    for name in found:
        for other in known[name].against:
            if other in found:
                raise UsageError(f"{name} and {other} cannot be applied together")
    for name in ("prefetch", "persistent-workers"):
        if name in found and found.get("workers") == "0":
            raise UsageError(f"{name} takes workers, and workers=0 leaves none")


PREFIX: Final = "applied-"
"""Prefix of the files in a rank's folder that hold the outcomes of one process."""
MOST_SENTENCES: Final = 20
"""Limit for one flag in one process, so that a program that makes a thousand loaders stays readable."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one flag.

    Attributes:
        sentence: what was changed, or why nothing was; without the name and the full stop.
        applied: whether it was changed.
        ranks: the ranks concerned; empty for every rank.
    """

    flag: str
    sentence: str
    applied: bool
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        kind = ":" if self.applied else ", not applied:"
        where = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"{self.flag}{kind} {self.sentence}{where}"

    def to_json(self) -> dict[str, Any]:
        content = {"flag": self.flag, "sentence": self.sentence, "applied": self.applied}
        return {**content, "ranks": list(self.ranks)} if self.ranks else content


def applied_records(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the records of a run's processes, by rank: {"rank", "applied", "not_applied"}."""
    found = []
    for rank in folder.ranks():
        for path in sorted((folder.path / f"rank{rank}").glob(f"{PREFIX}*.json")):
            if content := readable(path):
                found.append({"rank": rank, **{name: _entries(content, name) for name in _KINDS}})
    return found


def applied_beside(trace: str | Path) -> tuple[str, ...]:
    """Describe the remedies applied in the run that a trace belongs to; empty outside a run folder."""
    folder = Path(trace).parent.parent
    if not is_run_folder(folder):
        return ()
    try:
        entries = RunFolder.open(folder).manifest().applied
    except UsageError as error:
        say_passed_over(error)
        return ()
    try:
        return tuple(
            Outcome(each["flag"], each["sentence"], bool(each["applied"]), tuple(map(int, each.get("ranks", ())))).text
            for each in entries
        )
    except (KeyError, TypeError, ValueError):
        say_changed(folder / MANIFEST)
        return ()


def outcomes(words: Sequence[str], records: Sequence[Mapping[str, Any]], unseen: Mapping[str, str]) -> list[Outcome]:
    """Return the outcome of each requested flag, in the order requested, what was applied before what was not.

    "Nothing to change" in one process counts only if every process says so: a launcher imports torch too.

    Args:
        words: the requested flags.
        records: see `applied_records`.
        unseen: for each flag, the reason if no process says anything else.
    """
    ranks = {record["rank"] for record in records}
    found: list[Outcome] = []
    for word in words:
        flag = word.partition("=")[0]
        said: dict[tuple[bool, str], set[int]] = {}
        for record in records:
            for kind in _KINDS:
                for entry in record[kind]:
                    if entry["flag"] == flag:
                        said.setdefault((kind == "applied", entry["sentence"]), set()).add(record["rank"])
        nothing = (False, unseen.get(flag, ""))
        if len(said) > 1:
            said.pop(nothing, None)
        for (applied, sentence), where in sorted(said.items(), key=lambda item: not item[0][0]):
            found.append(Outcome(flag, sentence, applied, () if where == ranks else tuple(sorted(where))))
        if not said:
            found.append(Outcome(flag, "no process of the program imported torch", False))
    return found


def _entries(content: Mapping[str, Any], kind: str) -> list[dict[str, str]]:
    entries = content.get(kind)
    if not isinstance(entries, list):
        return []
    return [
        {"flag": str(entry["flag"]), "sentence": str(entry["sentence"])}
        for entry in entries
        if isinstance(entry, dict) and "flag" in entry and "sentence" in entry
    ]


_KINDS: Final = ("applied", "not_applied")
