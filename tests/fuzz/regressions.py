"""Cases that once showed a fault: made small, kept as files, and tried again by the tests.

tests/fuzz/regressions/FORMAT/NAME/ holds the files of one case; its .case.json says which of them a command is given,
and the command that failed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.fuzz.seeds import Case
from tests.fuzz.workers import Job, Outcome, Team

REGRESSIONS = Path(__file__).resolve().parent / "regressions"
LARGEST_BYTES = 20_000
MOST_TRIES = 400
_ABOUT = ".case.json"


def kept() -> Iterator[tuple[str, str, Case, tuple[str, ...]]]:
    """Format, name, files and command of each kept case."""
    for folder in sorted(REGRESSIONS.glob("*/*")):
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        about = json.loads(files.pop(_ABOUT))
        files |= {name: gzip.decompress(files[name]) for name in about["packed"]}
        yield folder.parent.name, folder.name, Case(files, about["target"]), tuple(about["command"])


def save(outcome: Outcome, signature: str, root: Path) -> Path:
    """Write the files of a fault; packed where they are too large to keep as they are."""
    assert outcome.case is not None
    case = outcome.case
    digest = hashlib.sha256(repr(sorted(case.files.items())).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z]+", "_", signature).strip("_").lower()[:60]
    folder = root / outcome.job.format / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    packed = [name for name, data in case.files.items() if len(data) > LARGEST_BYTES]
    more = {name: gzip.compress(case.files[name], 9, mtime=0) for name in packed}
    replace(case, files=case.files | more).write(folder)
    about = {"target": case.target, "command": outcome.command, "packed": packed}
    (folder / _ABOUT).write_text(json.dumps(about) + "\n")
    return folder


def smaller(fault: Outcome, team: Team) -> Outcome:
    """The fault with parts of its files dropped, as long as the same fault stays."""
    assert fault.case is not None
    if not fault.signature.startswith("Hung"):
        case = _unpacked(fault.case)
        fault = _tried(fault, [case], team) or fault
        for name in sorted(case.files):
            fault = _smaller_file(fault, name, team)
    return fault


def _unpacked(case: Case) -> Case:
    def plain(data: bytes) -> bytes:
        try:
            return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        except (OSError, EOFError):
            return data

    return replace(case, files={name: plain(data) for name, data in case.files.items()})


def _smaller_file(fault: Outcome, name: str, team: Team) -> Outcome:
    """Halves, quarters and so on of its parts are left out in turn."""
    assert fault.case is not None
    if name not in fault.case.files:
        return fault
    tries, share = 0, 2
    parts, joined = _parts(fault.case.files[name])
    while share <= 2 * len(parts) and tries < MOST_TRIES and len(parts) > 1:
        size = max(1, len(parts) // share)
        begins = range(0, len(parts), size)
        ways = [[*parts[:begin], *parts[begin + size :]] for begin in begins]
        cases = [replace(fault.case, files=fault.case.files | {name: joined(way)}) for way in ways]
        tries += len(cases)
        found = _tried(fault, cases, team)
        if found is None:
            share *= 2
            continue
        fault, parts = found, ways[cases.index(found.case)] if found.case in cases else parts
    return fault


def _parts(data: bytes) -> tuple[list[bytes], Callable[[list[bytes]], bytes]]:
    """Something to leave out: a trace's events, fields of a message, lines, or bytes."""
    from tests.fuzz.messages import fields, message

    if data.count(b'"ph"') > 4:
        begin = data.find(b"[", max(0, data.find(b'"traceEvents"')))
        events = re.split(rb',\s*(?=\{[^{}]{0,400}"ph")', data[begin + 1 :])
        return events, lambda left: data[: begin + 1] + b", ".join(left)
    if data[:1] not in b"{[" and (found := fields(data)):
        return [message([each]) for each in found], b"".join
    if data.count(b"\n") > 2:
        return data.splitlines(keepends=True), b"".join
    size = max(1, len(data) // 300)
    return [data[place : place + size] for place in range(0, len(data), size)], b"".join


def _tried(fault: Outcome, cases: list[Case], team: Team) -> Outcome | None:
    """The first of the cases with the same fault."""
    jobs = (Job(fault.job.format, fault.job.seed, fault.job.number, case) for case in cases)
    same = [outcome for outcome in team.outcomes(jobs) if outcome.signature == fault.signature]
    return min(
        same, key=lambda outcome: sum(map(len, outcome.case.files.values())) if outcome.case else 0, default=None
    )
