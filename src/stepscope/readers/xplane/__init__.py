"""Reader for XLA's profiles, `.xplane.pb`, recorded by JAX, PyTorch/XLA and TensorFlow on TPU, GPU and CPU."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.gathering import EXPLANATIONS as COMMON_EXPLANATIONS
from stepscope.readers.gathering import Gathering, warnings
from stepscope.readers.source import ByteSource, Reader, ReadResult, is_json
from stepscope.readers.xplane import meanings
from stepscope.readers.xplane import meanings as names
from stepscope.readers.xplane.content import Content, Mask, Positions, WireError, signed, text
from stepscope.readers.xplane.events import Batch, LineReader, Words
from stepscope.readers.xplane.host import HostFacts, HostReader, launch_number, paired
from stepscope.readers.xplane.meanings import NameRows, Origins, Pooled, column, nullable, role_table
from stepscope.readers.xplane.plane import EventName, Plane, Programs, event_names, read_plane, stack_of_text
from stepscope.trace.metadata import Device, Metadata
from stepscope.trace.model import StoreWriter
from stepscope.trace.nesting import parents
from stepscope.trace.tables import rows_frame
from stepscope.trace.window import StepRange, Window

EXPLANATIONS: Final = {
    **COMMON_EXPLANATIONS,
    "truncated": "the file is truncated within a plane, which was left out",
    "damaged_plane": "planes were read only in part: the rest of their bytes is not a valid message",
    "damaged_line": "lines were read only in part: the rest of their bytes is not a valid message",
    "damaged_event": "events whose fields make no sense were skipped",
    "damaged_name": "names of events could not be read",
    "unnamed_event": "events whose name the file lacks were skipped",
    "damaged_program": "compiled programs could not be read: what they compute has no source lines",
    "program_left_out": "compiled programs were left out, because they were too large",
    "recorder": "the profiler says: {}",
    "compressed_data": "{}; what could be unpacked was read",
}
_MOST_PLANES: Final = 100_000
_MOST_REMARKS: Final = 100
_LONGEST_REMARK: Final = 500
_EPOCH_NS: Final = 10**17
"""Times above this count from 1970, those below from the start of the profile."""
_REPLACEMENT: Final = b"\xef\xbf\xbd"
"""The UTF-8 replacement character, which text conversions write for invalid bytes."""


def recognises(head: bytes) -> bool:
    """Whether a file starts with a plane: a length-delimited field with a plane's name near its start."""
    if head[:1] not in (b"\n", b"\x12", b"\x1a", b"\x22") or is_json(head):
        return False
    return meanings.KNOWN_PLANE.search(head[: 2**20]) is not None


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
    """Read a profile into the tables of `writer`.

    Raises:
        NotATraceError: no plane has events.
        UnreadableTraceError: the first plane is damaged.
        UsageError: the requested steps do not exist.
    """
    damage: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=writer.directory, prefix="unpacked-") as folder:
        content = Content(source, Path(folder))
        try:
            if source.damage is not None:
                damage[f"compressed_data:{source.damage}"] += 1
            profile = _Profile(source.name, content, damage)
            gathering = Gathering(Path(folder), damage=damage)
            profile.read(gathering)
            read_window = gathering.write(writer, window, steps)
        finally:
            content.close()
    return profile.metadata(gathering, read_window), warnings(damage, EXPLANATIONS)


