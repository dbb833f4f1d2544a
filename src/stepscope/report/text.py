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

from stepscope.analysis.causes import CAUSES
from stepscope.diagnosis.diagnosis import DeviceSummary, Diagnosis
from stepscope.diagnosis.finding import Finding, Location
from stepscope.report.format import count, duration, printable, share
from stepscope.report.glance import glances
from stepscope.report.tables import showing, table_lines

_BAR_WIDTH: Final = 20
_SMALL_SHARE: Final = 0.005
"""Causes below this share of the window are shown together."""
_TELLING_SHARE: Final = 0.05
"""Of a cause's time, what may have followed a wait without being worth a word."""
_TOP_COLUMNS: Final = (
    "name",
    "calls",
    "total_ns",
    "share",
    "mean_ns",
    "host_self_ns",
    "host_self_share",
    "device_self_ns",
    "device_self_share",
)
"""What a report shows of operators and kernels; `stepscope operators` and `stepscope kernels` show every column."""
_SEVERITY_STYLES: Final = {"high": "bold red", "medium": "bold yellow", "low": "bold cyan", "note": "bold"}
_STEP_SOURCES: Final = {"annotation": "annotated", "inferred": "inferred from what repeats"}


def text_report(diagnosis: Diagnosis, *, width: int, colour: bool, top: int) -> str:
    """The whole report of one trace; `top` rows of the operators and kernels, 0 for all the diagnosis holds."""
    parts: list[RenderableType] = [Text(headline(diagnosis), style="bold"), ""]
    parts += _findings(diagnosis)
    parts += _times(diagnosis, width)
    parts += _glances(diagnosis, width)
    parts += _table("Kernels, the costliest first", diagnosis.kernels, diagnosis.kernel_count, "kernels", width, top)
    parts += _table(
        "Operators, the costliest first", diagnosis.operators, diagnosis.operator_count, "operators", width, top
    )
    parts += _not_answered(diagnosis)
    parts += _warnings(diagnosis)
    return _render(parts, width=width, colour=colour).rstrip("\n") + "\n"


def text_reports(
    diagnoses: Sequence[Diagnosis],
    *,
    width: int,
    colour: bool,
    top: int,
    every: bool = False,
    across: Sequence[Finding] = (),
) -> str:
    """The report of one trace, or of several ranks: a table of them, then the rank that can save most, or every one.

    Args:
        across: findings about the ranks together, which stand below the table.
    """
    if len(diagnoses) == 1:
        return text_report(diagnoses[0], width=width, colour=colour, top=top)
    shown = list(diagnoses) if every else [max(diagnoses, key=_largest_saving_ns)]
    intro = [
        _heading(f"{len(diagnoses)} {ranks_or_traces(diagnoses)}"),
        *_plain(table_lines(rank_table(diagnoses), width=width)),
        "",
        *_across(across),
    ]
    if not every:
        every_one = ranks_or_traces(diagnoses).removesuffix("s")
        intro.append(Text(f"Below: {rank_name(shown[0])}, which can save most. -v shows every {every_one}."))
    text = _render([*intro, ""], width=width, colour=colour)
    for diagnosis in shown:
        title = _render([_heading(f"== {rank_name(diagnosis)}"), ""], width=width, colour=colour)
        text += title + text_report(diagnosis, width=width, colour=colour, top=top) + "\n"
    return text.rstrip("\n") + "\n"


