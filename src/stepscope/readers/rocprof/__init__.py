"""Reader for the JSON of rocprofv3, ROCm's profiler for AMD GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.files import text_of
from stepscope.readers.gathering import EXPLANATIONS as COMMON
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.rocprof.records import (
    DECODE_ERRORS,
    Agent,
    Document,
    Kernel,
    KindNames,
    Message,
    Path,
    Record,
    Size,
    Wanted,
    decode_entries,
    decode_records,
)
from stepscope.readers.source import ByteSource, Reader, ReadResult
from stepscope.trace import naming
from stepscope.trace.metadata import Device, Metadata
from stepscope.trace.model import StoreWriter
from stepscope.trace.window import StepRange, Window

_GPU: Final = 2
_DEVICE_MEMORY: Final = (1, 2)
"""Heap types of the device's own memory, whether visible to the host or not."""
_LARGEST_BYTES: Final = {"agents": 2**22, "buffer_records": 2**22}
"""Size limits of descriptions, which take a few kilobytes but many times that once decoded."""
_CALLS: Final = ("hip_api", "hsa_api")
_FILLS: Final = "__amd_rocclr_fillBuffer"
_RUNTIME_KERNELS: Final = (_FILLS, "__amd_rocclr_copyBuffer", "__amd_rocclr_copyImage")
_RANGE: Final = (
    r"(?s)^(?<name>.*?)(?:, seq = (?<number>-?[0-9]{1,18}))?(?:, op_id = [0-9]{1,18})?"
    r"(?:, sizes = (?<shapes>\[.*?\]))?(?:, input_op_ids = .*)?$"
)
"""The text of a range, with the parts that torch's emit_nvtx appends to an operator's name."""
_IDS: Final = ", input_op_ids = "
_ARGUMENTS: Final = ", (?:seq|op_id|sizes) = "


