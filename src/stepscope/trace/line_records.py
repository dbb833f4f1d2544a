"""The lines of the user's code that its threads executed, as kept in a file beside the trace; their files' text, which
is kept with them, and where those lines are in a later text.

The user's process writes it, so that this module has few imports.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import stat
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from stepscope.errors import UnreadableTraceError
from stepscope.files import whole_file

VERSION: Final = 1
SUFFIX: Final = ".lines"
MODULE_LEFT: Final = -1
_HEADING: Final = b"stepscope lines\n"
_BEGIN: Final = len(_HEADING) + 16
"""Offset of the records, after a 128-bit checksum."""
_LARGEST_FILE: Final = 2**30
_LATEST_NS: Final = 2**62
_LARGEST_LINE: Final = 2**31
_LONGEST_NAME: Final = 4096
LONGEST_MODULE: Final = 1000
"""Maximum characters in a module's path."""
DEEPEST_MODULE: Final = 100
"""Maximum nesting depth of modules."""


class Location(msgspec.Struct, array_like=True, frozen=True):
    """A line of the user's code, with its file and function."""

    file: str
    line: int
    function: str


class ThreadLines(msgspec.Struct):
    """The lines of the user's code that one thread ran.

    Attributes:
        thread: the operating system's id of the thread.
        times: start times, nanoseconds since 1970 as little-endian int64, ascending.
        locations: indices into `LineRecords.locations`, little-endian int32; -1 outside the user's code.
        module_times: times when module calls started and ended, in the format of `times`.
        modules: indices into `LineRecords.modules`, little-endian int32; MODULE_LEFT where a call ended.
    """

    thread: int
    times: bytes
    locations: bytes
    module_times: bytes = b""
    modules: bytes = b""


class LineRecords(msgspec.Struct, kw_only=True):
    """The content of a line file.

    Attributes:
        process: the operating system's id of the process.
        start_unix_ns, end_unix_ns: bounds of the recording of lines.
        problem: why lines were not recorded, or not to the end.
        evaluating: indices in `modules` of calls in evaluation mode.
        module_functions: for each of `modules`, its `forward` as "file:line function"; "" if it is torch's or no
            library's.
        sources: text of the files that `locations` names, see `packed_sources`.
    """

    version: int = VERSION
    process: int
    start_unix_ns: int
    end_unix_ns: int
    locations: list[Location]
    threads: list[ThreadLines]
    problem: str | None = None
    modules: list[str] = []
    evaluating: list[int] = []
    module_functions: list[str] = []
    sources: dict[str, bytes] = {}


def lines_path(trace: str | Path) -> Path:
    path = Path(trace)
    return path.with_name(path.name + SUFFIX)


def write_lines(records: LineRecords | None, trace: Path) -> None:
    """Write the line file beside a trace file, complete or not at all; None removes an existing one."""
    path = lines_path(trace)
    if records is None:
        path.unlink(missing_ok=True)
        return
    content = msgspec.msgpack.encode(records)
    with whole_file(path, private=True) as file:
        file.write(_HEADING + xxhash.xxh3_128_digest(content) + content)


