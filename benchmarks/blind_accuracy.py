"""What stepscope says of programs whose faults its rules were not written with.

    python benchmarks/blind_accuracy.py [--only NAME ...] [--half 1..6] [--traces FOLDER] [--json FILE]
    python benchmarks/blind_accuracy.py --score FILE [--rehearsed FILE]

Records both variants of each program of tests/zoo/blind with `stepscope run` and its default options, diagnoses them,
and scores what was found: whether the first finding's place is a planted line or in the function that holds one,
whether its advice leads to the fix (judged by hand, with a reason, in tests/zoo/blind/advice.json: what nobody judged
counts as wrong and is named), how far its promise is from the gain that a stopwatch measured (gains.json), and what is
said above 5 % of the step of the variant without the fault, and whether a stopwatch confirmed that (alarms.json: the
advised change gains at least half of what is promised). What is said of other programs on the machine counts
nowhere: it is true, and not the program's. --score scores an earlier --json FILE again; --rehearsed
takes a --json FILE of diagnosis_accuracy.py and prints both sets side by side.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import diagnosis_accuracy as rehearsed  # noqa: E402

from tests.zoo import measure, verdict  # noqa: E402
from tests.zoo.blind.registry import NAMES, Advice, alarms, gains, judged, truth  # noqa: E402
from tests.zoo.verdict import ALARM, Verdict, line_of  # noqa: E402

KEPT: Final = ("rule", "title", "severity", "confidence", "saving_share", "saving_ns_per_step", "saving_from")
Findings = list[dict[str, Any]]


def found_in(name: str, mended: bool, folder: Path) -> Findings:
    """What a diagnosis of one variant says, in its order, without the evidence."""
    words = [str(truth(name).path), *(["--mended"] if mended else [])]
    again = functools.partial(measure.record_words, words, f"{name}-{'mended' if mended else 'fault'}", folder)
    _, found = measure.undisturbed(again, "")
    return [
        {key: finding[key] for key in KEPT}
        | {"where": [_place(place) for place in finding["where"][:3]], "advice": finding["remedy"]["text"]}
        for finding in found
    ]


def _place(place: Mapping[str, Any]) -> dict[str, Any]:
    return {"file": Path(place["file"]).name, "line": place["line"]}


@dataclass(frozen=True)
class Score:
    """What was said of one blind program.

    Attributes:
        name: of the program.
        first: the first finding on the variant with the fault that is no note; None where there is none.
        rank: of the first finding with the right place and advice, from 1; None where there is none.
        place: whether the first finding's place is the fault's.
        judged: whether the first finding's advice leads to the fix, and why; None where nobody judged it.
        promised: share of the step that the first finding promises, with all findings of its rule.
        gained: share of the step that a stopwatch measured.
        alarms: findings on the variant without the fault above ALARM: rule, share, title.
    """

    name: str
    first: dict[str, Any] | None
    rank: int | None
    place: bool
    judged: Advice | None
    promised: float | None
    gained: float
    alarms: tuple[tuple[str, float, str], ...]

    @property
    def is_silent_or_confirmed(self) -> bool:
        """Whether a stopwatch confirmed all that is said of the variant without the fault."""
        measured = alarms().get(self.name, {})
        return all(
            rule in measured and measured[rule].verdict_of(promised) == "confirmed" for rule, promised, _ in self.alarms
        )

    @property
    def advised(self) -> bool:
        """Whether the first finding's advice was judged to lead to the fix."""
        return self.judged is not None and self.judged.leads_to_the_fix

    @property
    def right(self) -> bool:
        """Whether the planted cause came first: at its place, with advice that names the change."""
        return self.place and self.advised

    @property
    def off(self) -> float | None:
        """Points of the step between promise and gain, of a right first finding."""
        return self.promised - self.gained if self.right and self.promised is not None else None


def scored(name: str, fault: Findings, mended: Findings) -> Score:
    """Hold what was found against the truth."""
    one = truth(name)

    def at_its_place(finding: Mapping[str, Any]) -> bool:
        place = line_of(dict(finding))
        return place is not None and one.is_at(*place)

    def is_right(finding: Mapping[str, Any]) -> bool:
        judgement = judged(name, finding["rule"], finding["advice"])
        return at_its_place(finding) and judgement is not None and judgement.leads_to_the_fix

    fault, mended = (
        [each for each in found if each["rule"] not in measure.DISTURBED and each["severity"] != "note"]
        for found in (fault, mended)
    )
    first = fault[0] if fault else None
    promised = None if first is None else verdict.promised(fault, first["rule"])
    return Score(
        name,
        first,
        next((rank for rank, finding in enumerate(fault, 1) if is_right(finding)), None),
        first is not None and at_its_place(first),
        None if first is None else judged(name, first["rule"], first["advice"]),
        None if promised is None else promised[0],
        gains()[name].share,
        tuple((each["rule"], each["saving_share"], each["title"]) for each in mended if each["saving_share"] > ALARM),
    )


