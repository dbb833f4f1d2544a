"""Events as columns straight from the text, by a compiled scanner where there is one.

The scanner (native/scanner.cpp) reads only events of the ordinary shape, which mean the same to `events` and
`arguments`. It refuses a text with anything else, such as damage, and leaves kinds of events without a table of fields
here to `decode_events`. What it returns are numbers, and numbered values as written, which msgspec decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.gathering import Codes, StringPool, fitting
from stepscope.readers.kineto import arguments
from stepscope.readers.kineto.events import DECODE_ERRORS, Damage, Event, decode_events
from stepscope.trace.naming import is_annotation
from stepscope.trace.tables import EXCHANGE_COLUMNS

try:
    from stepscope.readers.kineto import _scanner
except ImportError:  # it was not built, and the Python reader serves
    _scanner = None  # type: ignore[assignment]

INTERFACE: Final = 2
"""What the scanner takes and returns; native/scanner.cpp has the same number."""
INSTANT: Final = "[memory]"
TABLES: Final[tuple[tuple[str, frozenset[str], type[msgspec.Struct]], ...]] = (
    ("operators", arguments.OPERATOR_CATEGORIES, arguments.Operator),
    ("launches", arguments.LAUNCH_CATEGORIES, arguments.Launch),
    ("device_work", arguments.DEVICE_CATEGORIES, arguments.DeviceWork),
    ("frames", arguments.FRAME_CATEGORIES, arguments.Frame),
    ("memory", frozenset(), arguments.Memory),
)
"""Tables, the categories of their events, and their arguments; last are those of instants."""
_TYPES: Final = (
    arguments.OptionalInt,
    arguments.OptionalNumber,
    str | None,
    arguments.OptionalIdentifier,
    msgspec.Raw,
    Any,
)
"""Types of fields, in the order of `FieldType` in native/scanner.cpp; an `Any` is left to the Python reader."""
_DTYPES: Final = (np.int64, np.float64)
NO_INTEGER: Final = np.iinfo(np.int64).min
_NO_CODE: Final = np.iinfo(np.uint32).max
_NULLS: Final[dict[np.dtype[Any], tuple[Any, pl.Series]]] = {
    np.dtype(np.int64): (np.int64(NO_INTEGER), pl.Series([None], dtype=pl.Int64)),
    np.dtype(np.uint32): (np.uint32(_NO_CODE), pl.Series([None], dtype=pl.UInt32)),
    np.dtype(np.float64): (None, pl.Series([None], dtype=pl.Float64)),
}
"""The value that stands for null, None for NaN, and a column of one null."""
_MOST_COMBINATIONS: Final = 2**18
_CodeArray: TypeAlias = npt.NDArray[np.uint32]
_Mask: TypeAlias = npt.NDArray[np.bool_]
XplaneEvents: TypeAlias = tuple[int, bytes, bytes, bytes, bytes, tuple[bytes, bytes, bytes, bytes, bytes]]
"""Bytes decoded; names, starts, durations and whether they last; role, event, tag, number and content of statistics."""
SqliteRows: TypeAlias = tuple[int, tuple[bytes | list[str | None], ...], int, int]
"""Number of rows, columns (Int64 with `NO_INTEGER` for null, or texts), and page and cell of the next row."""


class Coded(NamedTuple):
    """A column of numbered values; `_NO_CODE` for null.

    Attributes:
        in_order: whether every value is used, and they are in order of first use.
    """

    codes: _CodeArray
    values: Sequence[Any]
    in_order: bool = True

    def is_null(self) -> _Mask:
        return np.equal(self.codes, _NO_CODE)

    def filtered(self, mask: _Mask) -> Coded:
        return Coded(self.codes[mask], self.values, in_order=False)

    def tolist(self) -> list[Any]:
        values = [*self.values, None]
        return [values[code] for code in np.minimum(self.codes, len(self.values)).tolist()]

    def translated(self, function: Callable[[Sequence[Any]], Sequence[Any]], missing: Any, dtype: Any) -> Any:
        """Return an array with `function` of the values, which it is given once each, in order of first use."""
        table = np.full(len(self.values) + 1, missing, dtype)
        if self.in_order:
            table[:-1] = function(self.values)
        else:
            used = first_uses(self.codes, len(self.values))
            table[used] = function([self.values[code] for code in used.tolist()])
        return table[np.minimum(self.codes, len(self.values))]


_Column: TypeAlias = npt.NDArray[Any] | Coded | None
"""A field's values; None if all are null."""


