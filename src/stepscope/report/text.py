"""The report for a terminal: what a newcomer reads in ten seconds, the detail below."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import polars as pl
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.diagnosis import Diagnosis, Unreadable
from stepscope.diagnosis.finding import Finding
from stepscope.predict.cost.energy_parts import TraceEnergy
from stepscope.report.energy import each_or_none, section_sentences
from stepscope.report.format import duration, printable, share
from stepscope.report.places import glances
from stepscope.report.sentences import (
    about_sentence,
    afterwards_sentence,
    basis_sentence,
    device_table,
    diff_lines,
    headline,
    hidden_sentence,
    idle_by_cause,
    idle_share,
    nothing_sentence,
    place,
    rank_name,
    rank_table,
    ranks_or_traces,
    saving_sentence,
    sentence,
    shown_devices,
    together_sentence,
    top_rows,
    trial,
    trigger_sentence,
    unreadable_heading,
    unreadable_sentences,
    warning_sentences,
)
from stepscope.report.tables import showing, table_lines

_BAR_WIDTH: Final = 20
_SEVERITY_STYLES: Final = {"high": "bold red", "medium": "bold yellow", "low": "bold cyan", "note": "bold"}


def text_report(diagnosis: Diagnosis, *, width: int, colour: bool, top: int, energy: TraceEnergy | None = None) -> str:
    """The whole report of one trace; `top` rows of the operators and kernels, 0 for all the diagnosis holds."""
    parts: list[RenderableType] = [Text(headline(diagnosis), style="bold"), ""]
    parts += _findings(diagnosis)
    parts += _times(diagnosis, width)
    parts += _glances(diagnosis, width)
    parts += _energy(energy)
    parts += _table("Kernels, the costliest first", diagnosis.kernels, diagnosis.kernel_count, "kernels", width, top)
    parts += _table(
        "Operators, the costliest first", diagnosis.operators, diagnosis.operator_count, "operators", width, top
    )
    parts += _not_answered(diagnosis)
    parts += _sentences("Applied to the program", [printable(each) for each in diagnosis.applied])
    parts += _sentences("While reading the trace", warning_sentences(diagnosis))
    return _render(parts, width=width, colour=colour).rstrip("\n") + "\n"


def text_reports(
    diagnoses: Sequence[Diagnosis],
    *,
    width: int,
    colour: bool,
    top: int,
    every: bool = False,
    across: Sequence[Finding] = (),
    unreadable: Sequence[Unreadable] = (),
    energies: Sequence[TraceEnergy | None] = (),
) -> str:
    """The report of one trace, or of several ranks: a table of them, then the rank that can save most, or every one.

    Args:
        across: findings about the ranks together, which stand below the table.
        unreadable: files that there is no diagnosis of, which are listed with what is wrong with them.
        energies: what each rank's run measured of its energy; none where it measured none.
    """
    measured = each_or_none(energies, len(diagnoses))
    if len(diagnoses) == 1:
        text = text_report(diagnoses[0], width=width, colour=colour, top=top, energy=measured[0])
        return "\n".join(filter(None, [text, _render(_unreadable(unreadable), width=width, colour=colour)]))
    shown = list(diagnoses) if every else [max(diagnoses, key=_largest_saving_ns)]
    intro = [
        _heading(f"{len(diagnoses)} {ranks_or_traces(diagnoses)}"),
        *_plain(table_lines(rank_table(diagnoses), width=width)),
        "",
        *_unreadable(unreadable, ""),
        *_across(across),
    ]
    if not every:
        every_one = ranks_or_traces(diagnoses).removesuffix("s")
        intro.append(Text(f"Below: {rank_name(shown[0])}, which can save most. -v shows every {every_one}."))
    text = _render([*intro, ""], width=width, colour=colour)
    for diagnosis, energy in zip(diagnoses, measured, strict=True):
        if not any(diagnosis is each for each in shown):
            continue
        title = _render([_heading(f"== {rank_name(diagnosis)}"), ""], width=width, colour=colour)
        text += title + text_report(diagnosis, width=width, colour=colour, top=top, energy=energy) + "\n"
    return text.rstrip("\n") + "\n"


def _unreadable(unreadable: Sequence[Unreadable], *after: RenderableType) -> Iterator[RenderableType]:
    """Files that could not be read."""
    if unreadable:
        yield _heading(unreadable_heading(unreadable))
        yield from (_item(sentence) for sentence in unreadable_sentences(unreadable))
        yield from after


def _across(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """What the ranks' traces tell together."""
    if findings:
        yield _heading("The ranks together")
    for finding in findings:
        saving = f"{duration(finding.saving_ns_per_step)} per step ({share(finding.saving_share)})"
        yield Text(printable(finding.title), style=_SEVERITY_STYLES.get(finding.severity, ""))
        facts = [("saves", f"{saving}; {basis_sentence(finding)}")]
        facts += [("where" if number == 0 else "", place(location)) for number, location in enumerate(finding.where)]
        facts += [("rule", printable(f"{finding.rule} (stepscope explain {finding.rule})"))]
        facts += [("change", printable(finding.remedy.text))]
        yield _facts(facts)
        yield ""


