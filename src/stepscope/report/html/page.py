"""The report for a browser: one file that works offline; every name from the trace is text, never markup.

Three things keep a hostile name harmless: autoescaping, JSON without any character that HTML knows, and a policy
that lets the page run only its own script (by hash) and load nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Final

import polars as pl
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from stepscope.analysis.flame import FlameGraph
from stepscope.analysis.memory import MemoryPicture
from stepscope.analysis.picture import StepPicture
from stepscope.analysis.telemetry import TelemetryPicture
from stepscope.diagnosis.diagnosis import DeviceSummary, Diagnosis, Unreadable
from stepscope.diagnosis.finding import Figure, Finding, Interval, Location
from stepscope.predict.cost.energy_parts import TraceEnergy
from stepscope.report.energy import each_or_none, energy_view
from stepscope.report.format import cell, count, duration, printable, share, size
from stepscope.report.html.memory import memories_or_none, memory_view, pictures_or_none, telemetry_view
from stepscope.report.html.picture import View, cause_view, flame_view, graphs_or_none, picture_view, table_view
from stepscope.report.places import glances
from stepscope.report.sentences import (
    afterwards_sentence,
    basis_sentence,
    diff_lines,
    headline,
    hidden_sentence,
    nothing_sentence,
    place,
    rank_name,
    rank_table,
    ranks_or_traces,
    saving_sentence,
    together_sentence,
    trial,
    unreadable_heading,
    unreadable_sentences,
    warning_sentences,
    whole,
    worst_device,
)
from stepscope.report.tables import showing

MAXIMUM_BARS: Final = 300
"""Steps beyond this many share a bar, which shows the slowest of them."""

_DEVICE_COLOURS: Final = {
    "compute": "var(--busy)",
    "exposed communication": "var(--k-communication)",
    "exposed copies": "var(--k-copy)",
    "idle": "var(--idle)",
}
_BUSY: Final = {"colour": "var(--busy)", "ink": "var(--ink)", "hatched": False}
_SCRIPTS: Final = ("picture.js", "flame.js", "telemetry.js", "sweep.js", "report.js")


def html_report(
    diagnoses: Sequence[Diagnosis],
    pictures: Sequence[StepPicture | None],
    telemetry: Sequence[TelemetryPicture | None] | None = None,
    flames: Sequence[FlameGraph | None] | None = None,
    memories: Sequence[Sequence[MemoryPicture]] | None = None,
    across: Sequence[Finding] = (),
    unreadable: Sequence[Unreadable] = (),
    energies: Sequence[TraceEnergy | None] = (),
) -> bytes:
    """The report of one trace or of several ranks, each with the picture of a typical step where there is one.

    Args:
        telemetry: what each rank's program logged and sampled, where it did.
        flames: each rank's flame graph, where there is one.
        memories: each rank's devices' memory over time.
        across: findings about the ranks together, which stand below the table of the ranks.
        unreadable: files that there is no diagnosis of, which are listed with what is wrong with them.
        energies: what each rank's run measured of its energy; none where it measured none.

    Raises:
        ValueError: there is no diagnosis, or not one picture (or None) for each.
    """
    if not diagnoses:
        raise ValueError("a report needs at least one diagnosis")
    plots = pictures_or_none(telemetry, len(diagnoses))
    graphs = graphs_or_none(flames, len(diagnoses))
    held = memories_or_none(memories, len(diagnoses))
    measured = each_or_none(energies, len(diagnoses))
    together = zip(diagnoses, pictures, plots, graphs, held, measured, strict=True)
    slowest = max(diagnoses, key=lambda diagnosis: diagnosis.step_ns)  # of whose step such savings are shares
    ranks = [_rank(number, *each) for number, each in enumerate(together)]
    return page(
        "report.html.j2",
        title=ranks[0]["file"] if len(ranks) == 1 else f"{len(ranks)} {ranks_or_traces(diagnoses)}",
        ranks=ranks,
        overview=table_view(rank_table(diagnoses)) if len(ranks) > 1 else None,
        unreadable={"heading": unreadable_heading(unreadable), "sentences": unreadable_sentences(unreadable)},
        together=[_finding(finding, slowest, None) for finding in across] if len(ranks) > 1 else [],
    )


def telemetry_page(title: str, pictures: Sequence[tuple[str, TelemetryPicture]]) -> bytes:
    """A page of plots alone, for telemetry that no trace was recorded beside: one section for each named picture."""
    sections = [
        {"id": f"t{number}", "name": printable(name), "telemetry": telemetry_view(picture)}
        for number, (name, picture) in enumerate(pictures)
    ]
    return page("telemetry_page.html.j2", title=printable(title), sections=sections)


def page(template: str, **content: object) -> bytes:
    """A template filled in, with the scripts that its policy lets run."""
    script = "".join(_template_text(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FunctionLoader(_template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(**content, script=Markup(script), script_hash=f"sha256-{digest}")
    return text.encode("utf-8", "backslashreplace")


def _template_text(name: str) -> str:
    return files("stepscope.report").joinpath("templates").joinpath(name).read_text("utf-8")


def _rank(
    number: int,
    diagnosis: Diagnosis,
    picture: StepPicture | None,
    telemetry: TelemetryPicture | None,
    flame: FlameGraph | None,
    memories: Sequence[MemoryPicture],
    energy: TraceEnergy | None,
) -> View:
    path = printable(diagnosis.metadata.path)
    return {
        "id": f"r{number}",
        "name": rank_name(diagnosis),
        "file": path.replace("\\", "/").rsplit("/", 1)[-1] or "a trace",
        "path": path,
        "facts": _facts(diagnosis),
        "headline": headline(diagnosis),
        "tiles": _tiles(diagnosis),
        "devices": [_device(device) for device in diagnosis.devices],
        "findings": [_finding(finding, diagnosis, picture) for finding in diagnosis.findings],
        "overlap": together_sentence(diagnosis),
        "afterwards": afterwards_sentence(diagnosis),
        "hidden": hidden_sentence(diagnosis),
        "nothing": nothing_sentence(diagnosis),
        "picture": None if picture is None else picture_view(picture),
        "idle": [_idle(device, diagnosis.idle) for device in diagnosis.devices],
        "glances": glances(diagnosis),
        "host": _causes(diagnosis.host, int(diagnosis.host["ns"].sum())) if diagnosis.host.height else None,
        "steps": _steps(diagnosis, picture) if diagnosis.steps.height else None,
        "telemetry": None if telemetry is None else telemetry_view(telemetry),
        "flame": None if flame is None or not flame.frames else flame_view(flame),
        "memory": [memory_view(each) for each in memories],
        "energy": energy_view(energy),
        "tables": [
            _top("operators", diagnosis.operators, diagnosis.operator_count),
            _top("kernels", diagnosis.kernels, diagnosis.kernel_count),
        ],
        "not_answered": [
            {
                "question": printable(each.question),
                "why": printable(each.why),
                "rules": ", ".join(each.rules),
                "how": printable(each.how),
            }
            for each in diagnosis.not_answered
        ],
        "applied": [printable(each) for each in diagnosis.applied],
        "warnings": warning_sentences(diagnosis),
    }


def _facts(diagnosis: Diagnosis) -> list[str]:
    """What the trace says about itself, short."""
    metadata = diagnosis.metadata
    facts = [printable(metadata.format), f"{count(metadata.events)} events" if metadata.events else ""]
    if metadata.rank is not None:
        facts.append(f"rank {metadata.rank}" + (f" of {metadata.world_size}" if metadata.world_size else ""))
    facts += [
        f"device {printable(device.device)}: {printable(device.name)}" for device in metadata.devices if device.name
    ]
    facts.append(printable(metadata.host or ""))
    return [fact for fact in facts if fact]


def _tiles(diagnosis: Diagnosis) -> list[View]:
    """The three or four numbers to see first."""
    stepped = diagnosis.step_source != "none"
    how = f"mean of {count(diagnosis.step_count)}" if diagnosis.step_count > 1 else "one step"
    tiles = [
        {
            "label": "Step" if stepped else "Recorded",
            "value": duration(diagnosis.step_ns),
            "note": how + (", inferred from what repeats" if diagnosis.step_source == "inferred" else "")
            if stepped
            else "no steps were found",
        }
    ]
    device = worst_device(diagnosis)
    if device is not None:
        window = max(device.window_ns, 1)
        busy, idle = f"{duration(device.busy_ns)} of {duration(device.window_ns)}", duration(device.idle_ns)
        tiles.append({"label": "Device busy", "value": share(device.busy_ns / window), "note": busy})
        tiles.append({"label": "Device idle", "value": share(device.idle_ns / window), "note": idle})
        if len(diagnosis.devices) > 1:
            tiles[-1]["label"] = f"Device {printable(device.device)} idle, the most"
            tiles[-2]["label"] = f"Device {printable(device.device)} busy"
    best = max(diagnosis.findings, key=lambda finding: finding.saving_ns_per_step, default=None)
    if best is not None and best.saving_ns_per_step > 0:
        note = f"{share(best.saving_share)} of {whole(diagnosis)}: {printable(best.rule)}"
        tiles.append({"label": "Largest saving", "value": duration(best.saving_ns_per_step), "note": note})
    return tiles


def _device(device: DeviceSummary) -> View:
    """A device's window as one bar: what it did, without counting twice, and what was left."""
    window = max(device.window_ns, 1)
    communication, copies = device.exposed_communication_ns, device.exposed_copy_ns
    parts = {
        "compute": max(device.busy_ns - communication - copies, 0),
        "exposed communication": communication,
        "exposed copies": copies,
        "idle": device.idle_ns,
    }
    segments = [
        {
            "label": label,
            "width": 100 * ns / window,
            "colour": _DEVICE_COLOURS[label],
            "ink": "var(--ink)",
            "hatched": False,
            "time": f"{duration(ns)}, {share(ns / window)}",
        }
        for label, ns in parts.items()
        if ns > 0
    ]
    name = f"Device {printable(device.device)}" + (f" · {printable(device.name)}" if device.name else "")
    return {"name": name, "segments": segments}


