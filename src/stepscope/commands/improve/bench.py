"""`stepscope bench`: commands run in turn, and which of them has the shorter steps."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from stepscope.commands.record.run import at_least
from stepscope.commands.shared import output
from stepscope.commands.shared.applying import add_slower_option, applications, judged
from stepscope.errors import TraceError, UsageError
from stepscope.files import private_folder
from stepscope.report.format import duration, printable

if TYPE_CHECKING:
    from stepscope.compare import Comparison
    from stepscope.compare.bench import Bench, BenchFailure, BenchRun
    from stepscope.compare.bench_programs import BenchCommand

NAME: Final = "bench"
HELP: Final = "Run commands in turn, time their steps without a profiler, and say which is faster and how sure that is."
_EXAMPLES: Final = """\
Each command is one quoted argument; the first is what the others are compared with. A program is found and started
as stepscope run does it, runs until it has taken --steps steps, and is then ended. No shell is asked: variables may
stand before a program, pipes may not.

examples:
  stepscope bench 'python train.py --workers 0' 'python train.py --workers 4'
  stepscope bench 'train.py' 'train.py --fused' 'train.py --fused --bf16' --steps 100
  stepscope bench train.py train.py --apply B=fuse-optimizer,workers=4
  stepscope bench 'OMP_NUM_THREADS=1 train.py' 'OMP_NUM_THREADS=4 train.py' --precision 0.5% --budget 30m
  stepscope bench 'torchrun --nproc-per-node 2 a.py' 'torchrun --nproc-per-node 2 b.py' --profile
  stepscope bench 'old/train.py' 'new/train.py' --fail-if-slower 3% --markdown comment.md