class Process:
    """One process of the file: its number ("0" until known) and the GPUs it could see, in order."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._damage: Counter[str] = gathering.damage
        self.number = "0"
        self.devices: tuple[Device, ...] = ()
        self._device_of: dict[int, str | None] = {}
        self._kernels: dict[int, Kernel] = {}
        self._operations = _Operations([], self._damage)
        self._messages: dict[int, str] = {}

    def describe(self, key: str, text: bytes) -> None:
        if len(text) > _LARGEST_BYTES.get(key, len(text)):
            self._damage["oversized_value"] += 1
        elif key == "metadata":
            self.number = str(_field(text, "pid", int) or 0)
        elif key == "agents":
            self._describe_agents(decode_entries(text, Agent, self._damage))
        elif key == "kernel_symbols":
            self._kernels = {each.kernel_id: each for each in decode_entries(text, Kernel, self._damage) if each.name}
        elif key == "buffer_records":
            self._operations = _Operations(decode_entries(text, KindNames, self._damage), self._damage)
        elif key == "marker_api":
            self._messages = {each.key: each.value for each in decode_entries(text, Message, self._damage)}

    def _describe_agents(self, agents: list[Agent]) -> None:
        gpus = sorted((agent for agent in agents if agent.type == _GPU), key=lambda agent: agent.node_id)
        self._device_of = {agent.id.handle: None for agent in agents}
        self._device_of |= {agent.id.handle: str(number) for number, agent in enumerate(gpus)}
        self.devices = tuple(_device(str(number), agent) for number, agent in enumerate(gpus))

    def add(self, key: str, records: list[Record]) -> None:
        """Add records of the list with this key in `buffer_records`."""
        records = [record for record in records if record.start_timestamp or record.end_timestamp]
        if key == "kernel_dispatch":
            self._add_kernels(records)
        elif key == "memory_copy":
            self._add_copies(records)
        elif key == "marker_api":
            self._add_markers(records)
        elif key in _CALLS:
            self._add_calls(records)
        else:
            self._add_slices("operators", records, self._called(records))

    def _add_calls(self, records: list[Record]) -> None:
        called = self._called(records)
        self._add_slices(
            "launches",
            records,
            called,
            kind=list(map(_call_kind, called)),
            correlation=[record.correlation_id.internal for record in records],
        )

    def _add_markers(self, records: list[Record]) -> None:
        """Add roctx ranges: torch's as operators, others as annotations; calls without a message are dropped."""
        messages = self._messages
        texts = [messages.get(record.correlation_id.internal) for record in records]
        marks = _ranges([text for text in texts if text]).with_columns(
            pl.Series("record", [row for row, text in enumerate(texts) if text], dtype=pl.Int64)
        )
        for (table,), part in marks.group_by("table", maintain_order=True):
            columns: dict[str, list[Any]] = {}
            if table == "operators":
                columns = {"sequence_number": part["number"].to_list(), "input_shapes": part["shapes"].to_list()}
            elif table == "annotations":
                columns["kind"] = ["host"] * part.height
            marked = [records[row] for row in part["record"].to_list()]
            self._add_slices(str(table), marked, part["name"].to_list(), **columns)

    def _add_kernels(self, records: list[Record]) -> None:
        rows = [record for record in records if record.dispatch_info is not None]
        dispatches = [record.dispatch_info for record in rows if record.dispatch_info is not None]
        kernels = [self._kernel(dispatch.kernel_id) for dispatch in dispatches]
        called = [kernel.name for kernel in kernels]
        self._add_work(
            rows,
            called,
            [self._device(dispatch.agent_id.handle) or "0" for dispatch in dispatches],
            [f"queue {dispatch.queue_id.handle}" for dispatch in dispatches],
            kind=list(map(_kernel_kind, called)),
            grid=[_blocks(dispatch.grid_size, dispatch.workgroup_size) for dispatch in dispatches],
            block=[_sizes(dispatch.workgroup_size) for dispatch in dispatches],
            registers=[kernel.arch_vgpr_count for kernel in kernels],
            shared_memory_bytes=[dispatch.group_segment_size for dispatch in dispatches],
        )

    def _kernel(self, number: int) -> Kernel:
        if number in self._kernels:
            return self._kernels[number]
        self._damage["unnamed_kernel"] += 1
        return Kernel(formatted_kernel_name=f"kernel {number}")

    def _add_copies(self, records: list[Record]) -> None:
        rows, devices = [], []
        for record in records:
            device = self._device(record.dst_agent_id.handle) or self._device(record.src_agent_id.handle)
            if device is None:
                self._damage["copy_on_host"] += 1
                continue
            rows.append(record)
            devices.append(device)
        called = self._called(rows)
        self._add_work(
            rows,
            called,
            devices,
            ["copies"] * len(rows),
            kind=list(map(_copy_kind, called)),
            bytes=[record.bytes for record in rows],
        )

    def _add_work(
        self, records: list[Record], called: list[str], devices: list[str], queues: list[str], **columns: list[Any]
    ) -> None:
        """Add device work; `queues` is used for files of tools that do not record streams."""
        queues = [
            queue if record.stream_id is None else str(record.stream_id.handle)
            for record, queue in zip(records, queues, strict=True)
        ]
        places = list(zip(devices, queues, strict=True))
        lane_of = {
            (device, queue): self._gathering.lane(
                ("queue", self.number, device, queue),
                kind="queue",
                process=device,
                thread=queue,
                name=f"stream {queue}" if queue.isdecimal() else queue,
                device=device,
                queue=queue,
            )
            for device, queue in dict.fromkeys(places)
        }
        columns |= {
            "device": devices,
            "queue": queues,
            "correlation": [record.correlation_id.internal for record in records],
            "external_id": [record.correlation_id.external for record in records],
        }
        self._add("device_work", records, called, [lane_of[place] for place in places], columns)

    def _add_slices(self, table: str, records: list[Record], called: list[str], **columns: Sequence[Any]) -> None:
        threads = [record.thread_id for record in records]
        lane_of = {
            number: self._gathering.lane(
                ("thread", self.number, str(number)),
                kind="host_thread",
                process=self.number,
                thread=str(number),
                name=f"thread {number}",
            )
            for number in dict.fromkeys(threads)
        }
        self._add(table, records, called, [lane_of[number] for number in threads], columns)

    def _add(
        self, table: str, records: list[Record], called: list[str], lanes: list[int], columns: dict[str, Any]
    ) -> None:
        if not records:
            return
        pool = self._gathering.pool
        series: dict[str, pl.Series] = {
            "start_ns": pl.Series([record.start_timestamp for record in records], dtype=pl.Int64),
            "duration_ns": pl.Series(
                [record.end_timestamp - record.start_timestamp for record in records], dtype=pl.Int64
            ),
            "name": pool.codes(called),
            "lane": pl.Series(lanes, dtype=pl.Int32),
        }
        for name, values in columns.items():
            series[name] = pool.optional_codes(values) if name in _TEXTS else _integers(values)
        self._gathering.add(table, pl.DataFrame(series))

    def _called(self, records: list[Record]) -> list[str]:
        known = self._operations
        return [known[record.kind, record.operation] for record in records]

    def _device(self, handle: int) -> str | None:
        """A GPU's number, None for a CPU; a GPU without a description is its own handle."""
        return self._device_of[handle] if handle in self._device_of else (str(handle) if handle else None)


