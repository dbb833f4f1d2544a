"""Batches of rows from the events of a trace of Intel Gaudi: torch's as in any trace, the bridge's set aside.

Whether a row of the bridge's is a device's or a host thread's can be told only once all names of rows are known.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.gaudi import names
from stepscope.readers.kineto import arguments
from stepscope.readers.kineto.arguments import MISSING, OptionalIdentifier, OptionalInt
from stepscope.readers.kineto.columns import Columns
from stepscope.readers.kineto.events import Damage, Event

HARDWARE: Final = "hardware"
"""The table of the bridge's rows: start_ns, duration_ns, name, lane, category, event, node, recipe, recipe_name,
data_type, device (numbers of the pool), bytes."""
_LONGEST_NODE: Final = 1000


class Hardware(msgspec.Struct, gc=False):
    """The arguments of the bridge's events, of every version."""

    event: str | None = msgspec.field(default=None, name="HW event name")
    node: str | None = msgspec.field(default=None, name="EventName")
    original_nodes: msgspec.Raw = msgspec.field(default=MISSING, name="Original Nodes")
    recipe: OptionalIdentifier = msgspec.field(default=None, name="recipeId")
    recipe_handle: OptionalIdentifier = msgspec.field(default=None, name="recipeHandle")
    recipe_name: str | None = msgspec.field(default=None, name="recipeName")
    other_recipe_name: str | None = msgspec.field(default=None, name="Recipe name")
    data_type: str | None = msgspec.field(default=None, name="dataType")
    device: OptionalIdentifier = None
    bytes: OptionalIdentifier = None
    size: OptionalInt = None


class GaudiColumns(Columns):
    """The columns of a Kineto file in which the bridge's events are set aside in the table HARDWARE."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage)
        self.units: set[int] = set()
        """Lanes of an engine's further units, whose work stands on the lane of the first."""

    def lane_rows(self) -> list[dict[str, Any]]:
        """The rows of the table `lanes`."""
        rows = super().lane_rows()
        for lane in self.units:
            rows[lane]["kind"] = "other"
        return rows

    def _builder(self, category: str, group: list[Event]) -> tuple[str, Any]:
        if category in names.CATEGORIES:
            return HARDWARE, lambda events: self._hardware(category, events)
        return super()._builder(category, group)

    def _hardware(self, category: str, events: list[Event]) -> dict[str, pl.Series]:
        args = arguments.decode(events, Hardware, self.damage)
        recipes = [a.recipe_handle if a.recipe in (None, 0, "0", "") else a.recipe for a in args]
        return {
            "category": self.pool.codes([category] * len(events)),
            "event": self.pool.optional_codes([a.event or None for a in args]),
            "node": self.pool.optional_codes([_node(a) for a in args]),
            "recipe": self.pool.optional_codes([r if r not in (0, "0", "", "0x0") else None for r in recipes]),
            "recipe_name": self.pool.optional_codes([a.recipe_name or a.other_recipe_name or None for a in args]),
            "data_type": self.pool.optional_codes([names.number_type(a.data_type or "") for a in args]),
            "device": self.pool.optional_codes([a.device for a in args]),
            "bytes": pl.Series([a.size if a.bytes is None else _whole(a.bytes) for a in args], dtype=pl.Int64),
        }


def _node(args: Hardware) -> str | None:
    """What tells one piece of work from another of the same name: its node in the graph."""
    if args.node:
        return args.node[:_LONGEST_NODE]
    original = bytes(args.original_nodes)
    return None if original in (b"null", b'""', b"[]") else original[:_LONGEST_NODE].decode("utf-8", "replace")


def _whole(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if value.isdecimal() and len(value) < 19 else None
