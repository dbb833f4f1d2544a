"""`stepscope bench`: which command has the shorter steps; `batch-size`, `data-parallel`: settings from recordings."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    INTERRUPTED,
    Command,
    CommandParser,
    add_batch_model_options,
    add_output_option,
    add_reading_options,
    add_report_options,
    add_slower_option,
    add_trial_options,
    applications,
    exit_code_if_slower,
    whole,
    whole_list,
)
from stepscope.commands.shared.output import say
from stepscope.commands.shared.reading import open_from, place_of, trace_paths
from stepscope.errors import NotATraceError, TraceError, UnreadableTraceError, UsageError
from stepscope.files import private_folder
from stepscope.report.format import duration, printable
from stepscope.threads import ENDING, handled, interrupt

if TYPE_CHECKING:
    from stepscope.analysis.batch_size import Measurement
    from stepscope.compare import Comparison
    from stepscope.compare.bench import Bench, BenchCommand, BenchFailure, BenchRun

_LABELS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROWS: Final = 5
"""Rows of each table about the profiles."""
_MOST_SHOWN: Final = 99
"""Larger round limits are not shown, since the precision is reached first."""


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument("commands", metavar="COMMAND", nargs="+", help="two or more, each quoted as one argument")
    how = parser.add_argument_group("how much is measured")
    add_trial_options(
        how,
        precision="stop when every change is known to within this share of the first command's step (1%%)",
        budget="start no round after this time: 90s, 10m, 1h (10m)",
        budget_s=600.0,
    )
    how.add_argument("--rounds", metavar="N", type=whole(2), help="most runs of each command")
    how.add_argument("--seed", metavar="N", type=whole(0), help="with --quiet-machine: fix the random generators")
    parser.add_argument_group("what to change, without touching the programs").add_argument(
        "--apply",
        metavar="LABEL=LIST",
        action="append",
        default=[],
        help="apply remedies to a command, such as B=fuse-optimizer,workers=2; stepscope run --apply list shows all",
    )
    after = parser.add_argument_group("what comes of it")
    after.add_argument(
        "--profile", action="store_true", help="also record one run of each, and say where the difference comes from"
    )
    add_slower_option(after)
    add_report_options(
        after,
        json="write everything for programs; - prints it",
        markdown="write the result for a pull request; - prints it",
    )
    after.add_argument(
        "--folder", metavar="DIR", help="make the bench's folder in DIR instead of the user's data folder"
    )
    after.add_argument(
        "--show-output", action="store_true", help="show what the programs print, on standard error, and keep no logs"
    )


def _run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 1 if --fail-if-slower fails, 2 if a command failed, 130 after Ctrl-C."""
    from stepscope.compare.bench import measure

    if arguments.seed is not None and not arguments.quiet_machine:
        raise UsageError("--seed needs --quiet-machine")
    bench = _new_bench(arguments)
    say(f"{len(bench.commands)} commands in turn; logs in {bench.folder}")
    with handled(interrupt, *ENDING):
        measure(bench, lambda run: say(_progress(bench, run)))
        if bench.failure is not None:
            _show_failure(bench.failure)
        if all(bench.runs_of(command.label) for command in bench.commands):
            _write(arguments, bench, _explanations(bench) if arguments.profile else [])
        elif bench.stop == "interrupted":
            say("interrupted before every command had run once")
    if bench.failure is not None:
        raise UsageError(_failure(bench, bench.failure))
    if bench.stop == "interrupted":
        return INTERRUPTED
    return exit_code_if_slower(
        arguments.fail_if_slower, ((command.label, found) for command, found in bench.comparisons())
    )


def _new_bench(arguments: argparse.Namespace) -> Bench:
    from stepscope.compare.bench import Bench, BenchCommand, BenchSettings

    texts: Sequence[str] = arguments.commands
    if len(texts) < 2:
        raise UsageError("bench compares two or more commands, each quoted as one argument: 'a.py --x' 'b.py'")
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
    """Add each command's remedies to it; several lists for one command are joined."""
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
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import data_folder, new_folder

    root = data_folder() / "benches" if chosen is None else Path(chosen).absolute()
    try:
        private_folder(root, tighten=chosen is None)
        return new_folder(root, RunManifest(tuple(words), started_unix_s=time.time()).suggested_name())
    except OSError as error:
        raise UsageError(f"no folder can be made in {root}: {error.strerror}") from error


