"""`stepscope whatif`: how long a step would take if something were different, and what would limit it then."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.read.tables import rule_named
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    NANOSECONDS,
    RANKS,
    Command,
    CommandParser,
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_trace,
    add_user_code_options,
    number,
    suggestion,
    user_code_from,
    whole,
)
from stepscope.commands.shared.processes import FEW, in_processes
from stepscope.commands.shared.reading import kept_as_rank, open_from, rank_traces, redacted, trace_paths
from stepscope.errors import TraceError, UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.rank_summary import RankSummary
    from stepscope.diagnosis.view import View
    from stepscope.report.whatif import Folder
    from stepscope.whatif import Change
    from stepscope.whatif.answer import Answer, NamedChange, Tried
    from stepscope.whatif.job import JobProspect, Saved

CURVES: Final = ("operators", "lines", "kernels", "modules")
_TOP: Final = 20
_CURVE_TOP: Final = 10
_ALL: Final = 2**31
_LARGEST_FACTOR: Final = 1_000_000.0


def _prepare_parser(parser: CommandParser) -> None:
    add_trace(parser, RANKS)
    _add_change_options(parser)
    parser.add_argument(
        "--rank", metavar="N", type=whole(0), help="of a folder of ranks: change only this one (default: all of them)"
    )
    tables = parser.add_argument_group("tables")
    tables.add_argument(
        "--curve",
        choices=CURVES,
        help="what the steps would gain if each of these were faster, one by one, as in causal profilers",
    )
    tables.add_argument("--critical-path", action="store_true", help="what the steps wait for, by name")
    tables.add_argument(
        "--slack", action="store_true", help="how much later each operator could end without a longer step"
    )
    add_top_option(tables, f"rows of each table, 0 for all ({_TOP}; curve {_CURVE_TOP})")
    add_report_options(tables, json="for programs; - for standard output")
    add_redact_option(tables)
    add_user_code_options(parser)
    add_reading_options(parser)


def parsed_scale(text: str) -> tuple[str, float]:
    """Parse "aten::mm=0.5" into ("aten::mm", 0.5), split at the last "=" since names may contain some."""
    pattern, equals, factor = text.rpartition("=")
    if not equals or not pattern.strip():
        raise argparse.ArgumentTypeError(f"{text!r} scales nothing: write PATTERN=FACTOR, such as 'aten::mm=0.5'")
    return pattern.strip(), _factor(factor)


_factor = number(
    f"is not a factor from 0 to {_LARGEST_FACTOR:,.0f}: 0.5 is half the time, 2 is twice the time", most=_LARGEST_FACTOR
)
nanoseconds = number("is not a time of at most 10 s: write 2us, 500ns or nanoseconds", NANOSECONDS, most=10e9)
megabytes = number("is not a size in megabytes: write a number above 0, such as 25", above=0, most=1e6)


def _add_change_options(parser: CommandParser) -> None:
    group = parser.add_argument_group("changes, combined as wanted; without any, what each cause costs")
    group.add_argument(
        "--remove",
        metavar="CAUSE|RULE",
        action="append",
        default=[],
        help="no time for this cause, such as input, or everything that this rule finds fixed; may be repeated",
    )
    group.add_argument(
        "--scale",
        metavar="PATTERN=FACTOR",
        type=parsed_scale,
        action="append",
        default=[],
        help="operators, kernels and modules of this name (* and ? as in file names), or FILE:LINE, take this many "
        "times as long: 'aten::mm=0.5' is half the time; may be repeated",
    )
    group.add_argument(
        "--launch-overhead", metavar="TIME", type=nanoseconds, help="duration of each launch call: 2us, 500ns"
    )
    group.add_argument("--graphs", action="store_true", help="one launch a step: its kernels as a recorded graph")
    group.add_argument("--overlap", choices=("communication",), help="communication runs beside all computation")
    group.add_argument("--bucket-size", metavar="MB", type=megabytes, help="gradients are sent in buckets of this size")
    group.add_argument(
        "--loader-workers", metavar="N", type=whole(0), help="number of processes that load batches ahead; 0 for none"
    )
    group.add_argument(
        "--sync-every", metavar="N", type=whole(1), help="the host waits for the device only in every N-th step"
    )


def _run(arguments: argparse.Namespace) -> int:
    from stepscope.diagnosis.view import View
    from stepscope.report.whatif import whatif_document, whatif_json

    files = rank_traces(arguments.trace)
    shown = [_trace_of_rank(arguments)] if arguments.rank is not None else files or [arguments.trace]
    for place, file in enumerate(shown):
        view = View(open_from(arguments, file), user_code=user_code_from(arguments))
        try:
            answer = answer_to(arguments, view)
        except _FindsNothing as error:  # there, but perhaps on another rank
            if place == len(shown) - 1:
                what = "this trace" if len(shown) == 1 else f"any of the {len(shown):,} traces"
                raise UsageError(f"the rule {error.rule} finds nothing to fix in {what}{error.why}") from None
            continue
        break
    folder = None if not files else _folder(arguments, view, len(files), is_asked=not answer.alone)
    answer, folder = redacted(arguments, (answer, folder), paths=[view.trace.metadata.path])
    top = _TOP if arguments.top is None else arguments.top
    output.write_reports(
        arguments, lambda: whatif_document(answer, folder), top=top, json=lambda: whatif_json(answer, folder)
    )
    return 0


def _folder(arguments: argparse.Namespace, view: View, ranks: int, *, is_asked: bool) -> Folder:
    """The ranks that the argument names, and what their steps wait for if that is asked."""
    from stepscope.diagnosis.job import job_of, job_steps
    from stepscope.report.format import file_name
    from stepscope.report.whatif import Folder

    metadata = view.trace.metadata
    shown = file_name(metadata.path) if metadata.rank is None else f"rank {metadata.rank}"
    found = [summary for summary, _ in _in_order(arguments)] if is_asked else []
    job = job_of(found)
    return Folder(arguments.trace, shown, ranks, None if job is None else job_steps(job, found))


def answer_to(arguments: argparse.Namespace, view: View, tried: Tried | None = None) -> Answer:
    """The answer to what the options ask of a trace.

    Args:
        tried: results for this view, which serve again; new ones are added.
    """
    from stepscope.whatif.answer import Tried, speed_up_curve, what_if
    from stepscope.whatif.critical_path import critical_path, slack_of_operators

    experiment = view.experiment
    tried = Tried() if tried is None else tried
    changes = _changes(arguments, view, tried)
    answer, done = what_if(experiment, changes, tried)
    rows = _CURVE_TOP if arguments.top is None else arguments.top or _ALL  # each takes a few replays
    return dataclasses.replace(
        answer,
        contended_share=0.0 if view.contention is None else view.contention.share,
        job=_job(arguments) if changes else None,
        path=critical_path(experiment, done) if arguments.critical_path else None,
        slack=slack_of_operators(experiment) if arguments.slack else None,
        curve=speed_up_curve(experiment, arguments.curve, top=rows) if arguments.curve else None,
    )


def _trace_of_rank(arguments: argparse.Namespace) -> Path:
    """The trace of the rank of --rank.

    Raises:
        UsageError: there is none.
    """
    found = []
    for path in trace_paths(arguments.trace):
        kept = kept_as_rank(arguments, path, lambda: None)
        found.append(kept.steps.rank if kept is not None else open_from(arguments, path).metadata.rank)
        if found[-1] == arguments.rank:
            return path
    known = ", ".join(str(rank) for rank in sorted(rank for rank in found if rank is not None))
    raise UsageError(f"{arguments.trace} has no trace of rank {arguments.rank}; it has {known or 'no known ranks'}")


def _job(arguments: argparse.Namespace) -> JobProspect | None:
    """The job's prospect, if the argument names several ranks that collectives join; else None."""
    from stepscope.diagnosis.job import job_of

    found = _in_order(arguments)
    job = job_of([summary for summary, _ in found])
    saved = {place: each for place, (_, each) in enumerate(found) if each is not None}
    return None if job is None else job.prospect(saved)


