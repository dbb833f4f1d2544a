"""This machine: `stepscope environment`, what makes timings slow or noisy; `stepscope cache`, traces and compilers."""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stepscope.commands.shared import output
from stepscope.commands.shared.answers import forget
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_report_options,
    number,
    parsed_size,
    suggestion,
)
from stepscope.commands.shared.output import counted
from stepscope.errors import StepscopeError, UsageError
from stepscope.report.format import count, printable, share, size

if TYPE_CHECKING:
    from stepscope.machine.environment import Machine, Observation, Runtime
    from stepscope.record.run_folder import RunFolder
    from stepscope.remedies.compile_caches import CompileCache, Entry, Eviction
    from stepscope.report.document import Block
    from stepscope.trace.cache import TraceCache


def _prepare_cache_parser(parser: CommandParser) -> None:
    parser.late = "what"
    parser.add_argument(
        "action", nargs="?", choices=("list", "clear", "limit", "compile"), default="list", help="default: list"
    )
    parser.add_argument(
        "what", metavar="SIZE|VERB", nargs="?", help="with limit: the new limit; with compile: show, prune or watch"
    )
    add_options(parser)


def _run_cache(arguments: argparse.Namespace) -> int:
    from stepscope.trace.cache import TraceCache

    if arguments.action == "compile":
        verb = arguments.what or "show"
        if verb not in VERBS:
            guess = suggestion(verb, VERBS)
            raise UsageError(f"stepscope cache compile knows {', '.join(VERBS)}, not {verb!r}{guess}")
        return run(arguments, verb)
    if any(value is not None for value in (arguments.limit, arguments.folder, arguments.json)):
        raise UsageError("--limit, --folder and --json need stepscope cache compile")
    if arguments.what is not None and arguments.action != "limit":
        raise UsageError(f"stepscope cache {arguments.action} takes no {arguments.what!r}")
    cache = TraceCache()
    match arguments.action:
        case "clear":
            _clear(cache)
        case "limit":
            if arguments.what is not None:
                cache.set_limit(parsed_size(arguments.what))
            output.print_text(f"The cache keeps at most {size(cache.limit())}.\n")
        case _:
            _list(cache)
    return 0


def _clear(cache: TraceCache) -> None:
    removed = cache.clear()
    freed = size(sum(entry.bytes for entry in removed))
    answers = output.counted(forget(), "kept answer")
    output.print_text(f"Removed {output.counted(len(removed), 'trace')}, {freed}, and {answers}.\n")
    kept = len(cache.entries())
    if kept:
        output.print_text(f"{count(kept)} in use by another process {'stays' if kept == 1 else 'stay'}.\n")


def _list(cache: TraceCache) -> None:
    import polars as pl

    entries = cache.entries()
    taken = sum(entry.bytes for entry in entries)
    output.print_text(f"{cache.root}: {size(taken)} of at most {size(cache.limit())}\n")
    if entries:
        rows = [(entry.bytes, output.local_minute(entry.last_used_unix), entry.format, entry.path) for entry in entries]
        output.print_table(pl.DataFrame(rows, schema=("bytes", "last_used", "format", "trace"), orient="row"))


CACHE: Final = Command(
    "cache",
    "List, clear or limit the traces that are kept for opening them again, and compilers' caches.",
    _prepare_cache_parser,
    _run_cache,
    """\
The cache is in the user's cache folder, or in STEPSCOPE_CACHE_DIR. The least recently used traces go first.

examples:
  stepscope cache                                            what is kept, and where
  stepscope cache clear                                      remove it all
  stepscope cache limit                                      how much is kept at most
  stepscope cache limit 2GiB                                 keep at most that much; 0 keeps nothing
  stepscope cache compile                                    caches of torch.compile, Triton, XLA, Gaudi: size, age
  stepscope cache compile prune --limit 10GiB                remove what was least recently used
  stepscope cache compile watch --limit 10GiB                the same after each write, until Ctrl-C
""",
)


VERBS: Final = ("show", "prune", "watch")
_NAMES: Final = {"inductor": "torch.compile", "triton": "Triton", "xla": "XLA", "hpu": "Gaudi recipes"}
_RUNS_ASKED: Final = 50
"""Number of latest runs whose cache hits are counted."""


