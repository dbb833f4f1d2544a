"""`stepscope attach` and `stepscope session`: record a running program."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.read import diagnose
from stepscope.commands.record.servers import find_targets, record_servers
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    SECONDS,
    Command,
    CommandParser,
    add_record_flags,
    number,
    record_options,
    whole,
)
from stepscope.commands.shared.output import say
from stepscope.errors import AgentError, UsageError
from stepscope.report.format import count

if TYPE_CHECKING:
    from stepscope.record.agent.client import AgentClient, CaptureState, Started
    from stepscope.record.agent.protocol import CaptureOrder
    from stepscope.record.run_folder import RunFolder

_STEPS: Final = 5
_XPLANE_SUFFIX: Final = ".xplane.pb"
_TRACE_SUFFIXES: Final = (".json", ".json.gz", _XPLANE_SUFFIX)
_MINUTES: Final = {unit: SECONDS[unit] for unit in ("ms", "s", "m", "")}
step_count = whole(1, 1_000_000, "number of steps")
positive_seconds = number(
    "is not a number of seconds above 0, at most 86400", _MINUTES, above=0, most=86_400, exponents=True
)


def add_targets(parser: CommandParser) -> None:
    parser.add_argument(
        "targets", metavar="TARGET", nargs="+", help="a run, the number of a process, or host:port or unix:PATH"
    )


def _add_recording_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        help="a trace file, or a folder for the traces of several processes (default: the run's folder, else this one)",
    )
    parser.add_argument("--no-diagnose", action="store_true", help="only fetch the traces")
    add_record_flags(parser.add_argument_group("what is recorded besides times"))
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=60.0,
        help="give up after this long without a step (default: 60)",
    )
    group = parser.add_argument_group("reaching the processes")
    group.add_argument("--through-files", action="store_true", help="through files in the run folder, not a connection")
    group.add_argument("--token", metavar="TOKEN", help="the agent's token, if its file cannot be read here")


def _prepare_attach(parser: CommandParser) -> None:
    add_targets(parser)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", metavar="N", type=step_count, help=f"how many to record (default: {_STEPS})")
    length.add_argument("--seconds", metavar="T", type=positive_seconds, help="record for so long instead")
    parser.add_argument("--repeat", metavar="N", type=step_count, default=1, help="record so often (default: 1)")
    parser.add_argument(
        "--every",
        metavar="T",
        type=positive_seconds,
        default=30.0,
        help="with --repeat: from one start to the next, such as 30s or 5m (default: 30s)",
    )
    _add_recording_options(parser)
    servers = parser.add_argument_group("profiler servers of JAX, PyTorch/XLA and TensorFlow")
    servers.add_argument(
        "--host-tracer-level",
        metavar="LEVEL",
        type=int,
        choices=range(4),
        default=2,
        help="events of the host: 0 none, 1 the program's annotations, 2 important ones, 3 all (default: 2)",
    )


def _attach(arguments: argparse.Namespace) -> int:
    targets: Sequence[str] = arguments.targets
    if not arguments.through_files:
        found = find_targets(targets)
        if found.agents and found.servers:
            raise UsageError(
                f"{found.agents[0]} is an agent of stepscope and {found.servers[0]} a profiler server: "
                "attach to only one kind"
            )
        if found.servers:
            return _diagnose(arguments, record_servers(arguments, found))
        if found.unreachable:
            raise found.unreachable[0][1]
        targets = found.agents
    return _diagnose(arguments, _record_agents(arguments, agents_of(arguments, targets)))


def recording_of_run(target: str) -> Callable[[], list[Path]]:
    """Reach a run's programs; calling the result records them like `stepscope attach RUN`, and returns the traces.

    Raises:
        AgentError: a program cannot be reached.
    """
    arguments = ATTACH.parsed([target])
    return partial(_record_agents, arguments, agents_of(arguments, [target]))


def _record_agents(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> list[Path]:
    """Record the agents --repeat times, and return the traces of the last time."""
    from stepscope.record.agent.client import start_together

    steps = _STEPS if arguments.steps is None and arguments.seconds is None else arguments.steps
    order = _order(arguments, steps=steps, seconds=arguments.seconds)
    if arguments.repeat > 1 and arguments.output is not None and _is_trace_name(arguments.output):
        raise UsageError(f"--repeat records several traces: --output must be a folder, not {arguments.output}")
    last: list[Path] = []
    for left in reversed(range(arguments.repeat)):
        begun_s = time.monotonic()
        last = _fetch(arguments.output, _finished(start_together(clients, order)))
        if left:
            time.sleep(max(0.0, arguments.every - (time.monotonic() - begun_s)))
    return last


def _order(arguments: argparse.Namespace, **length: Any) -> CaptureOrder:
    from stepscope.record.agent.protocol import CaptureOrder

    return CaptureOrder(timeout_s=arguments.timeout, options=record_options(arguments), **length)


def agents_of(arguments: argparse.Namespace, targets: Sequence[str]) -> list[AgentClient]:
    """The clients of the targets' agents; each is asked once for its status.

    Raises:
        UsageError: a target names no process, run or address.
        AgentError: a process cannot be reached.
    """
    from stepscope.record.agent.client import for_each
    from stepscope.record.agent.targets import clients_for

    token = arguments.token or os.environ.get("STEPSCOPE_TOKEN") or None
    clients = [
        client
        for target in targets
        for client in clients_for(target, find_run=run_of, token=token, through_files=arguments.through_files)
    ]
    for_each(clients, lambda client: client.status())
    return sorted(clients, key=lambda client: client.rank)


def run_of(target: str) -> RunFolder | None:
    from stepscope.record.run_folder import RunFolder, is_run_folder
    from stepscope.record.runs import run_named

    return RunFolder.open(target) if is_run_folder(target) else run_named(target)


def _finished(started: Started) -> Started:
    """Wait until every capture has ended and say which failed; Ctrl-C cancels them.

    Raises:
        AgentError: none of them recorded anything.
    """
    ended = in_all(started, lambda client, state: client.wait(state.id, float("inf")))
    for client, state in ended:
        if state.problem:
            say(f"{client.name}: {state.problem}")
    done = [(client, state) for client, state in ended if state.files]
    if not done:
        raise AgentError("nothing was recorded")
    _say_steps(done)
    return done


def in_all(started: Started, ask: Callable[[AgentClient, CaptureState], CaptureState]) -> Started:
    """Ask every process at once; if one fails, or the user presses Ctrl-C, all captures are cancelled."""
    from stepscope.record.agent.client import cancel_all, for_each_pair

    with ExitStack() as unless_done:
        unless_done.callback(cancel_all, started)
        answers = for_each_pair(started, ask)
        unless_done.pop_all()
    return answers


def _say_steps(done: Started) -> None:
    """Say which steps were recorded, and whether processes recorded different ones."""
    recorded = {_described(state) for _, state in done}
    if len(recorded) == 1:
        say(f"recorded {recorded.pop()} of {', '.join(client.name for client, _ in done)}")
        return
    each = "; ".join(f"{client.name}: {_described(state)}" for client, state in done)
    say(f"the processes recorded different steps, so compare them with care: {each}")


def _described(state: CaptureState) -> str:
    """The steps of a capture, such as "steps 120 to 124"."""
    if state.first_step is None:
        return "no steps yet"
    if state.steps is None:
        return f"from step {count(state.first_step)} on"
    if state.steps <= 1:
        return f"step {count(state.first_step)}"
    return f"steps {count(state.first_step)} to {count(state.first_step + state.steps - 1)}"


def _fetch(output: Path | None, done: Started) -> list[Path]:
    traces = fetched(output, done)
    for trace in traces:
        say(f"the trace is {trace}")
    return traces


def fetched(output: Path | None, done: Started) -> list[Path]:
    places = [client.trace_in_run(state) for client, state in done]
    if output is None and all(places):
        return [place for place in places if place is not None]
    if output is not None and _is_trace_name(output):
        if len(done) > 1:
            raise UsageError(f"{len(done)} processes record as many traces: --output must be a folder, not {output}")
        return [client.fetch(state, output) for client, state in done]
    folder = Path() if output is None else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    moment = time.strftime("%Y%m%d-%H%M%S")
    names = _distinct([f"trace-{moment}-rank{client.rank}" for client, _ in done])
    return [
        client.fetch(state, _free(folder, name, _XPLANE_SUFFIX if _is_xplane(state) else ".json.gz"))
        for name, (client, state) in zip(names, done, strict=True)
    ]


def _is_trace_name(path: Path) -> bool:
    return path.name.endswith(_TRACE_SUFFIXES)


def _is_xplane(state: CaptureState) -> bool:
    """Whether XLA's profiler recorded the capture, as in a JAX program."""
    return state.files[0][0].endswith(_XPLANE_SUFFIX)