def first_uses(codes: npt.NDArray[Any], size: int) -> npt.NDArray[np.int64]:
    """Return the different codes below `size` in order of first use."""
    rows = len(codes)
    first = np.full(size + 1, rows, np.int64)
    first[np.minimum(codes[::-1], size)] = np.arange(rows - 1, -1, -1)  # of equal places the last one stays
    used = np.flatnonzero(first[:size] < rows)
    return used[np.argsort(first[used])]


def combined(columns: Sequence[Coded]) -> Coded:
    """Return the combinations of several columns' values, None for null, in order of first use."""
    size = math.prod(len(column.values) + 1 for column in columns)
    if size > _MOST_COMBINATIONS:
        numbers = Codes()
        rows = zip(*[column.tolist() for column in columns], strict=True)
        return Coded(np.array([numbers[row] for row in rows], np.uint32), list(numbers))
    codes = np.zeros(len(columns[0].codes), np.int64)
    for column in columns:
        codes = codes * (len(column.values) + 1) + np.minimum(column.codes, len(column.values))
    used = first_uses(codes, size)
    number = np.zeros(size, np.uint32)
    number[used] = np.arange(len(used))
    values, rest = [], used
    for column in reversed(columns):
        rest, place = np.divmod(rest, len(column.values) + 1)
        values.append([column.values[each] if each < len(column.values) else None for each in place.tolist()])
    return Coded(number[codes], list(zip(*reversed(values), strict=True)))


class Rows:
    """Events of one table, phase and category as columns.

    Attributes:
        table: of the trace; empty for flows.
        start_ns: shape (n,).
        duration_ns: shape (n,); of flows their ids.
        names: of flows their categories.
        lanes: values are (process, thread), as `Event.pid` and `Event.tid`.
    """

    def __init__(
        self,
        table: str,
        start_ns: npt.NDArray[np.int64],
        duration_ns: npt.NDArray[np.int64],
        names: Coded,
        lanes: Coded,
        fields: dict[str, _Column],
    ) -> None:
        self.table = table
        self.start_ns = start_ns
        self.duration_ns = duration_ns
        self.names = names
        self.lanes = lanes
        self._fields = fields

    def __len__(self) -> int:
        return len(self.start_ns)

    def filtered(self, mask: _Mask) -> Rows:
        if mask.all():
            return self
        fields: dict[str, _Column] = {
            name: column.filtered(mask) if isinstance(column, Coded) else None if column is None else column[mask]
            for name, column in self._fields.items()
        }
        start_ns, duration_ns = self.start_ns[mask], self.duration_ns[mask]
        return Rows(self.table, start_ns, duration_ns, self.names.filtered(mask), self.lanes.filtered(mask), fields)

    def has(self, name: str) -> bool:
        """Whether a field of integers has any value."""
        return bool((self.integers(name) != NO_INTEGER).any())

    def coded(self, name: str) -> Coded:
        column = self._fields[name]
        return column if isinstance(column, Coded) else Coded(np.full(len(self), _NO_CODE, np.uint32), ())

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a field's values, `NO_INTEGER` for null; fractions are cut off."""
        column = self._fields[name]
        if column is None:
            return np.full(len(self), NO_INTEGER)
        if isinstance(column, Coded):
            return column.translated(_whole_numbers, NO_INTEGER, np.int64)  # type: ignore[no-any-return]
        if column.dtype == np.float64:
            missing = np.isnan(column)
            return np.where(missing, NO_INTEGER, np.where(missing, 0, column).astype(np.int64))
        return column

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return a field's values, NaN for null."""
        column = self._fields[name]
        return np.full(len(self), np.nan) if column is None else column  # type: ignore[return-value]


