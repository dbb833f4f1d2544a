"""The trace: tables with their promises."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest

from stepscope.errors import InconsistentTraceError
from stepscope.trace import Metadata, Trace
from stepscope.trace.tables import SCHEMAS, empty
from tests.unit.recording import Recording

Tables = dict[str, pl.DataFrame]


def sound_tables() -> Tables:
    recording = Recording()
    recording.frame(0, 100, "train.py(3): step")
    recording.operator(10, 50, "aten::linear")
    recording.operator(12, 20, "aten::addmm")
    recording.annotation(5, 10, "loading")
    recording.launched(14, 20, 30, "gemm", 101)
    recording.allocation(13, 8)
    trace = recording.trace()
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["links"] = pl.DataFrame([("forward_backward", 0, 1)], schema=dict(SCHEMAS["links"]), orient="row")
    return tables


def test_an_empty_trace_is_sound() -> None:
    trace = Trace.from_tables({})

    trace.check()

    assert {name: trace.table(name).height for name in SCHEMAS} == dict.fromkeys(SCHEMAS, 0)
    assert trace.metadata == Metadata()
    assert trace.warnings == ()


def test_every_table_has_its_property() -> None:
    trace = Trace.from_tables(sound_tables())

    assert all(getattr(trace, name) is trace.table(name) for name in SCHEMAS)
    assert trace.scan("operators").select("name").collect()["name"].to_list() == ["aten::linear", "aten::addmm"]


def test_unknown_tables() -> None:
    with pytest.raises(ValueError, match="no such tables: kernels, ops"):
        Trace.from_tables({"ops": pl.DataFrame(), "kernels": pl.DataFrame()})
    with pytest.raises(KeyError, match="ops"):
        Trace.from_tables({}).table("ops")


def test_a_table_is_loaded_once_and_only_when_asked_for() -> None:
    asked = []

    def load(table: str) -> pl.LazyFrame:
        asked.append(table)
        return empty(table).lazy()

    trace = Trace(Metadata(), (), load)
    assert asked == []
    assert trace.frames is trace.frames
    assert asked == ["frames"]


def set_in(table: str, row: int, **values: object) -> Callable[[Tables], None]:
    """A change of single values of one row."""

    def change(tables: Tables) -> None:
        frame = tables[table]
        at = pl.int_range(pl.len()) == row
        for column, value in values.items():
            cast = pl.lit(value).cast(SCHEMAS[table][column])
            frame = frame.with_columns(pl.when(at).then(cast).otherwise(pl.col(column)).alias(column))
        tables[table] = frame

    return change


BROKEN: dict[str, tuple[Callable[[Tables], None], str]] = {
    "unsorted": (set_in("operators", 0, start_ns=13), "table operators is not sorted by start_ns"),
    "before the beginning": (set_in("frames", 0, start_ns=-1), "table frames: start_ns is missing or negative"),
    "negative length": (set_in("device_work", 0, duration_ns=-1), "table device_work: duration_ns is missing or neg"),
    "without length": (set_in("launches", 0, duration_ns=None), "table launches: duration_ns is missing or negative"),
    "memory before the beginning": (set_in("memory", 0, start_ns=-5), "table memory: start_ns is missing or negative"),
    "lane that is not there": (set_in("operators", 1, lane=9), "table operators: lane is missing or does not exist"),
    "without lane": (set_in("annotations", 0, lane=None), "table annotations: lane is missing or does not exist"),
    "lanes misnumbered": (set_in("lanes", 0, lane=1), "table lanes is not numbered by row"),
    "foreign kind of lane": (set_in("lanes", 1, kind="thread"), "table lanes: kind contains words"),
    "foreign kind of launch": (set_in("launches", 0, kind="run"), "table launches: kind contains words"),
    "foreign kind of work": (set_in("device_work", 0, kind=None), "table device_work: kind contains words"),
    "foreign kind of annotation": (set_in("annotations", 0, kind="user"), "table annotations: kind contains words"),
    "foreign kind of link": (set_in("links", 0, kind="launch"), "table links: kind contains words"),
    "parent that is not there": (set_in("operators", 1, parent=7), "table operators: parent points past the end of op"),
    "launch that is not there": (set_in("device_work", 0, launch=7), "table device_work: launch points past the end"),
    "operator that is not there": (set_in("launches", 0, operator=7), "table launches: operator points past the end"),
    "link to nowhere": (set_in("links", 0, target=7), "table links: target points past the end of operators"),
    "parent that has ended": (set_in("operators", 0, duration_ns=1), "table operators: a parent is not open on its ch"),
    "parent that begins later": (set_in("operators", 0, parent=1), "table operators: a parent is not open on its chi"),
    "parent on another lane": (set_in("operators", 0, lane=1), "table operators: a parent is not open on its child's"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_promises_are_found(change: Callable[[Tables], None], message: str) -> None:
    tables = sound_tables()
    Trace.from_tables(tables).check()

    change(tables)

    with pytest.raises(InconsistentTraceError) as raised:
        Trace.from_tables(tables).check()
    assert str(raised.value).startswith(message)


def test_other_columns_than_the_schema_are_found() -> None:
    trace = Trace(Metadata(), (), lambda table: empty(table).drop("name" if table == "frames" else []).lazy())

    with pytest.raises(InconsistentTraceError, match="table frames does not have the columns of its schema"):
        trace.check()


def test_a_notebook_shows_rows_and_escapes_names() -> None:
    page = Trace.from_tables(sound_tables(), Metadata(path="<b>.json", format="kineto"))._repr_html_()

    assert "<b>kineto trace &lt;b&gt;.json</b>" in page
    assert "operators 2," in page
