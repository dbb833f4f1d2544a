"""What stepscope promises of any file: one sentence of refusal, or a result that holds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope import commands
from stepscope.analysis.device_time import DeviceUse, HostUse
from stepscope.diagnosis import diagnose_view
from stepscope.diagnosis.finding import (
    Afterwards,
    Confidence,
    DeviceSummary,
    Evidence,
    Location,
    NotAnswered,
    Remedy,
    SavingFrom,
    Severity,
    Together,
    Unreadable,
)
from stepscope.diagnosis.view import View
from stepscope.errors import StepscopeError
from stepscope.report.document import json_bytes
from stepscope.report.format import printable
from stepscope.trace import Trace, TraceWarning, Window
from tests.fuzz.values import SCRIPT
from tests.unit.rendered import json_of, text_reports

LONGEST_SENTENCE = 3_000
_SIGNED = ("start_ns", "origin_unix_ns", "launch_delay_ns")
_UNBOUNDED = ("sum_share", "device_host_ratio")
_ROW = dict[str, str | int | float | None]
_SCHEMA: dict[str, Any] = {
    "stepscope": str,
    "trace.path": str,
    "trace.format": str,
    "trace.events": int,
    "trace.rank": int | None,
    "trace.world_size": int | None,
    "trace.origin_unix_ns": int | None,
    "trace.host": str | None,
    "trace.window": Window | None,
    "trace.warnings": list[TraceWarning],
    "devices": list[DeviceSummary],
    "summary.devices": list[DeviceUse],
    "summary.host": HostUse | None,
    "steps.source": Literal["annotation", "inferred", "none"],
    "steps.step_ns": int,
    "steps.count": int,
    "steps.list": list[dict[str, int | bool]],
    "idle": list[_ROW],
    "host": list[_ROW],
    "operators": list[dict[str, Any]],
    "operator_count": int,
    "kernels": list[dict[str, Any]],
    "kernel_count": int,
    "findings": list[dict[str, Any]],
    "findings_hidden": int,
    "together": Together | None,
    "afterwards": list[Afterwards],
    "not_answered": list[NotAnswered],
    "unreadable": list[Unreadable],
}
"""What docs/json-report.md names, with the classes that the values are made of."""
_FINDING: dict[str, Any] = {
    "rule": str,
    "title": str,
    "severity": Severity,
    "saving_ns_per_step": int,
    "saving_share": float,
    "saving_basis": str,
    "saving_from": SavingFrom,
    "confidence": Confidence,
    "ends_run_in_ns": int | None,
    "evidence": Evidence,
    "where": list[Location],
    "remedy": Remedy,
}
_VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"])
_OPTIONAL = frozenset(["li", "p", "td", "th", "tr", "tbody", "thead", "option", "dt", "dd"])


last_command: list[str] = []
"""What was run last, for the report of a fault."""


class Broken(Exception):
    """A promise that a result does not keep; the first word names it."""


def expect(holds: bool, promise: str, detail: object = "") -> None:
    """Raise `Broken` where something does not hold."""
    if not holds:
        raise Broken(f"{promise}: {str(detail)[:400]}" if detail != "" else promise)


def check_sentence(error: StepscopeError) -> None:
    """One line that says something, as it is printed."""
    said = printable(str(error))
    expect(len(said.strip()) >= 10, "an error says something", said)
    expect(len(said) <= LONGEST_SENTENCE, "an error is a sentence, not a page", f"{len(said)} characters: {said}")
    own = printable(str(error).replace("\n", "").replace("\r", ""))
    expect("Traceback (most" not in own, "an error shows no traceback", own)
    expect("\n" not in str(error), "an error is one line", repr(said))


def check_text(text: str, what: str) -> None:
    """Nothing in it that moves a cursor, recolours a terminal or turns the direction."""
    for line in text.split("\n"):
        if not line.replace("\t", "").isprintable():
            marks = sorted({mark for mark in line if not mark.isprintable() and mark != "\t"})
            raise Broken(f"{what} has no control character: {marks} in {line[:200]!r}")


def check_diagnosis(trace: Trace, minimum_share: float = 0.0) -> dict[str, Any]:
    """The JSON report of a trace, after everything in it that can be added up was."""
    diagnosis = diagnose_view(View(trace, {}), minimum_share=minimum_share)
    data = json_bytes(json_of([diagnosis]))
    report = parsed(data, "the report")
    check_schema(report)
    check_sums(report)
    check_text(text_reports([diagnosis], width=100, colour=False, top=5, every=True), "the text report")
    return report


def parsed(data: bytes, what: str) -> Any:
    """What strict JSON text holds."""

    def no_such_number(name: str) -> Any:
        raise Broken(f"JSON has no word for {name}")

    try:
        return json.loads(data.decode(), parse_constant=no_such_number)
    except ValueError as error:
        raise Broken(f"{what} is JSON: {error}: {data[:200]!r}") from None


def check_schema(report: dict[str, Any]) -> None:
    """The keys and types of schema 1, times that are not negative, and shares between 0 and 1."""
    _check_keys(report, _SCHEMA)
    for finding in report["findings"]:
        _check_keys(finding, _FINDING)
    expect(report["schema"] == 1, "the report is of schema 1", report["schema"])
    check_numbers(report)


def _check_keys(report: dict[str, Any], schema: dict[str, Any]) -> None:
    for keys, kind in schema.items():
        value: Any = report
        for key in keys.split("."):
            expect(key in value, "the report is of schema 1", f"it has no {keys}")
            value = value[key]
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise Broken(f"the report is of schema 1: {keys}: {error}") from None


def check_numbers(value: Any, key: str = "") -> None:
    """No negative time or count, and no share outside of 0 and 1, however deep."""
    for name, each in value.items() if isinstance(value, dict) else ((key, item) for item in value):
        if isinstance(each, (dict, list)):
            check_numbers(each, name)
        elif isinstance(each, (int, float)):
            if name.endswith(("_ns", "count")) and name not in _SIGNED:
                expect(0 <= each < 2**63, "no time or count is negative", f"{name} {each}")
            if name == "share" or (name.endswith(("_share", "_ratio")) and name not in _UNBOUNDED):
                expect(-1e-9 <= each <= 1 + 1e-9, "shares are between 0 and 1", f"{name} {each}")


def check_sums(report: dict[str, Any]) -> None:
    """Busy time and the causes of idle time are the window, to the nanosecond; engines and uses add up too."""
    causes: dict[str, int] = defaultdict(int)
    for row in report["idle"]:
        causes[row["device"]] += row["ns"]
    for device in report["devices"]:
        name, window = device["device"], device["window_ns"]
        expect(device["busy_ns"] + device["idle_ns"] == window, "busy and idle time are the window", device)
        expect(causes.pop(name, 0) == device["idle_ns"], "the causes add up to the idle time", device)
        expect(device["exposed_copy_ns"] <= device["copy_ns"], "exposed copies are copies", device)
    expect(not causes, "idle time is of a device that is listed", dict(causes))
    for use in report["summary"]["devices"]:
        parts = ("matrix", "vector_only", "unknown_only", "communication_only", "copy_only", "other", "idle")
        expect(sum(use[f"{part}_ns"] for part in parts) == use["window_ns"], "uses add up to the window", use)
    for use in report["summary"].get("engines", ()):
        exposed = sum(engine["exposed_ns"] for engine in use["engines"])
        expect(exposed + use["idle_ns"] == use["window_ns"], "engines add up to the window", use)
    host = sum(row["share"] for row in report["host"])
    expect(not report["host"] or abs(host - 1) < 1e-6 or host == 0, "shares of the host's time are 1 in all", host)


class _Page(HTMLParser):
    """Tags that are open; every one must be closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            expect(not name.startswith("on"), "a page has no handlers of events", f"{tag} {name}={value}")
            expect("planted()" not in (value or "") or name not in ("href", "src"), "no link runs code", value)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in _OPTIONAL:
            self.open.pop()
        expect(
            bool(self.open) and self.open[-1] == tag, "the page's tags close in turn", f"</{tag}> in {self.open[-5:]}"
        )
        self.open.pop()


