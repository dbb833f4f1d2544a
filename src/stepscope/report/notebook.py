"""What notebooks show of a result: a few lines as text, and a first screen of static HTML that can be saved.

The HTML has no script, style sheet or server; its colours are seen on light and dark ground.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

import polars as pl

from stepscope.analysis.memory import MemorySummary
from stepscope.compare import Comparison
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Finding, Location
from stepscope.predict.prediction import PredictedSteps
from stepscope.report.comparison import comparison_document
from stepscope.report.document import (
    Block,
    Cause,
    Document,
    Facts,
    Group,
    Items,
    Section,
    Table,
    Text,
    is_printed,
    sentences,
)
from stepscope.report.format import cell, count, duration, printable, share
from stepscope.report.memory import memory_document
from stepscope.report.palette import Look, cause_palette
from stepscope.report.predict import predict_document, prediction_sentence, step_text
from stepscope.report.tables import heading
from stepscope.report.whatif import whatif_document
from stepscope.report.words import (
    busiest_device,
    causes_of,
    headline,
    nothing_sentence,
    saving_sentence,
    together_sentence,
    trial,
)
from stepscope.trace import Trace
from stepscope.trace.model import Displayed
from stepscope.trace.tables import SCHEMAS
from stepscope.whatif.answer import Answer

CELL: Final = re.compile(r"cell \d+")
"""What stands for the file of a notebook's cell."""
_IN_CELL: Final = re.compile(r"\b(cell \d+):(\d+)")
_LINES: Final = 3
_FIRST: Final = 3
"""Findings with their code; the others are listed."""
_SHORT: Final = 300
_ROWS: Final = 6
_MOST: Final = 6_000
"""Characters of HTML of an answer."""
_SMALL: Final = 0.002
_TABLE: Final = "color:inherit;border-collapse:collapse"
_TITLE: Final = "font-weight:600;margin:.6em 0 .2em"
_BUSY: Final = "#aab4c0"
_LINE: Final = "1px solid rgba(128,128,128,.35)"
_MUTED: Final = "opacity:.7"
_HATCH: Final = "repeating-linear-gradient(135deg,transparent 0 3px,rgba(255,255,255,.6) 3px 5px)"


def few_lines(thing: Displayed) -> str:
    """At most three lines about a trace, a diagnosis, a finding, a comparison or another answer."""
    match thing:
        case Trace():
            lines = [_name(thing), _rows(thing), "Diagnose it with stepscope.diagnose(trace)."]
        case Diagnosis():
            findings = [f"{each.title}{_saved(saving_sentence(each, thing))}" for each in thing.findings]
            first = findings[0] if findings else nothing_sentence(thing)
            lines = [headline(thing), first, _more(len(findings[1:]), len(thing.not_answered))]
        case Finding():
            lines = [f"{thing.title}{_saved(_saves(thing))}", "; ".join(_places(thing.where)), thing.remedy.text]
        case PredictedSteps():
            first, *_ = _prose(thing)
            steps = [f"{each.device.name}: {step_text(each) or 'no time'}" for each in thing.predictions]
            notes = [prediction_sentence(each, thing) for each in thing.predictions[:1]]
            lines = [first, ", ".join(steps), *notes]
        case _:
            lines = _prose(thing)
    return "\n".join(printable(_cut(" ".join(line.split()))) for line in [each for each in lines if each][:_LINES])


def first_screen(thing: Displayed) -> str:
    """The first screen of a trace, a diagnosis, a finding, a comparison or another answer, as HTML."""
    match thing:
        case Trace():
            pieces = _trace(thing)
        case Diagnosis():
            pieces = _diagnosis(thing)
        case Finding():
            pieces = iter((_card(thing, _saves(thing)),))
        case _:
            pieces = _fitting(_blocks(_document(thing).blocks))
    return _screen(pieces)


def document_screen(document: Document) -> str:
    """A whole report as HTML, without its drawings."""
    return _screen(_blocks(document.blocks))


def _screen(pieces: Iterable[str]) -> str:
    return f'<div style="max-width:1000px;line-height:1.45;text-align:left">{"".join(pieces)}</div>'


def _name(trace: Trace) -> str:
    return f"{trace.metadata.format} trace {trace.metadata.path}".strip()