def _finding(finding: Finding, diagnosis: Diagnosis, picture: StepPicture | None) -> View:
    return {
        "rule": printable(finding.rule),
        "title": printable(finding.title),
        "severity": finding.severity,
        "saving": saving_sentence(finding, diagnosis),
        "width": min(max(100 * finding.saving_share, 0), 100),
        "basis": basis_sentence(finding),
        "where": [_where(location) for location in finding.where],
        "remedy": printable(finding.remedy.text),
        "code": "\n".join(printable(line) for line in finding.remedy.code.expandtabs(4).splitlines()),
        "trial": trial(finding.remedy),
        "diff": "\n".join(diff_lines(finding.remedy)),
        "figures": [_figure(figure) for figure in finding.evidence.figures],
        "intervals": [_interval(interval, picture) for interval in finding.evidence.intervals],
    }


def _where(location: Location) -> View:
    return {
        "place": place(location),
        "share": share(location.share) if location.share < 1 else "",
        "definition": not location.exact_line,
        "path": [printable(frame) for frame in location.call_path],
    }


def _figure(figure: Figure) -> View:
    write = {"ns": duration, "bytes": size, "share": share}.get(figure.unit, count)
    threshold = "" if figure.threshold is None else write(figure.threshold)
    return {"name": printable(figure.name), "value": write(figure.value), "threshold": threshold}


