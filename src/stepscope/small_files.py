"""Reading files of which only small ones are what they should be: nothing larger is taken into memory."""

from __future__ import annotations

from pathlib import Path

from stepscope.errors import UsageError


def read_small(path: Path, largest_mib: int, why_not: str) -> bytes:
    """All that a file holds.

    Args:
        largest_mib: the most it may hold, in MiB.
        why_not: what is wrong with a larger one; stands behind "is larger than 1 MiB".

    Raises:
        UsageError: it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(largest_mib * 2**20 + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > largest_mib * 2**20:
        raise UsageError(f"{path} is larger than {largest_mib} MiB{why_not}")
    return data
