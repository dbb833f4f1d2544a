"""Convert the events of an Intel Gaudi trace to rows: torch's events as in any trace, the bridge's set aside.

Whether a row of the bridge belongs to a device or to a host thread is known only after all row names were read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.kineto import arguments
from stepscope.readers.kineto.arguments import MISSING, OptionalIdentifier, OptionalInt
from stepscope.readers.kineto.columns import Columns
from stepscope.readers.kineto.events import Damage, Event
from stepscope.readers.kineto.scanned import NO_INTEGER, TABLES, Coded, Dialect, Rows, RowTables, combined
from stepscope.trace.naming import copy_kind, first_match, launch_kind, name_patterns

CATEGORIES: Final = frozenset(
    {
        "kernel", "runtime", "memcpy", "memset",  # written by the bridge
        "hpu_op", "privateuse1_runtime", "concurrent_kernel", "gpu_memcpy", "gpu_memset",  # written through Kineto
    }
)  # fmt: skip
"""Categories of the bridge's events; their row decides whether a device or the host did the work."""

DEVICE_PROCESS: Final = re.compile(r"/device:HPU:(\d{1,4})|\bHPU\b", re.IGNORECASE)
LOGGERS: Final = {"Synapse Logger": 10_000, "Bridge Logs": 20_000, "Memory Logs": 30_000}
"""Artificial processes: their number is the real process's plus this offset, and their threads are the real ones."""
SYNAPSE_THREAD: Final = re.compile(r"^Synapse/(.*)$")

_ENGINE: Final = re.compile(r"^\*{0,2}(MME|TPC|EDMA|PDMA|KDMA|DMA|NIC)(?![A-Za-z])", re.IGNORECASE)
_HARDWARE: Final = ("MME", "TPC", "EDMA", "PDMA", "KDMA", "DMA", "NIC")
_BY_THOUSAND: Final = {
    3: "PDMA", 4: "EDMA", 5: "KDMA", 6: "MME", 7: "TPC", 14: "NIC", 15: "NIC", 16: "NIC", 17: "NIC",
}  # fmt: skip
"""Thread number // 1000 -> engine: the bridge numbers a device's rows by the engine's position in its own list."""
_MATRIX_NAMES: Final = frozenset({"GEMM", "BatchGemm"})
MEASURED: Final = frozenset(
    {"TPC_SPU_START_TO_SPU_HALT", "MMEH_WB0_MON_TS_BIT1", "MMEH_WB1_MON_TS_BIT1", "DBG_DMA_TRC_WR_DATA_LAST"}
)
"""Hardware events that span all of some work; other events of the same engine mark parts of it."""

_TO_DEVICE: Final = re.compile(r"(?i)(?:^|[^a-z])(?:h2d|tx|host_?to_?dev\w*|dram_?to_?hbm)(?![a-z])")
_FROM_DEVICE: Final = re.compile(r"(?i)(?:^|[^a-z])(?:d2h|rx|dev\w*_?to_?host|hbm_?to_?dram)(?![a-z])")

_API: Final = re.compile(r"^(?:syn[A-Z]|hccl|hcl|scal_|enqueue)")
_NUMBER_TYPES: Final = {
    "bfloat16": "bf16", "bf16": "bf16",
    "float16": "fp16", "half": "fp16", "fp16": "fp16", "f16": "fp16",
    "float32": "fp32", "float": "fp32", "fp32": "fp32", "f32": "fp32", "single": "fp32",
    "float64": "fp64", "double": "fp64", "fp64": "fp64",
    "hf8": "fp8", "float8": "fp8",
    "i8": "int8", "u8": "int8", "uint8": "int8", "int8": "int8",
}  # fmt: skip


@lru_cache(maxsize=4096)
def engine_of_thread(name: str) -> str | None:
    """Return the engine in a device row's name, such as "TPC 3", "*EDMA 0" or "**MME 1"; None if there is no engine."""
    match = _ENGINE.match(name.strip())
    return match[1].upper() if match else None


