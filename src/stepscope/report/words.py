"""The sentences of diagnoses, and tables that several renderers shorten in the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import polars as pl

from stepscope.analysis.captured import BASES
from stepscope.analysis.host import CAUSES
from stepscope.analysis.serving import ServingSummary
from stepscope.analysis.steps import UNLIKE
from stepscope.analysis.work import shapes_of
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import BusyWork, DeviceSummary, Finding, Once, Remedy, Unreadable
from stepscope.diagnosis.lines.costs import LineShare
from stepscope.diagnosis.recording_costs import Contention
from stepscope.diagnosis.rules.graph_break import BreakUse, CompiledFunction
from stepscope.diagnosis.rules.recompilation import varying_guards
from stepscope.report.document import Cause, Place
from stepscope.report.format import count, duration, share
from stepscope.trace.program_facts import CompilationFacts

_SMALL_SHARE: Final = 0.005
"""Causes below this share of the window are merged, and closer shares count as equal."""
_SAYABLE: Final = 0.0005
"""Least share that is not written as "<0.1 %"."""
_NEARLY_ALL: Final = 0.995
"""Share from which savings are all of the step, in words."""
_WORTH_SAYING: Final = 0.01
"""Smallest share of a costly line that is mentioned."""
_TELLING_SHARE: Final = 0.05
"""Least share of a cause's time after a wait for the wait to be mentioned."""
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
"""Columns of operators and kernels in reports; `stepscope operators` and `stepscope kernels` show all of them."""
_MOST_DEVICES: Final = 2
"""Most devices that are all shown at length."""
_MOST_DIFF_LINES: Final = 60
"""Most lines of one finding's diff in a report; `stepscope diagnose --diff` writes all of it."""
_ONCE: Final = {
    "first launch": "in first launches, which load code",
    "initialisation": "in initialisation",
    "graph capture": "in capturing a graph",
    "operator": "inside an operator before its work, perhaps to compile it",
}
STEP_SOURCES: Final = {"annotation": "annotated", "inferred": "inferred from what repeats"}


def headline(diagnosis: Diagnosis) -> str:
    """The device, the step's time, how much of it is idle, and the biggest cause, in one sentence."""
    step = _step_sentence(diagnosis)
    device = busiest_device(diagnosis)
    if diagnosis.metadata.format == "torch_snapshot":
        return "A memory snapshot: it shows what memory was used for, but no times."
    if device is None:
        missing = (
            "No work of a device is in what is left of the file" if is_cut(diagnosis) else "No device was recorded"
        )
        return f"{missing}; {step}{_host_clause(diagnosis.host)}."
    idle = f"{_over(diagnosis)}busy {share(_busy_share(device))}, idle {share(idle_share(device))}"
    _, times, _ = diagnosis.shown
    cause = _biggest(times.filter(pl.col("device") == device.device))
    return f"{_device_name(diagnosis, device)}: {step}, {idle}" + (f"; biggest cause: {cause}." if cause else ".")


_CUT: Final = "The file is cut off: this is about the part before, and what came later is missing."


def is_cut(diagnosis: Diagnosis) -> bool:
    kinds = {warning.kind.partition(":")[0] for warning in diagnosis.warnings}
    return not kinds.isdisjoint(("truncated", "compressed_data"))


def _over(diagnosis: Diagnosis) -> str:
    return "from its first to its last work " if diagnosis.by_device else ""


def contention_sentence(contention: Contention) -> str:
    """How much of the recorded steps went to other programs or was stopped by a quota, and what that means."""
    lost = share(contention.share)
    if contention.by_quota:
        text = f"The container's quota stopped the program for {lost} of the recorded steps' time"
    else:
        text = f"The machine was busy: for {lost} of the recorded steps' time their thread waited for a processor"
    others, usable = contention.other_cores, contention.usable_processors
    if others is not None and usable is not None and not contention.by_quota:
        text += f", as other programs kept {min(others, usable):.1f} of {count(usable)} processors busy"
    again = "with a higher quota" if contention.by_quota else "while it is quiet"
    return f"{text}. No other saving counts that time; to see the steps without it, record again {again}."


