"""The Reader interface, and the input of readers: a trace file's bytes, decompressed in blocks, even if damaged."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol, TypeAlias

import zstandard
from isal import igzip_lib

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.budget import current
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.store_writing import StoreWriter
from stepscope.trace.window import StepRange, Window

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the compressed bytes read so far and in total, None if unknown."""
Found: TypeAlias = tuple[Metadata, tuple[TraceWarning, ...]]
"""Metadata of a file, and warnings about what was skipped or repaired."""

MAGIC: Final = b"\x1f\x8b"
_INPUT_BYTES: Final = 2**16
_OUTPUT_BYTES: Final = 2**12
"""A decompressor that finds damage loses its output of that call, so at most this much."""
_TRAILER_BYTES: Final = 8
_ISAL_ERROR: Final[type[Exception]] = igzip_lib.IsalError  # type: ignore[assignment] # its stub declares an instance


class Readable(Protocol):
    """A file, or a decompressor's output."""

    def read(self, size: int = -1, /) -> bytes: ...


class Gunzip:
    """A gzip file of any number of members.

    `read` returns everything before a failure first, then raises EOFError for truncated and BadGzipFile for damaged
    data.
    """

    def __init__(self, packed: Readable) -> None:
        self._packed = packed
        self._held = b""
        self._ended = False
        self._decompressor = _decompressor()
        self._failure: Exception | None = None

    def read(self, size: int = _INPUT_BYTES, /) -> bytes:
        """Return up to about `size` decompressed bytes; empty at the end."""
        parts: list[bytes] = []
        wanted = size
        while wanted > 0 and self._failure is None:
            try:
                part = self._next()
            except (EOFError, BadGzipFile) as error:
                self._failure = error
                break
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
        if self._failure is not None and not parts:
            raise self._failure
        return b"".join(parts)

    def _next(self) -> bytes:
        while True:
            if self._decompressor.eof and not self._next_member():
                return b""
            data = self._input() if self._decompressor.needs_input else b""
            if not data and self._decompressor.needs_input:
                raise EOFError("the gzip data ends early")
            try:
                part = self._decompressor.decompress(data, _OUTPUT_BYTES)
            except _ISAL_ERROR as error:
                raise BadGzipFile(str(error)) from error
            if part:
                return part

    def _next_member(self) -> bool:
        """Start the next member, if any; zeros between members are padding."""
        rest = self._decompressor.unused_data.lstrip(b"\0")
        while len(rest) < len(MAGIC) and (more := self._input()):
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(MAGIC):
            raise BadGzipFile("something else follows the compressed data")
        self._held = rest + self._held
        self._decompressor = _decompressor()
        return True

    def _input(self) -> bytes:
        """Hold back the file's last bytes, so that a bad checksum fails only after all content was returned."""
        while len(self._held) <= _TRAILER_BYTES and not self._ended:
            more = self._packed.read(_INPUT_BYTES)
            self._held += more
            self._ended = not more
        given = len(self._held) if self._ended else len(self._held) - _TRAILER_BYTES
        data, self._held = self._held[:given], self._held[given:]
        return data


def _decompressor() -> igzip_lib.IgzipDecompressor:
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)


BLOCK_BYTES: Final = 2 * 2**20
_DAMAGE_STEP_BYTES: Final = 2**16

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


