"""How often a planted fault is the first finding, and how much of a promised saving comes true.

    python benchmarks/diagnosis_accuracy.py [--only NAME ...] [--join FILE ...] [--repeat 5] [--markdown] [--json FILE]

Takes every program of tests/zoo: records its faulty and its clean twin with `stepscope run` and its default options,
diagnoses both, and times the steps of both without a profiler, in turns, so that a change of the machine's speed meets
both; the quickest steps count. Then the same for the simulated devices, whose steps need no timing. Printed are, for
each rule, how often the planted fault came first, whether its line was named, what was found on clean twins, and the
relative error of promised savings; all as shares of the step, because a step takes longer under a profiler.

What other programs disturbed can be run again by itself: `--only NAME --join FILE` takes the rest from an earlier run's
`--json FILE`.

Needs the extra `dev` (torch and what the programs import). Where HTA or torch-tb-profiler is installed, what they say
of the same traces is printed too: in this Python, or in those that --hta and --tb-profiler name.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import diagnosis_peers as peers  # noqa: E402

from tests.zoo import measure, registry, simulated, verdict  # noqa: E402
from tests.zoo.verdict import Verdict  # noqa: E402

GOALS = {"first": 0.95, "clean": 0.95, "error": 0.2}


def judged(program: registry.Program, repeat: int, folder: Path, asked: Sequence[peers.Peer]) -> Verdict:
    """Record, diagnose and time both twins of a program."""
    found, quiet = (
        measure.undisturbed(functools.partial(measure.record, program, twin, folder), program.rule)[1]
        for twin in ("fault", "clean")
    )
    times = measure.in_turns(
        {twin: functools.partial(measure.step_ns, program, twin) for twin in ("fault", "clean")}, repeat
    )
    timed = {twin: min(taken, default=None) for twin, taken in times.items()}
    first = found[0] if found else None
    place = verdict.line_of(first)
    promised = verdict.promised(found, program.rule)
    trace = next(folder.glob(f"{program.name}-fault/rank0/*.json.gz"))
    return Verdict(
        program.name,
        program.rule,
        None if first is None else first["rule"],
        (place is not None and program.names_the_line(*place)) if program.has_place else None,
        None if promised is None else promised[0],
        None if promised is None else promised[1],
        verdict.alarms(quiet),
        timed["fault"],
        timed["clean"],
        program.saves_time,
        {peer.name: peer.says(trace) for peer in asked},
        times,
    )


def judged_machine(one: simulated.Simulated, folder: Path, asked: Sequence[peers.Peer]) -> Verdict:
    """Write both twins of a simulated program as traces and diagnose them."""
    traces = {twin: one.write(twin, folder) for twin in ("fault", "clean")}
    found = measure.findings(measure.diagnosed(traces["fault"]))
    first = found[0] if found else None
    promised = verdict.promised(found, one.rule)
    return Verdict(
        one.name,
        one.rule,
        None if first is None else first["rule"],
        None,
        None if promised is None else promised[0],
        None if promised is None else promised[1],
        verdict.alarms(measure.findings(measure.diagnosed(traces["clean"]))),
        one.step_ns("fault"),
        one.step_ns("clean"),
        True,
        {peer.name: peer.says(traces["fault"]) for peer in asked},
    )


def told(one: Verdict) -> str:
    """One program in a line."""
    first = "first" if one.is_first else f"NOT FIRST ({one.first or 'nothing'})"
    line = "" if one.line is None else ", line named" if one.line else ", LINE NOT NAMED"
    promised = "-" if one.promised_share is None else f"{one.promised_share:.0%} ({ms(one.promised_ns)})"
    real = "-" if one.real_share is None else f"{one.real_share:.0%} ({ms(one.real_ns)} of {ms(one.fault_ns)})"
    error = "" if one.error is None else f", error {one.error:.0%}"
    alarm = "".join(f"\n    clean twin, {share:.0%}: {rule}: {title}" for rule, share, title in one.alarms)
    said = "".join(f"\n    {name}: {what}" for name, what in one.peers.items())
    return f"{one.name}: {one.rule} {first}{line}; promised {promised}, real {real}{error}{alarm}{said}"


def ms(ns: float | None) -> str:
    """Milliseconds in words."""
    return "-" if ns is None else f"{ns / 1e6:.1f} ms"


def by_rule(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """The programs of each rule, by the rule's name."""
    rules: dict[str, list[Verdict]] = {}
    for one in verdicts:
        rules.setdefault(one.rule, []).append(one)
    return dict(sorted(rules.items()))


def median_error(verdicts: Iterable[Verdict]) -> float | None:
    """The median relative error of promised savings; None where no program has one."""
    errors = [one.error for one in verdicts if one.error is not None]
    return statistics.median(errors) if errors else None


def table(verdicts: Sequence[Verdict]) -> str:
    """For each rule a row, and one for all, in Markdown."""
    rows = [
        "| rule | programs | first finding | line named | clean twins with a finding above 5 % "
        "| saving promised, really gained | median error |",
        "|---|---:|---:|---:|---|---|---:|",
    ]
    for rule, own in by_rule(verdicts).items():
        rows.append(_row(f"`{rule}`", own, _savings(own)))
    rows.append(_row("**all**", verdicts, ""))
    return "\n".join(rows)


