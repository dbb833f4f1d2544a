"""What `stepscope tune` found, for the terminal and for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from stepscope.report.format import duration, printable
from stepscope.report.markdown import code, escape
from stepscope.report.tables import table_lines
from stepscope.report.tune_sentences import (
    applied_sentences,
    command_line,
    how,
    outcome_sentence,
    reasons,
    remedies,
    trial_table,
)
from stepscope.report.wrapping import filled
from stepscope.tuning.tune import TuneResult

_INDENT: Final = "    "


def tune_text(result: TuneResult, command: Sequence[str], *, width: int) -> str:
    """The result, how to use it, the remedies as code, what was tried, and how it was measured."""
    sentence = outcome_sentence(result)
    lines = []
    if result.best.settings:
        best = "Best" if result.is_proven else "Best so far, not proven"
        lines += [*filled(f"{best}: {printable(result.space.shown(result.best))}", width), ""]
    lines += [*filled(f"{sentence[0].upper()}{sentence[1:]}.", width), ""]
    if result.best.settings:
        lines += [
            "To use it:" if result.is_proven else "To try it:",
            f"{_INDENT}{printable(command_line(result, command))}",
            "",
        ]
        lines += _remedies(result, width)
    lines += ["What was tried:", ""]
    lines += table_lines(trial_table(result), width=width, whole="--json FILE")
    lines.append("")
    why = [line for said in reasons(result) for line in filled(printable(said), width, "  ", _INDENT)]
    if why:
        lines += ["Why some of it could not be had:", *why, ""]
    for said in how(result):
        lines += filled(printable(said), width)
    return "\n".join(lines) + "\n"


def _remedies(result: TuneResult, width: int) -> Iterator[str]:
    for knob, shown, as_code, diff in remedies(result):
        yield from filled(printable(f"{shown}: {knob.why}"), width)
        for sentence in applied_sentences(result, knob):
            yield from filled(printable(sentence), width, _INDENT, _INDENT)
        for line in (diff or as_code).rstrip().splitlines():
            yield f"{_INDENT}{printable(line)}"
        yield ""


def tune_markdown(result: TuneResult, command: Sequence[str]) -> str:
    """The same for a pull request."""
    sentence = outcome_sentence(result)
    lines = [f"**{escape(sentence[0].upper() + sentence[1:])}.**", ""]
    if result.best.settings:
        lines += [
            f"- {'Best' if result.is_proven else 'Best so far, not proven'}: {code(result.space.shown(result.best))}",
            f"- To {'use' if result.is_proven else 'try'} it: {code(command_line(result, command))}",
        ]
        lines.append("")
        for knob, shown, as_code, diff in remedies(result):
            lines += [f"{code(shown)}: {escape(knob.why)}", ""]
            lines += [f"- {escape(sentence)}" for sentence in applied_sentences(result, knob)]
            lines.append("")
            lines += [*_fenced(diff or as_code, "diff" if diff else "python"), ""]
    rows = [
        "| tried | on top of | step | times faster | outcome | interval | loss difference |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for row in trial_table(result).iter_rows(named=True):
        row["step_ns"] = "" if row["step_ns"] is None else duration(row["step_ns"])
        rows.append("| " + " | ".join(escape(str(word)) for word in row.values()) + " |")
    return "\n".join([*lines, *rows, "", *(f"- {escape(said)}" for said in (*reasons(result), *how(result)))]) + "\n"


def _fenced(text: str, language: str) -> list[str]:
    if not text:
        return []
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", *(printable(line) for line in text.expandtabs(4).splitlines()), fence]
