"""What kind of work functions do, from their time line by line and from what the recorder read in their source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.attribution import SourcePlace
from stepscope.diagnosis.finding import Figure, Location, Remedy
from stepscope.diagnosis.lines.costs import function_at, line_costs
from stepscope.diagnosis.lines.values import equal_lines
from stepscope.diagnosis.view import SMALLEST_PLACE, View
from stepscope.files import shipped
from stepscope.trace.nesting import at
from stepscope.trace.program_facts import FunctionFacts, WorkFacts
from stepscope.whatif import Change
from stepscope.whatif.changes import together

Kind: TypeAlias = Literal[
    "equal", "constant", "growing", "row", "lookup", "masked", "shuffled", "weighted", "appended", "converted",
    "loop", "again",
]  # fmt: skip
"""What a work does, the most telling first: "equal" has equal results by their hashes, "again" gives the same for the
same sample, the others are of WorkFacts.
"""
_KINDS: Final[tuple[Kind, ...]] = (
    "equal", "constant", "growing", "row", "lookup", "masked", "shuffled", "weighted", "appended", "converted", "loop",
)  # fmt: skip
_MOSTLY_CHEAP: Final = frozenset({"masked", "shuffled", "weighted", "appended", "converted"})
"""Kinds of work whose source alone does not say that they cost anything."""
NAMED: Final = 0.3
"""Smallest share of the functions' time at which a kind of work is named."""
MOST: Final = 0.5
"""The same for loops, whose evidence is weaker, and for results that could be kept."""
_OFTEN: Final = 0.5
"""Largest share of distinct results among a function's calls for them to count as equal."""
_FEWEST: Final = 8
"""Fewest repetitions per sample of a loop over elements."""
_INNER: Final = re.compile("<(?:list|set|dict)comp>|<genexpr>")
_SHOWN: Final = 3
_Line: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work in functions.

    Attributes:
        share: share of the examined time, 0 to 1.
        name: name of what is bound, searched or read; "" if it has none.
        function: the source's name of the function with its costliest line.
        begin: line where that function begins.
        where: its lines, costliest first; `share` of a place refers to the examined time.
        length: entries of the searched list; 0 if unknown or none.
        calls, distinct: values in a step, and how many are distinct; 0 unless it is "equal".
        runs: how often a step runs the costliest line; None if unknown.
        lines: file and number of all its lines.
    """

    kind: Kind
    share: float
    name: str
    function: str
    begin: int
    where: tuple[Location, ...]
    length: int = 0
    calls: int = 0
    distinct: int = 0
    runs: float | None = None
    lines: frozenset[_Line] = frozenset()


class FunctionWork:
    """The kinds of work in the functions where some pieces of the main thread's time were spent.

    Args:
        pieces: columns as in `View.pieces`.
        samples: how often a step calls a function that works on one sample.
    """

    def __init__(self, view: View, pieces: pl.DataFrame, samples: float = 1.0) -> None:
        self._view = view
        self._pieces = pieces
        self._samples = samples
        self._costs = line_costs(view)
        self._whole: dict[_Line, FunctionFacts] = {}
        self._functions: dict[str, list[FunctionFacts]] = {}
        for each in view.program.functions:
            self._functions.setdefault(each.file, []).append(each)

    @cached_property
    def lines(self) -> dict[_Line, float]:
        """Nanoseconds of each line; a function that was only noted as a whole is spread over its sampled lines."""
        found = dict[_Line, float]()
        for place, ns, _ in self._costs_of_places:
            found[place.file, place.line] = found.get((place.file, place.line), 0.0) + ns
        for line in list(found):
            function = self.function_at(line)
            if function is not None and line[1] == function.line and _spread(found, line, function):
                self._whole[line] = function
        return found

    @cached_property
    def _costs_of_places(self) -> list[tuple[SourcePlace, int, int]]:
        """Each place with its nanoseconds, and how many of them lie outside operators."""
        ns, outside = pl.col("duration_ns"), ~pl.col("in_operator")
        table = self._costs.placed(self._pieces).filter(pl.col("place") >= 0).group_by("place")
        sums = table.agg(ns.sum().alias("ns"), ns.filter(outside).sum().alias("outside")).sort("place")
        places = self._view.attribution.places
        return [(places[number], whole, outside) for number, whole, outside in sums.iter_rows()]

    def _is_repeated(self, loop: WorkFacts) -> bool:
        """Whether a loop repeats often per sample or, if on one line, takes most of the line's time."""
        if loop.first < loop.last:
            runs = [
                self._runs[line] for line in self._runs if line[0] == loop.file and loop.first <= line[1] <= loop.last
            ]
            return not runs or max(runs) >= _FEWEST * self._samples
        mine = [each for each in self._costs_of_places if (each[0].file, each[0].line) == (loop.file, loop.first)]
        inner = [whole for place, whole, _ in mine if _INNER.fullmatch(place.function)]
        alone = sum(inner) if inner else sum(outside for _, _, outside in mine)
        return alone >= MOST * sum(whole for _, whole, _ in mine)

    def scaled(self, work: Work, left: float) -> Change:
        """The change that leaves this share of a work's time."""
        factors = dict.fromkeys(work.lines, left)
        for whole, function in self._whole.items():
            inner = [line for line in self.lines if _is_in(line, whole[0], function)]
            mine = sum(self.lines[line] for line in inner if line in work.lines)
            factors[whole] = 1 - (1 - left) * mine / max(sum(self.lines[line] for line in inner), 1)
        places = enumerate(self._view.attribution.places)
        known = [(number, factors[key]) for number, place in places if (key := (place.file, place.line)) in factors]
        same = [np.array([number for number, each in known if each == factor]) for factor in set(factors.values())]
        return together(*map(self._costs.scaled, same, set(factors.values())))

    def function_at(self, line: _Line) -> FunctionFacts | None:
        """The innermost function of the source around a line."""
        return function_at(self._functions.get(line[0], ()), line)

    @cached_property
    def _borders(self) -> set[_Line]:
        """Lines where steps begin and batches are requested: code around them belongs to no single batch."""
        view = self._view
        timeline = view.activity.line_timelines.get(-1 if view.lane is None else view.lane)
        if timeline is None:
            return set()
        marks = view.trace.annotations.filter(pl.col("name").str.contains("DataLoader"))["start_ns"]
        times = np.concatenate([view.steps["start_ns"].to_numpy(), marks.to_numpy()])
        numbers = np.unique(at(view.attribution.line_place, timeline.at(times)))
        places = view.attribution.places
        return {(places[each].file, places[each].line) for each in numbers.tolist() if each >= 0}

    def costliest(self) -> Work | None:
        """The most telling kind of work that takes at least NAMED (a loop: MOST) of the time, or None."""
        return next((work for work in self._by_kind(self._total) if work.share >= least(work)), None)

    def places(self) -> tuple[Location, ...]:
        """The lines that take most of the time, costliest first."""
        order = sorted(self.lines, key=lambda line: (-self.lines[line], line))[:_SHOWN]
        total = max(self._total, 1.0)
        shares = ((line, self.lines[line] / total) for line in order)
        return tuple(self.location(line, share) for line, share in shares if share >= SMALLEST_PLACE)

    def loops_at(self, where: Iterable[Location]) -> list[tuple[Location, str]]:
        """The places that are inside loops of functions, with the functions' names."""
        loops = [each for each in self._works() if each.kind == "loop" and self._counts(each)]
        found = []
        for place in where:
            function = self.function_at((place.file, place.line))
            if function and any(each.file == place.file and each.first <= place.line <= each.last for each in loops):
                found.append((place, function.name))
        return found

    def in_source(self, file: str, line: int, share: float) -> Work | None:
        """The kind of work of a function whose lines' time is unknown, such as one that runs in workers.

        Args:
            share: share of the time that the function takes, 0 to 1.
        """
        function = next((each for each in self._functions.get(file, ()) if each.line == line), None)
        if function is None:
            return None
        called = self._called(WorkFacts(file=file, function=line, calls=function.calls))
        begins = {(each.file, each.line): each for each in (function, *called)}
        for kind in (kind for kind in _KINDS[2:] if kind not in _MOSTLY_CHEAP):
            for work in self._works():
                if _kind_of(work) == kind and self._counts(work) and (inner := begins.get((work.file, work.function))):
                    place = self.location((work.file, work.first), share)
                    return Work(kind, share, work.name, inner.name, inner.line, (place,), self._length(work))
        return None

    def repeated(self, begins: set[_Line]) -> Work | None:
        """The functions that begin at these lines and those they call, if no result changes by itself.

        None if the source shows that they may change, or if they take less than MOST of the time.
        """
        functions = [each for each in self._view.program.functions if (each.file, each.line) in begins]
        if len(functions) < len(begins):  # one of a library, such as a transform
            return None
        spans = [
            span for each in functions
            for span in (each, *self._called(WorkFacts(file=each.file, function=each.line, calls=each.calls)))
        ]  # fmt: skip
        around = self._running  # such as main, which asks for the batches
        ran = [each for each in map(self.function_at, self.lines) if each and (each.file, each.line) not in around]
        if not spans or any(span.changes_by_itself for span in (*spans, *ran)):
            return None
        spans += ran  # also what they call by names that the source does not tell
        lines = {line for line in self.lines if any(_is_in(line, span.file, span) for span in spans)}
        work = self._work("again", lines, None, self._total)
        return work if work is not None and work.share >= MOST else None

    @property
    def _total(self) -> float:
        return float(self._pieces["duration_ns"].sum())

    def _by_kind(self, total: float) -> Iterator[Work]:
        yield from self._equal(total)
        for kind in _KINDS[1:]:
            mine = [each for each in self._works() if _kind_of(each) == kind and self._counts(each) and self._ran(each)]
            lines_of = [self._lines_of(each) for each in mine]
            costs = [sum(self.lines[line] for line in lines) for lines in lines_of]
            cause = mine[costs.index(max(costs))] if mine else None
            work = self._work(kind, set[_Line]().union(*lines_of), cause, total)
            if work is not None:
                yield work

    def _works(self) -> tuple[WorkFacts, ...]:
        return self._view.program.works

    def _counts(self, work: WorkFacts) -> bool:
        """Whether part of a function repeats within the examined time and meets its kind's conditions."""
        borders = [line for file, line in self._borders if file == work.file]
        if work.kind == "constant":
            function = self.function_at((work.file, work.first))
            inside = function is not None and any(function.line <= line <= function.last for line in borders)
            return function is not None and not inside and not self._differs(work)
        if work.kind == "maybe_lookup":
            return self._length(work) > 0
        if work.kind != "loop":
            return True
        around = any(work.first <= line <= work.last for line in borders)
        around |= any(_is_in(border, each.file, each) for border in self._borders for each in self._called(work))
        return not around and self._is_repeated(work)

    def _ran(self, work: WorkFacts) -> bool:
        """Whether the steps come to the work's function, not to another, such as a constructor, with the same calls."""
        function = self.function_at((work.file, work.first))
        if function is None:
            return True
        begin = (function.file, function.line)
        return begin in self._visited and (work.kind != "constant" or begin not in self._running)

    @cached_property
    def _running(self) -> set[_Line]:
        """First lines of functions that began before the steps, such as main: the steps only come to lines in loops."""
        loops: dict[_Line, list[tuple[int, int]]] = {}
        for work in self._works():
            if work.kind == "loop" and work.first < work.last:
                loops.setdefault((work.file, work.function), []).append((work.first, work.last))
        lines: dict[_Line, list[int]] = {}
        for number in self._costs.runs:
            place = self._view.attribution.places[number]
            if function := self.function_at((place.file, place.line)):
                lines.setdefault((function.file, function.line), []).append(place.line)
        return {
            begin
            for begin, mine in lines.items()
            if all(any(first <= line <= last for first, last in loops.get(begin, ())) for line in mine)
        }

    @cached_property
    def _visited(self) -> set[_Line]:
        """First lines of the functions that steps come to: with recorded lines, the loader's, and what these call."""
        places = self._view.attribution.places
        seen = {*self.lines, *((places[number].file, places[number].line) for number in self._costs.runs)}
        found = {(each.file, each.line) for each in map(self.function_at, seen) if each is not None}
        found |= {(each.file or "", each.line or 0) for each in self._view.program.input_stages}
        begun = [each for each in self._view.program.functions if (each.file, each.line) in found]
        return found | self._reached([(each.file, name) for each in begun for name in each.calls]).keys()

    def _differs(self, work: WorkFacts) -> bool:
        """Whether the value that a statement binds differs from call to call, by its hashes."""
        return any(
            not each.is_constant and each.distinct > _OFTEN * each.calls
            for each in self._view.program.values
            if (each.file, each.line, each.name) == (work.file, work.function, work.name)
        )

    def _length(self, work: WorkFacts) -> int:
        """Entries of the list that a lookup searches."""
        mine = (each.length for each in self._view.program.lists if each.file == work.file and each.name == work.name)
        return max(mine, default=0)

    def _lines_of(self, work: WorkFacts) -> set[_Line]:
        """The lines of a part of a function, and those of the functions that it calls, that took time."""
        spans = [
            (work.file, work.first, work.last),
            *((each.file, each.line, each.last) for each in self._called(work)),
        ]
        return {
            line
            for line in self.lines
            if any(line[0] == file and first <= line[1] <= last for file, first, last in spans)
        }

    def _called(self, work: WorkFacts) -> Iterable[FunctionFacts]:
        """Functions of the program that part of a function calls, directly or through others."""
        return self._reached([(work.file, name) for name in work.calls], (work.file, work.function)).values()

    def _reached(self, names: list[tuple[str, str]], without: _Line | None = None) -> dict[_Line, FunctionFacts]:
        """Functions that these names in files call, directly or through others, by their first lines."""
        found: dict[_Line, FunctionFacts] = {}
        waiting = list(names)
        while waiting:
            function = self._named(*waiting.pop())
            if function is None or (place := (function.file, function.line)) in found:
                continue
            if place != without:
                found[place] = function
                waiting += [(function.file, name) for name in function.calls]
        return found

    def _named(self, file: str, name: str) -> FunctionFacts | None:
        """The function that a name in a file refers to: one in that file, or else the only one of that name."""
        own = self._by_name.get(name, [])
        here = [each for each in own if each.file == file]
        candidates = here or own
        return candidates[0] if len(candidates) == 1 else None

    @cached_property
    def _by_name(self) -> dict[str, list[FunctionFacts]]:
        """Functions by their qualified name, and by a dot and its last part."""
        found: dict[str, list[FunctionFacts]] = {}
        for each in self._view.program.functions:
            for name in (each.name, "." + each.name.rpartition(".")[2]):
                found.setdefault(name, []).append(each)
        return found

    def _equal(self, total: float) -> Iterator[Work]:
        for equal in equal_lines(self._view, self._costs):
            if equal.calls > 1 and equal.distinct > _OFTEN * equal.calls:  # steps that repeat the same samples
                continue
            places = [self._view.attribution.places[number] for number in equal.numbers.tolist()]
            lines = {(place.file, place.line) for place in places} & self.lines.keys()
            work = self._work("equal", lines, None, total)
            if work is not None:
                yield replace(work, name=equal.what, calls=equal.calls, distinct=equal.distinct)

    def _work(self, kind: Kind, lines: set[_Line], cause: WorkFacts | None, total: float) -> Work | None:
        """The work of this kind in these lines, most of it due to the cause, if there is one."""
        costs = {line: self.lines[line] for line in lines}
        if not costs or total <= 0:
            return None
        order = sorted(costs, key=lambda line: (-costs[line], line))
        function = self.function_at(order[0] if cause is None else (cause.file, cause.first))
        where = [self.location(line, costs[line] / total) for line in order[:_SHOWN]]
        if cause is not None and function != self.function_at(order[0]):  # the statement calls the slow code
            where = [self.location((cause.file, cause.first), sum(costs.values()) / total), *where[: _SHOWN - 1]]
        return Work(
            kind,
            min(sum(costs.values()) / total, 1.0),
            cause.name if cause is not None else "",
            function.name if function is not None else "",
            function.line if function is not None else 0,
            tuple(where),
            length=self._length(cause) if cause is not None else 0,
            runs=self._runs.get(order[0]),
            lines=frozenset(lines),
        )

    @cached_property
    def _runs(self) -> dict[_Line, float]:
        """How often a step runs each line; sampled functions are left out."""
        places = self._view.attribution.places
        found = {(places[number].file, places[number].line): runs for number, runs in self._costs.runs.items()}
        sampled = {function for line in found if (function := self.function_at(line)) and line[1] == function.line}
        return {line: runs for line, runs in found.items() if self.function_at(line) not in sampled}

    def location(self, line: _Line, share: float) -> Location:
        function = self.function_at(line)
        name = function.name.rpartition(".")[2] if function is not None else ""
        return Location(line[0], line[1], name, min(share, 1.0), exact_line=True)


