import dataclasses

import pytest

from stepscope.diagnosis.finding import Remedy, Unreadable
from stepscope.report.text import code, escape
from stepscope.trace import Metadata
from tests.unit.hand_built import INPUT_BOUND, empty, full
from tests.unit.rendered import golden, markdown_report, markdown_reports

EMPTY_MARKDOWN = """\
**No device was recorded; 0 ns recorded, without steps.**

Nothing was found that would save a noticeable part of the recording.
"""


def test_the_empty_diagnosis() -> None:
    assert markdown_report(empty(), top=5) == EMPTY_MARKDOWN


def test_the_whole_report() -> None:
    text = markdown_report(full(), top=1)
    assert text == golden("diagnosis_markdown.txt", text)


def test_files_that_could_not_be_read_are_listed() -> None:
    unreadable = [Unreadable("a_b.json", "a_b.json is *empty*")]
    listed = "## 1 file is not in this report\n\n- a\\_b.json is \\*empty\\*.\n"
    assert markdown_reports([full()], top=1, unreadable=unreadable) == f"{markdown_report(full(), top=1)}\n{listed}"
    several = markdown_reports([full(), full()], top=1, unreadable=unreadable)
    assert f"the DataLoader |\n\n{listed}\n# rank 3\n" in several


def test_several_ranks_begin_with_a_table() -> None:
    report = markdown_reports([full(), empty(metadata=Metadata(rank=4), step_ns=90)], top=1)
    assert report == golden("ranks_markdown.txt", report)
    assert report.count("# rank ") == 2
    assert markdown_report(full(), top=1) in report


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("aten::mm", "aten::mm"),
        ("<script>&", "&lt;script&gt;&amp;"),
        ("a|b\nc", "a\\|b\\\\nc"),
        ("[x](http://y)", "\\[x\\](http&#58;//y)"),
        ("@everyone", "@&#8203;everyone"),
        ("a#5", "a\\#&#8203;5"),
    ],
)
def test_escape(name: str, escaped: str) -> None:
    assert escape(name) == escaped


@pytest.mark.parametrize(
    ("name", "span"), [("", ""), ("a_b", "`a_b`"), ("a`b", "``a`b``"), ("`a`", "`` `a` ``"), ("a\nb", "`a\\nb`")]
)
def test_a_span_of_code_cannot_be_left(name: str, span: str) -> None:
    assert code(name) == span


def test_a_block_of_code_cannot_be_left() -> None:
    hostile = dataclasses.replace(INPUT_BOUND, remedy=Remedy("Change it.", "a = 1\n````\n<b>\x1b[0m"))
    assert "`````python\na = 1\n````\n<b>\\x1b[0m\n`````\n" in markdown_report(full(findings=(hostile,)), top=1)