def _progress(bench: Bench, run: BenchRun) -> str:
    """Format progress as "round 2 of at most 5: B 48.2 ms a step"."""
    steady = run.steady_ns
    most = _most_rounds(bench)
    of = "" if most is None or most > _MOST_SHOWN else f" of at most {most}"
    return f"round {run.round}{of}: {run.label} {duration(sum(steady) / len(steady))} a step"


def _most_rounds(bench: Bench) -> int | None:
    """The most rounds that can follow from the limits; None until the duration of a round is known."""
    from stepscope.compare.bench import FEWEST_ROUNDS

    settings, whole = bench.settings, bench.rounds
    by_budget = max(int(settings.budget_s / (bench.seconds / len(bench.runs) * len(bench.commands))), whole)
    fits = None if whole == 0 else max(by_budget, FEWEST_ROUNDS)
    limits = [limit for limit in (fits, settings.rounds) if limit is not None]
    return min(limits, default=None)


def _explanations(bench: Bench) -> list[Comparison]:
    """Explain the difference by a profile of each command; empty after Ctrl-C or a failure."""
    from stepscope.compare.run_times import explanations, profile_commands
    from stepscope.readers import open_trace
    from stepscope.trace.cache import TraceCache

    if bench.stop in ("interrupted", "failed"):
        return []
    try:
        folders = profile_commands(bench, say)
        return explanations(bench, folders, lambda path: open_trace(path, cache=TraceCache()))
    except KeyboardInterrupt:
        bench.stop = "interrupted"  # what was measured so far is shown
    except TraceError as error:
        say(f"the profiles cannot be compared: {error}")
    return []


def _write(arguments: argparse.Namespace, bench: Bench, comparisons: Sequence[Comparison]) -> None:
    from stepscope.report.bench import bench_document, bench_json

    output.write_reports(
        arguments, lambda: bench_document(bench, comparisons), top=_ROWS, json=lambda: bench_json(bench, comparisons)
    )


def _show_failure(failure: BenchFailure) -> None:
    from stepscope.compare.bench import last_lines

    for line in last_lines(failure.log) if failure.log is not None else ():
        print(f"  {printable(line)}", file=sys.stderr)


def _failure(bench: Bench, failure: BenchFailure) -> str:
    command = next(each for each in bench.commands if each.label == failure.label)
    log = "" if failure.log is None else f"; its output: {failure.log}"
    return f"command {failure.label}, {command.shown}, {failure.sentence}{log}"


COMMAND: Final = Command(
    "bench",
    "Run commands in turn, time their steps without a profiler, and say which is faster and how certain that is.",
    _prepare_parser,
    _run,
    """\
Each command is one quoted argument; the others are compared with the first. A program is found and started as by
stepscope run, runs until it has taken --steps steps, and is then ended. There is no shell: variables may precede a
program, but pipes do not work.

examples:
  stepscope bench 'python train.py --workers 0' 'python train.py --workers 4'
  stepscope bench 'train.py' 'train.py --fused' 'train.py --fused --bf16' --steps 100
  stepscope bench train.py train.py --apply B=fuse-optimizer,workers=4
  stepscope bench 'OMP_NUM_THREADS=1 train.py' 'OMP_NUM_THREADS=4 train.py' --precision 0.5% --budget 30m
  stepscope bench 'torchrun --nproc-per-node 2 a.py' 'torchrun --nproc-per-node 2 b.py' --profile
  stepscope bench 'old/train.py' 'new/train.py' --fail-if-slower 3% --markdown comment.md

Exit codes: 0 done, 1 a command is slower than --fail-if-slower allows, 2 a command failed, 130 interrupted.""",
)


batch_sizes = whole_list("batch sizes", most=999_999_999, longest=100)