def add_options(parser: argparse.ArgumentParser) -> None:
    of = parser.add_argument_group("with compile")
    of.add_argument("--limit", metavar="SIZE", type=_size, help="the most that each cache may hold, such as 10GiB")
    of.add_argument(
        "--folder", metavar="KIND=DIR", type=_cache, action="append", help="only this cache: inductor, triton, xla, hpu"
    )
    seconds = number("is not a number of seconds from 0.1 to 86400", least=0.1, most=86_400)
    of.add_argument(
        "--look", metavar="SECONDS", type=seconds, default=5.0, help="watch: seconds between two checks (5)"
    )
    add_report_options(of, json="show: write it for programs; - prints it")


def run(arguments: argparse.Namespace, verb: str) -> int:
    """Show, prune or watch; return 1 if a cache stays above its limit because its entries are in use."""
    from stepscope.remedies.compile_caches import find_caches

    caches: Sequence[CompileCache] = arguments.folder or find_caches()
    if verb == "show":
        return _show(caches, arguments)
    if arguments.json is not None:
        raise UsageError(f"stepscope cache compile {verb} has no --json")
    limited = [(cache, limit) for cache in caches if (limit := arguments.limit or cache.limit_bytes)]
    if caches and not limited:
        raise UsageError("no limit is set: say how much each cache may hold, such as --limit 10GiB")
    if not caches:
        output.print_text("There is no compile cache here; --folder KIND=DIR names one.\n")
        return 0
    return _prune(limited) if verb == "prune" else _watch(limited, arguments.look)


def _show(caches: Sequence[CompileCache], arguments: argparse.Namespace) -> int:
    from stepscope.remedies.compile_caches import entries_of
    from stepscope.report.document import Document

    held = [(cache, entries_of(cache)) for cache in caches]
    hits = _hits()
    output.write_reports(
        arguments, lambda: Document("compile caches", tuple(_blocks(held, hits))), json=lambda: _report(held, hits)
    )
    return 0


def _blocks(held: Sequence[tuple[CompileCache, list[Entry]]], hits: Sequence[Hits]) -> Iterator[Block]:
    from stepscope.report.document import Section, texts

    yield from texts("" if held else "There is no compile cache here; --folder KIND=DIR names one.")
    for cache, entries in held:
        most = f" of at most {size(cache.limit_bytes)}" if cache.limit_bytes else ", no limit,"
        by = "where it lies by default" if cache.said_by == "default" else cache.said_by
        taken = size(sum(entry.bytes for entry in entries))
        yield Section(f"{_NAMES[cache.kind]}: {taken}{most} in {cache.folder} ({by})", texts(*_use(entries)))
    for each in hits:
        of = "the latest run" if each.runs == 1 else f"{each.runs} of the latest runs"
        asked = each.hits + each.misses
        rate = f"{share(each.hits / asked)} ({count(each.hits)} of {count(asked)})"
        yield from texts(f"hit rate of {each.cache} in {of}: {rate}")


def _use(entries: Sequence[Entry]) -> Iterator[str]:
    if not entries:
        yield "no entries"
        return
    now = time.time()
    made = sorted(now - entry.made_unix for entry in entries)
    again = sum(entry.was_read_again for entry in entries)
    number = counted(len(entries), "entry", "entries")
    unused = _age(now - entries[0].used_unix)
    yield f"{number}, made {_age(made[-1])} to {_age(made[0])} ago; longest unused: {unused}"
    part = f"{count(again)} ({share(again / len(entries))})"
    yield f"read again after they were made, by the file system's times: {part}"


def _report(held: Sequence[tuple[CompileCache, list[Entry]]], hits: Sequence[Hits]) -> dict[str, Any]:
    from stepscope.report.document import stamped

    caches = [
        {
            "kind": cache.kind,
            "folder": str(cache.folder),
            "said_by": cache.said_by,
            "limit_bytes": cache.limit_bytes,
            "bytes": sum(entry.bytes for entry in entries),
            "entries": [
                {
                    "kind": entry.kind,
                    "key": entry.key,
                    "bytes": entry.bytes,
                    "made_unix_s": entry.made_unix,
                    "used_unix_s": entry.used_unix,
                }
                for entry in entries
            ],
        }
        for cache, entries in held
    ]
    return stamped(caches=caches, hit_counts=[each._asdict() for each in hits])


