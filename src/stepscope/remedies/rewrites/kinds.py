"""What a rewrite is: edits of a text, with what they rest on; and the diff that shows them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Characters `start` to `end` of the source become `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What a rewrite takes for granted of a tensor: what reads it, and how many dimensions it may have."""

    expression: str
    dimensions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Criterion:
    """What a rewrite takes for granted of an object that computes a loss, besides that it weighs no classes.

    Attributes:
        expression: what reads it.
        kind: the name of its class in torch.nn.
        reduction: "mean" or "sum".
        other: attributes that may be other than torch's defaults, since the rewrite reads them.
        is_argument: the next call of the function may be given another one.
    """

    expression: str
    kind: str
    reduction: str
    other: tuple[str, ...]
    is_argument: bool = False


@dataclass(frozen=True, slots=True)
class Positions:
    """The losses of all positions of a loop, for who runs it and cannot change it.

    Attributes:
        statements: source text to run before, with the names of the loop's function.
        losses: an expression that is then a tensor of one loss for each position, in order.
        variable: the loop's name for the position.
        start: the first position.
    """

    statements: str
    losses: str
    variable: str
    start: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One change of a source text that keeps every character around it.

    Attributes:
        name: of the kind of rewrite, as in `REWRITES`.
        line: the first line that changes, from 1 on.
        last_line: the last line of the statement that changes.
        function: the qualified name of the function that it stands in; "" for the module.
        explanation: one sentence that says what is different afterwards.
        assumptions: what must hold for the program to compute the same; each a sentence.
        edits: in order, none overlapping another.
        expected: what `assumptions` say of tensors, for who can look at them.
        criterion: the same of what computes the loss, where that is an object.
        positions: of a loop over numbers of positions, their losses.
    """

    name: str
    line: int
    last_line: int
    function: str
    explanation: str
    assumptions: tuple[str, ...]
    edits: tuple[Edit, ...]
    expected: tuple[Expected, ...] = field(default=())
    criterion: Criterion | None = None
    positions: Positions | None = None


def without_overlaps(rewrites: Iterable[Rewrite]) -> list[Rewrite]:
    """The rewrites in order of place, without those whose edits overlap with an earlier one's."""
    kept: list[Rewrite] = []
    taken: list[Edit] = []
    for rewrite in sorted(rewrites, key=lambda each: (each.edits[0].start, each.name)):
        if not any(_overlap(edit, other) for edit in rewrite.edits for other in taken):
            kept.append(rewrite)
            taken += rewrite.edits
    return kept


def rewritten(source: str, rewrites: Iterable[Rewrite]) -> str:
    """The source with the rewrites done; one that overlaps with an earlier one is left out."""
    edits = sorted(edit for rewrite in without_overlaps(rewrites) for edit in rewrite.edits)
    parts: list[str] = []
    position = 0
    for edit in edits:
        parts += [source[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, source[position:]])


def unified_diff(path: str, source: str, rewrites: Sequence[Rewrite]) -> str:
    """The rewrites as a diff that `git apply` and `patch -p1` take; "" where there is nothing to change.

    Args:
        path: of the file, relative to the folder that the diff is applied in, with / between folders.
    """
    before, after = _lines(source), _lines(rewritten(source, rewrites))
    lines = difflib.unified_diff(before, after, _quoted(f"a/{path}"), _quoted(f"b/{path}"))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as git has them: only a newline ends one."""
    lines = [f"{line}\n" for line in text.split("\n")]
    return [*lines[:-1], *([lines[-1][:-1]] if lines[-1] != "\n" else [])]


def _quoted(path: str) -> str:
    """As git writes a name: within quotes where it holds what would end the line or the name."""
    if path.isprintable() and not any(each in path for each in '"\\'):
        return path if " " not in path else f"{path}\t"
    return '"' + "".join(_octal(each) for each in path) + '"'


def _octal(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))


def _overlap(one: Edit, other: Edit) -> bool:
    return (one.start < other.end and other.start < one.end) or one == other