def _whole_numbers(values: Sequence[Any]) -> list[int]:
    numbers = map(arguments.integer, values)
    return [NO_INTEGER if number is None else number for number in numbers]


class Dialect:
    """Which events the scanner makes rows of, for `scan`; `tables` as in TABLES."""

    def __init__(self, tables: tuple[tuple[str, frozenset[str], type[msgspec.Struct]], ...]) -> None:
        self._tables = {category: table for table, categories, _ in tables for category in categories}
        self.fields = {table: msgspec.structs.fields(kind) for table, _, kind in tables}
        self.kinds = tuple(
            (
                tuple(category.encode() for category in sorted(categories)),
                tuple((field.encode_name.encode(), _TYPES.index(field.type)) for field in self.fields[table]),
            )
            for table, categories, _ in tables
        )

    def table(self, phase: bytes, category: str) -> str:
        return self._tables[category] if phase == b"X" else "memory" if phase == b"i" else ""


KINETO: Final = Dialect(TABLES)


@dataclass(frozen=True)
class Scan:
    """The events of a text, those of each kind as rows or decoded.

    Attributes:
        count: number of events, also of those that no table uses.
        end: where the bracket is that ends the list of events; None if it is not in the text.
        exact: whether the events were decoded with times as Decimal.
        complete: by category as written, in order of first use.
        flows: the rows of the phases "s" and "f".
        others: all other events.
    """

    count: int
    end: int | None
    exact: bool
    complete: dict[str, Rows | list[Event]]
    memory: Rows | None
    flows: dict[str, Rows]
    others: list[Event]

    def __len__(self) -> int:
        return self.count


def is_built() -> bool:
    """Whether there is a compiled scanner, and made from this version's source."""
    return _scanner is not None and _scanner.INTERFACE == INTERFACE


def scan(text: bytes, *, exact: bool, dialect: Dialect = KINETO) -> Scan | None:
    """Scan comma-separated events; None if they must be decoded in another way, or without a scanner."""
    if not is_built():
        return None
    found = _scanner.scan(text, exact, dialect.kinds, INSTANT.encode())
    if found is None:
        return None
    count, end, needs_exact, groups = found
    if needs_exact and not exact:
        return scan(text, exact=True, dialect=dialect)
    complete: dict[str, Rows | list[Event]] = {}
    flows: dict[str, Rows] = {}
    memory = None
    others: list[Event] = []
    try:
        for phase, written, spans, columns in groups:
            category = msgspec.json.decode(written, type=str) if written else ""
            rows = None if columns is None else _rows(dialect, dialect.table(phase, category.lower()), columns)
            if rows is None:
                events = _decoded(text, spans, exact=exact)
                if phase == b"X":
                    complete[category] = events
                else:
                    others += events
            elif phase == b"X":
                complete[category] = rows
            elif phase == b"i":
                memory = rows
            else:
                flows[phase.decode()] = rows
    except DECODE_ERRORS:
        return None
    return Scan(count, None if end < 0 else end, exact, complete, memory, flows, others)


def xplane_events(data: bytes, roles: bytes) -> XplaneEvents | None:
    """Decode the events of a line of an XLA profile; None if Python must do it, or without a scanner."""
    return _scanner.xplane_events(data, roles) if is_built() else None


def sqlite_rows(
    pages: bytes, page_size: int, usable: int, wanted: tuple[tuple[int, bool], ...], skip: int, most: int
) -> SqliteRows | None:
    """Decode up to `most` rows from leaf pages after the first `skip`; None if SQLite must do it, or without a scanner.

    Args:
        usable: bytes of a page without those reserved at its end.
        wanted: place in the record, in this order, and whether it is text.
    """
    return _scanner.sqlite_rows(pages, page_size, usable, wanted, skip, most) if is_built() else None


