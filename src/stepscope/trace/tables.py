"""The tables of a trace: their columns, types and vocabulary, and what must hold of them; and tables as CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import polars as pl

from stepscope.errors import InconsistentTraceError

Schema: TypeAlias = Mapping[str, type[pl.DataType]]

_SLICE: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "name": pl.String,
    "lane": pl.Int32,
}

LANE_KINDS: Final = ("host_thread", "queue", "other")
LAUNCH_KINDS: Final = (
    "launch",  # launches one kernel
    "graph_launch",  # launches many kernels at once
    "copy",
    "set",
    "synchronise",  # the host waits for a device
    "queue_wait",  # a queue waits for another one; the host continues
    "event",  # an event is recorded or created
    "allocate",
    "compile",
    "other",
)
DEVICE_WORK_KINDS: Final = ("compute", "copy_in", "copy_out", "copy_on_device", "set", "communication", "other")
ANNOTATION_KINDS: Final = ("host", "device", "overhead", "profiler")
SYNCHRONISATION_KINDS: Final = ("queue_wait", "event", "queue", "device", "other")
LINK_KINDS: Final = ("forward_backward",)

EXCHANGE_COLUMNS: Final[Schema] = {
    "collective": pl.String,
    "group": pl.String,
    "group_size": pl.Int64,
    "group_ranks": pl.String,  # as the profiler lists them, "[0, 1, 2, 3]"; of many, the first ones and "..."
    "group_description": pl.String,
    "source_rank": pl.Int64,  # of a receive: who sends
    "target_rank": pl.Int64,  # of a send: who receives
    "message_elements": pl.Int64,
    "message_type": pl.String,
}
"""What device work that communicates exchanges, and with whom."""

SCHEMAS: Final[Mapping[str, Schema]] = {
    # Where things happen. `lane` is the row's own number, which the other tables' `lane` refers to.
    "lanes": {
        "lane": pl.Int32,
        "kind": pl.String,  # one of LANE_KINDS
        "process": pl.String,
        "process_name": pl.String,
        "thread": pl.String,
        "name": pl.String,
        "rank": pl.Int32,
        "device": pl.String,  # of a queue
        "queue": pl.String,  # of a queue
    },
    # Framework operators, such as aten::mm.
    "operators": {
        **_SLICE,
        "parent": pl.UInt32,  # row in operators: the innermost operator of the same lane around this one
        "sequence_number": pl.Int64,
        "forward_thread": pl.Int64,
        "external_id": pl.Int64,
        "input_shapes": pl.String,  # JSON
        "input_types": pl.String,  # JSON
        "input_values": pl.String,  # JSON: inputs other than tensors, as text; "" for tensors
        "call_stack": pl.String,  # "file(line): function", innermost first, separated by ";"
        "scope": pl.String,  # in compiled code: path of names, such as "jit(step)/jvp(Model)/dense/dot"
        "source_file": pl.String,  # the user's statement that caused it, if lines were recorded
        "source_line": pl.Int32,
        "source_function": pl.String,
    },
    # Calls of a device's API on the host.
    "launches": {
        **_SLICE,
        "kind": pl.String,  # one of LAUNCH_KINDS
        "correlation": pl.Int64,
        "external_id": pl.Int64,
        "bytes": pl.Int64,
        "operator": pl.UInt32,  # row in operators: the innermost operator around the call
        "kernel": pl.String,  # name of the kernel that the call launches, also while a graph is captured
    },
    # Work of a device.
    "device_work": {
        **_SLICE,
        "kind": pl.String,  # one of DEVICE_WORK_KINDS
        "device": pl.String,
        "queue": pl.String,
        "correlation": pl.Int64,
        "launch": pl.UInt32,  # row in launches: the call that launched this work
        "external_id": pl.Int64,
        "bytes": pl.Int64,
        "grid": pl.String,  # "x,y,z"
        "block": pl.String,  # "x,y,z"
        "registers": pl.Int32,  # per thread
        "shared_memory_bytes": pl.Int64,
        "occupancy": pl.Float64,  # estimated, 0 to 1
        "blocks_per_multiprocessor": pl.Float64,
        **EXCHANGE_COLUMNS,
        "call_stack": pl.String,  # as in operators; for compiled code, its source
        "scope": pl.String,  # as in operators
        "module": pl.String,  # module or region that an annotation of the graph's node names
    },
    # Python frames.
    "frames": {
        **_SLICE,
        "parent": pl.UInt32,  # row in frames
        "python_id": pl.Int64,
        "file": pl.String,
        "line": pl.Int32,  # of the function's definition, which is what the profiler records
        "function": pl.String,
        "module": pl.String,  # of an nn.Module call
    },
    # The line of the user's code that a thread was at, if lines were recorded; rows of a lane do not overlap.
    "lines": {**_SLICE, "file": pl.String, "line": pl.Int32, "function": pl.String},
    # Calls of nn.Modules recorded by stepscope: `name` is the outermost module's class and the qualified name.
    "modules": {
        **_SLICE,
        "evaluates": pl.Boolean,  # whether the module was in evaluation mode
    },
    # User and step annotations, on the host and on devices, and the profiler's own overhead.
    "annotations": {
        **_SLICE,
        "kind": pl.String,  # one of ANNOTATION_KINDS
        "step": pl.Int64,  # of a step annotation
        "call_stack": pl.String,  # as in operators
    },
    # A device's own record of a wait.
    "synchronisations": {
        **_SLICE,
        "kind": pl.String,  # one of SYNCHRONISATION_KINDS
        "correlation": pl.Int64,
        "device": pl.String,
        "queue": pl.String,
        "waited_queue": pl.String,
        "waited_correlation": pl.Int64,  # of the event's record call
    },
    "memory": {
        "start_ns": pl.Int64,
        "lane": pl.Int32,
        "device": pl.String,  # "cpu" or the device's number
        "address": pl.Int64,
        "bytes": pl.Int64,  # negative when freed
        "total_allocated": pl.Int64,
        "total_reserved": pl.Int64,
        "call_stack": pl.String,  # as in operators; in memory snapshots
    },
    "counters": {"start_ns": pl.Int64, "lane": pl.Int32, "name": pl.String, "series": pl.String, "value": pl.Float64},
    # Links between slices; for "forward_backward", both ends are rows in operators.
    "links": {
        "kind": pl.String,  # one of LINK_KINDS
        "source": pl.UInt32,
        "target": pl.UInt32,
    },
}

VOCABULARY: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("lanes", "kind"): LANE_KINDS,
    ("launches", "kind"): LAUNCH_KINDS,
    ("device_work", "kind"): DEVICE_WORK_KINDS,
    ("annotations", "kind"): ANNOTATION_KINDS,
    ("synchronisations", "kind"): SYNCHRONISATION_KINDS,
    ("links", "kind"): LINK_KINDS,
}

REFERENCES: Final[tuple[tuple[str, str, str], ...]] = (
    ("operators", "parent", "operators"),
    ("launches", "operator", "operators"),
    ("device_work", "launch", "launches"),
    ("frames", "parent", "frames"),
    ("links", "source", "operators"),
    ("links", "target", "operators"),
)
"""(table, column, table that the column's row numbers refer to)."""

SLICE_TABLES: Final = (
    "operators",
    "launches",
    "device_work",
    "frames",
    "lines",
    "modules",
    "annotations",
    "synchronisations",
)


def empty(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=dict(SCHEMAS[table]))


def conform(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with exactly the table's columns, in order and cast; missing columns are null.

    Numbers that do not fit the column become null.
    """
    columns = []
    for name, dtype in SCHEMAS[table].items():
        is_number = name in frame.columns and frame.schema[name].is_numeric()
        column = (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype, strict=not is_number)
        columns.append(column.alias(name))
    return frame.select(columns) if frame.width else empty(table)


def rows_frame(rows: Sequence[Sequence[Any]], schema: Schema) -> pl.DataFrame:
    """Return rows as a frame; values that do not fit or match their column's type become null."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pl.DataFrame(
        {
            name: pl.Series(name, values, dtype=dtype, strict=False)
            for (name, dtype), values in zip(schema.items(), columns, strict=True)
        }
    )


_FORMULA: Final = r"^(?:\s*[=+\-@＝＋－＠]|[\t\r\n])"
_TEXT: Final = (pl.String, pl.Categorical, pl.Enum)


def csv_text(frame: pl.DataFrame, *, raw: bool = False, header: bool = True) -> bytes:
    """Return the table as CSV in UTF-8.

    Text that a spreadsheet would interpret as a formula is prefixed with an apostrophe, the spreadsheet's mark for
    text. Names come from untrusted traces, and a formula can run programs and send other cells away.

    Args:
        raw: leave every text as it is.
        header: include a row with the names of the columns.
    """
    if not raw:
        texts = [name for name, dtype in frame.schema.items() if dtype in _TEXT]
        frame = frame.with_columns(_as_text(pl.col(name).cast(pl.String)).alias(name) for name in texts)
        names = pl.Series("name", frame.columns, pl.String).to_frame().select(name=_as_text(pl.col("name")))
        frame = frame.rename(dict(zip(frame.columns, names["name"], strict=True)))
    return frame.write_csv(include_header=header).encode()


def _as_text(text: pl.Expr) -> pl.Expr:
    return pl.when(text.str.contains(_FORMULA)).then(pl.lit("'") + text).otherwise(text)


def check(table: Callable[[str], pl.DataFrame]) -> None:
    """Raise `InconsistentTraceError`, naming the table, at the first broken invariant of the tables that this gives.

    The invariants are: the schema's columns and types; values within the vocabulary; lanes that exist; tables sorted by
    start; no negative time; row references that resolve; and a parent on the same lane that is open when its child
    starts. Device work may start before its launch was called, since the clocks of host and device may differ.
    """
    for name, schema in SCHEMAS.items():
        frame = table(name)
        if dict(frame.schema) != {column: dtype() for column, dtype in schema.items()}:
            raise InconsistentTraceError(f"table {name} does not have the columns of its schema: {dict(frame.schema)}")
        _check_times(name, frame)
        _check_lanes(name, frame, table("lanes").height)
    for (name, column), words in VOCABULARY.items():
        foreign = table(name).filter(~pl.col(column).is_in(words) | pl.col(column).is_null())
        _fail_if(foreign.height > 0, name, f"{column} contains words outside its vocabulary", foreign)
    for name, column, target in REFERENCES:
        beyond = table(name).filter(pl.col(column) >= table(target).height)
        _fail_if(beyond.height > 0, name, f"{column} points past the end of {target}", beyond)
    for name in ("operators", "frames"):
        _check_nesting(name, table(name))


def _fail_if(broken: bool, table: str, what: str, rows: pl.DataFrame) -> None:
    if broken:
        raise InconsistentTraceError(f"table {table}: {what}, for example {rows.row(0, named=True)}")


def _check_times(name: str, frame: pl.DataFrame) -> None:
    if "start_ns" not in frame.columns or frame.is_empty():
        return
    if not frame["start_ns"].is_sorted():
        raise InconsistentTraceError(f"table {name} is not sorted by start_ns")
    missing = frame.filter(pl.col("start_ns").is_null() | (pl.col("start_ns") < 0))
    _fail_if(missing.height > 0, name, "start_ns is missing or negative", missing)
    if name in SLICE_TABLES:
        negative = frame.filter(pl.col("duration_ns").is_null() | (pl.col("duration_ns") < 0))
        _fail_if(negative.height > 0, name, "duration_ns is missing or negative", negative)


def _check_lanes(name: str, frame: pl.DataFrame, lanes: int) -> None:
    if "lane" not in frame.columns:
        return
    if name == "lanes":
        if frame["lane"].to_list() != list(range(frame.height)):
            raise InconsistentTraceError("table lanes is not numbered by row")
        return
    lost = frame.filter(pl.col("lane").is_null() | (pl.col("lane") < 0) | (pl.col("lane") >= lanes))
    _fail_if(lost.height > 0, name, "lane is missing or does not exist", lost)


def _check_nesting(name: str, frame: pl.DataFrame) -> None:
    children = frame.filter(pl.col("parent").is_not_null())
    around = frame[children["parent"]]
    pairs = pl.DataFrame(
        {
            "start_ns": children["start_ns"],
            "parent": children["parent"],
            "same_lane": children["lane"] == around["lane"],
            "begins_after": around["start_ns"] <= children["start_ns"],
            "inside": around["start_ns"] + around["duration_ns"] >= children["start_ns"],
        }
    )
    broken = pairs.filter(~(pl.col("same_lane") & pl.col("begins_after") & pl.col("inside")))
    _fail_if(broken.height > 0, name, "a parent is not open on its child's lane when the child starts", broken)
