"""Open the traces that arguments name, and the source files that traces name; collect what --redact removes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from stepscope.commands.shared.output import Progress, say
from stepscope.errors import NoStepMarksError, TraceError, UsageError
from stepscope.report.format import count

if TYPE_CHECKING:
    from stepscope.diagnosis.diffs import UserSource
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.diagnosis.rank_summary import RankSummary
    from stepscope.record.run_folder import RunFolder
    from stepscope.report.redaction import Redactor
    from stepscope.trace import Trace
    from stepscope.trace.metadata import RunCounts
    from stepscope.trace.window import StepRange, Window

LARGEST_BYTES: Final = 2**20
"""The largest file that is patched."""
LARGEST_SHOWN_BYTES: Final = 8 * 2**20
MOST_FILES: Final = 64
"""Most files read, since a trace can name any number."""
_INSTALLED: Final = ("site-packages", "dist-packages")
SOURCE_ENDINGS: Final = (".py", ".pyi", ".pyx", ".pyw")
SOURCES_VARIABLE: Final = "STEPSCOPE_SOURCES"
"""Environment variable: folders, as in PATH, outside of which no source that a trace names is read."""


class UserSources:
    """Reads the files below and beside a folder, each once.

    Args:
        folder: the folder in which a patch will be applied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._read: dict[str, UserSource | None] = {}

    def read(self, recorded: str) -> UserSource | None:
        """The file recorded under that name; None unless it is a regular Python text file of at most LARGEST_BYTES."""
        if recorded not in self._read:
            self._read[recorded] = _source(recorded, self._folder) if len(self._read) < MOST_FILES else None
        return self._read[recorded]


def _source(recorded: str, folder: Path) -> UserSource | None:
    from stepscope.diagnosis.diffs import UserSource

    if not recorded.endswith(".py") or any(part in _INSTALLED for part in Path(recorded).parts):
        return None
    try:
        place = Path(os.path.realpath(folder / recorded))
        data = _content(place, LARGEST_BYTES) if place.is_file() and _may_be_shown(place) else None
        if data is None:
            return None
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding  # the byte order mark stays part of the text
        text = data.decode(encoding)
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    inside = place.is_relative_to(folder)
    path = place.relative_to(folder).as_posix() if inside else place.as_posix().lstrip("/")
    return UserSource(path, text, encoding, inside)


def _content(place: Path, largest: int) -> bytes | None:
    """The bytes of a text file; None if it is larger, or binary."""
    with place.open("rb") as file:
        data = file.read(largest + 1)
    return None if len(data) > largest or b"\0" in data else data


def recorded_file(wanted: str, recorded: Sequence[str]) -> str:
    """The recorded file that an argument means: the same file, or one whose path ends with it.

    Raises:
        UsageError: none, or several.
    """
    real = os.path.realpath(wanted)
    same = [file for file in recorded if file in (wanted, real) or _is_link_to(file, real)]
    ending = [
        file for file in recorded if _ends_with(file, wanted) or (os.path.exists(real) and _ends_with(real, file))
    ]
    found = same or ending
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{wanted!r} may be {', '.join(sorted(found))}: name more of the path")
    few = ", ".join(recorded[:5]) + (f" and {len(recorded) - 5} more" if len(recorded) > 5 else "")
    raise UsageError(f"nothing in this trace belongs to {wanted!r}; the files are: {few or 'none'}")


def source_lines(recorded: str, wanted: str, root: str | None) -> tuple[str, list[str]] | None:
    """The path and lines of the source; None if it is not found.

    Below `root`, the longest existing tail of the recorded path is used.

    Raises:
        UsageError: `root` is not a folder, or the file cannot be read or is not source text.
    """
    if root is not None and not os.path.isdir(root):
        raise UsageError(f"--source-root {root} is not a folder")
    for place in _candidates(recorded, wanted, root):
        if os.path.isfile(place) and _may_be_shown(place):  # False also for invalid file names
            return str(place), _lines(place)
    return None


def _may_be_shown(place: Path) -> bool:
    folders = os.environ.get(SOURCES_VARIABLE)
    real = Path(os.path.realpath(place))
    return folders is None or any(real.is_relative_to(os.path.realpath(each)) for each in folders.split(os.pathsep))


def _candidates(recorded: str, wanted: str, root: str | None) -> list[Path]:
    if root is not None:
        parts = [part for part in PurePosixPath(recorded.replace("\\", "/")).parts if part not in ("/", "..")]
        return [Path(root, *parts[first:]) for first in range(len(parts))]
    # A path from the trace is opened only if it can be source text; a path from the user always.
    return [Path(wanted), *([Path(recorded)] if recorded.endswith(SOURCE_ENDINGS) else [])]


