"""The meaning of the names of planes, lines, host events and device operations in XLA's profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.gathering import StringPool
from stepscope.readers.xplane.content import Mask, Positions
from stepscope.readers.xplane.events import Batch, Words
from stepscope.readers.xplane.plane import EventName, Plane, Programs
from stepscope.trace import naming
from stepscope.trace.naming import first_match, name_patterns

HOST_PLANES: Final = re.compile(r"/host:(?!metadata)")
METADATA_PLANE: Final = "/host:metadata"
ENVIRONMENT_PLANE: Final = "Task Environment"
DEVICE_PLANE: Final = re.compile(r"/device:(?P<what>[^:]+)(?::(?P<number>\d+))?(?P<part> .+)?", re.DOTALL)
KNOWN_PLANE: Final = re.compile(rb"\x12[\x01-\x7f](?:/(?:host|device):|Task Environment)")

PYTHON_THREADS: Final = re.compile(r"(?:python[\d.]*|main|MainThread)(?:/|$)")
"""Lines of Python threads, where programs put their own marks among XLA's."""

MODULES_LINE: Final = "XLA Modules"
ASYNCHRONOUS_LINE: Final = "Async"
"""Prefix of lines with work that runs beside the operations, possibly several pieces at a time."""
STREAM_LINE: Final = re.compile(r"Stream #(\w+)")
OVERHEAD_LINE: Final = "CUPTI overhead"
"""The profiler's own work on unknown threads."""
DESCRIBING_LINES: Final = re.compile(
    r"Steps|XLA Modules|XLA TraceMe|Overlay|(?:Framework|TensorFlow) (?:Name Scope|Ops)|Source code|Source|Launch Stats"
    r"|HLO Module|Kernel Launch|Megascale Trace|_counters_|Host Threads.*|CUPTI overhead"
)
"""Lines of a device that describe its work; the work itself is on other lines."""

_SYNCHRONISING: Final = re.compile(
    r"np\.asarray\(jax\.Array\)$|(?:\w+::)*BlockHostUntilReady\b|block_until_ready$|(?:\w+::)*GetReadyFuture\b.*wait"
    r"|\w*ComputationClient::(?:TransferFromDevice|TransferFromServer|WaitDeviceOps)$|TensorCollectionBarrier$"
    r"|ThunkExecutor::Execute \(wait for completion\)$|(?:\w+::)*Await\b|XrtComputationClient::TransferFromServer$"
)
"""Calls in which the host waits for a device, often to fetch a result."""
_ENQUEUEING: Final = re.compile(r"DoEnqueueProgram$|EnqueueProgram$|TpuExecute|tpu::System::EnqueueProgram$")
"""Calls that launch a program on a TPU."""
_XLA: Final = re.compile(
    r"\w+(?:::~?\w+)+|PjitFunction\(|PjRt|Pjrt|PJRT|Xla[A-Z]|XLA|Tfrt|StepMarker$|Sync(?:Live)?Tensors|CollectSyncTensors"
    r"|ExtractIR|ScheduleSyncTensors|RunPostOrder$|ParseArguments$|DevicePut|Wait for |Handle (?:input|output)|Allocate"
    r"|ExecuteReplicated|Execute|MemoryAllocation|MemoryDeallocation|shard_args$|cpp_pjit|backend_compile|backend_compile"
    r"|lower_sharding_computation$|trace_to_jaxpr|ArrayImpl\.|PythonRefManager|ThenExecuteCallback|RecordUsage"
    r"|BufferSequencing|Acquire semaphore|Release semaphore|LoadProgram|Codegen$|RunInvariantCheckers$|IrEmitter"
    r"|ThreadpoolListener|[HD]2[HD] Dispatch|(?:De)?[Ll]inearize|MapDmaBuffer|jit_\w+:XLA|TensorCollectionBarrier$"
    r"|TransferTo|TransferFrom|ReleaseGil|GilRelease|UnsafeReleaseBuffers|Iterator|InputPipeline"
)
"""Prefixes of events of XLA, its clients and JAX; any other name on a Python thread is a mark of the program."""


class HostName(NamedTuple):
    """Table and name of a host event, and the kind if it is a launch."""

    table: str
    name: str
    kind: str | None = None