class _Profile:
    def __init__(self, name: str, content: Content, damage: Counter[str]) -> None:
        self._name = name
        self._content = content
        self._damage = damage
        self._hosts: list[str] = []
        self._planes = self._find_planes()
        self._devices: dict[str, Device] = {}
        self._facts = HostFacts()
        self._environment = next((each.stats for each in self._planes if each.name == meanings.ENVIRONMENT_PLANE), {})

    def _find_planes(self) -> list[Plane]:
        planes: list[Plane] = []
        try:
            for number, value, start, end in self._content.fields(0, self._content.size):
                if number == 1 and end > start:
                    planes.append(read_plane(self._content, start, end))
                elif number in (2, 3) and isinstance(value, bytes) and len(self._damage) < _MOST_REMARKS:
                    self._damage[f"recorder:{text(value)[:_LONGEST_REMARK]}"] += 1
                elif number == 4 and isinstance(value, bytes):
                    self._hosts.append(text(value))
                if len(planes) > _MOST_PLANES:
                    raise NotATraceError(f"{self._name} has more than {_MOST_PLANES:,} planes, too many for a profile")
        except WireError as error:
            if not any(plane.name and plane.whole for plane in planes):
                raise UnreadableTraceError(self._refusal(error)) from None
            self._damage["truncated"] += 1
        self._damage["damaged_plane"] += sum(not plane.whole for plane in planes)
        return planes

    def _refusal(self, error: WireError) -> str:
        replaced = self._content.read(0, 2**20).count(_REPLACEMENT)
        why = (
            f"it was converted as if it were text, which replaced bytes in {replaced:,} places of its first MiB: copy "
            "the profile again, unchanged"
            if replaced > 10
            else "copy or record the profile again"
        )
        return f"{self._name} begins like an XLA profile (.xplane.pb), but is damaged or cut off: {error}; {why}"

    def read(self, gathering: Gathering) -> None:
        """Gather the events of all planes, hosts first, since their calls explain the devices' copies.

        Raises NotATraceError if there are no events.
        """
        by_name = {plane.name: plane for plane in self._planes}
        programs = Programs(self._content, by_name.get(meanings.METADATA_PLANE), self._damage)
        host = HostReader(self._content, gathering, programs, self._facts, self._hosts[0] if self._hosts else None)
        for plane in self._planes:
            if meanings.HOST_PLANES.match(plane.name):
                host.read(plane, dict(event_names(self._content, plane, self._damage)))
        device = DeviceReader(self._content, gathering, programs, self._facts)
        for plane in self._planes:
            if meanings.DEVICE_PLANE.fullmatch(plane.name):
                number, part = device_of(plane.name)
                if not part or number not in self._devices:
                    self._devices[number] = described(plane, number)
                device.read(plane, dict(event_names(self._content, plane, self._damage)))
        if self._facts.memory:
            gathering.add("memory", paired(self._facts.memory))
        if not gathering.events:
            found = ", ".join(repr(plane.name[:50]) for plane in self._planes[:5]) or "none"
            raise NotATraceError(f"{self._name} is an XLA profile without a single event (its planes: {found})")

    def metadata(self, gathering: Gathering, window: Window | None) -> Metadata:
        begin = self._environment.get("profile_start_time")
        first = gathering.origin_ns or 0
        origin = first if first > _EPOCH_NS else begin + first if isinstance(begin, int) and begin > 0 else None
        recorded = [*(["stacks"] if self._facts.frames else []), *(["memory"] if self._facts.memory else [])]
        return Metadata(
            path=self._name,
            format="xplane",
            events=gathering.events,
            complete_events=gathering.complete_events,
            origin_unix_ns=origin,
            host=self._hosts[0] if self._hosts else None,
            devices=tuple(self._devices[number] for number in sorted(self._devices)),
            recorded=tuple(recorded),
            window=window,
        )


READER: Final = Reader("xplane", recognises, read)


def uncovered(work: pl.DataFrame) -> pl.DataFrame:
    """Replace operations of one queue that contain others by the pieces in which none of the others ran.

    The union of times stays the same, and no time is counted twice. `work` has a column `is_container`, the result does
    not.
    """
    start, duration = work["start_ns"].to_numpy(), work["duration_ns"].to_numpy()
    end = start + duration
    parent = parents(work["lane"].to_numpy(), start, duration)
    is_container = work["is_container"].to_numpy() | np.isin(np.arange(len(parent)), parent)
    inner = np.flatnonzero(parent >= 0)
    inner = inner[np.lexsort((start[inner], parent[inner]))]
    around = parent[inner]
    first = np.append(True, around[1:] != around[:-1]) if len(inner) else np.zeros(0, np.bool_)
    reached = _reached(np.minimum(end[inner], end[around]), first)
    begin = np.where(first, start[around], np.append(0, reached[:-1]) if len(inner) else reached)
    last = np.append(first[1:], True) if len(inner) else first
    childless = np.flatnonzero(is_container & ~np.isin(np.arange(len(parent)), parent))
    owner = np.concatenate([around, around[last], childless])
    piece_start = np.concatenate([begin, reached[last], start[childless]])
    piece_end = np.concatenate([start[inner], end[around[last]], end[childless]])
    kept = piece_end > piece_start
    pieces = work[owner[kept]].with_columns(
        start_ns=pl.Series(piece_start[kept]), duration_ns=pl.Series((piece_end - piece_start)[kept])
    )
    whole = work.filter(pl.Series(~is_container))
    return pl.concat([whole, pieces]).sort("start_ns", maintain_order=True).drop("is_container")


