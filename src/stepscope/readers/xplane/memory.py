"""Allocations and releases of XLA's allocators."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from stepscope.readers.xplane.events import Batch, Words
from stepscope.readers.xplane.meanings import nullable
from stepscope.readers.xplane.wire import Mask, Positions

_DEVICE_ALLOCATOR: Final = re.compile(r"[A-Za-z]+_(\d+)_")
"""Names such as GPU_0_bfc; others are the host's."""
HOST: Final = "cpu"


def memory_rows(
    batch: Batch, mine: Positions, start_ns: Positions, releases: Mask, words: Words, lane: int, role: Mapping[str, int]
) -> pl.DataFrame:
    """Chosen events as rows of the table memory, and whether each releases; `bytes` is null where nothing tells it.

    Args:
        releases: of the chosen events.
        role: by the statistic's name.
    """
    size, has_size = batch.integers(role["allocation_bytes"])
    requested, has_requested = batch.integers(role["requested_bytes"])
    size = np.where(has_size, size, requested)[mine]
    address, has_address = batch.integers(role["addr"])
    total, has_total = batch.integers(role["bytes_allocated"])
    index, has_index = batch.integers(role["index_on_host"])
    allocator = batch.texts(role["allocator_name"], words)
    devices = {number: _device(words.of(number)) for number in np.unique(allocator[mine]).tolist()}
    by_name = [devices[number] for number in allocator[mine].tolist()]
    return pl.DataFrame(
        {
            "start_ns": start_ns[mine],
            "lane": pl.repeat(lane, len(mine), dtype=pl.Int32, eager=True),
            "device": [
                str(number) if has else device
                for number, has, device in zip(index[mine].tolist(), has_index[mine].tolist(), by_name, strict=True)
            ],
            "address": nullable(address[mine], has_address[mine]),
            "bytes": nullable(np.where(releases, -size, size), (has_size | has_requested)[mine]),
            "total_allocated": nullable(total[mine], has_total[mine]),
            "releases": releases,
        },
        schema_overrides={"device": pl.String},
    )


def paired(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The rows of all threads; a release that tells no size has that of the last allocation at its address.

    What stays without a size is left out: it was allocated before the recording.
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