@lru_cache(maxsize=65536)
def host_name(name: str, on_python_thread: bool) -> HostName:
    """Return the table of a host event, and its name there."""
    if name.startswith("$"):
        return HostName("frames", naming.frame_name(name).removeprefix("$"))
    if _SYNCHRONISING.match(name):
        return HostName("launches", name, "synchronise")
    if _ENQUEUEING.match(name):
        return HostName("launches", name, "launch")
    table = naming.host_slice_table(name)
    if table == "launches":
        return HostName(table, name, naming.launch_kind(name))
    if table is not None and table != "operators":
        return HostName(table, name)
    if on_python_thread and not _XLA.match(name):
        return HostName("annotations", name)
    return HostName("operators", name)


_HOST_TRANSFERS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("copy_in", re.compile(r"infeed|host recv|^recv-?(?:done)? ?from host|MemcpyH2D|memcpyHtoD", re.IGNORECASE)),
    ("copy_out", re.compile(r"outfeed|host send|MemcpyD2H|memcpyDtoH", re.IGNORECASE)),
    ("copy_on_device", re.compile(r"MemcpyD2D|MemcpyP2P|MemcpyOther|memcpyDtoD|^copy$|__amd_rocclr_copyBuffer", re.I)),
    ("set", re.compile(r"memset|__amd_rocclr_fillBuffer", re.IGNORECASE)),
)
COPIED_BY_KERNEL: Final = re.compile(r"__amd_rocclr_copyBuffer|MemcpyOther")
"""Copies whose names do not contain the direction, which comes from the call that launched them."""
_ASYNCHRONOUS_COPY: Final = re.compile(r"(?:async-)?copy-(?:start|done)")
_OPCODE: Final = re.compile(r"[ )}]([a-z][\w-]*)\(")
_GROUPS: Final = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_SHAPE: Final = re.compile(r"\b((?:pred|bf16|f8\w*|[fsuc]\d+))\[([\d,]*)\]")
_HOST_MEMORY: Final = "S(5)"
_TYPES: Final = {"f32": "Float", "bf16": "BFloat16", "f16": "Half", "f64": "Double", "s32": "Int", "s64": "Long"}


class DeviceOperation(NamedTuple):
    """The meaning of a device operation's name and category.

    `is_container`: it runs other operations. `is_handle`: it only starts or awaits a copy that runs in the background.
    """

    kind: str
    is_container: bool = False
    is_handle: bool = False
    collective: str | None = None
    group: str | None = None
    group_size: int | None = None
    message_elements: int | None = None
    message_type: str | None = None


def device_operation(name: str, category: str) -> DeviceOperation:
    """Classify an operation by its name or HLO text, and XLA's category ("" for none)."""
    opcode = _opcode(name, category)
    if opcode in ("while", "conditional", "call"):
        return DeviceOperation("other", is_container=True)
    if _ASYNCHRONOUS_COPY.match(opcode):
        return DeviceOperation(_copy_direction(name), is_handle=True)
    collective = first_match(name_patterns("collectives.tsv")["XLA"], opcode) or None
    if collective or naming.is_communication(opcode):
        if collective in ("send", "recv") and "is_host_transfer=true" in name:
            return DeviceOperation("copy_out" if collective == "send" else "copy_in")
        group, size = _group(name)
        elements, number_type = _message(name)
        return DeviceOperation("communication", False, False, collective, group, size, elements, number_type)
    for kind, pattern in _HOST_TRANSFERS:
        if pattern.search(opcode):
            return DeviceOperation(kind)
    return DeviceOperation("compute")


def _opcode(name: str, category: str) -> str:
    """The text that determines an operation's kind: the category, unless it means fused or called code."""
    if category and category not in ("custom-call", "async-start", "async-done") and "fusion" not in category:
        return category
    if name.startswith("%") and " = " in name:
        match = _OPCODE.search(name, name.index(" = "))
        written = match[1] if match else name
        if written == "custom-call" or written.startswith("async"):
            return name[1 : name.index(" = ")]
        return category if "fusion" in category and "all-reduce" in category else written
    return name.removeprefix("%")


