"""Logs of each rank's collectives: dumps of PyTorch's flight recorder, and files of NCCL's Inspector.

Flight recorder (TORCH_FR_BUFFER_SIZE, formerly TORCH_NCCL_TRACE_BUFFER_SIZE): a file for each rank, a pickle
(nccl_trace_rank_3) or JSON, with the last calls, their sizes, states and call stacks, and the members of groups.

Inspector (NCCL_INSPECTOR_ENABLE=1, from NCCL 2.28; RCCL has it too): a line of JSON for each collective of a
communicator on a rank, with message size, time on the device, and bandwidth.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import polars as pl

from stepscope.errors import NotATraceError, StepscopeError, UnreadableTraceError
from stepscope.files import text_of
from stepscope.readers.plain_values import PICKLES, plain_value
from stepscope.readers.source import ByteSource, current
from stepscope.trace.naming import DEFAULT_USER_CODE

CALL_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "process": pl.Int64,  # index in `CollectiveLogs.processes`
    "group": pl.String,
    "size": pl.Int64,  # ranks of the group; null where unknown
    "number": pl.Int64,  # in the group, from 1; the same on every rank
    "name": pl.String,  # as written, such as "all_reduce" or "AllGather"
    "number_type": pl.String,
    "elements_in": pl.Int64,  # numbers in the inputs and outputs; null where not written
    "elements_out": pl.Int64,
    "bytes": pl.Int64,  # message as nccl-tests count it; null where unknown
    "is_done": pl.Boolean,
    "is_started": pl.Boolean,  # on the device; null where unknown
    "created_ns": pl.Int64,  # when the host made the call, since 1970; null where unknown
    "duration_ns": pl.Int64,  # on the device; null where it was not timed
    "bus_gb_per_s": pl.Float64,  # null where unknown
    "algorithm": pl.String,  # and protocol, such as "RING LL128"; "" where not written
    "place": pl.String,  # the user's line that made the call; "" where unknown
}
"""Columns of the collectives of all ranks: one row for each call on each rank."""


class _Call(NamedTuple):
    """A row of CALL_SCHEMA."""

    process: int
    group: str
    size: int | None
    number: int
    name: str
    number_type: str
    elements_in: int | None
    elements_out: int | None
    bytes: int | None
    is_done: bool
    is_started: bool | None
    created_ns: int | None
    duration_ns: int | None
    bus_gb_per_s: float | None
    algorithm: str
    place: str


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A rank's process.

    Attributes:
        name: "rank 3", or the place of the process where its rank is unknown.
        host: "" where unknown.
        is_whole: whether the log has its calls from the first on.
    """

    name: str
    rank: int | None
    path: str
    host: str = ""
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveLogs:
    """Logs of a job's collectives.

    Attributes:
        calls: columns as in CALL_SCHEMA.
        members: ranks of each group, as far as known.
        unreadable: files that could not be read, with the reason.
        kinds: "flight recorder", "NCCL Inspector".
    """

    calls: pl.DataFrame
    processes: tuple[LoggedProcess, ...]
    members: Mapping[str, tuple[int, ...]]
    unreadable: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]


_HEAD_BYTES: Final = 1 << 12
_IS_PICKLED_DUMP: Final = re.compile(
    rb"\A.{2,36}?(?:pg_config|(?:version|entries).{0,2000}?(?:pg_config|pg_status|collective_seq_id))", re.DOTALL
)
_IS_DUMP: Final = re.compile(
    rb'\A\{\s*"(?:comm_lib_version|nccl_version|nccl_comm_state|entries|pg_config|pg_status|version|rank)"\s*:'
)
_OF_DUMPS: Final = re.compile(rb'"(?:collective_seq_id|pg_config|pg_status)"\s*:')
_OF_TRACES: Final = (b'"traceEvents"', b'"schemaVersion"', b'"distributedInfo"')
"""Keys of traces, of which Kineto's list the groups of ranks too."""
_IS_INSPECTOR: Final = re.compile(rb'\A\{\s*"header"\s*:\s*\{.{0,400}?"n_ranks"\s*:.{0,800}?"(?:coll|p2p)_perf"', re.S)
_RANK: Final = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|bin|log|txt))*$")
_DEFAULT_GROUP: Final = "0 (default_pg)"
"""How entries call the group that gloo configures without a name."""
_LONGEST: Final = 400
_LARGEST: Final = 1 << 50
_FASTEST: Final = 1e6
_LATEST_NS: Final = 1 << 62
_LONGEST_NS: Final = 1 << 46
_MOST_RANKS: Final = 1 << 24
_MOST_DIMENSIONS: Final = 64
"""As PyTorch has them."""