def _interval(interval: Interval, picture: StepPicture | None) -> View:
    end = interval.start_ns + interval.duration_ns
    return {
        "start_ns": interval.start_ns,
        "duration_ns": interval.duration_ns,
        "start": cell("start_ns", interval.start_ns),
        "duration": duration(interval.duration_ns),
        "what": printable(interval.what),
        "drawn": picture is not None
        and interval.start_ns < picture.start_ns + picture.duration_ns
        and end > picture.start_ns,
    }


def _idle(device: DeviceSummary, idle: pl.DataFrame) -> View:
    view = _causes(idle.filter(pl.col("device") == device.device), device.window_ns)
    view["device"] = printable(device.device)
    view["total"] = f"{duration(device.idle_ns)} of {duration(device.window_ns)}"
    view["share"] = share(device.idle_ns / max(device.window_ns, 1))
    if device.busy_ns > 0:
        width, time = 100 * device.busy_ns / max(device.window_ns, 1), duration(device.busy_ns)
        view["segments"].insert(0, {**_BUSY, "label": "busy", "width": width, "time": time})
    return view


def _causes(times: pl.DataFrame, whole_ns: int) -> View:
    """Time by cause as a bar's segments and a table's rows, the largest first; `whole_ns` is the bar's full width."""
    sums = times.group_by("cause").agg("ns", "share", *(["trigger"] if "trigger" in times.columns else []))
    rows = []
    for row in sums.iter_rows(named=True):
        triggers = zip(row.get("trigger", [None] * len(row["ns"])), row["ns"], strict=True)
        rows.append({**_cause_row(row["cause"], sum(row["ns"]), sum(row["share"])), "after": _after(triggers)})
    rows.sort(key=lambda row: (-row["ns"], row["label"]))
    return {"rows": rows, "segments": [{**row, "width": 100 * row["ns"] / max(whole_ns, 1)} for row in rows]}


