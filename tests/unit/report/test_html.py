"""Pages of documents as bytes: no name is more than text in them, and nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
import re
import tracemalloc
from html.parser import HTMLParser

import polars as pl

from stepscope.report.document import Code, Document, Facts, Group, Items, Section, Table, Text
from stepscope.report.html import html_of

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


def document(name: str) -> Document:
    text = name.replace("\udcff", "")
    rows = pl.DataFrame({"name": [text], text: [1]})
    blocks = (Text(name), Items((name,)), Facts(((name, name),)), Table(rows, "rows"), Code(name))
    return Document(name, (Section(name, blocks, id="all", link=name),))


def test_nothing_is_loaded_and_only_the_own_script_may_run() -> None:
    # Given, when
    page = html_of(document("loss"))
    shown = Page(page)

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
    assert re.findall(r"https?://\S+|//[a-z]+\.[a-z]+|@import|url\(", page.decode()) == []


def test_hostile_names_stay_text_wherever_they_stand() -> None:
    # Given, when
    report = html_of(document(HOSTILE + "\udcff"))

    # Then: the same elements as with harmless names, and the name as text
    shown = Page(report)
    assert [tag for tag, _ in shown.elements] == [tag for tag, _ in Page(html_of(document("loss"))).elements]
    assert report.count(b"</script") == 1
    assert b"<!--" not in report
    assert b"\x1b" not in report
    assert "\u2028" not in report.decode()
    assert shown.text.count("<img src=x onerror=alert(1)>") >= 8
    assert "{{ 7 * 7 }}" in shown.text


def test_tables_take_any_columns() -> None:
    # Given
    rows = pl.DataFrame(
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
    shown = Page(html_of(Document("rows", (Table(rows), Table(pl.DataFrame({"name": []}))))))

    # Then
    assert "a 1.5 ms 1.0 MiB 25.0 % 12,345 1, 2 yes" in shown.text
    values = [attributes["data-value"] for _, attributes in shown.elements if "data-value" in attributes]
    assert values[:4] == ["1500000", "1048576", "0.25", "12345"]


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
