"""Report what a step would take with changes, for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.job import JobSteps
from stepscope.report.document import Block, Document, Section, Table, Text, fields, sentences, stamped, texts
from stepscope.report.format import count, duration, file_name, share, warning_sentence
from stepscope.report.ranks import job_section
from stepscope.report.words import sentence
from stepscope.whatif.answer import Answer, AsMeasured, Prospect, path_by_name
from stepscope.whatif.critical_path import slack_by_name
from stepscope.whatif.job import JobProspect, RankProspect

_SMALL_SHARE: Final = 0.005
"""Resources below this share of the critical path are merged."""
_ALIKE: Final = 0.0005
_LONGEST_NAME: Final = 80
_NO_REMEDY: Final = ("compute", "untraced", "unknown")
"""Causes that cannot simply be removed; suggest the next one instead."""
_RESOURCES: Final = {
    "compute": ("device: computation", "the device computed"),
    "communication": ("communication", "data moved between ranks, or a rank waited for the others"),
    "copy": ("device: copies", "memory was copied"),
    "launch_latency": ("launch latency", CAUSES["launch_latency"]),
    "wait": ("unexplained", "the device waited for something that the trace does not show"),
}
_LIMITS: Final = {
    "host": "The host limits {whole}: its work is {part} of the critical path, most of it {most}.",
    "compute": "The device's computation limits {whole}: it is {part} of the critical path.",
    "communication": "Communication limits {whole}: it is {part} of the critical path.",
    "copy": "Copies of memory limit {whole}: they are {part} of the critical path.",
    "launch_latency": "Launch latency limits {whole}: it is {part} of the critical path.",
    "wait": "What limits {whole} is not in the trace: waiting for it is {part} of the critical path.",
}
_COMPUTING: Final = "operators computed"


@dataclass(frozen=True, slots=True)
class Folder:
    """The ranks among which the answered trace is.

    Attributes:
        path: as the user named them.
        shown: the rank of the trace, such as "rank 0".
        ranks: how many traces there are.
        steps: what the job's steps wait for; None where it is not asked or unknown.
    """

    path: str
    shown: str
    ranks: int
    steps: JobSteps | None = None


def whatif_document(answer: Answer, folder: Folder | None = None) -> Document:
    """Report what a step would take with changes, what it waits for, and what would save most.

    Args:
        folder: of ranks, if the trace is one of several.
    """
    measured = answer.measured
    blocks: list[Block] = []
    if folder is not None:
        about = f"Of {count(folder.ranks)} ranks, this is {folder.shown}'s trace"
        if answer.job is not None:
            about += "; the job's step and the table of the ranks are about all of them"
        elif folder.steps is not None:
            about += "; what the job waits for comes first, and --rank N shows another rank"
        blocks.append(Section("", texts(f"{about}."), is_quiet=True))
        blocks += job_section(folder.steps)
    blocks += [*_head(answer), *_ranks(answer), *_limits(answer), *_causes(answer, folder)]
    if answer.path is not None:
        title = "What is on the critical path" + (" then" if answer.together else "")
        blocks.append(_section(title, _named(path_by_name(answer.path)), "names"))
    if answer.slack is not None:
        title = f"Slack: how much later operators could end without making {whole(measured)} longer"
        slack = slack_by_name(answer.slack).rename({"critical": "without_slack"})
        blocks.append(_section(title, slack, "operators"))
    if answer.curve is not None:
        title = f"How much shorter {whole(measured)} would be if each took only a part of its time"
        blocks.append(_section(title, _curve(answer.curve), "", *_curve_sentence(answer.curve, measured)))
    return Document("what if", tuple(blocks))


def _section(title: str, frame: pl.DataFrame, things: str, *sentences: str) -> Section:
    nothing = texts(f"The recording has no {things} of that kind.")
    table = Table(frame, things, wide_only=("what_it_means",))
    return Section(title, (*((table,) if frame.height else nothing), *texts(*sentences)))


def whole(measured: AsMeasured) -> str:
    return "the step" if measured.stepped else "the recording"


def measured_sentence(measured: AsMeasured) -> str:
    if not measured.stepped:
        return f"{duration(measured.step_ns)} recorded, without steps"
    steps = "1 step" if measured.step_count == 1 else f"mean of {count(measured.step_count)}"
    return f"a step takes {duration(measured.step_ns)} ({steps})"


def trust_sentences(measured: AsMeasured) -> list[str]:
    """Say how far the replay can be trusted here."""
    if measured.why_not is not None:
        return [
            f"Not certain: {measured.why_not}. What follows is the replay's result, not a promise; stepscope diagnose "
            "adds up the time that each cause took instead."
        ]
    off = abs(measured.replayed_step_ns - measured.step_ns) / max(measured.step_ns, 1)
    given = "the measured time" if off < _ALIKE else f"{duration(measured.replayed_step_ns)}, off by {share(off)}"
    sentence = f"Replayed without a change the trace gives {given}"
    if measured.device is not None:
        waits = (
            f"waits {share(measured.unexplained_share)} of the time" if measured.unexplained_share else "never waits"
        )
        sentence += f"; the device {waits} for something that the trace does not show"
    return [f"{sentence}."]


def contended_sentence(part: float) -> str:
    """Say that savings hold part of the time in which others used the processor; "" where that was not noticeable."""
    if not part:
        return ""
    return (
        f"The machine was busy: for {share(part)} of the steps' time their thread waited for a processor. Savings here "
        "hold part of that time; those of stepscope diagnose do not."
    )


def prospect_sentence(prospect: Prospect, measured: AsMeasured) -> str:
    """Format "a step would take 118.5 ms instead of 174.9 ms: 56.3 ms (32.2 %) less"."""
    what = "a step" if measured.stepped else "the recording"
    if abs(prospect.saving_share) < _ALIKE:
        return f"{what} would still take {duration(prospect.step_ns)}"
    text = f"{what} would take {duration(prospect.step_ns)} instead of {duration(measured.step_ns)}"
    word = "less" if prospect.saving_ns > 0 else "more"
    return f"{text}: {duration(abs(prospect.saving_ns))} ({share(abs(prospect.saving_share))}) {word}"


def limit_sentence(resources: pl.DataFrame, measured: AsMeasured, then: str = "") -> str:
    """Say which resource takes most of the critical path."""
    sums = resources.group_by("kind").agg(pl.col("share").sum()).sort(["share", "kind"], descending=[True, False])
    if sums.is_empty():
        return ""
    kind, part = sums.row(0)
    most = resources.filter(pl.col("kind") == kind).sort("share", descending=True).row(0, named=True)
    cause = f"{(most['cause'] or '')} ({share(most['share'])})"
    return _LIMITS[kind].format(whole=f"{whole(measured)}{then}", part=share(part), most=cause)


def resource_name(kind: str, cause: str | None) -> str:
    return f"host: {(cause or 'unknown')}" if kind == "host" else _RESOURCES[kind][0]


def _head(answer: Answer) -> Iterator[Block]:
    measured = answer.measured
    warnings = [f"While reading: {warning_sentence(warning)}." for warning in measured.warnings]
    head = f"{file_name(measured.path)}: {measured_sentence(measured)}."
    yield Section(
        "",
        texts(head, *trust_sentences(measured), contended_sentence(answer.contended_share), *warnings),
        is_quiet=True,
    )
    if answer.together is None:
        return
    prospect = prospect_sentence(answer.together, measured)
    if answer.job is not None:
        told = job_sentence(answer.job, several=len(answer.alone) > 1)
        yield Section("", (Text(f"{_asked(answer)}: {told}.", "strong"),), is_quiet=True)
        prospect = f"by this trace alone {prospect}"
    if len(answer.alone) == 1:
        style = "strong" if answer.job is None else ""
        name = f"{answer.alone[0].name}: " if answer.job is None else ""
        yield Section(
            "", (Text(sentence(f"{name}{prospect}") if answer.job else f"{name}{prospect}.", style),), is_quiet=True
        )
        return
    savings = [share(each.saving_share) for each in answer.alone]
    alone = f"{', '.join(savings[:-1])} and {savings[-1]}"
    together = f"Alone they save {alone}; together {share(answer.together.saving_share)}."
    rows = [fields(each, "name", "step_ns", "saving_ns", "saving_share") for each in (*answer.alone, answer.together)]
    table = pl.DataFrame(rows).rename({"name": "change", "saving_ns": "saves_ns", "saving_share": "saves_share"})
    yield Section("", (Text(f"With all of these, {prospect}.", "strong"), Text(together)), is_quiet=True)
    yield Section("Alone and together", (Table(table),))


def _asked(answer: Answer) -> str:
    return answer.alone[0].name if len(answer.alone) == 1 else "With all of these"


def job_sentence(job: JobProspect, *, several: bool) -> str:
    """Format "a step of the job would take 118.5 ms instead of 174.9 ms: with or without it, ...".

    Args:
        several: whether there are several changes.
    """
    now, then, saved = duration(job.measured_step_ns), duration(job.step_ns), job.saving_share
    text = (
        f"a step of the job would take {then} instead of {now}: {share(abs(saved))} {'less' if saved > 0 else 'more'}"
    )
    if abs(saved) < _ALIKE:
        text = f"a step of the job would still take {now}"
    it, change = ("them", "changes") if several else ("it", "change")
    if not _differ([rank.measured_step_ns for rank in job.ranks]):  # each waits for the others
        now = f"the others wait most for {job.last}"
        is_same = job.last == job.last_then
        return f"{text}; with or without {it}, {now}" if is_same else f"{text}; without the {change}, {now}"
    if job.last == job.last_then:
        return f"{text}; with or without {it}, {job.last} takes longest"
    then = f"{job.last_then} does" if _differ([rank.step_ns for rank in job.ranks]) else "all take about the same"
    return f"{text}; without the {change}, {job.last} takes longest; with {it}, {then}"


def _differ(steps_ns: Sequence[float]) -> bool:
    return max(steps_ns) - min(steps_ns) > _ALIKE * max(steps_ns)


def _ranks(answer: Answer) -> Iterator[Section]:
    """Every rank's step with the changes; in collectives each rank waits for the slowest."""
    job = answer.job
    if job is None:
        return
    ranks = sorted(job.ranks, key=lambda each: (-each.step_ns, -each.measured_step_ns))
    table = pl.DataFrame(
        {
            "rank": [_short(each.name) for each in ranks],
            "step_ns": [each.measured_step_ns for each in ranks],
            "then_ns": [each.step_ns for each in ranks],
            "saves_share": [_saved(each.step_ns, each) for each in ranks],
            "alone_share": [_saved(each.alone_step_ns, each) for each in ranks],
        }
    )
    off = "the recorded step" if job.error_share < _ALIKE else f"a step that is off by {share(job.error_share)}"
    note = (
        f"Changed on {count(job.changed)} of {count(len(ranks))} ranks; alone: if only this rank were changed. Without "
        f"a change this replay gives {off}. What follows replays {file_name(answer.measured.path)} alone: in it, the "
        "rank waits for the others as long as it did."
    )
    title = "The ranks together: each waits for the others in their collectives"
    yield _section(title, table, "ranks", note)