def _in_order(arguments: argparse.Namespace) -> list[tuple[RankSummary, Saved | None]]:
    from stepscope.diagnosis.rank_summary import recorded_once

    found = sorted(_ranks(arguments, rank_traces(arguments.trace)), key=lambda each: each[0].order)
    return recorded_once(found, lambda each: each[0])[0]


def _ranks(arguments: argparse.Namespace, paths: Sequence[Path]) -> Iterator[tuple[RankSummary, Saved | None]]:
    """Each rank's summary, and what the changes save on it alone; traces that cannot be read are passed over."""
    if len(paths) <= FEW:
        found: Iterable[tuple[Path, tuple[RankSummary, Saved | None] | str | None]] = (
            (path, _rank(arguments, path)) for path in paths
        )
    else:
        given = (argparse.Namespace(**{**vars(arguments), "quiet": True}),)
        found = in_processes(_rank_in_process, paths, begin=_begin, given=given)
    for path, rank in found:
        if isinstance(rank, tuple):
            yield rank
        else:
            output.say(f"skipped: {rank or f'{path}: the process that read it ended, perhaps for lack of memory'}")


_asked: list[argparse.Namespace] = []
"""In a process that replays ranks: the command's arguments."""


def _begin(arguments: argparse.Namespace) -> None:
    _asked.append(arguments)


def _rank_in_process(path: Path) -> tuple[RankSummary, Saved | None] | str:
    return _rank(_asked[0], path)