def _rows(trace: Trace) -> str:
    rows = ((name, trace.scan(name).select(pl.len()).collect().item()) for name in SCHEMAS)
    return ", ".join(f"{name.replace('_', ' ')} {count(number)}" for name, number in rows if number) or "empty"


def _more(findings: int, questions: int) -> str:
    more = [f"{count(findings)} more finding{'s' * (findings > 1)}"] if findings else []
    asked = f"{count(questions)} question{'s' * (questions > 1)} that the trace cannot answer"
    return "; ".join([*more, *([asked] if questions else [])])


def _saved(saving: str) -> str:
    return f"; saves {saving}" if saving else ""


def _saves(finding: Finding) -> str:
    if finding.saving_ns_per_step <= 0:
        return ""
    return f"{duration(finding.saving_ns_per_step)} ({share(finding.saving_share)})"


def _document(thing: Displayed) -> Document:
    """The report of an answer, as the command prints it."""
    match thing:
        case Comparison():
            return comparison_document([thing])
        case PredictedSteps():
            return predict_document(thing)
        case Answer():
            return whatif_document(thing)
        case MemorySummary():
            return memory_document([thing])
    raise TypeError(f"nothing shows a {type(thing).__name__}")


def _prose(thing: Displayed) -> list[str]:
    return [text for part in sentences(_document(thing)) for text in part["texts"]]


def _trace(trace: Trace) -> Iterator[str]:
    yield f"<div><b>{_text(_name(trace))}</b></div><div>{_text(_rows(trace))}</div>"


def _diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    """What a step takes and why, the step as a bar by cause, and the findings that save most."""
    yield f'<p style="font-size:1.1em;margin:0 0 .5em">{_text(headline(diagnosis))}</p>'
    yield from _step(diagnosis)
    findings = diagnosis.findings
    yield from (_card(finding, saving_sentence(finding, diagnosis)) for finding in findings[:_FIRST])
    yield "" if findings else f"<p>{_text(nothing_sentence(diagnosis))}</p>"
    rest = [f"<li>{_text(each.title)} {_saving(saving_sentence(each, diagnosis))}</li>" for each in findings[_FIRST:]]
    if rest:
        yield f"<details><summary>{count(len(rest))} more</summary><ul>{''.join(rest)}</ul></details>"
    yield f'<p style="{_MUTED}">{_text(together_sentence(diagnosis))}</p>'
    path = diagnosis.metadata.path
    if path and not CELL.fullmatch(path):
        yield f'<p style="{_MUTED}">All of it, with the timeline: <code>stepscope view {_text(path)}</code></p>'


def _fitting(blocks: Iterable[str]) -> Iterator[str]:
    """The first blocks, for as long as there is room for them."""
    room = _MOST
    for block in blocks:
        room -= len(block)
        if room < 0:
            yield f'<p style="{_MUTED}">More is in its attributes.</p>'
            return
        yield block


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    """The text and the tables of a report, each as one piece."""
    for block in blocks:
        if not is_printed(block, "page", "off text"):
            continue
        match block:
            case Section() | Group():
                title = "" if block.is_quiet or not block.title else f'<p style="{_TITLE}">{_text(block.title)}</p>'
                for piece in _blocks(block.blocks):
                    yield title + piece
                    title = ""
            case Text():
                yield f'<p style="margin:.3em 0{";font-weight:600" if block.is_bold else ""}">{_text(block.text)}</p>'
            case Items():
                yield f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in block.texts)}</ul>"
            case Facts():
                yield "".join(
                    f'<div><span style="{_MUTED}">{_text(label)}</span> {_text(value)}</div>'
                    for label, value in block.rows
                )
            case Table():
                yield _table(block)


def _table(table: Table) -> str:
    """Its first rows, without what only a wide terminal has room for."""
    cut = table.cut(_ROWS).drop(table.wide_only, strict=False)
    styles = {
        name: f"padding:0 .6em;text-align:{'right' if dtype.is_numeric() and name != 'line' else 'left'}"
        for name, dtype in cut.schema.items()
    }
    names = ((style, _text(heading(name, cut.columns))) for name, style in styles.items())
    head = "".join(f'<th style="{style}">{text}</th>' for style, text in names)
    rows = "".join(
        f"<tr>{''.join(_cell(name, value, styles[name]) for name, value in row.items())}</tr>"
        for row in cut.iter_rows(named=True)
    )
    more = f'<div style="{_MUTED}">the first {count(cut.height)} of {count(table.height)} {table.things}</div>'
    shown = f"<table style='{_TABLE}'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div style="overflow-x:auto">{shown}</div>{more if table.height > cut.height else ""}'


