"""Readers turn the files of each profiler into traces: one module or folder per format, opened through `open_trace`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from stepscope.errors import NotATraceError, UnreadableTraceError, UsageError
from stepscope.files import shipped_rows, text_of
from stepscope.readers import gaudi, kineto, nsight_systems, perfetto, remote, rocprof, torch_snapshot, xla_json, xplane
from stepscope.readers.collective_logs import is_collective_log, kind_of_log
from stepscope.readers.source import ByteSource, Progress, Reader, ReadResult, is_regular_file, name_of
from stepscope.readers.source_lines import join_lines, join_pauses, variant_of
from stepscope.record.counters import ConsecutiveSteps
from stepscope.record.run_folder import recording_of
from stepscope.record.runs import run_at
from stepscope.trace.cache import READER_VERSION, TraceCache, temporary_store
from stepscope.trace.excerpt import write_excerpt
from stepscope.trace.metadata import UnrecordedSteps
from stepscope.trace.model import VERSION, StoreWriter, Trace, is_store, open_store
from stepscope.trace.program_facts import EvaluationFacts, ModelCallFacts, ProgramFacts, PromptFacts
from stepscope.trace.window import StepRange, Window

__all__ = ["READERS", "open_trace", "trace_files"]

_TAR_AT: Final = 257
_REPORTS_OF_NSIGHT_SYSTEMS: Final = (".nsys-rep", ".qdrep", ".qdstrm")

_BY_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (b"PAR1", "a Parquet file, not a trace"),
    (b"PK\x03\x04", "a zip archive: unpack it and give the trace inside"),
    (b"\x7fELF", "a program, not a trace"),
    (b"\x89PNG", "a picture, not a trace"),
    (b"BZh", "packed with bzip2: unpack it, or pack it with gzip or zstd"),
    (b"\xfd7zXZ\0", "packed with xz: unpack it, or pack it with gzip or zstd"),
    (b"\xff\xfe", "text in UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
    (b"%PDF", "a PDF document, not a trace"),
)


@cache
def _kinds_of_text() -> list[tuple[list[bytes], re.Pattern[bytes], str]]:
    """The rows of data/not_traces.tsv."""
    rows = shipped_rows("not_traces.tsv")
    return [(words.encode().split(b"|"), re.compile(pattern.encode()), what) for words, pattern, what in rows]


def what_it_is(head: bytes) -> str | None:
    """Identify a file that is not a trace from its first unpacked bytes; None if unknown."""
    for magic, name in _BY_MAGIC:
        if head.startswith(magic):
            return name
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return "a tar archive: unpack it and give the trace inside"
    if log := kind_of_log(head):
        return f"a log of collectives ({log}), not a trace: stepscope diagnose FILE says what it shows"
    text = text_of(head)
    if b'"traceEvents"' in text:
        return None
    return next(
        (
            name
            for words, pattern, name in _kinds_of_text()
            if any(word in text for word in words) and pattern.search(text)
        ),
        None,
    )


def what_its_name_says(name: str, head: bytes) -> str | None:
    """Identify a program or an undocumented binary file by its suffix; None for other names."""
    if name.endswith(".py") and text_of(head)[:1] not in (b"{", b"["):
        return f"a program, not a trace: stepscope run {shlex.quote(name)} records some of its steps and diagnoses them"
    ends = name.lower().endswith(_REPORTS_OF_NSIGHT_SYSTEMS)
    if not ends or head.startswith(b"SQLite format 3\0") or text_of(head)[:1] in (b"{", b"["):
        return None
    return (
        "a report of Nsight Systems, which only that program reads: export it with "
        "nsys export --type sqlite --output OUT.sqlite IN.nsys-rep, and give OUT.sqlite"
    )


_XLA_SUFFIXES: Final = (".xplane.pb", ".xplane.pb.gz", ".xplane.pb.zst")
_XLA_RUNS: Final = ("plugins", "profile")
_XLA_TWIN: Final = ".trace.json.gz"
_NUMBERS: Final = re.compile(r"(\d+)")


def xla_profiles(folder: Path) -> list[Path]:
    """Return XLA's profiles of the latest run in a folder, one per host; empty if there are no runs.

    Args:
        folder: the directory given to the profiler, its folder of all runs, or the folder of one run.
    """
    place = Path(os.path.abspath(folder))
    if place.parts[-3:-1] == _XLA_RUNS:
        return _hosts(folder)
    runs = folder if place.parts[-2:] == _XLA_RUNS else folder.joinpath(*_XLA_RUNS)
    names = sorted(child.name for child, is_folder in _children(runs) if is_folder)
    return next((found for name in reversed(names) if (found := _hosts(runs / name))), [])


def place_among_xla_hosts(path: Path) -> tuple[int, int] | None:
    """Return an XLA profile's position among its run's hosts, from 0, and the number of hosts; None if it is alone.

    Only the profiler's own folders count: elsewhere, profiles side by side need not belong to one run.
    """
    run = Path(os.path.abspath(path)).parent
    if not path.name.endswith(_XLA_SUFFIXES) or run.parts[-3:-1] != _XLA_RUNS:
        return None
    hosts = [each.name for each in _hosts(run)]
    return (hosts.index(path.name), len(hosts)) if len(hosts) > 1 and path.name in hosts else None


_NAMED_RANK: Final = re.compile(r"(?<![a-z])rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)


def place_in_job(path: Path) -> tuple[int, int] | None:
    """The rank of a trace that does not say it itself, and how many there are; None if nothing tells.

    Hosts of an XLA run are its ranks. Elsewhere a file's name counts that says "rank 3", as of Nsight's reports, if
    those of the files beside it differ by the rank alone and begin with 0.
    """
    if place := place_among_xla_hosts(path):
        return place
    match = _NAMED_RANK.search(path.name)
    if match is None:
        return None
    folder = Path(os.path.abspath(path)).parent
    try:
        changed_ns = folder.stat().st_mtime_ns
        ranks = _ranks_alike(folder, changed_ns, path.name[: match.start(1)], path.name[match.end(1) :])
    except OSError:
        return None  # a web address, or gone
    return (int(match[1]), ranks) if ranks > 1 else None


@lru_cache(maxsize=16)
def _ranks_alike(folder: Path, changed_ns: int, before: str, after: str) -> int:
    """How many files differ by the rank in their names alone; 0 unless they begin with 0 and miss none."""
    del changed_ns  # a part of the key
    alike = (
        name[len(before) : len(name) - len(after)]
        for name in os.listdir(folder)
        if name.startswith(before) and name.endswith(after)
    )
    ranks = sorted({int(middle) for middle in alike if middle.isdecimal()})
    return len(ranks) if ranks == list(range(len(ranks))) else 0


def without_xla_twins(files: list[Path]) -> list[Path]:
    """Drop each HOST.trace.json.gz, which XLA writes beside HOST.xplane.pb with the same content."""
    stems = {str(file)[: -len(suffix)] for file in files for suffix in _XLA_SUFFIXES if file.name.endswith(suffix)}
    return [file for file in files if not any(str(file) == stem + _XLA_TWIN for stem in stems)]


def _hosts(folder: Path) -> list[Path]:
    found = [child for child, is_folder in _children(folder) if child.name.endswith(_XLA_SUFFIXES) and not is_folder]
    return sorted(found, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    parts = _NUMBERS.split(path.name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _children(folder: Path) -> list[tuple[Path, bool]]:
    """What is in a folder, and whether each is a folder itself; nothing that is neither a file nor a folder."""
    url = remote.url_of(folder)
    if url is not None:
        return remote.children(url)
    try:
        with os.scandir(folder) as found:
            return [(folder / each.name, each.is_dir()) for each in found if each.is_dir() or each.is_file()]
    except OSError:
        return []


READERS: Final[tuple[Reader, ...]] = (
    perfetto.READER,  # by its fields; XLA's by names of planes, which a name in any trace may contain
    xplane.READER,
    nsight_systems.READER,
    rocprof.READER,
    torch_snapshot.READER,
    xla_json.READER,
    gaudi.READER,
    kineto.READER,
)
"""Every format's reader, in the order in which they are tried."""

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
    """Read a trace of any supported format.

    Args:
        path: a trace file (plain, gzip or zstd), also behind a URL, "-" for standard input, a folder written by
            `Trace.save`, or a run's folder or name, "latest" or "@2" for the one before; of several ranks the first.
        window: only this span of time; of a trace in the cache, only what is in it is read.
        steps: only these annotated steps; cannot be combined with `window`.
        cache: where parsed traces are kept and looked up; None always reads the file.
        progress: called with the compressed bytes read so far and in total.

    Raises:
        NotATraceError: the file is not a trace; the message says what it is.
        UnreadableTraceError: the file cannot be opened, or nothing in it can be read.
        UsageError: the requested steps do not exist, or the run has no trace.
    """
    path = _of_run(path)
    if str(path) != "-" and os.path.isdir(path) and is_store(Path(path)):
        stored = open_store(Path(path))
        is_whole = window is None and steps is None
        return stored if is_whole else temporary_store(lambda writer: write_excerpt(stored, writer, window, steps))
    return with_unrecorded_steps(_of_its_host(_opened(path, window, steps, cache, progress), path), path)


