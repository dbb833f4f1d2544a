"""`stepscope view`: the page of a trace, a run or the ranks of a job, served to this machine's browser."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final

from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    SECONDS,
    Command,
    CommandParser,
    add_device_option,
    add_evidence_options,
    add_reading_options,
    add_user_code_options,
    number,
    whole,
)
from stepscope.commands.shared.reading import garbage_rarely_collected
from stepscope.errors import UsageError

_IDLE_S: Final = 8 * 3600.0
_idle = number("is not a time: write 30m or 8h", {key: s for key, s in SECONDS.items() if key != "ms"}, least=1)


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        help="a trace file, a folder of ranks, a run's name, or - for standard input; others to compare the first with "
        "(default: the recorded runs)",
    )
    where = parser.add_argument_group("the page")
    where.add_argument("--no-browser", action="store_true", help="only print the address")
    where.add_argument(
        "--port", metavar="N", type=whole(1, 65535), help="this port (default: the first free from 8765)"
    )
    where.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="listen here (default: 127.0.0.1)")
    where.add_argument(
        "--allow-remote", action="store_true", help="let --host be an address that other machines can reach"
    )
    where.add_argument(
        "--idle-after", metavar="TIME", type=_idle, default=_IDLE_S, help="end after a time without requests (8h)"
    )
    add_evidence_options(parser)
    add_device_option(parser)
    add_user_code_options(parser)
    add_reading_options(parser)


@garbage_rarely_collected()
def _run(arguments: argparse.Namespace) -> int:
    from stepscope.commands.view.pages import Page
    from stepscope.view.documents import Documents
    from stepscope.view.server import Door, is_loopback, listening, serve

    if not is_loopback(arguments.host) and not arguments.allow_remote:
        raise UsageError(
            f"--host {arguments.host} lets other machines ask for the trace: add --allow-remote if they may, or use "
            "an ssh tunnel"
        )
    page = Page(arguments)
    page.open()  # what cannot be read is said before a browser opens
    try:
        socket = listening(arguments.host, arguments.port)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}" if arguments.port else arguments.host
        raise UsageError(f"the page cannot be served at {where}: {error.strerror or error}") from error
    with socket:
        door = Door(arguments.host, socket.getsockname()[1])
        documents = Documents(page.document, report_bug, page.options)
        for name in page.first_documents:
            documents.ask(name, {})  # what the first screen shows is made while the browser starts
        _say_where(door.address, door.port, arguments)
        if serve(documents, door, page, socket, arguments.idle_after):
            output.say(f"ended: nobody looked for {_time(arguments.idle_after)}")
    return 0


def _say_where(address: str, port: int, arguments: argparse.Namespace) -> None:
    """Print the address, open it in a browser, or say how to reach it from where the user sits."""
    import webbrowser

    is_remote = bool(os.environ.get("SSH_CONNECTION"))
    output.print_text(f"{address}\n")
    if is_remote or _is_in_container():
        host = os.environ.get("SSH_CONNECTION", "").split(" ")[2:3]
        output.say(
            f"from your own machine: ssh -L {port}:127.0.0.1:{port} {(host or ['HOST'])[0]}, then open the address"
        )
    elif not arguments.no_browser and not webbrowser.open(address):
        output.say("no browser could be opened here: open the address in one")
    output.say(f"Ctrl-C ends it, or {_time(arguments.idle_after)} without a request")
    sys.stdout.flush()


def _is_in_container() -> bool:
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or "container" in os.environ


def _time(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"


def report_bug(error: BaseException) -> str:
    """Keep a report of an error of ours, and say so in a sentence."""
    from stepscope.fault_report import kept_sentence

    return kept_sentence(error, "view", "a document of the page")


COMMAND: Final = Command(
    "view",
    "Open a page in the browser: the timeline, findings, lines and all tables of a trace, linked.",
    _prepare_parser,
    _run,
    """\
The page is served to this machine only, and to who has the address with its token. It sends nothing anywhere
but by its button for Perfetto, which says so.

examples:
  stepscope view trace.json.gz
  stepscope view traces/                                     every rank on one page
  stepscope view before.json after.json                      the first, compared with the other
  stepscope view                                             the recorded runs
  stepscope view trace.json --no-browser --port 8765         then, from your machine: ssh -L 8765:127.0.0.1:8765 HOST
""",
)