def _largest_saving_ns(diagnosis: Diagnosis) -> int:
    return max((finding.saving_ns_per_step for finding in diagnosis.findings), default=0)


def _findings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if not diagnosis.findings:
        open_questions = diagnosis.not_answered and " What the trace cannot answer stands below, with how to record it."
        yield Text(f"{nothing_sentence(diagnosis)}{open_questions or ''}")
    if about := about_sentence(diagnosis):
        yield Text(about)
        yield ""
    for number, finding in enumerate(diagnosis.findings, start=1):
        title = Text(f"{number}. {printable(finding.title)}", style=_SEVERITY_STYLES.get(finding.severity, ""))
        yield title
        yield _facts(_finding_facts(finding, diagnosis))
        if finding.remedy.code:
            yield ""
            yield from _plain(_code_lines(finding.remedy.code, indent=10))
        if finding.remedy.diff:
            yield ""
            yield Text("   your lines (stepscope diagnose --diff FILE writes a patch)", style="dim")
            yield from _plain(f"          {line}" for line in diff_lines(finding.remedy))
        yield ""
    if diagnosis.together is not None:
        yield Text(together_sentence(diagnosis))
    if diagnosis.afterwards:
        yield Text(afterwards_sentence(diagnosis))
    if diagnosis.together is not None or diagnosis.afterwards:
        yield ""
    if diagnosis.hidden:
        yield Text(hidden_sentence(diagnosis))
    if diagnosis.hidden or not diagnosis.findings:
        yield ""