def _reached(ends: np.ndarray[tuple[int], np.dtype[np.int64]], first: np.ndarray[tuple[int], np.dtype[np.bool_]]):  # type: ignore[no-untyped-def]
    """The running maximum of the ends within each run of rows; `first` marks the start of a run."""
    result = ends.copy()
    bounds = np.append(np.flatnonzero(first), len(ends))
    for begin, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        np.maximum.accumulate(ends[begin:stop], out=result[begin:stop])
    return result


ROLES: Final = (
    "correlation_id", "kernel_details", "memcpy_details", "memset_details", "theoretical_occupancy_pct", "hlo_op",
    "hlo_module", "program_id", "_c", "run_id", "core_type", "step_num",
)  # fmt: skip
"""Statistics of device events that are read."""
ROLE: Final = {name: place for place, name in enumerate(ROLES, 1)}
_WORK_TEXT: Final = ("kind", "collective", "group", "message_type", "call_stack", "scope")
_WORK_NUMBERS: Final = ("bytes", "group_size", "message_elements")


def described(plane: Plane, device: str) -> Device:
    facts = plane.stats

    def number(name: str, factor: float = 1.0) -> float | None:
        value = facts.get(name)
        return value * factor if isinstance(value, (int, float)) and 0 < value < 1e18 else None

    names_of_device = (facts.get(key) for key in ("device_type_string", "gpu_device_name", "device_name", "gpu_model"))
    name = next((value for value in names_of_device if value), None)
    major, minor = facts.get("compute_cap_major"), facts.get("compute_cap_minor")
    units, memory = number("core_count"), number("memory_size")
    return Device(
        device=device,
        name=name if isinstance(name, str) else None,
        memory_bytes=None if memory is None else int(memory),
        compute_capability=f"{major}.{minor}" if isinstance(major, int) and isinstance(minor, int) else None,
        multiprocessors=None if units is None else int(units),
        peak_flops_s=number("peak_teraflops_per_second", 1e12),
        bandwidth_bytes_s=number("peak_hbm_bw_gigabytes_per_second", 1e9) or number("memory_bandwidth"),
    )


def device_of(plane_name: str) -> tuple[str, str]:
    """Return the number or name of a plane's device, and the part of it that the plane covers, "" for all."""
    match = names.DEVICE_PLANE.fullmatch(plane_name)
    if match is None:
        return plane_name, ""
    return match["number"] or plane_name.removeprefix("/device:"), (match["part"] or "").strip()


