"""The lines of a side file, whatever its size, packing and encoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepscope.errors import UnreadableTraceError
from stepscope.readers.source import ByteSource

LONGEST_LINE: Final = 2**16
"""Bytes; a longer line is given in pieces."""
MOST_NAMES: Final = 10_000
"""Different names of metrics, operators or stacks that are kept of one file; those after them are left out."""
LARGEST_COUNT: Final = 2**62


def lines(path: str | Path) -> Iterator[str]:
    """The lines without their ends; bytes that are no UTF-8 are replaced.

    Raises:
        NotATraceError: the file is empty.
        UnreadableTraceError: it cannot be opened or unpacked.
    """
    source = ByteSource(path)
    try:
        rest, some = b"", False
        for block in source.blocks():
            some = True
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield from _pieces(line)
            while len(rest) > LONGEST_LINE:
                yield rest[:LONGEST_LINE].decode("utf-8", "replace")
                rest = rest[LONGEST_LINE:]
        if source.damage and not some:
            raise UnreadableTraceError(f"{source.name} cannot be unpacked: {source.damage}")
        yield from _pieces(rest)
    finally:
        source.close()


def _pieces(line: bytes) -> Iterator[str]:
    for first in range(0, len(line), LONGEST_LINE):
        yield line[first : first + LONGEST_LINE].decode("utf-8", "replace").rstrip("\r")
