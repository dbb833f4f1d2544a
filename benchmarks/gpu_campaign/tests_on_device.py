"""Part 2: the tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from benchmarks.gpu_campaign.plan import REPOSITORY, At

_TAIL = 1500
_NONE_COLLECTED = 5


def run(at: At, files: str) -> dict[str, Any]:
    """Run the marked tests of these files by pytest: how many passed, failed and were skipped, and why they failed."""
    report = at.work / "tests.xml"
    # pytest's plugins of the development environment may be missing: their options in pyproject.toml are left out.
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    words += ["--import-mode=importlib", f"--junit-xml={report}", *files.split()]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    if not report.exists() or done.returncode not in (0, 1, _NONE_COLLECTED):
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-_TAIL:]}")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        if problem is not None:
            failures[f"{case.get('classname')}::{case.get('name')}"] = (problem.text or "")[-_TAIL:]
        skipped = any(each.tag == "skipped" for each in case)
        counts["failed" if problem is not None else "skipped" if skipped else "passed"] += 1
    return {**counts, "failures": failures}