def _saved(step_ns: float, rank: RankProspect) -> float:
    return 1 - step_ns / rank.measured_step_ns if rank.measured_step_ns else 0.0


def _limits(answer: Answer) -> Iterator[Section]:
    measured = answer.measured
    per_step = ", per step" if measured.stepped else ""
    title = f"What {whole(measured)} waits for: the critical path{per_step}"
    yield _section(title, _resource_table(measured.resources, answer.resources, measured.step_count), "")
    now = limit_sentence(measured.resources, measured, "" if answer.resources is None else " now")
    then = "" if answer.resources is None else limit_sentence(answer.resources, measured, " then")
    yield Section("", texts(now, then), is_quiet=True)


def _resource_table(now: pl.DataFrame, then: pl.DataFrame | None, steps: int) -> pl.DataFrame:
    """Columns resource, time and share, with changes also the new ones, and their meaning."""
    keys = ["kind", "cause"]
    table = now.select(*keys, now_ns=pl.col("ns") / steps, now_share="share")
    if then is not None:
        after = then.select(*keys, then_ns=pl.col("ns") / steps, then_share="share")
        table = table.join(after, on=keys, how="full", nulls_equal=True, coalesce=True).fill_null(0)
    parts = [name for name in table.columns if name.endswith("_share")]
    table = table.sort([pl.max_horizontal(parts), "kind", "cause"], descending=[True, False, False])
    small = table.filter(pl.max_horizontal(parts) < _SMALL_SHARE)
    if small.height > 1:
        table = table.filter(pl.max_horizontal(parts) >= _SMALL_SHARE)
    names = [resource_name(kind, cause) for kind, cause in table.select(keys).iter_rows()]
    meanings = [_meaning(kind, cause) for kind, cause in table.select(keys).iter_rows()]
    shown = table.drop(keys).insert_column(0, pl.Series("resource", names, pl.String))
    shown = shown.with_columns(pl.Series("what_it_means", meanings, pl.String))
    if small.height > 1:
        rest = small.drop(keys).sum().insert_column(0, pl.Series("resource", [f"{small.height} others"]))
        shown = pl.concat([shown, rest.with_columns(what_it_means=pl.lit(""))])
    return shown if then is not None else shown.rename({"now_ns": "ns", "now_share": "share"})


