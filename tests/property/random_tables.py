"""Traces with tables of anything that their columns can hold: for exports that must read back to the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from hypothesis import strategies as st

from stepscope.trace import Metadata, Trace, TraceWarning, Window
from stepscope.trace.metadata import Device
from stepscope.trace.nesting import Nesting, nullable
from stepscope.trace.tables import REFERENCES, SCHEMAS, SLICE_TABLES, VOCABULARY

NAMES = (
    "aten::mm",
    "ProfilerStep#3",
    "stepscope.step#4 epoch 1",
    "train.py(12): step",
    "nn.Module: Linear_0",
    "cudaLaunchKernel",
    "cudaStreamSynchronize",
    "Memcpy HtoD (Pinned -> Device)",
    "ncclDevKernel_AllReduce",
    "enumerate(DataLoader)#_Iter.__next__",
    "",
    'hostile "quotes" \\ \x00\x1f\x7f',
    ',\n{"ph": "X", "ts": 1}',
    '"stepscopeExport": {',
    "\u202e right to left, \U0001f525 and \ud7ff",
)
TEXTS = (
    *NAMES,
    "[[2, 3], []]",
    "[[2,3]]",
    "null",
    "7",
    "07",
    "stream 7",
    "-1",
    "4294967295",
    "0",
    "cpu",
    "[132, 1, 1]",
)
NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**63), 2**63 - 1, 2**53 + 1]))
FLOATS = st.one_of(
    st.floats(0, 1), st.sampled_from([0.1 + 0.2, 1e-320, 1.7e308, float("nan"), float("inf"), float("-inf"), -0.0])
)
TIMES = st.one_of(st.integers(0, 9), st.integers(0, 10**7), st.sampled_from([10**12 + 1, 2**50 - 1]))
LANES = 4


def _values(table: str, column: str) -> st.SearchStrategy[Any]:
    dtype = SCHEMAS[table][column]
    if (table, column) in VOCABULARY:
        return st.sampled_from(VOCABULARY[table, column])
    if column == "name":
        return st.one_of(st.sampled_from(NAMES), st.text(max_size=8))
    if dtype is pl.String:
        return st.one_of(st.sampled_from(TEXTS), st.text(max_size=8))
    if dtype is pl.Float64:
        return FLOATS
    if dtype is pl.Boolean:
        return st.booleans()
    return st.integers(-(2**31), 2**31 - 1) if dtype is pl.Int32 else NUMBERS


@st.composite
def _table(draw: st.DrawFn, table: str, lanes: int, plain: bool) -> pl.DataFrame:
    rows = draw(st.integers(0, 5))
    references = {column for name, column, _ in REFERENCES if name == table}
    columns: dict[str, list[Any]] = {}
    for column in SCHEMAS[table]:
        if column in references:
            columns[column] = [None] * rows
        elif column in ("start_ns", "duration_ns"):
            columns[column] = draw(st.lists(TIMES, min_size=rows, max_size=rows))
        elif column == "lane":
            columns[column] = draw(st.lists(st.integers(0, lanes - 1), min_size=rows, max_size=rows))
        else:
            values = st.floats(0, 1) if plain and SCHEMAS[table][column] is pl.Float64 else _values(table, column)
            is_never_null = (table, column) in VOCABULARY or (plain and column in ("name", "value"))
            values = values if is_never_null else st.one_of(st.none(), values)
            columns[column] = draw(st.lists(values, min_size=rows, max_size=rows))
    frame = pl.DataFrame(columns, schema=dict(SCHEMAS[table]))
    by = [column for column in ("start_ns", "duration_ns") if column in frame.columns]
    frame = frame.sort(by, descending=[False, True][: len(by)], maintain_order=True)
    times = (frame[name].to_numpy() for name in ("lane", "start_ns", "duration_ns") if name in frame.columns)
    return frame.with_columns(parent=nullable(Nesting().add(*times))) if "parent" in references and rows else frame


@st.composite
def _lanes(draw: st.DrawFn) -> pl.DataFrame:
    count = draw(st.integers(1, LANES))
    texts = st.one_of(st.none(), st.sampled_from(["7", "stream 7", "0", "", "main of lane 1", "a\nb"]))
    rows = [
        {
            "lane": number,
            "kind": draw(st.sampled_from(VOCABULARY["lanes", "kind"])),
            "rank": draw(st.one_of(st.none(), st.integers(0, 9))),
            **{column: draw(texts) for column in ("process", "process_name", "thread", "name", "device", "queue")},
        }
        for number in range(count)
    ]
    return pl.DataFrame(rows, schema=dict(SCHEMAS["lanes"]))


@st.composite
def traces(draw: st.DrawFn, *, plain: bool = False) -> Trace:
    """A trace whose tables hold whatever they may, up to five rows each, and that passes `Trace.check`.

    Args:
        plain: with names, and numbers that are finite, as all profilers write them.
    """
    lanes = draw(_lanes())
    tables = {"lanes": lanes}
    for table in (*SLICE_TABLES, "memory", "counters"):
        tables[table] = draw(_table(table, lanes.height, plain))
    for table, column, target in REFERENCES:
        if table in ("launches", "device_work") and tables[target].height:
            rows = st.one_of(st.none(), st.integers(0, tables[target].height - 1))
            values = draw(st.lists(rows, min_size=tables[table].height, max_size=tables[table].height))
            tables[table] = tables[table].with_columns(pl.Series(column, values, dtype=pl.UInt32))
    if count := tables["operators"].height:
        ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
        pairs = draw(st.lists(ends, max_size=3))
        links = [("forward_backward", *pair) for pair in pairs]
        tables["links"] = pl.DataFrame(links, schema=dict(SCHEMAS["links"]), orient="row")
        if draw(st.booleans()):  # parents that do not follow from times
            kept = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
            parent = pl.select(pl.when(pl.Series(kept)).then(tables["operators"]["parent"])).to_series()
            tables["operators"] = tables["operators"].with_columns(parent=parent)
    trace = Trace.from_tables(
        tables, draw(_metadata()), draw(st.sampled_from([(), (TraceWarning("lost", 2, "lost"),)]))
    )
    trace.check()
    return trace


def _metadata() -> st.SearchStrategy[Metadata]:
    whole = st.one_of(st.none(), st.integers(0, 9))
    return st.builds(
        Metadata,
        format=st.sampled_from(["kineto", "xplane"]),
        rank=whole,
        world_size=whole,
        backend=st.sampled_from([None, "nccl"]),
        origin_unix_ns=st.sampled_from([None, 0, 1_751_410_836_000_000_123]),
        host=st.sampled_from([None, "node7"]),
        devices=st.sampled_from([(), (Device("0", "H100", 2**36, "9.0", 132), Device("TPU:1"))]),
        recorded=st.sampled_from([None, (), ("stacks", "shapes", "lines")]),
        window=st.sampled_from([None, Window(5, 100)]),
    )