def _cause_row(cause: str, ns: int, part: float) -> View:
    view = {**cause_view(cause), "ns": ns, "time": duration(ns), "share": share(part), "part": part}
    if cause == "compute":
        view.update(_BUSY, meaning="the host was computing")
    return view


def _after(triggers: Iterable[tuple[str | None, int]]) -> list[str]:
    known = sorted(((ns, name) for name, ns in triggers if name), reverse=True)
    return [f"{duration(ns)} after {printable(name)}" for ns, name in known]


def _steps(diagnosis: Diagnosis, picture: StepPicture | None) -> View:
    rows = diagnosis.steps.sort("start_ns").rows(named=True)
    each = -(-len(rows) // MAXIMUM_BARS)
    groups = [rows[first : first + each] for first in range(0, len(rows), each)]
    slowest = [max(group, key=lambda row: row["duration_ns"]) for group in groups]
    longest = max(1, *(row["duration_ns"] for row in slowest), diagnosis.step_ns)
    drawn = -1 if picture is None else picture.start_ns
    bars = [
        {
            "label": f"step {row['index']}: {duration(row['duration_ns'])}"
            + ("" if row["complete"] else ", not recorded completely"),
            "height": 100 * row["duration_ns"] / longest,
            "partial": not row["complete"],
            "drawn": any(member["start_ns"] == drawn for member in group),
        }
        for row, group in zip(slowest, groups, strict=True)
    ]
    return {
        "bars": bars,
        "median": 100 * diagnosis.step_ns / longest,
        "mean": duration(diagnosis.step_ns),
        "longest": duration(longest),
        "first": rows[0]["index"],
        "last": rows[-1]["index"],
        "partial": any(bar["partial"] for bar in bars),
        "drawn": any(bar["drawn"] for bar in bars),
        "grouped": each if each > 1 else 0,
    }


def _top(things: str, frame: pl.DataFrame, total: int) -> View:
    return {"things": things, "showing": showing(frame.height, total, things), **table_view(frame)}