def table(scores: Sequence[Score]) -> str:
    """A row for each program, in Markdown."""
    rows = [
        "| program | class | first finding | planted cause first | at its place | advice leads to the fix "
        "| promised, gained | above 5 % without the fault |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in scores:
        said = "nothing" if one.first is None else f"`{one.first['rule']}`"
        promised = "-" if one.promised is None else f"{one.promised:.0%}"
        alarms = ", ".join(f"`{rule}` {share:.0%}" for rule, share, _ in one.alarms) or "-"
        rank = "" if one.rank in (None, 1) else f" (number {one.rank})"
        rows.append(
            f"| {one.name} | {truth(one.name).kind.value} | {said} | {_yes(one.right)}{rank} | {_yes(one.place)} "
            f"| {_yes(one.advised)} | {promised}, {one.gained:.0%} | {alarms} |"
        )
    return "\n".join(rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


Row = tuple[str, Callable[[Sequence[Score]], str], Callable[[Sequence[Verdict]], str]]
SIDE_BY_SIDE: Final[tuple[Row, ...]] = (
    ("programs", lambda own: str(len(own)), lambda own: str(len(own))),
    (
        "planted cause first",
        lambda own: _share([one.right for one in own]),
        lambda own: _share([one.is_first for one in own]),
    ),
    (
        "first finding at its place",
        lambda own: _share([one.place for one in own]),
        lambda own: _share([bool(one.line) for one in own if one.line is not None]),
    ),
    ("advice leads to the fix", lambda own: _share([one.advised for one in own]), lambda own: "-"),
    (
        "silent above 5 % without the fault",
        lambda own: _share([not one.alarms for one in own]),
        lambda own: _share([not one.alarms for one in own]),
    ),
    (
        "silent, or confirmed by a stopwatch",
        lambda own: _share([one.is_silent_or_confirmed for one in own]),
        lambda own: "-",
    ),
    (
        "promise off by, median and worst, points of the step",
        lambda own: _points([one.off for one in own]),
        lambda own: _points(
            [
                one.promised_share - one.real_share
                for one in own
                if one.promised_share is not None and one.real_share is not None and one.saves_time
            ]
        ),
    ),
)


def side_by_side(scores: Sequence[Score], verdicts: Sequence[Verdict] | None) -> str:
    """The blind programs' figures, and the rehearsed ones' where there are, in Markdown."""
    head = ["| | blind |", "|---|---:|"] if verdicts is None else ["| | blind | rehearsed |", "|---|---:|---:|"]
    for title, blind, known in SIDE_BY_SIDE:
        head.append(f"| {title} | {blind(scores)} |" + ("" if verdicts is None else f" {known(verdicts)} |"))
    return "\n".join(head)


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)} ({sum(values) / len(values):.0%})" if values else "-"


def _points(values: Sequence[float | None]) -> str:
    errors = [abs(value) * 100 for value in values if value is not None]
    return f"{statistics.median(errors):.0f}, {max(errors):.0f}" if errors else "-"


def unjudged(scores: Sequence[Score]) -> list[str]:
    """First findings whose advice nobody judged."""
    return [f"{one.name}: {one.first['rule']}" for one in scores if one.first is not None and one.judged is None]


def collected(names: Sequence[str], folder: Path) -> dict[str, dict[str, Findings]]:
    """What is said of both variants of each program; of one without a recording, nothing."""
    result: dict[str, dict[str, Findings]] = {name: {} for name in names}
    for name, variant in itertools.product(names, ("fault", "mended")):
        try:
            found = found_in(name, variant == "mended", folder)
        except measure.ProgramFailed as problem:
            print(problem, file=sys.stderr)
            found = []
        result[name][variant] = found
        print(f"{name}, {variant}: {found[0]['title'] if found else 'nothing found'}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", choices=NAMES, help="may be repeated")
    parser.add_argument("--half", type=int, choices=range(1, 7), help="only the programs of this half")
    parser.add_argument("--traces", metavar="FOLDER", type=Path, help="keep the recordings there")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all that was said")
    parser.add_argument("--score", metavar="FILE", type=Path, help="score what was said in an earlier run")
    parser.add_argument("--rehearsed", metavar="FILE", type=Path, help="a --json FILE of diagnosis_accuracy.py")
    options = parser.parse_args()
    names = [name for name in options.only or NAMES if options.half in (None, truth(name).half)]
    if options.score:
        said = json.loads(options.score.read_text())["said"]
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.traces or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            said = collected(names, folder)
    if options.json:
        options.json.write_text(json.dumps({"said": said}, indent=1) + "\n")
    scores = [scored(name, said[name]["fault"], said[name]["mended"]) for name in names if name in said]
    verdicts = rehearsed.joined([options.rehearsed], [], []) if options.rehearsed else None
    print(f"{table(scores)}\n\n{side_by_side(scores, verdicts)}")
    for one in unjudged(scores):
        print(f"Not judged yet, counted as wrong: {one}", file=sys.stderr)


if __name__ == "__main__":
    main()
