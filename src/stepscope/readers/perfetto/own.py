"""A file that `stepscope export` wrote: its header, and the numbers of rows that times do not tell."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.gathering import Gathering
from stepscope.readers.kineto import own as chrome
from stepscope.readers.kineto.events import DECODE_ERRORS
from stepscope.readers.kineto.restoring import lane_columns, restore_rows
from stepscope.readers.perfetto.meaning import CATEGORIES, HEADER_NAME, ROWS_NAME
from stepscope.readers.perfetto.sequences import Tracks
from stepscope.readers.spill import StringPool
from stepscope.trace.model import Metadata, TraceWarning
from stepscope.trace.store import StoreWriter

_TABLES: Final = {category: table for table, words in CATEGORIES.items() for category in words.values()}


class Header(msgspec.Struct):
    """What the header says of the lanes; the rest of it is that of a Chrome trace of our own."""

    lanes: list[chrome.Lane] = []
    tracks: list[tuple[int, int]] = []
    counters: list[tuple[int, int, str | None, str | None]] = []


class OwnFile:
    """The header of a file of our own, as soon as it was seen; nothing of other files.

    Attributes:
        is_own: whether there was one.
        is_whole: whether the numbers of rows in the file are those of the trace that is read.
    """

    def __init__(self, gathering: Gathering, *, whole: bool) -> None:
        self.is_own = False
        self._whole = whole
        self._gathering = gathering
        self._damage: Counter[str] = gathering.damage
        self._header: Any = None
        self._lanes: dict[int, int] = {}
        self._counters: dict[int, tuple[str | None, str | None]] = {}
        self._rows: list[chrome.Rows] = []

    @property
    def is_whole(self) -> bool:
        return self.is_own and self._whole

    def take(self, name: str | None, text: Callable[[], str]) -> bool:
        """Take an instant if it is one of those that only our own files have."""
        if name == HEADER_NAME:
            if not self.is_own:
                self._take_header(text())
            return True
        if name == ROWS_NAME and self.is_own:
            self._rows += chrome.decoded([text().encode()], chrome.Rows, self._damage) if self._whole else []
            return True
        return False

    def _take_header(self, text: str) -> None:
        try:
            header = msgspec.json.decode(text, type=Header)
            self._header = json.loads(text)
        except (*DECODE_ERRORS, ValueError):
            self._damage["damaged_header"] += 1
            return
        self.is_own = True
        self._gathering.origin_ns = 0
        for number, lane in enumerate(header.lanes):
            columns = lane_columns(lane)
            self._gathering.lane(("lane", number), **columns | {"kind": columns["kind"] or "other"})
        known = range(len(header.lanes))
        self._lanes = {track: lane for track, lane in header.tracks if lane in known}
        self._lanes |= {track: lane for track, lane, _, _ in header.counters if lane in known}
        self._counters = {track: (name, series) for track, _, name, series in header.counters}

    def table_of(self, category: str) -> str:
        """The table whose rows have this category."""
        return _TABLES.get(category, "annotations")

    def lane(self, place: int | tuple[int, int]) -> int | None:
        """The lane of a track, None where the header does not tell."""
        return self._lanes.get(place) if isinstance(place, int) else None

    def with_counters(self, rows: pl.DataFrame, tracks: Tracks, pool: StringPool) -> pl.DataFrame:
        """Rows of counters with the names and series that the header tells for their tracks."""
        codes = rows["track"].unique().to_list()
        told = [self._counters.get(tracks.place(code), (None, None)) for code in codes]  # type: ignore[arg-type]
        names = pl.DataFrame(
            {
                "track": pl.Series(codes, dtype=pl.Int64),
                "name": pool.optional_codes([name for name, _ in told]),
                "series": pool.optional_codes([series for _, series in told]),
            }
        )
        return rows.drop("name", "series").join(names, on="track", how="left", maintain_order="left")

    def restore(self, writer: StoreWriter) -> None:
        """Write the links, and set the numbers of rows that the file tells, once the tables were written."""
        if self.is_whole:
            restore_rows(writer, self._rows, self._damage)

    def with_header(self, metadata: Metadata) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        """The metadata of the trace that was exported, and its warnings."""
        return chrome.with_header(metadata, self._header, self._damage) if self.is_own else (metadata, ())
