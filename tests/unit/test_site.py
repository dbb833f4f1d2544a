"""The guide as a site: it builds without a warning, and links out of docs/ become text."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.site_links import on_page_markdown

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("the [zoo](../../tests/zoo) and [*its*\nrules](../../a.md#part)", "the zoo and *its*\nrules"),
        ("[graphs](../idle-time.md#graphs), [here](#there), [far](https://a.org/../b)", None),
        ("![page](../images/page.png)", None),
    ],
)
def test_links_that_leave_the_folder_become_text(markdown: str, expected: str | None) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="rules/README.md"))

    assert on_page_markdown(markdown, page, {"docs_dir": str(REPOSITORY / "docs")}) == (expected or markdown)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("MkDocs with its Material theme is not installed: pip install -e '.[docs]'")

    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )

    assert (built.returncode, built.stderr) == (0, "")
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.https?:", front) == []
