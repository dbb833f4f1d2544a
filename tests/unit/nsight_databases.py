"""Exports of Nsight Systems of a few rows, written by hand: tables have the columns that the rows have."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

MACHINE = 1 << 48
NAMES = {
    1: "cudaLaunchKernel_v7000",
    2: "gemm",
    3: "cudaMemcpyAsync_v3020",
    4: "cudaStreamSynchronize_v3020",
    5: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
    6: "cudaGraphLaunch_v10000",
    7: "poll",
    8: "main thread",
    9: "CUPTI Buffer flush",
}
Row = dict[str, Any]


def process(number: int) -> int:
    """The global number of a process."""
    return MACHINE | number << 24


def thread(number: int, of_process: int = 100) -> int:
    """The global number of a thread."""
    return process(of_process) | number


def call(start: int, end: int, correlation: int, name: int = 1, **more: Any) -> Row:
    row = {"start": start, "end": end, "globalTid": thread(100), "correlationId": correlation, "nameId": name}
    return row | {"returnValue": 0} | more


def work(start: int, end: int, correlation: int | None = None, **more: Any) -> Row:
    """Work on stream 7 of device 0 in process 100."""
    place = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": process(100)}
    return {"start": start, "end": end, "correlationId": correlation} | place | more


def kernel(start: int, end: int, correlation: int | None = None, **more: Any) -> Row:
    size = {"gridX": 4, "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1, "registersPerThread": 32}
    memory = {"staticSharedMemory": 1024, "dynamicSharedMemory": 512}
    return work(start, end, correlation, demangledName=2, shortName=2) | size | memory | more


def in_range(start: int, end: int | None, text: str | None, **more: Any) -> Row:
    """A range that was pushed and popped on the main thread of process 100."""
    row = {"start": start, "end": end, "eventType": 59, "text": text, "textId": None, "globalTid": thread(100)}
    return row | more


def written(path: Path, **tables: list[Row]) -> Path:
    """The file with these tables; StringIds is NAMES unless it is given."""
    tables = {"StringIds": [{"id": number, "value": text} for number, text in NAMES.items()]} | tables
    with closing(sqlite3.connect(path)) as connection:
        for table, rows in tables.items():
            columns = list(rows[0])
            described = ", ".join(f'"{name}"' + (" INTEGER PRIMARY KEY" if name == "id" else "") for name in columns)
            connection.execute(f'CREATE TABLE "{table}" ({described})')
            marks = ", ".join("?" * len(columns))
            connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', [tuple(row.values()) for row in rows])
        connection.commit()
    return path


def execute(path: Path, *statements: str) -> Path:
    """The file after these statements."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path
