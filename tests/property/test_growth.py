"""Costs grow with the trace and no faster: four times the trace is at most about four times the work, counted."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.long_trace import recording, simulated, with_device, write_long_trace_of
from stepscope.analysis import flame
from stepscope.commands import main
from stepscope.commands.read.export import derived_tables
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.readers.nsight_systems import database
from stepscope.report import tables
from stepscope.report.exports import chrome, protobuf
from stepscope.trace import Trace
from stepscope.trace.tables import SLICE_TABLES
from tests.simulator import Machine, programs
from tests.simulator.gaudi import GaudiOptions, gaudi_bytes
from tests.simulator.nsight_systems import write_nsight
from tests.simulator.perfetto import perfetto_bytes
from tests.simulator.rocprof import rocprof_bytes
from tests.simulator.xplane import xplane_bytes
from tests.work_done import counting

TIMES: Final = 4
MOST: Final = 5.0
"""Times the work that four times the trace may take: sorting and merging take a little more than in proportion."""
FIXED: Final = 20_000
"""Work that is not weighed: what does not depend on the trace."""
STEPS: Final = 60
EVENTS: Final = {"recorded": 30_000, "simulated": 4_000}


@pytest.fixture(scope="module", params=list(EVENTS))
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A trace and one of four times as many events of the same kind."""
    kind = request.param
    events = with_device(recording()) if kind == "recorded" else simulated()
    folder = tmp_path_factory.mktemp(kind)
    found = []
    for factor in (1, TIMES):
        path = folder / f"{factor}.json"
        write_long_trace_of(path, events, factor * EVENTS[kind])
        found.append(path)
    return found


def check(works: list[int], what: str) -> None:
    one, four = works
    assert four <= MOST * one + FIXED, f"{what}: {one:,} for one trace, {four:,} ({four / one:.1f} times) for four"


def test_reading(paths: list[Path]) -> None:
    works = []
    for path in paths:
        with counting() as work:
            open_trace(path)
        works.append(work.total)

    check(works, "reading")


FORMATS: Final[dict[str, Callable[[Machine, Path], object]]] = {
    "rocprof": lambda machine, path: path.write_bytes(rocprof_bytes(machine)),
    "gaudi": lambda machine, path: path.write_bytes(gaudi_bytes(machine, GaudiOptions(kineto=True))),
    "gaudi in pairs": lambda machine, path: path.write_bytes(gaudi_bytes(machine)),
    "perfetto": lambda machine, path: path.write_bytes(perfetto_bytes(machine)),
    "xplane": lambda machine, path: path.write_bytes(xplane_bytes(machine)),
    "nsight_systems": write_nsight,
}