class ByteSource:
    """A file, or standard input ("-"), as decompressed blocks.

    Attributes:
        name: for messages.
        damage: a sentence on how the compressed data is broken; None if it is intact.
        total_bytes: compressed size of the file; None if unknown.
        plain_path: the path of a regular, uncompressed file, which can be opened again; else None.
        progress: called after every block.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.progress: Progress = progress or (lambda done, total: None)
        self.name = "standard input" if str(path) == "-" else str(path)
        self.damage: str | None = None
        self._raw = _open(path)
        regular = Path(path) if is_regular_file(path) else None
        self.total_bytes = None if regular is None else regular.stat().st_size
        self._peeked = self._first_bytes()
        self._counted = _CountingReader(self._peeked, self._raw)
        self._stream: Readable = self._unpacker()
        self.plain_path = regular if self._stream is self._counted else None
        self._head: bytes | None = None

    def _first_bytes(self) -> bytes:
        """Read enough to detect the compression; raise NotATraceError if the file is empty, or UnreadableTraceError."""
        try:
            first = self._raw.read(4)
        except OSError as error:
            self.close()
            raise UnreadableTraceError(f"cannot read {self.name}: {error.strerror}") from error
        if not first:
            self.close()
            raise NotATraceError(f"{self.name} is empty")
        return first

    @property
    def read_bytes(self) -> int:
        """Compressed bytes read so far."""
        return self._counted.count

    def blocks(self) -> Iterator[bytes]:
        """Yield the content; stop early and set `damage` if the compressed data breaks off. Raises TooLargeError."""
        budget = current()
        while block := self._next_block():
            budget.unpack(len(block), self.read_bytes)
            yield block
            self.progress(self.read_bytes, self.total_bytes)

    def peek(self) -> bytes:
        """Return the first decompressed block without consuming it; empty if nothing could be decompressed."""
        if self._head is None:
            self._head = self._read()
        return self._head

    def _next_block(self) -> bytes:
        block, self._head = (self._head, b"") if self._head else (self._read(), b"")
        return block

    def close(self) -> None:
        if self._raw is not sys.stdin.buffer:
            self._raw.close()

    def _unpacker(self) -> Readable:
        if self._peeked.startswith(MAGIC):
            return Gunzip(self._counted)
        if self._peeked.startswith(ZSTD_MAGIC):
            return zstandard.ZstdDecompressor().stream_reader(self._counted, read_across_frames=True)  # type: ignore[arg-type]
        return self._counted

    def _read(self) -> bytes:
        """Read up to a block, in small steps to keep what precedes damage."""
        parts: list[bytes] = []
        size = 0
        step = _DAMAGE_STEP_BYTES if isinstance(self._stream, zstandard.ZstdDecompressionReader) else BLOCK_BYTES
        while size < BLOCK_BYTES and self.damage is None:
            try:
                part = self._stream.read(step)
            except EOFError:
                self.damage = "the compressed data ends early"
                break
            except (zstandard.ZstdError, OSError) as error:
                self.damage = f"the compressed data is damaged ({error})"
                break
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)


class _CountingReader(io.RawIOBase):
    def __init__(self, first: bytes, rest: BinaryIO) -> None:
        self._first = first
        self._rest = rest
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        taken = self._first if size < 0 else self._first[:size]
        self._first = self._first[len(taken) :]
        if size < 0 or len(taken) < size:
            taken += self._rest.read(size if size < 0 else size - len(taken))
        self.count += len(taken)
        return taken

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def is_regular_file(path: str | Path) -> bool:
    """Whether the path is a file that can be read twice, unlike standard input or a pipe."""
    return str(path) != "-" and os.path.isfile(path)


def _open(path: str | Path) -> BinaryIO:
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        if os.path.isdir(path):
            raise NotATraceError(f"{path} is a folder without a trace file, not a trace")
        return open(path, "rb")
    except FileNotFoundError:
        raise UnreadableTraceError(f"there is no file {path}") from None
    except OSError as error:
        raise UnreadableTraceError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # the name contains a null character
        raise UnreadableTraceError(f"cannot read {str(path)!r}: {error}") from error


_BOM: Final = b"\xef\xbb\xbf"
_DOCUMENT: Final = re.compile(rb"[{\[][\t\n\r -\x7e\x80-\xff]*")
_LOOKED_AT_BYTES: Final = 256


def text_of(head: bytes) -> bytes:
    """Strip a byte-order mark and white space."""
    return head.lstrip().removeprefix(_BOM).lstrip()


def is_json(head: bytes) -> bool:
    """Whether a file starts like a JSON object or list, without the control characters of binary data."""
    return _DOCUMENT.fullmatch(text_of(head[:4096])[:_LOOKED_AT_BYTES]) is not None


class Reader(NamedTuple):
    """The reader of one format.

    Attributes:
        name: the value of `Metadata.format`.
        recognises: whether a file that starts with these decompressed bytes has this format.
        read: writes the tables of a file, limited to a window or steps if given.
    """

    name: str
    recognises: Callable[[bytes], bool]
    read: Callable[[ByteSource, StoreWriter, Window | None, StepRange | None], Found]
