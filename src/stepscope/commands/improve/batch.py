"""`stepscope batch-size` and `stepscope data-parallel`: settings derived from recordings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_batch_model_options,
    add_output_option,
    add_reading_options,
    add_report_options,
    whole_list,
)
from stepscope.commands.shared.reading import open_from, place_of, trace_paths
from stepscope.errors import NotATraceError, UnreadableTraceError, UsageError

if TYPE_CHECKING:
    from stepscope.analysis.batch_size import Measurement

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
    from stepscope.report.batch import batch_document, batch_json

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
                raise UsageError(f"{path} does not say its batch size: --batch 8,16,32 says it for each trace in order")
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
    from stepscope.report.batch import data_parallel_document, data_parallel_json
    from stepscope.whatif import Experiment

    paths = [file for path in arguments.paths for file in trace_paths(path)]
    first, *rest = (open_from(arguments, path) for path in paths)
    found = data_parallel_settings(View(first), [Experiment(each) for each in rest])
    output.write_reports(
        arguments,
        lambda: data_parallel_document(found, file=arguments.json),
        json=lambda: data_parallel_json(found),
    )
    return 0


BATCH_SIZE: Final = Command(
    "batch-size",
    "How time and memory grow with the batch size, and the largest batch that fits.",
    _prepare_batch_size,
    _batch_size,
    """\
Takes a run of stepscope run --batch-sizes, or one trace for each size. The sizes of traces are those of the loaders
that the recording noted, or what --batch says.

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
The size of buckets is the one whose messages the backward pass hides best, by the gradients' sizes and moments and by
what the recorded messages took. Where several ranks were recorded, name their run, folder or all their files: together
they separate how long a message takes from how long its rank waits for others.

examples:
  stepscope run --name ddp torchrun --nproc-per-node 2 train.py
  stepscope data-parallel ddp                                why which setting, and the code
  stepscope data-parallel ddp --json data_parallel.json      for DataParallelSettings.load in the program
  stepscope data-parallel rank0.json rank1.json
""",
)
