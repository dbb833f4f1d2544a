"""The compiled scanner, native/scanner.cpp; absent where it was not built."""

from typing import TypeAlias

from stepscope.readers.kineto.scanned import SqliteRows, XplaneEvents

_Coded: TypeAlias = tuple[bytes, bytes]
"""UInt32 codes, and the values that they number as a JSON list."""
_Kinds: TypeAlias = tuple[tuple[tuple[bytes, ...], tuple[tuple[bytes, int], ...]], ...]
"""For each table: categories, and the wanted arguments with their types; the last one is that of instants."""
_Rows: TypeAlias = tuple[bytes, bytes, _Coded, _Coded, tuple[bytes | _Coded | None, ...]]
"""Starts, durations (of flows: ids), names (of flows: categories), lanes, and the wanted arguments."""
_Group: TypeAlias = tuple[bytes, bytes, bytes, _Rows | None]
"""Phase, category as written, where each event begins and ends (UInt32), and the rows; None if they must be decoded."""

INTERFACE: int

def scan(text: bytes, exact: bool, kinds: _Kinds, instant: bytes, /) -> tuple[int, int, bool, list[_Group]] | None: ...
def sqlite_rows(
    pages: bytes, page_size: int, usable: int, wanted: tuple[tuple[int, bool], ...], skip: int, most: int, /
) -> SqliteRows | None: ...
def xplane_events(data: bytes, roles: bytes, /) -> XplaneEvents | None: ...
