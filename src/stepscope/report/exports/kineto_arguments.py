"""The columns of each table as the arguments of Kineto's events, and what its reader would not read back from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgspec
import polars as pl

from stepscope.readers import names
from stepscope.readers.kineto import own
from stepscope.readers.kineto.fields import device_work_kind
from stepscope.readers.perfetto.meaning import category
from stepscope.readers.spill import one_spacing
from stepscope.report.exports.json_text import any_json, by_value, identifiers, members, numbers, quoted
from stepscope.trace.tables import SCHEMAS

_Column: TypeAlias = tuple[str | None, str | None, pl.Series | None, pl.Series]
"""Column, the argument that holds it, that as JSON text, and what the reader makes of it."""
_SYNCHRONISATION_WORDS: Final = {
    "queue_wait": "Stream Wait Event",
    "event": "Event Sync",
    "queue": "Stream Sync",
    "device": "Context Sync",
    "other": "Other",
}
_TYPE_OF_DEVICE: Final = 1
_DEEPEST: Final = 500


def category_of(table: str, kinds: pl.Series | None, height: int) -> pl.Series:
    """Category of each row's event."""
    plain = category(table, None)
    if kinds is None:
        return pl.Series([plain] * height, dtype=pl.String)
    return by_value(kinds, lambda kind: category(table, kind), pl.String).fill_null(plain)


def arguments_of(table: str, rows: pl.DataFrame) -> pl.Series:
    """The arguments of each row's event, a JSON object.

    A column that would be read back as something else stands there a second time, as "stepscope COLUMN"; where it
    would be read back as something and is null, "stepscope null" names it.
    """
    held = list(_HELD[table](rows)) if rows.height else []
    texts = {argument: text for _, argument, text, _ in held if argument is not None and text is not None}
    read = {column: follows for column, _, _, follows in held if column is not None}
    null = pl.Series("null", [""] * rows.height, dtype=pl.String)
    for column in SCHEMAS[table]:
        if column in own.UNWRITTEN:
            continue
        told = rows[column]
        follows = read.get(column, pl.Series([None] * rows.height, dtype=told.dtype))
        if column == "name":
            follows = told.fill_null("")
        differs = told.ne_missing(follows)
        if not differs.any():
            continue
        frame = pl.DataFrame({"differs": differs, "text": any_json(told), "null": null})
        is_null = pl.col("differs") & pl.col("text").is_null()
        texts[own.PREFIX + column] = frame.select(pl.when("differs").then("text"))["text"]
        null = frame.select(
            pl.when(is_null).then(pl.concat_str("null", pl.lit(f"{column},"))).otherwise("null").alias("null")
        )["null"]
    if (null != "").any():
        texts[own.NULL] = quoted(
            pl.DataFrame({"null": null}).select(pl.when(pl.col("null") != "").then("null"))["null"]
        )
    objects = members(texts) if texts else pl.Series(["{}"] * rows.height, dtype=pl.String)
    return _with_series(rows, objects) if table == "counters" else objects


def _whole(rows: pl.DataFrame, column: str, argument: str) -> _Column:
    return column, argument, numbers(rows[column]), rows[column]


def _text(rows: pl.DataFrame, column: str, argument: str) -> _Column:
    return column, argument, quoted(rows[column]), rows[column]


def _stack(rows: pl.DataFrame) -> _Column:
    stack = by_value(rows["call_stack"], lambda text: text or None, pl.String)
    return "call_stack", "Call stack", quoted(stack), stack


def _json(rows: pl.DataFrame, column: str, argument: str) -> _Column:
    """A column of JSON text as that JSON, where the reader would put it down in the same way."""
    kept = by_value(rows[column], lambda text: text if _is_kept(text) else None, pl.String)
    return column, argument, kept, kept


def _is_kept(text: str) -> bool:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    is_plain = value is not None and "{" not in text and text.count("[") < _DEEPEST
    return is_plain and one_spacing(text.encode()) == text.encode()


def _device(rows: pl.DataFrame) -> _Column:
    column = rows["device"]
    return "device", "device", identifiers(column), column.fill_null("?")


def _queue(rows: pl.DataFrame, column: str, argument: str, *, needed: bool = False) -> _Column:
    """A queue: the reader takes "stream " off, and two numbers stand for none."""
    follows = by_value(rows[column], _queue_read if needed else _real_queue_read, pl.String)
    return column, argument, identifiers(rows[column]), follows.fill_null("?") if needed else follows


def _queue_read(text: str) -> str:
    return text.removeprefix("stream ").strip()


def _real_queue_read(text: str) -> str | None:
    return None if text in ("-1", "4294967295") else _queue_read(text)


def _from_name(rows: pl.DataFrame, column: str, function: Callable[[str], Any]) -> _Column:
    follows = by_value(rows["name"].fill_null(""), function, SCHEMAS[_table_of(rows)][column])
    return column, None, None, follows


def _table_of(rows: pl.DataFrame) -> str:
    return next(table for table, schema in SCHEMAS.items() if list(schema) == rows.columns)


def _operators(rows: pl.DataFrame) -> Iterator[_Column]:
    yield _whole(rows, "external_id", "External id")
    yield _whole(rows, "sequence_number", "Sequence number")
    yield _whole(rows, "forward_thread", "Fwd thread id")
    yield _json(rows, "input_types", "Input type")
    yield _json(rows, "input_shapes", "Input Dims")
    yield _json(rows, "input_values", "Concrete Inputs")
    yield _stack(rows)


def _launches(rows: pl.DataFrame) -> Iterator[_Column]:
    yield _from_name(rows, "kind", names.launch_kind)
    yield _whole(rows, "external_id", "External id")
    yield _whole(rows, "correlation", "correlation")
    yield _whole(rows, "bytes", "bytes")


