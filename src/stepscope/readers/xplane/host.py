"""Read host threads of a profile: steps, marks, Python frames, operators, device API calls and allocations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import polars as pl

from stepscope.readers.gathering import Gathering
from stepscope.readers.xplane.content import Content, Mask, Positions, WireError, signed, text
from stepscope.readers.xplane.events import Batch, LineReader, Words
from stepscope.readers.xplane.meanings import (
    HOST_TABLES,
    PYTHON_THREADS,
    HostMeanings,
    NameRows,
    Origins,
    Pooled,
    UnclearFiles,
    column,
    copied_bytes,
    copied_kind,
    nullable,
    role_table,
)
from stepscope.readers.xplane.plane import EventName, Plane, Programs
from stepscope.trace import naming

_DEVICE_ALLOCATOR: Final = re.compile(r"[A-Za-z]+_(\d+)_")
"""Device allocators, such as GPU_0_bfc; others belong to the host."""
HOST: Final = "cpu"


def memory_rows(
    batch: Batch,
    chosen: Positions,
    start_ns: Positions,
    releases: Mask,
    words: Words,
    lane: int,
    role: Mapping[str, int],
) -> pl.DataFrame:
    """Convert chosen events to rows of `memory`, with a column `releases`; `bytes` is null if unknown."""
    size, has_size = batch.integers(role["allocation_bytes"])
    requested, has_requested = batch.integers(role["requested_bytes"])
    size = np.where(has_size, size, requested)[chosen]
    address, has_address = batch.integers(role["addr"])
    total, has_total = batch.integers(role["bytes_allocated"])
    index, has_index = batch.integers(role["index_on_host"])
    allocator = batch.texts(role["allocator_name"], words)
    devices = {number: _device(words.of(number)) for number in np.unique(allocator[chosen]).tolist()}
    by_name = [devices[number] for number in allocator[chosen].tolist()]
    return pl.DataFrame(
        {
            "start_ns": start_ns[chosen],
            "lane": pl.repeat(lane, len(chosen), dtype=pl.Int32, eager=True),
            "device": [
                str(number) if has else device
                for number, has, device in zip(index[chosen].tolist(), has_index[chosen].tolist(), by_name, strict=True)
            ],
            "address": nullable(address[chosen], has_address[chosen]),
            "bytes": nullable(np.where(releases, -size, size), (has_size | has_requested)[chosen]),
            "total_allocated": nullable(total[chosen], has_total[chosen]),
            "releases": releases,
        },
        schema_overrides={"device": pl.String},
    )


def paired(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Merge the rows of all threads; a release without a size gets that of the last allocation at its address.

    Rows that still have no size were allocated before the recording, and are dropped.
    """
    rows = pl.concat(parts).sort("start_ns", maintain_order=True)
    keys = ["device", "address"]
    made = rows.filter(~pl.col("releases")).select("start_ns", *keys, made="bytes")
    rows = rows.join_asof(made, on="start_ns", by=keys, strategy="backward", check_sortedness=False)
    size = pl.when(pl.col("releases")).then(pl.coalesce("bytes", -pl.col("made"))).otherwise("bytes")
    return rows.with_columns(bytes=size).filter(pl.col("bytes").is_not_null()).drop("made", "releases")


def _device(allocator: str | None) -> str:
    match = _DEVICE_ALLOCATOR.match(allocator or "")
    return match[1] if match else HOST


ROLES: Final = (
    "step_num", "hlo_op", "hlo_module", "program_id", "correlation_id", "_p", "run_id", "device_ordinal", "core_type",
    "memcpy_details", "size", "allocator_name", "index_on_host", "addr", "allocation_bytes", "requested_bytes",
    "bytes_allocated",
)  # fmt: skip
"""Statistics of host events that are read."""
ROLE: Final = {name: place for place, name in enumerate(ROLES, 1)}
_OPERATORS, _LAUNCHES, _ANNOTATIONS, _FRAMES = range(len(HOST_TABLES))


def launch_number(run: Positions, device: Positions, core: Positions) -> Positions:
    """Return a number for one execution of a program on a device, from numbers that host and device events share."""
    return (run << 16) + (device << 4) + core


@dataclass(slots=True)
class HostFacts:
    """Facts from host events that device planes need: copy kinds by correlation number, and allocations."""

    copies: dict[int, str] = field(default_factory=dict)
    frames: bool = False
    memory: list[pl.DataFrame] = field(default_factory=list)


