"""`stepscope attach`: record a few steps of a program that runs, and diagnose them."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands import _agents

NAME: Final = "attach"
HELP: Final = "Record a few steps of a program that is running, and diagnose them."
_STEPS: Final = 5
_EXAMPLES: Final = """\
The program has an agent: it was started with `stepscope run --serve`, or calls stepscope.start_server(). Of several
processes, the same steps are recorded.

examples:
  stepscope attach my-run                                    every rank of a run
  stepscope attach 12345                                     the process of that number
  stepscope attach localhost:8790 --steps 10                 an address, such as the end of an ssh tunnel
  stepscope attach my-run --seconds 3 --stacks --output traces/
  stepscope attach my-run --through-files                    where no connection is possible, as into a container
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "targets", metavar="TARGET", nargs="+", help="a run, the number of a process, or host:port or unix:PATH"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", metavar="N", type=_agents.step_count, help=f"how many to record (default: {_STEPS})")
    length.add_argument("--seconds", metavar="T", type=_agents.positive_seconds, help="record for so long instead")
    _agents.add_keeping_options(parser)
    _agents.add_recording_options(parser)
    _agents.add_reaching_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Begin, wait, fetch, diagnose."""
    from stepscope.capture.client_group import start_together
    from stepscope.capture.protocol import CaptureOrder

    clients = _agents.agents(arguments, arguments.targets)
    steps = _STEPS if arguments.steps is None and arguments.seconds is None else arguments.steps
    order = CaptureOrder(
        steps=steps,
        seconds=arguments.seconds,
        timeout_s=arguments.timeout,
        options=_agents.record_options(arguments),
    )
    return _agents.keep(arguments, _agents.finished(start_together(clients, order)))
