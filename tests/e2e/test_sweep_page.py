"""A sweep's page in a real browser: nothing is complained of or asked for, and trials can be chosen with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.report.html import html_of
from stepscope.report.sweep import sweep_document
from stepscope.tune.sweep.file import parse_sweep
from stepscope.tune.sweep.run import Effect, SweepResults, SweepTrial
from tests.browser import CHROMIUM, Browser
from tests.e2e.test_report_files import HOSTILE, opened

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def test_choosing_trials_with_the_arrow_keys(browser: Browser, tmp_path: Path) -> None:
    content = {"program": "a.py", "metric": HOSTILE, "parameters": {"x": [HOSTILE, "b"], "y": {"min": 0.0, "max": 1}}}
    sweep = parse_sweep(content, default_name="try")
    trials = tuple(
        SweepTrial(number, "complete", {"x": HOSTILE, "y": number / 2}, float(number), 1, 2.0, None, None)
        for number in range(3)
    )
    effects = tuple(Effect(each, None, None, 3) for each in sweep.searched)
    path = opened(browser, tmp_path, html_of(sweep_document(SweepResults(sweep, trials, effects, 0))))

    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]
    browser.script("document.querySelector('.parallel').focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Escape"):
        browser.key(key)
        said.append(browser.script("document.querySelector('.parallel output').textContent")[:8])
    assert said == ["trial 0:", "trial 1:", "trial 2:", "trial 1:", ""]
