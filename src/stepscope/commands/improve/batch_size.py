"""`stepscope batch-size`: throughput and memory against batch size, and the largest batch that fits."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import add_reading_options, open_from, place_of, trace_paths
from stepscope.errors import NotATraceError, UnreadableTraceError, UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.analysis.batch_size import Measurement

NAME: Final = "batch-size"
HELP: Final = "How time and memory grow with the batch size, and the largest batch that fits."
_EXAMPLES: Final = """\
Takes a run of stepscope run --batch-sizes, or one trace for each size. The sizes of traces are those of the loaders
that the recording noted, or what --batch says.

examples:
  stepscope run --batch-sizes 8,16,32 --batch-flag batch-size train.py
  stepscope batch-size NAME                                  the same run again
  stepscope batch-size NAME --memory-limit 24GiB             on another device
  stepscope batch-size a.json b.json c.json --batch 8,16,32
"""
_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
KEPT_FREE: Final = 0.1
_MOST_SIZES: Final = 100
_LARGEST_SIZE: Final = 10**9


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a run's name or folder, or a trace for each size")
    parser.add_argument("--batch", metavar="SIZES", type=batch_sizes, help="the traces' batch sizes, in order: 8,16,32")
    add_model_options(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument(
        "--output", metavar="FILE", type=output.target, default="-", help="write to a file instead of the terminal"
    )
    add_reading_options(parser)


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """--memory-limit and --keep-free."""
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=memory_size,
        help="the memory there is, such as 24GiB (default: the device's)",
    )
    parser.add_argument(
        "--keep-free",
        metavar="SHARE",
        type=_kept_free,
        default=KEPT_FREE,
        help="share of the memory that the largest batch leaves free (default: 10%%)",
    )


def batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from the command line, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes: write whole numbers, such as 8,16,32")
    if len(words) > _MOST_SIZES:
        raise argparse.ArgumentTypeError(f"{len(words)} batch sizes are too many")
    return tuple(map(int, words))


def memory_size(text: str) -> int:
    """Bytes from "24GiB", "16 GB" or a number."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]i?B|B|)\s*", text)
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory: write 24GiB, 16GB or a number of bytes")
    return value


def _kept_free(text: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of the memory: write 10% or 0.1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure every trace, fit the lines, print what follows."""
    pairs = _traces(arguments.paths, arguments.batch)
    write_model(_measurements(arguments, pairs), arguments)
    return 0


def write_model(measurements: Sequence[Measurement], arguments: argparse.Namespace) -> None:
    """Print the lines through the measurements and what follows from them.

    Raises:
        UsageError: fewer than two different sizes.
    """
    from stepscope.analysis.batch_size import batch_model
    from stepscope.report.batch import batch_document, batch_json

    model = batch_model(measurements, capacity_bytes=arguments.memory_limit, kept_free=arguments.keep_free)
    if getattr(arguments, "format", "table") == "json":
        from stepscope.report.json import json_bytes

        output.write_output(arguments.output, json_bytes(batch_json(model)))
        return
    from stepscope.report.text import text_of

    text = text_of(batch_document(model), width=output.width())
    if getattr(arguments, "output", "-") == "-":
        output.print_text(text)
    else:
        output.write_output(arguments.output, text.encode())


def measurements_of_run(arguments: argparse.Namespace, folder: Path) -> list[Measurement]:
    """What a run of `stepscope run --batch-sizes` measured; sizes that failed are named and passed over."""
    return _measurements(arguments, _of_run(folder))


def _of_run(folder: Path) -> list[tuple[Path, int | None]]:
    from stepscope.record.launch import read_runs

    return [(folder / each.first_ranks_last, each.batch_size) for each in read_runs(folder) if each.traces]


def _traces(paths: Sequence[str], sizes: Sequence[int] | None) -> list[tuple[Path, int | None]]:
    """Each trace with its batch size, None where the recording must tell."""
    if len(paths) == 1 and sizes is None:
        found = _of_run(place_of(paths[0]))
        if found:
            return found
    traces = [trace for path in paths for trace in trace_paths(path)]
    if sizes is not None and len(sizes) != len(traces):
        raise UsageError(f"--batch names {len(sizes)} sizes, but there are {len(traces)} traces")
    return [(trace, None if sizes is None else sizes[number]) for number, trace in enumerate(traces)]


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
            print(f"stepscope: batch size {size} is left out: {printable(str(error))}", file=sys.stderr)
    return found
