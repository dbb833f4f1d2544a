"""Fixing the seeds of random numbers, also of packages that are not imported yet."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from stepscope.capture import guard

_SEEDERS: Final[dict[str, Callable[[Any, int], object]]] = {
    "numpy": lambda numpy, seed: numpy.random.seed(seed % 2**32),
    "torch": lambda torch, seed: torch.manual_seed(seed),
}


class FixedSeeds:
    """Seeds Python's, NumPy's and PyTorch's random numbers; the latter two when they are imported, if they are not yet.

    `stop()` forgets those that were never imported. Numbers that were drawn cannot be taken back.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.done = f"seeds of Python's, NumPy's and PyTorch's random numbers fixed to {seed}, the same on every rank"
        self.missing = (
            "the order of sets of strings still differs from run to run: set PYTHONHASHSEED before Python begins"
            if os.environ.get("PYTHONHASHSEED", "random") == "random"
            else ""
        )
        random.seed(seed)
        pending = {}
        for name, seeder in _SEEDERS.items():
            module = sys.modules.get(name)
            if module is None:
                pending[name] = seeder
            else:
                seeder(module, seed)
        self._finder = _SeedWhenImported(pending, seed)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Take the hook out of Python's imports."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


class _SeedWhenImported(MetaPathFinder):
    """Calls a package's seeder right after the package was imported for the first time."""

    def __init__(self, pending: dict[str, Callable[[Any, int], object]], seed: int) -> None:
        self._pending = pending
        self._seed = seed
        self._searching = threading.local()

    @guard.entry
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the package is, with a loader that seeds it; None for every other module."""
        if fullname not in self._pending or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            self._wrap(fullname, spec.loader)
        return spec

    def _wrap(self, name: str, loader: Any) -> None:
        original = loader.exec_module
        loader.exec_module = guard.around(original, after=functools.partial(self._imported, name, loader, original))

    @guard.entry
    def _imported(self, name: str, loader: Any, original: Any, _: None, __: None, module: ModuleType) -> None:
        loader.exec_module = original
        seeder = self._pending.pop(name, None)
        if seeder is not None:
            seeder(module, self._seed)
