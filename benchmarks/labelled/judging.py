"""Judges an answer about a recording by what is true of it: mechanically, the same way for every tool.

A truth (`Truth`, a record of real_traces.toml) is written from raw events, before any tool is asked:

    right          answers of which the first finding must be one
    defensible     answers that are accepted as well, each with its reason in `why`
    quiet          the right answer promises nothing: no finding of 5 % or more
    refused        the right answer is a refusal
    names          patterns that must occur somewhere in what is said
    also           answers that some finding must be
    saving         what the first finding may promise, as a share of the step
    step_ms, busy, matrix   length of a step, busy share of it, share of matrix work in the busy time
    must_not       what no finding may say, from a saving of `over` on

An answer to match names rules (`rules`), a pattern of the words (`says`: title and places) or of the places alone
(`place`); what it names must all match. An answer to be judged (`Said`) is what an adapter made of a tool's output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

PROMISES: Final = 0.05
"""Share of the step from which a finding promises something."""
TRUTHS: Final = Path(__file__).with_name("real_traces.toml")
_TRAINING: Final = re.compile(
    r"zero_grad|optimizer\.step|\.backward\(|DistributedDataParallel|FSDP|gradient", re.IGNORECASE
)
_NEVER: Final = re.compile(r"\bon None\b|\bNone processors|\b0 times\b|is \d+ others\b|\bnan\b|\binf %", re.IGNORECASE)
"""What is false or empty whatever the recording."""


class Finding(msgspec.Struct, frozen=True):
    """One cause that a tool names.

    Attributes:
        rule: the tool's own name of it.
        words: its sentence.
        places: each as `file:line function`.
        saving: share of the step that it promises; None where the tool promises nothing.
        advice: what it says to do.
        means: rules that its words stand for, where it names none; `score.py` fills them in.
    """

    rule: str = ""
    words: str = ""
    places: Sequence[str] = ()
    saving: float | None = None
    advice: str = ""
    means: Sequence[str] = ()

    def names(self, rules: Sequence[str]) -> bool:
        """Whether it is one of these rules."""
        return self.rule in rules or any(rule in rules for rule in self.means)


class Said(msgspec.Struct, frozen=True):
    """What a tool says of one recording, most important first.

    Attributes:
        refused: why it reads nothing; None where it answered.
        step_ms: length of a step; None where it gives none.
        busy: busy share of each device.
        matrix: share of matrix work in the busy time.
        notes: every other sentence.
    """

    findings: Sequence[Finding] = ()
    refused: str | None = None
    step_ms: float | None = None
    busy: Sequence[float] = ()
    matrix: float | None = None
    notes: Sequence[str] = ()


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer that is accepted, or one that is not."""

    rules: Sequence[str] = ()
    says: str = ""
    place: str = ""
    quiet: bool = False
    over: float = 0.0
    why: str = ""

    def fits(self, finding: Finding) -> bool:
        """Whether a finding is this answer."""
        if self.quiet or (self.rules and not finding.names(self.rules)):
            return False
        places = " ".join(finding.places)
        return bool(re.search(self.place, places) and re.search(self.says, f"{finding.words} {places}"))

    def forbids(self, finding: Finding) -> bool:
        """Whether a finding says what this answer says, of advice too, and promises more than `over`."""
        if (finding.saving or 0.0) < self.over or (self.rules and not finding.names(self.rules)):
            return False
        return bool(re.search(self.says, f"{finding.words} {finding.advice}"))


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is true of recordings, and which answers about them are right; the module's docstring has the keys."""

    paths: Sequence[str]
    truth: str
    found_by: str
    source: str = ""
    kind: str = "other"
    refused: bool = False
    quiet: bool = False
    right: Sequence[Answer] = ()
    defensible: Sequence[Answer] = ()
    names: Sequence[str] = ()
    also: Sequence[Answer] = ()
    saving: tuple[float, float] | None = None
    step_ms: tuple[float, float] | None = None
    busy: tuple[float, float] | None = None
    matrix: tuple[float, float] | None = None
    must_not: Sequence[Answer] = ()


class Source(msgspec.Struct, frozen=True):
    """Where public traces can be had.

    Attributes:
        folder: of the repository, where most of them lie; empty where it is unknown.
    """

    url: str
    licence: str
    folder: str = ""


class Truths(msgspec.Struct, frozen=True):
    """The file of truths."""

    sources: Mapping[str, Source]
    traces: Sequence[Truth]

    def by_path(self) -> dict[str, Truth]:
        """The truth of each recording."""
        return {path: truth for truth in self.traces for path in truth.paths}


