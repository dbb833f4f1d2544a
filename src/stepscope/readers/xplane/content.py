"""The unpacked bytes of a profile, in its file or on disk when they are many, read piece by piece."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

from stepscope.readers.source import ByteSource
from stepscope.readers.xplane.wire import BYTES, FIXED32, FIXED64, VARINT, WireError, varint

MEMORY_BYTES: Final = 16 * 2**20
_WINDOW_BYTES: Final = 2**20
SMALL_BYTES: Final = 2**16
"""Fields up to this size are given with their bytes."""
_LONGEST_HEAD: Final = 20


class Field(NamedTuple):
    """A field of a message in the file.

    Attributes:
        value: of varints the number, of small fields the bytes; None for large ones, which lie from `start` to `end`.
    """

    number: int
    value: int | bytes | None
    start: int
    end: int


class Content:
    """What a file holds once unpacked; close it after use.

    Attributes:
        size: bytes.
    """

    def __init__(self, source: ByteSource, directory: Path, progress: Callable[[int, int | None], None] | None) -> None:
        self._progress: Callable[[int], None] = lambda _: None
        self._read_bytes = 0
        total = source.total_bytes
        if source.plain_path is not None and total:
            with contextlib.suppress(OSError):  # which it was replaced with, or forbidden, since
                self._file: IO[bytes] = source.plain_path.open("rb")
                self.size = total
                if progress is not None:
                    self._progress = lambda read: progress(read, total)
                return
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by close()
            max_size=MEMORY_BYTES, dir=str(directory)
        )
        self.size = 0
        for block in source.blocks():
            self._file.write(block)
            self.size += len(block)
            if progress is not None:
                progress(source.read_bytes, total)

    def close(self) -> None:
        """Forget the bytes."""
        self._file.close()

    def read(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`, fewer at the end."""
        self._file.seek(start)
        data = self._file.read(size)
        self._read_bytes = max(self._read_bytes, start + len(data))
        self._progress(self._read_bytes)
        return data

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """The fields of the message between two positions.

        Raises:
            WireError: it is no message from here on; what came before stands.
        """
        at, base, window = start, start, b""
        while at < end:
            if at - base + _LONGEST_HEAD > len(window) and base + len(window) < end:
                base, window = at, self.read(at, min(_WINDOW_BYTES, end - at))
            tag, behind = varint(window, at - base)
            kind = tag & 7
            if kind == VARINT:
                number, behind = varint(window, behind)
                yield Field(tag >> 3, number, base + behind, base + behind)
                at = base + behind
                continue
            if kind == BYTES:
                length, behind = varint(window, behind)
            elif kind in (FIXED64, FIXED32):
                length = 8 if kind == FIXED64 else 4
            else:
                raise WireError(f"a field of the unknown kind {kind}")
            first, last = base + behind, base + behind + length
            if last > end:
                raise WireError(f"a field of {length:,} bytes reaches {last - end:,} bytes beyond its message")
            if length > SMALL_BYTES:
                yield Field(tag >> 3, None, first, last)
            else:
                if last > base + len(window):
                    base, window = first, self.read(first, min(_WINDOW_BYTES, end - first))
                yield Field(tag >> 3, window[first - base : last - base], first, last)
            at = last
