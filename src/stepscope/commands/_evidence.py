"""Options by which files that a run left beside its trace are given, and how they reach the traces they belong to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.trace import Trace
    from stepscope.trace.evidence import Evidence


@dataclass(frozen=True, slots=True)
class SideFile:
    """What one file says.

    Attributes:
        rank: that it is about, by its name; None where it is about all of the run.
    """

    path: str
    rank: int | None
    evidence: Evidence


def add_evidence_options(parser: argparse.ArgumentParser) -> None:
    """--xla-metrics, --xla-debug-log, --gaudi-metrics and --fallback-log, each as often as wanted."""
    group = parser.add_argument_group("other files of the run, whose counts join the findings")
    for option, what in (
        ("--xla-metrics", "a metrics report of PyTorch/XLA, also inside other output"),
        ("--xla-debug-log", "what PyTorch/XLA printed under PT_XLA_DEBUG_LEVEL"),
        ("--gaudi-metrics", "Intel Gaudi's PT_HPU_METRICS_FILE; one named ...-rank3.json is rank 3's"),
        ("--fallback-log", "Intel Gaudi's log of operators on the CPU (LOG_LEVEL_PT_FALLBACK=1)"),
    ):
        group.add_argument(option, metavar="FILE", action="append", default=[], help=what)


def side_files(arguments: argparse.Namespace) -> list[SideFile]:
    """What the given files say.

    Raises:
        UsageError: one of them is something else.
        TraceError: one cannot be read.
    """
    from stepscope.readers import side_files as readers

    found = []
    for paths, read in (
        (arguments.xla_metrics, readers.read_xla_metrics),
        (arguments.xla_debug_log, readers.read_xla_debug_log),
        (arguments.gaudi_metrics, readers.read_gaudi_metrics),
        (arguments.fallback_log, readers.read_fallback_log),
    ):
        found += [SideFile(path, readers.rank_in_name(path), read(path)) for path in paths]
    return found


def with_evidence(traces: Iterable[Trace], files: list[SideFile], *, several: bool) -> Iterator[Trace]:
    """The traces with what the files say of each, and a word on standard error about files that belong to none.

    Args:
        several: whether there is more than one trace, which a rank's file then has to name.
    """
    used: set[str] = set()
    for trace in traces:
        mine = [file for file in files if _belongs(file, trace, several=several)]
        used |= {file.path for file in mine}
        yield _with(trace, [file.evidence for file in mine]) if mine else trace
    for file in files:
        if file.path not in used:
            print(
                f"stepscope: passed over: {printable(file.path)} is of rank {file.rank}, of which there is no trace",
                file=sys.stderr,
            )


def _belongs(file: SideFile, trace: Trace, *, several: bool) -> bool:
    rank = trace.metadata.rank
    return file.rank is None or file.rank == rank or (rank is None and not several)


def _with(trace: Trace, parts: list[Evidence]) -> Trace:
    from stepscope.commands._reading import encodable
    from stepscope.trace.evidence import joined

    evidence = joined(parts)
    sources = tuple(encodable(path) for path in evidence.sources)
    return replace(trace, metadata=replace(trace.metadata, evidence=replace(evidence, sources=sources)))
