"""Unpacking gzip so that everything before a break is kept: no exception takes unpacked bytes with it."""

from __future__ import annotations

from gzip import BadGzipFile
from typing import Final, Protocol

from isal import igzip_lib

MAGIC: Final = b"\x1f\x8b"
_INPUT_BYTES: Final = 2**16
_OUTPUT_BYTES: Final = 2**12
"""A decompressor that finds damage loses what it unpacked in that call: not more than this."""
_TRAILER_BYTES: Final = 8
_ISAL_ERROR: Final[type[Exception]] = igzip_lib.IsalError  # type: ignore[assignment] # its stub calls it an instance


class Readable(Protocol):
    """All that is asked of a file and of what unpacks it."""

    def read(self, size: int = -1, /) -> bytes: ...


class Gunzip:
    """A gzip file of any number of members.

    `read` raises EOFError where the data ends early and BadGzipFile where it is damaged, after all that could be
    unpacked was given.
    """

    def __init__(self, packed: Readable) -> None:
        self._packed = packed
        self._held = b""
        self._ended = False
        self._decompressor = _decompressor()
        self._failure: Exception | None = None

    def read(self, size: int = _INPUT_BYTES, /) -> bytes:
        """Up to about `size` unpacked bytes; none at the end."""
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
        """Begin with the member that follows, if one does; zeros between members are padding."""
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
        """Packed bytes, the file's last few apart: what they check is then unpacked and given before they fail."""
        while len(self._held) <= _TRAILER_BYTES and not self._ended:
            more = self._packed.read(_INPUT_BYTES)
            self._held += more
            self._ended = not more
        given = len(self._held) if self._ended else len(self._held) - _TRAILER_BYTES
        data, self._held = self._held[:given], self._held[given:]
        return data


def _decompressor() -> igzip_lib.IgzipDecompressor:
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
