"""The schemas, and frames brought into their shape."""

from __future__ import annotations

import polars as pl
import pytest

from stepscope.trace.tables import REFERENCES, SCHEMAS, SLICE_TABLES, VOCABULARY, conform, empty


@pytest.mark.parametrize("table", SCHEMAS)
def test_an_empty_table_has_every_column(table: str) -> None:
    assert dict(empty(table).schema) == {name: dtype() for name, dtype in SCHEMAS[table].items()}
    assert conform(table, pl.DataFrame()).equals(empty(table))
    assert empty(table).height == 0


def test_what_is_missing_is_null_and_what_is_there_is_cast() -> None:
    given = pl.DataFrame({"name": ["a"], "duration_ns": [2.0], "start_ns": [1], "no_such_column": [True]})

    made = conform("operators", given)

    assert dict(made.schema) == dict(empty("operators").schema)
    filled = {name: value for name, value in made.row(0, named=True).items() if value is not None}
    assert filled == {"start_ns": 1, "duration_ns": 2, "name": "a"}


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(pl.exceptions.InvalidOperationError):
        conform("operators", pl.DataFrame({"start_ns": ["soon"]}))


def test_lists_of_tables_and_columns_agree_with_the_schemas() -> None:
    assert {(table, column) for table, column in VOCABULARY if column not in SCHEMAS[table]} == set()
    assert [entry for entry in REFERENCES if entry[1] not in SCHEMAS[entry[0]] or entry[2] not in SCHEMAS] == []
    assert set(SLICE_TABLES) == {table for table, schema in SCHEMAS.items() if "duration_ns" in schema}
