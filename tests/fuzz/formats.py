"""Every kind of file that stepscope takes: its seeds, and what is done with a damaged one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from random import Random

from stepscope.analysis.desync import desync
from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import idle_time
from stepscope.commands.shared.reading import trace_paths
from stepscope.machine.devices import read_devices
from stepscope.predict.cost.price_files import read_price_file
from stepscope.readers import open_trace, side_files
from stepscope.readers.collective_logs import collective_logs, log_files
from stepscope.readers.side_files import read_ncu
from stepscope.record.run_folder import is_run_folder
from stepscope.report.desync import desync_document, desync_json
from stepscope.report.document import json_bytes
from stepscope.report.text import text_of
from stepscope.trace.telemetry import read_telemetry
from stepscope.trace.window import StepRange, Window
from stepscope.tune.sweep.file import read_sweep
from tests.fuzz import seeds
from tests.fuzz.containers import changed, raw_bytes
from tests.fuzz.invariants import (
    check_command,
    check_diagnosis,
    check_json_command,
    check_page,
    check_reports,
    check_text,
    expect,
    parsed,
    run_command,
)
from tests.fuzz.seeds import Case
from tests.fuzz.values import TEXTS

DIAGNOSED, COMMANDED, SELECTED = 0.06, 0.01, 0.04
"""Shares of the inputs that are diagnosed, given to some other command, and read in part: each takes its time."""
WITH_TRACE = 0.01
"""Share of the side files that are given to a command beside a trace."""
Examine = Callable[[Path, Random], None]
_TABLES = (
    *(("idle",), ("idle", "--pieces"), ("steps",), ("operators",), ("kernels",), ("kernels", "--launches")),
    *(
        ("roofline",),
        ("roofline", "--tensor-cores"),
        ("memory",),
        ("memory", "--over-time"),
        ("memory", "--by", "line"),
    ),
    *(("lines",), ("modules",), ("input",), ("whatif",), ("whatif", "--critical-path", "--slack"), ("energy",)),
    *(("whatif", "--graphs", "--loader-workers", "2"), ("whatif", "--curve", "operators"), ("data-parallel",)),
    *(("predict", "--to", "H100-SXM,L4"), ("predict", "--to", "L4", "--devices", "2"), ("plan", "--iterations", "1e4")),
    *(("diagnose", "--redact", "--all"), ("diagnose", "--fail-on", "100%"), ("batch-size", "--batch", "8")),
)
_JSON = (
    *(("idle", "--format", "json"), ("operators", "--format", "json"), ("kernels", "--format", "json")),
    *(("memory", "--format", "json"), ("lines", "--json", "-"), ("modules", "--json", "-"), ("whatif", "--json", "-")),
    *(("energy", "--json", "-"), ("predict", "--to", "all", "--json", "-"), ("diagnose", "--json", "-", "--redact")),
)
_QUERIES = ("select * from operators limit 9", "select cause, sum(duration_ns) as ns from idle group by cause")
_EXPORTS = ("timeline", "chrome", "perfetto", "speedscope", "folded", "tensorboard", "csv", "parquet", "openmetrics")


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        seeds: makes good ones.
        examine: raises a StepscopeError where it refuses the file, and anything else where something is wrong.
        rounds: it is tried in one of so many rounds, since each of its inputs takes as long as several of others.
    """

    name: str
    seeds: Callable[[], list[Case]]
    examine: Examine
    rounds: int = 1


def examine_trace(path: Path, random: Random) -> None:
    """Opened, held to the promises of its tables, and diagnosed or given to another command."""
    turn, how = random.random(), random.random()
    window = Window(0, random.choice((1, 10**6, 2**62))) if how < SELECTED / 2 else None
    steps = StepRange(random.choice((0, 1)), random.choice((1, 5))) if SELECTED / 2 <= how < SELECTED else None
    trace = open_trace(path, window=window, steps=steps)
    trace.check()
    if turn < DIAGNOSED:
        check_diagnosis(trace)
    elif turn < DIAGNOSED + COMMANDED:
        examine_by_command(path, random)
    else:
        idle = dict(idle_time(trace).group_by("device").agg(ns=_total()).iter_rows())
        for row in device_time(trace).iter_rows(named=True):
            expect(row["busy_ns"] + row["idle_ns"] == row["window_ns"], "busy and idle time are the window", row)
            expect(idle.get(row["device"], 0) == row["idle_ns"], "the causes add up to the idle time", row)


