"""`stepscope data-parallel`: settings of DistributedDataParallel that follow from a recording of ranks."""

from __future__ import annotations

import argparse
from typing import Final

from stepscope.commands.shared import output
from stepscope.commands.shared.reading import add_reading_options, open_from, trace_paths

NAME: Final = "data-parallel"
HELP: Final = (
    "Settings of data-parallel training that follow from a recording: size of buckets, views, unused parameters."
)
_EXAMPLES: Final = """\
The size of buckets is the one whose messages the backward pass hides best, by the gradients' sizes and moments and by
what the recorded messages took. Where several ranks were recorded, name their run, folder or all their files: together
they tell what a message takes from what its rank waits for others.

examples:
  stepscope run --name ddp torchrun --nproc-per-node 2 train.py
  stepscope data-parallel ddp                                why which setting, and the code
  stepscope data-parallel ddp --json data_parallel.json      for DataParallelSettings.load in the program
  stepscope data-parallel rank0.json rank1.json
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a run's name or folder, or the traces of its ranks")
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=output.target,
        help="also write the settings and reasons to a file, which DataParallelSettings.load reads; - for the terminal",
    )
    add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print each setting with its reason, and write the file."""
    from stepscope.diagnosis.view import View
    from stepscope.predict.data_parallel_settings import data_parallel_settings
    from stepscope.report.batch import data_parallel_document, data_parallel_json
    from stepscope.report.json import json_bytes
    from stepscope.report.text import text_of
    from stepscope.whatif import Experiment

    paths = [file for path in arguments.paths for file in trace_paths(path)]
    first, *rest = (open_from(arguments, path) for path in paths)
    found = data_parallel_settings(View(first), [Experiment(each) for each in rest])
    if arguments.json is not None:
        output.write_output(arguments.json, json_bytes(data_parallel_json(found)))
    if arguments.json != "-":
        output.print_text(text_of(data_parallel_document(found, file=arguments.json), width=output.width()))
    return 0