def _of_run(path: str | Path) -> str | Path:
    """The first rank's latest trace of a run, or the path itself."""
    run = run_at(path)
    if run is None:
        return path
    traces = run.latest_traces()
    if not traces:
        raise UsageError(f"the run {run.name} has no trace")
    return traces[0]


def _opened(
    path: str | Path,
    window: Window | None,
    steps: StepRange | None,
    cache: TraceCache | None,
    progress: Progress | None,
) -> Trace:
    url = remote.url_of(path)
    state = None if url is None else remote.state_of(url)
    can_be_kept = _can_be_kept(path) if state is None else state[1]
    if cache is None or not can_be_kept:
        return temporary_store(lambda writer: _read(path, writer, window, steps, progress, state))
    key = trace_key(path, cache, state=state)

    def build(writer: StoreWriter) -> ReadResult:
        return _read(path, writer, None, None, progress, state)

    if window is None and steps is None:
        found = cache.lookup(key) or cache.add(key, build)
    else:
        found = cache.excerpt(key, build, lambda whole: lambda writer: write_excerpt(whole, writer, window, steps))
    return replace(_renamed(found, name_of(path)), identity=f"{key} {window} {steps}")


def trace_key(
    path: str | Path, cache: TraceCache, least_bytes: int | None = None, state: remote.State | None = None
) -> str:
    """The key of a trace in caches, by the content of its file and of the lines beside it.

    Args:
        least_bytes: as for `TraceCache.key_of`.
        state: of a file elsewhere that was looked at just now.

    Raises UnreadableTraceError if the file cannot be read, or nothing tells whether its content has changed.
    """
    url = remote.url_of(path)
    if url is None:
        return cache.key_of(path, variant_of(path), least_bytes)
    key = remote.key_of(url, f"{READER_VERSION}/{VERSION}", state or remote.state_of(url))
    if key is None:
        raise UnreadableTraceError(f"nothing tells whether {name_of(path)} has changed")
    return key


