"""What was applied in the processes of a run and what was not: `rank<R>/applied-<P>.json`, and all of it in sentences.

{"applied": [{"flag", "sentence"}], "not_applied": [{"flag", "sentence"}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stepscope.capture.run_folder import RunFolder
from stepscope.errors import UsageError
from stepscope.kept_json import readable

PREFIX: Final = "applied-"
"""Files of a rank's folder that begin so hold what one process applied."""
MOST_SENTENCES: Final = 20
"""About one flag in one process, so that a program that makes a thousand loaders stays readable."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one flag.

    Attributes:
        flag: its name.
        sentence: what was changed, or why nothing was; without the name and the full stop.
        applied: whether it was changed.
        ranks: where; empty where that is every rank.
    """

    flag: str
    sentence: str
    applied: bool
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """For people: "fuse-optimizer: AdamW made at train.py:31 now runs fused"."""
        kind = ":" if self.applied else ", not applied:"
        where = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"{self.flag}{kind} {self.sentence}{where}"

    def to_json(self) -> dict[str, Any]:
        """For `run.json` and reports."""
        content = {"flag": self.flag, "sentence": self.sentence, "applied": self.applied}
        return {**content, "ranks": list(self.ranks)} if self.ranks else content


def applied_records(folder: RunFolder) -> list[dict[str, Any]]:
    """What the processes of a run left, by rank: {"rank", "applied", "not_applied"}."""
    found = []
    for rank in folder.ranks():
        for path in sorted((folder.path / f"rank{rank}").glob(f"{PREFIX}*.json")):
            if content := readable(path):
                found.append({"rank": rank, **{name: _entries(content, name) for name in _KINDS}})
    return found


def applied_beside(trace: str | Path) -> tuple[str, ...]:
    """What became of the remedies in the run that a trace of its folder is of, for people; empty elsewhere."""
    try:
        entries = RunFolder.open(Path(trace).parent.parent).manifest().applied
        return tuple(
            Outcome(each["flag"], each["sentence"], bool(each["applied"]), tuple(map(int, each.get("ranks", ())))).text
            for each in entries
        )
    except (UsageError, KeyError, TypeError, ValueError, AttributeError):  # no run, or one whose file is damaged
        return ()


def outcomes(words: Sequence[str], records: Sequence[Mapping[str, Any]], unseen: Mapping[str, str]) -> list[Outcome]:
    """What became of the flags that were asked for, in their order; what was done before what was not.

    That a flag found nothing to change in one process counts only where it found nothing in any other: a launcher
    imports torch too.

    Args:
        words: those that were asked for.
        records: see `applied_records`.
        unseen: of each flag, why nothing came of it where nothing else is said.
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
