"""Walk through a JSON document too large for memory, yielding single values and long lists in pieces.

Only brackets, quotation marks and commas are searched, vectorised per block; the caller decodes the text between them.
A position in the document is a path of object keys, with "[]" for an element of a list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.readers.source import ByteSource

Path: TypeAlias = tuple[str, ...]
Wanted: TypeAlias = Literal["enter", "whole", "pieces", "skip"]
"""How to handle a container: look inside, take it as one text, take it as pieces, or skip it."""

LARGEST_VALUE_BYTES: Final = 256 * 2**20
"""Size limit of a value taken whole, or of one element of a list taken in pieces."""
PIECE_BYTES: Final = 2**20
_OPENING, _CLOSING, _COMMA, _QUOTE_CLASS = 1, 2, 3, 4
_CLASSES: Final = np.zeros(256, np.int8)
_CLASSES[[ord("{"), ord("[")]] = _OPENING
_CLASSES[[ord("}"), ord("]")]] = _CLOSING
_CLASSES[ord(",")] = _COMMA
_CLASSES[ord('"')] = _QUOTE_CLASS
_IS_MARK: Final = (_CLASSES > 0).tobytes()
_CHANGES: Final = np.array([0, 1, -1, 0, 0], np.int8)
"""How each class changes the depth."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:\s*\Z')
_KEY_BYTES: Final = 512
_DEEPEST_ENTERED: Final = 32


class Part(NamedTuple):
    """A whole value, or some elements of a list with commas between them."""

    path: Path
    text: bytes


class _Marks(NamedTuple):
    """Brackets and commas outside strings: position, class, and the depth, counting the bracket itself."""

    places: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int8]
    depths: npt.NDArray[np.int64]