def _free(folder: Path, name: str, suffix: str) -> Path:
    """A file path that does not exist yet; a number is added if needed."""
    path, number = folder / f"{name}{suffix}", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}{suffix}"
    return path


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered if several processes that are not ranks of one job share one."""
    return [
        name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def _diagnose(arguments: argparse.Namespace, traces: Sequence[Path]) -> int:
    return 0 if arguments.no_diagnose else diagnose.COMMAND.run_with([str(trace.absolute()) for trace in traces])


def _prepare_session(parser: CommandParser) -> None:
    parser.add_argument("action", choices=list(_ACTIONS), help="what to do")
    add_targets(parser)
    _add_recording_options(parser)


def _session(arguments: argparse.Namespace) -> int:
    if not arguments.through_files:
        servers = find_targets(arguments.targets).servers
        if servers:
            raise UsageError(
                f"{servers[0]} is a profiler server, which must know in advance how long to record: "
                f"stepscope attach {servers[0]} --seconds 2"
            )
    return _ACTIONS[arguments.action](arguments, agents_of(arguments, arguments.targets))


def _start(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import start_together

    begun = _begun(start_together(clients, _order(arguments)))
    ended = [f"{client.name}: {state.problem or state.state}" for client, state in begun if state.ended]
    if ended:
        raise AgentError("; ".join(ended))
    for client, state in begun:
        since = "" if state.first_step is None else f" {_described(state)}"
        output.print_text(f"{client.name}: recording{since} ({state.id})\n")
    return 0


def _stop(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import for_each_pair

    stopped = for_each_pair(_begun(_under_way(clients)), lambda client, state: client.stop(state.id))
    return _diagnose(arguments, _fetch(arguments.output, _finished(stopped)))


def _cancel(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import for_each_pair

    for client, state in for_each_pair(_under_way(clients), lambda client, state: client.cancel(state.id)):
        output.print_text(f"{client.name}: {state.id} {state.state}\n")
    return 0


def _list(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    import polars as pl

    rows = [
        {
            "process": client.name,
            "capture": state.id,
            "state": state.state,
            "recorded": _described(state),
            "bytes": sum(size for _, size in state.files),
            "problem": state.problem,
        }
        for client, state in _captures(clients)
    ]
    if rows:
        output.print_table(pl.DataFrame(rows))
    else:
        output.print_text("Nothing has been recorded on demand yet.\n")
    return 0


def _shut_down(arguments: argparse.Namespace, clients: Sequence[AgentClient]) -> int:
    from stepscope.record.agent.client import for_each

    for_each(clients, lambda client: client.shutdown())
    for client in clients:
        output.print_text(f"{client.name}: the agent has ended, the program continues\n")
    return 0


def _begun(started: Started) -> Started:
    """Wait until the captures' first steps have begun, so that stopping leaves a trace; Ctrl-C cancels them."""
    return in_all(started, lambda client, state: client.begun(state.id))


