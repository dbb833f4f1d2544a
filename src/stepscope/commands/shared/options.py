"""Options that several commands share, each declared once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared.output import say
from stepscope.commands.shared.values import (
    BYTES,
    SHARES,
    budget_seconds,
    file_to_write,
    number,
    relative_share,
    row_count,
    share_of_step,
    whole,
)
from stepscope.record.schedule import RecordOptions
from stepscope.report.format import share

if TYPE_CHECKING:
    from stepscope.compare import SampleComparison
    from stepscope.trace.naming import UserCode

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
_MEMORY: Final = number("is no amount of memory: write 24GiB, 16GB or a number of bytes", BYTES, least=1)
_SHARE_OF_MEMORY: Final = number("is no share of the memory: write 10% or 0.1", SHARES, most=0.999_999)
_EVIDENCE: Final = {
    "--xla-metrics": "a metrics report of PyTorch/XLA, also inside other output",
    "--xla-debug-log": "what PyTorch/XLA printed under PT_XLA_DEBUG_LEVEL",
    "--gaudi-metrics": "Intel Gaudi's PT_HPU_METRICS_FILE; one named ...-rank3.json is rank 3's",
    "--fallback-log": "Intel Gaudi's log of operators on the CPU (LOG_LEVEL_PT_FALLBACK=1)",
}


def add_trace(parser: argparse.ArgumentParser, help: str = TRACE) -> None:
    """Add TRACE, the one trace that the command reads."""
    parser.add_argument("trace", metavar="TRACE", help=help)


def add_reading_options(parser: argparse.ArgumentParser, *, or_device: bool = False) -> None:
    """Add --window, --steps, --no-cache, --limit and --verbose.

    Args:
        or_device: say that --window takes "device", too.
    """
    group = parser.add_argument_group("reading")
    part = group.add_mutually_exclusive_group()
    device = (
        "; device: all of it, but shares of each device's time from its first to its last work" if or_device else ""
    )
    part.add_argument(
        "--window", metavar="START:END", help=f"only this stretch of the trace, such as 2s:4s or 150ms:{device}"
    )
    part.add_argument("--steps", metavar="FIRST:LAST", help="only these steps, by the numbers they carry, such as 3:5")
    group.add_argument("--no-cache", action="store_true", help="read the file anew and keep nothing of it")
    group.add_argument(
        "--limit",
        metavar="NAME=NUMBER",
        action=_Limit,
        help="allow a file more than a trace should need: bytes, ratio, rows, values, strings, depth, idle, memory",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="say more: what the cache does, every rank")


class _Limit(argparse.Action):
    """Stores a limit in an environment variable, where readers see it even in the child processes of a search."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from stepscope.readers.budget import VARIABLE, parse_limits

        parse_limits(str(values))
        os.environ[VARIABLE] = ",".join(filter(None, [os.environ.get(VARIABLE), str(values)]))


def add_evidence_options(parser: argparse.ArgumentParser) -> None:
    """Add --xla-metrics, --xla-debug-log, --gaudi-metrics and --fallback-log, each repeatable."""
    group = parser.add_argument_group("other files of the run, whose counts join the findings")
    for option, what in _EVIDENCE.items():
        group.add_argument(option, metavar="FILE", action="append", default=[], help=what)


def add_user_code_options(parser: argparse.ArgumentParser) -> None:
    """Add --user-code and --not-user-code."""
    group = parser.add_argument_group("your code is what belongs to no library; patterns are folders, files or globs")
    for option, what in (
        ("--user-code", "also these, such as megatron or '*/site-packages/mine/*'; may be repeated"),
        ("--not-user-code", "not these, such as src/utils: their cost goes to the line that called; may be repeated"),
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
    """Add --top, the number of rows shown."""
    group.add_argument("--top", metavar="N", type=row_count, default=default, help=help)


def add_redact_option(group: argparse._ActionsContainer) -> None:
    """Add --redact."""
    group.add_argument("--redact", action="store_true", help="take out paths, host, user and process names")


def add_raw_option(group: argparse._ActionsContainer) -> None:
    """Add --raw, for commands that write CSV."""
    group.add_argument(
        "--raw",
        action="store_true",
        help="CSV: write text unchanged; by default text that spreadsheets take for a formula gets an apostrophe",
    )


def add_output_option(group: argparse._ActionsContainer) -> None:
    """Add --output."""
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
        "--steps", metavar="N", type=whole(3), default=TRIAL_STEPS, help="steps to time in a run, with its warm-up (50)"
    )
    group.add_argument("--precision", metavar="SHARE", type=relative_share, default=0.01, help=precision)
    group.add_argument("--budget", metavar="TIME", type=budget_seconds, default=budget_s, help=budget)
    group.add_argument(
        "--quiet-machine", action="store_true", help="keep each rank to its own cores, and collect no garbage"
    )


def add_slower_option(group: argparse._ActionsContainer) -> None:
    """Add --fail-if-slower."""
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


def add_batch_model_options(parser: argparse._ActionsContainer) -> None:
    """Add --memory-limit and --keep-free."""
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=_MEMORY,
        help="the memory there is, such as 24GiB (default: the device's)",
    )
    parser.add_argument(
        "--keep-free",
        metavar="SHARE",
        type=_SHARE_OF_MEMORY,
        default=0.1,
        help="share of the memory that the largest batch leaves free (default: 10%%)",
    )


def add_record_flags(group: argparse._ActionsContainer) -> None:
    """Add a pair such as --shapes and --no-shapes for each field of `RecordOptions`."""
    for option in fields(RecordOptions):
        group.add_argument(
            f"--{option.name}",
            action=argparse.BooleanOptionalAction,
            default=option.default,
            help=f"{_RECORDED[option.name]} (default: {'yes' if option.default else 'no'})",
        )


def record_options(arguments: argparse.Namespace) -> RecordOptions:
    """What to record, by the options."""
    return RecordOptions(**{option.name: getattr(arguments, option.name) for option in fields(RecordOptions)})
