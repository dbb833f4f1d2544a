"""`stepscope export`: the trace as a timeline that other viewers open."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stepscope.commands import _output
from stepscope.commands._reading import add_reading_options, open_from
from stepscope.commands._user_code import add_user_code_options, user_code_from

if TYPE_CHECKING:
    from stepscope.trace import Trace

NAME: Final = "export"
HELP: Final = "Write the trace, with idle time by cause and the critical path, for Perfetto, or as flame graphs."
FORMATS: Final = ("timeline", "speedscope", "folded", "chrome")
_EXAMPLES: Final = """\
examples:
  stepscope export trace.json annotated.json                 then open it at https://ui.perfetto.dev
  stepscope export trace.json one.json --steps 5             only one step
  stepscope export trace.json flame.speedscope.json --format speedscope     then open it at https://speedscope.app
  stepscope export trace.json - --format folded | flamegraph.pl --countname ns > flame.svg
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or - for standard input")
    parser.add_argument(
        "output", metavar="OUT.json", type=_output.target, help="the file to write, or - for standard output"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="timeline: for Perfetto (the default); speedscope: flame graphs of the device's time by your lines and of "
        "each thread; folded: the device's time as folded stacks",
    )
    add_user_code_options(parser)
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the timeline."""
    trace = open_from(arguments, arguments.trace)
    _output.write_output(arguments.output, _pieces(trace, arguments))
    return 0


def _pieces(trace: Trace, arguments: argparse.Namespace) -> Iterator[bytes]:
    if arguments.format == "timeline":
        from stepscope.analysis.export import timeline
        from stepscope.whatif import Experiment
        from stepscope.whatif.critical_path import critical_path

        return timeline(trace, path=critical_path(Experiment(trace, user_code=user_code_from(arguments))))
    if arguments.format == "chrome":
        from stepscope.report.exports.chrome import chrome

        return chrome(trace)
    from stepscope.analysis.attribution import attribute
    from stepscope.analysis.flame_files import folded, speedscope

    attribution = attribute(trace, user_code=user_code_from(arguments))
    return (speedscope if arguments.format == "speedscope" else folded)(trace, attribution)
