"""Trace files as they are written: complete or not at all, packed by their names."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from stepscope.errors import UsageError
from stepscope.line_records import lines_path
from stepscope.whole_files import make_private, private_file, private_folder

_COPY_BYTES: Final = 1 << 20


def write_trace(path: Path, export: Callable[[str], None], *, private: bool = True) -> None:
    """Let `export` write a plain file beside `path`, pack it if the name ends in `.gz`, and rename it.

    Args:
        private: for its owner alone; else as the user's mask has it.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        if private:
            private_folder(path.parent, tighten=False)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path, "plain", private=private) as plain, _partial(path, "packed", private=private) as packed:
            export(str(plain))
            if path.name.endswith(".gz"):
                _pack(plain, packed)
            written = packed if path.name.endswith(".gz") else plain
            if private:
                make_private(written)  # the profiler may have put a file of its own there
            os.replace(written, path)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the trace cannot be written to {path}: {error}") from error


def copy_trace(source: Path, target: Path) -> None:
    """Copy a trace with the lines beside it, packing or unpacking it as the names say.

    Raises:
        UsageError: one cannot be read or the other not be written.
    """

    def export(plain: str) -> None:
        with _unpacked(source) as file, open(plain, "wb") as copy:
            shutil.copyfileobj(file, copy, _COPY_BYTES)
        if lines_path(source).is_file():
            shutil.copyfile(lines_path(source), lines_path(target))

    write_trace(target, export, private=False)


@contextlib.contextmanager
def _partial(path: Path, what: str, *, private: bool) -> Iterator[Path]:
    """A name beside `path` that nobody takes for a trace; the file is gone afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{what}.partial")
    try:
        if private:
            private_file(partial)
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _unpacked(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _pack(source: Path, target: Path) -> None:
    from isal import igzip

    opened: Any = igzip.open
    with source.open("rb") as file, opened(target, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(file, packed, _COPY_BYTES)
