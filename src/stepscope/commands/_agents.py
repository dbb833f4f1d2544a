"""What `attach` and `session` share: the processes that are meant, what is recorded, and what becomes of it."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.capture.options import RecordOptions
from stepscope.commands import diagnose
from stepscope.commands._parser import CommandParser
from stepscope.errors import AgentError, UsageError
from stepscope.report.format import count, printable

if TYPE_CHECKING:
    from stepscope.capture.client import AgentClient, CaptureState
    from stepscope.capture.client_group import Started
    from stepscope.capture.run_folder import RunFolder

_XPLANE_SUFFIX: Final = ".xplane.pb"
_TRACE_SUFFIXES: Final = (".json", ".json.gz", _XPLANE_SUFFIX)
_SECONDS: Final = re.compile(r"([0-9.eE+-]+?)(ms|s|m|)", re.ASCII)
_UNITS_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
_OPTION_HELP: Final = {
    "shapes": "input shapes and types of operators",
    "stacks": "every Python frame; slows the program down while it is recorded",
    "memory": "allocations",
    "lines": "the line of your code for each operator, forward and backward; cheaper than stacks",
    "flops": "floating-point operations of operators",
    "modules": "the hierarchy of modules",
}


def add_reaching_options(parser: argparse.ArgumentParser) -> None:
    """--through-files and --token: how the processes are reached."""
    group = parser.add_argument_group("reaching the processes")
    group.add_argument("--through-files", action="store_true", help="through files in the run folder, not a connection")
    group.add_argument("--token", metavar="TOKEN", help="the agent's, where its file cannot be read here")


def add_recording_options(parser: argparse.ArgumentParser) -> None:
    """--shapes, --no-shapes and so on, and --timeout: what is recorded, and how long it may take to begin."""
    add_record_flags(parser.add_argument_group("what is recorded besides times"))
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=60.0,
        help="give up when no step has ended for so long (default: 60)",
    )


def add_record_flags(group: argparse._ArgumentGroup) -> None:
    """--shapes, --no-shapes and so on, one pair for each field of `RecordOptions`."""
    for option in fields(RecordOptions):
        group.add_argument(
            f"--{option.name}",
            action=argparse.BooleanOptionalAction,
            default=option.default,
            help=f"{_OPTION_HELP[option.name]} (default: {'yes' if option.default else 'no'})",
        )


def add_keeping_options(parser: argparse.ArgumentParser) -> None:
    """--output and --no-diagnose: what becomes of the traces."""
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        help="a trace file, or a folder for the traces of several processes (default: the run's folder, else this one)",
    )
    parser.add_argument("--no-diagnose", action="store_true", help="only fetch the traces")


def record_options(arguments: argparse.Namespace) -> RecordOptions:
    """What was chosen to be recorded."""
    return RecordOptions(**{option.name: getattr(arguments, option.name) for option in fields(RecordOptions)})


def positive_seconds(text: str) -> float:
    """A number of seconds, at most a day; it may have a unit, as in 500ms, 30s or 2m."""
    parts = _SECONDS.fullmatch(text)
    try:
        value = float(parts[1]) * _UNITS_S[parts[2]] if parts else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, at most 86400")
    return value


def step_count(text: str) -> int:
    """A number of steps from the command line."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps from 1 to 1000000")
    return int(text)


def agents(arguments: argparse.Namespace, targets: Sequence[str]) -> list[AgentClient]:
    """The agents of the processes that are meant; each is asked once whether it is there.

    Raises:
        UsageError: a target means nothing.
        AgentError: a process cannot be reached.
    """
    from stepscope.capture.client_group import for_each
    from stepscope.capture.client_targets import clients_for

    token = arguments.token or os.environ.get("STEPSCOPE_TOKEN") or None
    clients = [
        client
        for target in targets
        for client in clients_for(target, find_run=_run_at, token=token, through_files=arguments.through_files)
    ]
    for_each(clients, lambda client: client.status())
    return sorted(clients, key=lambda client: client.rank)


