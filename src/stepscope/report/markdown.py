"""The report for an issue, a pull request or a chat: GitHub's Markdown, with every name from the trace escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.diagnosis import Diagnosis, Unreadable
from stepscope.diagnosis.finding import Finding
from stepscope.predict.cost.energy_parts import TraceEnergy
from stepscope.report.energy import each_or_none, section_sentences
from stepscope.report.format import cell, duration, printable, share
from stepscope.report.places import glances
from stepscope.report.sentences import (
    afterwards_sentence,
    basis_sentence,
    diff_lines,
    headline,
    hidden_sentence,
    idle_by_cause,
    nothing_sentence,
    place,
    rank_name,
    rank_table,
    ranks_or_traces,
    saving_sentence,
    sentence,
    together_sentence,
    top_rows,
    trial,
    trigger_sentence,
    unreadable_heading,
    unreadable_sentences,
    warning_sentences,
)
from stepscope.report.tables import heading, showing

_SPECIAL = re.compile(r"([\\`*_\[\]#|~!$])")


def markdown_reports(
    diagnoses: Sequence[Diagnosis],
    *,
    top: int,
    across: Sequence[Finding] = (),
    unreadable: Sequence[Unreadable] = (),
    energies: Sequence[TraceEnergy | None] = (),
) -> str:
    """The report of one trace, or of several ranks: a table of them first, then the findings about all together.

    Args:
        unreadable: files that there is no diagnosis of, which are listed with what is wrong with them.
        energies: what each rank's run measured of its energy; none where it measured none.
    """
    measured = each_or_none(energies, len(diagnoses))
    without = "\n".join(_unreadable(unreadable))
    if len(diagnoses) == 1:
        return "\n".join(filter(None, [markdown_report(diagnoses[0], top=top, energy=measured[0]), without]))
    parts = [
        f"# stepscope: {len(diagnoses)} {ranks_or_traces(diagnoses)}\n",
        "\n".join(_table(rank_table(diagnoses))) + "\n",
    ]
    parts += [without] if unreadable else []
    slowest = max(diagnoses, key=lambda diagnosis: diagnosis.step_ns)  # of whose step such savings are shares
    for number, finding in enumerate(across, start=1):
        parts.append("\n".join(_finding(number, finding, slowest)))
    for diagnosis, energy in zip(diagnoses, measured, strict=True):
        report = markdown_report(diagnosis, top=top, energy=energy)
        parts.append(f"# {escape(rank_name(diagnosis))}\n\n{report}")
    return "\n".join(parts)


def _unreadable(unreadable: Sequence[Unreadable]) -> Iterator[str]:
    if unreadable:
        yield f"## {unreadable_heading(unreadable)}"
        yield ""
        yield from (f"- {escape(sentence)}" for sentence in unreadable_sentences(unreadable))
        yield ""


def markdown_report(diagnosis: Diagnosis, *, top: int, energy: TraceEnergy | None = None) -> str:
    """The whole report of one trace; `top` rows of the operators and kernels, 0 for all the diagnosis holds."""
    lines = [f"**{escape(headline(diagnosis))}**", ""]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += _finding(number, finding, diagnosis)
    if not diagnosis.findings:
        lines += [nothing_sentence(diagnosis), ""]
    if diagnosis.together is not None:
        lines += [together_sentence(diagnosis), ""]
    if diagnosis.afterwards:
        lines += [afterwards_sentence(diagnosis), ""]
    if diagnosis.hidden:
        lines += [hidden_sentence(diagnosis), ""]
    lines += _times(diagnosis)
    lines += _glances(diagnosis)
    if energy is not None:
        lines += ["## Energy", "", *(f"- {escape(sentence)}" for sentence in section_sentences(energy)), ""]
    lines += _top(diagnosis.kernels, diagnosis.kernel_count, "kernels", top)
    lines += _top(diagnosis.operators, diagnosis.operator_count, "operators", top)
    lines += _endings(diagnosis)
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """The text with nothing in it that Markdown, HTML or a mention would make something of."""
    text = _SPECIAL.sub(r"\\\1", printable(text))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    return text.replace("://", "&#58;//")


def code(text: str) -> str:
    """The text as a span of code that its own backticks cannot end."""
    text = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def _finding(number: int, finding: Finding, diagnosis: Diagnosis) -> Iterator[str]:
    yield f"## {number}. {escape(finding.title)}"
    yield ""
    saving = saving_sentence(finding, diagnosis)
    basis = escape(basis_sentence(finding))
    yield f"- **Saves** {saving}; {basis}" if saving else f"- **Note** {basis}"
    for location in finding.where:
        part = f" ({share(location.share)} of it)" if location.share < 1 else ""
        yield f"- **Where** {code(place(location))}{part}"
    yield f"- **Change** {escape(finding.remedy.text)}"
    if finding.remedy.apply:
        yield f"- **Try** {code(trial(finding.remedy))}"
    yield f"- **Rule** {code(finding.rule)}"
    yield ""
    if finding.remedy.code:
        yield from _block(finding.remedy.code)
        yield ""
    if finding.remedy.diff:
        yield from _block("\n".join(diff_lines(finding.remedy)), "diff")
        yield ""


def _block(text: str, language: str = "python") -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", *(printable(line) for line in text.expandtabs(4).splitlines()), fence]


def _times(diagnosis: Diagnosis) -> Iterator[str]:
    for device in diagnosis.devices:
        idle = diagnosis.idle.filter(pl.col("device") == device.device)
        total = f"{duration(device.idle_ns)} of {duration(device.window_ns)}"
        yield f"## Why device {escape(device.device)} was idle: {total}"
        yield ""
        yield from _table(_with_meaning(idle))
        yield ""
    if not diagnosis.devices and diagnosis.host.height:
        yield "## Where the host's time went"
        yield ""
        yield from _table(_with_meaning(diagnosis.host))
        yield ""


def _glances(diagnosis: Diagnosis) -> Iterator[str]:
    for glance in glances(diagnosis):
        yield f"## {escape(glance.heading)}"
        yield ""
        yield _row(("figure", "value", "what it means"))
        yield _row(("---", "---:", "---"))
        yield from (_row(map(escape, row)) for row in glance.rows)
        yield ""


def _with_meaning(times: pl.DataFrame) -> pl.DataFrame:
    causes = idle_by_cause(times)
    whys = [(CAUSES.get(cause, ""), trigger_sentence(times, cause)) for cause in causes["cause"]]
    meaning = pl.Series("what it means", ["; ".join(filter(None, why)) for why in whys], pl.String)
    return causes.with_columns(meaning)


def _top(frame: pl.DataFrame, total: int, things: str, top: int) -> Iterator[str]:
    if frame.is_empty():
        return
    shown = top_rows(frame, top)
    yield f"## {things.capitalize()}, the costliest first"
    yield ""
    yield from _table(shown)
    yield ""
    cut = showing(shown.height, total, things)
    if cut:
        yield cut
        yield ""


def _table(frame: pl.DataFrame) -> Iterator[str]:
    yield _row(escape(heading(name, frame.columns)) for name in frame.columns)
    yield _row("---:" if dtype.is_numeric() else "---" for dtype in frame.dtypes)
    for row in frame.iter_rows(named=True):
        yield _row(escape(cell(name, value)) for name, value in row.items())


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _endings(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.not_answered:
        yield "## What this trace cannot answer"
        yield ""
        for question in diagnosis.not_answered:
            rules = f" Rules: {escape(', '.join(question.rules))}." if question.rules else ""
            yield f"- {escape(question.question)} {escape(sentence(question.why))}{rules} How: {escape(question.how)}"
        yield ""
    if diagnosis.applied:
        yield "## Applied to the program"
        yield ""
        yield from (f"- {escape(each)}" for each in diagnosis.applied)
        yield ""
    if diagnosis.warnings:
        yield "## While reading the trace"
        yield ""
        yield from (f"- {escape(sentence)}" for sentence in warning_sentences(diagnosis))