def least(work: Work) -> float:
    """Smallest share of the functions' time at which this kind of work is named."""
    return MOST if work.kind in ("converted", "loop", "again") else NAMED


def _kind_of(work: WorkFacts) -> str:
    return "lookup" if work.kind == "maybe_lookup" else work.kind


def _is_in(line: _Line, file: str, function: FunctionFacts) -> bool:
    return line[0] == file and function.line < line[1] <= function.last


def _spread(found: dict[_Line, float], whole: _Line, function: FunctionFacts) -> bool:
    """Spread a function's undivided time over its lines in proportion to their own, if any has time."""
    inner = [line for line in found if _is_in(line, whole[0], function)]
    sampled = sum(found[line] for line in inner)
    if sampled > 0:
        factor = 1 + found.pop(whole) / sampled
        for line in inner:
            found[line] *= factor
    return sampled > 0


_LEFT: Final[dict[Kind, float]] = {
    "growing": 0.05,
    "row": 0.05,
    "masked": 0.05,
    "lookup": 0.05,
    "shuffled": 0.1,
    "weighted": 0.1,
    "appended": 0.1,
    "converted": 0.05,
    "loop": 0.1,
}
"""Share of the time that the better way still takes; none remains if the result is kept."""


def left_of(work: Work) -> float:
    """Share of the work's time that remains after the remedy, 0 to 1."""
    return _LEFT.get(work.kind, 0.0)