def _meaning(kind: str, cause: str | None) -> str:
    if kind != "host":
        return _RESOURCES[kind][1]
    return _COMPUTING if cause == "compute" else CAUSES.get(cause or "", "")


def _causes(answer: Answer, folder: Folder | None) -> Iterator[Section]:
    measured, causes = answer.measured, answer.causes
    if causes is None:
        return
    if causes.is_empty():
        yield Section("", texts("No cause took a noticeable part of the time."), is_quiet=True)
        return
    table = causes.select(
        "cause",
        took_ns="attributed_ns",
        took_share="attributed_share",
        saves_ns="saving_ns",
        saves_share="saving_share",
    )
    took = "the main thread's time by cause"
    if measured.device is not None:
        took = "the device's idle time by cause, with copies and communication that no computation hides"
    meaning = f"took: {took}; saves: what the replay without it gives"
    yield _section(f"What {whole(measured)} would save without each cause; savings overlap", table, "", meaning)
    better = causes.filter(~pl.col("cause").is_in(_NO_REMEDY) & (pl.col("saving_ns") > 0))
    if better.height:
        rule = "" if measured.why_not else ", or --remove RULE for what a rule of stepscope diagnose found"
        what = "TRACE" if folder is None else shlex.quote(folder.path)
        ask = f"stepscope whatif {what} --remove {better['cause'][0]}"
        yield Section("", texts(f"Next: {ask}{rule}."), is_quiet=True)