class Verdict(msgspec.Struct, frozen=True):
    """How an answer about one recording was judged.

    Attributes:
        first: "right", "defensible", "wrong" or "missed".
        why: what was said first, or the reason for which it is defensible.
        missed: what should have been said besides.
        alarms: findings that must not be there.
        figures: figures that are off.
    """

    path: str
    first: str
    why: str = ""
    missed: Sequence[str] = ()
    alarms: Sequence[str] = ()
    figures: Sequence[str] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """What does not hold: "first", "missed", "alarms", "figures"."""
        wrong = ("first",) if self.first not in ("right", "defensible") else ()
        return wrong + tuple(kind for kind in ("missed", "alarms", "figures") if getattr(self, kind))

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong, missing or false."""
        return not self.faults


def truths(path: Path = TRUTHS) -> Truths:
    """Read the file of truths."""
    read = msgspec.toml.decode(path.read_bytes(), type=Truths)
    unexplained = [truth.paths[0] for truth in read.traces for answer in truth.defensible if not answer.why]
    if unexplained:
        raise ValueError(f"defensible answers need a reason: {', '.join(unexplained)}")
    return read


def judge(path: str, truth: Truth, said: Said) -> Verdict:
    """Judge what is said of a recording."""
    if truth.refused or said.refused is not None:
        return _of_refusal(path, truth, said)
    first, why = _of_first(truth, said)
    return Verdict(
        path, first, why, tuple(_missed(truth, said)), tuple(_alarms(truth, said)), tuple(_off(truth, said, first))
    )


def _of_refusal(path: str, truth: Truth, said: Said) -> Verdict:
    if said.refused is None:
        return Verdict(path, "wrong", f"answered: {_heading(said)}")
    sentence = said.refused.strip()
    if not truth.refused:
        return Verdict(path, "wrong", f"refused: {sentence}")
    one = bool(sentence) and len(sentence.splitlines()) == 1 and "Traceback" not in sentence
    return Verdict(
        path, "right" if one else "wrong", sentence.splitlines()[0] if sentence else "refused without a word"
    )


def _of_first(truth: Truth, said: Said) -> tuple[str, str]:
    promising = [finding for finding in said.findings if (finding.saving or 0.0) >= PROMISES]
    if truth.quiet and not promising:
        return "right", "nothing promised"
    first = promising[0] if truth.quiet else next(iter(said.findings), None)
    if first is not None and any(answer.fits(first) for answer in truth.right):
        return "right", first.rule
    for answer in truth.defensible:
        if answer.fits(first) if first is not None else _silence_fits(answer, said):
            return "defensible", answer.why
    if first is None:
        return "missed", "nothing found"
    return "wrong", f"{first.rule}: {first.words}"


def _silence_fits(answer: Answer, said: Said) -> bool:
    return answer.quiet and any(re.search(answer.says, note) for note in said.notes)


def _missed(truth: Truth, said: Said) -> Iterator[str]:
    everything = "\n".join([*said.notes, *(f"{each.words} {' '.join(each.places)}" for each in said.findings)])
    yield from (f"nothing says {pattern}" for pattern in truth.names if not re.search(pattern, everything))
    for answer in truth.also:
        if not any(answer.fits(finding) for finding in said.findings):
            yield f"no finding is {' or '.join(answer.rules) or answer.says}"


def _alarms(truth: Truth, said: Said) -> list[str]:
    """What must not be said: of the findings of several ranks, each rule counts once for each reason."""
    alarms: dict[tuple[str, str], str] = {}
    for finding in said.findings:
        for reason in _reasons_against(truth, finding):
            alarms.setdefault((finding.rule, reason), f"{finding.rule}: {finding.words} ({reason})")
    return list(alarms.values())


def _reasons_against(truth: Truth, finding: Finding) -> Iterator[str]:
    yield from (ban.why for ban in truth.must_not if ban.forbids(finding))
    if truth.kind == "inference" and (found := _TRAINING.search(f"{finding.words} {finding.advice}")):
        yield f"speaks of training, {found.group()!r}, where nothing is trained"
    if found := _NEVER.search(finding.words):
        yield f"{found.group()!r} cannot be true"


def _off(truth: Truth, said: Said, first: str) -> Iterator[str]:
    if truth.step_ms:
        yield from _outside("step of {:.1f} ms", said.step_ms, truth.step_ms)
    if truth.busy:
        for share in said.busy or [None]:
            yield from _outside("busy {:.3f}", share, truth.busy)
    if truth.matrix:
        yield from _outside("matrix work {:.3f} of the busy time", said.matrix, truth.matrix)
    if truth.saving and first in ("right", "defensible"):
        promised = next((finding.saving for finding in said.findings if finding.saving is not None), None)
        yield from _outside("promises {:.3f}", promised, truth.saving)


def _outside(words: str, figure: float | None, bounds: tuple[float, float]) -> Iterator[str]:
    low, high = bounds
    expected = f"expected {low:g} to {high:g}"
    if figure is None:
        yield f"{words.split(' {')[0]}: no figure, {expected}"
    elif not low <= figure <= high:
        yield f"{words.format(figure)}, {expected}"


def _heading(said: Said) -> str:
    return said.findings[0].words if said.findings else "nothing found"