def trace_files(path: str | Path) -> list[Path]:
    """Return the trace files at a path: the file itself, those in a folder by name, or XLA's profiles of the last run.

    Raises UnreadableTraceError if the path does not exist, or is a folder without trace files.
    """
    known, is_remote = (*_SUFFIXES, *_XLA_SUFFIXES), remote.url_of(path) is not None
    place = remote.RemotePath(path) if is_remote else Path(path)
    if str(path) == "-" or (place.name.endswith(known) if is_remote else not os.path.isdir(path) or is_store(place)):
        return [place]
    if profiles := xla_profiles(place):
        return profiles
    inside = _children(place)
    if is_remote and not inside:  # a file of another name
        return [place]
    found = without_xla_twins(
        sorted(
            child
            for child, is_folder in inside
            if child.name.endswith(known) and not is_folder and (is_remote or not is_collective_log(child))
        )
    )
    if not found:
        raise UnreadableTraceError(f"the folder {name_of(place)} contains no trace file ({', '.join(known)})")
    return found


def _can_be_kept(path: str | Path) -> bool:
    """Whether the file can be read twice, for its key and for its events, unlike standard input."""
    if not is_regular_file(path):
        return False
    ByteSource(path).close()  # reports an empty or unreadable file before it is hashed
    return True


def _renamed(trace: Trace, path: str) -> Trace:
    """Equal files share a cache entry, so the cached path may not be the one that the user gave."""
    return trace if trace.metadata.path == path else replace(trace, metadata=replace(trace.metadata, path=path))