def exceptional_sentences(diagnosis: Diagnosis) -> list[str]:
    """What to know first: that the file is cut off, contention, one-off work, outliers, and earlier work."""
    found = [_CUT] if is_cut(diagnosis) else []
    found += [contention_sentence(diagnosis.contention)] if diagnosis.contention is not None else []
    found += (
        [_aside_sentence(diagnosis.serving)] if diagnosis.serving is not None and diagnosis.serving.put_aside else []
    )
    found += [_once_sentence(diagnosis)] if diagnosis.once else []
    if diagnosis.set_apart:
        found.append(_set_apart_sentence(diagnosis))
    for device in diagnosis.in_steps:
        if device.backlog_ns >= _SMALL_SHARE * max(device.window_ns, 1):
            backlog = f"{duration(device.backlog_ns)} on work that was launched before the steps"
            found.append(f"Device {device.device} also worked {backlog}: a backlog, which is not part of them.")
    return found


def _once_sentence(diagnosis: Diagnosis) -> str:
    parts = [f"{duration(each.ns)} {_ONCE[each.what]} ({_call(each)})" for each in diagnosis.once]
    text = f"{duration(diagnosis.once_ns)} of {duration(diagnosis.length_ns)} is one-off work: {'; '.join(parts)}."
    if not diagnosis.is_warm_up:
        return f"{text} No saving counts it."
    later = "record later steps, for which stepscope run waits"
    if diagnosis.serving is not None and not diagnosis.serving.phases:
        later = "record while requests are served"
    return f"{text} That is most of the recording, so no saving is promised: {later}."


def _aside_sentence(serving: ServingSummary) -> str:
    """What was put aside of an engine's iterations, such as the capture of graphs when it starts."""
    names = {"capture": "captures graphs", "warm_up": "warms up"}
    parts = [f"{names[each.phase]} for {duration(each.total_ns)}" for each in serving.put_aside]
    text = f"{serving.engine or 'The program'} {' and '.join(parts)}"
    return f"{text}, which is no step." if serving.phases else f"{text}, and serves nothing in this recording."


def _call(each: Once) -> str:
    name = each.name if each.count == 1 else f"{count(each.count)} calls, the longest {each.name}"
    return f"{name}, {each.where[0].file}:{each.where[0].line}" if each.where else name


def _set_apart_sentence(diagnosis: Diagnosis) -> str:
    longest = max(diagnosis.set_apart, key=lambda each: each.duration_ns)
    outliers = [each for each in diagnosis.set_apart if each.duration_ns >= UNLIKE * diagnosis.typical_step_ns]
    step = f"step {longest.index}" + (f", a {longest.phase}," if longest.phase in ("prefill", "decode") else "")
    which = f"S{step[1:]} is an outlier: it takes"
    if len(outliers) > 1:
        which = f"{count(len(outliers))} steps are outliers: the longest, {step.rstrip(',')}, takes"
    what = {"compute": "computation", "copy_in": "copies", "copy_out": "copies"}.get(longest.what, longest.what)
    most = f"{share(longest.share)} of that is {what.replace('_', ' ')}"
    mean = f"with it, the mean of all complete steps is {duration(diagnosis.mean_step_ns)}"
    others = len(diagnosis.set_apart) - max(len(outliers), 1)
    rest = (
        f" On the shorter side of it, {count(others)} more {'is' if others == 1 else 'are'} left out." if others else ""
    )
    return f"{which} {duration(longest.duration_ns)}; {most}; {mean}.{rest}"


def saving_sentence(finding: Finding, diagnosis: Diagnosis) -> str:
    """How much shorter a step would be without the cause; empty for a note."""
    if finding.saving_ns_per_step <= 0:
        return ""
    of = "per step" if diagnosis.step_source != "none" else "recorded"
    step_ns = diagnosis.promised_step_ns
    saving, step = duration(round(finding.saving_share * step_ns)), duration(step_ns)
    whose = "the job's " if diagnosis.job_step_ns and not diagnosis.unrecorded_ns else ""
    return f"{saving} of {whose}{step} {of} ({share(finding.saving_share)})"