def _finding_facts(finding: Finding, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    saving = saving_sentence(finding, diagnosis)
    if saving:
        yield "saves", f"{saving}; {basis_sentence(finding)}"
    else:
        yield "note", basis_sentence(finding)
    for position, location in enumerate(finding.where):
        part = f" ({share(location.share)} of it)" if location.share < 1 else ""
        yield ("where" if position == 0 else ""), place(location) + part
    yield "rule", f"{printable(finding.rule)} (stepscope explain {printable(finding.rule)})"
    yield "change", printable(finding.remedy.text)
    if finding.remedy.apply:
        yield "try", trial(finding.remedy)


def _times(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    shown = shown_devices(diagnosis)
    if len(shown) < len(diagnosis.devices):
        table = device_table(diagnosis)
        yield _heading(f"All {len(diagnosis.devices)} devices")
        yield from _plain("  " + line for line in table_lines(table, width=width - 2))
        yield ""
    for device in (each for each in diagnosis.devices if each.device in shown):
        idle = diagnosis.idle.filter(pl.col("device") == device.device)
        total = f"{duration(device.idle_ns)} of {duration(device.window_ns)} ({share(idle_share(device))})"
        yield _heading(f"Why device {printable(device.device)} was idle: {total}")
        yield from _cause_lines(idle, width)
    if not diagnosis.devices and diagnosis.host.height:
        yield _heading("Where the host's time went")
        yield from _cause_lines(diagnosis.host, width)


def _glances(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    """A line a figure: label, value and what it means; the meaning goes where there is no room."""
    for glance in glances(diagnosis, shown_devices(diagnosis)):
        yield _heading(glance.heading)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_column()
        for label, value, meaning in glance.rows:
            grid.add_row(Text(f"  {label}"), Text(value), Text(meaning if width >= 60 else ""))
        yield grid
        yield ""


def _energy(energy: TraceEnergy | None) -> Iterator[RenderableType]:
    """What the run measured of its energy."""
    if energy is not None:
        yield _heading("Energy")
        yield from (_item(sentence) for sentence in section_sentences(energy))
        yield ""


def _cause_lines(times: pl.DataFrame, width: int) -> Iterator[RenderableType]:
    """A line a cause: name, bar, share, time and what it means; bar and meaning go where there is no room."""
    grid = Table.grid(padding=(0, 1))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    grid.add_column()
    bar_width = _BAR_WIDTH if width >= 80 else _BAR_WIDTH // 4
    for cause, ns, part in idle_by_cause(times).select("cause", "ns", "share").iter_rows():
        bar = Text(f"{'█' * round(min(part, 1) * bar_width):<{bar_width}}", style="blue")
        why = "; ".join(text for text in (CAUSES.get(cause, ""), trigger_sentence(times, cause)) if text)
        meaning = Text(why if width >= 60 else "")
        grid.add_row(Text("  " + printable(cause)), bar, Text(f"{share(part):>7}"), Text(f"{duration(ns):>9}"), meaning)
    yield grid
    yield ""


def _table(title: str, frame: pl.DataFrame, total: int, things: str, width: int, top: int) -> Iterator[RenderableType]:
    if frame.is_empty():
        return
    shown = top_rows(frame, top)
    yield _heading(title)
    yield from _plain("  " + line for line in table_lines(shown, width=width - 2))
    cut = showing(shown.height, total, things)
    if cut:
        yield Text(f"  {cut}", style="dim")
    yield ""


def _not_answered(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if not diagnosis.not_answered:
        return
    yield _heading("What this trace cannot answer")
    for question in diagnosis.not_answered:
        yield _item(f"{printable(question.question)} {sentence(printable(question.why))}".strip())
        rules = [("rules", ", ".join(question.rules))] if question.rules else []
        yield _facts([*rules, ("how", printable(question.how))])
    yield ""


def _sentences(heading: str, sentences: Sequence[str]) -> Iterator[RenderableType]:
    if sentences:
        yield _heading(heading)
        yield from (_item(sentence) for sentence in sentences)
        yield ""


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _item(text: str) -> RenderableType:
    grid = Table.grid()
    grid.add_column(width=4)
    grid.add_column(overflow="fold")
    grid.add_row(Text("  - "), Text(text))
    return grid


def _facts(facts: Iterable[tuple[str, str]]) -> RenderableType:
    """Labelled sentences, their continuation lines indented."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=6, no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in facts:
        grid.add_row(Text(label), Text(text))
    return Padding(Group(grid), (0, 0, 0, 3), expand=False)


def _code_lines(code: str, indent: int) -> Iterator[str]:
    """Code as it is, so that it can be copied: never wrapped."""
    for line in code.expandtabs(4).splitlines():
        yield " " * indent + printable(line)


def _plain(lines: Iterable[str]) -> Iterator[RenderableType]:
    """Lines as they are, however long: in a group, for the console wraps a text by itself whatever it says."""
    for line in lines:
        yield Group(Text(line, no_wrap=True, overflow="ignore"))


def _render(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
    """The parts below each other; nothing depends on the terminal or the environment, and no text is markup."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part, crop=False)
    return "".join(line.rstrip() + "\n" for line in capture.get().split("\n")[:-1])
