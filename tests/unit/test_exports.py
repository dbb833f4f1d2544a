"""The public names, and what importing them costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import stepscope

NAMES = [
    "Comparison",
    "Diagnosis",
    "Finding",
    "StepscopeError",
    "Trace",
    "Window",
    "__version__",
    "annotate",
    "compare_traces",
    "diagnose",
    "log",
    "open_trace",
    "profile",
    "schedule",
    "start_server",
    "step",
    "telemetry",
]
HEAVY = ["isal", "jinja2", "numpy", "polars", "rich", "scipy", "torch"]
LIST_HEAVY = f"import json, sys, stepscope; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"


def test_the_public_names() -> None:
    assert stepscope.__all__ == NAMES
    assert dir(stepscope) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there(name: str) -> None:
    value = getattr(stepscope, name)

    assert value is getattr(stepscope, name)
    assert isinstance(value, str) or value.__name__ == name


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="module 'stepscope' has no attribute 'diagnosis_of'"):
        _ = stepscope.diagnosis_of


def test_importing_the_package_imports_nothing_heavy() -> None:
    found = subprocess.run([sys.executable, "-c", LIST_HEAVY], capture_output=True, text=True, check=True)

    assert json.loads(found.stdout) == []