def check_page(data: bytes) -> None:
    """Whole, and nothing that a trace holds is run."""
    text = data.decode()
    expect(SCRIPT.encode() not in data, "a page holds no script of the trace's")
    page = _Page()
    page.feed(text)
    page.close()
    expect(not [tag for tag in page.open if tag not in _OPTIONAL], "the page's tags are closed", page.open)
    check_text(re.sub(r"[\n\r]+", "\n", text), "the page")


def run_command(*words: str) -> str:
    """What a command prints; it ends in 0 or 1, or raises what a user would read."""
    last_command[:] = words
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = commands._run(list(words))
    expect(code in (0, 1), "a command ends with 0 or 1", f"{code} of {words[0]}")
    check_text(said.getvalue(), f"what {words[0]} says")
    return out.getvalue()


def check_command(*words: str) -> None:
    """A command whose output is text for people."""
    check_text(run_command(*words), f"the output of {words[0]}")


def check_json_command(*words: str) -> None:
    """A command that prints JSON."""
    text = run_command(*words)
    if text.strip():
        check_text(text, f"the JSON of {words[0]}")
        parsed(text.encode(), f"what {words[0]} prints")


def check_reports(path: str, folder: Path) -> None:
    """Every report that diagnose writes into files."""
    run_command("diagnose", path, "--no-cache", "--all", *_targets(folder, ("json", "html", "markdown")))
    report = parsed((folder / "r.json").read_bytes(), "the report")
    for each in report.get("ranks", [report]):
        check_sums(each)
    check_page((folder / "r.html").read_bytes())
    check_text((folder / "r.markdown").read_text(), "the Markdown report")
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", (folder / "r.markdown").read_text(), flags=re.DOTALL)
    expect(SCRIPT not in outside, "Markdown holds no script of the trace's but as code")


def _targets(folder: Path, kinds: Sequence[str]) -> list[str]:
    return [word for kind in kinds for word in (f"--{kind}", os.fspath(folder / f"r.{kind}"))]
