"""What a notebook shows of a diagnosis: static, with the numbers of the reports, and no name is markup."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.unit.hand_built import INPUT_BOUND, empty, full

HOSTILE = "</b><script>alert(1)</script>\u202e"


def shown(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_first_screen_of_a_diagnosis() -> None:
    page = full()._repr_html_()
    text = shown(page)

    assert "The device waits 40.0 ms a step for the DataLoader" in text
    assert "saves 40.0 ms of 120.3 ms per step (33.2 %)" in text
    assert "/home/jane doe/project/train.py:88" in text
    assert "dataset, num_workers=8" in text
    widths = [float(width) for width in re.findall(r"display:block;width:([\d.]+)%", page)]
    assert 99 < sum(widths) < 101
    assert "<script" not in page
    assert "<style" not in page
    assert len(page) < 20_000


def test_an_empty_diagnosis_says_so() -> None:
    assert "Nothing was found that would save a noticeable part of the recording." in shown(empty()._repr_html_())


def test_no_name_is_markup() -> None:
    finding = replace(INPUT_BOUND, title=HOSTILE, remedy=replace(INPUT_BOUND.remedy, text=HOSTILE, code=HOSTILE))
    page = full(findings=(finding,) * 5)._repr_html_()

    assert "<script" not in page
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;") == 3 * 3 + 2
