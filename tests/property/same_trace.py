"""Whether two traces are the same, told table by table and column by column."""

from __future__ import annotations

from dataclasses import replace

from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS


def assert_same(found: Trace, wanted: Trace) -> None:
    """Same tables, warnings and metadata, but for what is the file's own: its path and how many events it has."""
    for table in SCHEMAS:
        left, right = found.table(table), wanted.table(table)
        assert left.height == right.height, table
        for column in right.columns:
            differs = left[column].ne_missing(right[column])
            row = differs.arg_max() or 0
            assert not differs.any(), (table, column, row, left[column][row], right[column][row])
    metadata = replace(
        found.metadata,
        path=wanted.metadata.path,
        events=wanted.metadata.events,
        complete_events=wanted.metadata.complete_events,
    )
    assert metadata == wanted.metadata, (metadata, wanted.metadata)
    assert found.warnings == wanted.warnings, (found.warnings, wanted.warnings)