Exit codes: 0 done, 1 a command is slower than --fail-if-slower allows, 2 a command failed, 130 interrupted."""
_TIMES: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_LABELS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
INTERRUPTED: Final = 130
_MOST_SHOWN: Final = 99
_ROWS: Final = 5
"""Of each table about the profiles."""
"""More rounds than these are never needed; the precision is reached before."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("commands", metavar="COMMAND", nargs="+", help="two or more, each quoted as one argument")
    how = parser.add_argument_group("how much is measured")
    how.add_argument(
        "--steps", metavar="N", type=at_least(3), default=50, help="steps to time in a run, with its warm-up (50)"
    )
    how.add_argument(
        "--precision",
        metavar="SHARE",
        type=share_of_step,
        default=0.01,
        help="stop when every change is known to this share of the first command's step, more or less (1%%)",
    )
    how.add_argument(
        "--budget",
        metavar="TIME",
        type=time_of,
        default=600.0,
        help="begin no further round after it: 90s, 10m, 1h (10m)",
    )
    how.add_argument("--rounds", metavar="N", type=at_least(2), help="at most so many runs of each command")
    how.add_argument(
        "--quiet-machine", action="store_true", help="keep each rank to its own cores, and collect no garbage"
    )
    how.add_argument("--seed", metavar="N", type=at_least(0), help="with --quiet-machine: fix the random generators")
    parser.add_argument_group("what to change, without touching the programs").add_argument(
        "--apply",
        metavar="LABEL=LIST",
        action="append",
        default=[],
        help="apply remedies to a command, such as B=fuse-optimizer,workers=2; stepscope run --apply list shows all",
    )
    after = parser.add_argument_group("what comes of it")
    after.add_argument(
        "--profile", action="store_true", help="then record one run of each, and say where the difference comes from"
    )
    add_slower_option(after)
    after.add_argument("--json", metavar="FILE", type=output.target, help="write everything for programs; - prints it")
    after.add_argument(
        "--markdown", metavar="FILE", type=output.target, help="write the result for a pull request; - prints it"
    )
    after.add_argument(
        "--folder", metavar="DIR", help="make the bench's folder in DIR instead of the user's data folder"
    )
    after.add_argument(
        "--show-output", action="store_true", help="show what the programs print, on standard error, and keep no logs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 where --fail-if-slower says so, 2 where a command failed, 130 where Ctrl-C came."""
    from stepscope.compare.bench import measure

    if arguments.seed is not None and not arguments.quiet_machine:
        raise UsageError("--seed goes with --quiet-machine")
    if arguments.json == "-" and arguments.markdown == "-":
        raise UsageError("only one of --json and --markdown can be -")
    bench = _new_bench(arguments)
    _say(f"{len(bench.commands)} commands in turn; logs in {bench.folder}")
    with ended_by_signals():
        measure(bench, lambda run: _say(_progress(bench, run)))
        if bench.failure is not None:
            _show_failure(bench.failure)
        if all(bench.runs_of(command.label) for command in bench.commands):
            _write(arguments, bench, _explanations(bench) if arguments.profile else [])
        elif bench.stop == "interrupted":
            _say("interrupted before every command had run once")
    if bench.failure is not None:
        raise UsageError(_failure(bench, bench.failure))
    if bench.stop == "interrupted":
        return INTERRUPTED
    return judged(arguments.fail_if_slower, ((command.label, found) for command, found in bench.comparisons()))


def _new_bench(arguments: argparse.Namespace) -> Bench:
    from stepscope.compare.bench import Bench, BenchSettings
    from stepscope.compare.bench_programs import BenchCommand

    texts: Sequence[str] = arguments.commands
    if len(texts) < 2:
        raise UsageError("bench compares two commands or more, each quoted as one argument: 'a.py --x' 'b.py'")
    if len(texts) > len(_LABELS):
        raise UsageError(f"bench compares at most {len(_LABELS)} commands, not {len(texts)}")
    commands = tuple(BenchCommand.parse(label, text) for label, text in zip(_LABELS, texts, strict=False))
    commands = _with_applications(commands, arguments.apply)
    settings = BenchSettings(
        steps=arguments.steps,
        precision=arguments.precision,
        budget_s=arguments.budget,
        rounds=arguments.rounds,
        quiet=arguments.quiet_machine,
        seed=arguments.seed,
        show_output=arguments.show_output,
    )
    return Bench(commands, settings, _new_folder(arguments.folder, commands[0].words))


def _with_applications(commands: Sequence[BenchCommand], texts: Sequence[str]) -> tuple[BenchCommand, ...]:
    """The commands with what is to be applied to each; several lists for one count as one."""
    lists: dict[str, list[str]] = {}
    for text in texts:
        label, equals, names = text.partition("=")
        label = label.strip()
        if not equals or label not in [command.label for command in commands]:
            labels = ", ".join(command.label for command in commands)
            raise UsageError(f"--apply {text} names none of the commands {labels}: write it as B=fuse-optimizer")
        lists.setdefault(label, []).append(names)
    return tuple(replace(command, apply=applications(lists.get(command.label))) for command in commands)


def _new_folder(chosen: str | None, words: Sequence[str]) -> Path:
    """A folder for the runs, named by the first program and the time."""
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import data_folder, new_folder

    root = data_folder() / "benches" if chosen is None else Path(chosen).absolute()
    try:
        private_folder(root, tighten=chosen is None)
        return new_folder(root, RunManifest(tuple(words), started_unix_s=time.time()).suggested_name())
    except OSError as error:
        raise UsageError(f"no folder can be made in {root}: {error.strerror}") from error


def _progress(bench: Bench, run: BenchRun) -> str:
    """Such as "round 2 of at most 5: B 48.2 ms a step"."""
    steady = run.steady_ns
    most = _most_rounds(bench)
    of = "" if most is None or most > _MOST_SHOWN else f" of at most {most}"
    return f"round {run.round}{of}: {run.label} {duration(sum(steady) / len(steady))} a step"


def _most_rounds(bench: Bench) -> int | None:
    """How many rounds there can be; None before the first has told how long one takes."""
    from stepscope.compare.bench import FEWEST_ROUNDS

    settings, whole = bench.settings, bench.rounds
    by_budget = max(int(settings.budget_s / (bench.seconds / len(bench.runs) * len(bench.commands))), whole)
    fits = None if whole == 0 else max(by_budget, FEWEST_ROUNDS)
    limits = [limit for limit in (fits, settings.rounds) if limit is not None]
    return min(limits, default=None)


def _explanations(bench: Bench) -> list[Comparison]:
    """Where the difference comes from, by a profile of each command; nothing after Ctrl-C."""
    from stepscope.compare.run_times import explanations, profile_commands
    from stepscope.readers import open_trace
    from stepscope.trace.cache import TraceCache

    if bench.stop in ("interrupted", "failed"):
        return []
    try:
        folders = profile_commands(bench, _say)
        return explanations(bench, folders, lambda path: open_trace(path, cache=TraceCache()))
    except KeyboardInterrupt:
        bench.stop = "interrupted"  # what was measured is shown
    except TraceError as error:
        _say(f"the profiles cannot be compared: {error}")
    return []


def _write(arguments: argparse.Namespace, bench: Bench, comparisons: Sequence[Comparison]) -> None:
    """Print the result, or what is to stand on standard output in its place, and write the files."""
    from stepscope.report.bench import bench_document, bench_json
    from stepscope.report.json import json_bytes
    from stepscope.report.markdown import markdown_of
    from stepscope.report.text import text_of

    document = bench_document(bench, comparisons)
    if "-" not in (arguments.json, arguments.markdown):
        output.print_text(text_of(document, width=output.width(), top=_ROWS))
    if arguments.json is not None:
        output.write_output(arguments.json, json_bytes(bench_json(bench, comparisons)))
    if arguments.markdown is not None:
        output.write_output(arguments.markdown, markdown_of(document, top=_ROWS).encode())


def _show_failure(failure: BenchFailure) -> None:
    """The last lines that the program printed."""
    from stepscope.compare.bench_programs import last_lines

    for line in last_lines(failure.log) if failure.log is not None else ():
        print(f"  {printable(line)}", file=sys.stderr)


def _failure(bench: Bench, failure: BenchFailure) -> str:
    command = next(each for each in bench.commands if each.label == failure.label)
    log = "" if failure.log is None else f"; its output: {failure.log}"
    return f"command {failure.label}, {command.shown}, {failure.sentence}{log}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Take the signals that end a process as Ctrl-C, so that no program is left behind."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):  # as under nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _say(sentence: str) -> None:
    print(f"stepscope: {printable(sentence)}", file=sys.stderr, flush=True)


def share_of_step(text: str) -> float:
    """A share from "3%" or "0.03"."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*(%?)\s*", text, re.ASCII)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of a step: write 3% or 0.03")
    return value


def time_of(text: str) -> float:
    """Seconds from "90s", "10m" or "1h"."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*(s|m|min|h|)\s*", text, re.ASCII)
    value = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 10m or 1h")
    return value