def _rank(arguments: argparse.Namespace, path: Path) -> tuple[RankSummary, Saved | None] | str:
    from stepscope.diagnosis.rank_summary import rank_summary
    from stepscope.diagnosis.view import View
    from stepscope.whatif.answer import Tried
    from stepscope.whatif.changes import together
    from stepscope.whatif.waits import saved_between

    try:
        view = View(open_from(arguments, path), user_code=user_code_from(arguments))
    except TraceError as error:
        return str(error)
    summary = kept_as_rank(arguments, path, lambda: rank_summary(view)) or rank_summary(view)
    if arguments.rank not in (None, view.trace.metadata.rank):
        return summary, None
    experiment = view.experiment
    try:
        changes = _changes(arguments, view, Tried())
        if not changes:
            return summary, None
        change = together(*(each.change for each in changes))
        done = experiment.run(change(experiment, experiment.graph)).replay
    except UsageError:  # a rule may find something on one rank only
        return summary, None
    return summary, saved_between(experiment, view.met, experiment.measured, done)


def _changes(arguments: argparse.Namespace, view: View, tried: Tried) -> list[NamedChange]:
    """The changes that the options ask for, each named by its option.

    Raises:
        UsageError: an unknown cause or rule, or a rule that finds nothing or whose saving cannot be replayed.
    """
    from stepscope.whatif.answer import NamedChange

    return [NamedChange(name, change) for name, change in _named_changes(arguments, view, tried)]


def _named_changes(arguments: argparse.Namespace, view: View, tried: Tried) -> Iterator[tuple[str, Change]]:
    from stepscope.whatif import answer, changes

    for name in arguments.remove:
        if name not in tried.changes:
            tried.changes[name] = _without(name, view)
        yield f"--remove {name}", tried.changes[name]
    for pattern, factor in arguments.scale:
        yield f"--scale {pattern}={factor:g}", changes.scaled(pattern, factor)
    if arguments.launch_overhead is not None:
        ns = round(arguments.launch_overhead)
        unit = next(unit for unit in ("s", "ms", "us", "ns") if ns % NANOSECONDS[unit] == 0 and (ns or unit == "ns"))
        yield f"--launch-overhead {ns // NANOSECONDS[unit]}{unit}", changes.launch_overhead(ns)
    if arguments.graphs:
        yield "--graphs", answer.graphs()
    if arguments.overlap:
        yield f"--overlap {arguments.overlap}", answer.overlap_communication()
    if arguments.bucket_size is not None:
        yield f"--bucket-size {arguments.bucket_size:g}", answer.bucket_size(arguments.bucket_size)
    if arguments.loader_workers is not None:
        yield f"--loader-workers {arguments.loader_workers}", answer.loader_workers(arguments.loader_workers)
    if arguments.sync_every is not None:
        yield f"--sync-every {arguments.sync_every}", changes.synchronise_every(arguments.sync_every)


def _without(name: str, view: View) -> Change:
    from stepscope.analysis.host import CAUSES
    from stepscope.diagnosis.rules import RULES
    from stepscope.whatif.changes import without_cause

    causes = (*CAUSES, "compute")
    if name in causes:
        return without_cause(name)
    rules = [rule.id for rule in RULES]
    if name not in rules:
        guess = suggestion(name, [*causes, *rules])
        listed = guess or f"; the causes are {', '.join(causes)}, and stepscope rules lists the rules"
        raise UsageError(f"there is no cause or rule {name!r}{listed}")
    return _fixed(name, view)


class _FindsNothing(UsageError):
    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"the rule {rule} finds nothing to fix in this trace{why}")
        self.rule, self.why = rule, why


def _fixed(name: str, view: View) -> Change:
    from stepscope.whatif.changes import together

    result = rule_named(name).ask(view)
    found = [finding for finding in result.findings if finding.severity != "note"]
    if not found:
        unanswered = next((f": {each.why}" for each in result.not_answered), "")
        raise _FindsNothing(name, unanswered.rstrip("."))
    changes = [finding.change for finding in found if finding.change is not None]
    if changes:
        return together(*changes)
    why = view.experiment.why_not or "no change of the recorded steps expresses its remedy"
    raise UsageError(
        f"the saving of fixing {name} cannot be replayed: {why}; stepscope diagnose --rule {name} gives the time that "
        "it took"
    )


COMMAND: Final = Command(
    "whatif",
    "Replay the steps with something different: how long they would take, and what limits them then.",
    _prepare_parser,
    _run,
    """\
examples:
  stepscope whatif trace.json                                what the steps wait for, and what each cause costs
  stepscope whatif trace.json --remove input                 if there were no waits for batches
  stepscope whatif trace.json --remove host-synchronisation --scale 'aten::mm=0.5'
  stepscope whatif trace.json --launch-overhead 2us --sync-every 10
  stepscope whatif traces/ --remove input --rank 3           if one rank of a job had none: what all of them save
  stepscope whatif trace.json --curve lines                  which line is worth making faster
  stepscope whatif trace.json --critical-path --slack --json answer.json

In the replay, everything begins when what it waited for is done. docs/whatif.md explains how, and when not to believe
it.""",
    only_reads=True,
)
