"""Programs of users, run with errors put into stepscope's entries: what they print and return must stay the same."""

from __future__ import annotations

import importlib
import pkgutil

import stepscope.integrations
import stepscope.machine
import stepscope.record
import stepscope.remedies
from stepscope import guard
from stepscope.remedies.attempts import BACKGROUND


def entries() -> set[str]:
    """Every entry of the package, as the guard lists them when all modules are imported."""
    for package in (stepscope.record, stepscope.machine, stepscope.integrations, stepscope.remedies):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "bootstrap_path" not in module.name:
                importlib.import_module(module.name)
    ours = ("record.", "machine.", "integrations.")
    return {name for name in guard.ENTRIES if name.startswith(ours)} | set(BACKGROUND)