def _copy_direction(name: str) -> str:
    """The direction of a TPU's asynchronous copy (target, source, context); S(5) is the host's memory."""
    text = name.partition(" = ")[2]
    if _HOST_MEMORY not in name:
        return "copy_on_device"
    shapes = _SHAPE.split(text)
    # The pattern has two groups, so the pieces are: before, type, dimensions, text after the first shape, ...
    if "copy-start(" in name and len(shapes) > 3:
        return "copy_out" if _HOST_MEMORY in shapes[3] else "copy_in"
    return "copy_out" if len(shapes) > 3 and _HOST_MEMORY in shapes[3] else "copy_in"


def _group(name: str) -> tuple[str | None, int | None]:
    """The members of a collective, and the size of each group."""
    match = _GROUPS.search(name)
    if match is None or match[1] == "{}":
        return None, None
    if match[1].startswith("["):
        sizes = match[1][1 : match[1].index("]")].split(",")
        return match[1], int(sizes[-1]) if len(sizes) == 2 and sizes[-1].isdecimal() else None
    return match[1][:1000], match[1][2:].partition("}")[0].count(",") + 1


def _message(name: str) -> tuple[int | None, str | None]:
    match = _SHAPE.search(name)
    if match is None:
        return None, None
    elements = 1
    for size in match[2].split(","):
        elements *= int(size) if size and len(size) < 10 else 1
    return (elements if elements < 2**62 else None), _TYPES.get(match[1], match[1])


class KernelDetails(NamedTuple):
    """A GPU kernel's launch configuration as written by XLA."""

    grid: str | None
    block: str | None
    registers: int | None
    shared_memory_bytes: int | None
    occupancy: float | None


_DETAIL: Final = re.compile(r"(\w+):(\S+)")


def kernel_details(text: str) -> KernelDetails:
    """Parse "regs:32 static_shared:0 dynamic_shared:0 grid:1,1,1 block:512,1,1 occ_pct:25"; missing values are None."""
    found = dict(_DETAIL.findall(text))
    shared = [_whole(found[name]) for name in ("static_shared", "dynamic_shared", "group_mem") if name in found]
    occupancy = found.get("occ_pct", "")
    share = float(occupancy) / 100 if re.fullmatch(r"\d{1,3}(?:\.\d{1,12})?", occupancy) else 0.0
    return KernelDetails(
        found.get("grid"),
        found.get("block"),
        _whole(found.get("regs", "")),
        sum(each or 0 for each in shared) if shared else None,
        share if 0 < share <= 1 else None,  # 0 means unknown
    )


def copied_bytes(text: str) -> int | None:
    """Parse the bytes of a copy's details; None if unknown.

    The text is like "kind_src:pageable kind_dst:device size:1024 dest:0 async:1" or "kind:device num_bytes:1024".
    """
    found = dict(_DETAIL.findall(text))
    size = _whole(found.get("size") or found.get("num_bytes") or "")
    return size or None  # 0 means unknown


def copied_kind(text: str) -> str | None:
    """Return the kind of the copy in the details that `copied_bytes` parses; None if unknown."""
    found = dict(_DETAIL.findall(text))
    source, target = found.get("kind_src", ""), found.get("kind_dst", "")
    if not source or not target:
        return None
    host = ("pageable", "pinned", "registered")
    if source in host:
        return "copy_in"
    return "copy_out" if target in host else "copy_on_device"


def copied_name(text: str) -> str | None:
    """Return a name such as "Memcpy HtoD (Pageable -> Device)" from the same details; XLA only writes "MemcpyH2D"."""
    kind, found = copied_kind(text), dict(_DETAIL.findall(text))
    if kind is None:
        return None
    direction = {"copy_in": "HtoD", "copy_out": "DtoH"}.get(kind, "DtoD")
    return f"Memcpy {direction} ({found['kind_src'].capitalize()} -> {found['kind_dst'].capitalize()})"


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def is_enqueueing(name: str) -> bool:
    """Whether a host event launches a program on a TPU."""
    return _ENQUEUEING.match(name) is not None


LIBRARY_FILES: Final = frozenset(files("stepscope").joinpath("data/xla_library_files.txt").read_text("utf-8").split())
"""Source file names of JAX, Flax, Optax, NumPy and torch_xla."""


