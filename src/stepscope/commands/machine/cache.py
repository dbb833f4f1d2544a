"""`stepscope cache`: the traces that were read once and are kept, and the caches of compilers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import compile_caches, output
from stepscope.commands.shared.output import CommandParser, suggestion
from stepscope.errors import UsageError
from stepscope.report.format import count, size

if TYPE_CHECKING:
    from stepscope.trace.cache import TraceCache

NAME: Final = "cache"
HELP: Final = "List, clear or limit the traces that are kept for opening them again, and compilers' caches."
_EXAMPLES: Final = """\
The cache lies in the user's cache folder, or where STEPSCOPE_CACHE_DIR says. The least recently used traces go first.

examples:
  stepscope cache                                            what is kept, and where
  stepscope cache clear                                      remove it all
  stepscope cache limit                                      how much is kept at most
  stepscope cache limit 2GiB                                 keep at most that much; 0 keeps nothing
  stepscope cache compile                                    caches of torch.compile, Triton, XLA, Gaudi: size, age
  stepscope cache compile prune --limit 10GiB                remove what was used longest ago
  stepscope cache compile watch --limit 10GiB                the same after each write, until Ctrl-C
"""


def prepare_parser(parser: CommandParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.late = "what"
    parser.add_argument(
        "action", nargs="?", choices=("list", "clear", "limit", "compile"), default="list", help="default: list"
    )
    parser.add_argument(
        "what", metavar="SIZE|VERB", nargs="?", help="with limit: the new limit; with compile: show, prune or watch"
    )
    compile_caches.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for and say what came of it."""
    from stepscope.trace.cache import TraceCache

    if arguments.action == "compile":
        verb = arguments.what or "show"
        if verb not in compile_caches.VERBS:
            known = ", ".join(compile_caches.VERBS)
            raise UsageError(
                f"stepscope cache compile knows {known}, not {verb!r}{suggestion(verb, compile_caches.VERBS)}"
            )
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
    """Bytes from "2GiB", "500 MB" or "0".

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
    traces = "1 trace" if len(removed) == 1 else f"{count(len(removed))} traces"
    output.print_text(f"Removed {traces}, {size(sum(entry.bytes for entry in removed))}.\n")
    kept = len(cache.entries())
    if kept:
        output.print_text(f"{count(kept)} in use by another process {'stays' if kept == 1 else 'stay'}.\n")


def _list(cache: TraceCache) -> None:
    import polars as pl

    from stepscope.report.tables import table_lines

    entries = cache.entries()
    taken = sum(entry.bytes for entry in entries)
    output.print_text(f"{cache.root}: {size(taken)} of at most {size(cache.limit())}\n")
    if entries:
        frame = pl.DataFrame(
            {
                "bytes": [entry.bytes for entry in entries],
                "last_used": [_date(entry.last_used_unix) for entry in entries],
                "format": [entry.format for entry in entries],
                "trace": [entry.path for entry in entries],
            }
        )
        output.print_text("\n".join(table_lines(frame, width=output.width())) + "\n")


def _date(unix_s: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")