def _row(title: str, own: Sequence[Verdict], savings: str) -> str:
    with_lines = [one for one in own if one.line is not None]
    named = f"{sum(bool(one.line) for one in with_lines)}/{len(with_lines)}" if with_lines else "-"
    alarmed = [one for one in own if one.alarms]
    which = f"{len(alarmed)}/{len(own)}" + "".join(
        f"; {one.name}: {', '.join(rule for rule, _, _ in one.alarms)}" for one in alarmed if savings
    )
    error = median_error(own)
    first = f"{sum(one.is_first for one in own)}/{len(own)}"
    error_text = "-" if error is None else f"{error:.0%}"
    return f"| {title} | {len(own)} | {first} | {named} | {which} | {savings} | {error_text} |"


def _savings(own: Sequence[Verdict]) -> str:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return "; ".join(
        f"{share(one.promised_share)}, {share(one.real_share)}" if one.saves_time else "memory" for one in own
    )


def goals(verdicts: Sequence[Verdict]) -> str:
    """The overall figures beside the goals, in sentences."""
    first = sum(one.is_first for one in verdicts) / len(verdicts)
    quiet = sum(not one.alarms for one in verdicts) / len(verdicts)
    error = median_error(verdicts)
    error_text = "unknown" if error is None else f"{error:.1%}"
    return (
        f"The planted fault was the first finding in {first:.1%} of {len(verdicts)} programs "
        f"(goal: {GOALS['first']:.0%}); {quiet:.1%} of the clean twins raised nothing above 5 % of the step "
        f"(goal: {GOALS['clean']:.0%}); the median relative error of promised savings was {error_text} "
        f"(goal: at most {GOALS['error']:.0%})."
    )


def of_peers(verdicts: Sequence[Verdict]) -> str:
    """How often each peer had an answer to the same traces, in sentences; empty where none was asked."""
    sentences = []
    for name in sorted({name for one in verdicts for name in one.peers}):
        answers = [one.peers[name] for one in verdicts if name in one.peers]
        failed = sum(answer.startswith(peers.FAILED) for answer in answers)
        said = sum(answer != peers.NOTHING for answer in answers) - failed
        sentences.append(f"{name} said something of {said} of the {len(answers)} faulty traces and failed on {failed}.")
    return " ".join(sentences)


def joined(files: Iterable[Path], fresh: Sequence[Verdict], order: Sequence[str]) -> list[Verdict]:
    """The verdicts of earlier runs and fresh ones, of each program the last, in the programs' order."""
    names = {one.name for one in dataclasses.fields(Verdict)}
    found: dict[str, Verdict] = {}
    for file in files:
        for row in json.loads(file.read_text()):
            kept = {key: value for key, value in row.items() if key in names}
            kept["alarms"] = tuple(tuple(alarm) for alarm in kept["alarms"])
            found[row["name"]] = Verdict(**kept)
    found.update({one.name: one for one in fresh})
    return sorted(found.values(), key=lambda one: order.index(one.name) if one.name in order else len(order))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="only this program; may be repeated")
    parser.add_argument(
        "--join",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="take programs that are not run from there",
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=5, help="timings of each twin (default: 5)")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs, and no program by itself")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every program's figures")
    parser.add_argument("--traces", metavar="FOLDER", type=Path, help="keep the traces there")
    parser.add_argument("--hta", metavar="PYTHON", default=sys.executable, help="a Python that has HTA")
    parser.add_argument(
        "--tb-profiler", metavar="PYTHON", default=sys.executable, help="one that has torch-tb-profiler"
    )
    options = parser.parse_args()
    known = [*registry.PROGRAMS, *(one.name for one in simulated.SIMULATED)]
    for name in options.only or []:
        if name not in known:
            parser.error(f"there is no program {name!r}; there are {', '.join(known)}")
    chosen = set(options.only or ([] if options.join else known))
    asked = [peer for peer in peers.known(options.hta, options.tb_profiler) if peer.is_installed()]
    verdicts: list[Verdict] = []

    def tell(one: Verdict) -> None:
        verdicts.append(one)
        if not options.markdown:
            print(told(one), flush=True)

    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.traces or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in registry.PROGRAMS:
            if name in chosen:
                try:
                    tell(judged(registry.program(name), options.repeat, folder, asked))
                except measure.ProgramFailed as problem:
                    failed.append(name)
                    print(f"{name}: {problem}", file=sys.stderr, flush=True)
        for one in simulated.SIMULATED:
            if one.name in chosen:
                tell(judged_machine(one, folder, asked))
    verdicts = joined(options.join, verdicts, known)
    if verdicts:
        print(f"{table(verdicts)}\n\n{goals(verdicts)} {of_peers(verdicts)}".rstrip())
    if options.json:
        rows = [dataclasses.asdict(one) | {"is_first": one.is_first, "error": one.error} for one in verdicts]
        options.json.write_text(json.dumps(rows, indent=1))
    if failed:
        raise SystemExit(f"Not counted, because they failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
