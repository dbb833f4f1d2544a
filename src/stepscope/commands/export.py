"""`stepscope export`: the trace as a timeline that other viewers open."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands import _output
from stepscope.commands._reading import add_reading_options, open_from

NAME: Final = "export"
HELP: Final = "Write the trace, with idle time and its causes, for Perfetto or chrome://tracing."
_EXAMPLES: Final = """\
examples:
  stepscope export trace.json annotated.json                 then open it at https://ui.perfetto.dev
  stepscope export trace.json one.json --steps 5             only one step
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    parser.add_argument(
        "output", metavar="OUT.json", type=_output.target, help="the file to write, or - for standard output"
    )
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the timeline."""
    from stepscope.analysis.export import timeline

    trace = open_from(arguments, arguments.trace)
    _output.write_output(arguments.output, timeline(trace))
    return 0