def _lines(place: Path) -> list[str]:
    from stepscope.trace.line_records import split_lines

    try:
        data = _content(place, LARGEST_SHOWN_BYTES)
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}") from error
    if data is None:
        raise UsageError(f"{place} is not source text")
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError:
        encoding = "utf-8"
    return split_lines(data.decode(encoding, "replace"))


def _is_link_to(file: str, real: str) -> bool:
    """Whether a recorded name leads to this file; False for invalid names, such as with a null character."""
    try:
        return file[:1] != "<" and os.path.realpath(file) == real
    except ValueError:
        return False


def _ends_with(path: str, ending: str) -> bool:
    whole = path.replace("\\", "/")
    part = ending.replace("\\", "/").removeprefix("./")
    return whole == part or whole.endswith(f"/{part}")


_T = TypeVar("_T")
Secrets: TypeAlias = tuple[Sequence[str], Sequence[str]]
_SECRETS: Final = "secrets_of_traces"
_OBJECTS_BEFORE_COLLECTION: Final = 50_000


@contextlib.contextmanager
def garbage_rarely_collected() -> Iterator[None]:
    """Let more objects gather before Python looks for cycles: importing and reading make many, and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def open_from(arguments: argparse.Namespace, path: str | Path) -> Trace:
    """Open a trace or a run's trace as the options say, with progress on a terminal if it takes long."""
    from stepscope.readers import open_trace
    from stepscope.readers.source import name_of
    from stepscope.trace import Window
    from stepscope.trace.cache import TraceCache
    from stepscope.trace.window import StepRange

    path = _one_trace(path)
    steps = StepRange.parse(arguments.steps) if arguments.steps is not None else None
    window = Window.parse(arguments.window) if arguments.window is not None else None
    with Progress(f"reading {name_of(path)}", arguments=arguments) as progress:
        opened = partial(open_trace, path, cache=None if arguments.no_cache else TraceCache(), progress=progress)
        try:
            trace = opened(window=window, steps=steps)
        except NoStepMarksError:
            if steps is None or str(path) == "-":
                raise
            trace = opened(window=_inferred_steps(opened(), steps))
            steps = None
        if arguments.window is None and arguments.steps is None and str(path) != "-":
            trace = _not_too_large(trace, getattr(arguments, "most_rows", None), opened)
    _note_secrets(arguments, trace)
    if arguments.window and _is_empty(trace):
        raise UsageError(
            f"nothing was recorded in the window {arguments.window!r} of {path}; times count from the trace's start"
        )
    if steps is not None:
        _say_which_steps(trace, steps)
    if getattr(arguments, "capture_trace", None) is not None:
        trace = _with_capture(arguments, trace)
    return with_device(_with_printable_path(trace), getattr(arguments, "device_name", None))


def kept_as_rank(
    arguments: argparse.Namespace, path: str | Path, summary: Callable[[], RankSummary | None]
) -> RankSummary | None:
    """The summary of a rank that is kept, or the one that is made now and then kept; None where there is neither.

    Args:
        summary: makes it; called at most once.
    """
    from stepscope.commands.shared.options import user_code_from
    from stepscope.diagnosis.rank_summary import keep_summary, kept_summary, summary_place

    names = ("window", "steps", "device_name")
    place = None
    if str(path) != "-" and not arguments.no_cache and getattr(arguments, "capture_trace", None) is None:
        with contextlib.suppress(TraceError):  # which opening it says
            place = summary_place(
                path, [*(getattr(arguments, name, None) for name in names), user_code_from(arguments)]
            )
    found = None if place is None else kept_summary(place, encodable(str(path)))
    if found is None and (found := summary()) is not None and place is not None:
        keep_summary(place, found)
    return found


def _not_too_large(trace: Trace, most_rows: int | None, opened: Callable[..., Trace]) -> Trace:
    """The trace, or the steps in its middle that have about this many rows; a warning then says which."""
    from stepscope.trace.excerpt import middle_of

    middle = None if most_rows is None else middle_of(trace, most_rows)
    if middle is None:
        return trace
    window, warning = middle
    say(warning.detail)
    part = opened(window=window)
    return replace(part, warnings=(warning, *part.warnings))