def _decoded(text: bytes, spans: bytes, *, exact: bool) -> list[Event]:
    bounds = np.frombuffer(spans, np.uint32).tolist()
    pieces = [text[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return decode_events(b",".join(pieces), exact=exact)


def _rows(dialect: Dialect, table: str, columns: tuple[Any, ...]) -> Rows | None:
    """Build the rows of a table; None for what only `Columns` sorts into tables."""
    start, duration, names, lanes, values = columns
    lane_type = tuple[int | str, int | str]
    named = _coded(names, str)
    if table == "operators" and any(map(is_annotation, named.values)):
        return None
    fields: dict[str, _Column] = {}
    for field, value in zip(dialect.fields.get(table, ()), values, strict=True):
        place = _TYPES.index(field.type)
        if value is None:
            fields[field.name] = None
        elif place < len(_DTYPES):
            fields[field.name] = np.frombuffer(value, _DTYPES[place])
        else:
            fields[field.name] = _coded(value, msgspec.Raw if field.type is msgspec.Raw else field.type)
    start_ns, duration_ns = np.frombuffer(start, np.int64), np.frombuffer(duration, np.int64)
    return Rows(table, start_ns, duration_ns, named, _coded(lanes, lane_type), fields)


def _coded(column: tuple[bytes, bytes], kind: Any) -> Coded:
    codes, values = column
    return Coded(np.frombuffer(codes, np.uint32), msgspec.json.decode(values, type=list[kind]))


class RowTables:
    """Makes the columns of each table from rows, equal to those that `Columns` makes from events."""

    def __init__(
        self, pool: StringPool, lane_of: dict[tuple[Any, Any], int], queues: dict[int, tuple[str, str]], damage: Damage
    ) -> None:
        self._pool = pool
        self._lane_of = lane_of
        self._queues = queues
        self._damage = damage

    def slices(self, category: str, rows: Rows) -> pl.DataFrame:
        frame = with_nulls(
            {
                "start_ns": rows.start_ns,
                "duration_ns": rows.duration_ns,
                "name": self.text(rows.names),
                "lane": self._lanes(rows),
                **self._arguments(category, rows),
            }
        )
        if rows.table == "device_work":
            registers = fitting("registers", frame["registers"], pl.Int32, self._damage)
            frame.replace_column(frame.get_column_index("registers"), registers)
        return frame

    def _arguments(self, category: str, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        if rows.table == "device_work":
            return self._device_work(category, rows)
        return {"operators": self._operators, "launches": self._launches, "frames": self._frames}[rows.table](rows)

    def memory(self, rows: Rows) -> pl.DataFrame:
        kinds, devices = rows.integers("device_type"), rows.integers("device_id")
        is_host = (kinds == 0) | (kinds == NO_INTEGER) | (devices == -1) | (devices == NO_INTEGER)
        different, place = np.unique(np.where(is_host, NO_INTEGER, devices), return_inverse=True)
        words = ["cpu" if each == NO_INTEGER else str(each) for each in different.tolist()]
        numbers = ("address", "bytes", "total_allocated", "total_reserved")
        return with_nulls(
            {
                "start_ns": rows.start_ns,
                "lane": self._lanes(rows),
                "device": np.array(self._pool.numbers(words), np.uint32)[place],
                **{name: rows.integers(name) for name in numbers},
            }
        )

    def flows(self, end: str, rows: Rows) -> pl.DataFrame:
        return with_nulls(
            {
                "start_ns": rows.start_ns,
                "lane": self._lanes(rows),
                "end": np.full(len(rows), self._pool.numbers([end])[0], np.uint32),
                "category": self.text(rows.names),
                "flow": rows.duration_ns,
            }
        )

    def _operators(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        return {
            **{name: rows.integers(name) for name in ("sequence_number", "forward_thread", "external_id")},
            **{name: self._raw(rows.coded(name)) for name in ("input_shapes", "input_types", "input_values")},
            "call_stack": self.text(rows.coded("call_stack"), lambda stack: stack or None),
        }

    def _launches(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        return {
            "correlation": rows.integers("correlation"),
            "kernel": self.text(rows.coded("kernel")),
            "external_id": _either(rows.integers("external_id"), rows.integers("old_external_id")),
            "bytes": rows.integers("bytes"),
        }

    def _frames(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        return {"python_id": rows.integers("python_id")}

    def _device_work(self, category: str, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        places = combined((rows.lanes, rows.coded("device"), rows.coded("stream")))
        copies = combined((rows.names, rows.coded("direction")))
        queues = Coded(places.codes, [_queue(lane, device, stream) for lane, device, stream in places.values])
        for (lane, _, _), queue in zip(places.values, queues.values, strict=True):
            self._queues.setdefault(self._lane_of[lane], queue)
        return {
            "kind": self.text(copies, lambda copy: arguments.device_work_kind(category, *copy)),
            "device": self.text(queues, lambda queue: queue[0]),
            "queue": self.text(queues, lambda queue: queue[1]),
            "external_id": _either(rows.integers("external_id"), rows.integers("old_external_id")),
            "bytes": _either(rows.integers("bytes"), rows.integers("size")),
            "registers": rows.integers("registers"),
            "shared_memory_bytes": rows.integers("shared_memory"),
            "occupancy": (pl.Series(rows.numbers("occupancy")) / 100).to_numpy(),  # Polars divides in its own way
            "correlation": rows.integers("correlation"),
            **{name: self._raw(rows.coded(name)) for name in ("grid", "block")},
            "blocks_per_multiprocessor": rows.numbers("blocks_per_multiprocessor"),
            **{
                name: self.text(rows.coded(name)) if kind == pl.String else rows.integers(name)
                for name, kind in EXCHANGE_COLUMNS.items()
            },
            "module": np.full(len(rows), _NO_CODE, np.uint32),  # the scanner leaves events that name one to `Columns`
        }

    def text(self, column: Coded, meaning: Callable[[Any], Any] | None = None) -> _CodeArray:
        """Return the pool's indices of a column's values, or of what they mean."""

        def numbers(values: Sequence[Any]) -> list[int]:
            return self._pool.numbers(values if meaning is None else map(meaning, values), _NO_CODE)

        return column.translated(numbers, _NO_CODE, np.uint32)  # type: ignore[no-any-return]

    def _raw(self, column: Coded) -> _CodeArray:
        return column.translated(self._pool.raw_numbers, _NO_CODE, np.uint32)  # type: ignore[no-any-return]

    def _lanes(self, rows: Rows) -> npt.NDArray[np.int32]:
        lane_of = self._lane_of
        return rows.lanes.translated(lambda keys: [lane_of[key] for key in keys], -1, np.int32)  # type: ignore[no-any-return]


def _queue(lane: tuple[int | str, int | str], device: Any, stream: Any) -> tuple[str, str]:
    process, thread = lane
    return str(process if device is None else device), arguments.queue(thread if stream is None else stream)


def _either(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.where(first == NO_INTEGER, second, first)


def with_nulls(columns: dict[str, npt.NDArray[Any]]) -> pl.DataFrame:
    """Build a frame in which `NO_INTEGER`, `_NO_CODE` and NaN are null."""
    return pl.DataFrame([_with_nulls(name, values) for name, values in columns.items()])


def _with_nulls(name: str, values: npt.NDArray[Any]) -> pl.Series:
    if values.dtype == np.int32:
        return pl.Series(name, values)
    missing, nulls = _NULLS[values.dtype]
    absent = np.isnan(values) if missing is None else values == missing
    count = int(np.count_nonzero(absent))
    column: pl.Series
    if count == len(values):  # much faster than to set each
        column = nulls.new_from_index(0, count).alias(name)
    else:
        column = pl.Series(name, values)
        if count:
            column = column.set(pl.Series(absent), None)
    return column