def _across(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """What the ranks' traces tell together."""
    if findings:
        yield _heading("The ranks together")
    for finding in findings:
        saving = f"{duration(finding.saving_ns_per_step)} per step ({share(finding.saving_share)})"
        yield Text(printable(finding.title), style=_SEVERITY_STYLES.get(finding.severity, ""))
        facts = [("saves", f"{saving}; {printable(finding.saving_basis)}; confidence {finding.confidence}")]
        facts += [("where" if number == 0 else "", place(location)) for number, location in enumerate(finding.where)]
        facts += [("rule", printable(f"{finding.rule} (stepscope explain {finding.rule})"))]
        facts += [("change", printable(finding.remedy.text))]
        yield _facts(facts)
        yield ""


def headline(diagnosis: Diagnosis) -> str:
    """The device, the step's time, how much of it is idle, and the biggest cause, in one sentence."""
    step = _step_sentence(diagnosis)
    device = worst_device(diagnosis)
    if diagnosis.metadata.format == "torch_snapshot":
        return "A memory snapshot: it tells what memory was used for, and nothing of time."
    if device is None:
        return f"No device was recorded; {step}{_host_clause(diagnosis.host)}."
    idle = f"idle {share(_idle_share(device))}, busy {share(_busy_share(device))}"
    cause = _biggest(diagnosis.idle.filter(pl.col("device") == device.device))
    return f"{_device_name(diagnosis, device)}: {step}, {idle}" + (f"; biggest cause: {cause}." if cause else ".")


def saving_sentence(finding: Finding, diagnosis: Diagnosis) -> str:
    """How much time a step would lose without the cause; empty for a note."""
    if finding.saving_ns_per_step <= 0:
        return ""
    of = "per step" if diagnosis.step_source != "none" else "recorded"
    saving, step = duration(finding.saving_ns_per_step), duration(diagnosis.step_ns)
    return f"{saving} of {step} {of} ({share(finding.saving_share)})"


def place(location: Location) -> str:
    """A place in the user's code as "train.py:88 main"."""
    return printable(f"{location.file}:{location.line} {location.function}".rstrip())


def warning_sentences(diagnosis: Diagnosis) -> list[str]:
    """What was skipped or repaired while reading, a sentence each."""
    return [f"{count(w.count)} x {printable(w.kind)}: {printable(w.detail)}" for w in diagnosis.warnings]


def hidden_sentence(diagnosis: Diagnosis) -> str:
    """How many findings are not shown, and how to see them; empty where none is."""
    if diagnosis.hidden == 0:
        return ""
    what = "1 more finding saves" if diagnosis.hidden == 1 else f"{count(diagnosis.hidden)} more findings save"
    return f"{what} less than 1 % of the step; --all shows them."


def rank_name(diagnosis: Diagnosis) -> str:
    """What a report of several ranks calls one of them."""
    rank, path = diagnosis.metadata.rank, diagnosis.metadata.path
    return f"rank {rank}" if rank is not None else printable(path) or "a trace"


def ranks_or_traces(diagnoses: Sequence[Diagnosis]) -> str:
    """What several traces are called together: ranks only where each says which one it is."""
    return "traces" if any(diagnosis.metadata.rank is None for diagnosis in diagnoses) else "ranks"


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}." if text else ""


def rank_table(diagnoses: Iterable[Diagnosis]) -> pl.DataFrame:
    """One row a rank: columns rank, step_ns, busy_share, idle_share, exposed_communication_share, top_finding."""
    return pl.DataFrame(
        [_rank_row(diagnosis) for diagnosis in diagnoses],
        schema={
            "rank": pl.String,
            "step_ns": pl.Int64,
            "busy_share": pl.Float64,
            "idle_share": pl.Float64,
            "exposed_communication_share": pl.Float64,
            "top_finding": pl.String,
        },
        orient="row",
    )


def worst_device(diagnosis: Diagnosis) -> DeviceSummary | None:
    """The device that idles most, as a share of its window."""
    return max(diagnosis.devices, key=_idle_share, default=None)


def idle_by_cause(idle: pl.DataFrame) -> pl.DataFrame:
    """Idle (or host) time summed over triggers: columns cause, ns, share; the largest first, small ones together."""
    sums = (
        idle.group_by("cause")
        .agg(pl.col("ns").sum(), pl.col("share").sum())
        .sort(["ns", "cause"], descending=[True, False])
    )
    large = sums.filter(pl.col("share") >= _SMALL_SHARE)
    small = sums.filter(pl.col("share") < _SMALL_SHARE)
    if small.height < 2:
        return sums
    rest = small.select(pl.lit(f"{small.height} others").alias("cause"), pl.col("ns").sum(), pl.col("share").sum())
    return pl.concat([large, rest])


def top_rows(frame: pl.DataFrame, top: int) -> pl.DataFrame:
    """The first rows of operators or kernels, 0 for all, with the columns that a report has room for.

    The device's columns are left out where no operator had work on a device.
    """
    columns = [name for name in _TOP_COLUMNS if name in frame.columns]
    if "device_self_ns" in columns and not frame["device_self_ns"].sum():
        columns = [name for name in columns if not name.startswith("device_")]
    return (frame.head(top) if top else frame).select(columns or frame.columns)


def trigger_sentence(idle: pl.DataFrame, cause: str) -> str:
    """How much of a cause's idle time followed a wait that had drained the queues; empty where none did."""
    if "trigger" not in idle.columns:
        return ""
    mine = idle.filter(pl.col("cause") == cause)
    after = mine.filter(pl.col("trigger").is_not_null())
    if int(after["ns"].sum()) <= _TELLING_SHARE * int(mine["ns"].sum()):
        return ""
    sums = after.group_by("trigger", maintain_order=True).agg(pl.col("ns").sum()).sort("ns", descending=True)
    most = f"after {printable(sums['trigger'][0])}" + (" and others" if sums.height > 1 else "")
    return f"{duration(int(sums['ns'].sum()))} of it {most}"


def _rank_row(diagnosis: Diagnosis) -> tuple[object, ...]:
    device = worst_device(diagnosis)
    rank = diagnosis.metadata.rank
    name = str(rank) if rank is not None else diagnosis.metadata.path
    top = diagnosis.findings[0].title if diagnosis.findings else ""
    if device is None:
        return (name, diagnosis.step_ns, None, None, None, top)
    exposed = device.exposed_communication_ns / max(device.window_ns, 1)
    return (name, diagnosis.step_ns, _busy_share(device), _idle_share(device), exposed, top)


