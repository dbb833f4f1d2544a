"""Batches of rows from the events of a trace of Intel Gaudi: torch's as in any trace, the bridge's set aside.

Whether a row of the bridge's is a device's or a host thread's can be told only once all names of rows are known.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.event_names import copy_kind, launch_kind
from stepscope.readers.kineto import arguments
from stepscope.readers.kineto.arguments import MISSING, OptionalIdentifier, OptionalInt
from stepscope.readers.kineto.columns import Columns
from stepscope.readers.kineto.events import Damage, Event

CATEGORIES: Final = frozenset(
    {
        "kernel", "runtime", "memcpy", "memset",  # the bridge's own events
        "hpu_op", "privateuse1_runtime", "concurrent_kernel", "gpu_memcpy", "gpu_memset",  # by way of Kineto
    }
)  # fmt: skip
"""Of events that the bridge adds to those of torch: which of them a device did follows from the row they stand on."""

DEVICE_PROCESS: Final = re.compile(r"/device:HPU:(\d{1,4})|\bHPU\b", re.IGNORECASE)
LOGGERS: Final = {"Synapse Logger": 10_000, "Bridge Logs": 20_000, "Memory Logs": 30_000}
"""Processes that are made up: the number of the real one plus this, with its real threads."""
SYNAPSE_THREAD: Final = re.compile(r"^Synapse/(.*)$")

_ENGINE: Final = re.compile(r"^\*{0,2}(MME|TPC|EDMA|PDMA|KDMA|DMA|NIC)(?![A-Za-z])", re.IGNORECASE)
_HARDWARE: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("MME", re.compile(r"MME")),
    ("TPC", re.compile(r"TPC")),
    ("EDMA", re.compile(r"EDMA")),
    ("PDMA", re.compile(r"PDMA")),
    ("KDMA", re.compile(r"KDMA")),
    ("DMA", re.compile(r"DMA")),
    ("NIC", re.compile(r"NIC")),
)
_BY_THOUSAND: Final = {
    3: "PDMA", 4: "EDMA", 5: "KDMA", 6: "MME", 7: "TPC", 14: "NIC", 15: "NIC", 16: "NIC", 17: "NIC",
}  # fmt: skip
"""Thread number // 1000: the bridge numbers the rows of a device by the place of their engine in its own list."""
_MATRIX_NAMES: Final = frozenset({"GEMM", "BatchGemm"})
MEASURED: Final = frozenset(
    {
        "TPC_SPU_START_TO_SPU_HALT",
        "MMEH_WB0_MON_TS_BIT1",
        "MMEH_WB1_MON_TS_BIT1",
        "DBG_DMA_TRC_WR_DATA_LAST",
    }
)
"""Hardware events that last from the beginning of some work to its end; others of the same engine mark parts of it."""

_TO_DEVICE: Final = re.compile(r"(?i)(?:^|[^a-z])(?:h2d|tx|host_?to_?dev\w*|dram_?to_?hbm)(?![a-z])")
_FROM_DEVICE: Final = re.compile(r"(?i)(?:^|[^a-z])(?:d2h|rx|dev\w*_?to_?host|hbm_?to_?dram)(?![a-z])")

_CALLS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("compile", r"^(?:syn)?(?:graph)?compile(?:_?graph)?|graphcompile"),
        ("synchronise", r"synchroni[sz]e"),
        ("queue_wait", r"^syn(?:stream|queue)waitevent"),
        ("event", r"^synevent|^(?:record|map)event"),
        ("copy", r"^syn(?:mem_?copy|memcpy)|^memcopy|^memcpy"),
        ("set", r"^synmemset|^memset"),
        ("allocate", r"^syn(?:device|host)(?:malloc|free|map|unmap)"),
        ("graph_launch", r"^synlaunch|^enqueuewithexternalevents|^launchwithexternalevents"),
    )
)
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
    """The engine that a row of the device is named after: "TPC 3", "*EDMA 0", "**MME 1"; None for others."""
    match = _ENGINE.match(name.strip())
    return match[1].upper() if match else None


def engine_of_number(thread: str) -> str | None:
    """The engine by the number of a device's row; None where the number says nothing."""
    return _BY_THOUSAND.get(int(thread) // 1000) if thread.isdecimal() and len(thread) < 10 else None


@lru_cache(maxsize=4096)
def engine_of_event(hardware: str) -> str | None:
    """The engine by the name of a hardware event, such as TPC_SPU_START_TO_SPU_HALT."""
    return next((engine for engine, pattern in _HARDWARE if pattern.search(hardware.upper())), None)


@lru_cache(maxsize=65536)
def engine_of_work(name: str) -> str | None:
    """The engine by the name of what it did, where that leaves no doubt."""
    return "MME" if name in _MATRIX_NAMES else "DMA" if name.startswith("Dma") else None


@lru_cache(maxsize=65536)
def work_kind(engine: str | None, category: str, name: str) -> str:
    """Kind of a device's work, in the words of `tables.DEVICE_WORK_KINDS`."""
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
    return "other"  # a copy whose direction nothing tells, or an engine of another kind


@lru_cache(maxsize=65536)
def call_kind(name: str) -> str | None:
    """Kind of a host row that calls the device's API (`tables.LAUNCH_KINDS`); None for the bridge's own work."""
    known = next((kind for kind, pattern in _CALLS if pattern.search(name)), None)
    if known is not None:
        return known
    return launch_kind(name) if _API.match(name) else None


@lru_cache(maxsize=4096)
def number_type(data_type: str) -> str | None:
    """bf16, fp32 and so on, from the spellings that traces have; None for none."""
    word = data_type.strip().lower()
    if word.startswith(("fp8", "float8", "hf8")):
        return "fp8"
    return _NUMBER_TYPES.get(word, word[:20] or None) if word not in ("", "na", "none", "null", "invalid") else None


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
        if category in CATEGORIES:
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
            "data_type": self.pool.optional_codes([number_type(a.data_type or "") for a in args]),
            "device": self.pool.optional_codes([a.device for a in args]),
            "bytes": pl.Series([a.size if a.bytes is None else _whole(a.bytes) for a in args], dtype=pl.Int64),
        }


def _node(args: Hardware) -> str | None:
    """The node of the graph, which tells work of the same name apart."""
    if args.node:
        return args.node[:_LONGEST_NODE]
    original = bytes(args.original_nodes)
    return None if original in (b"null", b'""', b"[]") else original[:_LONGEST_NODE].decode("utf-8", "replace")


def _whole(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if value.isdecimal() and len(value) < 19 else None