def _prune(limited: Sequence[tuple[CompileCache, int]]) -> int:
    from stepscope.remedies.compile_caches import EvictionBusy, evict

    is_above = False
    for cache, limit in limited:
        try:
            eviction = evict(cache, limit)
        except EvictionBusy as error:
            output.print_text(f"{printable(str(error))}; it keeps the cache below the limit.\n")
            continue
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise UsageError(f"{cache.folder} cannot be pruned: {error.strerror or error}") from error
        output.print_text(f"{_sentence(cache, eviction)}\n")
        is_above |= not eviction.is_below
    return int(is_above)


def _watch(limited: Sequence[tuple[CompileCache, int]], look_s: float) -> int:
    from stepscope.remedies.compile_caches import BackgroundEviction

    try:
        eviction = BackgroundEviction(
            limited, look_s=look_s, tell=lambda cache, done: output.print_text(f"{_sentence(cache, done)}\n")
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    for cache, limit in limited:
        output.print_text(f"Keeping {printable(str(cache.folder))} below {size(limit)}; Ctrl-C ends it.\n")
    try:
        eviction.run()
    except KeyboardInterrupt:
        eviction.stop()
    return 0


def _sentence(cache: CompileCache, eviction: Eviction) -> str:
    """Format "torch.compile, /tmp/x: removed 12 entries, 1.1 GB; 9.8 GB are left"."""
    if eviction.removed:
        gone = size(eviction.before_bytes - eviction.after_bytes)
        removed = counted(len(eviction.removed), "entry", "entries")
        text = f"removed {removed}, {gone}; {size(eviction.after_bytes)} are left"
    else:
        text = "nothing to remove"
        text += f", it holds {size(eviction.before_bytes)}" if eviction.before_bytes else ""
    if not eviction.is_below:
        is_one = len(eviction.in_use) == 1
        stay, was = ("1 entry is", "was") if is_one else (f"{count(len(eviction.in_use))} entries are", "were")
        text += f"; that is above the limit, because {stay} in use, or {was} within the last minute"
    return f"{_NAMES[cache.kind]}, {printable(str(cache.folder))}: {text}."


class Hits(NamedTuple):
    """Hits and misses of one cache, and the number of runs they were counted in."""

    cache: str
    hits: int
    misses: int
    runs: int


def _hits() -> list[Hits]:
    """Count hits in the latest recorded runs and in Gaudi's metrics file."""
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex

    try:
        records = [record for record in RunIndex().all() if not record.is_gone]
    except (OSError, StepscopeError):
        records = []
    latest = sorted(records, key=lambda record: record.started_unix_s)[-_RUNS_ASKED:]
    counts: defaultdict[str, list[Counter[str]]] = defaultdict(list)
    for record in latest:
        for name, found in _counts_of(RunFolder(record.path)).items():
            counts[name].append(found)
    metrics = os.environ.get("PT_HPU_METRICS_FILE")
    if metrics and Path(metrics).is_file():
        from stepscope.readers.side_files import read_gaudi_metrics

        evidence = read_gaudi_metrics(metrics)
        if evidence.cached or evidence.missed:
            counts["recipes"] = [Counter(hits=evidence.cached or 0, misses=evidence.missed or 0)]
    totals = {name: sum(runs, Counter()) for name, runs in counts.items()}
    return [Hits(name, total["hits"], total["misses"], len(counts[name])) for name, total in totals.items()]


def _counts_of(folder: RunFolder) -> dict[str, Counter[str]]:
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for recording in folder.recordings():
        facts = recording.get("facts")
        counts = facts.get("compile_caches") if isinstance(facts, dict) else None
        for name, pair in (counts if isinstance(counts, dict) else {}).items():
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, int) and each >= 0 for each in pair):
                found[str(name)].update(hits=pair[0], misses=pair[1])
    return {name: counter for name, counter in found.items() if counter.total()}


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _cache(text: str) -> CompileCache:
    from stepscope.remedies.compile_caches import KINDS, CompileCache

    kind, equals, folder = text.partition("=")
    if not equals or kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a cache: write KIND=DIR with {', '.join(KINDS)}")
    if not folder or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{folder!r} is not a folder")
    return CompileCache(next(each for each in KINDS if each == kind), Path(folder), "--folder")


