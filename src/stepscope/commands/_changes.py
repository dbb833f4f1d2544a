"""What could be different in a step, from the command line: each option becomes a change to replay the trace with."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Final

from stepscope.commands._parser import suggestion
from stepscope.commands.explain import rule_named
from stepscope.commands.run import at_least
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.view import View
    from stepscope.whatif import Change
    from stepscope.whatif.answer import NamedChange

_TIMES: Final = {"": 1, "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_LONGEST_NS: Final = 10_000_000_000
_LARGEST_FACTOR: Final = 1_000_000.0


def add_change_options(parser: argparse.ArgumentParser) -> None:
    """Everything that can be changed."""
    group = parser.add_argument_group("changes, combined as wanted; without any, what each cause costs")
    group.add_argument(
        "--remove",
        metavar="CAUSE|RULE",
        action="append",
        default=[],
        help="no time for this cause, such as input, or what this rule found were mended; may be repeated",
    )
    group.add_argument(
        "--scale",
        metavar="PATTERN=FACTOR",
        type=parsed_scale,
        action="append",
        default=[],
        help="operators, kernels and modules of this name (* and ? as in file names), or FILE:LINE, take so many times "
        "as long: 'aten::mm=0.5' is half the time; may be repeated",
    )
    group.add_argument("--launch-overhead", metavar="TIME", type=parsed_time, help="each launch call lasts 2us, 500ns")
    group.add_argument("--graphs", action="store_true", help="one launch a step: its kernels as a recorded graph")
    group.add_argument("--overlap", choices=("communication",), help="communication runs beside all computation")
    group.add_argument(
        "--bucket-size", metavar="MB", type=parsed_megabytes, help="gradients are sent in buckets of this size"
    )
    group.add_argument(
        "--loader-workers", metavar="N", type=at_least(0), help="so many processes load batches ahead; 0 for none"
    )
    group.add_argument(
        "--sync-every", metavar="N", type=at_least(1), help="the host waits for the device in every N-th step only"
    )


def changes_from(arguments: argparse.Namespace, view: View) -> list[NamedChange]:
    """The changes that the options ask for, each named by its option.

    Raises:
        UsageError: an unknown cause or rule, or a rule that finds nothing or whose saving cannot be replayed.
    """
    from stepscope.whatif import changes
    from stepscope.whatif.answer import NamedChange

    found = [(f"--remove {name}", _without(name, view)) for name in arguments.remove]
    found += [(f"--scale {pattern}={factor:g}", changes.scaled(pattern, factor)) for pattern, factor in arguments.scale]
    if arguments.launch_overhead is not None:
        ns = arguments.launch_overhead
        unit = next(unit for unit in ("s", "ms", "us", "ns") if ns % _TIMES[unit] == 0 and (ns or unit == "ns"))
        found.append((f"--launch-overhead {ns // _TIMES[unit]}{unit}", changes.launch_overhead(ns)))
    found += _scenarios(arguments)
    if arguments.sync_every is not None:
        found.append((f"--sync-every {arguments.sync_every}", changes.synchronise_every(arguments.sync_every)))
    return [NamedChange(name, change) for name, change in found]


def _scenarios(arguments: argparse.Namespace) -> list[tuple[str, Change]]:
    from stepscope.whatif import scenarios

    found = []
    if arguments.graphs:
        found.append(("--graphs", scenarios.graphs()))
    if arguments.overlap:
        found.append((f"--overlap {arguments.overlap}", scenarios.overlap_communication()))
    if arguments.bucket_size is not None:
        found.append((f"--bucket-size {arguments.bucket_size:g}", scenarios.bucket_size(arguments.bucket_size)))
    if arguments.loader_workers is not None:
        number = arguments.loader_workers
        found.append((f"--loader-workers {number}", scenarios.loader_workers(number)))
    return found


def parsed_scale(text: str) -> tuple[str, float]:
    """("aten::mm", 0.5) from "aten::mm=0.5"; the last = counts, for names may hold some."""
    pattern, equals, number = text.rpartition("=")
    if not equals or not pattern.strip():
        raise argparse.ArgumentTypeError(f"{text!r} scales nothing: write PATTERN=FACTOR, such as 'aten::mm=0.5'")
    factor = _number(number)
    if factor is None or not 0 <= factor <= _LARGEST_FACTOR:
        raise argparse.ArgumentTypeError(
            f"{number!r} is no factor from 0 to {_LARGEST_FACTOR:,.0f}: 0.5 is half the time, 2 is twice the time"
        )
    return pattern.strip(), factor


def parsed_time(text: str) -> int:
    """Nanoseconds from "2us", "500ns" or plain nanoseconds."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*(|ns|us|ms|s)\s*", text, re.ASCII)
    ns = float(match[1]) * _TIMES[match[2]] if match else math.inf
    if ns > _LONGEST_NS:
        raise argparse.ArgumentTypeError(f"{text!r} is no time of at most 10 s: write 2us, 500ns or nanoseconds")
    return round(ns)


def parsed_megabytes(text: str) -> float:
    """A size in megabytes, above 0."""
    size = _number(text)
    if size is None or not 0 < size <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in megabytes: write a number above 0, such as 25")
    return size


def _number(text: str) -> float | None:
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:e(-?\d{1,2}))?\s*", text, re.ASCII)
    return float(text) if match else None


def _without(name: str, view: View) -> Change:
    from stepscope.analysis.causes import CAUSES
    from stepscope.diagnosis.rules import RULES
    from stepscope.whatif.changes import without_cause

    causes = (*CAUSES, "compute")
    if name in causes:
        return without_cause(name)
    rules = [rule.ID for rule in RULES]
    if name not in rules:
        guess = suggestion(name, [*causes, *rules])
        listed = guess or f"; the causes are {', '.join(causes)}, and stepscope rules lists the rules"
        raise UsageError(f"there is no cause or rule {name!r}{listed}")
    return _mended(name, view)


def _mended(name: str, view: View) -> Change:
    """What would be different if everything that the rule finds were mended."""
    from stepscope.whatif.changes import together

    result = rule_named(name).check(view)
    found = [finding for finding in result.findings if finding.severity != "note"]
    if not found:
        unanswered = next((f": {each.why}" for each in result.not_answered), "")
        raise UsageError(f"the rule {name} finds nothing to mend in this trace{unanswered}".rstrip("."))
    changes = [finding.change for finding in found if finding.change is not None]
    if changes:
        return together(*changes)
    why = view.experiment.why_not or "no change of the recorded steps stands for its remedy"
    raise UsageError(
        f"what mending {name} saves cannot be replayed: {why}; stepscope diagnose --rule {name} gives the time that "
        "it took"
    )