def kind_of_log(head: bytes) -> str | None:
    """Which of the two a file is, by its first bytes; None if neither."""
    if head.startswith(PICKLES):
        return "flight recorder" if _IS_PICKLED_DUMP.match(head[:_HEAD_BYTES]) else None
    text = text_of(head[:_HEAD_BYTES])
    if not text.startswith(b"{") or any(key in text for key in _OF_TRACES):
        return None
    if _IS_INSPECTOR.match(text):
        return "NCCL Inspector"
    return "flight recorder" if _IS_DUMP.match(text) and _OF_DUMPS.search(text) else None


def is_collective_log(path: str | Path) -> bool:
    """Whether a file is one; a packed or unreadable file is not."""
    try:
        with open(path, "rb") as file:
            return kind_of_log(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def log_files(path: str | Path) -> list[Path]:
    """The logs at a path: the file itself, or those in the folder, by name."""
    if not os.path.isdir(path):
        return [Path(path)] if os.path.isfile(path) and is_collective_log(path) else []
    try:
        found = sorted(Path(path).iterdir(), key=_in_order)
    except OSError:
        return []
    return [file for file in found if file.is_file() and is_collective_log(file)]


def _in_order(file: Path) -> tuple[bool, str, int, str]:
    match = _RANK.search(file.name)
    stem, rank = (file.name[: match.start()], int(match[1])) if match else (file.name, -1)
    return (file.suffix == ".json", stem, rank, file.name)  # the JSON of a dump has no call stacks


def collective_logs(files: Iterable[Path]) -> CollectiveLogs:
    """Read logs; files that cannot be read are named in `unreadable`.

    Raises:
        UnreadableTraceError: none of them can be read.
    """
    job = _Job()
    unreadable = []
    for file in files:
        try:
            job.read(file)
        except StepscopeError as error:
            unreadable.append((_text(str(file)), _text(str(error))))
    if not job.processes:
        raise UnreadableTraceError(unreadable[0][1] if unreadable else "no log of collectives was given")
    return job.logs(tuple(unreadable))


class _Job:
    def __init__(self) -> None:
        self.processes: list[LoggedProcess] = []
        self.rows: list[_Call] = []
        self.members: dict[str, tuple[int, ...]] = {}
        self.kinds: list[str] = []
        self._inspected: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}  # communicator: rank in it, ranks
        self._of_inspected: dict[tuple[str, int], int] = {}

    def read(self, file: Path) -> None:
        source = ByteSource(file)
        try:
            kind = kind_of_log(source.peek())
            data = b"".join(source.blocks())
            if kind == "NCCL Inspector":
                self._inspector(data, _text(str(file)))
            else:
                self._dump(plain_value(data, str(file), "is a flight recorder's dump"), file)
            if kind is not None and kind not in self.kinds:
                self.kinds.append(kind)
        finally:
            source.close()

    def logs(self, unreadable: tuple[tuple[str, str], ...]) -> CollectiveLogs:
        self._name_inspected()
        calls = pl.DataFrame(self.rows, schema=CALL_SCHEMA, orient="row", strict=False, infer_schema_length=None)
        return CollectiveLogs(calls, tuple(self.processes), self.members, unreadable, tuple(self.kinds))

    def _dump(self, content: Any, file: Path) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("entries", []), list):
            raise NotATraceError(f"{file} is a flight recorder's dump without a list of entries")
        match = _RANK.search(file.name)
        rank = int(match[1]) if match else None
        if rank is not None and (other := next((each for each in self.processes if each.rank == rank), None)):
            raise NotATraceError(f"{file} is another dump of rank {rank}, of which {other.path} was read")
        entries, process = content.get("entries", []), len(self.processes)
        for entry in entries:
            current().spend("rows", 1)
            call = _call(entry, process)
            if call is not None:
                self.rows.append(call)
        self.members.update((group, ranks) for group, ranks in _members(content.get("pg_config")) if ranks)
        first = entries[0].get("record_id") if entries and isinstance(entries[0], dict) else 0
        name = f"rank {rank}" if rank is not None else file.name
        self.processes.append(LoggedProcess(_text(name), rank, _text(str(file)), is_whole=first == 0))

    def _inspector(self, data: bytes, path: str) -> None:
        read = damaged = 0
        for line in data.split(b"\n"):
            if not line.strip():
                continue
            current().spend("rows", 1)
            try:
                record = _INSPECTED.decode(line)
            except (msgspec.MsgspecError, RecursionError, ValueError):
                damaged += 1
                continue
            read += 1
            if record.coll_perf is not None:
                self._inspected_call(record, record.coll_perf, path)
        if damaged > max(read, 1):
            raise NotATraceError(f"{path} is a log of NCCL's Inspector, but {damaged} of its lines cannot be read")

    def _inspected_call(self, record: _Inspected, perf: _Collective, path: str) -> None:
        header, about = record.header, record.metadata
        number, size = _number(perf.coll_sn), _number(perf.coll_msg_size_bytes, _LARGEST)
        ranks = _number(header.n_ranks, _MOST_RANKS)
        if number is None or ranks is None or _number(header.rank, _MOST_RANKS) is None:
            return
        place = (about.hostname, about.pid) if about.pid >= 0 else (path, -1)
        if place not in self._of_inspected:
            self._of_inspected[place] = len(self.processes)
            self.processes.append(LoggedProcess(_text(f"{place[0]} {place[1]}"), None, path, _text(about.hostname)))
        process = self._of_inspected[place]
        self._inspected.setdefault(place, {})[_text(header.id)] = (header.rank, ranks)
        time_us, rate = perf.coll_exec_time_us, perf.coll_busbw_gbs
        is_timed = perf.coll_timing_source in ("", "kernel_gpu") and 0 < time_us < _LONGEST_NS / 1e3
        self.rows.append(_Call(
            process, _text(header.id), ranks, number, _text(perf.coll), "", None, None, size, True, True, None,
            round(time_us * 1e3) if is_timed else None, rate if is_timed and 0 < rate < _FASTEST else None,
            _text(f"{perf.coll_algo} {perf.coll_proto}".replace("unknown", "").strip()), "",
        ))  # fmt: skip

    def _name_inspected(self) -> None:
        """Call processes by their ranks in the communicator that has them all, if there is one."""
        sizes = {name: size for groups in self._inspected.values() for name, (_, size) in groups.items()}
        most = max(sizes.values(), default=0)
        largest = [name for name, size in sizes.items() if size == most]
        whole = largest[0] if len(largest) == 1 and all(largest[0] in each for each in self._inspected.values()) else ""
        ranks: dict[str, dict[int, int | None]] = {}
        for place, groups in self._inspected.items():
            process = self._of_inspected[place]
            rank = groups[whole][0] if whole else None
            for name, (place_in, _) in groups.items():
                ranks.setdefault(name, {})[place_in] = rank
            if rank is not None:
                self.processes[process] = replace(self.processes[process], name=f"rank {rank}", rank=rank)
        for name, known in ranks.items():
            if whole and len(known) == sizes[name]:
                self.members[name] = tuple(rank for _, rank in sorted(known.items()) if rank is not None)