def _named(table: pl.DataFrame) -> pl.DataFrame:
    names = [resource_name(kind, cause) for kind, cause in table.select("kind", "cause").iter_rows()]
    return table.drop("kind", "cause").insert_column(0, pl.Series("resource", names, pl.String))


def _curve(curve: pl.DataFrame) -> pl.DataFrame:
    """One row per name and one column per factor, in the order of the rows."""
    names = curve["name"].unique(maintain_order=True).to_frame()
    for factor in curve["factor"].unique().sort(descending=True).to_list():
        column = "gone_share" if factor == 0 else f"{factor:.0%}_share"
        mine = curve.filter(pl.col("factor") == factor).select("name", pl.col("saving_share").alias(column))
        names = names.join(mine, on="name", how="left", maintain_order="left")
    return names


def _curve_sentence(curve: pl.DataFrame, measured: AsMeasured) -> Iterator[str]:
    """Format "If train.py:12 were twice as fast, the step would be 3.0 % shorter."."""
    half = curve.filter((pl.col("factor") == 0.5) & (pl.col("saving_share") > 0)).sort("saving_share", descending=True)
    if half.height:
        name, part = _short(half["name"][0]), share(half["saving_share"][0])
        yield f"If {name} were twice as fast, {whole(measured)} would be {part} shorter."


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


_OF_JOB: Final = ("measured_step_ns", "step_ns", "saving_share", "last", "last_then", "changed", "error_share")


def whatif_json(answer: Answer, folder: Folder | None = None) -> dict[str, Any]:
    measured = answer.measured
    return stamped(
        trace=fields(measured, "path", "format", "warnings"),
        steps={"source": "recorded" if measured.stepped else "none", "count": measured.step_count},
        **fields(measured, "step_ns", "replayed_step_ns", "device", "unexplained_share", "why_not", "resources"),
        **fields(answer, "contended_share"),
        causes=answer.causes,
        changes=[_prospect(each) for each in answer.alone],
        together=None if answer.together is None else _prospect(answer.together),
        ranks=() if answer.job is None else answer.job.ranks,
        job=None if answer.job is None else fields(answer.job, *_OF_JOB),
        **({} if folder is None or folder.steps is None else {"job_steps": fields(folder.steps)}),
        resources_then=answer.resources,
        critical_path=answer.path,
        slack=answer.slack,
        curve=answer.curve,
        sentences=sentences(whatif_document(answer, folder)),
    )


def _prospect(prospect: Prospect) -> dict[str, Any]:
    return {"change": prospect.name, **fields(prospect, "step_ns", "saving_ns", "saving_share")}