def basis_sentence(finding: Finding) -> str:
    """How the saving was obtained, by a replay or only by adding up time, and how certain it is."""
    parts = [finding.saving_basis]
    if finding.saving_from == "attributed" and finding.saving_ns_per_step > 0:
        parts.append("attributed, not replayed")
    return "; ".join([*parts, f"confidence {finding.confidence}"])


def diff_text(remedy: Remedy) -> str:
    """The diff of the user's own lines, shortened, with a last line that says what is left out."""
    lines = [line.rstrip("\r").expandtabs(4) for line in remedy.diff.rstrip().split("\n")]
    left = len(lines) - _MOST_DIFF_LINES
    if left > 0:
        lines[_MOST_DIFF_LINES:] = [f"({left} more lines; stepscope diagnose --diff FILE writes all)"]
    return "\n".join(lines)


def trial(remedy: Remedy, program: str = "") -> str:
    """The command that runs the unchanged program with the remedy; empty if there is none."""
    return f"stepscope run --apply {','.join(remedy.apply)} {program or 'PROGRAM'}" if remedy.apply else ""


def together_sentence(diagnosis: Diagnosis) -> str:
    """What all replayed findings save at once, against the sum of their savings; empty without such a replay."""
    both = diagnosis.together
    if both is None:
        return ""
    savings = sum(finding.saving_ns_per_step > 0 for finding in diagnosis.findings)
    which = "All of these" if both.count == savings else f"The {both.count} of them that were replayed,"
    text = f"{which} together: {_less_than_all(both.share)} of {whole(diagnosis)}"
    if abs(both.share - both.sum_share) < _SMALL_SHARE:
        return f"{text}: they add up."
    if both.share < both.sum_share:
        overlap = "which is less than their sum" if both.sum_share >= _NEARLY_ALL else f"not {share(both.sum_share)}"
        return f"{text}, {overlap}: they overlap."
    return f"{text}, more than their sum of {share(both.sum_share)}: some only count once others are gone."


def _less_than_all(saved: float) -> str:
    """A share in words if it would be all: some of a step is left, however little of it was recorded."""
    return "nearly all" if saved >= _NEARLY_ALL else share(saved)


def afterwards_sentence(diagnosis: Diagnosis) -> str:
    """Which findings save time once those shown are fixed, though close to nothing now; empty if none does."""
    if not diagnosis.afterwards:
        return ""
    first, *others = diagnosis.afterwards
    text = f"{first.rule} would save another {share(first.saving_share)} of {whole(diagnosis)}"
    text += "".join(f", {each.rule} {share(each.saving_share)}" for each in others)
    return f"Once these are gone, {text}; --all shows {'it' if not others else 'them'}."


def line_sentences(diagnosis: Diagnosis) -> list[str]:
    """What each costly line takes that no finding explains, one sentence a line."""
    return [_line_sentence(line, whole(diagnosis)) for line in diagnosis.lines]


def _line_sentence(line: LineShare, period: str) -> str:
    text = f"{line.file}:{line.line} {line.function} takes {share(line.share)} of {period}"
    details = [f"{share(line.backward_share)} of that is its backward"] if line.backward_share >= _WORTH_SAYING else []
    if line.runs is not None and line.runs >= 1:
        details.append("it runs once" if line.runs == 1 else f"it runs {line.runs:,.3g} times")
    if line.faster_share >= _WORTH_SAYING:
        details.append(f"twice as fast it would save {share(line.faster_share)}")
    return "; ".join([text, *details]) + "."


_LIMITS: Final = {"compute": "arithmetic limits it", "memory": "memory limits it", "cache": "read from the cache"}


