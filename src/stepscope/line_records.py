"""The user's lines as a recording keeps them, in a file beside the trace.

    trace.json.gz         the trace
    trace.json.gz.lines   a heading with a checksum, then msgpack of `LineRecords`: for each thread, at which line of
                          the user's code it was since when; without the heading where an older stepscope wrote it

Written by the recorder in the user's process, which is why this module stands apart from the readers and imports no
more than it needs; joined to the operators by `stepscope.readers.lines`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import xxhash

from stepscope.errors import UnreadableTraceError
from stepscope.whole_files import whole_file

VERSION: Final = 1
SUFFIX: Final = ".lines"
MODULE_LEFT: Final = -1
_HEADING: Final = b"stepscope lines\n"
_BEGIN: Final = len(_HEADING) + 16
"""Where the records begin, behind 128 bits of checksum."""
_LARGEST_BYTES: Final = 2**30
_LATEST_NS: Final = 2**62
_LARGEST_LINE: Final = 2**31
_LONGEST_NAME: Final = 4096
LONGEST_MODULE: Final = 1000
"""Letters of a module's path."""
DEEPEST_MODULE: Final = 100
"""Modules in each other."""


class Location(msgspec.Struct, array_like=True, frozen=True):
    """A line of the user's code, in the function of that name."""

    file: str
    line: int
    function: str


class ThreadLines(msgspec.Struct):
    """Where one thread was in the user's code.

    Attributes:
        thread: the operating system's number of the thread.
        times: since when, nanoseconds since 1970 as little-endian int64, ascending.
        locations: where, as indices into `LineRecords.locations`, little-endian int32; -1 for outside the user's code.
        module_times: when calls of modules began and ended, as `times`.
        modules: which, as indices into `LineRecords.modules`, little-endian int32; MODULE_LEFT where a call ended.
    """

    thread: int
    times: bytes
    locations: bytes
    module_times: bytes = b""
    modules: bytes = b""


class LineRecords(msgspec.Struct, kw_only=True):
    """The content of a file of lines.

    Attributes:
        version: of this format.
        process: the operating system's number of the process.
        start_unix_ns, end_unix_ns: when lines were recorded.
        problem: what kept lines from being recorded, or from being recorded to the end.
        modules: names of nn.Modules.
    """

    version: int = VERSION
    process: int
    start_unix_ns: int
    end_unix_ns: int
    locations: list[Location]
    threads: list[ThreadLines]
    problem: str | None = None
    modules: list[str] = []


def lines_path(trace: str | Path) -> Path:
    """The file of lines that belongs to a trace file."""
    path = Path(trace)
    return path.with_name(path.name + SUFFIX)


def write_lines(records: LineRecords | None, trace: Path) -> None:
    """Write the file of lines beside a trace file, complete or not at all; None removes one that was left there.

    Raises:
        OSError: it cannot be written.
    """
    path = lines_path(trace)
    if records is None:
        path.unlink(missing_ok=True)
        return
    content = msgspec.msgpack.encode(records)
    with whole_file(path, private=True) as file:
        file.write(_HEADING + xxhash.xxh3_128_digest(content) + content)


def read_lines(path: Path) -> LineRecords:
    """Read a file of lines.

    Raises:
        UnreadableTraceError: it cannot be read, is damaged, or is of a newer version.
    """
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise UnreadableTraceError(f"{path} is larger than any file of lines")
        content = path.read_bytes()
        if content.startswith(_HEADING):
            content, checksum = content[_BEGIN:], content[len(_HEADING) : _BEGIN]
            if checksum != xxhash.xxh3_128_digest(content):
                raise UnreadableTraceError(f"{path} is damaged: it is not as it was written")
        records = msgspec.msgpack.decode(content, type=LineRecords)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableTraceError(f"{path} holds no lines that can be read: {error}") from error
    if records.version > VERSION:
        raise UnreadableTraceError(f"{path} was written by a newer stepscope (version {records.version})")
    wrong = _damage(records)
    if wrong is not None:
        raise UnreadableTraceError(f"{path} is damaged: {wrong}")
    return records


def _damage(records: LineRecords) -> str | None:
    """What no recording writes, or None; every number must fit the tables, every name a path or a module."""
    for thread in records.threads:
        if len(thread.times) % 8 or len(thread.times) // 8 * 4 != len(thread.locations):
            return "times and locations of a thread differ in number"
        if len(thread.module_times) % 8 or len(thread.module_times) // 8 * 4 != len(thread.modules):
            return "times and modules of a thread differ in number"
    if not (0 <= records.start_unix_ns < _LATEST_NS and 0 <= records.end_unix_ns < _LATEST_NS):
        return "it does not say when lines were recorded"
    for place in records.locations:
        if not 0 <= place.line < _LARGEST_LINE or max(len(place.file), len(place.function)) > _LONGEST_NAME:
            return "a line's number or names are larger than any"
    if any(len(name) > LONGEST_MODULE or name.count(".") > DEEPEST_MODULE for name in records.modules):
        return "a module's name is longer or deeper than any"
    return None
