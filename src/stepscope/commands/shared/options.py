"""Commands, the options that several of them share, and the values of options: numbers, units, lists, remedies."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NoReturn

from stepscope.commands.shared.output import say
from stepscope.errors import UsageError
from stepscope.record.schedule import RecordOptions
from stepscope.report.format import share

if TYPE_CHECKING:
    from stepscope.compare import SampleComparison
    from stepscope.trace.naming import UserCode


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `stepscope`.

    Attributes:
        name: the word typed on the command line.
        help: one sentence for the list of commands.
        prepare_parser: adds the command's arguments to its parser.
        run: runs the command and returns the exit code; imports heavy modules itself.
        examples: the end of the command's help: remarks, examples and any exit codes of its own.
        only_reads: whether it answers the same as long as the files that it reads stay the same.
    """

    name: str
    help: str
    prepare_parser: Callable[[CommandParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: str = ""
    only_reads: bool = False

    def run_with(self, words: Sequence[str]) -> int:
        """Run the command as if typed with these words, and return the exit code."""
        return self.run(self.parsed(words))

    def parsed(self, words: Sequence[str]) -> argparse.Namespace:
        """The command's arguments as if typed with these words."""
        parser = CommandParser(prog=f"stepscope {self.name}")
        self.prepare_parser(parser)
        return parser.parse_args(words)


class CommandParser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing and exiting; options are never abbreviated.

    Attributes:
        late: the last, optional positional argument, which argparse does not find after options.
        program: the argument that takes another program's command line, hidden from argparse; it begins with the first
            word that is not an option, or with -m.
        of_program: an option whose value may be an option of that program, such as --knob --fused, which argparse would
            not accept as a value.
    """

    late: str = ""
    program: str = ""
    of_program: str = ""

    def __init__(self, **settings: Any) -> None:
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's complaint as a `UsageError`."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        guess = suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        raise UsageError(f"{message}{guess} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, after joining `of_program` and its value into one word."""
        if args is not None and self.of_program:
            args = self._joined(list(args))
        return super().parse_known_args(args, namespace)

    def _joined(self, words: list[str]) -> list[str]:
        found = []
        following = iter(words)
        for word in following:
            value = next(following, None) if word == self.of_program else None
            found.append(word if value is None else f"{word}={value}")
        return found

    def options(self) -> list[str]:
        """Every option this parser knows, such as "--top"."""
        return list(self._option_string_actions)

    def split_program(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Split the words into this parser's options and the program's command line after them."""
        position = 0
        while self.program and position < len(words):
            word = words[position]
            if word == "--":
                return words[:position], words[position + 1 :]
            if not word.startswith("-") or word == "-m":
                return words[:position], words[position:]
            action = self._option_string_actions.get(word)
            position += 2 if action is not None and action.nargs is None else 1
        return words, []

    def take_late(self, arguments: argparse.Namespace, rest: list[str]) -> list[str]:
        """Assign the first leftover word to the `late` argument, and return the remaining words."""
        if self.late and getattr(arguments, self.late) is None and rest and not rest[0].startswith("-"):
            setattr(arguments, self.late, rest[0])
            return rest[1:]
        return rest


def suggestion(word: str, known: Iterable[str]) -> str:
    """A question such as "; did you mean --top?", or "" if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_command(word: str, known: Sequence[str]) -> UsageError:
    """The error for an unknown command: most often a typo, or a trace without a command."""
    if os.path.exists(word):
        return UsageError(f"{word!r} is not a command; to explain a trace: stepscope diagnose {word}")
    guess = suggestion(word, known) or f"; the commands are {', '.join(known)}"
    return UsageError(f"{word!r} is not a command{guess}")


def unknown_options(rest: Sequence[str], parser: CommandParser) -> UsageError:
    """The error for arguments that no parser took."""
    word = next((word for word in rest if word.startswith("-")), None)
    if word is None:
        return UsageError(f"{rest[0]!r} is one argument too many (see {parser.prog} --help)")
    option = word.split("=", 1)[0]
    known = [each for each in parser.options() if each != "--help"]
    return UsageError(f"there is no option {option}{suggestion(option, known)} (see {parser.prog} --help)")


SHARES: Final = {"%": 0.01, "": 1.0}
SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}
_BUDGETS: Final = {unit: seconds for unit, seconds in SECONDS.items() if unit != "ms"}
HOURS: Final = {"s": 1 / 3600, "min": 1 / 60, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}
NANOSECONDS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "": 1}
BYTES: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LARGEST_WHOLE: Final = 999_999_999
_NO_UNIT: Final = {"": 1.0}
_NUMBER: Final = re.compile(
    r"\s*(?P<number>(?:\d{1,3}(?:,\d{3})+|\d{1,16})(?:\.\d{0,12})?(?P<exponent>[eE][+-]?\d{1,2})?|\.\d{1,12})"
    r"\s*(?P<unit>[A-Za-z]*|%)\s*",
    re.ASCII,
)


def number(
    problem: str,
    units: Mapping[str, float] = _NO_UNIT,
    *,
    least: float = 0.0,
    most: float = math.inf,
    above: float = -1.0,
    exponents: bool | None = None,
) -> Callable[[str], float]:
    """Make a parser of numbers such as 30, 1.5, 4e6, 1,200, 10% or 2GiB.

    Args:
        problem: completes the error about a text, such as "is not a share: write 10% or 0.1".
        units: factor of each unit; "" for no unit.
        least, most: the range, both included.
        above: exclusive lower bound.
        exponents: whether 1e-3 is a number; None allows it only if no unit can follow.
    """
    takes_exponents = units is _NO_UNIT if exponents is None else exponents

    def read(text: str) -> float:
        match = _NUMBER.fullmatch(text)
        scale = units.get(match["unit"]) if match else None
        if match is not None and scale is not None and (takes_exponents or not match["exponent"]):
            value = float(match["number"].replace(",", "")) * scale
            if least <= value <= most and value > above:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} {problem}")

    return read