def busy_sentences(diagnosis: Diagnosis) -> list[str]:
    """What each costly kind of work on the device reached, and why not more, one sentence a kind."""
    named = {device.name for device in diagnosis.metadata.devices if device.name}
    return [_busy_sentence(work, whole(diagnosis), is_bound=not named) for work in diagnosis.busy]


def graph_sentences(diagnosis: Diagnosis) -> list[str]:
    """What is known of the kernels in graphs: how many, and how they were tied to operators, modules and lines."""
    use = diagnosis.graphs
    if use is None:
        return []
    each = "launch" if use.launches == 1 else "launches"
    found = [f"{count(use.launches)} {each} of graphs ran {count(use.kernels)} kernels for {duration(use.kernel_ns)}."]
    for tied in use.by:
        what = "their module" if tied.basis == "annotation" else "their operator, module and line"
        how = f"by {BASES[tied.basis][0]} (confidence {tied.confidence})"
        found.append(f"{count(tied.kernels)} of them have {what} {how}.")
    if use.tied < use.kernels:
        found.append(f"{count(use.kernels - use.tied)} of them are known by their kernels' names only.")
    if use.unrecorded:
        found.append(
            f"No kernel of {count(use.unrecorded)} launches was recorded: {duration(use.unrecorded_ns)} after them "
            "count as unknown, since the device may have worked."
        )
    return found


def compile_sentences(diagnosis: Diagnosis) -> list[str]:
    """What torch.compile did: each function's compilations and time, its graphs, breaks, guards and fused kernels."""
    use = diagnosis.compiled
    if use is None:
        return []
    every = "a step" if diagnosis.step_source != "none" else "in the recording"
    found = [sentence for function in use.functions for sentence in _function_sentences(function, every)]
    found += [_break_sentence(each, every) for each in use.breaks]
    if len(use.functions) > 1:
        whole = f"All {count(len(use.functions))} functions were compiled {count(use.compilations)} times"
        found.append(f"{whole} in {duration(use.compile_ns)}{_cold(use.cold_ns, use.compile_ns)}.")
    return found


def _cold(cold_ns: int | None, compile_ns: int) -> str:
    if cold_ns is None:
        return ""
    if not cold_ns:
        return ", all of it from Inductor's cache"
    return "" if cold_ns == compile_ns else f", {duration(cold_ns)} of it without Inductor's cache"


def _function_sentences(function: CompiledFunction, every: str) -> Iterator[str]:
    name = f"{function.function} ({function.file}:{function.line})"
    times = "once" if function.compilations == 1 else f"{count(function.compilations)} times"
    text = f"{name} was compiled {times}"
    if function.compile_ns is not None:
        text += f" in {duration(function.compile_ns)}{_cold(function.cold_ns, function.compile_ns)}"
    if function.graphs:
        graphs = "graph" if function.graphs == 1 else "graphs"
        kernels = "fused kernel" if function.fused_kernels == 1 else "fused kernels"
        text += f": {count(function.graphs)} {graphs} with {count(function.fused_kernels)} {kernels}"
    if function.ns_per_step is not None:
        checks = duration(function.lookup_ns_per_step or 0)
        text += (
            f"; it takes {duration(function.ns_per_step)} {every} on the host, and the checks of its guards {checks}"
        )
    yield f"{text}."
    if function.failure:
        yield f"{function.function} could not be compiled and runs as before: {function.failure}"
    facts = [CompilationFacts(function=function.function, reason=each.guard) for each in function.recompilations]
    line = next((each.called_from for each in function.recompilations if each.called_from), None)
    varying = varying_guards(facts)
    for guard in varying[:_MOST_GUARDS]:
        again = "once again" if guard.count == 1 else f"{count(guard.count)} times again"
        at = f", called at {line}" if line is not None else ""
        yield f"{function.function} was compiled {again}{at}, because {guard.what}."
    if len(varying) > _MOST_GUARDS:
        rest = len(varying) - _MOST_GUARDS
        yield f"{count(rest)} other {'guard' if rest == 1 else 'guards'} of it failed."
    if function.kernels:
        shown = ", ".join(f"{each.name} {duration(each.ns_per_step)}" for each in function.kernels[:_MOST_KERNELS])
        where = function.kernels[0].on
        yield f"Its costliest kernels and graphs {every} on the {where}: {shown}."