class DeviceReader:
    """Reads the lines of device planes into a gathering."""

    def __init__(self, content: Content, gathering: Gathering, programs: Programs, facts: HostFacts) -> None:
        self._content = content
        self._gathering = gathering
        self._programs = programs
        self._pooled = Pooled(gathering.pool)
        self._facts = facts

    def read(self, plane: Plane, found: dict[int, EventName]) -> None:
        """Read every line of a plane; executions of programs first, since operations refer to them."""
        device, part = device_of(plane.name)
        words = Words(plane.stat_names)
        rows = NameRows(found)
        meanings = _Meanings(rows, self._pooled, self._programs)
        origins = Origins(self._programs, self._pooled, words)
        state = _Plane(plane.name, device, part, rows, meanings, words, origins, _Executions())
        readers = []
        for start, end in plane.lines:
            reader = LineReader(self._content, start, end, role_table(plane, ROLES), self._gathering.damage)
            try:
                reader.read_head()
            except WireError:
                self._gathering.damage["damaged_line"] += 1
                continue
            readers.append((text(reader.head.get(11) or reader.head.get(2) or b""), reader))
        has_streams = any(names.STREAM_LINE.match(name) for name, _ in readers)
        for name, reader in sorted(readers, key=lambda line: line[0] != names.MODULES_LINE):
            describes = names.DESCRIBING_LINES.fullmatch(name) or (has_streams and not names.STREAM_LINE.match(name))
            try:
                self._read_line(state, name, reader, is_work=not describes)
            except WireError:
                self._gathering.damage["damaged_line"] += 1

    def _read_line(self, state: _Plane, name: str, reader: LineReader, *, is_work: bool) -> None:
        number = reader.head.get(3)
        origin_ns = signed(number) if isinstance(number, int) else 0
        stream = names.STREAM_LINE.match(name)
        queue = " ".join(each for each in (state.part, stream[1] if stream else name) if each)
        nested: list[pl.DataFrame] = []
        lane = None
        for batch in reader.batches():
            if lane is None:
                lane = self._gathering.lane(
                    (state.name, name, reader.head.get(1, 0)),
                    kind="queue" if is_work else "other",
                    process=state.name,
                    thread=queue,
                    name=name,
                    device=state.device,
                    queue=queue if is_work else None,
                )
            rows = self._rows(state, batch, origin_ns, lane)
            if not is_work:
                self._describe(state, name, batch, rows)
            else:
                beside = name.startswith(names.ASYNCHRONOUS_LINE)
                work = self._work(state, batch, rows, queue, beside=beside)
                if state.meanings.has_containers and not beside:
                    nested.append(work)
                else:
                    self._gathering.add("device_work", work.drop("is_container"))
        if nested:
            self._gathering.add("device_work", uncovered(pl.concat(nested, how="diagonal")))

    def _rows(self, state: _Plane, batch: Batch, origin_ns: int, lane: int) -> _Rows:
        row, known = state.rows.of(batch.name)
        if not known.all():
            self._gathering.damage["unnamed_event"] += int((~known).sum())
        chosen = np.flatnonzero(known)
        start = origin_ns + batch.start_ns
        return _Rows(chosen, row, start, batch.duration_ns, lane)

    def _describe(self, state: _Plane, line: str, batch: Batch, rows: _Rows) -> None:
        chosen = rows.chosen[batch.lasts[rows.chosen]]
        row = rows.row[chosen]
        if line == names.MODULES_LINE:
            consumer, has = batch.integers(ROLE["_c"])
            run, has_run = batch.integers(ROLE["run_id"])
            core = batch.integers(ROLE["core_type"])[0]
            device = int(state.device) if state.device.isdecimal() else 0
            number = np.where(has, consumer, launch_number(run, np.full(len(run), device), core))
            state.executions.add(rows.start[chosen], rows.duration[chosen], number[chosen], (has | has_run)[chosen])
        columns = {
            **rows.columns(chosen),
            "name": column(state.meanings.name[row]),
            "kind": self._pooled.constant("profiler" if line == names.OVERHEAD_LINE else "device", len(chosen)),
        }
        if line == "Steps":
            step, has_step = batch.integers(ROLE["step_num"])
            named = state.meanings.number[row]
            columns["step"] = nullable(np.where(has_step[chosen], step[chosen], named), has_step[chosen] | (named >= 0))
        self._gathering.add("annotations", pl.DataFrame(columns))

    def _work(self, state: _Plane, batch: Batch, rows: _Rows, queue: str, *, beside: bool) -> pl.DataFrame:
        """Rows of a queue; a copy's bytes count where it runs (`beside` the operations), not where it is started."""
        chosen, row, meanings = rows.chosen, rows.row[rows.chosen], state.meanings
        numbers = {name: meanings.numbers[name][row] for name in _WORK_NUMBERS}
        if not beside:
            numbers["bytes"] = np.where(meanings.is_handle[row], -1, numbers["bytes"])
        columns = {
            **rows.columns(chosen),
            "name": column(meanings.name[row]),
            "device": self._pooled.constant(state.device, len(chosen)),
            "queue": self._pooled.constant(queue, len(chosen)),
            "is_container": pl.Series(meanings.is_container[row]),
            **{name: column(meanings.codes[name][row]) for name in _WORK_TEXT},
            **{name: nullable(values, values >= 0) for name, values in numbers.items()},
        }
        calls, is_called = batch.integers(ROLE["correlation_id"])
        if is_called.any():
            columns["correlation"] = nullable(calls[chosen], is_called[chosen])
            self._gpu_columns(state, batch, chosen, columns, calls)
        else:
            columns["correlation"] = state.executions.around(rows.start[chosen])
        operation = batch.texts(ROLE["hlo_op"], state.words)
        origin_columns = state.origins.columns(batch, chosen, rows.row, operation, ROLE)
        for name, values in origin_columns.items():
            columns[name] = pl.select(pl.coalesce(columns[name], values)).to_series()
        return pl.DataFrame(columns)

    def _gpu_columns(
        self, state: _Plane, batch: Batch, chosen: Positions, columns: dict[str, pl.Series], calls: Positions
    ) -> None:
        details = batch.texts(ROLE["kernel_details"], state.words)[chosen]
        if (details != -1).any():
            different, inverse = np.unique(details, return_inverse=True)
            parsed = [names.kernel_details(state.words.of(number) or "") for number in different.tolist()]
            table = rows_frame(parsed, dict(_KERNEL_COLUMNS))
            columns.update({name: table[name].gather(inverse.ravel()) for name in table.columns})
        if "occupancy" in columns:
            share, has_share = batch.numbers(ROLE["theoretical_occupancy_pct"])
            known = nullable(share[chosen] / 100, has_share[chosen] & (share[chosen] > 0) & (share[chosen] <= 100))
            columns["occupancy"] = pl.select(pl.coalesce(columns["occupancy"], known)).to_series()
        copies = batch.texts(ROLE["memcpy_details"], state.words)[chosen]
        copies = np.where(copies != -1, copies, batch.texts(ROLE["memset_details"], state.words)[chosen])
        kinds = columns["kind"]
        changed: dict[int, str] = {}
        sizes: dict[int, int] = {}
        named: dict[int, str] = {}
        different = np.unique(copies)
        texts = [state.words.of(number) or "" for number in different.tolist()]
        meanings = [(names.copied_kind(each), names.copied_bytes(each), names.copied_name(each)) for each in texts]
        which = np.searchsorted(different, copies).tolist()
        for place in np.flatnonzero(copies != -1).tolist():
            kind, size, name = meanings[which[place]]
            if kind is not None and name is not None:
                changed[place], named[place] = kind, name
            if size is not None:
                sizes[place] = size
        unclear = state.meanings.is_unclear_copy[state.rows.of(batch.name[chosen])[0]]
        for place in np.flatnonzero(unclear).tolist():
            kind = self._facts.copies.get(int(calls[chosen[place]]))
            if kind is not None:
                changed.setdefault(place, kind)
        if changed:
            codes = pl.Series(self._pooled.codes(list(changed.values())))
            columns["kind"] = kinds.clone().scatter(list(changed), codes)
        if named:
            codes = pl.Series(self._pooled.codes(list(named.values())))
            columns["name"] = columns["name"].clone().scatter(list(named), codes)
        if sizes:
            columns["bytes"] = columns["bytes"].clone().scatter(list(sizes), list(sizes.values()))


