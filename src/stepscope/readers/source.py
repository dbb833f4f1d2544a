"""Bytes of a trace file, decompressed block by block, whatever its packing and however it ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import zstandard

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.budget import Budget
from stepscope.readers.gunzip import MAGIC as GZIP_MAGIC
from stepscope.readers.gunzip import Gunzip, Readable

BLOCK_BYTES: Final = 2 * 2**20
_DAMAGE_STEP_BYTES: Final = 2**16
_BOMB_BYTES: Final = 2**30
_BOMB_RATIO: Final = 150
"""Real traces shrink 10 to 40 times; a file that grows more than this past one GiB is made to exhaust a machine."""

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


class ByteSource:
    """A file, or standard input ("-"), as decompressed blocks.

    Attributes:
        name: for messages.
        damage: how the compressed data was broken, one sentence; None if it ended well.
        read_bytes: packed bytes taken from the file so far, for showing progress.
        total_bytes: packed size of the file; None where it is not known.
        plain_path: the file where it holds the content as it is, to be opened anew; None if packed or no regular file.
    """

    def __init__(self, path: str | Path) -> None:
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
        """Enough to tell how the file is packed.

        Raises:
            NotATraceError: the file is empty.
            UnreadableTraceError: it cannot be read after all.
        """
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
        """Packed bytes taken so far."""
        return self._counted.count

    def blocks(self) -> Iterator[bytes]:
        """The content, in order; ends early, with `damage` set, where the packed data breaks.

        Raises:
            NotATraceError: the file unpacks to far more than any trace does.
        """
        unpacked = 0
        budget = Budget("bytes", self.name)
        while block := self._next_block():
            unpacked += len(block)
            budget.take(len(block))
            if unpacked > _BOMB_BYTES and unpacked > _BOMB_RATIO * self.read_bytes:
                raise NotATraceError(
                    f"{self.name} unpacks to more than {_BOMB_RATIO} times its size, which no trace does: not read"
                )
            yield block

    def peek(self) -> bytes:
        """The first unpacked block, which `blocks` will still give; empty if none could be unpacked."""
        if self._head is None:
            self._head = self._read()
        return self._head

    def _next_block(self) -> bytes:
        block, self._head = (self._head, b"") if self._head else (self._read(), b"")
        return block

    def close(self) -> None:
        """Close the file."""
        if self._raw is not sys.stdin.buffer:
            self._raw.close()

    def _unpacker(self) -> Readable:
        if self._peeked.startswith(GZIP_MAGIC):
            return Gunzip(self._counted)
        if self._peeked.startswith(ZSTD_MAGIC):
            return zstandard.ZstdDecompressor().stream_reader(self._counted, read_across_frames=True)  # type: ignore[arg-type]
        return self._counted

    def _read(self) -> bytes:
        """Up to a block; in small steps, so that what precedes damage is kept."""
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
    """The file with its first bytes put back, counting what is taken."""

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
    except ValueError as error:  # a name with a null character
        raise UnreadableTraceError(f"cannot read {str(path)!r}: {error}") from error
