"""`stepscope attach`: record a few steps of a program that runs, and diagnose them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stepscope.commands.shared import agents
from stepscope.errors import UsageError

NAME: Final = "attach"
HELP: Final = "Record a few steps of a program that is running, and diagnose them."
_STEPS: Final = 5
_EXAMPLES: Final = """\
The program has an agent: it was started with `stepscope run --serve`, or calls stepscope.start_server(). Of several
processes, the same steps are recorded. Or it runs the profiler server of XLA, as after jax.profiler.start_server(9012)
or torch_xla.debug.profiler.start_server(9012); that takes pip install 'stepscope[xla]'.

examples:
  stepscope attach my-run                                    every rank of a run
  stepscope attach 12345                                     the process of that number
  stepscope attach localhost:8790 --steps 10                 an address, such as the end of an ssh tunnel
  stepscope attach my-run --seconds 3 --stacks --output traces/
  stepscope attach my-run --through-files                    where no connection is possible, as into a container
  stepscope attach localhost:9012 --seconds 2                a profiler server of JAX, PyTorch/XLA or TensorFlow
  stepscope attach host1:9012,host2:9012                     the hosts of a pod, at the same time
  stepscope attach my-run --repeat 10 --every 30s            again and again while it trains
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "targets", metavar="TARGET", nargs="+", help="a run, the number of a process, or host:port or unix:PATH"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", metavar="N", type=agents.step_count, help=f"how many to record (default: {_STEPS})")
    length.add_argument("--seconds", metavar="T", type=agents.positive_seconds, help="record for so long instead")
    parser.add_argument("--repeat", metavar="N", type=agents.step_count, default=1, help="record so often (default: 1)")
    parser.add_argument(
        "--every",
        metavar="T",
        type=agents.positive_seconds,
        default=30.0,
        help="with --repeat: from one beginning to the next, such as 30s or 5m (default: 30s)",
    )
    agents.add_keeping_options(parser)
    agents.add_recording_options(parser)
    agents.add_reaching_options(parser)
    servers = parser.add_argument_group("profiler servers of JAX, PyTorch/XLA and TensorFlow")
    servers.add_argument(
        "--host-tracer-level",
        metavar="LEVEL",
        type=int,
        choices=range(4),
        default=2,
        help="of the host's events: 0 none, 1 the program's annotations, 2 important ones, 3 all (default: 2)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Begin, wait, fetch, diagnose."""
    if arguments.through_files:
        return _record_agents(arguments, arguments.targets)
    found = agents.find_servers(arguments.targets)
    if found.agents and found.servers:
        raise UsageError(
            f"{found.agents[0]} is an agent of stepscope and {found.servers[0]} a profiler server: attach to one kind"
        )
    if found.servers:
        return agents.record_servers(arguments, found)
    if found.unreachable:
        raise found.unreachable[0][1]
    return _record_agents(arguments, found.agents)


def _record_agents(arguments: argparse.Namespace, targets: Sequence[str]) -> int:
    from stepscope.record.agent.client import start_together
    from stepscope.record.agent.protocol import CaptureOrder

    clients = agents.agents(arguments, targets)
    steps = _STEPS if arguments.steps is None and arguments.seconds is None else arguments.steps
    order = CaptureOrder(
        steps=steps,
        seconds=arguments.seconds,
        timeout_s=arguments.timeout,
        options=agents.record_options(arguments),
    )
    if arguments.repeat > 1 and arguments.output is not None and agents.is_trace_name(arguments.output):
        raise UsageError(f"--repeat gives several traces: --output has to be a folder, not {arguments.output}")
    last: list[Path] = []
    for number in range(arguments.repeat):
        begun_s = time.monotonic()
        last = agents.fetch(arguments.output, agents.finished(start_together(clients, order)))
        if number + 1 < arguments.repeat:
            time.sleep(max(0.0, arguments.every - (time.monotonic() - begun_s)))
    return agents.diagnose_files(arguments, last)