def said_of(view: View, work: Work) -> str:
    """What the work is, as the beginning of a sentence."""
    name = work.name or "its result"
    if work.kind == "equal":
        different = "one value" if work.distinct == 1 else f"{work.distinct:,} different values"
        often = f"has {different} in {work.calls:,} calls" if work.calls > 1 else "is the same"
        return f"{name} {often} {view.a_step}, and is computed each time"
    if work.kind == "lookup":
        length = f"its {work.length:,} entries" if work.length else "its entries"
        return f"{work.function} searches the list {name}, {length} one after another"
    does = _DOES.get(work.kind, "goes through elements in a Python loop")
    return f"{work.function} {does.format(name=name)}"


_DOES: Final[dict[Kind, str]] = {
    "constant": "computes {name} in each call, although it does not depend on the arguments",
    "growing": "reads a slice of {name} that grows with its loop, from one end in each repetition",
    "row": "takes single rows from the table {name}",
    "masked": "compares all of a column of {name} in each call",
    "shuffled": "draws without replacement by shuffling all entries",
    "weighted": "draws by the probabilities {name}, all of which it adds up again",
    "appended": "extends {name} part by part in a loop, and copies all of it each time",
    "converted": "makes a tensor or an array from {name} in each call",
}


def figures_of(work: Work) -> list[Figure]:
    """The evidence for the kind of work."""
    known = {
        "entries of the list": work.length,
        "values in a step": work.calls,
        "different ones among them": work.distinct,
    }
    found = [Figure(name, value, "count") for name, value in known.items() if value]
    if work.runs is not None:
        found.append(Figure("times that a step comes to the costliest line", work.runs, "count"))
    return found


