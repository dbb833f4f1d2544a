"""Report what lines and modules cost, and summarise devices and the host."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from stepscope.analysis.device_time import ENGINES, DeviceUse, EngineUse, HostUse
from stepscope.analysis.places import PHASE_COLUMNS, PlaceCosts
from stepscope.analysis.serving import PhaseSummary, ServingSummary
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.report.document import Document, Section, Table, Text, fields, stamped, texts
from stepscope.report.format import cell, count, duration, file_name, printable, share
from stepscope.report.tables import heading as column_heading
from stepscope.report.tables import showing
from stepscope.trace.model import XLA_FORMATS

_SMALLEST_PHASE: Final = 0.01
"""Phases below this share of the whole get no column of their own in text."""
_OUTSIDE: Final = {"lines": "(no line of yours)", "modules": "(outside of modules)"}
_OPTIONAL: Final = ("optimizer_ns", "input_ns", "other_ns", "idle_ns", "calls", "bytes_allocated")
"""Columns left out of text if they are empty."""


_HOW: Final = {
    "lines": "it has no Python stacks either. stepscope run records lines; torch.profiler needs with_stack=True.",
    "modules": "stepscope run records their calls; torch.profiler needs with_stack=True.",
}
_HOW_IN_XLA: Final = {
    "lines": "let JAX's Python tracer record frames; PyTorch/XLA records lines with XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1.",
    "modules": "XLA records those of compiled code, by the names that JAX's libraries (or jax.named_scope) give them; "
    "PyTorch/XLA does so with XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1.",
}
_PHASES: Final = {
    "prefill": "prefill",
    "decode": "decode",
    "mixed": "both at once",
    "capture": "graph capture",
    "warm_up": "warm-up",
    "": "iterations",
}
_LIBRARIES: Final = "its Python frames are those of libraries. --user-code PATTERN says which of their files are yours."


def places_document(costs: PlaceCosts, table: pl.DataFrame, things: str, *, top: int) -> Document:
    """Report the table of lines or modules, with times per step.

    Args:
        things: "lines" or "modules".
        top: rows to show, 0 for all; the row of unplaced time is always shown.
    """
    if table[table.columns[0]].null_count() == table.height:
        has_frames = things == "lines" and costs.attribution.trace.frames.height > 0
        how = _HOW_IN_XLA if costs.attribution.trace.metadata.format in XLA_FORMATS else _HOW
        nothing = f"This trace shows none of your {things}: {_LIBRARIES if has_frames else how[things]}"
        return Document(things, (Text(nothing),))
    shown = table.head(top) if top else table
    without_place = pl.col(table.columns[0]).is_null()
    rest = table[shown.height :].filter(without_place)  # unplaced time is often the largest: never cut off
    shown = pl.concat([shown, rest])
    rest_ns = int(table.filter(without_place)["total_ns"].sum())
    title = heading(costs) if things == "lines" else heading(costs, costs.total_ns - rest_ns, "modules")
    rows = Section("", (Table(_for_reading(shown, costs, things)),), is_quiet=True)
    notes = texts(showing(shown.height, table.height, things), *_notes(shown, things))
    return Document(things, (Text(title), rows, *notes), "--csv -")


def places_json(costs: PlaceCosts, table: pl.DataFrame, things: str, *, top: int) -> dict[str, Any]:
    """The table as JSON values: sums over the steps, in whole nanoseconds."""
    return stamped(
        trace=costs.attribution.trace.metadata.path,
        **fields(costs, "basis", "steps", "total_ns", "attributed_ns", "idle_ns"),
        **{f"{things[:-1]}_count": table.height, things: table.head(top) if top else table},
    )


def heading(costs: PlaceCosts, placed_ns: int | None = None, where: str = "lines of yours") -> str:
    """Say in one sentence what the times are, over which steps, and how much of them has a place."""
    placed_ns = costs.attributed_ns if placed_ns is None else placed_ns
    steps = max(costs.steps, 1)
    over = f"per step, mean of {count(costs.steps)}" if costs.steps > 1 else "of one step" if costs.steps else "in all"
    what = "Device time" if costs.basis == "device" else "Operators’ own time"
    devices = costs.attribution.trace.device_work["device"].n_unique() if costs.basis == "device" else 0
    what += f" of {count(devices)} devices together" if devices > 1 else ""
    idle = f", idle {duration(costs.idle_ns / steps)}" if costs.idle_ns else ""
    part = share(placed_ns / max(costs.total_ns, 1))
    return f"{what} {over}: {duration(costs.total_ns / steps)}{idle}; {part} of it in {where}."


def per_step(table: pl.DataFrame, costs: PlaceCosts) -> pl.DataFrame:
    """The table with its sums divided by the number of steps."""
    summed = [name for name in table.columns if name.endswith("_ns") or name in ("calls", "bytes_allocated")]
    return table.with_columns(pl.col(summed) / max(costs.steps, 1))


def worth_showing(table: pl.DataFrame) -> list[str]:
    """The cost columns, without empty ones and phases close to zero."""
    always = ("total_ns", "self_ns", "share", "forward_ns", "backward_ns")
    least = dict.fromkeys(PHASE_COLUMNS, _SMALLEST_PHASE * float(table["total_ns"].sum()))
    return [
        name
        for name in (*always, *_OPTIONAL)
        if name in table.columns and (name in always or table[name].fill_null(0).sum() > least.get(name, 0))
    ]


def _for_reading(table: pl.DataFrame, costs: PlaceCosts, things: str) -> pl.DataFrame:
    outside = pl.lit(_OUTSIDE[things])
    if things == "lines":
        place = pl.format("{}:{}", pl.col("file"), pl.col("line"))
        mark = pl.when(pl.col("exact_line")).then(pl.lit("")).otherwise(pl.lit("*"))
        names = [pl.coalesce(place + mark, outside).alias("line"), pl.col("function").fill_null("")]
    else:
        indent = pl.concat_str(pl.lit("  ").repeat_by("depth").list.join(""), "name")
        names = [pl.coalesce(indent, outside).alias("module")]
    means = per_step(table, costs)
    columns = worth_showing(means)
    cells = [pl.col(name) if name in ("total_ns", "share") else _or_blank(name) for name in columns]
    return means.select(*names, *cells).rename({"bytes_allocated": "allocated_bytes"}, strict=False)


def _or_blank(name: str) -> pl.Expr:
    return pl.when(pl.col(name) != 0).then(pl.col(name))


def _notes(table: pl.DataFrame, things: str) -> list[str]:
    if things == "lines" and (~table["exact_line"]).any():
        return ["* a function: the trace does not show which of its lines. stepscope run records lines."]
    return []


AROUND: Final = 3
"""Lines shown before and after one that costs something."""
_ALWAYS: Final = ("total_ns", "forward_ns", "backward_ns")
_COLUMNS: Final = (*_ALWAYS, "idle_ns", "calls", "allocated_bytes")


def source_view(
    costs: PlaceCosts,
    table: pl.DataFrame,
    source: Sequence[str] | None,
    *,
    every: bool,
    width: int,
    changed: Container[int] = (),
) -> list[str]:
    """A heading, then the file's lines with their cost per step.

    Args:
        table: rows of `line_table` for this file.
        source: the file's lines; None if the file was not found, and then only the costs are shown.
        every: show the whole file, not only the neighbourhood of lines that cost anything.
        changed: lines whose text was another when the trace was recorded.
    """
    means = per_step(table, costs).rename({"bytes_allocated": "allocated_bytes"})
    columns = [name for name in _COLUMNS if name in _ALWAYS or means[name].fill_null(0).sum() > 0]
    rows = {row["line"]: row for row in _by_line(means).iter_rows(named=True)}
    shown = _shown(rows, source, every=every)
    cells = [[_cell(rows.get(line), name) for name in columns] for line in shown]
    heads = [column_heading(name) for name in columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    number_width = len(str(max(shown, default=1))) + 1
    lines = [heading(costs), "", _line(heads, widths, "".rjust(number_width), "")]
    before = 0
    for line, values in zip(shown, cells, strict=True):
        if before and line > before + 1:
            lines.append(_line(["" for _ in widths], widths, "…".rjust(number_width), ""))
        before = line
        row = rows.get(line)
        mark = " " if row is None else "*" if not row["exact_line"] else "~" if line in changed else " "
        text = source[line - 1] if source is not None and line <= len(source) else _function(row)
        lines.append(_line(values, widths, f"{line}{mark}".rjust(number_width), text)[: max(width, 60)].rstrip())
    if (~table["exact_line"]).any():
        lines += ["", "* a whole function: the trace does not show which of its lines. stepscope run records lines."]
    if any(line in changed for line in rows):
        lines += ["", "~ the line was rewritten since: its cost is that of the recorded text."]
    return lines


def _by_line(table: pl.DataFrame) -> pl.DataFrame:
    """One row per line; functions of a comprehension are added to the line around them."""
    sums = [pl.col(name).sum() for name in table.columns if name not in ("file", "line", "function", "exact_line")]
    return table.group_by("line").agg(pl.col("function").first(), pl.col("exact_line").all(), *sums)


def _shown(rows: dict[int, Any], source: Sequence[str] | None, *, every: bool) -> list[int]:
    if source is None:
        return sorted(rows)
    if every:
        return list(range(1, len(source) + 1))
    near = {line + offset for line in rows for offset in range(-AROUND, AROUND + 1)}
    return sorted({*(line for line in near if 1 <= line <= len(source)), *rows})


def _cell(row: dict[str, Any] | None, name: str) -> str:
    value = None if row is None else row[name]
    return cell(name, value) if value else ""


def _function(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"({row['function']})"


def _line(values: Sequence[str], widths: Sequence[int], number: str, text: str) -> str:
    cells = [value.rjust(width) for value, width in zip(values, widths, strict=True)]
    return "  ".join([*cells, number, printable(text.expandtabs(4))]).rstrip()


@dataclass(frozen=True, slots=True)
class Glance:
    """Summary of one device or the host: a heading and rows of (label, value, meaning)."""

    heading: str
    rows: tuple[tuple[str, str, str], ...]


def glances(diagnosis: Diagnosis, devices: Sequence[str] | None = None) -> tuple[Glance, ...]:
    """Summarise every device and then the host; empty without a device, since the host's causes say as much.

    Args:
        devices: only these.
    """
    _, _, uses = diagnosis.shown
    if not uses:
        return ()
    engines = {use.device: use for use in diagnosis.engine_uses if devices is None or use.device in devices}
    found = tuple(
        Glance(f"Device {use.device} at a glance", tuple(_device_rows(use, has_engines=use.device in engines)))
        for use in uses
        if devices is None or use.device in devices
    )
    found += tuple(Glance(f"Engines of device {use.device}", tuple(_engine_rows(use))) for use in engines.values())
    if diagnosis.host_use is None or not diagnosis.host_use.window_ns:
        return found
    serves = diagnosis.serving is not None
    return (*found, Glance("The host at a glance", _host_rows(diagnosis.host_use, serves=serves)))


def serving_glance(serving: ServingSummary) -> Glance:
    """Summarise what was served: each phase, times per token, the fullest batch, and what was put aside."""
    rows = [
        (_PHASES[each.phase], _iterations(each), _phase_words(each, is_marked=serving.source == "annotation"))
        for each in serving.phases
    ]
    if serving.functions:
        parts = [
            f"{share(each.share)} {each.function}" + (f" ({file_name(each.file)})" if each.file else "")
            for each in serving.functions
        ]
        rows.append(("host's time", f"of {_PHASES[serving.phases[0].phase]}", ", ".join(parts)))
    if serving.time_per_output_token_ns is not None:
        what = "from the start of a decoding iteration to the next (median)"
        rows.append(("time per token", duration(serving.time_per_output_token_ns), what))
        tokens = next((each.tokens for each in serving.phases if each.phase == "decode"), None)
        if tokens is not None and serving.time_per_output_token_ns:
            rate = round(tokens * 1e9 / serving.time_per_output_token_ns)
            rows.append(("throughput", f"{count(rate)} tokens/s", "of all requests together, while they decode"))
    if serving.time_to_first_token_ns is not None:
        what = "from the start of a prefill to the iteration after it (median); waiting in the queue comes before"
        rows.append(("first token", duration(serving.time_to_first_token_ns), what))
    for each in serving.put_aside:
        sizes = (
            f", for {', '.join(map(count, serving.captured_sizes))} at once"
            if each.phase == "capture" and serving.captured_sizes
            else ""
        )
        what = f"put aside: {duration(each.total_ns)} in which nothing was served{sizes}"
        rows.append((_PHASES[each.phase], _iterations(each), what))
    if not serving.phases:
        rows.append(("served", "nothing", "record while requests are served"))
    how = {"annotation": "by its own ranges", "inferred": "inferred from its calls"}[serving.source]
    return Glance(f"What {serving.engine or 'the loop'} served, {how}", tuple(rows))


def _iterations(phase: PhaseSummary) -> str:
    return "1 iteration" if phase.count == 1 else f"{count(phase.count)} iterations"


def _phase_words(phase: PhaseSummary, *, is_marked: bool) -> str:
    """A phase's typical iteration: times, batch, and how it is launched."""
    parts = [f"{duration(phase.host_ns)} on the host"]
    if phase.device_ns is not None:
        parts.append(f"{duration(phase.device_ns)} of work on the device")
    if phase.requests is not None:
        parts.append(f"{count(phase.requests)} request{'' if phase.requests == 1 else 's'}")
        if phase.fewest_requests != phase.most_requests:
            parts[-1] += f" ({count(phase.fewest_requests or 0)} to {count(phase.most_requests or 0)})"
    if phase.tokens is not None:
        parts.append(f"{count(phase.tokens)} token{'' if phase.tokens == 1 else 's'}")
        if is_marked and phase.phase == "decode" and phase.requests and phase.tokens > phase.requests:
            parts[-1] += f", {phase.tokens / phase.requests:.3g} of each request at once (speculative decoding)"
    if phase.device_ns is not None:
        graphs = {0.0: "", 1.0: ", a graph among them"}.get(phase.graph_share)
        graphs = f", with a graph in {share(phase.graph_share)} of the iterations" if graphs is None else graphs
        parts.append(f"{count(phase.launches)} launch{'' if phase.launches == 1 else 'es'}{graphs}")
    return ", ".join(parts) + ("" if phase.count == 1 else " (medians)")


