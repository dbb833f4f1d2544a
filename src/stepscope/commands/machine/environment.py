"""`stepscope environment`: what makes timings slow or noisy on this machine."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.errors import UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.machine.environment import Machine, Observation, Runtime

_LABEL: Final = 10


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--pid", metavar="PID", type=int, help="look from this running process instead of a new one")


def _run(arguments: argparse.Namespace) -> int:
    from stepscope import __version__
    from stepscope.machine.environment import inspect_environment, observations_json

    observations = inspect_environment(_machine(arguments.pid))
    if arguments.format == "json":
        from stepscope.report.json import json_bytes

        report = {"schema": 1, "stepscope": __version__, "observations": observations_json(observations)}
        output.write_output("-", json_bytes(report))
    else:
        output.print_text("\n".join(text_lines(observations, output.width())) + "\n")
    return 0


def text_lines(observations: Sequence[Observation], width: int) -> Iterator[str]:
    """The report for a terminal: what to change first, then what is fine and what is unknown."""
    by_verdict = {
        verdict: [observation for observation in observations if observation.verdict == verdict]
        for verdict in ("problem", "note", "fine", "unknown")
    }
    problems, notes = len(by_verdict["problem"]), len(by_verdict["note"])
    yield (
        f"{_things(problems)} timings slow or noisy here; {notes} more worth knowing, "
        f"{len(by_verdict['fine'])} fine, {len(by_verdict['unknown'])} unknown."
    )
    for number, observation in enumerate([*by_verdict["problem"], *by_verdict["note"]], start=1):
        yield ""
        mark = "" if observation.verdict == "problem" else " (worth knowing)"
        yield from _wrapped(f"{number}. {observation.title}{mark}", "   ", width)
        for label, text in (("read", observation.read), ("why", observation.why), ("change", observation.change)):
            if text:
                yield from _wrapped(f"   {label:<6} {text}", " " * _LABEL, width)
    for heading, verdict in (("Fine", "fine"), ("Unknown, because it cannot be read", "unknown")):
        if by_verdict[verdict]:
            yield from ("", heading)
        for observation in by_verdict[verdict]:
            read = f" ({observation.read})" if observation.read else ""
            yield from _wrapped(f"  - {observation.title}{read}", "    ", width)


def _machine(process: int | None) -> Machine:
    from stepscope.machine.environment import Machine

    if process is None:
        return Machine(runtime=_runtime())
    if not Path(f"/proc/{process}").is_dir():
        raise UsageError(f"there is no process {process} whose /proc/{process} can be read")
    return Machine.of_process(process)


def _runtime() -> Runtime:
    """The runtime settings of a new Python process with the user's PyTorch."""
    from stepscope.machine.environment import Runtime

    try:
        import torch
    except ImportError as error:
        return Runtime.of_this_process(torch_why_not=f"PyTorch cannot be imported here: {error}")
    # A program may enable anomaly mode itself, so its state in this process is no evidence.
    return replace(Runtime.of_this_process(torch=torch), anomaly_mode=None)


def _things(problems: int) -> str:
    return {0: "Nothing found makes", 1: "1 thing makes"}.get(problems, f"{problems} things make")


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        printable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


COMMAND: Final = Command(
    "environment",
    "What makes timings slow or noisy on this machine, and what to do about it.",
    _prepare_parser,
    _run,
    """\
Nothing is changed. What cannot be read is said to be unknown.

examples:
  stepscope environment                                      this machine, as a new process sees it
  stepscope environment --pid 4711                           as a running process sees it: its cores, variables, swap
  stepscope environment --format json                        for programs
""",
)