_KERNEL_COLUMNS: Final = {
    "grid": pl.String, "block": pl.String, "registers": pl.Int64, "shared_memory_bytes": pl.Int64,
    "occupancy": pl.Float64,
}  # fmt: skip


@dataclass(slots=True)
class _Plane:
    name: str
    device: str
    part: str
    rows: NameRows
    meanings: _Meanings
    words: Words
    origins: Origins
    executions: _Executions


@dataclass(slots=True)
class _Rows:
    """Events of a batch with known names (`chosen`); the other arrays cover all events."""

    chosen: Positions
    row: Positions
    start: Positions
    duration: Positions
    lane: int

    def columns(self, chosen: Positions) -> dict[str, pl.Series]:
        return {
            "start_ns": pl.Series(self.start[chosen]),
            "duration_ns": pl.Series(self.duration[chosen]),
            "lane": pl.repeat(self.lane, len(chosen), dtype=pl.Int32, eager=True),
        }


class _Executions:
    """When each execution of a program ran on a device, and the number of the call that launched it."""

    def __init__(self) -> None:
        nothing = np.zeros(0, np.int64)
        self._start, self._end, self._number, self._has = nothing, nothing, nothing, np.zeros(0, np.bool_)

    def add(self, start: Positions, duration: Positions, number: Positions, has: Mask) -> None:
        start = np.concatenate([self._start, start])
        order = np.argsort(start, kind="stable")
        self._start = start[order]
        self._end = np.concatenate([self._end, self._start[:0], start[len(self._end) :] + duration])[order]
        self._number = np.concatenate([self._number, number])[order]
        self._has = np.concatenate([self._has, has])[order]

    def around(self, times: Positions) -> pl.Series:
        """The number of the execution around each time, or null."""
        if not len(self._start):
            return pl.repeat(None, len(times), dtype=pl.Int64, eager=True)
        place = np.searchsorted(self._start, times, side="right") - 1
        inside = (place >= 0) & (times <= self._end[place]) & self._has[place]
        return nullable(self._number[place], inside)