def _total():  # type: ignore[no-untyped-def]
    import polars as pl

    return pl.col("duration_ns").sum()


def examine_by_command(path: Path, random: Random) -> None:
    """What one command makes of a trace, a folder or a run."""
    word, out = os.fspath(path), path.parent / ".out"
    out.mkdir(exist_ok=True)
    match random.randrange(6):
        case 0:
            check_reports(word, out)
        case 1:
            command, *options = random.choice(_JSON)
            check_json_command(command, word, *options, "--no-cache")
        case 2:
            check_command("query", word, random.choice(_QUERIES), "--no-cache")
        case 3:
            _check_export(word, out / "export", random.choice(_EXPORTS))
        case _:
            command, *options = random.choice(_TABLES)
            check_command(command, word, *options, "--no-cache")


def _check_export(word: str, out: Path, form: str) -> None:
    """What was exported can be read again."""
    run_command("export", word, os.fspath(out), "--format", form, "--no-cache")
    if form in ("timeline", "chrome", "speedscope"):
        parsed(out.read_bytes(), f"the export {form}")
    if form in ("chrome", "perfetto"):
        open_trace(out).check()
    elif form == "openmetrics":
        check_text(out.read_text(), "the figures for Prometheus")


def examine_again(words: Sequence[str]) -> None:
    """The command that once showed a fault, held to the same promises."""
    command, path, *options = words
    if command == "export":
        _check_export(path, Path(options[0]), options[options.index("--format") + 1])
    elif "--html" in words and "-" not in words:
        check_reports(path, Path(options[-1]).parent)
    elif "json" in words or "--json" in words:
        check_json_command(*words)
    else:
        check_command(*words)


def examine_folder(path: Path, random: Random) -> None:
    """A folder of traces, or a run's: its traces alone, and now and then all of them by a command."""
    turn = random.random()
    if is_run_folder(path) and turn < 0.4:
        _examine_run(path, random)
    elif turn < 0.5:
        examine_by_command(path, random)
    elif turn < 0.55:
        check_command("compare", os.fspath(path), os.fspath(path), "--no-cache")
    elif turn < 0.65:
        check_command("diagnose", os.fspath(path), "--no-cache", "--all")
    else:
        for file in trace_paths(path):
            examine_trace(file, random)


def _examine_run(path: Path, random: Random) -> None:
    word = os.fspath(path)
    match random.randrange(7):
        case 0:
            check_command("telemetry", word)
        case 1:
            check_command("energy", word, "--no-cache")
        case 2:
            check_command("runs")
        case 3:
            check_command("batch-size", word, "--no-cache")
        case 4:
            check_command("data-parallel", word, "--no-cache")
        case _:
            check_command("runs", "show", word)
            check_command("history")
            check_json_command("history", "--json", "-")


def examine_collective_logs(path: Path, random: Random) -> None:
    if random.random() < 0.1:
        check_command("diagnose", os.fspath(path), "--no-cache", *random.choice(((), ("--redact",), ("--json", "-"))))
        return
    logs = collective_logs(log_files(path))
    found = desync(logs)
    for one in found.unfinished:
        expect(not set(one.waiting) & set(one.missing), "who waits in a collective has come to it", one)
    expect((found.arrivals["late_ns"] >= 0).all(), "lateness is no gain", found.arrivals)
    text_of(desync_document("logs", logs, found), width=120)
    parsed(json_bytes(desync_json("logs", logs, found)), "the JSON report")


def examine_telemetry(path: Path, random: Random) -> None:
    read_telemetry([path])
    if random.random() < 0.1:
        check_command("telemetry", os.fspath(path))
        check_page(run_command("telemetry", os.fspath(path), "--html", "-").encode())