@pytest.mark.parametrize("name", FORMATS)
def test_reading_other_formats(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LEAST_BYTES", 0)
    works = []
    for factor in (1, TIMES):
        path = tmp_path / f"{factor} {name}"
        FORMATS[name](programs.item_every_step(factor * STEPS), path)
        with counting() as work:
            open_trace(path)
        works.append(work.total)

    check(works, name)


def views(paths: list[Path]) -> list[View]:
    return [View(open_trace(path)) for path in paths]


def test_rules_and_what_they_ask(paths: list[Path]) -> None:
    """Each rule in turn, with what it is the first to ask of the view."""
    found = views(paths)
    too_much = []
    for rule in RULES:
        works = []
        for view in found:
            with counting() as work:
                rule.ask(view)
            works.append(work.total)
        with contextlib.suppress(AssertionError):
            check(works, rule.id)
            continue
        too_much.append((rule.id, *works))

    assert not too_much


def test_tables(paths: list[Path]) -> None:
    traces = [open_trace(path) for path in paths]
    too_much = []
    for name, (make, _) in derived_tables().items():
        works = []
        for trace in traces:
            with counting() as work:
                make(trace)
            works.append(work.total)
        with contextlib.suppress(AssertionError):
            check(works, name)
            continue
        too_much.append((name, *works))

    assert not too_much


COMMANDS: Final = (
    ["diagnose", "{}", "--json", "{out}.json", "--markdown", "{out}.md", "--html", "{out}.html"],
    ["whatif", "{}", "--remove", "python"],
    *([name, "{}", "--top", "0"] for name in ("idle", "operators", "kernels", "input", "lines", "modules")),
    ["memory", "{}"],
    ["predict", "{}", "--to", "H100-SXM"],
)
OF_EACH_SLICE: Final = (
    ["compare", "{}", "{}"],
    *(
        ["export", "{}", "{out}", "--format", form]
        for form in ("timeline", "chrome", "perfetto", "speedscope", "folded")
    ),
)
"""A few thousand slices show whether their work grows too fast."""


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_commands(words: list[str], paths: list[Path], tmp_path: Path) -> None:
    check(works_of(words, paths, tmp_path), words[0])


@pytest.mark.parametrize("paths", ["simulated"], indirect=True)
@pytest.mark.parametrize("words", OF_EACH_SLICE, ids=lambda words: words[-1].strip("{}") or words[0])
def test_commands_that_go_through_all_slices(words: list[str], paths: list[Path], tmp_path: Path) -> None:
    check(works_of(words, paths, tmp_path), " ".join(words))


def works_of(words: list[str], paths: list[Path], tmp_path: Path) -> list[int]:
    works = []
    for path in paths:
        filled = [word.format(path, out=tmp_path / path.name) for word in words]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), counting() as work:
            code = main([*filled, "--no-cache"])
        assert code in (0, 1), filled
        works.append(work.total)
    return works


def test_that_the_count_sees_a_quadratic_cost() -> None:
    import numpy as np
    import polars as pl

    def of_tables(column: pl.Series) -> object:
        return [column.to_frame().filter(pl.col("") == value).height for value in range(len(column))]

    def of_arrays(column: pl.Series) -> object:
        values = column.to_numpy()
        return [int((values == value).sum()) for value in range(len(values))]

    def of_calls(column: pl.Series) -> object:
        return [max(first, second) for first in column for second in column]

    def linear(column: pl.Series) -> object:
        values = np.sort(column.to_numpy())
        return [int(values[place]) for place in np.searchsorted(values, values)]

    def times(of: Callable[[pl.Series], Any]) -> float:
        works = []
        for count in (500, 500 * TIMES):
            with counting() as work:
                of(pl.Series(np.arange(count)))
            works.append(work.total)
        return works[1] / works[0]

    assert [times(of) > 2 * MOST for of in (of_tables, of_arrays, of_calls)] == [True] * 3
    assert times(linear) < MOST


STREAMS: Final[dict[str, Callable[[Trace], Iterator[bytes]]]] = {
    "chrome": chrome.chrome,
    "perfetto": protobuf.perfetto,
    "tensorboard": protobuf.xspace,
    "timeline": chrome.timeline,
    "speedscope": flame.speedscope,
    "folded": flame.folded,
}


@pytest.mark.parametrize("paths", ["simulated"], indirect=True)
@pytest.mark.parametrize("form", STREAMS)
def test_exports_are_made_in_pieces(form: str, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest piece is as long for four times the trace; what analyses nothing loads no table of slices whole."""
    for module, name in ((tables, "PART_ROWS"), (tables, "TEXT_ROWS"), (chrome, "TEXT_ROWS"), (flame, "_EVENTS")):
        monkeypatch.setattr(module, name, 500)
    monkeypatch.setattr(protobuf, "_PIECE_BYTES", 20_000)
    longest, sizes = [], []
    for path in paths:
        trace = open_trace(path)
        lengths = [len(piece) for piece in STREAMS[form](trace)]
        longest.append(max(lengths))
        sizes.append(sum(lengths))
        if form in ("chrome", "perfetto", "tensorboard"):
            assert not set(trace._loaded) & set(SLICE_TABLES)

    assert longest[1] <= 2 * longest[0]
    assert sizes[1] > 1.5 * sizes[0] or form == "folded"
