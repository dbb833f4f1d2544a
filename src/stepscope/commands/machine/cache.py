"""`stepscope cache`: the cache of converted traces, and the caches of compilers."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import TYPE_CHECKING, Final

from stepscope.commands.machine import compile_caches
from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser, suggestion
from stepscope.errors import UsageError
from stepscope.report.format import count, size

if TYPE_CHECKING:
    from stepscope.trace.cache import TraceCache


def _prepare_parser(parser: CommandParser) -> None:
    parser.late = "what"
    parser.add_argument(
        "action", nargs="?", choices=("list", "clear", "limit", "compile"), default="list", help="default: list"
    )
    parser.add_argument(
        "what", metavar="SIZE|VERB", nargs="?", help="with limit: the new limit; with compile: show, prune or watch"
    )
    compile_caches.add_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    from stepscope.trace.cache import TraceCache

    if arguments.action == "compile":
        verb = arguments.what or "show"
        if verb not in compile_caches.VERBS:
            guess = suggestion(verb, compile_caches.VERBS)
            raise UsageError(f"stepscope cache compile knows {', '.join(compile_caches.VERBS)}, not {verb!r}{guess}")
        return compile_caches.run(arguments, verb)
    if any(value is not None for value in (arguments.limit, arguments.folder, arguments.json)):
        raise UsageError("--limit, --folder and --json go with stepscope cache compile")
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


def parsed_size(text: str) -> int:
    """Parse a size such as "2GiB", "500 MB" or "0" into bytes.

    Raises:
        UsageError: the text is no size.
    """
    from stepscope.remedies.compile_caches.entries import bytes_of

    found = bytes_of(text)
    if found is None:
        raise UsageError(f"{text!r} is no size: write a number with MB, GB, MiB or GiB, such as 2GiB")
    return found


def _clear(cache: TraceCache) -> None:
    removed = cache.clear()
    freed = size(sum(entry.bytes for entry in removed))
    output.print_text(f"Removed {output.counted(len(removed), 'trace')}, {freed}.\n")
    kept = len(cache.entries())
    if kept:
        output.print_text(f"{count(kept)} in use by another process {'stays' if kept == 1 else 'stay'}.\n")


def _list(cache: TraceCache) -> None:
    import polars as pl

    entries = cache.entries()
    taken = sum(entry.bytes for entry in entries)
    output.print_text(f"{cache.root}: {size(taken)} of at most {size(cache.limit())}\n")
    if entries:
        rows = [(entry.bytes, _date(entry.last_used_unix), entry.format, entry.path) for entry in entries]
        output.print_table(pl.DataFrame(rows, schema=("bytes", "last_used", "format", "trace"), orient="row"))


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")


COMMAND: Final = Command(
    "cache",
    "List, clear or limit the traces that are kept for opening them again, and compilers' caches.",
    _prepare_parser,
    _run,
    """\
The cache lies in the user's cache folder, or where STEPSCOPE_CACHE_DIR says. The least recently used traces go first.

examples:
  stepscope cache                                            what is kept, and where
  stepscope cache clear                                      remove it all
  stepscope cache limit                                      how much is kept at most
  stepscope cache limit 2GiB                                 keep at most that much; 0 keeps nothing
  stepscope cache compile                                    caches of torch.compile, Triton, XLA, Gaudi: size, age
  stepscope cache compile prune --limit 10GiB                remove what was used longest ago
  stepscope cache compile watch --limit 10GiB                the same after each write, until Ctrl-C
""",
)