def _break_sentence(each: BreakUse, every: str) -> str:
    text = f"The graph break at {each.file}:{each.line}" + (f" ({each.reason})" if each.reason else "")
    if each.lost_ns_per_step is None or each.per_step is None:
        text += ": the recorded steps do not show what it costs"
    else:
        text += f" costs {duration(each.lost_ns_per_step)} {every}: compiled code is left and entered again"
        text += " once" if each.per_step == 1 else f" {count(each.per_step)} times"
    if len(each.behind) > 1:
        text += f", at {count(len(each.behind))} lines"
    return f"{text}. {sentence(each.hint)}".rstrip()


_MOST_GUARDS: Final = 4
_MOST_KERNELS: Final = 4


def _busy_sentence(work: BusyWork, period: str, *, is_bound: bool) -> str:
    shapes = " and ".join("x".join(map(str, each)) for each in shapes_of(work.input_shapes) if len(each) > 1)
    what = work.what if len(work.what) <= _SHAPES else f"{work.what[:_SHAPES]}…"
    text = f"{share(work.share)} of {period}: {what}" + (f" of {shapes[:_SHAPES]}" if shapes else "")
    reached = {"arithmetic peak": work.compute_share, "memory bandwidth": work.bandwidth_share}
    parts = [f"{share(value)} of the {name}" for name, value in reached.items() if value is not None]
    if not parts:
        unknown = "what it could reach was not counted" if shapes else "no shapes show what it could reach"
        return f"{text}, {_kind_of(work)}; {unknown}."
    of = f" of {work.peaks}" if work.peaks else ""
    text += f" reaches {'at most ' if is_bound else ''}{' and '.join(parts)}{of}; {_LIMITS.get(work.limit or '', '')}"
    text += f": {work.why}" if work.why else ""
    return f"{text}. Better: {work.better}." if work.better else f"{text}."


def _kind_of(work: BusyWork) -> str:
    """What kernels compute by their names, such as "attention by FlashInfer"."""
    kind = "unknown work: its kernels' names do not tell what they compute" if work.kind is None else work.kind
    return f"{kind} by {work.library}" if work.library else kind


_SHAPES: Final = 60


def place_words(place: Place) -> str:
    """A place, its share of the finding's cost unless it carries all of it, and the library's function inside."""
    words = f"{place.place} ({share(place.share)} of it)" if place.share < 1 else place.place
    return f"{words}, most of it in {place.inside}" if place.inside else words


def unreadable_heading(unreadable: Sequence[Unreadable]) -> str:
    if len(unreadable) == 1:
        return "1 file is not in this report"
    return f"{count(len(unreadable))} files are not in this report"


def unreadable_sentences(unreadable: Sequence[Unreadable]) -> list[str]:
    """Say for each file why it is not in the report."""
    return [f"{each.reason.removesuffix('.')}." for each in unreadable]


def hidden_sentence(diagnosis: Diagnosis) -> str:
    """Say how many findings are hidden and how to show them; empty if none is hidden."""
    if diagnosis.hidden == 0:
        return ""
    if diagnosis.is_warm_up:
        return f"{count(diagnosis.hidden)} findings about the rest of it are left out."
    what = "1 more finding saves" if diagnosis.hidden == 1 else f"{count(diagnosis.hidden)} more findings save"
    return f"{what} less than 1 % of {whole(diagnosis)}; --all shows them."


def nothing_sentence(diagnosis: Diagnosis) -> str:
    if diagnosis.is_warm_up:
        return "The recording has no typical step, so no saving can be promised."
    return f"Nothing was found that would save a noticeable part of {whole(diagnosis)}."


def whole(diagnosis: Diagnosis) -> str:
    """Name the time that savings are shares of."""
    return "the step" if diagnosis.step_source != "none" else "the recording"


