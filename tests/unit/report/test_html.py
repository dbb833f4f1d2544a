"""The HTML report as bytes: what it says, and that no name from a trace is more than text in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tracemalloc
from html.parser import HTMLParser
from typing import Any

import polars as pl
import pytest

from stepscope.analysis.host import CAUSES
from stepscope.analysis.picture import PathPiece, PictureGap, PictureLane, PictureSlice, Shown, StepPicture
from stepscope.diagnosis.diagnosis import Unreadable
from stepscope.diagnosis.finding import Evidence, Figure, Finding, Interval, NotAnswered, Remedy
from stepscope.report.diagnosis import MAXIMUM_BARS
from stepscope.report.document import Document, Group, Text
from stepscope.report.html import cause_view, html_of
from stepscope.trace import Metadata, TraceWarning
from tests.unit.hand_built import IDLE, INPUT_BOUND, STEPS, empty, full
from tests.unit.rendered import html_report

HOSTILE = "</script><!--<script><img src=x onerror=alert(1)>\u2028\"'&\x1b{{ 7 * 7 }}"


class Page(HTMLParser):
    """A report taken apart: its elements, and the text outside scripts and styles."""

    def __init__(self, report: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self._raw = ""
        self.feed(report.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        self._raw = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif not self._raw:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def picture(self) -> Any:
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("type")))

    def with_class(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.elements if name in attributes.get("class", "").split()]


def picture_of(name: str = "loss", **changes: Any) -> StepPicture:
    values: dict[str, Any] = {
        "start_ns": 100,
        "duration_ns": 50,
        "lanes": (PictureLane(name, "host", "", 1, (name,)), PictureLane("stream 7", "queue", "0", 1)),
        "slices": (PictureSlice(0, 0, 0, 50, name, "frame"), PictureSlice(1, 0, 20, 30, name, "compute")),
        "gaps": (PictureGap("0", 0, 20, "input", name),),
        "host_slices": Shown(1, 1, 50),
        "device_slices": Shown(1, 1, 30),
        "threads": Shown(1, 1),
        "queues": Shown(1, 1),
    }
    return StepPicture(**{**values, **changes})


def page(*arguments: Any) -> Page:
    return Page(html_report(*arguments))


def test_an_empty_diagnosis_says_so() -> None:
    # Given, when
    shown = page([empty()], [None])

    # Then
    assert "No device was recorded; 0 ns recorded, without steps." in shown.text
    assert "Nothing was found that would save a noticeable part of the recording." in shown.text
    headings = [attributes["id"] for tag, attributes in shown.elements if tag == "section" and "id" in attributes]
    assert headings == ["r0-findings"]


def test_everything_a_diagnosis_holds_is_there_in_order() -> None:
    # Given, when
    shown = page([full()], [picture_of()])

    # Then
    sections = [attributes["id"] for tag, attributes in shown.elements if tag == "section" and "id" in attributes]
    parts = ("findings", "picture", "time", "steps", "kernels", "operators", "open")
    assert sections == [f"r0-{part}" for part in parts]
    for sentence in (
        "1 The device waits 40.0 ms a step for the DataLoader high",
        "Saves 40.0 ms of 120.3 ms per step (33.2 %)",
        "the idle time with the cause input; attributed, not replayed; confidence high",
        "/home/jane doe/project/train.py:88 main 90.0 % of it",
        "dataloader.py:12 __next__ 10.0 % of it (where the function is defined)",
        "loader = DataLoader( dataset, num_workers=8 )",
        "idle, input 33.2 % (threshold 5.0 %)",
        "a wait for a batch: 10 ns at 0.000 ms",
        "Why device 0 was idle: 568.0 ms of 1.20 s (47.2 %)",
        "python the host was running Python code between operators 60.0 ms after cudaStreamSynchronize 166.0 ms 13.8 %",
        "showing 2 of 431 operators, --top 0 for all",
        "Is memory fragmented? No allocations were recorded. How: profile_memory=True",
        "1 x truncated: /home/jane doe/runs/trace.json ends early",
        "2 more findings save less than 1 % of the step; --all shows them.",
    ):
        assert sentence in shown.text


def test_nothing_is_loaded_and_only_the_own_script_may_run() -> None:
    # Given, when
    shown = page([full()], [picture_of()])

    # Then
    addresses = [a[key] for _, a in shown.elements for key in ("src", "href", "action", "data") if key in a]
    assert all(address.startswith("#") or address == "data:," for address in addresses)
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    (own,) = [text for attributes, text in shown.scripts if not attributes]
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    (policy,) = [a["content"] for _, a in shown.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy
    assert "eval(" not in own
    assert "innerHTML" not in own


def test_hostile_names_stay_text_wherever_they_stand() -> None:
    # Given
    finding = Finding(
        rule=HOSTILE,
        title=HOSTILE,
        severity="high",
        saving_ns_per_step=5,
        saving_share=0.5,
        saving_basis=HOSTILE,
        confidence="low",
        evidence=Evidence((Figure(HOSTILE, 1),), (Interval(100, 5, HOSTILE),)),
        remedy=Remedy(HOSTILE, HOSTILE),
        where=INPUT_BOUND.where,
    )
    names = {"name": [HOSTILE], HOSTILE: [1]}
    hostile = full(
        metadata=Metadata(path=HOSTILE + "\udcff", rank=0, format=HOSTILE, host=HOSTILE),
        findings=(finding,),
        operators=pl.DataFrame(names),
        kernels=pl.DataFrame(names),
        idle=pl.DataFrame([("0", HOSTILE, HOSTILE, 5, 0.1)], schema=IDLE, orient="row"),
        not_answered=(NotAnswered(HOSTILE, HOSTILE, HOSTILE),),
        warnings=(TraceWarning(HOSTILE, 1, HOSTILE),),
    )
    gaps = (PictureGap(HOSTILE, 0, 5, HOSTILE, HOSTILE),)

    # When
    report = html_report([hostile, hostile], [picture_of(HOSTILE, gaps=gaps), None])

    # Then: the same elements as a report with harmless names, and the name as text
    shown = Page(report)
    assert {tag for tag, _ in shown.elements} & {"img", "iframe", "object", "form"} == set()
    assert [bool(attributes) for attributes, _ in shown.scripts] == [True, False]
    assert report.count(b"</script") == 2
    assert b"<!--" not in report
    assert b"\x1b" not in report
    assert "\u2028" not in report.decode()
    assert "<img src=x onerror=alert(1)>" in shown.text
    assert "{{ 7 * 7 }}" in shown.text
    assert shown.picture["lanes"][0][0] == HOSTILE.replace("\u2028", "\\u2028").replace("\x1b", "\\x1b")


def test_the_picture_is_embedded_with_each_name_once() -> None:
    # Given, when
    data = page([empty()], [picture_of()]).picture

    # Then
    assert data == {
        "start": 100,
        "duration": 50,
        "lanes": [["loss", "host", "", 1, ["loss"]], ["stream 7", "queue", "0", 1, []]],
        "slices": [[0, 0, 0, 50, 0, 1], [1, 0, 20, 30, 0, 2]],
        "devices": ["0"],
        "gaps": [["0", 0, 20, 3, 0]],
        "names": ["loss", "frame", "compute", "input"],
        "causes": {"input": cause_view("input")},
    }


def test_the_critical_path_is_embedded_with_its_resources() -> None:
    # Given, when
    path = (
        PathPiece(0, 20, "host", "input", "loss"),
        PathPiece(20, 25, "compute", None, "gemm"),
        PathPiece(45, 5, "host", "compute", ""),
    )
    shown = page([empty()], [picture_of(path=path, path_pieces=Shown(3, 4, 5))])

    # Then
    data = shown.picture
    assert data["path"] == [[0, 20, 4, 0], [20, 25, 2, 5], [45, 5, 6, 7]]
    assert data["names"] == ["loss", "frame", "compute", "input", "host: input", "gemm", "host: compute", ""]
    assert [(key, view["label"], view["colour"]) for key, view in data["resources"].items()] == [
        ("compute", "device: computation", "#9fb9d4"),
        ("host: input", "host: input", cause_view("input")["colour"]),
        ("host: compute", "host: compute", "#9fb9d4"),
    ]
    assert "Critical path device: computation host: input host: compute" in shown.text
    assert "showing 3 of 4 pieces of the critical path, those of 5 ns and longer" in shown.text


def test_what_the_picture_leaves_out_is_said() -> None:
    # Given
    reduced = picture_of(host_slices=Shown(6000, 41_000, 12_000), threads=Shown(12, 40))

    # When
    text = page([empty()], [reduced]).text

    # Then
    assert "showing 6,000 of 41,000 host slices, those of 12.0 us and longer" in text
    assert "the busiest 12 of 40 host threads" in text
    assert "pieces of device work" not in text


def test_only_intervals_inside_the_picture_can_be_shown() -> None:
    # Given
    intervals = (Interval(90, 10, "before"), Interval(90, 11, "at its start"), Interval(150, 5, "after"))
    finding = Finding("r", "t", "low", 1, 0.1, "b", "low", Evidence((), intervals), Remedy("x"))

    # When
    buttons = page([full(findings=(finding,))], [picture_of()]).with_class("show")

    # Then
    assert [button["data-start"] + "+" + button["data-duration"] for button in buttons] == ["90+11"]


def test_several_ranks_are_listed_first_and_can_be_reached() -> None:
    # Given
    ranks = [full(metadata=Metadata(path=f"{rank}.json", rank=rank)) for rank in range(3)]

    # When
    shown = page(ranks, [None, None, None])

    # Then
    links = [attributes["href"] for tag, attributes in shown.elements if tag == "a"]
    assert links[:3] == ["#r0", "#r1", "#r2"]
    identities = [attributes["id"] for _, attributes in shown.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert {link[1:] for link in links} <= set(identities)
    assert "3 ranks rank step" in shown.text


def test_files_that_could_not_be_read_are_listed() -> None:
    shown = Page(html_report([full()], [None], unreadable=[Unreadable("<b>.json", "<b>.json is empty")]))
    assert "1 file could not be read, and is not in this report <b>.json is empty." in " ".join(shown.text.split())
    assert "could not be read" not in page([full()], [None]).text


def test_traces_that_are_no_ranks_are_called_traces() -> None:
    traces = [full(metadata=Metadata(path=path)) for path in ("a.json", "b.json")]
    shown = page(traces, [None, None])
    assert "2 traces" in shown.text
    assert "2 ranks" not in shown.text


def test_what_the_ranks_tell_together_stands_below_their_table() -> None:
    ranks = [full(metadata=Metadata(path=f"{rank}.json", rank=rank)) for rank in range(2)]

    shown = Page(html_report(ranks, [None, None], across=[INPUT_BOUND]))

    assert f"The ranks together 1 {INPUT_BOUND.title}" in " ".join(shown.text.split())
    assert [
        attributes["id"] for _, attributes in shown.elements if attributes.get("id", "").startswith("together")
    ] == ["together-finding-1"]


def test_without_a_device_the_hosts_time_is_shown() -> None:
    # Given, when
    text = page([full(devices=())], [None]).text

    # Then
    assert "No device was recorded: this is the main host thread's time." in text
    assert "input the host was loading data 400.0 ms 40.0 %" in text


def test_partial_steps_and_the_drawn_one_are_marked() -> None:
    # Given
    steps = pl.DataFrame([(3, 50, 50, True), (4, 100, 50, True), (5, 150, 10, False)], schema=STEPS, orient="row")

    # When
    shown = page([full(steps=steps, step_ns=50)], [picture_of()])

    # Then
    bars = [
        (a["class"].split(), a["style"]) for tag, a in shown.elements if tag == "i" and "height" in a.get("style", "")
    ]
    assert bars == [([], "height:100.00%"), (["drawn"], "height:100.00%"), (["partial"], "height:20.00%")]


def test_many_steps_share_bars_that_show_the_slowest() -> None:
    # Given
    count = 2 * MAXIMUM_BARS + 1
    rows = [(number, number * 10, 5 + (number == 7), True) for number in range(count)]

    # When
    shown = page([full(steps=pl.DataFrame(rows, schema=STEPS, orient="row"), step_ns=5)], [None])

    # Then
    tips = [attributes["data-tip"] for attributes in shown.with_class("column")]
    assert len(tips) == -(-count // 3)
    assert tips[2] == "step 7: 6 ns"
    assert "each bar is the slowest of 3 steps" in shown.text


def test_tables_take_any_columns() -> None:
    # Given
    operators = pl.DataFrame(
        {
            "name": ["a"],
            "self_ns": [1_500_000],
            "bytes": [1 << 20],
            "idle_share": [0.25],
            "calls": [12345],
            "shapes": [[1, 2]],
            "seen": [True],
            "nothing": [None],
        }
    )

    # When
    shown = page([full(operators=operators, kernels=pl.DataFrame({"name": []}))], [None])

    # Then
    assert "a 1.5 ms 1.0 MiB 25.0 % 12,345 1, 2 yes" in shown.text
    values = [attributes["data-value"] for _, attributes in shown.elements if "data-value" in attributes]
    assert values[:4] == ["1500000", "1048576", "0.25", "12345"]


def test_every_cause_has_a_colour_of_its_own() -> None:
    # Given, when
    looks = {(cause_view(cause)["colour"], cause_view(cause)["hatched"]) for cause in CAUSES}

    # Then
    assert len(looks) == len(CAUSES)


def test_a_diagnosis_without_its_picture_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        html_report([empty(), empty()], [None])
    with pytest.raises(ValueError, match="at least one"):
        html_report([], [])


def test_the_page_names_no_outside_address() -> None:
    # Given, when
    report = html_report([full()], [picture_of()]).decode()

    # Then
    assert re.findall(r"https?://\S+|//[a-z]+\.[a-z]+|@import|url\(", report) == []


def test_a_page_of_many_ranks_is_held_about_once() -> None:
    """Memory, as it is allocated, beside the page itself: that of one rank at a time."""
    ranks = tuple(Group(f"rank {number}", (Text("word " * 50_000),), f"r{number}") for number in range(20))
    html_of(Document("ranks", ranks[:2]))  # templates are compiled once
    tracemalloc.start()
    try:
        page = html_of(Document("ranks", ranks))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2 * len(page)
