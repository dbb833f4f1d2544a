"""The blind programs and the truth of each: what is planted where, and what a step gains without it.

The programs were written by someone who had not read the rules. Each is a script of this folder or of a folder of its
own, with `--mended` for the twin without the fault. The fault's lines end with MARK.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent
TRUTHS_FILE: Final = FOLDER / "truths.toml"
GAINS: Final = FOLDER / "gains.json"
ADVICE: Final = FOLDER / "advice.json"
ALARMS: Final = FOLDER / "alarms.json"
MARK: Final = "# planted"
_NUMBER: Final = re.compile(r"[\d.,]*\d")


class Kind(Enum):
    """Classes of faults; the value is the class of the published taxonomy of low utilisation that it belongs to."""

    PREPARED_PER_SAMPLE = "data operations: preprocessed anew for each sample"
    CONVERTED_PER_SAMPLE = "data operations: converted sample by sample"
    READ_AGAIN = "data operations: read again"
    COLLATED_BY_HAND = "data operations: batches put together in Python"
    STATISTIC_AGAIN = "data operations: a constant of the data computed again"
    ITERATOR_AGAIN = "data operations: the loader's iterator made anew in each step"
    WIDE_TYPE = "data operations: a wider type than needed"
    CONSTANT_AGAIN = "model: a constant computed again"
    GRADIENT_UNUSED = "model: gradients that nobody uses"
    GRAPH_AGAIN = "model: the same graph run several times"
    PREFIX_AGAIN = "model: decoding without a cache"
    LOOP = "model: a Python loop over what is one operation"
    ALGEBRA = "model: more arithmetic than the result needs"
    MODEL_AGAIN = "loop: the model made or copied anew in each step"
    EVALUATED_TOO_OFTEN = "loop: evaluated or logged too often"
    RESULT_AGAIN = "loop: the same result computed again in each step"


@dataclass(frozen=True)
class Gain:
    """What a stopwatch says of both variants: milliseconds of a step, medians of `runs`.

    Attributes:
        fault_ms, mended_ms: by the clock.
        fault_cpu_ms, mended_cpu_ms: that the process was given on its processors.
        load: of the machine when it was measured.
    """

    fault_ms: float
    mended_ms: float
    fault_cpu_ms: float
    mended_cpu_ms: float
    runs: int
    load: float

    @property
    def share(self) -> float:
        """Of the faulty step's processor time, which is its time on a quiet machine."""
        return 1 - self.mended_cpu_ms / self.fault_cpu_ms

    @property
    def clock_share(self) -> float:
        """The same by the clock."""
        return 1 - self.mended_ms / self.fault_ms


@dataclass(frozen=True)
class Advice:
    """A judgement of what a rule advises for a program, by someone who knows its fault.

    Attributes:
        rule: that advised it.
        advice: its words; other numbers in them make no difference.
        leads_to_the_fix: whether one who follows it arrives at the change.
        reason: why, in a sentence.
    """

    rule: str
    advice: str
    leads_to_the_fix: bool
    reason: str

    def is_about(self, rule: str, advice: str) -> bool:
        """Whether these are the rule and the words that were judged."""
        return rule == self.rule and _NUMBER.sub("#", advice) == _NUMBER.sub("#", self.advice)


@dataclass(frozen=True)
class Alarm:
    """What a stopwatch says of a promise made on a variant without its fault, after the advised change.

    Both variants ran in pairs, in turns, without a profiler. Of all pairs, those in which other programs disturbed
    them least count.

    Attributes:
        promised: share of the step.
        gained: share of the twin's step, the median of the pairs.
        least, most: of the pairs.
        measured: "processor" for the time that the process was given, as of a `Gain`; "clock" where the change starts
            workers, in pairs that had a processor free for them.
        pairs: number of them.
        verdict: "confirmed", "partly" or "refuted", as `verdict_of` says.
        change: what was changed, in a sentence.
    """

    promised: float
    gained: float
    least: float
    most: float
    measured: str
    pairs: int
    verdict: str
    change: str

    def verdict_of(self, promised: float) -> str:
        """Whether the gain is at least half of such a promise, at least a quarter, or less."""
        kept = self.gained / promised
        return "confirmed" if kept >= 0.5 else "partly" if kept >= 0.25 else "refuted"


