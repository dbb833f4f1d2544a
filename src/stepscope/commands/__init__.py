"""The `stepscope` command and its commands, by what they are for.

Heavy modules are imported only when a command runs, so that help, completion and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from stepscope.commands import installation, machine
from stepscope.commands.assist import command as assist
from stepscope.commands.improve import bench, search
from stepscope.commands.plan import devices, predict, serving
from stepscope.commands.read import compare, costs, diagnose, export, tables, whatif
from stepscope.commands.record import attach, run, runs
from stepscope.commands.shared.answers import answered
from stepscope.commands.shared.options import Command, CommandParser, unknown_command, unknown_options
from stepscope.commands.shared.output import (
    cleaned_by,
    discard_standard_output,
    print_text,
    refuse_mixed_reports,
    say,
    width,
)
from stepscope.commands.shared.reading import redacted_sentence
from stepscope.commands.view import command as view
from stepscope.commands.watch import command as watch
from stepscope.errors import StepscopeError
from stepscope.threads import ENDING, handled, leave

__all__ = ["COMMANDS", "OWN_ERROR", "main", "parsers"]

OWN_ERROR: Final = 70
"""Exit code of a bug in stepscope: EX_SOFTWARE of sysexits.h."""
_ENVIRONMENT: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Operating system errors that are neither a bug in stepscope nor a mistake in the command."""

GROUPS: Final[tuple[tuple[str, tuple[Command, ...]], ...]] = (
    ("record a program", (run.COMMAND, attach.ATTACH, attach.SESSION, watch.COMMAND, runs.RUNS, runs.TELEMETRY)),
    (
        "read a trace",
        (
            diagnose.COMMAND,
            view.COMMAND,
            whatif.COMMAND,
            compare.COMPARE,
            compare.HISTORY,
            tables.STEPS,
            tables.IDLE,
            tables.OPERATORS,
            tables.INPUT,
            tables.KERNELS,
            tables.ROOFLINE,
            costs.LINES,
            costs.MODULES,
            costs.MEMORY,
            costs.ENERGY,
            export.QUERY,
            export.EXPORT,
            tables.RULES,
            tables.EXPLAIN,
        ),
    ),
    ("make it faster", (bench.COMMAND, search.TUNE, search.SWEEP, bench.BATCH_SIZE, bench.DATA_PARALLEL)),
    ("work beside your tools", (assist.MCP, assist.LSP)),
    ("plan on other hardware", (predict.PREDICT, serving.SERVING, predict.PLAN, devices.PRICES, devices.DEVICES)),
    ("this machine", (installation.DOCTOR, machine.ENVIRONMENT, machine.CACHE, installation.COMPLETION)),
)
"""Every command by what it is for, in the order of the help."""
COMMANDS: Final = tuple(command for _, commands in GROUPS for command in commands)
_FIRST: Final = (run.COMMAND, diagnose.COMMAND, compare.COMPARE, search.TUNE, predict.PREDICT)

_DESCRIPTION: Final = """\
Explains why deep-learning training and inference steps are slow: what the accelerator waits for, which line of your
code is to blame, what to change and how much time that saves. Reads the traces that profilers write; sends nothing
anywhere."""
_EXAMPLES: Final = """\
examples:
  stepscope diagnose trace.json              why are the steps slow?
  stepscope diagnose traces/                 one trace per rank: compare them
  stepscope whatif trace.json --remove input how long would a step take without waits for batches?
  stepscope compare before.json after.json   is it faster, and what made the difference?
  stepscope explain input-bound              what a finding means and what to do
  stepscope kernels trace.json --top 10      the costliest kernels
  stepscope query trace.json "select name, count(*) from operators group by name"

To record a few steps of a program, without changing it:
  stepscope run train.py --its --flags

`stepscope COMMAND --help` explains a command.
Exit codes: 0 done, 1 a finding above --fail-on, or slower than --fail-if-slower allows, 2 a mistake or a file that
cannot be used, 70 a bug in stepscope."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default the process's arguments) names, and return the exit code."""
    for name in ("stdout", "stderr"):  # None if the shell has closed them, as with >&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    with cleaned_by(partial(redacted_sentence, words) if "--redact" in words else str):
        return _ended(words)