class HostReader:
    """Reads the lines of host planes into a gathering."""

    def __init__(
        self, content: Content, gathering: Gathering, programs: Programs, facts: HostFacts, host: str | None
    ) -> None:
        self._content = content
        self._gathering = gathering
        self._pooled = Pooled(gathering.pool)
        self._programs = programs
        self._files = UnclearFiles(programs.files())
        self._facts = facts
        self._host = host

    def read(self, plane: Plane, found: dict[int, EventName]) -> None:
        rows = NameRows(found)
        process = str(plane.stats.get("process_id", "")) or plane.name
        meanings = {flag: HostMeanings(rows, flag, self._pooled, self._files) for flag in (False, True)}
        words = Words(plane.stat_names)
        origins = Origins(self._programs, self._pooled, words)
        roles = role_table(plane, ROLES)
        for start, end in plane.lines:
            reader = LineReader(self._content, start, end, roles, self._gathering.damage)
            try:
                reader.read_head()
                name = text(reader.head.get(11) or reader.head.get(2) or b"")
                on_python = PYTHON_THREADS.match(name) is not None
                lane = None
                for batch in reader.batches():
                    if lane is None:
                        lane = self._lane(plane, name, process, reader.head.get(1, 0), on_python)
                    line = _Line(rows, meanings[on_python], words, origins, signed(_whole(reader.head.get(3))), lane)
                    self._add(line, batch)
            except WireError:
                self._gathering.damage["damaged_line"] += 1

    def _lane(self, plane: Plane, name: str, process: str, number: int | bytes, on_python: bool) -> int:
        """The lane of a thread; the Python thread gets the process's number, as main threads have."""
        thread = process if on_python else str(number)
        return self._gathering.lane(
            (plane.name, number, name),
            kind="host_thread",
            process=process,
            process_name=self._host,
            thread=thread,
            name=name.partition("/")[0] or thread,
        )

    def _add(self, line: _Line, batch: Batch) -> None:
        row, known = line.rows.of(batch.name)
        damage, meanings = self._gathering.damage, line.meanings
        if not known.all():
            damage["unnamed_event"] += int((~known).sum())
            if not len(meanings.table):
                return
        start = line.origin_ns + batch.start_ns
        duration = batch.duration_ns
        is_memory = known & meanings.is_memory[row]
        if is_memory.any():
            chosen = np.flatnonzero(is_memory)
            releases = meanings.is_release[row[chosen]]
            self._facts.memory.append(memory_rows(batch, chosen, start, releases, line.words, line.lane, ROLE))
        steps, is_step = batch.integers(ROLE["step_num"])
        calls, is_call = batch.integers(ROLE["correlation_id"])
        operation = batch.texts(ROLE["hlo_op"], line.words)
        table = meanings.table[row]
        table[operation != -1] = _OPERATORS
        table[is_call] = _LAUNCHES
        table[is_step] = _ANNOTATIONS
        lasts = known & (batch.lasts | is_call | is_step) & ~is_memory  # a duration of 0 is not written either
        for code in np.flatnonzero(np.bincount(table[lasts])).tolist():
            chosen = np.flatnonzero(lasts & (table == code))
            columns: dict[str, pl.Series] = {
                "start_ns": pl.Series(start[chosen]),
                "duration_ns": pl.Series(duration[chosen]),
                "name": pl.Series(meanings.name[row[chosen]]),
                "lane": pl.repeat(line.lane, len(chosen), dtype=pl.Int32, eager=True),
            }
            if code == _OPERATORS:
                columns |= line.origins.columns(batch, chosen, row, operation, ROLE)
            elif code == _LAUNCHES:
                columns |= self._call_columns(line, batch, chosen, row, calls, is_call)
            elif code == _ANNOTATIONS:
                columns["kind"] = self._pooled.constant("host", len(chosen))
                columns["step"] = nullable(steps[chosen], is_step[chosen])
            else:
                self._facts.frames = True
                columns["file"] = column(meanings.file[row[chosen]])
                columns["line"] = nullable(meanings.line[row[chosen]], meanings.line[row[chosen]] >= 0)
                columns["function"] = column(meanings.function[row[chosen]])
            self._gathering.add(HOST_TABLES[code], pl.DataFrame(columns))

    def _call_columns(
        self, line: _Line, batch: Batch, chosen: Positions, row: Positions, calls: Positions, is_call: Mask
    ) -> dict[str, pl.Series]:
        meanings = line.meanings
        producer, has_producer = batch.integers(ROLE["_p"])
        run, has_run = batch.integers(ROLE["run_id"])
        device, core = batch.integers(ROLE["device_ordinal"])[0], batch.integers(ROLE["core_type"])[0]
        number = np.where(is_call, calls, np.where(has_producer, producer, launch_number(run, device, core)))
        has = is_call | (meanings.is_enqueue[row] & (has_producer | has_run))
        size, has_size = batch.integers(ROLE["size"])
        details = batch.texts(ROLE["memcpy_details"], line.words)
        for event in chosen[details[chosen] != -1].tolist():
            copy_details = line.words.of(int(details[event])) or ""
            kind = copied_kind(copy_details) or naming.copy_kind(meanings.texts[int(row[event])])
            self._facts.copies[int(calls[event])] = kind
            moved = copied_bytes(copy_details)
            if moved is not None:
                size[event], has_size[event] = moved, True
        return {
            "kind": column(meanings.kind[row[chosen]]),
            "correlation": nullable(number[chosen], has[chosen]),
            "bytes": nullable(size[chosen], has_size[chosen]),
        }


@dataclass(slots=True)
class _Line:
    rows: NameRows
    meanings: HostMeanings
    words: Words
    origins: Origins
    origin_ns: int
    lane: int


def _whole(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else 0