def read_lines(path: Path) -> LineRecords:
    """Read a line file; raise UnreadableTraceError if it is damaged, or of a newer version."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UnreadableTraceError(f"{path} is larger than any line file")
        content = path.read_bytes()
        if content.startswith(_HEADING):
            content, checksum = content[_BEGIN:], content[len(_HEADING) : _BEGIN]
            if checksum != xxhash.xxh3_128_digest(content):
                raise UnreadableTraceError(f"{path} is damaged: it has changed since it was written")
        records = msgspec.msgpack.decode(content, type=LineRecords)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableTraceError(f"{path} contains no readable lines: {error}") from error
    if records.version > VERSION:
        raise UnreadableTraceError(f"{path} was written by a newer stepscope (version {records.version})")
    wrong = _damage(records)
    if wrong is not None:
        raise UnreadableTraceError(f"{path} is damaged: {wrong}")
    return records


def _damage(records: LineRecords) -> str | None:
    """A description of content that no recording writes, or None."""
    for thread in records.threads:
        if len(thread.times) % 8 or len(thread.times) // 8 * 4 != len(thread.locations):
            return "times and locations of a thread differ in number"
        if len(thread.module_times) % 8 or len(thread.module_times) // 8 * 4 != len(thread.modules):
            return "times and modules of a thread differ in number"
    if not (0 <= records.start_unix_ns < _LATEST_NS and 0 <= records.end_unix_ns < _LATEST_NS):
        return "it does not say when lines were recorded"
    for place in records.locations:
        if not 0 <= place.line < _LARGEST_LINE or max(len(place.file), len(place.function)) > _LONGEST_NAME:
            return "a line number or a name is too large"
    if any(len(name) > LONGEST_MODULE or name.count(".") > DEEPEST_MODULE for name in records.modules):
        return "a module's name is too long or too deep"
    return None


LARGEST_BYTES: Final = 1 << 20
"""The largest file that is kept."""
MOST_BYTES: Final = 8 << 20
"""Of all files of one recording."""
_FAST: Final = 1  # of zlib's levels
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_MOST_PAIRED: Final = 400
"""Rewritten lines that are looked for; comparing the letters of more would take too long."""
_NEAR: Final = 8
"""Rewritten lines are looked for among so many, from the first that can be meant."""
_ALIKE: Final = 0.6
"""Least similarity of a line and its rewritten one, 0 to 1, as difflib has it."""
_LONGEST_COMPARED: Final = 200
_MOST_COMPARED: Final = 20_000
"""Lines between the ends that both texts share; comparing more, which a trace can hold, could take hours."""


def split_lines(text: str) -> list[str]:
    """The lines as Python and editors count them: unlike `str.splitlines`, a form feed ends none."""
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def packed_sources(files: Iterable[str], before_unix_ns: int) -> dict[str, bytes]:
    """The packed text of each file that can be read and has not changed since a time, the first ones if too many."""
    found: dict[str, bytes] = {}
    room = MOST_BYTES
    for file in dict.fromkeys(files):
        with contextlib.suppress(OSError, ValueError, SyntaxError, LookupError):
            state = os.stat(file)
            if not stat.S_ISREG(state.st_mode) or not 0 < state.st_size <= min(room, LARGEST_BYTES):
                continue
            if state.st_mtime_ns > before_unix_ns:  # the program may run another text
                continue
            with open(file, "rb") as opened:  # it may grow meanwhile
                data = opened.read(LARGEST_BYTES)
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            found[file] = zlib.compress(data.decode(encoding).encode(), _FAST)
            room -= len(data)
    return found


def unpacked(data: bytes) -> str | None:
    """The text; None if it is damaged, or larger than any that is kept."""
    unpacker = zlib.decompressobj()
    with contextlib.suppress(zlib.error, ValueError):
        text = unpacker.decompress(data, 4 * LARGEST_BYTES)  # a letter of one byte may have had up to three in UTF-8
        return text.decode() if unpacker.eof else None
    return None


def kept_source(trace: str | Path, file: str) -> str | None:
    """The text of a source file as the trace's recording kept it; None if it did not."""
    place = lines_path(trace)
    with contextlib.suppress(UnreadableTraceError):
        data = read_lines(place).sources.get(file) if place.is_file() else None
        return None if data is None else unpacked(data)
    return None


@dataclass(frozen=True)
class MovedLines:
    """Where the lines of a text are in a later one.

    Attributes:
        now: the number, from 1, that a line of the earlier text has in the later one; a line that is gone has none.
        changed: numbers in the later text of lines that are there, but rewritten.
    """

    now: Mapping[int, int]
    changed: frozenset[int] = frozenset()


def moved_lines(before: Sequence[str], after: Sequence[str]) -> MovedLines:
    """Find each line of a text in a later one; the order of lines stays the same."""
    same = _common(before, after)
    same_end = _common(before[same:][::-1], after[same:][::-1])
    now = {line: line for line in range(1, same + 1)}
    changed = []
    old, new = before[same : len(before) - same_end], after[same : len(after) - same_end]
    paired = 0
    if max(len(old), len(new)) > _MOST_COMPARED:
        old = new = []
    for kind, first, end, new_first, new_end in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind == "equal":
            pairs = list(zip(range(first, end), range(new_first, new_end), strict=True))
        elif kind == "replace" and paired + end - first <= _MOST_PAIRED:
            paired += end - first
            pairs = [(first + i, new_first + j) for i, j in _rewritten(old[first:end], new[new_first:new_end])]
            changed += [same + 1 + number for _, number in pairs]
        else:
            continue
        now.update((same + 1 + number, same + 1 + other) for number, other in pairs)
    shift = len(after) - len(before)
    now.update((line, line + shift) for line in range(len(before) - same_end + 1, len(before) + 1))
    return MovedLines(now, frozenset(changed))


def _common(before: Sequence[str], after: Sequence[str]) -> int:
    """How many lines both begin with."""
    pairs = zip(before, after, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after)))


def _rewritten(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of a line and the most similar of the next ones that are left."""
    begin = 0
    for number, line in enumerate(old):
        if not line.strip():
            continue
        matcher = difflib.SequenceMatcher(None, "", line.strip()[:_LONGEST_COMPARED], autojunk=False)
        best, best_ratio = None, _ALIKE
        for other in range(begin, min(begin + _NEAR, len(new))):
            matcher.set_seq1(new[other].strip()[:_LONGEST_COMPARED])
            if matcher.quick_ratio() >= best_ratio and (ratio := matcher.ratio()) >= best_ratio:
                best, best_ratio = other, ratio + 1e-9
        if best is not None:
            yield number, best
            begin = best + 1