def whole(least: int, most: int | None = None, what: str = "whole number") -> Callable[[str], int]:
    """Make a parser of whole numbers in a range."""
    limits = f"from {least} on" if most is None else f"from {least} to {most}"
    largest = _LARGEST_WHOLE if most is None else most

    def read(text: str) -> int:
        text = text.strip()
        if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= largest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what} {limits}")
        return int(text)

    return read


def whole_list(what: str, *, most: int, longest: int) -> Callable[[str], tuple[int, ...]]:
    """Make a parser of whole numbers from 1 to `most`, at most `longest` of them, separated by commas."""

    def read(text: str) -> tuple[int, ...]:
        words = [word.strip() for word in text.split(",")]
        if len(words) > longest or not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", word) for word in words):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}: write whole numbers, such as 8,16,32")
        if max(map(int, words)) > most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}: the largest may be {most}")
        return tuple(map(int, words))

    return read


def row_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of rows")
    return int(text)


def column_names(text: str) -> tuple[str, ...]:
    """Parse column names separated by commas, without duplicates."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError("name at least one column")
    return names


def file_to_write(text: str) -> str:
    """Parse an output path; an empty one is refused, since it is most often a variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the output file is empty")
    return text


share_of_step: Final = number("is not a share of a step: write 10% or 0.1", SHARES, most=1)
relative_share: Final = number("is not a share: write 3% or 0.03", SHARES, above=0, most=9.999)
budget_seconds: Final = number("is not a time: write 90s, 10m or 1h", _BUDGETS, above=0)


TRIAL_STEPS: Final = 50
TRACE: Final = "a trace file, a run's name, or - for standard input"
RANKS: Final = "a trace file, a folder of ranks, a run's name, or - for standard input"
_RECORDED: Final = {
    "shapes": "input shapes and types of operators",
    "stacks": "every Python frame; slows the program down while it is recorded",
    "memory": "allocations",
    "lines": "the line of your code for each operator, forward and backward; cheaper than stacks",
    "flops": "floating-point operations of operators",
    "modules": "the hierarchy of modules",
}


def parsed_size(text: str) -> int:
    """Parse a size such as "2GiB", "500 MB" or "0" into bytes.

    Raises:
        UsageError: the text is not a size.
    """
    from stepscope.remedies.compile_caches import bytes_of

    found = bytes_of(text)
    if found is None:
        raise UsageError(f"{text!r} is not a size: write a number with MB, GB, MiB or GiB, such as 2GiB")
    return found