def finished(started: Started) -> list[tuple[AgentClient, CaptureState]]:
    """Wait until every capture has ended; Ctrl-C cancels them. Those that failed are told of on stderr.

    Raises:
        AgentError: none of them recorded anything.
    """
    from stepscope.capture.client_group import cancel_all, for_each_pair

    try:
        ended = for_each_pair(started, lambda client, state: client.wait(state.id, float("inf")))
    except BaseException:
        cancel_all(started)
        raise
    for client, state in ended:
        if state.problem:
            say(f"{client.name}: {state.problem}")
    done = [(client, state) for client, state in ended if state.files]
    if not done:
        raise AgentError("nothing was recorded")
    _compare_steps(done)
    return done


def keep(arguments: argparse.Namespace, done: Sequence[tuple[AgentClient, CaptureState]]) -> int:
    """Fetch the traces, say where they are, and diagnose them unless that is not wanted; returns the exit code."""
    return diagnose_files(arguments, fetch(arguments.output, done))


def fetch(output: Path | None, done: Sequence[tuple[AgentClient, CaptureState]]) -> list[Path]:
    """Fetch the traces and say where they are."""
    traces = _fetched(output, done)
    for trace in traces:
        say(f"the trace is {trace}")
    return traces


def diagnose_files(arguments: argparse.Namespace, traces: Sequence[Path]) -> int:
    """Diagnose the traces unless that is not wanted; returns the exit code."""
    if arguments.no_diagnose:
        return 0
    parser = CommandParser(prog="stepscope diagnose")
    diagnose.prepare_parser(parser)
    return diagnose.run(parser.parse_args([str(trace.absolute()) for trace in traces]))


def describe(state: CaptureState) -> str:
    """The steps of a capture in words, such as "steps 120 to 124"."""
    if state.first_step is None:
        return "no steps yet"
    if state.steps is None:
        return f"from step {count(state.first_step)} on"
    if state.steps <= 1:
        return f"step {count(state.first_step)}"
    return f"steps {count(state.first_step)} to {count(state.first_step + state.steps - 1)}"


def say(sentence: str) -> None:
    """Tell what happens, on stderr: standard output is the report's."""
    print(f"stepscope: {printable(sentence)}", file=sys.stderr)


def _compare_steps(done: Sequence[tuple[AgentClient, CaptureState]]) -> None:
    """Say what was recorded, and where processes recorded other steps than the rest."""
    recorded = {describe(state) for _, state in done}
    if len(recorded) == 1:
        say(f"recorded {recorded.pop()} of {', '.join(client.name for client, _ in done)}")
        return
    each = "; ".join(f"{client.name}: {describe(state)}" for client, state in done)
    say(f"the processes recorded different steps, so compare them with care: {each}")


def _fetched(output: Path | None, done: Sequence[tuple[AgentClient, CaptureState]]) -> list[Path]:
    places = [client.trace_in_run(state) for client, state in done]
    if output is None and all(places):
        return [place for place in places if place is not None]
    if output is not None and is_trace_name(output):
        if len(done) > 1:
            raise UsageError(f"{len(done)} processes give as many traces: --output has to be a folder, not {output}")
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


def is_trace_name(path: Path) -> bool:
    """Whether a path names a trace file rather than a folder."""
    return path.name.endswith(_TRACE_SUFFIXES)


def _is_xplane(state: CaptureState) -> bool:
    """Whether XLA's profiler recorded it, as in a program of JAX."""
    return state.files[0][0].endswith(_XPLANE_SUFFIX)


def _free(folder: Path, name: str, suffix: str) -> Path:
    """A file of that name, or with a number behind it where one is there."""
    path, number = folder / f"{name}{suffix}", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}{suffix}"
    return path


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where processes that are no ranks of one job share theirs."""
    return [
        name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def _run_at(target: str) -> RunFolder | None:
    """The run of a name or a path, or None."""
    from stepscope.capture.run_folder import RunFolder, is_run_folder
    from stepscope.capture.runs import run_named

    return RunFolder.open(target) if is_run_folder(target) else run_named(target)