def _largest_saving_ns(diagnosis: Diagnosis) -> int:
    return max((finding.saving_ns_per_step for finding in diagnosis.findings), default=0)


def _idle_share(device: DeviceSummary) -> float:
    return device.idle_ns / max(device.window_ns, 1)


def _busy_share(device: DeviceSummary) -> float:
    return device.busy_ns / max(device.window_ns, 1)


def _step_sentence(diagnosis: Diagnosis) -> str:
    if diagnosis.step_source == "none":
        return f"{duration(diagnosis.step_ns)} recorded, without steps"
    steps = "1 step" if diagnosis.step_count == 1 else f"mean of {count(diagnosis.step_count)}"
    return f"a step takes {duration(diagnosis.step_ns)} ({steps}, {_STEP_SOURCES.get(diagnosis.step_source, '')})"


def _device_name(diagnosis: Diagnosis, device: DeviceSummary) -> str:
    name = f"device {device.device}" + (f" ({device.name})" if device.name else "")
    if len(diagnosis.devices) > 1:
        name += f", the most idle of {len(diagnosis.devices)}"
    if diagnosis.metadata.rank is not None:
        name = f"rank {diagnosis.metadata.rank}, {name}"
    return printable(name[:1].upper() + name[1:])


def _biggest(times: pl.DataFrame) -> str:
    causes = idle_by_cause(times.filter(pl.col("cause") != "compute")) if times.height else times
    if causes.is_empty() or causes["ns"][0] <= 0:
        return ""
    cause = causes["cause"][0]
    return f"{_cause_sentence(cause)} ({share(causes['share'][0])})"


def _host_clause(host: pl.DataFrame) -> str:
    cause = _biggest(host)
    computing = float(host.filter(pl.col("cause") == "compute")["share"].sum())
    if computing > 0:
        return f"; computing {share(computing)}" + (f", and most of the rest: {cause}" if cause else "")
    return f"; most of the host's time: {cause}" if cause else ""


def _cause_sentence(cause: str) -> str:
    return CAUSES.get(cause, printable(cause))


def _findings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    if not diagnosis.findings:
        open_questions = diagnosis.not_answered and " What the trace cannot answer stands below, with how to record it."
        yield Text(f"Nothing was found that would save a noticeable part of the step.{open_questions or ''}")
    for number, finding in enumerate(diagnosis.findings, start=1):
        title = Text(f"{number}. {printable(finding.title)}", style=_SEVERITY_STYLES.get(finding.severity, ""))
        yield title
        yield _facts(_finding_facts(finding, diagnosis))
        if finding.remedy.code:
            yield ""
            yield from _plain(_code_lines(finding.remedy.code, indent=10))
        yield ""
    if diagnosis.hidden:
        yield Text(hidden_sentence(diagnosis))
    if diagnosis.hidden or not diagnosis.findings:
        yield ""


def _finding_facts(finding: Finding, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    saving = saving_sentence(finding, diagnosis)
    if saving:
        yield "saves", f"{saving}; {printable(finding.saving_basis)}; confidence {finding.confidence}"
    else:
        yield "note", f"{printable(finding.saving_basis)}; confidence {finding.confidence}"
    for position, location in enumerate(finding.where):
        part = f" ({share(location.share)} of it)" if location.share < 1 else ""
        yield ("where" if position == 0 else ""), place(location) + part
    yield "rule", f"{printable(finding.rule)} (stepscope explain {printable(finding.rule)})"
    yield "change", printable(finding.remedy.text)


def _times(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    for device in diagnosis.devices:
        idle = diagnosis.idle.filter(pl.col("device") == device.device)
        total = f"{duration(device.idle_ns)} of {duration(device.window_ns)} ({share(_idle_share(device))})"
        yield _heading(f"Why device {printable(device.device)} was idle: {total}")
        yield from _cause_lines(idle, width)
    if not diagnosis.devices and diagnosis.host.height:
        yield _heading("Where the host's time went")
        yield from _cause_lines(diagnosis.host, width)


def _glances(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    """A line a figure: label, value and what it means; the meaning goes where there is no room."""
    for glance in glances(diagnosis):
        yield _heading(glance.heading)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_column()
        for label, value, meaning in glance.rows:
            grid.add_row(Text(f"  {label}"), Text(value), Text(meaning if width >= 60 else ""))
        yield grid
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
        yield _facts([("how", printable(question.how))])
    yield ""


def _warnings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    sentences = warning_sentences(diagnosis)
    if sentences:
        yield _heading("While reading the trace")
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
    for line in lines:
        yield Text(line, no_wrap=True, overflow="ignore")


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