class _Operations(dict[tuple[int, int], str]):
    """Names by kind and operation."""

    def __init__(self, kinds: list[KindNames], damage: Counter[str]) -> None:
        super().__init__(
            ((kind, number), name) for kind, each in enumerate(kinds) for number, name in enumerate(each.operations)
        )
        self._damage = damage

    def __missing__(self, key: tuple[int, int]) -> str:
        self._damage["unnamed_operation"] += 1
        return f"operation {key[0]}.{key[1]}"


_TEXTS: Final = frozenset({"kind", "device", "queue", "grid", "block", "input_shapes"})


@lru_cache(maxsize=4096)
def _call_kind(name: str) -> str:
    if name.startswith("hsa_"):
        return naming.first_match(naming.name_patterns("host_names.tsv")["hsa"], name) or "other"
    return naming.launch_kind(name)


_copy_kind = lru_cache(maxsize=4096)(naming.copy_kind)


@lru_cache(maxsize=4096)
def _kernel_kind(name: str) -> str:
    """The runtime has its own kernels for fills and copies without a copy engine."""
    if name.startswith(_RUNTIME_KERNELS):
        return "set" if name.startswith(_FILLS) else "copy_on_device"
    return "communication" if naming.is_communication(name) else "compute"


def _ranges(texts: list[str]) -> pl.DataFrame:
    """Return the table of each range, and the name, sequence number and input shapes in its text."""
    found = pl.DataFrame({"text": texts}, schema={"text": pl.String})
    found = found.with_columns(parts=pl.col("text").str.extract_groups(_RANGE)).unnest("parts")
    name = pl.col("name").fill_null(pl.col("text"))
    if found["text"].str.contains(_IDS, literal=True).any():  # which say nothing on their own
        name = pl.when(pl.col("text").str.contains(_ARGUMENTS)).then(name).otherwise("text")
    found = found.with_columns(name, pl.col("number").cast(pl.Int64), emitted=name != pl.col("text"))
    names = found.select("name", "emitted").unique()
    tables = [_range_table(name, emitted) for name, emitted in names.iter_rows()]
    named = names.with_columns(table=pl.Series(tables, dtype=pl.String))
    return found.join(named, on=["name", "emitted"], how="left", maintain_order="left")


@lru_cache(maxsize=65536)
def _range_table(name: str, emitted: bool) -> str:
    table = naming.host_slice_table(name) or ("operators" if emitted else None)
    return table if table in ("operators", "frames") else "annotations"


def _device(number: str, agent: Agent) -> Device:
    version = agent.gfx_target_version
    memory = sum(bank.size_in_bytes for bank in agent.mem_banks if bank.heap_type in _DEVICE_MEMORY)
    return Device(
        device=number,
        name=agent.product_name or agent.name or None,
        memory_bytes=memory if 0 < memory < 2**62 else None,
        compute_capability=None if not version or version < 0 else f"{version // 10000}.{version // 100 % 100}",
        multiprocessors=agent.cu_count,
    )