def _captures(clients: Sequence[AgentClient]) -> Started:
    from stepscope.record.agent.client import for_each

    captures = for_each(clients, lambda client: client.captures())
    return [(client, state) for client, states in zip(clients, captures, strict=True) for state in states]


def _under_way(clients: Sequence[AgentClient]) -> Started:
    """The running capture of each process that has one.

    Raises:
        AgentError: no process has one.
    """
    found = [(client, state) for client, state in _captures(clients) if not state.ended]
    if not found:
        raise AgentError("no recording is in progress (stepscope session list shows earlier ones)")
    return found


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Sequence[AgentClient]], int]]] = {
    "start": _start,
    "stop": _stop,
    "cancel": _cancel,
    "list": _list,
    "shutdown": _shut_down,
}
ATTACH: Final = Command(
    "attach",
    "Record a few steps of a program that is running, and diagnose them.",
    _prepare_attach,
    _attach,
    """\
The program must have an agent: start it with `stepscope run --serve`, or call stepscope.start_server() in it. Several
processes record the same steps. Or it runs XLA's profiler server, as after jax.profiler.start_server(9012) or
torch_xla.debug.profiler.start_server(9012); that needs pip install 'stepscope[xla]'.

examples:
  stepscope attach my-run                                    every rank of a run
  stepscope attach 12345                                     the process with that number
  stepscope attach localhost:8790 --steps 10                 an address, such as the end of an ssh tunnel
  stepscope attach my-run --seconds 3 --stacks --output traces/
  stepscope attach my-run --through-files                    where no connection is possible, as into a container
  stepscope attach localhost:9012 --seconds 2                a profiler server of JAX, PyTorch/XLA or TensorFlow
  stepscope attach host1:9012,host2:9012                     the hosts of a pod, at the same time
  stepscope attach my-run --repeat 10 --every 30s            repeatedly while it trains
""",
)
SESSION: Final = Command(
    "session",
    "Start, stop, cancel or list recordings of a running program.",
    _prepare_session,
    _session,
    """\
A recording lasts from start to stop, so it can cover what happens between two moments. Each start makes a new one and
keeps earlier ones. Programs and TARGETs are those of `stepscope attach`.

examples:
  stepscope session start my-run                             start recording
  stepscope session stop my-run                              end, save and diagnose
  stepscope session cancel my-run                            end and discard
  stepscope session list my-run                              what has been recorded
  stepscope session shutdown my-run                          end the agents; the program continues
""",
)
