"""What an earlier diagnosis of the same trace found, kept in the cache folder: a second look analyses nothing again.

    ROOT/diagnoses/<key>    a checksum, then a pickle of {name: value}

The key covers the trace's tables (by the key of their store), its metadata, which code is the user's, the machine, and
stepscope with its libraries; a rule's answer stands with the thresholds that it looked up. Nothing is unpickled but
records of stepscope, tables and plain values.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import platform
import sys
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
import numpy as np

from stepscope.files import cache_folder, keep_sealed, kept_sealed, package_state

if TYPE_CHECKING:
    from stepscope.diagnosis.view import LookedUp, View

_LARGEST_BYTES: Final = 32 << 20
_MOST_BYTES: Final = 256 << 20  # of all traces together
_PLAIN: Final = frozenset({
    "builtins.bool", "builtins.bytes", "builtins.complex", "builtins.float", "builtins.frozenset", "builtins.int",
    "builtins.set", "builtins.str", "collections.Counter", "collections.OrderedDict",
    "polars.dataframe.frame.DataFrame", "polars.series.series.Series",
})  # fmt: skip
"""What a kept value may be made of, besides records of stepscope."""
_Value = TypeVar("_Value")


def folder() -> Path:
    return cache_folder() / "diagnoses"


class Earlier:
    """Values by name, of an earlier diagnosis or of this one.

    Args:
        view: whose diagnosis it is; nothing is kept for a trace that is not in the cache.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._is_new = False

    def value(self, name: Hashable, compute: Callable[[], _Value]) -> _Value:
        """The value of this name, computed unless it is known."""
        if name not in self._values:
            self._values[name] = compute()
            self._is_new = True
        return cast(_Value, self._values[name])

    def answer(self, rule: str, ask: Callable[[], tuple[_Value, LookedUp]]) -> _Value:
        """A rule's answer: a known one if the thresholds that it looked up have the same values now."""
        known = self._values.get(("rule", rule))
        settings = self._view.settings
        if known is None or any(settings.get(name, default) != value for name, (value, default) in known[1].items()):
            known = self._values["rule", rule] = ask()
            self._is_new = True
        return cast(_Value, known[0])

    def keep(self) -> None:
        """Write what was computed; a cache that cannot be written is left as it is."""
        if self._place is None or not self._is_new:
            return
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(self._values)
        data = buffer.getvalue()
        if len(data) <= _LARGEST_BYTES:
            keep_sealed(self._place, data, _MOST_BYTES)
            self._is_new = False

    @cached_property
    def _values(self) -> dict[Hashable, Any]:
        data = None if self._place is None else kept_sealed(self._place)
        if data is None:
            return {}
        try:
            found = _Plain(io.BytesIO(data)).load()
        except Exception:  # noqa: BLE001 - a file that is not ours may have anything built
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def _place(self) -> Path | None:
        trace = self._view.trace
        if not trace.identity or (trace.capture is not None and not trace.capture.identity):
            return None
        traces = [trace] if trace.capture is None else [trace, trace.capture]
        known = [
            *([each.identity, msgspec.json.encode(each.metadata), repr(each.warnings)] for each in traces),
            [repr(self._view.user_code), repr(self._view.wanted_device)],
            [platform.node(), os.cpu_count(), sys.version, package_state()],
        ]
        return folder() / hashlib.sha256(repr(known).encode("utf-8", "surrogateescape")).hexdigest()


class _Pickler(pickle.Pickler):
    """Pickles NumPy's numbers as Python's, since NumPy unpickles its own without checks."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            plain = value.item()
            return type(plain), (plain,)
        return NotImplemented


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_plain = f"{module}.{name}" in _PLAIN
        if is_plain or (module.startswith("stepscope.") and name.isidentifier()):  # no attribute of what it imports
            found = super().find_class(module, name)
            if is_plain or (isinstance(found, type) and found.__module__ == module and _is_record(found)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a kind of value that is kept")


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, (tuple, Enum))