def _of_its_host(trace: Trace, path: str | Path) -> Trace:
    """The trace with the rank from its position among a run's hosts, if it has no rank of its own."""
    place = place_in_job(Path(path)) if trace.metadata.rank is None else None
    if place is None:
        return trace
    return replace(trace, metadata=replace(trace.metadata, rank=place[0], world_size=place[1]))


def _read(
    path: str | Path,
    writer: StoreWriter,
    window: Window | None,
    steps: StepRange | None,
    progress: Progress | None,
    state: remote.State | None,
) -> ReadResult:
    source = ByteSource(path, progress, state)
    try:
        head = source.peek()
        if not head and source.damage:
            raise UnreadableTraceError(f"{source.name} cannot be unpacked: {source.damage}")
        known = what_it_is(head) or what_its_name_says(source.name, head)
        if known is not None:
            raise NotATraceError(f"{source.name} is {known}")
        for reader in READERS:
            if reader.recognises(head):
                metadata, warnings = reader.read(source, writer, window, steps)
                source.check_unchanged()
                join_pauses(writer, metadata)
                metadata, more = join_lines(path, writer, metadata)
                return metadata, (*warnings, *more)
        raise NotATraceError(f"{source.name} is not a trace: it begins with neither a JSON object nor a list of events")
    finally:
        source.close()


_COLD_STEPS: Final = 2
"""First steps of a program, which are longer than others."""
_FEWEST: Final = 3
"""Fewest steps of a kind for a median."""


def unrecorded_steps(stretches: object) -> UnrecordedSteps | None:
    """Compare steps that no profiler recorded with those that one did; None if there are too few of a kind.

    Args:
        stretches: in the form written by `StepTimes.to_json`.
    """
    parts = (
        [part for each in stretches if (part := ConsecutiveSteps.from_json(each))]
        if isinstance(stretches, list)
        else []
    )
    parts = [part for part in parts if part.first_step > _COLD_STEPS]
    recorded_ns = [ns for part in parts if part.recorded for ns in part.durations_ns]
    others = [part for part in parts if not part.recorded]
    others_ns = [ns for part in others for ns in part.durations_ns]
    if min(len(recorded_ns), len(others_ns)) < _FEWEST:
        return None

    def typical(counts: Iterable[Sequence[int]]) -> int | None:
        known = [each for part in counts for each in part]
        return round(median(known)) if len(known) == len(others_ns) else None

    return UnrecordedSteps(
        len(others_ns),
        round(median(others_ns)),
        round(median(recorded_ns)),
        typical(part.processor_ns for part in others),
        typical(part.faults for part in others),
    )


def with_unrecorded_steps(trace: Trace, path: str | Path) -> Trace:
    """Add the times of the run's unrecorded steps to a trace in the folder of a run, and what was seen in them."""
    program = trace.metadata.program
    content = recording_of(Path(path)) if program is not None else {}
    unrecorded = unrecorded_steps(content.get("step_times"))
    if program is None or unrecorded is None:
        return trace
    if later := evaluations_of(content.get("evaluations")):
        program = msgspec.structs.replace(program, evaluations=later)
    program = _with_later_calls(program, content.get("model_calls"))
    return replace(trace, metadata=replace(trace.metadata, unrecorded=unrecorded, program=program))


def _with_later_calls(program: ProgramFacts, content: object) -> ProgramFacts:
    """With the model's calls until the end of the run's timed steps, if the file has them."""
    if not isinstance(content, dict) or not content or program.model_calls is None:
        return program
    try:
        calls = msgspec.convert(content.get("calls"), ModelCallFacts)
        prompts = msgspec.convert(content.get("prompts"), PromptFacts | None)
    except msgspec.ValidationError:
        return program
    calls = msgspec.structs.replace(calls, files=program.model_calls.files)
    return msgspec.structs.replace(program, model_calls=calls, prompts=prompts or program.prompts)


def evaluations_of(content: object) -> EvaluationFacts | None:
    """The evaluations until the end of the run's timed steps; None if there were none, or the file is not ours."""
    try:
        return msgspec.convert(content, EvaluationFacts) if content else None
    except msgspec.ValidationError:
        return None