HOST_TABLES: Final = ("operators", "launches", "annotations", "frames")
MEMORY_EVENTS: Final = ("MemoryAllocation", "MemoryDeallocation")
LIBRARY: Final = "<library>"
"""Placeholder for the folder of a library's file, which JAX's tracer does not record."""
NO_CODE: Final = 2**32 - 1
_MOST_LISTED: Final = 2**20
Codes = npt.NDArray[np.uint32]


def role_table(plane: Plane, roles: Sequence[str]) -> Positions:
    """Map the number of each statistic to its 1-based position in `roles`, 0 if it is not in there."""
    wanted = {name: place for place, name in enumerate(roles, 1)}
    found = {
        number: wanted[name] for number, name in plane.stat_names.items() if name in wanted and 0 <= number < 2**22
    }
    table = np.zeros(max(found, default=0) + 1, np.int64)
    for number, place in found.items():
        table[number] = place
    return table


class NameRows:
    """The names of a plane's events as rows 0 to n - 1."""

    def __init__(self, found: dict[int, EventName]) -> None:
        order = sorted(found)
        self._numbers = np.array(order, np.int64)
        self.names = [found[number] for number in order]
        self._rows: Positions | None = None
        if order and order[0] >= 0 and order[-1] < _MOST_LISTED:  # true for every real file
            self._rows = np.full(order[-1] + 2, -1, np.int64)  # the last entry is for all higher numbers
            self._rows[self._numbers] = np.arange(len(order))

    def of(self, numbers: Positions) -> tuple[Positions, Mask]:
        """Return the row of each number, and whether it has one."""
        if not len(self._numbers):
            return np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.bool_)
        if self._rows is not None:
            row = self._rows.take(np.where(numbers < 0, len(self._rows) - 1, numbers), mode="clip")
            return np.maximum(row, 0), row >= 0
        place = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return place, self._numbers[place] == numbers


class Pooled:
    """Indices of texts in a gathering's pool."""

    def __init__(self, pool: StringPool) -> None:
        self._pool = pool

    def codes(self, words: Sequence[str | None]) -> Codes:
        """Return the index of each word, NO_CODE for None."""
        return self._pool.optional_codes(words).fill_null(NO_CODE).to_numpy()

    def constant(self, word: str | None, count: int) -> pl.Series:
        """Return a column with `count` copies of the word."""
        return pl.repeat(word, count, dtype=pl.String, eager=True) if word is None else self._repeat(word, count)

    def _repeat(self, word: str, count: int) -> pl.Series:
        return pl.repeat(self._pool.codes([word])[0], count, dtype=pl.UInt32, eager=True)


def column(codes: Codes) -> pl.Series:
    """Convert word indices to a column, with NO_CODE as null."""
    series = pl.Series(codes)
    return series if not len(codes) or codes.max() != NO_CODE else series.replace(NO_CODE, None)


def nullable(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], has: Mask) -> pl.Series:
    """Convert values to a column, null where `has` is False."""
    series = pl.Series(values)
    return series if has.all() else pl.select(pl.when(pl.Series(has)).then(series)).to_series()


class HostMeanings:
    """The meaning of each event name: its table (index into HOST_TABLES), pooled name, and further columns."""

    def __init__(self, rows: NameRows, on_python: bool, pooled: Pooled, unclear_files: UnclearFiles) -> None:
        self.texts = [name.name or name.display for name in rows.names]
        found = [host_name(text, on_python) for text in self.texts]
        self.table = np.array([HOST_TABLES.index(each.table) for each in found], np.int8)
        parts = [unclear_files.told(each.name) if each.table == "frames" else None for each in found]
        self.name = pooled.codes([part.name if part else each.name for each, part in zip(found, parts, strict=True)])
        self.kind = pooled.codes([each.kind for each in found])
        self.is_enqueue = np.array([is_enqueueing(text) for text in self.texts], np.bool_)
        self.is_memory = np.array([text in MEMORY_EVENTS for text in self.texts], np.bool_)
        self.is_release = np.array([text == MEMORY_EVENTS[1] for text in self.texts], np.bool_)
        self.file = pooled.codes([each.file if each else None for each in parts])
        self.line = np.array([each.line or -1 if each else -1 for each in parts], np.int64)
        self.function = pooled.codes([each.function if each else None for each in parts])


