"""Opening whatever a user points at: which reader, from the cache or from the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Final

from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers import gaudi, kineto, nsight_systems, perfetto, rocprof, torch_snapshot, xla_json, xplane
from stepscope.readers.lines import join_lines, variant_of
from stepscope.readers.other_formats import beginning, what_it_is, what_its_name_says
from stepscope.readers.pauses import join_pauses
from stepscope.readers.profile_folder import SUFFIXES as XPLANE_SUFFIXES
from stepscope.readers.profile_folder import place_among_hosts, profile_files, without_twins
from stepscope.readers.source import ByteSource, is_regular_file
from stepscope.trace.cache import TraceCache, content_key, temporary_store
from stepscope.trace.model import Metadata, Trace, TraceWarning
from stepscope.trace.store import StoreWriter, is_store, open_store
from stepscope.trace.window import StepRange, Window

READERS: Final[tuple[ModuleType, ...]] = (
    xplane,
    perfetto,
    nsight_systems,
    rocprof,
    torch_snapshot,
    xla_json,
    gaudi,
    kineto,
)
"""Every format, asked in this order whether a file is its own."""

Progress = Callable[[int, "int | None"], None]
_SUFFIXES: Final = (
    ".json",
    ".json.gz",
    ".json.zst",
    ".trace",
    ".trace.gz",
    ".pickle",
    ".pickle.gz",
    ".pickle.zst",
    ".hltv",
    ".hltv.gz",
    ".sqlite",
    ".sqlite.gz",
    ".sqlite.zst",
    ".pftrace",
    ".pftrace.gz",
    ".perfetto-trace",
    ".perfetto-trace.gz",
)


def open_trace(
    path: str | Path,
    *,
    window: Window | None = None,
    steps: StepRange | None = None,
    cache: TraceCache | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace of any known format.

    Args:
        path: a trace file (plain, gzip or zstd), "-" for standard input, or a folder written by `Trace.save`.
        window: read only what happens in this stretch of time.
        steps: read only these annotated steps; not together with `window`.
        cache: where to keep what was read, and to look for it first; None reads the file anew.
        progress: called with the packed bytes read so far and in all.

    Raises:
        NotATraceError: the file is something else; the message says what.
        UnreadableTraceError: the file cannot be opened, or nothing in it can be read.
        UsageError: the steps asked for do not exist.
    """
    if str(path) != "-" and os.path.isdir(path) and is_store(Path(path)):
        return open_store(Path(path))
    return _of_its_host(_opened(path, window, steps, cache, progress), path)


def _opened(
    path: str | Path,
    window: Window | None,
    steps: StepRange | None,
    cache: TraceCache | None,
    progress: Progress | None,
) -> Trace:
    if cache is None or window is not None or steps is not None or not _can_be_kept(path):
        return temporary_store(lambda writer: _read(path, writer, window, steps, progress))
    key = content_key(path, variant_of(path))
    found = cache.lookup(key)
    if found is None:
        found = cache.add(key, lambda writer: _read(path, writer, None, None, progress))
    return _renamed(found, str(path))


def trace_files(path: str | Path) -> list[Path]:
    """The trace files a path stands for: itself, or those in a folder by name; of XLA's profiles those of the last run.

    Raises:
        UnreadableTraceError: a folder without trace files, or nothing at that path.
    """
    place = Path(path)
    if str(path) == "-" or not os.path.isdir(path) or is_store(place):
        return [place]
    if profiles := profile_files(place):
        return profiles
    known = (*_SUFFIXES, *XPLANE_SUFFIXES)
    found = without_twins(sorted(child for child in place.iterdir() if child.is_file() and child.name.endswith(known)))
    if not found:
        raise UnreadableTraceError(f"the folder {place} holds no trace file ({', '.join(known)})")
    return found


def _can_be_kept(path: str | Path) -> bool:
    """Whether the file can be read once for its key and again for its events; standard input and pipes cannot."""
    if not is_regular_file(path):
        return False
    ByteSource(path).close()  # says what is wrong with an empty or unreadable file before it is hashed
    return True


def _renamed(trace: Trace, path: str) -> Trace:
    """The same trace under the name the user gave: equal files share a cache entry."""
    return trace if trace.metadata.path == path else replace(trace, metadata=replace(trace.metadata, path=path))


def _of_its_host(trace: Trace, path: str | Path) -> Trace:
    """The same trace with its rank, where it is one host's of a run and does not say itself which."""
    place = place_among_hosts(Path(path)) if trace.metadata.rank is None else None
    if place is None:
        return trace
    return replace(trace, metadata=replace(trace.metadata, rank=place[0], world_size=place[1]))


def _read(
    path: str | Path,
    writer: StoreWriter,
    window: Window | None,
    steps: StepRange | None,
    progress: Progress | None,
) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    source = ByteSource(path)
    try:
        head = beginning(source.peek())
        if not head and source.damage:
            raise UnreadableTraceError(f"{source.name} cannot be unpacked: {source.damage}")
        known = what_it_is(head) or what_its_name_says(source.name, head)
        if known is not None:
            raise NotATraceError(f"{source.name} is {known}")
        for reader in READERS:
            if reader.recognises(head):
                metadata, warnings = reader.read(source, writer, window=window, steps=steps, progress=progress)
                join_pauses(writer, metadata)
                metadata, more = join_lines(path, writer, metadata)
                return metadata, (*warnings, *more)
        raise NotATraceError(f"{source.name} is not a trace: it begins with neither a JSON object nor a list of events")
    finally:
        source.close()