def _device_rows(use: DeviceUse, *, has_engines: bool) -> list[tuple[str, str, str]]:
    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    rows = [
        (
            "device ratio",
            share(use.device_ratio),
            f"the device worked {duration(use.busy_ns)} of {duration(use.window_ns)}",
        )
    ]
    if use.device_host_ratio is not None:
        what = f"the device's work over the host's ({duration(use.host_ns)}); below 1 the host has more to do"
        rows.append(("device to host", f"{use.device_host_ratio:.2f}", what))
    if use.host_overlap is not None:
        what = f"host and device worked at once for {duration(use.both_ns)}; 100 % if neither waits for the other"
        rows.append(("host overlap", share(use.host_overlap), what))
    if not has_engines:
        rows += _kind_rows(use)
    if use.low_precision_ratio is not None:
        what = "of the matrix work runs in 16 bits or fewer"
        if use.four_bits_ns:
            what += f", {share(use.four_bits_ns / use.matrix_work_ns)} with weights or inputs of 4 bits"
        rows.append(("low precision", share(use.low_precision_ratio), what))
    return rows


def _kind_rows(use: DeviceUse) -> list[tuple[str, str, str]]:
    """Share of the device's time by kind of work."""

    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    rows = []
    together = f", {duration(use.both_engines_ns)} of it together with vector work" if use.both_engines_ns else ""
    rows.append(("matrix work", part(use.matrix_ns), f"matrix products, convolutions and attention{together}"))
    rows.append(("vector work", part(use.vector_only_ns), "all other computation, where no matrix work ran"))
    if use.unknown_only_ns:
        rows.append(("unknown work", part(use.unknown_only_ns), "kernels whose names do not tell what they compute"))
    if use.communication_only_ns:
        rows.append(("communication", part(use.communication_only_ns), "between devices, where no computation ran"))
    rows.append(("copies", part(use.copy_only_ns), "of memory (DMA), where nothing else ran"))
    if use.other_ns:
        rows.append(("other work", part(use.other_ns), "setting memory, where nothing else ran"))
    rows.append(("idle", part(use.idle_ns), "no work at all"))
    return rows


