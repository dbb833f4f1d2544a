"""The first screen of the page for notebooks: static HTML, without script or server, that can be saved.

A diagnosis keeps no trace, so there is no timeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

import polars as pl

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Finding
from stepscope.report.document import Cause
from stepscope.report.format import count, printable, share
from stepscope.report.palette import Look, cause_palette
from stepscope.report.words import (
    busiest_device,
    causes_of,
    headline,
    nothing_sentence,
    saving_sentence,
    together_sentence,
    trial,
)

_FIRST: Final = 3
"""Findings with their code; the others are listed."""
_SHORT: Final = 300
_SMALL: Final = 0.002
_BUSY: Final = "#aab4c0"
_LINE: Final = "1px solid rgba(128,128,128,.35)"
_MUTED: Final = "opacity:.7"
_HATCH: Final = "repeating-linear-gradient(135deg,transparent 0 3px,rgba(255,255,255,.6) 3px 5px)"


def first_screen(diagnosis: Diagnosis) -> str:
    """What a step takes and why, the step as a bar by cause, and the findings that save most."""
    pieces = [f'<p style="font-size:1.1em;margin:0 0 .5em">{_text(headline(diagnosis))}</p>']
    pieces += _step(diagnosis)
    findings = diagnosis.findings
    pieces += [_card(finding, diagnosis) for finding in findings[:_FIRST]]
    pieces += [] if findings else [f"<p>{_text(nothing_sentence(diagnosis))}</p>"]
    rest = [f"<li>{_text(each.title)} {_saving(each, diagnosis)}</li>" for each in findings[_FIRST:]]
    if rest:
        pieces.append(f"<details><summary>{count(len(rest))} more</summary><ul>{''.join(rest)}</ul></details>")
    pieces.append(f'<p style="{_MUTED}">{_text(together_sentence(diagnosis))}</p>')
    path = diagnosis.metadata.path
    if path:
        pieces.append(
            f'<p style="{_MUTED}">All of it, with the timeline: <code>stepscope view {_text(path)}</code></p>'
        )
    return f'<div style="max-width:1000px;line-height:1.45;text-align:left">{"".join(pieces)}</div>'


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


def _card(finding: Finding, diagnosis: Diagnosis) -> str:
    places = ", ".join(f"<code>{_text(f'{each.file}:{each.line}')}</code>" for each in finding.where[:2])
    code = f'<pre style="overflow-x:auto;margin:.3em 0">{_text(finding.remedy.code, whole=True)}</pre>'
    command = trial(finding.remedy)
    blocks = (
        f"<div><b>{_text(finding.title[:1].upper() + finding.title[1:])}</b> {_saving(finding, diagnosis)}</div>",
        f"<div>{places}</div>" if places else "",
        f"<div>{_text(finding.remedy.text)}</div>",
        f"<details><summary>Code</summary>{code}</details>" if finding.remedy.code else "",
        f"<div>Try: <code>{_text(command)}</code></div>" if command else "",
    )
    return f'<div style="border:{_LINE};border-radius:6px;padding:.5em .8em;margin:.5em 0">{"".join(blocks)}</div>'


def _saving(finding: Finding, diagnosis: Diagnosis) -> str:
    saving = saving_sentence(finding, diagnosis)
    return f'<span style="color:#12966a">saves {_text(saving)}</span>' if saving else ""


def _text(text: str, *, whole: bool = False) -> str:
    """Text of a trace as text of HTML: escaped, its invisible characters shown; cut unless `whole`."""
    cut = text if whole or len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
    return "\n".join(escape(printable(line)) for line in cut.split("\n"))
