"""Memory over time in the HTML report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import polars as pl
import pytest

from stepscope.analysis.memory import MOMENTS, MemoryPicture, memory_pictures
from stepscope.report.document import Drawing, Section
from stepscope.report.memory import memory_view
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from tests.unit.hand_built import full
from tests.unit.recording import Recording
from tests.unit.rendered import html_report

HOSTILE = "</script><img src=x onerror=alert(1)>"


def two_steps(name: str = "Device <b>") -> Trace:
    recording = Recording(Metadata(devices=(Device("0", name, memory_bytes=1200),)))
    for step in range(2):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.operator(
            begin + 100, 100, "aten::mm", source_file=f"{HOSTILE}.py", source_line=3, source_function="f"
        )
        recording.block(begin + 120, begin + 600, 500, total_allocated=700, total_reserved=1000)
    trace = recording.trace()
    tables = {table: trace.table(table) for table in ("lanes", "annotations", "operators")}
    tables["memory"] = trace.memory.with_columns(total_allocated=200 + pl.col("bytes").cum_sum())
    return Trace.from_tables(tables, trace.metadata)


def the_picture(trace: Trace) -> MemoryPicture:
    [picture] = memory_pictures(trace)
    return picture


def the_drawing(picture: MemoryPicture) -> Mapping[str, Any]:
    [section] = memory_view(picture)
    [drawing] = [block for block in section.blocks if isinstance(block, Drawing)]
    return drawing.view


def test_a_trace_without_memory_events_has_no_picture() -> None:
    assert memory_pictures(Trace.from_tables({})) == ()


def test_what_is_drawn() -> None:
    picture = the_picture(two_steps())

    assert (picture.device, picture.start_ns, picture.end_ns) == ("0", 0, 2000)
    assert picture.times == (120, 600, 1120, 1600)
    assert picture.bands == {"before": (200, 200, 200, 200), "activation": (500, 0, 500, 0)}
    assert picture.reserved == (1000, 1000, 1000, 1000)
    assert (picture.peak_ns, picture.peak_bytes) == (120, 700)
    assert picture.steps == ((0, 0), (1, 1000))
    assert picture.growth_bytes == 0


def test_bands_are_stacked_and_lie_in_the_frame() -> None:
    view = the_drawing(the_picture(two_steps()))

    # The device's 1200 bytes are the upper edge: 200 of them are 50 of 300 units high, 700 are 175.
    assert [band["path"] for band in view["bands"]] == [
        "M60.0 250.0H300.0V250.0H560.0V250.0H800.0V250.0H1000.0V300.0H800.0V300.0H560.0V300.0H300.0V300.0H60.0Z",
        "M60.0 125.0H300.0V250.0H560.0V125.0H800.0V250.0H1000.0V250.0H800.0V250.0H560.0V250.0H300.0V250.0H60.0Z",
    ]
    assert view["reserved"] == "M60.0 50.0H300.0V50.0H560.0V50.0H800.0V50.0H1000.0"
    assert view["steps"] == [{"left": 0.0}, {"left": 50.0}]
    assert view["peak"] == {"left": 6.0, "top": pytest.approx(100 * 5 / 12)}
    assert view["ticks"] == ["1.2 KiB", "900 B", "600 B", "300 B", "0 B"]
    assert view["sentence"] == (
        "At most 700 B were allocated, at 0.000 ms; 1,000 B reserved; 83.3 % of the device’s 1.2 KiB."
    )


def test_events_without_addresses_have_one_band_and_no_tables() -> None:
    recording = Recording()
    recording.allocation(10, 50)
    recording.allocation(30, -50)
    picture = the_picture(recording.trace())

    assert picture.bands == {"allocated": (50, 0)}
    [section] = memory_view(picture)
    assert not [block for block in section.blocks if isinstance(block, Section)]


def test_a_long_history_keeps_its_peak() -> None:
    recording = Recording()
    for number in range(3000):
        recording.block(10 * number, 10 * number + 5, 1_000_000 if number == 1234 else 100 + number % 7)
    picture = the_picture(recording.trace())

    assert len(picture.times) <= MOMENTS + 3
    assert picture.peak_ns == 12340
    assert picture.peak_ns in picture.times
    assert max(map(sum, zip(*picture.bands.values(), strict=True))) == 1_000_000


def test_the_report_draws_it_and_names_are_text() -> None:
    page = html_report([full()], [None], memory=[memory_pictures(two_steps(HOSTILE))]).decode()

    section = page[page.index('<section id="r0-memory"') :]
    section = section[: section.index("</section>")]
    assert section.count('class="band ') == 2
    assert HOSTILE not in page
    assert "&lt;/script&gt;" in section
    assert '<a href="#r0-memory">Memory</a>' in page
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', section)[0])
    assert data["lines"][2] == ["reserved", [1.2e-7, 6e-7, 1.12e-6, 1.6e-6], [1000] * 4, None]


def test_a_report_without_memory_has_no_section() -> None:
    assert "-memory" not in html_report([full()], [None]).decode()