def rank_name(diagnosis: Diagnosis) -> str:
    rank, path = diagnosis.metadata.rank, diagnosis.metadata.path
    return f"rank {rank}" if rank is not None else path or "a trace"


def ranks_or_traces(diagnoses: Sequence[Diagnosis]) -> str:
    """ "ranks" if every trace says which rank it is, else "traces"."""
    return "traces" if any(diagnosis.metadata.rank is None for diagnosis in diagnoses) else "ranks"


def sentence(text: str) -> str:
    """Capitalise the text and end it with a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}." if text else ""


def rank_table(diagnoses: Iterable[Diagnosis], apart: Collection[str] = ()) -> pl.DataFrame:
    """One row per rank: columns rank, trace (what it lacks), step_ns, busy_share, idle_share,
    exposed_communication_share, top_finding.

    Columns in which no rank has anything, such as those of devices, are left out.

    Args:
        apart: names of ranks that cannot be compared with the others.
    """
    table = pl.DataFrame(
        [_rank_row(diagnosis, apart) for diagnosis in diagnoses],
        schema={
            "rank": pl.String,
            "trace": pl.String,
            "step_ns": pl.Int64,
            "busy_share": pl.Float64,
            "idle_share": pl.Float64,
            "exposed_communication_share": pl.Float64,
            "top_finding": pl.String,
        },
        orient="row",
    )
    return table.select(name for name in table.columns if table[name].null_count() < table.height)


def worst_device(diagnosis: Diagnosis) -> DeviceSummary | None:
    """The device with the largest idle share."""
    return max(diagnosis.shown[0], key=idle_share, default=None)


def busiest_device(diagnosis: Diagnosis) -> DeviceSummary | None:
    """The device that findings are about: the one with the most busy time, the first on a tie."""
    return min(diagnosis.shown[0], key=lambda device: (-device.busy_ns, device.device), default=None)


def shown_devices(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The devices shown at length: all if there are few, else the most idle and the busiest."""
    if len(diagnosis.devices) <= _MOST_DEVICES:
        return tuple(device.device for device in diagnosis.devices)
    chosen = (worst_device(diagnosis), busiest_device(diagnosis))
    return tuple(dict.fromkeys(device.device for device in chosen if device is not None))


def device_table(diagnosis: Diagnosis) -> pl.DataFrame:
    """One row per device: device, window_ns, busy_ns, idle_share and the cause of most of its idle time."""
    rows = []
    devices, idle, _ = diagnosis.shown
    for device in devices:
        causes = causes_of(idle.filter(pl.col("device") == device.device))
        cause = causes[0].cause if causes else ""
        rows.append((device.device, device.window_ns, device.busy_ns, idle_share(device), cause))
    schema = ["device", "window_ns", "busy_ns", "idle_share", "biggest_cause"]
    return pl.DataFrame(rows, schema=schema, orient="row", infer_schema_length=None)


def causes_of(times: pl.DataFrame) -> tuple[Cause, ...]:
    """Idle (or host) time by cause, the largest first, with the waits that preceded it."""
    found = [
        Cause(
            str(cause),
            int(rows["ns"].sum()),
            float(rows["share"].sum()),
            _after(rows) if "trigger" in times.columns else (),
        )
        for (cause,), rows in times.group_by("cause")
    ]
    return tuple(sorted(found, key=lambda each: (-each.ns, each.cause)))


def _after(rows: pl.DataFrame) -> tuple[tuple[str, int], ...]:
    known = rows.filter(pl.col("trigger").is_not_null()).group_by("trigger").agg(pl.col("ns").sum())
    return tuple(known.sort(["ns", "trigger"], descending=True).iter_rows())


def joined_causes(causes: Sequence[Cause]) -> list[Cause]:
    """The causes with the small ones merged."""
    small = [each for each in causes if each.share < _SMALL_SHARE]
    if len(small) < 2:
        return list(causes)
    rest = Cause(f"{len(small)} others", sum(each.ns for each in small), sum(each.share for each in small))
    return [*(each for each in causes if each.share >= _SMALL_SHARE), rest]