def _cell(name: str, value: object, style: str) -> str:
    text = _text(cell(name, value))
    shown = f'<code style="white-space:pre">{text}</code>' if name == "source" else text
    return f'<td style="{style}">{shown}</td>'


def _step(diagnosis: Diagnosis) -> Iterator[str]:
    """The step of the busiest device, or of the host without a device, as a bar that adds up, and its legend."""
    device = busiest_device(diagnosis)
    if device is None:
        causes, window_ns, busy_ns = causes_of(diagnosis.host), int(diagnosis.host["ns"].sum()), 0
    else:
        causes = causes_of(diagnosis.shown[1].filter(pl.col("device") == device.device))
        window_ns, busy_ns = device.window_ns, device.busy_ns
    if not window_ns:
        return
    looks = cause_palette()
    parts = [({"label": "busy", "colour": _BUSY, "hatched": False}, busy_ns)] if busy_ns else []
    parts += [(_look(cause, looks), cause.ns) for cause in causes]
    segments = "".join(
        f'<i style="display:block;width:{100 * ns / window_ns:.3f}%;{_fill(look)}" '
        f'title="{_part(look, ns / window_ns)}"></i>'
        for look, ns in parts
    )
    yield f'<div style="display:flex;height:24px;border-radius:4px;overflow:hidden">{segments}</div>'
    legend = "".join(
        f'<span style="display:inline-block;margin-right:14px">'
        f'<i style="display:inline-block;width:11px;height:11px;margin-right:5px;{_fill(look)}"></i>'
        f"{_part(look, ns / window_ns)}</span>"
        for look, ns in parts
        if ns >= _SMALL * window_ns
    )
    whose = "the host" if device is None else f"device {_text(device.device)}"
    yield f'<p style="margin:.4em 0 .8em">{legend}<span style="{_MUTED}">of {whose}</span></p>'


def _look(cause: Cause, looks: dict[str, Look]) -> Look:
    return looks.get(cause.cause) or {**looks["unknown"], "label": cause.cause.replace("_", " ")}


def _fill(look: Look) -> str:
    hatch = f";background-image:{_HATCH}" if look["hatched"] else ""
    return f"background-color:{look['colour']}{hatch}"


def _part(look: Look, part: float) -> str:
    return f"{_text(look['label'])} {share(part)}"


def _card(finding: Finding, saving: str) -> str:
    places = ", ".join(f"<code>{_text(each)}</code>" for each in _places(finding.where[:2]))
    code = f'<pre style="overflow-x:auto;margin:.3em 0">{_text(finding.remedy.code, whole=True)}</pre>'
    is_in_cell = any(CELL.fullmatch(each.file) for each in finding.where)
    command = "" if is_in_cell else trial(finding.remedy)
    blocks = (
        f"<div><b>{_text(finding.title)}</b> {_saving(saving)}</div>",
        f"<div>{places}</div>" if places else "",
        f"<div>{_text(finding.remedy.text)}</div>",
        f"<details><summary>Code</summary>{code}</details>" if finding.remedy.code else "",
        f"<div>Try: <code>{_text(command)}</code></div>" if command else "",
    )
    return f'<div style="border:{_LINE};border-radius:6px;padding:.5em .8em;margin:.5em 0">{"".join(blocks)}</div>'


def _places(where: Iterable[Location]) -> list[str]:
    return [f"{each.file}:{each.line}" for each in where]


def _saving(saving: str) -> str:
    return f'<span style="color:#12966a">saves {_text(saving)}</span>' if saving else ""


def _cut(text: str) -> str:
    text = _IN_CELL.sub(r"\1, line \2", text)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def _text(text: str, *, whole: bool = False) -> str:
    """Text of a trace as text of HTML: escaped, its invisible characters shown; cut unless `whole`."""
    return "\n".join(escape(printable(line)) for line in (text if whole else _cut(text)).split("\n"))