@dataclass(frozen=True)
class Truth:
    """What is planted in one blind program.

    Attributes:
        script: the program's file, relative to FOLDER.
        kind: class of the fault.
        cause: what takes the time, in a sentence.
        change: what to do about it, in a sentence.
        half: 1 for the programs that were there before any diagnosis was run on one, 2 for the later ones, 3 and above
            for sets that were written after the rules had been changed with the earlier ones in view.
        step_function: whose calls are the program's steps; None where an optimizer's steps are.
    """

    script: str
    kind: Kind
    cause: str
    change: str
    half: int = 1
    step_function: str | None = None

    @property
    def path(self) -> Path:
        """The program's file."""
        return FOLDER / self.script

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the program."""
        return (self.path,) if self.path.parent == FOLDER else tuple(sorted(self.path.parent.glob("*.py")))

    def lines(self) -> frozenset[tuple[str, int]]:
        """Names of files and numbers of lines that are the fault's."""
        return frozenset((file.name, number) for file in self.files for number in _marked(file.read_text()))

    def is_at(self, file: str, line: int) -> bool:
        """Whether it is a planted line, or in a function (but main) that holds one or that such a line calls."""
        return any(Path(file).name == name and begin <= line <= end for name, begin, end in self._places())

    def _places(self) -> set[tuple[str, int, int]]:
        """Files' names with first and last lines."""
        functions = [one for file in self.files for one in _functions(file)]
        marks = self.lines()
        called = {
            name for file in self.files for name in _called(file, {line for own, line in marks if own == file.name})
        }
        holding = [
            one
            for one in functions
            if one.name != "main" and any(one.file == own and one.begin <= line <= one.end for own, line in marks)
        ]
        reached: set[_Function] = set()
        while fresh := [one for one in functions if one.name in called and one not in reached]:
            reached.update(fresh)
            called |= {name for one in fresh for name in one.calls}
        places = {(one.file, one.begin, one.end) for one in [*holding, *reached]}
        return places | {(own, line, line) for own, line in marks}


def truth(name: str) -> Truth:
    """Of the program of that name."""
    return TRUTHS[name]


def gains() -> dict[str, Gain]:
    """What was measured, by the programs' names."""
    return {name: Gain(**row) for name, row in json.loads(GAINS.read_text()).items()} if GAINS.exists() else {}


def alarms() -> dict[str, dict[str, Alarm]]:
    """The promises that were measured, by the programs' names and the rules."""
    rows = json.loads(ALARMS.read_text())
    return {name: {rule: Alarm(**row) for rule, row in of_rules.items()} for name, of_rules in rows.items()}


def judged(name: str, rule: str, advice: str) -> Advice | None:
    """The judgement of this advice for a program; None where nobody judged these words."""
    rows = json.loads(ADVICE.read_text()).get(name, [])
    return next((each for row in rows if (each := Advice(**row)).is_about(rule, advice)), None)


def _marked(text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]


@dataclass(frozen=True)
class _Function:
    file: str
    name: str
    begin: int
    end: int
    calls: frozenset[str]


def _functions(path: Path) -> list[_Function]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [
        _Function(path.name, node.name, node.lineno, node.end_lineno or node.lineno, frozenset(_names(node)))
        for node in nodes
    ]


def _called(path: Path, lines: set[int]) -> set[str]:
    """Names of what these lines call."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {name for node in calls if node.lineno in lines for name in _names(node)}


def _names(node: ast.AST) -> set[str]:
    """Names of what is called below a node."""
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in functions
        if hasattr(one, "attr") or hasattr(one, "id")
    }


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    script: str
    kind: str
    cause: str
    change: str
    half: int
    step_function: str | None = None


def _truths() -> dict[str, Truth]:
    rows = msgspec.toml.decode(TRUTHS_FILE.read_bytes(), type=dict[str, _Row])
    return {
        name: Truth(
            row.script, Kind[row.kind.replace("-", "_").upper()], row.cause, row.change, row.half, row.step_function
        )
        for name, row in rows.items()
    }


TRUTHS: Final = _truths()
NAMES: Final = tuple(TRUTHS)