class _Structure:
    def __init__(self) -> None:
        self._inside_string = False
        self._escaped = False
        self._depth = 0

    def marks(self, block: bytes) -> _Marks:
        data = np.frombuffer(block, np.uint8)
        places = np.flatnonzero(np.frombuffer(block.translate(_IS_MARK), np.bool_))
        classes = _CLASSES.take(data.take(places))
        is_quote = classes == _QUOTE_CLASS
        if self._escaped or b"\\" in block:
            kept = ~is_quote
            kept[np.searchsorted(places, self._quotes(data))] = True
            places, classes, is_quote = places[kept], classes[kept], is_quote[kept]
        quotes = np.cumsum(is_quote, dtype=np.int32) + self._inside_string
        outside = np.flatnonzero(~is_quote & (quotes & 1 == 0))
        places, classes = places.take(outside), classes.take(outside)
        after = self._depth + np.cumsum(_CHANGES.take(classes), dtype=np.int64)
        self._inside_string = bool(quotes[-1] & 1) if len(quotes) else self._inside_string
        self._depth = int(after[-1]) if len(after) else self._depth
        return _Marks(places, classes, after + (classes == _CLOSING))

    def _quotes(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        quotes = np.flatnonzero(data == _QUOTE)
        backslashes = np.flatnonzero(data == _BACKSLASH)
        if self._escaped and len(quotes) and quotes[0] == 0:
            quotes = quotes[1:]
        if self._escaped and len(backslashes) and backslashes[0] == 0:
            backslashes = backslashes[1:]
        self._escaped = False
        if not len(backslashes):
            return quotes
        firsts = np.flatnonzero(np.append(True, np.diff(backslashes) > 1))
        lengths = np.diff(np.append(firsts, len(backslashes)))
        escaped = (backslashes[firsts] + lengths)[lengths % 2 == 1]
        self._escaped = bool(len(escaped)) and int(escaped[-1]) == len(data)
        return quotes[~np.isin(quotes, escaped)]


class Document:
    """A JSON document in parts; `closed` is set after the last bracket, `dropped` counts parts that are too long."""

    def __init__(self, source: ByteSource, wanted: Callable[[Path], Wanted]) -> None:
        self._source = source
        self._wanted = wanted
        self._path: list[str] = []
        self._in_list: list[bool] = []
        self._taken: Wanted | None = None
        self._taken_depth = 0
        self._texts: list[bytes] = []
        self._size = 0
        self._too_long = False
        self.closed = False
        self.dropped = 0

    def parts(self) -> Iterator[Part]:
        """Yield what `wanted` asked for; a container that it does not enter is one part or several."""
        structure, before = _Structure(), b""
        for block in self._source.blocks():
            yield from self._walk(block, before, structure.marks(block))
            before = (before + block)[-_KEY_BYTES:] if len(block) < _KEY_BYTES else block[-_KEY_BYTES:]
        if (
            self._taken == "pieces" and self._texts
        ):  # the file is truncated: only elements before the last comma are complete
            yield Part(tuple(self._path), b"".join(self._texts))

    def _walk(self, block: bytes, before: bytes, marks: _Marks) -> Iterator[Part]:
        begin = 0
        position = 0
        brackets = np.flatnonzero((marks.classes != _COMMA) & (marks.depths <= _DEEPEST_ENTERED))
        depths = marks.depths[brackets]
        while True:
            if self._taken is not None:
                position = _first_at_most(depths, position, self._taken_depth)
                if position == len(depths):
                    yield from self._take(block, begin, marks)
                    return
                end = int(marks.places[brackets[position]])
                position += 1
                yield from self._finish(block[begin:end], block[end : end + 1])
                continue
            if position >= len(brackets):
                return
            mark = brackets[position]
            position += 1
            place = int(marks.places[mark])
            if marks.classes[mark] == _OPENING:
                begin = self._open(block, before, place, int(marks.depths[mark]))
            else:
                self._close()

    def _open(self, block: bytes, before: bytes, place: int, depth: int) -> int:
        """Enter a container, or begin to take it; return where its text begins."""
        if self._in_list:
            self._path.append("[]" if self._in_list[-1] else _key(block, before, place))
        wanted = self._wanted(tuple(self._path)) if depth < _DEEPEST_ENTERED else "skip"
        is_list = block[place : place + 1] == b"["
        self._in_list.append(is_list)
        if wanted == "enter":
            return place
        self._taken = "skip" if wanted == "pieces" and not is_list else wanted
        self._taken_depth = depth
        self._texts, self._size, self._too_long = [], 0, False
        return place + 1 if wanted == "pieces" else place

    def _close(self) -> None:
        if self._in_list:
            self._in_list.pop()
            if self._path:
                self._path.pop()
            self.closed = not self._in_list

    def _take(self, block: bytes, begin: int, marks: _Marks) -> Iterator[Part]:
        if self._taken == "skip":
            return
        if self._taken == "pieces" and (self._size + len(block) - begin >= PIECE_BYTES or self._too_long):
            commas = (marks.classes == _COMMA) & (marks.depths == self._taken_depth) & (marks.places >= begin)
            if commas.any():
                last = int(marks.places[np.flatnonzero(commas)[-1]])
                if self._too_long:  # the dropped element ends at the first comma
                    begin = int(marks.places[np.flatnonzero(commas)[0]]) + 1
                if last > begin or self._texts:
                    yield Part(tuple(self._path), b"".join([*self._texts, block[begin:last]]))
                self._texts, self._size, self._too_long = [], 0, False
                begin = last + 1
        self._keep(block[begin:])

    def _keep(self, text: bytes) -> None:
        if self._too_long:
            return
        self._texts.append(text)
        self._size += len(text)
        if self._size > LARGEST_VALUE_BYTES:
            self.dropped += 1
            self._texts, self._size, self._too_long = [], 0, True

    def _finish(self, text: bytes, bracket: bytes) -> Iterator[Part]:
        if self._taken == "whole":
            self._keep(text + bracket)
        elif self._taken == "pieces":
            self._keep(text)
        if self._taken != "skip" and self._texts and not self._too_long:
            yield Part(tuple(self._path), b"".join(self._texts))
        self._taken, self._texts = None, []
        self._close()


def _first_at_most(depths: npt.NDArray[np.int64], position: int, limit: int) -> int:
    """The first position from `position` on with a depth of at most `limit`, or the length."""
    step = 64
    while position < len(depths):
        found = np.flatnonzero(depths[position : position + step] <= limit)
        if len(found):
            return position + int(found[0])
        position += step
        step *= 2
    return len(depths)


def _key(block: bytes, before: bytes, place: int) -> str:
    text = block[max(0, place - _KEY_BYTES) : place]
    if place < _KEY_BYTES:
        text = before + text
    found = _KEY.search(text)
    return found[1].decode("utf-8", "replace") if found else ""


def elements(text: bytes) -> Iterator[bytes]:
    structure, begin = _Structure(), 0
    for first in range(0, len(text), PIECE_BYTES):
        marks = structure.marks(text[first : first + PIECE_BYTES])
        for place in marks.places[(marks.classes == _COMMA) & (marks.depths == 0)].tolist():
            yield text[begin : first + place]
            begin = first + place + 1
    yield text[begin:]


Time = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Handle(msgspec.Struct, gc=False, frozen=True):
    handle: int = 0


class Correlation(msgspec.Struct, gc=False, frozen=True):
    internal: int = 0
    external: int | None = None


class Size(msgspec.Struct, gc=False, frozen=True):
    x: int = 1
    y: int = 1
    z: int = 1


class Dispatch(msgspec.Struct, gc=False, frozen=True):
    agent_id: Handle = Handle()
    queue_id: Handle = Handle()
    kernel_id: int = 0
    group_segment_size: int | None = None
    workgroup_size: Size = Size()
    grid_size: Size = Size()


class Record(msgspec.Struct, gc=False):
    """An entry of `buffer_records`: a call, a kernel or a copy."""

    start_timestamp: Time
    end_timestamp: Time
    kind: int = -1
    operation: int = -1
    thread_id: int = 0
    correlation_id: Correlation = Correlation()
    stream_id: Handle | None = None
    dispatch_info: Dispatch | None = None
    src_agent_id: Handle = Handle()
    dst_agent_id: Handle = Handle()
    bytes: int | None = None


class Kernel(msgspec.Struct, gc=False):
    """An entry of `kernel_symbols`."""

    kernel_id: int = 0
    kernel_name: str = ""
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    arch_vgpr_count: int | None = None

    @property
    def name(self) -> str:
        """The name in the form that the user asked the tool for."""
        return self.formatted_kernel_name or self.demangled_kernel_name or self.kernel_name.removesuffix(".kd")


class Memory(msgspec.Struct, gc=False):
    heap_type: int = 0
    size_in_bytes: int = 0


class Agent(msgspec.Struct, gc=False):
    """An entry of `agents`: a processor; type 2 is a GPU."""

    id: Handle = Handle()
    type: int = 0
    node_id: int = 0
    cu_count: int | None = None
    gfx_target_version: int | None = None
    name: str = ""
    product_name: str = ""
    mem_banks: list[Memory] = []


class KindNames(msgspec.Struct, gc=False):
    """An entry of `strings.buffer_records`."""

    kind: str = ""
    operations: list[str] = []


class Message(msgspec.Struct, gc=False):
    """An entry of `strings.marker_api`: the message of the marker with this correlation number."""

    key: int
    value: str


_RECORDS: Final = msgspec.json.Decoder(list[Record])
_RECORD: Final = msgspec.json.Decoder(Record)


def decode_records(text: bytes, damage: Counter[str]) -> list[Record]:
    """Decode the records of a piece of a list; unreadable ones are skipped and counted."""
    if not text.strip():
        return []
    try:
        return _RECORDS.decode(b"[%b]" % text)
    except DECODE_ERRORS:
        pass
    found = []
    for element in elements(text):
        try:
            found.append(_RECORD.decode(element))
        except DECODE_ERRORS:
            damage["damaged_record"] += 1
    return found


def decode_entries(text: bytes, kind: type[Any], damage: Counter[str]) -> list[Any]:
    """Decode the entries of a list, or the values of an object; unreadable ones are skipped and counted."""
    try:
        found = msgspec.json.decode(text, type=list[kind] | dict[str, kind])  # type: ignore[valid-type]
        return list(found.values()) if isinstance(found, dict) else found
    except DECODE_ERRORS:
        pass
    result = []
    for element in elements(text.strip()[1:-1]):
        try:
            result.append(msgspec.json.decode(element, type=kind))
        except DECODE_ERRORS:
            damage["damaged_description"] += 1
    return result