def _with_capture(arguments: argparse.Namespace, trace: Trace) -> Trace:
    """The trace with the recording of its graphs' capture.

    Raises:
        UsageError: it is not the capture of these graphs; the message says what was looked for.
        TraceError: the file cannot be read.
    """
    from stepscope.analysis.captured import why_not_tied
    from stepscope.readers import open_trace
    from stepscope.trace.cache import TraceCache

    path = arguments.capture_trace
    cache = None if arguments.no_cache else TraceCache()
    together = trace.with_capture(_with_printable_path(open_trace(_one_trace(path), cache=cache)))
    _note_secrets(arguments, together.capture or trace)
    why_not = why_not_tied(together)
    if why_not is not None:
        raise UsageError(f"--capture-trace {path} does not fit {trace.metadata.path}: {why_not}")
    return together


def with_device(trace: Trace, name: str | None) -> Trace:
    """The trace whose unnamed devices are of this kind; the trace itself without a name.

    Raises:
        UsageError: the name is unknown, or the trace names another device.
    """
    if name is None:
        return trace
    from stepscope.machine.devices import find_device, named_device
    from stepscope.trace.metadata import Device

    row = named_device(name)
    described = {each.device: each for each in trace.metadata.devices}
    known = [each.name for each in described.values() if each.name and find_device(each) != row]
    if known:
        raise UsageError(f"--device {name}: the trace says that its device is {known[0]}")
    meant = Device("", row.name, row.memory_bytes, row.capability, row.multiprocessors)
    devices = tuple(
        each if each is not None and each.name else replace(meant, device=device)
        for device in sorted({*described, *trace.working_devices})
        for each in (described.get(device),)
    )
    return replace(trace, metadata=replace(trace.metadata, devices=devices))


def _inferred_steps(trace: Trace, wanted: StepRange) -> Window:
    """The window of these steps, by the numbers that `stepscope steps` gives to inferred steps.

    Raises:
        UsageError: there are none.
    """
    from stepscope.analysis.steps import step_table
    from stepscope.trace.window import Window

    steps = step_table(trace)
    chosen = steps.filter(steps["index"].is_between(wanted.first, wanted.last))
    if steps.is_empty():
        raise UsageError("nothing marks steps in this trace, and nothing repeats: use a time window instead")
    if chosen.is_empty():
        have = f"{steps['index'][0]} to {steps['index'][-1]}"
        raise UsageError(f"no step of the trace is in the requested range: the inferred steps are {have}")
    end = int((chosen["start_ns"] + chosen["duration_ns"]).to_numpy().max())
    return Window(int(chosen["start_ns"].to_numpy().min()), end)


def readable(arguments: argparse.Namespace, file: Path, unreadable: list[Unreadable]) -> Trace | None:
    """The trace in a file of several; None, and one more in `unreadable`, if it cannot be read."""
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.readers.source import name_of

    try:
        return open_from(arguments, file)
    except TraceError as error:
        unreadable.append(Unreadable(encodable(name_of(file)), encodable(str(error))))
        return None


def readable_traces(
    arguments: argparse.Namespace, paths: Sequence[str], unreadable: list[Unreadable]
) -> Iterator[Trace]:
    """Open every trace at the paths in turn, each file once.

    Args:
        unreadable: collects unreadable files of folders and runs; a file named directly must be readable.

    Raises:
        UsageError: no file can be read.
    """
    seen: set[str] = set()
    opened = False
    for path in paths:
        for file in trace_paths(path):
            place = "-" if str(file) == "-" else os.path.realpath(file)
            if place in seen:
                say(f"skipped: {file} was named before")
                continue
            seen.add(place)
            if os.path.abspath(file) == os.path.abspath(path):
                trace = open_from(arguments, file)
            else:
                found = readable(arguments, file, unreadable)
                if found is None:
                    continue
                trace = found
            opened = True
            yield trace
    if unreadable and not opened:
        first = unreadable[0].reason
        count_of = "the only file" if len(unreadable) == 1 else f"none of the {count(len(unreadable))} files"
        verb = "cannot" if len(unreadable) == 1 else "can"
        raise UsageError(f"{count_of} in {', '.join(paths)} {verb} be read: {first}")


def _say_which_steps(trace: Trace, wanted: StepRange) -> None:
    """Warn if fewer steps were recorded than asked for."""
    steps = trace.annotations["step"].drop_nulls().unique().sort().to_list()
    if steps and wanted.last < 2**62 and len(steps) < wanted.last - wanted.first + 1:
        found = f"step {steps[0]}" if len(steps) == 1 else f"{count(len(steps))} steps, {steps[0]} to {steps[-1]},"
        say(f"of the steps {wanted.first}:{wanted.last} only {found} was recorded")