_MEMORY: Final = number("is not an amount of memory: write 24GiB, 16GB or a number of bytes", BYTES, least=1)
_SHARE_OF_MEMORY: Final = number("is not a share of the memory: write 10% or 0.1", SHARES, most=0.999_999)
_EVIDENCE: Final = {
    "--xla-metrics": "a metrics report of PyTorch/XLA, also inside other output",
    "--xla-debug-log": "what PyTorch/XLA printed under PT_XLA_DEBUG_LEVEL",
    "--gaudi-metrics": "Intel Gaudi's PT_HPU_METRICS_FILE; one named ...-rank3.json is rank 3's",
    "--compile-log": "torch.compile's log or the folder TORCH_TRACE; in a run of stepscope run it is found by itself",
    "--fallback-log": "Intel Gaudi's log of operators on the CPU (LOG_LEVEL_PT_FALLBACK=1)",
}


def add_trace(parser: argparse.ArgumentParser, help: str = TRACE) -> None:
    """Add TRACE, the one trace that the command reads: the latest run's by default."""
    parser.add_argument("trace", metavar="TRACE", nargs="?", default="latest", help=f"{help} (default: the latest run)")


def add_reading_options(parser: argparse.ArgumentParser, *, or_device: bool = False) -> None:
    """Add --window, --steps, --capture-trace, --no-cache, --limit, --verbose and --quiet.

    Args:
        or_device: say that --window takes "device", too.
    """
    group = parser.add_argument_group("reading")
    part = group.add_mutually_exclusive_group()
    device = (
        "; device: all of it, with shares of each device's time from its first to its last work" if or_device else ""
    )
    part.add_argument(
        "--window", metavar="START:END", help=f"only this stretch of the trace, such as 2s:4s or 150ms:{device}"
    )
    part.add_argument("--steps", metavar="FIRST:LAST", help="only these steps, by their numbers, such as 3:5")
    group.add_argument(
        "--capture-trace",
        metavar="FILE",
        help="recording of the capture of the trace's graphs, whose operators, modules and lines their kernels get",
    )
    group.add_argument("--no-cache", action="store_true", help="read the file anew and do not cache it")
    group.add_argument(
        "--limit",
        metavar="NAME=NUMBER",
        action=_Limit,
        help="allow a file more than a trace should need: bytes, ratio, rows, values, strings, names, lines, "
        "depth, idle, memory",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="show more: what the cache does, every rank")
    group.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add --device, whose peaks count for devices that the trace does not name."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        dest="device_name",
        help="the device, where the trace names none (stepscope devices lists them)",
    )


class _Limit(argparse.Action):
    """Stores a limit in an environment variable, where readers see it even in the child processes of a search."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from stepscope.readers.source import VARIABLE, parse_limits

        parse_limits(str(values))
        os.environ[VARIABLE] = ",".join(filter(None, [os.environ.get(VARIABLE), str(values)]))


def add_evidence_options(parser: argparse.ArgumentParser) -> None:
    """Add --xla-metrics, --xla-debug-log, --gaudi-metrics, --compile-log and --fallback-log, each repeatable."""
    group = parser.add_argument_group("other files of the run, whose counts are added to the findings")
    for option, what in _EVIDENCE.items():
        group.add_argument(option, metavar="FILE", action="append", default=[], help=what)


def add_user_code_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("your code is everything outside libraries; patterns are folders, files or globs")
    for option, what in (
        ("--user-code", "these count as yours too, such as megatron or '*/site-packages/mine/*'; may be repeated"),
        ("--not-user-code", "these do not, such as src/utils: their cost goes to the calling line; may be repeated"),
    ):
        group.add_argument(option, metavar="PATTERN", type=_pattern, action="append", default=[], help=what)


def user_code_from(arguments: argparse.Namespace) -> UserCode:
    """Which files are the user's, by the options and the environment."""
    from stepscope.trace.naming import UserCode

    always = UserCode.from_environment(os.environ)
    return UserCode((*always.also, *arguments.user_code), (*always.not_those, *arguments.not_user_code))


def _pattern(text: str) -> str:
    if not text.strip("/ "):
        raise argparse.ArgumentTypeError("the pattern of files is empty")
    return text


def add_report_options(group: argparse._ActionsContainer, **reports: str) -> None:
    """Add an option such as --json FILE for each report with a help text; `write_reports` writes them."""
    for form, what in reports.items():
        group.add_argument(f"--{form}", metavar="FILE", type=file_to_write, help=what)


def add_top_option(group: argparse._ActionsContainer, help: str, default: int | None = None) -> None:
    group.add_argument("--top", metavar="N", type=row_count, default=default, help=help)


def add_redact_option(group: argparse._ActionsContainer) -> None:
    group.add_argument("--redact", action="store_true", help="remove paths, host, user and process names")