def _call(entry: Any, process: int) -> _Call | None:
    """A call; None for what is no collective, or damaged."""
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    number, name, group = _number(entry.get("collective_seq_id")), entry.get("profiling_name"), _group(entry)
    if number is None or not isinstance(name, str) or group is None:
        return None
    called = _text(name.rpartition(":")[2])
    inputs, outputs = _elements(entry.get("input_sizes")), _elements(entry.get("output_sizes"))
    types = entry.get("input_dtypes")
    number_type = _text(types[0]) if isinstance(types, list) and types and isinstance(types[0], str) else ""
    width, counted = _WIDTHS.get(number_type.lower()), outputs if "gather" in called else inputs
    started, ended = (_number(entry.get(f"time_discovered_{what}_ns")) for what in ("started", "completed"))
    took, state = entry.get("duration_ms"), entry.get("state")
    # of other backends than NCCL entries keep their first state, and are retired when they are done
    is_done = state == "completed" or bool(ended) or (entry.get("retired") is True and not name.startswith("nccl:"))
    return _Call(
        process=process,
        group=group,
        size=None,
        number=number,
        name=called,
        number_type=number_type,
        elements_in=inputs,
        elements_out=outputs,
        bytes=counted * width if counted is not None and width else None,
        is_done=is_done,
        is_started=True if is_done or state == "started" or started else (False if state == "scheduled" else None),
        created_ns=_number(entry.get("time_created_ns")) or None,
        duration_ns=round(took * 1e6) if isinstance(took, (int, float)) and 0 < took < _LONGEST_NS / 1e6 else None,
        bus_gb_per_s=None,
        algorithm="",
        place=_place(entry.get("frames")),
    )