def _size(text: str) -> int:
    from stepscope.remedies.compile_caches import size_in_bytes

    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_LABEL: Final = 10


def _prepare_environment_parser(parser: CommandParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument(
        "--pid", metavar="PID", type=int, help="show what this running process sees instead of a new one"
    )


def _run_environment(arguments: argparse.Namespace) -> int:
    from stepscope.machine.environment import inspect_environment, observations_json

    observations = inspect_environment(_machine(arguments.pid), [scanner()])
    if arguments.format == "json":
        from stepscope.report.document import json_bytes, stamped

        report = stamped(observations=observations_json(observations))
        output.write_output("-", json_bytes(report))
    else:
        output.print_text("\n".join(text_lines(observations, output.width())) + "\n")
    return 0


def scanner() -> Observation:
    """Whether stepscope reads traces as fast as it can."""
    from stepscope.machine.observed import Check
    from stepscope.readers.kineto.scanned import is_built

    check = Check("scanner")
    if is_built():
        return check.fine("stepscope reads traces with its compiled scanner", "stepscope.readers.kineto._scanner")
    return check.note(
        "stepscope reads traces without its compiled scanner",
        "there is no module stepscope.readers.kineto._scanner of this version",
        "Reading takes more than twice the time; the results are the same.",
        "Install stepscope again where a C++17 compiler and Python's headers are installed.",
    )


def text_lines(observations: Sequence[Observation], width: int, result: str = "") -> Iterator[str]:
    """The report for a terminal: what to change first, then what is fine and what is unknown.

    Args:
        result: what the problems come to; by default, that timings are slow or noisy.
    """
    by_verdict = {
        verdict: [observation for observation in observations if observation.verdict == verdict]
        for verdict in ("problem", "note", "fine", "unknown")
    }
    problems, notes = len(by_verdict["problem"]), len(by_verdict["note"])
    yield (
        f"{result or f'{_things(problems)} timings slow or noisy here'}; {notes} more worth knowing, "
        f"{len(by_verdict['fine'])} fine, {len(by_verdict['unknown'])} unknown."
    )
    for position, observation in enumerate([*by_verdict["problem"], *by_verdict["note"]], start=1):
        yield ""
        mark = "" if observation.verdict == "problem" else " (worth knowing)"
        yield from _wrapped(f"{position}. {observation.title}{mark}", "   ", width)
        for label, text in (("read", observation.read), ("why", observation.why), ("change", observation.change)):
            if text:
                yield from _wrapped(f"   {label:<6} {text}", " " * _LABEL, width)
    for heading, verdict in (("Fine", "fine"), ("Unknown, because it cannot be read", "unknown")):
        if by_verdict[verdict]:
            yield from ("", heading)
        for observation in by_verdict[verdict]:
            read = f" ({observation.read})" if observation.read else ""
            yield from _wrapped(f"  - {observation.title}{read}", "    ", width)


def _machine(process: int | None) -> Machine:
    from stepscope.machine.environment import Machine

    if process is None:
        return Machine(runtime=_runtime())
    if not Path(f"/proc/{process}").is_dir():
        raise UsageError(f"there is no process {process} whose /proc/{process} can be read")
    return Machine.of_process(process)


def _runtime() -> Runtime:
    """The runtime settings of a new Python process with the user's PyTorch."""
    from stepscope.machine.environment import Runtime

    try:
        import torch
    except ImportError as error:
        return Runtime.of_this_process(torch_why_not=f"PyTorch cannot be imported here: {error}")
    # A program may enable anomaly mode itself, so its state in this process proves nothing.
    return replace(Runtime.of_this_process(torch=torch), anomaly_mode=None)


def _things(problems: int) -> str:
    return {0: "Nothing found makes", 1: "1 thing makes"}.get(problems, f"{problems} things make")


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        printable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


ENVIRONMENT: Final = Command(
    "environment",
    "What makes timings slow or noisy on this machine, and what to do about it.",
    _prepare_environment_parser,
    _run_environment,
    """\
Nothing is changed. What cannot be read is reported as unknown.

examples:
  stepscope environment                                      this machine, as a new process sees it
  stepscope environment --pid 4711                           as a running process sees it: its cores, variables, swap
  stepscope environment --format json                        for programs
""",
)