class _Meanings:
    """The meaning of each name of a device's events; arrays by row."""

    def __init__(self, rows: NameRows, pooled: Pooled, programs: Programs) -> None:
        found = [_operation(name, programs) for name in rows.names]
        shown = [name.display or name.name.removesuffix(".kd") for name in rows.names]
        self.name = pooled.codes(shown)
        self.number = np.array([int(each) if each.isdecimal() and len(each) < 18 else -1 for each in shown], np.int64)
        self.is_container = np.array([each.is_container for each, _ in found], np.bool_)
        self.is_handle = np.array([each.is_handle for each, _ in found], np.bool_)
        self.has_containers = bool(self.is_container.any())
        self.is_unclear_copy = np.array(
            [names.COPIED_BY_KERNEL.search(name.name) is not None for name in rows.names], np.bool_
        )
        text: dict[str, list[str | None]] = {
            "kind": [each.kind for each, _ in found],
            "collective": [each.collective for each, _ in found],
            "group": [each.group for each, _ in found],
            "message_type": [each.message_type for each, _ in found],
            "call_stack": [origin[0] for _, origin in found],
            "scope": [origin[1] for _, origin in found],
        }
        self.codes = {name: pooled.codes(values) for name, values in text.items()}
        self.numbers = {
            "bytes": _numbers([origin[2] for _, origin in found]),
            "group_size": _numbers([each.group_size for each, _ in found]),
            "message_elements": _numbers([each.message_elements for each, _ in found]),
        }


def _numbers(values: Sequence[int | None]) -> Positions:
    return np.array([-1 if value is None else value for value in values], np.int64)


def _operation(
    name: EventName, programs: Programs
) -> tuple[names.DeviceOperation, tuple[str | None, str | None, int | None]]:
    category = name.stats.get("hlo_category")
    meaning = names.device_operation(name.name, category if isinstance(category, str) else "")
    program = name.stats.get("program_id")
    written = name.name[1:].partition(" = ")[0] if name.name.startswith("%") else name.display
    known = programs.operation(program if isinstance(program, int) else None, None, written)
    stack = known.call_stack
    for stat in ("source_stack", "source"):
        source = name.stats.get(stat)
        if stack is None and isinstance(source, str):
            stack = stack_of_text(source if source.count(":") > 1 else f"{source}:0")
    scope = name.stats.get("tf_op")
    scope = scope.rstrip(":") if isinstance(scope, str) and scope.rstrip(":") else known.scope
    moved = name.stats.get("bytes_accessed")
    is_copy = meaning.kind.startswith("copy") and "-done" not in name.display
    return meaning, (stack, scope, moved if is_copy and isinstance(moved, int) and 0 < moved < 2**62 else None)
