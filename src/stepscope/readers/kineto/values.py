"""Values as they stand in events' arguments, as columns of numbers and as names of queues and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from stepscope.readers.kineto import arguments


def external_ids(args: Sequence[arguments.Launch] | Sequence[arguments.DeviceWork]) -> pl.Series:
    """The number of the operator around each call or work, by its new key or its old one; Int64."""
    return integers([a.old_external_id if a.external_id is None else a.external_id for a in args])


def integers(values: list[int | None]) -> pl.Series:
    """Int64."""
    return pl.Series(values, dtype=pl.Int64)


def integer(value: int | float | str | None) -> int | None:
    """A whole number however it is written; None for what is none."""
    if value is None or isinstance(value, int):
        return value
    try:
        number = int(float(value))
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 2**63 else None


def queue(thread: Any) -> str:
    """The name of a queue, or of any row: 7, "7" and "stream 7" are one."""
    return str(thread).removeprefix("stream ").strip()


def real_queue(stream: Any) -> str | None:
    """The name of a queue, None for the numbers that mean none."""
    return None if stream is None or str(stream) in ("-1", "4294967295") else queue(stream)


def memory_device(args: arguments.Memory) -> str:
    """The device of an allocation, or "cpu"."""
    return "cpu" if args.device_type in (0, None) or args.device_id in (-1, None) else str(args.device_id)