class HostFrame(NamedTuple):
    name: str
    file: str | None
    line: int | None
    function: str | None


class UnclearFiles:
    """Resolves the files of Python frames, which JAX's tracer names without their folder.

    A file name in the source lines of compiled programs is taken for that file. A file name used by JAX and its
    libraries is taken for theirs, and gets the folder LIBRARY.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._paths: dict[str, set[str]] = {}
        for path in files:
            self._paths.setdefault(path.rpartition("/")[2], set()).add(path)

    def told(self, name: str) -> HostFrame:
        """Parse a frame "file(line): function", and resolve its file if possible."""
        file, line, function, _ = naming.frame(name)
        if file is None or line is None or "/" in file:
            return HostFrame(name, file, line, function)
        paths = self._paths.get(file, set())
        if len(paths) == 1:
            file = next(iter(paths))
        elif file in LIBRARY_FILES:
            file = f"{LIBRARY}/{file}"
        return HostFrame(f"{file}({line}): {function}", file, line, function)


_SLOTS: Final = 4096
_FIRST_UNKNOWN: Final = 64
_MIXING: Final = np.array([[1], [31], [17]])


class Origins:
    """Looks up each compiled operation once for all events of a plane.

    The operations met last are kept by slot, in arrays, which find those of many events together.
    """

    def __init__(self, programs: Programs, pooled: Pooled, words: Words) -> None:
        self._programs = programs
        self._pooled = pooled
        self._words = words
        self._rows: dict[tuple[int, ...], int] = {}
        self._codes: list[tuple[int, int]] = []
        self._key_of_slot = np.full((3, _SLOTS), -1, np.int64)
        self._row_of_slot = np.zeros(_SLOTS, np.int64)

    def columns(
        self, batch: Batch, chosen: Positions, row: Positions, operation: Positions, role: Mapping[str, int]
    ) -> dict[str, pl.Series]:
        """Return columns call_stack and scope of chosen events; empty if no event belongs to a compiled program.

        Args:
            row: the row of each event's name.
            operation: for each event, as returned by `Batch.texts`.
        """
        compiled = np.flatnonzero(operation[chosen] != -1)
        if not compiled.size:
            return {}
        events = chosen[compiled]
        program, has_program = batch.integers(role["program_id"])
        module = batch.texts(role["hlo_module"], self._words)
        keys = np.stack([row[events], program[events], module[events]])
        slots = (keys * _MIXING).sum(axis=0) & (_SLOTS - 1)
        rows = np.zeros(len(events), np.int64)
        left, size = np.arange(len(events)), _FIRST_UNKNOWN
        while left.size:
            rows[left] = self._row_of_slot[slots[left]]
            left = left[(self._key_of_slot[:, slots[left]] != keys[:, left]).any(axis=0)]
            some, left, size = left[:size], left[size:], size * 4  # more and more, since these may make others known
            rows[some] = [
                self._row(tuple(key), event, has_program, operation)
                for key, event in zip(keys[:, some].T.tolist(), events[some].tolist(), strict=True)
            ]
            self._key_of_slot[:, slots[some]], self._row_of_slot[slots[some]] = keys[:, some], rows[some]
        values = np.array(self._codes, np.uint32)[rows]
        stack, scope = (np.full(len(chosen), NO_CODE, np.uint32) for _ in range(2))
        stack[compiled], scope[compiled] = values[:, 0], values[:, 1]
        return {"call_stack": column(stack), "scope": column(scope)}

    def _row(self, key: tuple[int, ...], event: int, has_program: Mask, operation: Positions) -> int:
        known = self._rows.get(key)
        if known is None:
            known = self._rows[key] = len(self._rows)
            _, program, module = key
            name = self._words.of(int(operation[event])) or ""
            self._codes.append(self._look_up(program if has_program[event] else None, self._words.of(module), name))
        return known

    def _look_up(self, program: int | None, module: str | None, name: str) -> tuple[int, int]:
        operation = self._programs.operation(program, module, name)
        codes = self._pooled.codes([operation.call_stack, operation.scope])
        return int(codes[0]), int(codes[1])