@lru_cache(maxsize=4096)
def _blocks(grid: Size, block: Size) -> str:
    """The number of blocks, as in other tools; rocprofv3's grid counts work items."""
    x, y, z = -(-grid.x // max(1, block.x)), -(-grid.y // max(1, block.y)), -(-grid.z // max(1, block.z))
    return f"[{x}, {y}, {z}]"


@lru_cache(maxsize=4096)
def _sizes(size: Size) -> str:
    return f"[{size.x}, {size.y}, {size.z}]"


def _integers(values: Sequence[int | None]) -> pl.Series:
    """A column of numbers; null where one does not fit."""
    try:
        return pl.Series(values, dtype=pl.Int64, strict=True)
    except (OverflowError, TypeError, pl.exceptions.PolarsError):
        return pl.Series(
            [None if each is None or not -(2**63) <= each < 2**63 else each for each in values], dtype=pl.Int64
        )


def _field(text: bytes, key: str, kind: type[Any]) -> Any:
    try:
        values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(values[key], type=kind)
    except (*DECODE_ERRORS, KeyError):
        return None


_BEGINNING: Final = re.compile(rb'\A\{\s*"rocprofiler-sdk-tool"\s*:')
_ROOT: Final = ("rocprofiler-sdk-tool",)
_ENTERED: Final[tuple[Path, ...]] = (
    (),
    _ROOT,
    (*_ROOT, "[]"),
    (*_ROOT, "[]", "strings"),
    (*_ROOT, "[]", "buffer_records"),
)
_DESCRIPTIONS: Final = ("metadata", "agents", "kernel_symbols")
_SMALL_BYTES: Final = 2**16
_MOST_SMALL_PARTS: Final = 20_000
"""A file has about twenty per process."""
_STRINGS: Final = ("buffer_records", "marker_api")
_SAMPLES: Final = ("pc_sample_host_trap", "pc_sample_stochastic", "scratch_memory", "memory_allocation")
"""Lists that no table holds: samples inside kernels, and memory allocated by the driver."""

EXPLANATIONS: Final = {
    **COMMON,
    "truncated": "the file is truncated; the records before its end were read",
    "compressed_data": "{}; what could be unpacked was read",
    "damaged_record": "records that are not valid JSON, or without a start and an end, were skipped",
    "damaged_description": "agents, kernels or names that could not be read were left out",
    "unnamed_kernel": "kernels that the file does not describe are called by their number",
    "unnamed_operation": "calls and copies that the file does not name are called by their number",
    "copy_on_host": "copies from host memory to host memory were left out",
    "oversized_value": "values far longer than any that the tool writes were left out",
}


def recognises(head: bytes) -> bool:
    """Whether a file starts like rocprofv3's JSON."""
    return _BEGINNING.match(text_of(head)) is not None


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
    """Read kernels, copies, HIP and HSA calls, and roctx ranges into the tables of `writer`.

    Raises:
        NotATraceError: there are far more lists of records than in any profile.
        UnreadableTraceError: no record could be read.
        UsageError: the requested steps do not exist.
    """
    gathering = Gathering(writer.directory)
    document = Document(source, _wanted)
    process = Process(gathering)
    devices: dict[str, Device] = {}
    small = 0
    for path, text in document.parts():
        key = path[-1]
        small += len(text) < _SMALL_BYTES
        if small > _MOST_SMALL_PARTS:
            raise NotATraceError(
                f"{source.name} has more than {_MOST_SMALL_PARTS:,} short lists of records, too many for a profile"
            )
        if path[2:-1] == ("buffer_records",):
            process.add(key, decode_records(text, gathering.damage))
        else:
            if key == "metadata":  # metadata is the first value of each process
                process = Process(gathering)
            process.describe(key, text)
            devices |= {device.device: device for device in process.devices}
    if not gathering.complete_events:
        raise UnreadableTraceError(
            f"{source.name} is a rocprofv3 profile without a single kernel, copy, call or range: "
            "record with rocprofv3 --runtime-trace --output-format json"
        )
    _count_damage(gathering, document, source)
    window = gathering.write(writer, window, steps)
    metadata = Metadata(
        path=source.name,
        format="rocprof",
        events=gathering.events,
        complete_events=gathering.complete_events,
        devices=tuple(devices.values()),
        window=window,
    )
    return metadata, warnings(gathering.damage, EXPLANATIONS)


def _wanted(path: Path) -> Wanted:
    if path in _ENTERED:
        return "enter"
    parent, key = path[2:-1], path[-1]
    if parent == () and key in _DESCRIPTIONS and len(path) == len(_ROOT) + 2:
        return "whole"
    if parent == ("strings",) and key in _STRINGS:
        return "whole"
    if parent == ("buffer_records",) and key not in _SAMPLES:
        return "pieces"
    return "skip"


def _count_damage(gathering: Gathering, document: Document, source: ByteSource) -> None:
    damage = gathering.damage
    damage["oversized_value"] += document.dropped
    damage["truncated"] += not document.closed
    if source.damage:
        damage[f"compressed_data:{source.damage}"] += 1


READER: Final = Reader("rocprof", recognises, read)
