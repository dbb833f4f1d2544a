"""`stepscope session`: begin and end recordings of a running program when you see fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import agents, output
from stepscope.errors import AgentError, UsageError

if TYPE_CHECKING:
    from stepscope.record.agent.client import AgentClient, Started

NAME: Final = "session"
HELP: Final = "Start, stop, cancel or list recordings of a program that is running."
_EXAMPLES: Final = """\
A recording lasts from start to stop, so that it can cover what happens between two moments. Each start makes a new
one; what was recorded before stays. Programs and TARGETs are those of `stepscope attach`.

examples:
  stepscope session start my-run                             begin to record
  stepscope session stop my-run                              end, save and diagnose
  stepscope session cancel my-run                            end and throw away
  stepscope session list my-run                              what was recorded so far
  stepscope session shutdown my-run                          end the agents; the program goes on
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("action", choices=list(_ACTIONS), help="what to do")
    parser.add_argument(
        "targets", metavar="TARGET", nargs="+", help="a run, the number of a process, or host:port or unix:PATH"
    )
    agents.add_keeping_options(parser)
    agents.add_recording_options(parser)
    agents.add_reaching_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for."""
    if not arguments.through_files:
        servers = agents.find_servers(arguments.targets).servers
        if servers:
            raise UsageError(
                f"{servers[0]} is a profiler server, which records for a time that is known at the beginning: "
                f"stepscope attach {servers[0]} --seconds 2"
            )
    return _ACTIONS[arguments.action](arguments, agents.agents(arguments, arguments.targets))


def _start(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import start_together
    from stepscope.record.agent.protocol import CaptureOrder

    order = CaptureOrder(timeout_s=arguments.timeout, options=agents.record_options(arguments))
    begun = _begun(start_together(clients, order))
    ended = [f"{client.name}: {state.problem or state.state}" for client, state in begun if state.ended]
    if ended:
        raise AgentError("; ".join(ended))
    for client, state in begun:
        since = "" if state.first_step is None else f" {agents.describe(state)}"
        output.print_text(f"{client.name}: recording{since} ({state.id})\n")
    return 0


def _stop(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import for_each_pair

    stopped = for_each_pair(_begun(_under_way(clients)), lambda client, state: client.stop(state.id))
    return agents.keep(arguments, agents.finished(stopped))


def _cancel(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import for_each_pair

    for client, state in for_each_pair(_under_way(clients), lambda client, state: client.cancel(state.id)):
        output.print_text(f"{client.name}: {state.id} {state.state}\n")
    return 0


def _list(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    import polars as pl

    from stepscope.record.agent.client import for_each
    from stepscope.report.tables import table_lines

    captures = for_each(clients, lambda client: client.captures())
    rows = [
        {
            "process": client.name,
            "capture": state.id,
            "state": state.state,
            "recorded": agents.describe(state),
            "bytes": sum(size for _, size in state.files),
            "problem": state.problem,
        }
        for client, states in zip(clients, captures, strict=True)
        for state in states
    ]
    if not rows:
        output.print_text("Nothing was recorded on demand so far.\n")
        return 0
    output.print_text("\n".join(table_lines(pl.DataFrame(rows), width=output.width())) + "\n")
    return 0


def _shut_down(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import for_each

    for_each(clients, lambda client: client.shutdown())
    for client in clients:
        output.print_text(f"{client.name}: the agent has ended, the program goes on\n")
    return 0


def _begun(started: Started) -> Started:
    """The captures when their first steps have begun, so that stopping them leaves something; Ctrl-C cancels them."""
    from stepscope.record.agent.client import cancel_all, for_each_pair

    try:
        return for_each_pair(started, lambda client, state: client.begun(state.id))
    except BaseException:
        cancel_all(started)
        raise


def _under_way(clients: Sequence[AgentClient]) -> Started:
    """The capture that each process has under way.

    Raises:
        AgentError: none has any.
    """
    from stepscope.record.agent.client import for_each

    captures = for_each(clients, lambda client: client.captures())
    found = [
        (client, state) for client, states in zip(clients, captures, strict=True) for state in states if not state.ended
    ]
    if not found:
        raise AgentError("no recording is under way (stepscope session list shows those that were)")
    return found


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Sequence[AgentClient]], int]]] = {
    "start": _start,
    "stop": _stop,
    "cancel": _cancel,
    "list": _list,
    "shutdown": _shut_down,
}