def add_raw_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--raw",
        action="store_true",
        help="CSV: write text unchanged; by default text that a spreadsheet would read as a formula gets an apostrophe",
    )


def add_output_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--output", metavar="FILE", type=file_to_write, default="-", help="write to a file instead of the terminal"
    )


def add_trial_options(group: argparse._ActionsContainer, *, precision: str, budget: str, budget_s: float) -> None:
    """Add --steps, --precision, --budget and --quiet-machine, for commands that time a program repeatedly.

    Args:
        precision, budget: the help of these options.
        budget_s: default of --budget.
    """
    group.add_argument(
        "--steps",
        metavar="N",
        type=whole(3),
        default=TRIAL_STEPS,
        help="steps to time per run, including its warm-up (50)",
    )
    group.add_argument("--precision", metavar="SHARE", type=relative_share, default=0.01, help=precision)
    group.add_argument("--budget", metavar="TIME", type=budget_seconds, default=budget_s, help=budget)
    group.add_argument(
        "--quiet-machine", action="store_true", help="keep each rank to its own cores, and collect no garbage"
    )


def add_slower_option(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--fail-if-slower",
        metavar="SHARE",
        type=share_of_step,
        help="exit 1 where steps are shown to be slower than the first, by at least this much, such as 3%%",
    )


def exit_code_if_slower(limit: float | None, comparisons: Iterable[tuple[str, SampleComparison]]) -> int:
    """Return the exit code under --fail-if-slower, and say on standard error what broke the limit.

    Args:
        limit: share of the first one's step; None if the option was not given.
        comparisons: (name, comparison with the first).
    """
    if limit is None:
        return 0
    slower = [(name, found) for name, found in comparisons if found.is_slower_by(limit)]
    for name, found in slower:
        say(f"{name} is slower by {share(found.change or 0.0)}, --fail-if-slower {share(limit)}")
    return 1 if slower else 0


def add_memory_limit_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=_MEMORY,
        help="available memory, such as 24GiB (default: the device's)",
    )


def add_batch_model_options(parser: argparse._ActionsContainer) -> None:
    add_memory_limit_option(parser)
    parser.add_argument(
        "--keep-free",
        metavar="SHARE",
        type=_SHARE_OF_MEMORY,
        default=0.1,
        help="share of the memory that the largest batch leaves free (default: 10%%)",
    )


def add_record_flags(group: argparse._ActionsContainer, without: Sequence[str] = ()) -> None:
    """Add a pair such as --shapes and --no-shapes for each field of `RecordOptions`; `without` are off by default."""
    for option in fields(RecordOptions):
        is_on = bool(option.default) and option.name not in without
        help = f"{_RECORDED[option.name]} (default: {'yes' if is_on else 'no'})"
        add_switch(group, f"--{option.name}", help, default=is_on)


def add_switch(parser: argparse._ActionsContainer, name: str, help: str, *, default: bool) -> None:
    """Add --NAME and --no-NAME; Python 3.10 would add the default to the help once more."""
    parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default).help = help


def record_options(arguments: argparse.Namespace) -> RecordOptions:
    return RecordOptions(**{option.name: getattr(arguments, option.name) for option in fields(RecordOptions)})


INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""


def applications(lists: Sequence[str] | None) -> tuple[str, ...]:
    """The remedies of all `--apply` options together.

    Raises:
        UsageError: an option is invalid, or a remedy needs something that this machine lacks.
    """
    if lists is None:
        return ()
    from stepscope.record.apply import environment_of, parse_applications

    words = parse_applications(",".join(lists))
    environment_of(words, os.environ)  # report what is missing before anything starts
    return words


def allocator_variables(name: str | None, command: Sequence[str]) -> dict[str, str]:
    """Environment variables that start the command with that allocator; empty without a name.

    Warns on standard error if the command itself will not load it; its child processes may load it all the same.

    Raises:
        UsageError: the allocator is not installed, or cannot be loaded.
    """
    from stepscope.remedies.allocators import allocator_environment, loading_problem, preload_obstacle

    if name is None:
        return {}
    try:
        variables = allocator_environment(name, os.environ)
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    problem = loading_problem(name, variables)
    if problem is not None:
        raise UsageError(problem)
    obstacle = preload_obstacle(shutil.which(command[0]) or command[0])
    if obstacle is not None:
        say(obstacle)
    return variables
