"""Files that are written whole or not at all: what everything in stepscope that writes a file uses.

Imports only the standard library: the processes of the user's program use it too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

_LONGEST_BYTES: Final = 200
"""Of the name that is kept in that of the file which is being written: a name may have 255."""


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends well and leaves nothing where it does not.

    A file that is replaced hands its permissions on; the new one is never readable for more users than the old.

    Args:
        private: for its owner alone, whatever there was before.

    Raises:
        OSError: it cannot be written.
    """
    permissions = 0o600 if private else _permissions(path)
    short = os.fsdecode(os.fsencode(path.name)[:_LONGEST_BYTES])
    temporary = path.with_name(f".{short}-{os.urandom(4).hex()}.partial")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if permissions is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        if permissions is not None:
            os.chmod(temporary, permissions)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _permissions(path: Path) -> int | None:
    """Those of the file that is replaced; None where there is none, and the user's mask decides."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None
