"""Strings kept once: tables hold their numbers until they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.budget import current

_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class Codes(dict[Any, int]):
    """Numbers keys in order of first use."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _RawCodes(dict[bytes, "int | None"]):
    """Codes of JSON texts in a pool of strings."""

    def __init__(self, codes: Codes) -> None:
        super().__init__({b"null": None})
        self._codes = codes

    def __missing__(self, raw: bytes) -> int:
        code = self[raw] = self._codes[one_spacing(raw).decode("utf-8", "replace")]
        return code


def one_spacing(raw: bytes) -> bytes:
    """JSON text with a space after each comma and colon: profilers write the same shapes in several ways."""
    try:
        return msgspec.json.format(raw, indent=0)
    except _NOT_JSON:
        return raw


class StringPool:
    """Strings kept once and referred to by number."""

    def __init__(self) -> None:
        self._codes = Codes()
        self._raw_codes = _RawCodes(self._codes)

    def codes(self, strings: Sequence[str]) -> pl.Series:
        """The number of each string; UInt32."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([known[string] for string in strings], dtype=pl.UInt32)

    def optional_codes(self, strings: Sequence[Any]) -> pl.Series:
        """The number of each string or integer, null for None; UInt32."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([None if s is None else known[str(s)] for s in strings], dtype=pl.UInt32)

    def raw_codes(self, raws: Sequence[Any]) -> pl.Series:
        """The number of each piece of JSON text, null for JSON's null; UInt32."""
        known = self._raw_codes
        return pl.Series([known[raw] for raw in map(bytes, raws)], dtype=pl.UInt32)

    def strings(self) -> pl.Series:
        """Every string, in order of its number."""
        current().require("strings", len(self._codes))
        return pl.Series([str(key) for key in self._codes], dtype=pl.String)