def trace_paths(path: str | Path) -> list[Path]:
    """The trace files of an argument: each rank's latest for a run (by name or folder), else the files at the path.

    Raises:
        UsageError: a run without traces, or whose folder is gone.
        UnreadableTraceError: a folder without trace files.
    """
    from stepscope.readers import trace_files
    from stepscope.readers.remote import url_of

    folder = _run_at(path)
    if folder is None:
        inside = _inside_run(path)
        is_name = not Path(path).suffix and url_of(path) is None
        if inside is None and str(path) != "-" and not os.path.exists(path) and is_name:
            raise UsageError(_no_such_run(str(path)))
        return trace_files(inside or path)
    if not os.path.exists(path) and str(path) != folder.name:
        say(f"{path} is the run {folder.name}")
    found = folder.latest_traces()
    if not found:
        raise UsageError(f"the run {folder.name} has no trace; stepscope runs show {folder.name} shows more")
    earlier = [f"{folder.name}/{trace.parent.name}/{trace.name}" for trace in folder.traces() if trace not in found]
    if earlier:
        say(f"this run also has earlier traces: {', '.join(earlier)}")
    return found


def _no_such_run(name: str) -> str:
    if name == "latest":
        return "nothing was recorded yet: stepscope run train.py records a run, or name a trace file"
    return f"there is no file, folder or run {name!r}; stepscope runs lists the runs"


def place_of(path: str | Path) -> Path:
    """The path of an argument: a run's folder (by name too), something inside it, or the path itself."""
    folder = _run_at(path)
    return folder.path if folder is not None else _inside_run(path) or Path(path)


def rank_traces(path: str) -> list[Path]:
    """The traces that a folder or a run has of several ranks; none where there is one trace, or one rank's."""
    inside = None if path == "-" else _inside_run(path)
    if path == "-" or (_run_at(path) is None and inside is not None and inside.is_dir()):
        return []
    found = trace_paths(path)
    return found if len(found) > 1 else []


def _one_trace(path: str | Path) -> str | Path:
    """The trace to open if the command takes only one; says which of several it is."""
    folder = _run_at(path)
    inside = _inside_run(path)
    if folder is None and inside is not None and inside.is_dir():
        return trace_paths(inside)[-1]
    found = trace_paths(path)
    if len(found) > 1 and folder is not None:
        first, second = (trace.parent.name for trace in found[:2])
        say(f"{folder.name} has {count(len(found))} ranks; this is {first}, {folder.name}/{second} is the next")
    elif len(found) > 1:
        say(f"{path} has {count(len(found))} traces; this is {found[0].name}, {found[1]} is the next")
    return found[0]


def _run_at(path: str | Path) -> RunFolder | None:
    from stepscope.record.runs import run_at

    return run_at(path)


def _inside_run(path: str | Path) -> Path | None:
    """The path of an argument such as RUN/rank1 or RUN/rank1/trace-2.json.gz; None if there is no such run."""
    name, slash, rest = str(path).partition("/")
    if not slash or not name or os.path.exists(path):
        return None
    folder = _run_at(name)
    inside = folder.path / rest if folder is not None else None
    return inside if inside is not None and inside.exists() else None


def _is_empty(trace: Trace) -> bool:
    from stepscope.trace.tables import SCHEMAS

    return all(trace.scan(name).head(1).collect().is_empty() for name in SCHEMAS if name != "lanes")


def _with_printable_path(trace: Trace) -> Trace:
    """Make the trace's path encodable: a file name may be any bytes, a report is UTF-8."""
    path = encodable(trace.metadata.path)
    return trace if path == trace.metadata.path else replace(trace, metadata=replace(trace.metadata, path=path))


def encodable(text: str) -> str:
    """Escape what UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def redactor_of(arguments: argparse.Namespace, names: Sequence[str] = (), paths: Sequence[str] = ()) -> Redactor:
    """A redactor that knows this user's and machine's names, those in the opened traces, and the given ones."""
    from stepscope.report.redaction import Redactor

    of_traces, found = noted_secrets(arguments)
    return Redactor([*local_names(), *of_traces, *names], [*found, *paths])


def redacted_sentence(words: Sequence[str], sentence: str) -> str:
    """The sentence without the paths among a command's words, names in their home folders, and local names."""
    from stepscope.report.redaction import Redactor, names_in_homes

    given = [part for word in words for part in (word, word.partition("=")[2])]
    paths = [path for part in given for path in (part, os.path.abspath(part)) if os.sep in path.rstrip(os.sep)]
    return Redactor([*local_names(), *names_in_homes(paths)], paths).text(sentence)