def engine_of_number(thread: str) -> str | None:
    """Return the engine for the thread number of a device's row; None if unknown."""
    return _BY_THOUSAND.get(int(thread) // 1000) if thread.isdecimal() and len(thread) < 10 else None


@lru_cache(maxsize=4096)
def engine_of_event(hardware: str) -> str | None:
    """Return the engine in the name of a hardware event, such as TPC_SPU_START_TO_SPU_HALT."""
    return next((engine for engine in _HARDWARE if engine in hardware.upper()), None)


@lru_cache(maxsize=65536)
def engine_of_work(name: str) -> str | None:
    """Return the engine for the name of some work, if unambiguous."""
    return "MME" if name in _MATRIX_NAMES else "DMA" if name.startswith("Dma") else None


@lru_cache(maxsize=65536)
def work_kind(engine: str | None, category: str, name: str) -> str:
    """Return the kind of device work, one of `tables.DEVICE_WORK_KINDS`."""
    if category.endswith("memset"):
        return "set"
    if engine == "NIC":
        return "communication"
    if engine in ("MME", "TPC") and not category.endswith("memcpy"):
        return "compute"
    if _TO_DEVICE.search(name):
        return "copy_in"
    if _FROM_DEVICE.search(name):
        return "copy_out"
    if engine in ("EDMA", "KDMA") or name.startswith("Dma") or category.endswith("memcpy"):
        return copy_kind(name)
    return "other"  # a copy of unknown direction, or an unknown engine


@lru_cache(maxsize=65536)
def call_kind(name: str) -> str | None:
    """Return the kind of a device API call on the host (`tables.LAUNCH_KINDS`); None for the bridge's own work."""
    known = first_match(name_patterns("host_names.tsv")["synapse"], name)
    return known or (launch_kind(name) if _API.match(name) else None)


@lru_cache(maxsize=4096)
def number_type(data_type: str) -> str | None:
    """Normalise a number type to bf16, fp32 and so on; None for an empty or invalid type."""
    word = data_type.strip().lower()
    if word.startswith(("fp8", "float8", "hf8")):
        return "fp8"
    return _NUMBER_TYPES.get(word, word[:20] or None) if word not in ("", "na", "none", "null", "invalid") else None


HARDWARE: Final = "hardware"
"""The table of the bridge's rows: start_ns, duration_ns, name, lane, category, event, node, recipe, recipe_name,
data_type, device (indices into the pool), bytes.
"""
_LONGEST_NODE: Final = 1000


class Hardware(msgspec.Struct, gc=False):
    """Arguments of the bridge's events, in any version."""

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


DIALECT: Final = Dialect(
    (
        (HARDWARE, CATEGORIES, Hardware),
        *((table, categories - CATEGORIES, kind) for table, categories, kind in TABLES),
    )
)
"""What the scanner reads: torch's events as in any trace, the bridge's as rows of HARDWARE."""


class GaudiColumns(Columns):
    """The columns of a Kineto file, with the bridge's events set aside in the table HARDWARE."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage)
        self.row_tables = _GaudiRowTables(self.pool, self._lane_of, self.queues, damage)
        self.units: set[int] = set()
        """Lanes of an engine's additional units; their work is on the lane of the first unit."""

    def lane_rows(self) -> list[dict[str, Any]]:
        rows = super().lane_rows()
        for lane in self.units:
            rows[lane]["kind"] = "other"
        return rows

    def _builder(self, category: str, group: list[Event]) -> tuple[str, Any]:
        if category in CATEGORIES:
            return HARDWARE, lambda events: self._hardware(category, events)
        return super()._builder(category, group)

    def _hardware(self, category: str, events: list[Event]) -> dict[str, pl.Series]:
        args = arguments.decode(events, Hardware, self.damage)
        return {
            "category": self.pool.codes([category] * len(events)),
            "event": self.pool.optional_codes([a.event or None for a in args]),
            "node": self.pool.optional_codes([_node(a.node, a.original_nodes) for a in args]),
            "recipe": self.pool.optional_codes([_recipe(a.recipe, a.recipe_handle) for a in args]),
            "recipe_name": self.pool.optional_codes([a.recipe_name or a.other_recipe_name or None for a in args]),
            "data_type": self.pool.optional_codes([number_type(a.data_type or "") for a in args]),
            "device": self.pool.optional_codes([a.device for a in args]),
            "bytes": pl.Series([a.size if a.bytes is None else _whole(a.bytes) for a in args], dtype=pl.Int64),
        }


class _GaudiRowTables(RowTables):
    """Makes the columns of the table HARDWARE from rows, equal to those of `GaudiColumns`."""

    def _arguments(self, category: str, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        if rows.table != HARDWARE:
            return super()._arguments(category, rows)

        def of(meaning: Callable[..., Any], *names: str) -> npt.NDArray[Any]:
            return self.text(combined([rows.coded(name) for name in names]), lambda values: meaning(*values))

        sizes = rows.coded("bytes")
        return {
            "category": self.text(Coded(np.zeros(len(rows), np.uint32), [category])),
            "event": of(lambda event: event or None, "event"),
            "node": of(_node, "node", "original_nodes"),
            "recipe": of(_recipe, "recipe", "recipe_handle"),
            "recipe_name": of(lambda name, other: name or other or None, "recipe_name", "other_recipe_name"),
            "data_type": of(lambda name: number_type(name or ""), "data_type"),
            "device": self.text(rows.coded("device")),
            "bytes": np.where(
                sizes.is_null(), rows.integers("size"), sizes.translated(_whole_numbers, NO_INTEGER, np.int64)
            ),
        }


def _recipe(recipe: int | str | None, handle: int | str | None) -> int | str | None:
    found = handle if recipe in (None, 0, "0", "") else recipe
    return None if found in (0, "0", "", "0x0") else found


def _node(node: str | None, original_nodes: msgspec.Raw | None) -> str | None:
    """The node of the graph, which distinguishes work of the same name."""
    if node:
        return node[:_LONGEST_NODE]
    original = bytes(original_nodes or MISSING)
    return None if original in (b"null", b'""', b"[]") else original[:_LONGEST_NODE].decode("utf-8", "replace")


def _whole_numbers(values: Sequence[int | str]) -> list[int]:
    numbers = map(_whole, values)
    return [NO_INTEGER if number is None else number for number in numbers]


def _whole(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if value.isdecimal() and len(value) < 19 else None