def _ended(words: list[str]) -> int:
    """Run the command, and turn whatever it raises into a sentence and an exit code."""
    try:
        with handled(leave, *ENDING):
            code = _run(words)
        sys.stdout.flush()
        return code
    except StepscopeError as error:
        return _said(str(error), 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, such as `head`; shells expect 141
        discard_standard_output()
        return 141
    except MemoryError:
        return _said("not enough memory for this; --window or --steps reads less of a trace", 2)
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # compiled libraries also raise errors that are no Exception
        known = _damage_behind(error) or _environment_behind(error)
        return _said(known, 2) if known and not _debugs(words) else _own_error(error, words)


def _said(sentence: str, code: int) -> int:
    say(sentence)
    return code


def _own_error(error: BaseException, words: Sequence[str]) -> int:
    """Report a bug in stepscope with its own exit code; the report contains nothing from a trace."""
    if _debugs(words):
        import traceback

        traceback.print_exception(error)
        return OWN_ERROR
    from stepscope.fault_report import write_report

    kept = write_report(error, command=["stepscope", *words], doing="the command line")
    details = f"please send {kept}" if kept is not None else "its report could not be written; --debug shows the error"
    return _said(f"a bug in stepscope ({type(error).__name__}): {details}", OWN_ERROR)


def _debugs(words: Sequence[str]) -> bool:
    return "--debug" in words or os.environ.get("STEPSCOPE_DEBUG", "0") not in ("", "0")


class _ToUser(logging.Handler):
    """Prints each log message once, on one line: warnings, with --verbose also info."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        sentence = self.format(record)
        if sentence not in self._said:
            self._said.add(sentence)
            say(sentence)


@contextlib.contextmanager
def _log_to_user(*, verbose: bool) -> Iterator[None]:
    log, handler = logging.getLogger("stepscope"), _ToUser()
    before = log.level
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _environment_behind(error: BaseException) -> str | None:
    """The operating system's error in one sentence; None if the error is of another kind."""
    if not isinstance(error, OSError) or error.errno not in _ENVIRONMENT:
        return None
    return f"{error.filename or 'standard output'} cannot be used: {error.strerror}"


def _damage_behind(error: BaseException) -> str | None:
    """The damaged store that caused the error, in one sentence; checked only if stores were opened."""
    store = sys.modules.get("stepscope.trace.model")
    found = store.damage_behind(error) if store is not None else None
    return None if found is None else str(found)


def _run(argv: list[str]) -> int:
    only_reads = {command.name for command in COMMANDS if command.only_reads}
    if argv and argv[0] in only_reads and not _debugs(argv):
        return answered(argv, lambda: _parsed_and_run(argv))
    return _parsed_and_run(argv)


def _parsed_and_run(argv: list[str]) -> int:
    if not argv:
        print_text(_first_words())
        return 0
    parser, commands = parsers(argv[0])
    if not argv[0].startswith("-") and argv[0] not in commands:
        raise unknown_command(argv[0], list(commands))
    command = commands.get(argv[0], parser)
    own, program = command.split_program(argv[1:])
    try:
        arguments, rest = parser.parse_known_args([argv[0], *own])
    except SystemExit as exit:  # --help and --version exit this way
        return int(exit.code or 0)
    if command.program:
        setattr(arguments, command.program, program)
    rest = command.take_late(arguments, rest)
    if rest or "run" not in arguments:
        raise unknown_options(rest, command)
    with _log_to_user(verbose=getattr(arguments, "verbose", False)):
        refuse_mixed_reports(arguments)
        return int(arguments.run(arguments))


def _first_words() -> str:
    lines = [f"  {each.name:<10} {each.help}" for each in _FIRST]
    wrapped = [line for text in lines for line in textwrap.wrap(text, width(), subsequent_indent=" " * 13)]
    return (
        "\n".join(textwrap.wrap(" ".join(_DESCRIPTION.split()), width()))
        + "\n\n"
        + "\n".join(wrapped)
        + f"""

  stepscope run train.py --its --flags       record a few steps of a program, and say why they are slow
  stepscope diagnose trace.json              the same of a trace that a profiler wrote

stepscope --help lists all {len(COMMANDS)} commands, stepscope doctor says whether everything works here.
"""
    )


def _all_commands() -> str:
    """The list of commands by group, for the help."""
    lines = []
    for title, commands in GROUPS:
        lines += ["", f"{title}:"]
        for command in commands:
            lines += textwrap.wrap(f"  {command.name:<13} {command.help}", width(), subsequent_indent=" " * 16)
    return "\n".join(lines)


def parsers(wanted: str = "") -> tuple[CommandParser, dict[str, CommandParser]]:
    """The main parser, and the commands' parsers by name: only the wanted one, if there is such a command."""
    from stepscope import __version__

    chosen = [each for each in COMMANDS if each.name == wanted]
    description = _DESCRIPTION if chosen else f"{_DESCRIPTION}\n{_all_commands()}"
    parser = CommandParser(prog="stepscope", usage="stepscope COMMAND ...", description=description, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"stepscope {__version__}")
    choices = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="stepscope")
    commands = {}
    for command in chosen or COMMANDS:
        added = choices.add_parser(command.name, help=command.help, description=command.help, epilog=command.examples)
        command.prepare_parser(added)
        added.add_argument("--debug", action="store_true", help="show the traceback of a bug in stepscope")
        added.set_defaults(run=command.run)
        commands[command.name] = added
    return parser, commands