def remedy_of(work: Work, *, is_collate: bool = False, in_step: bool = False, hides: str = "") -> Remedy:
    """What to change.

    Args:
        is_collate: whether the function puts samples together into a batch.
        in_step: whether it is part of the step and makes no samples.
        hides: a sentence about what else helps.
    """
    change = shipped("function_changes.toml", dict[str, dict[str, str]]).get(work.kind)
    if change is None:
        text, code = _without_loop(work, is_collate, in_step)
        return Remedy(text + hides, code)
    without_name = change["without_name"]
    variable = work.name.rpartition(".")[2]
    names = {
        "what": work.name or without_name,
        "variable": variable if variable.isidentifier() else without_name.rpartition(" ")[2],
        "function": work.function,
    }
    return Remedy(change["text"].format(**names) + hides, change["code"].format(**names))


def _without_loop(work: Work, is_collate: bool, in_step: bool) -> tuple[str, str]:
    if in_step:
        return (
            f"Let {work.function} compute on whole arrays or tensors instead of element by element.",
            "result = torch.where(values > limit, a, b)        # instead of a loop with an if over values\n"
            "sums = values.cumsum(0)                           # instead of a loop that adds up",
        )
    if is_collate:
        return (
            f"Let {work.function} put whole samples together instead of going through their elements: stack, "
            "concatenate or pad them, and write single entries by one assignment with index arrays.",
            "torch.nn.utils.rnn.pad_sequence([torch.as_tensor(sample) for sample in samples], batch_first=True)\n"
            "torch.stack(samples)                      # where all have one length\n"
            "batch[rows, columns] = values             # instead of batch[row, column] = value in a loop",
        )
    return (
        f"Let {work.function} compute on whole arrays or tensors instead of element by element; where that cannot be, "
        "do it once for each sample before training, and keep the results.",
        "result = numpy.where(values > limit, a, b)        # instead of a loop with an if over values\n"
        "samples = [prepare(sample) for sample in dataset]  # or once, before training",
    )
