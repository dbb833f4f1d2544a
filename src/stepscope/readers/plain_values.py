"""The plain values of an untrusted file, a pickle or JSON.

Pickles are read by the standard library's unpickler in Python, restricted to plain values. The one in C is six times as
fast, but cannot be limited: a file of nine bytes makes it allocate 16 GiB (a memo index of 2**30), and a key of tuples
nested a million deep overflows its stack, which ends the process.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

from stepscope.errors import NotATraceError
from stepscope.files import text_of
from stepscope.readers.source import current

PICKLES: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
Plain: TypeAlias = "dict[Any, Any] | list[Any] | tuple[Any, ...] | str | bytes | int | float | bool | None"

_PIECE_BYTES: Final = 1 << 20
"""Bytes of the pickle between two checks of time and memory; each byte may be a value."""
_LONGEST_NUMBER: Final = 16
_KEYS: Final = (str, int, float, bool, type(None))
_OBJECTS: Final = frozenset(b"cRi\x93\x81\x92obPQ\x82\x83\x84\x97\x98")
"""Opcodes that are rejected: GLOBAL, REDUCE, INST, STACK_GLOBAL, NEWOBJ, NEWOBJ_EX, OBJ, BUILD, persistent identifiers,
extensions and buffers.
"""


class _RefusedError(Exception):
    """Why a pickle is rejected, in words that follow "is a Python pickle that "."""


def plain_value(data: bytes, name: str, what_it_is: str) -> Plain:
    """The value of a file's pickle, or else of its JSON.

    Raises NotATraceError if it is damaged or holds more than plain values.
    """
    if data.startswith(PICKLES):
        return load(data, name)
    current().require("values", data.count(b"[") + data.count(b"{"))  # a byte or two each, but a hundred in memory
    try:
        value: Plain = json.loads(text_of(data))
    except (ValueError, RecursionError) as error:
        raise NotATraceError(f"{name} {what_it_is}, but cannot be read: {error}") from None
    return value


def load(data: bytes, name: str) -> Plain:
    """Return the value of a pickle of protocol 2 to 5.

    Raises NotATraceError if it is damaged or holds more than plain values.
    """
    unpickler = _PlainUnpickler(data)
    try:
        value: Plain = unpickler.load()
        unpickler.account()
    except (_RefusedError, EOFError) as error:
        raise NotATraceError(f"{name} is a Python pickle that {str(error) or 'is cut off'}") from None
    except (
        *(pickle.UnpicklingError, LookupError, struct.error, UnicodeDecodeError, AttributeError, TypeError, ValueError),
        *(OverflowError, MemoryError),
    ) as error:
        raise NotATraceError(
            f"{name} is a Python pickle that is damaged or cut off ({type(error).__name__}: {error})"
        ) from None
    return value


class _Pieces(io.RawIOBase):
    def __init__(self, data: bytes, each: Callable[[], None]) -> None:
        self._rest = memoryview(data)
        self._each = each

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._each()
        piece = self._rest[: min(len(buffer), _PIECE_BYTES)]
        buffer[: len(piece)] = piece
        self._rest = self._rest[len(piece) :]
        return len(piece)


class _PlainUnpickler(pickle._Unpickler):
    """The standard library's unpickler, restricted to plain values, which it counts."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}  # filled below
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BufferedReader(_Pieces(data, self.account), _PIECE_BYTES))
        self.containers = 0
        self._accounted = 0
        self._budget = current()

    def account(self) -> None:
        """Spend the values made since the last call; each costs one byte of the file, but up to a hundred of memory."""
        made = self.containers + len(self.memo)
        self._budget.spend("values", made - self._accounted)
        self._accounted = made
        self._budget.require("values", len(getattr(self, "stack", ())))
        self._budget.tick()

    def mark(self) -> None:
        self._budget.require("depth", len(self.metastack) + 1)
        pickle._Unpickler.dispatch[pickle.MARK[0]](self)  # type: ignore[arg-type]

    def skip_frame(self) -> None:
        self.read(8)

    def long1(self) -> None:
        length = self.read(1)[0]
        if length > _LONGEST_NUMBER:
            raise _RefusedError("contains a number of more than 16 bytes")
        self.stack.append(int.from_bytes(self.read(length), "little", signed=True))

    def dict_to_mark(self) -> None:
        values = self.pop_mark()
        self.stack.append({})
        self._fill(values)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def set_items(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, values: list[Any]) -> None:
        """Set items of the dictionary on top of the stack, from alternating keys and values."""
        target = self.stack[-1]
        if type(target) is not dict:
            raise _RefusedError("sets items of something that is not a dictionary")
        if len(values) % 2:
            raise _RefusedError("is damaged: a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in _KEYS:  # hashing a deeply nested tuple could overflow the interpreter's stack
                raise _RefusedError("has keys that are neither texts nor numbers")
            target[key] = value


def _refused(code: int) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        raise _RefusedError(
            "contains objects of Python classes, which could run code: not read; a memory snapshot contains none"
            if code in _OBJECTS
            else f"has an operation that memory snapshots do not use ({bytes([code])!r})"
        )

    return refuse


def _counted(operation: Callable[[Any], None]) -> Callable[[Any], None]:
    def count(unpickler: _PlainUnpickler) -> None:
        unpickler.containers += 1
        operation(unpickler)

    return count


_CONTAINERS: Final = b"}])tld\x85\x86\x87"
_OTHERS: Final = b"\x80(012aesuN\x88\x89KMJ\x8aG\x8cX\x8dCB\x8e\x94qrhj.\x95"
_OWN: Final[dict[int, Callable[[Any], None]]] = {
    pickle.MARK[0]: _PlainUnpickler.mark,
    pickle.FRAME[0]: _PlainUnpickler.skip_frame,
    pickle.LONG1[0]: _PlainUnpickler.long1,
    pickle.DICT[0]: _PlainUnpickler.dict_to_mark,
    pickle.SETITEM[0]: _PlainUnpickler.set_item,
    pickle.SETITEMS[0]: _PlainUnpickler.set_items,
}
_KNOWN: Final[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch, **_OWN}
_PlainUnpickler.dispatch.update({code: _refused(code) for code in range(256)})
_PlainUnpickler.dispatch.update({code: _KNOWN[code] for code in _OTHERS})
_PlainUnpickler.dispatch.update({code: _counted(_KNOWN[code]) for code in _CONTAINERS})