def after_sentence(cause: Cause) -> str:
    """How much of a cause's idle time followed a wait that drained the streams; empty if close to none did."""
    ns = sum(part for _, part in cause.after)
    if ns <= _TELLING_SHARE * cause.ns:
        return ""
    return f"{duration(ns)} of it after {cause.after[0][0]}" + (" and others" if len(cause.after) > 1 else "")


def top_columns(frame: pl.DataFrame) -> tuple[str, ...]:
    """The columns of operators or kernels that a report shows.

    Device columns are left out if no operator had work on a device.
    """
    columns = [name for name in _TOP_COLUMNS if name in frame.columns]
    if "device_self_ns" in columns and not frame["device_self_ns"].sum():
        columns = [name for name in columns if not name.startswith("device_")]
    return tuple(columns or frame.columns)


def _rank_row(diagnosis: Diagnosis, apart: Collection[str]) -> tuple[object, ...]:
    device = worst_device(diagnosis)
    rank = diagnosis.metadata.rank
    name = str(rank) if rank is not None else diagnosis.metadata.path
    top = next(
        (each.title for each in diagnosis.findings if each.saving_ns_per_step or each.ends_run_in_ns is not None), ""
    )
    lacks = "cut off" if is_cut(diagnosis) else "not whole" if rank_name(diagnosis) in apart else None
    if device is None:
        return (name, lacks, diagnosis.step_ns, None, None, None, top)
    exposed = device.exposed_communication_ns / max(device.window_ns, 1)
    return (name, lacks, diagnosis.step_ns, _busy_share(device), idle_share(device), exposed, top)


def idle_share(device: DeviceSummary) -> float:
    """Idle time as a share (0 to 1) of the device's window."""
    return device.idle_ns / max(device.window_ns, 1)


def _busy_share(device: DeviceSummary) -> float:
    return device.busy_ns / max(device.window_ns, 1)


def _step_sentence(diagnosis: Diagnosis) -> str:
    if diagnosis.step_source == "none":
        return f"{duration(diagnosis.length_ns or diagnosis.step_ns)} recorded, without steps"
    steps = "1 step" if diagnosis.step_count == 1 else f"mean of {count(diagnosis.step_count)}"
    if diagnosis.typical_step_ns != diagnosis.step_ns:
        steps = f"median of {count(diagnosis.step_count)}, mean {duration(diagnosis.step_ns)}"
    times = f"{duration(diagnosis.typical_step_ns)}"
    if diagnosis.unrecorded_ns:
        times = f"{duration(diagnosis.unrecorded_ns)}, and {times} while recorded"
    return f"a step takes {times} ({steps}, {STEP_SOURCES.get(diagnosis.step_source, '')})"


def _device_name(diagnosis: Diagnosis, device: DeviceSummary) -> str:
    name = f"device {device.device}" + (f" ({device.name})" if device.name else "")
    if len(diagnosis.devices) > 1:
        name += f", the busiest of {len(diagnosis.devices)}"
    if diagnosis.metadata.rank is not None:
        name = f"rank {diagnosis.metadata.rank}, {name}"
    return name[:1].upper() + name[1:]


def _biggest(times: pl.DataFrame) -> str:
    causes = causes_of(times.filter(pl.col("cause") != "compute"))
    if not causes or causes[0].share < _SAYABLE:
        return ""
    why, part = CAUSES.get(causes[0].cause, causes[0].cause), share(causes[0].share)
    return f"{why.removesuffix(')')}, {part})" if why.endswith(")") else f"{why} ({part})"


def _host_clause(host: pl.DataFrame) -> str:
    cause = _biggest(host)
    computing = float(host.filter(pl.col("cause") == "compute")["share"].sum())
    if computing > 0:
        return f"; computing {share(computing)}" + (f", and most of the rest: {cause}" if cause else "")
    return f"; most of the host's time: {cause}" if cause else ""