def redacted(arguments: argparse.Namespace, thing: _T, names: Sequence[str] = (), paths: Sequence[str] = ()) -> _T:
    """The thing, redacted by `redactor_of` under --redact."""
    return redactor_of(arguments, names, paths).redact(thing) if arguments.redact else thing


def _note_secrets(arguments: argparse.Namespace, trace: Trace) -> None:
    """Under --redact, remember the trace's names and paths for `redactor_of`."""
    if getattr(arguments, "redact", False):
        from stepscope.report.redaction import secrets_of

        note_secrets(arguments, secrets_of(trace))


def noted_secrets(arguments: argparse.Namespace) -> Secrets:
    """What `redactor_of` will remove of the traces that were opened: names, and paths."""
    found: Secrets = getattr(arguments, _SECRETS, ((), ()))
    return found


def note_secrets(arguments: argparse.Namespace, more: Secrets) -> None:
    names, paths = noted_secrets(arguments)
    setattr(arguments, _SECRETS, ([*names, *more[0]], [*paths, *more[1]]))


def local_names() -> list[str]:
    import getpass
    import platform

    node = platform.node()
    names = [node, node.split(".")[0], Path.home().name]
    with contextlib.suppress(OSError, KeyError, ImportError):  # a process without a user, as in some containers
        names.append(getpass.getuser())
    return [name for name in names if name]


@dataclass(frozen=True, slots=True)
class SideFile:
    """The content of one file of `add_evidence_options`.

    Attributes:
        rank: the rank in its file name; None if it covers the whole run.
    """

    path: str
    rank: int | None
    evidence: RunCounts

    def is_about(self, trace: Trace, *, several: bool) -> bool:
        """Whether it applies to this trace, which is one of several or the only one."""
        rank = trace.metadata.rank
        return self.rank is None or self.rank == rank or (rank is None and not several)


def side_files(arguments: argparse.Namespace) -> list[SideFile]:
    """Read the given files.

    Raises:
        UsageError: a file is of another kind.
        TraceError: a file cannot be read.
    """
    from stepscope.readers import side_files as readers
    from stepscope.readers.compile_log import compile_logs, read_compile_log

    logs = [str(file) for path in arguments.compile_log for file in compile_logs(path)]
    return [
        SideFile(path, readers.rank_in_name(path), read(path))
        for paths, read in (
            (arguments.xla_metrics, readers.read_xla_metrics),
            (arguments.xla_debug_log, readers.read_xla_debug_log),
            (arguments.gaudi_metrics, readers.read_gaudi_metrics),
            (arguments.fallback_log, readers.read_fallback_log),
            (logs, read_compile_log),
        )
        for path in paths
    ]


def with_evidence(traces: Iterable[Trace], files: list[SideFile], *, several: bool) -> Iterator[Trace]:
    """Add the files' content to the traces, and say on standard error which files match none.

    Args:
        several: whether there is more than one trace, so that a rank's file must name its rank.
    """
    used: set[str] = set()
    for trace in traces:
        about_it = [file for file in files if file.is_about(trace, several=several)]
        used |= {file.path for file in about_it}
        evidence = [file.evidence for file in about_it]
        if not any(each.compiled for each in evidence):
            evidence += _compile_logs_of_run(trace)
        yield _with(trace, evidence) if evidence else trace
    for file in files:
        if file.path not in used:
            say(f"skipped: {file.path} is about rank {file.rank}, which has no trace here")


def _compile_logs_of_run(trace: Trace) -> list[RunCounts]:
    """The logs of torch.compile that `stepscope run` had the trace's processes write; says which cannot be read."""
    from stepscope.readers.compile_log import LOG_NAME, read_compile_log
    from stepscope.record.run_folder import compile_folder_beside

    folder = compile_folder_beside(trace.metadata.path)
    found = []
    for file in sorted(folder.glob(LOG_NAME)) if folder is not None else ():
        try:
            log = read_compile_log(file)
        except (UsageError, TraceError) as error:
            say(f"skipped: {error}")
            continue
        if {each.process for each in log.compiled} & set(trace.lanes["process"].drop_nulls().to_list()):
            found.append(log)
    return found


def _with(trace: Trace, parts: list[RunCounts]) -> Trace:
    from stepscope.trace.metadata import joined

    evidence = joined(parts)
    sources = tuple(encodable(path) for path in evidence.sources)
    return replace(trace, metadata=replace(trace.metadata, evidence=replace(evidence, sources=sources)))
