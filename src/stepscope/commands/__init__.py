"""The `stepscope` command: one module a command, each with NAME, HELP, `prepare_parser(parser)` and `run(arguments)`.

Nothing heavy is imported before `run`: help, completion and mistakes answer at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Final, NoReturn

from stepscope.commands import (
    attach,
    batch_size,
    bench,
    cache,
    compare,
    data_parallel,
    devices,
    diagnose,
    energy,
    environment,
    explain,
    export,
    history,
    idle,
    input,
    kernels,
    lines,
    memory,
    modules,
    operators,
    plan,
    predict,
    prices,
    query,
    roofline,
    rules,
    run,
    runs,
    session,
    steps,
    sweep,
    telemetry,
    tune,
    whatif,
)
from stepscope.commands._output import discard_standard_output
from stepscope.commands._parser import CommandParser, unknown_command, unknown_options
from stepscope.errors import StepscopeError
from stepscope.report.format import printable

__all__ = ["COMMANDS", "main"]

COMMANDS: Final[tuple[ModuleType, ...]] = (
    run,
    bench,
    tune,
    sweep,
    diagnose,
    whatif,
    predict,
    compare,
    plan,
    prices,
    runs,
    history,
    attach,
    session,
    steps,
    idle,
    operators,
    input,
    kernels,
    roofline,
    lines,
    modules,
    memory,
    batch_size,
    data_parallel,
    query,
    export,
    telemetry,
    energy,
    environment,
    devices,
    rules,
    explain,
    cache,
)
"""Every command, in the order the help lists them."""

_DESCRIPTION: Final = """\
Explains why deep-learning training and inference steps are slow: what the accelerator waits for, which line of your
code is to blame, what to change and how much time that saves. Reads the traces that profilers write; sends nothing
anywhere."""
_EXAMPLES: Final = """\
examples:
  stepscope diagnose trace.json              why are the steps slow?
  stepscope diagnose traces/                 one trace a rank: compare them
  stepscope whatif trace.json --remove input how long would a step take if no batch were waited for?
  stepscope compare before.json after.json   is it faster, and what made the difference?
  stepscope explain input-bound              what a finding means and what to do
  stepscope kernels trace.json --top 10      the costliest kernels
  stepscope query trace.json "select name, count(*) from operators group by name"

To record a few steps of a program, without changing it:
  stepscope run train.py --its --flags

`stepscope COMMAND --help` explains a command.
Exit codes: 0 done, 1 a finding above --fail-on, or slower than --fail-if-slower allows, 2 a mistake or a file that
cannot be used, 70 an error of stepscope's own, 128+n ended by signal n."""

FAULT: Final = 70
"""EX_SOFTWARE of sysexits.h; 1 would tell CI of a finding."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default the process's arguments) asks for; returns the exit code."""
    for name in ("stdout", "stderr"):  # None where the shell has closed them, as with >&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except StepscopeError as error:
        _show_traceback(words)
        print(f"stepscope: {printable(str(error))}", file=sys.stderr)
        return 2
    except MemoryError:
        _show_traceback(words)
        print("stepscope: memory ran out; --window or --steps reads a part of a trace", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; 141 is what a shell expects then
        discard_standard_output()
        return 141
    except Exception as error:
        from stepscope.fault_report import write_report

        _show_traceback(words)
        kept = write_report(error, command=["stepscope", *words], doing=words[0] if words else "help")
        where = "no report of it could be written" if kept is None else f"please send us {printable(str(kept))}"
        print(f"stepscope: an error of its own ({type(error).__name__}), exit code {FAULT}; {where}", file=sys.stderr)
        return FAULT


def _show_traceback(words: Sequence[str]) -> None:
    """Print the traceback of the error at hand where the user asked for it."""
    if os.environ.get("STEPSCOPE_DEBUG", "0") not in ("", "0") or "--debug" in _own_words(words):
        traceback.print_exc()


def _own_words(words: Sequence[str]) -> Sequence[str]:
    """The words of a command line that are not those of a program to run."""
    command = _parsers()[1].get(words[0]) if words else None
    return words if command is None else command.split_program(list(words[1:]))[0]


@contextlib.contextmanager
def _cleaned_up_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process as an exception does, so that nothing temporary is left behind."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # others, as under nohup, stay
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _run(argv: list[str]) -> int:
    parser, commands = _parsers()
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in commands:
        raise unknown_command(argv[0], list(commands))
    command = commands.get(argv[0], parser)
    own, program = command.split_program(argv[1:])
    try:
        arguments, rest = parser.parse_known_args([argv[0], *own])
    except SystemExit as exit:  # --help and --version end this way
        return int(exit.code or 0)
    if command.program:
        setattr(arguments, command.program, program)
    rest = command.take_late(arguments, rest)
    if rest or "run" not in arguments:
        raise unknown_options(rest, command)
    if getattr(arguments, "verbose", False):
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="stepscope: %(message)s")
    if command.program:  # the program's own end, and what waits for it, decide
        return int(arguments.run(arguments))
    with _cleaned_up_on_signals():
        return int(arguments.run(arguments))


def _parsers() -> tuple[CommandParser, dict[str, CommandParser]]:
    """The parser of everything, and those of the commands by name."""
    from stepscope import __version__

    parser = CommandParser(prog="stepscope", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"stepscope {__version__}")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands = {}
    for module in COMMANDS:
        command = choices.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        module.prepare_parser(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run)
        commands[module.NAME] = command
    return parser, commands