def _engine_rows(use: EngineUse) -> list[tuple[str, str, str]]:
    """Shares of the window by engine, which add up to 1: each moment counts for the first engine active in it."""

    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    rows = []
    for place, time in enumerate(use.engines):
        what = f"{duration(time.exposed_ns)}, {ENGINES[time.engine]}"
        if time.engine == "MME" and use.computing_together_ns:
            what += f"; {duration(use.computing_together_ns)} of it together with TPC"
        elif place and time.exposed_ns < time.busy_ns:
            what += f"; {duration(time.busy_ns - time.exposed_ns)} more behind other engines"
        rows.append((time.engine if not place else f"exposed {time.engine}", part(time.exposed_ns), what))
    rows.append(("idle", part(use.idle_ns), f"{duration(use.idle_ns)}, no engine at work"))
    return rows


def _host_rows(use: HostUse, *, serves: bool) -> tuple[tuple[str, str, str], ...]:
    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    what = "operators, launches and Python" if serves else "operators, launches, the optimizer and Python"
    return (
        ("building work", part(use.graph_build_ns), what),
        ("loader", part(use.loader_ns), "waiting for data or loading it"),
        ("input copy", part(use.input_copy_ns), "copying data to the device"),
        ("compiling", part(use.compile_ns), "building graphs and kernels"),
        ("waiting", part(use.waiting_ns), "for the device"),
    )
