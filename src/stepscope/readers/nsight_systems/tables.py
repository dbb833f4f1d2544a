"""What every reader of some of a file's tables works with."""

from __future__ import annotations

from stepscope.readers.gathering import Gathering
from stepscope.readers.nsight_systems.database import Database
from stepscope.readers.nsight_systems.places import Places
from stepscope.readers.nsight_systems.selection import Selection
from stepscope.readers.nsight_systems.strings import Strings


class TableReader:
    """Reads some tables of a file.

    Args:
        database: the tables.
        gathering: takes the rows.
        strings: the file's texts, by number.
        places: its threads, devices and streams.
        selection: what is wanted of it.
    """

    def __init__(
        self, database: Database, gathering: Gathering, strings: Strings, places: Places, selection: Selection
    ) -> None:
        self._database = database
        self._gathering = gathering
        self._strings = strings
        self._places = places
        self._selection = selection