def _device_work(rows: pl.DataFrame) -> Iterator[_Column]:
    names_by_category = pl.concat_str("category", pl.col("name").fill_null(""), separator=" ")
    events = rows.select("name", category=category_of("device_work", rows["kind"], rows.height))
    follows = by_value(events.select(key=names_by_category)["key"], _kind_read, pl.String)
    yield "kind", None, None, follows
    yield _device(rows)
    yield _queue(rows, "queue", "stream", needed=True)
    yield _whole(rows, "external_id", "External id")
    yield _whole(rows, "correlation", "correlation")
    yield _whole(rows, "bytes", "bytes")
    yield _json(rows, "grid", "grid")
    yield _json(rows, "block", "block")
    registers = by_value(rows["registers"], lambda number: number if number > -(2**31) else None, pl.Int32)
    yield "registers", "registers per thread", numbers(registers), registers
    yield _whole(rows, "shared_memory_bytes", "shared memory")
    percent = rows["occupancy"] * 100
    finite = by_value(percent, lambda value: value if abs(value) < 1e300 else None, pl.Float64)
    yield "occupancy", "est. achieved occupancy %", numbers(finite), finite / 100
    blocks = rows["blocks_per_multiprocessor"]
    finite = by_value(blocks, lambda value: value if abs(value) < 1e300 else None, pl.Float64)
    yield "blocks_per_multiprocessor", "blocks per SM", numbers(finite), finite
    yield _text(rows, "collective", "Collective name")
    yield _text(rows, "group", "Process Group Name")
    yield _whole(rows, "group_size", "Group size")
    yield _whole(rows, "message_elements", "In msg nelems")
    yield _text(rows, "message_type", "dtype")


def _kind_read(category_and_name: str) -> str:
    category_read, _, name = category_and_name.partition(" ")
    return device_work_kind(category_read, name, None)


def _frames(rows: pl.DataFrame) -> Iterator[_Column]:
    yield _whole(rows, "python_id", "Python id")
    for place, column in enumerate(("file", "line", "function", "module")):
        yield _from_name(rows, column, lambda name, place=place: names.frame(name)[place])  # type: ignore[misc]


def _annotations(rows: pl.DataFrame) -> Iterator[_Column]:
    yield "kind", None, None, rows["kind"].fill_null("host")
    yield _from_name(rows, "step", lambda name: names.step_number(name, own=False))
    yield _stack(rows)


def _synchronisations(rows: pl.DataFrame) -> Iterator[_Column]:
    words = by_value(rows["kind"].fill_null("other"), lambda kind: _SYNCHRONISATION_WORDS[kind], pl.String)
    yield "kind", "cuda_sync_kind", quoted(words), rows["kind"].fill_null("other")
    yield _whole(rows, "correlation", "correlation")
    device = rows["device"]
    yield "device", "device", identifiers(device), device
    yield _queue(rows, "queue", "stream")
    yield _queue(rows, "waited_queue", "wait_on_stream")
    waited = by_value(rows["waited_correlation"], lambda number: None if number == -1 else number, pl.Int64)
    yield "waited_correlation", "wait_on_cuda_event_record_corr_id", numbers(waited), waited


def _memory(rows: pl.DataFrame) -> Iterator[_Column]:
    device = rows["device"].fill_null("cpu")
    numbered = by_value(device, lambda text: text if text.isdecimal() and text == str(int(text)) else None, pl.String)
    numbered = by_value(numbered, lambda text: text if len(text) < 19 else None, pl.String)
    yield "device", None, None, numbered.fill_null("cpu")
    yield None, "Device Type", by_value(numbered, lambda _: str(_TYPE_OF_DEVICE), pl.String).fill_null("0"), numbered
    yield None, "Device Id", numbered.fill_null("-1"), numbered
    yield _whole(rows, "address", "Addr")
    yield _whole(rows, "bytes", "Bytes")
    yield _whole(rows, "total_allocated", "Total Allocated")
    yield _whole(rows, "total_reserved", "Total Reserved")


def _counters(rows: pl.DataFrame) -> Iterator[_Column]:
    """The value stands under the name of the series, so `_with_series` writes it; here is what the reader finds."""
    frame = rows.select("series", "value").with_columns(text=_series_texts(rows))
    for column in ("series", "value"):
        yield column, None, None, frame.select(pl.when(pl.col("text").is_not_null()).then(column))[column]


def _series_texts(rows: pl.DataFrame) -> pl.Series:
    """Series and value as a member of a JSON object; null where that would not be read back."""
    series = by_value(rows["series"], lambda name: None if name.startswith(own.PREFIX) else json.dumps(name), pl.String)
    frame = pl.DataFrame({"series": series, "value": numbers(rows["value"])})
    return frame.select(pl.concat_str("series", "value", separator=": ").alias("text"))["text"]


def _with_series(rows: pl.DataFrame, others: pl.Series) -> pl.Series:
    """The arguments of counters: the series' member in front of the other ones."""
    frame = pl.DataFrame({"first": _series_texts(rows), "others": others.str.slice(1)})
    comma = pl.when(pl.col("others") == "}").then(pl.lit("")).otherwise(pl.lit(", "))
    both = pl.concat_str(pl.lit("{"), "first", comma, "others")
    return frame.select(pl.when(pl.col("first").is_not_null()).then(both).otherwise(others).alias("object"))["object"]


_HELD: Final[dict[str, Callable[[pl.DataFrame], Iterator[_Column]]]] = {
    "operators": _operators,
    "launches": _launches,
    "device_work": _device_work,
    "frames": _frames,
    "lines": lambda _: iter(()),
    "modules": lambda _: iter(()),
    "annotations": _annotations,
    "synchronisations": _synchronisations,
    "memory": _memory,
    "counters": _counters,
}