_WIDTHS: Final = {
    "float": 4, "half": 2, "bfloat16": 2, "double": 8, "long": 8, "int": 4, "byte": 1, "char": 1, "bool": 1, "short": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def _members(configured: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, each in configured.items() if isinstance(configured, dict) else ():
        if isinstance(each, dict) and isinstance(ranks := each.get("ranks"), (str, list, tuple)):
            group = _group_name(str(key), each.get("desc")) if key != "" else _DEFAULT_GROUP
            current().spend("values", len(ranks))  # which groups of a pickle can share
            numbers = re.findall(r"\d{1,7}", ranks) if isinstance(ranks, str) else ranks
            yield group, tuple(int(each) for each in numbers if isinstance(each, str) or _number(each) is not None)


def _group(entry: Mapping[Any, Any]) -> str | None:
    named = entry.get("process_group")
    if isinstance(named, (list, tuple)) and named and isinstance(named[0], str):
        return _group_name(named[0], named[-1])
    number = entry.get("pg_id")
    return str(number) if isinstance(number, int) else None


def _group_name(name: str, described: Any) -> str:
    """Such as "0 (default_pg)": several groups may have one description, and a number says little."""
    is_told = isinstance(described, str) and described not in ("", "undefined", name)
    return _text(f"{name[:_LONGEST]} ({described[:_LONGEST]})" if is_told else name)


def _text(text: str) -> str:
    """Without what UTF-8 cannot write, and no longer than names are."""
    return text[: 2 * _LONGEST].encode("utf-8", "replace").decode()


def _number(value: Any, limit: int = _LATEST_NS) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:  # as the JSON form writes some
        value = int(value)
    return value if type(value) is int and 0 <= value < limit else None


def _elements(sizes: Any) -> int | None:
    """Numbers in all tensors of a list of shapes; None if it is none."""
    if not isinstance(sizes, list):
        return None
    current().spend("values", len(sizes))  # which calls of a pickle can share
    total = 0
    for shape in sizes:
        count = 1
        for length in shape if isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS else [None]:
            known = _number(length)
            if known is None:
                return None
            count = min(count * known, _LARGEST)
        total += count
    return min(total, _LARGEST)


def _place(frames: Any) -> str:
    """The innermost frame of the user's code, such as "train.py:12 in step"; "" if there is none."""
    for frame in frames[:200] if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
        if isinstance(file, str) and isinstance(line, int) and file in DEFAULT_USER_CODE:
            return _text(f"{file[-_LONGEST:]}:{line}" + (f" in {name}" if isinstance(name, str) else ""))
    return ""


class _Header(msgspec.Struct):
    id: str = ""
    rank: int = -1
    n_ranks: int = 0


class _About(msgspec.Struct):
    hostname: str = ""
    pid: int = -1


class _Collective(msgspec.Struct):
    coll: str = ""
    coll_sn: int = -1
    coll_msg_size_bytes: int = -1
    coll_exec_time_us: float = 0
    coll_timing_source: str = ""
    coll_busbw_gbs: float = 0
    coll_algo: str = ""
    coll_proto: str = ""


class _Inspected(msgspec.Struct):
    header: _Header
    metadata: _About = msgspec.field(default_factory=_About)
    coll_perf: _Collective | None = None


_INSPECTED: Final = msgspec.json.Decoder(_Inspected)