def _prepare_batch_size(parser: CommandParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a run's name or folder, or a trace for each size")
    parser.add_argument("--batch", metavar="SIZES", type=batch_sizes, help="the traces' batch sizes, in order: 8,16,32")
    add_batch_model_options(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    add_output_option(parser)
    add_reading_options(parser)


def _batch_size(arguments: argparse.Namespace) -> int:
    write_model(_measurements(arguments, _traces(arguments.paths, arguments.batch)), arguments)
    return 0


def write_model(measurements: Sequence[Measurement], arguments: argparse.Namespace) -> None:
    """Print the lines fitted to the measurements and the recommendation.

    Raises:
        UsageError: fewer than two different sizes.
    """
    from stepscope.analysis.batch_size import batch_model
    from stepscope.report.bench import batch_document, batch_json

    model = batch_model(measurements, capacity_bytes=arguments.memory_limit, kept_free=arguments.keep_free)
    if "format" in arguments:
        output.write_document(arguments, lambda: batch_document(model), lambda: batch_json(model))
    else:
        output.print_document(batch_document(model))


def measurements_of_run(arguments: argparse.Namespace, folder: Path) -> list[Measurement]:
    """The measurements of a run of `stepscope run --batch-sizes`; failed sizes are reported and left out."""
    return _measurements(arguments, _traces_of_run(folder))


def _traces_of_run(folder: Path) -> list[tuple[Path, int | None]]:
    from stepscope.record.launch import read_runs

    return [(folder / each.first_ranks_last, each.batch_size) for each in read_runs(folder) if each.traces]


def _traces(paths: Sequence[str], sizes: Sequence[int] | None) -> list[tuple[Path, int | None]]:
    """Each trace with its batch size, None if only the recording can provide it."""
    if len(paths) == 1 and sizes is None:
        found = _traces_of_run(place_of(paths[0]))
        if found:
            return found
    traces = [trace for path in paths for trace in trace_paths(path)]
    if sizes is not None and len(sizes) != len(traces):
        raise UsageError(f"--batch names {len(sizes)} sizes, but there are {len(traces)} traces")
    return list(zip(traces, sizes if sizes is not None else [None] * len(traces), strict=True))


def _measurements(arguments: argparse.Namespace, pairs: Sequence[tuple[Path, int | None]]) -> list[Measurement]:
    from stepscope.analysis.batch_size import batch_size_of, measurement_of

    found = []
    for path, size in pairs:
        try:
            trace = open_from(arguments, path)
            known = size if size is not None else batch_size_of(trace)
            if known is None:
                raise UsageError(
                    f"{path} does not contain its batch size: give one for each trace in order, --batch 8,16,32"
                )
            found.append(measurement_of(trace, known))
        except (NotATraceError, UnreadableTraceError, UsageError) as error:
            if len(pairs) < 3 or size is None:
                raise
            output.say(f"batch size {size} is left out: {error}")
    return found


def _prepare_data_parallel(parser: CommandParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a run's name or folder, or the traces of its ranks")
    add_report_options(
        parser,
        json="also write the settings and reasons to a file, which DataParallelSettings.load reads; - for the terminal",
    )
    add_reading_options(parser)


def _data_parallel(arguments: argparse.Namespace) -> int:
    from stepscope.diagnosis.view import View
    from stepscope.predict.data_parallel_settings import data_parallel_settings
    from stepscope.report.bench import data_parallel_document, data_parallel_json
    from stepscope.whatif import Experiment

    paths = [file for path in arguments.paths for file in trace_paths(path)]
    first, *rest = (open_from(arguments, path) for path in paths)
    found = data_parallel_settings(View(first), [Experiment(each) for each in rest])
    output.write_reports(
        arguments, lambda: data_parallel_document(found, file=arguments.json), json=lambda: data_parallel_json(found)
    )
    return 0


BATCH_SIZE: Final = Command(
    "batch-size",
    "How time and memory grow with the batch size, and the largest batch that fits.",
    _prepare_batch_size,
    _batch_size,
    """\
Takes a run of stepscope run --batch-sizes, or one trace for each size. A trace's size is its loaders', if recorded, or
that of --batch.

examples:
  stepscope run --batch-sizes 8,16,32 --batch-flag batch-size train.py
  stepscope batch-size NAME                                  the same run again
  stepscope batch-size NAME --memory-limit 24GiB             on another device
  stepscope batch-size a.json b.json c.json --batch 8,16,32
""",
)
DATA_PARALLEL: Final = Command(
    "data-parallel",
    "Settings of data-parallel training that follow from a recording: size of buckets, views, unused parameters.",
    _prepare_data_parallel,
    _data_parallel,
    """\
The bucket size is the one whose messages the backward pass hides best, by the sizes and times of the gradients and the
recorded messages. If several ranks were recorded, name their run, folder or all their files: together they separate how
long a message takes from how long its rank waits for others.

examples:
  stepscope run --name ddp torchrun --nproc-per-node 2 train.py
  stepscope data-parallel ddp                                why which setting, and the code
  stepscope data-parallel ddp --json data_parallel.json      for DataParallelSettings.load in the program
  stepscope data-parallel rank0.json rank1.json
""",
)