def examine_side_file(path: Path, random: Random, *, read: Callable[[Path], object], option: str) -> None:
    """Read alone, and now and then beside a trace."""
    read(path)
    if random.random() < WITH_TRACE:
        trace = os.fspath(_trace_beside(path))
        command = "kernels" if option == "--ncu" else "diagnose"
        check_command(command, trace, option, os.fspath(path), "--no-cache")


def _trace_beside(path: Path) -> Path:
    folder = path.parent / ".trace"
    folder.mkdir(exist_ok=True)
    return seeds.kineto()[0].write(folder)


def examine_lines(path: Path, random: Random) -> None:
    examine_trace(path, random)
    if random.random() < 0.2:
        check_command(random.choice(("lines", "modules")), os.fspath(path), "--no-cache")


def examine_prices(path: Path, random: Random) -> None:
    read_price_file(path, provider=random.choice((None, "aws")), as_of=date(2026, 11, 1))
    if random.random() < 0.2:
        check_command("prices", "import", os.fspath(path), "--provider", "aws")
        check_command("prices")


def examine_devices(path: Path, random: Random) -> None:
    del random
    read_devices(path)


def examine_sweep(path: Path, random: Random) -> None:
    del random
    read_sweep(path)


FORMATS: tuple[Format, ...] = (
    *(
        Format(each.__name__.removesuffix("_files"), each, examine_trace)
        for each in (
            *(seeds.kineto, seeds.chrome, seeds.xla_json, seeds.torch_snapshot, seeds.nsight_systems),
            *(seeds.perfetto_files, seeds.xplane, seeds.rocprof, seeds.gaudi, seeds.foreign, seeds.store),
        )
    ),
    Format("lines", seeds.lines, examine_lines),
    Format("hltv", seeds.hltv, examine_folder, 4),
    Format("tensorboard", seeds.tensorboard, examine_folder, 4),
    Format("ranks", seeds.ranks, examine_folder, 4),
    Format("collective_logs", seeds.collective_logs, examine_collective_logs),
    Format("run_folder", seeds.run_folder, examine_folder, 4),
    Format("telemetry", seeds.telemetry, examine_telemetry),
    *(
        Format(
            make.__name__, make, partial(examine_side_file, read=read, option=f"--{make.__name__.replace('_', '-')}")
        )
        for make, read in (
            (seeds.ncu, read_ncu),
            (seeds.xla_metrics, side_files.read_xla_metrics),
            (seeds.xla_debug_log, side_files.read_xla_debug_log),
            (seeds.gaudi_metrics, side_files.read_gaudi_metrics),
            (seeds.fallback_log, side_files.read_fallback_log),
        )
    ),
    Format("prices", seeds.prices, examine_prices),
    Format("devices", seeds.devices, examine_devices),
    Format("sweep", seeds.sweep, examine_sweep),
)
"""Every format, asked in turn."""


def changed_case(random: Random, case: Case) -> Case:
    """The files with one of them damaged; of several also left out, doubled, exchanged or named otherwise."""
    files = dict(case.files)
    name = random.choice(sorted(files))
    if len(files) > 1 and random.random() < 0.1:
        other = random.choice(sorted(files))
        match random.randrange(4):
            case 0:
                del files[name]
            case 1:
                files[name] = files[other]
            case 2:
                new = random.choice((f"{name}.json", f"{name}\x1b[1m", f"x/{name}", f"0{name}", name.upper()))
                files[new.replace("\x00", "")] = files.pop(name)
            case _:
                files[name] = raw_bytes(random, random.choice(TEXTS).encode("utf-8", "surrogatepass"))
        return replace(case, files=files)
    try:
        files[name] = changed(random, files[name], name)
    except (RecursionError, OverflowError):  # nested deeper than the standard library writes
        files[name] = raw_bytes(random, files[name])
    return replace(case, files=files)


def clean(folder: Path) -> None:
    """Take away what the last input left."""
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink()
