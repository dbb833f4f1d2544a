"""How right the diagnosis is on every public trace: right, defensible, wrong, missed, false alarms.

    python benchmarks/real_traces.py --traces FOLDER [--only TEXT ...] [--json FILE] [--markdown]

FOLDER (by default STEPSCOPE_TRACES) has the public traces, labelled/README.md says from where. What is true of each,
and which answers are right, stands in labelled/real_traces.toml; labelled/judging.py compares. Diagnoses run in this
process, one after the other, with a cache in a temporary folder. The exit code is 1 where anything does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path[:0] = [str(Path(__file__).parents[1])]

from benchmarks.labelled.judging import Finding, Said, Truth, Verdict, judge, truths  # noqa: E402
from stepscope.commands import main as stepscope  # noqa: E402

_ELSEWHERE: Final = frozenset(
    {"findings", "operators", "kernels", "trace", "devices", "steps", "idle", "host", "summary"}
)
"""Keys of the report whose texts are names and tables, not sentences, or are read by themselves."""


def said_of(path: Path) -> Said:
    """What `stepscope diagnose` says of a trace, or of a folder of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(words):
            code = stepscope(["diagnose", str(path), "--json", str(report)])
        if code:
            sentence = words.getvalue().replace(str(path), path.name)
            return Said(refused=sentence if code == 2 else f"exit code {code}\n{sentence}")
        return said_in(json.loads(report.read_bytes()))


def said_in(report: Mapping[str, Any]) -> Said:
    """What a JSON report says; of ranks, the findings of all, the longest saved time first."""
    if "job" in report:
        return _of_job(report["job"])
    if "ranks" not in report:
        return _of_one(report)
    ranks = [_of_one(rank) for rank in report["ranks"]]
    said = [*report["across_ranks"], *(each for rank in report["ranks"] for each in rank["findings"])]
    return Said(
        [_finding(each) for each in sorted(said, key=lambda each: -each["saving_ns_per_step"])],
        busy=[share for rank in ranks for share in rank.busy],
        notes=[note for rank in ranks for note in rank.notes],
    )


def _of_job(job: Mapping[str, Any]) -> Said:
    """What is said of a log of all ranks' operations: its causes, whom others wait for, and their part of the step."""
    lost = (job["step_ns"] - job["usual_ns"]) / job["step_ns"]
    causes = [
        Finding("late-rank", job["headline"], [], min(job["shares"][cause], 1.0) * lost) for cause in job["causes"]
    ]
    return Said(causes, step_ms=job["step_ns"] / 1e6)


def _of_one(report: Mapping[str, Any]) -> Said:
    step = report["steps"]["typical_ns"]
    return Said(
        [_finding(each) for each in report["findings"]],
        step_ms=step / 1e6 if step else None,
        busy=[device["busy_ns"] / device["window_ns"] for device in report["accounting"] if device["window_ns"]],
        matrix=_matrix_share(report["summary"]["devices"]),
        notes=list(_notes(report)),
    )


def _finding(found: Mapping[str, Any]) -> Finding:
    remedy = found.get("remedy") or {}
    return Finding(
        found["rule"],
        found["title"],
        [" ".join([f"{at['file']}:{at['line']} {at['function']}", *at["inside"]]) for at in found["where"]],
        found["saving_share"],
        f"{remedy.get('text') or ''} {remedy.get('code') or ''}",
    )


def _matrix_share(devices: Sequence[Mapping[str, Any]]) -> float | None:
    busy = sum(device["busy_ns"] for device in devices)
    return sum(device["matrix_work_ns"] for device in devices) / busy if busy else None


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{warning['kind']} {warning['detail']}" for warning in report["trace"]["warnings"])
    for key, value in report.items():
        if key not in _ELSEWHERE:
            yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):  # `how` tells how to record better, nothing of this recording
        yield from (text for key, each in value.items() if key != "how" for text in _texts(each))
    elif isinstance(value, Sequence):
        yield from (text for each in value for text in _texts(each))


def chosen(only: Sequence[str], known: Mapping[str, Truth]) -> dict[str, Truth]:
    """The traces whose path contains one of these texts; all, without any."""
    return {path: truth for path, truth in known.items() if not only or any(text in path for text in only)}


def verdicts(folder: Path, known: Mapping[str, Truth]) -> Iterator[Verdict]:
    """Diagnose and judge these traces, one after the other."""
    for path, truth in known.items():
        yield judge(path, truth, said_of(folder / path))


def in_words(verdict: Verdict) -> str:
    """A verdict in lines."""
    return "\n    ".join([f"{verdict.first:<10} {verdict.path}: {verdict.why}", *_faults(verdict)])


def _faults(verdict: Verdict) -> list[str]:
    kinds = {"missed": verdict.missed, "false alarm": verdict.alarms, "figure": verdict.figures}
    return [f"{kind}: {each}" for kind, faults in kinds.items() for each in faults]


def in_markdown(judged: Sequence[Verdict]) -> str:
    """Verdicts as a table of what does not hold or needs a reason; the others by name."""
    plain = [each.path for each in judged if each.holds and each.first == "right"]
    rows = [
        "| trace | first finding | said first, or why it is defensible | missed, false alarms, figures off |",
        "|---|---|---|---|",
    ]
    for each in judged:
        if each.path not in plain:
            cells = (f"`{each.path}`", each.first, each.why, "<br>".join(_faults(each)) or "-")
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*rows, "", f"Right in all: {', '.join(f'`{path}`' for path in plain)}."])


def totals(judged: Sequence[Verdict]) -> str:
    """All verdicts in a sentence."""
    count = Counter(each.first for each in judged)
    kinds = ", ".join(f"{count[kind]} {kind}" for kind in ("right", "defensible", "wrong", "missed"))
    besides = ", ".join(
        f"{sum(len(getattr(each, kind)) for each in judged)} {words}"
        for kind, words in (("alarms", "false alarms"), ("missed", "things missed"), ("figures", "figures off"))
    )
    hold = sum(each.holds for each in judged)
    return f"{len(judged)} traces: {kinds} at the first finding; {besides}; {hold} hold in all."


def main() -> int:
    """Judge, print, and return 1 where anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=os.environ.get("STEPSCOPE_TRACES"), metavar="FOLDER")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="traces whose path contains it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.traces is None:
        parser.error("name the folder of public traces: --traces, or STEPSCOPE_TRACES")
    judged = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["STEPSCOPE_CACHE_DIR"] = cache
        for verdict in verdicts(Path(arguments.traces), chosen(arguments.only, truths().by_path())):
            judged.append(verdict)
            if not arguments.markdown:
                print(in_words(verdict), flush=True)
    if arguments.markdown:
        print(in_markdown(judged))
    print(totals(judged))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(judged))
    return int(not all(each.holds for each in judged))


if __name__ == "__main__":
    sys.exit(main())
