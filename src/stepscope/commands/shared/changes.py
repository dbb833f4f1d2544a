"""What could be different in a step, from the command line: each option becomes a change to replay the trace with."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stepscope.commands.read.explain import rule_named
from stepscope.commands.record.run import at_least
from stepscope.commands.shared.output import suggestion
from stepscope.commands.shared.reading import open_from, trace_paths
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.view import View
    from stepscope.machine.own_devices import DevicePeaks
    from stepscope.predict.links import Link
    from stepscope.predict.prediction import StepPrediction
    from stepscope.predict.scaling import ScaledStep
    from stepscope.whatif import Change
    from stepscope.whatif.answer import NamedChange
    from stepscope.whatif.experiment import Experiment


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
    from stepscope.analysis.host import CAUSES
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


_MOST_NUMBERS = 32


class ScaledDevice(NamedTuple):
    """What the steps take on several of one device.

    Attributes:
        device: its name; "" where that is not known.
        link: over which they exchange gradients.
        steps: one for each number of devices.
    """

    device: str
    link: Link | None
    steps: tuple[ScaledStep, ...]


def add_scaling_options(parser: argparse.ArgumentParser) -> None:
    """--devices and --link."""
    group = parser.add_argument_group("several devices that share the work, as data-parallel training does")
    group.add_argument(
        "--devices",
        metavar="NUMBERS",
        type=numbers_of_devices,
        help="so many of each device of --to, or of the recorded one: 1,2,4,8",
    )
    group.add_argument(
        "--link",
        metavar="LINK",
        help="what joins them: nvlink4, pcie4, ethernet-100, or a bandwidth in one direction, 12GB/s or, with the "
        "latency of each hop, 12GB/s+5us; where several ranks were recorded, their own link",
    )


def numbers_of_devices(text: str) -> tuple[int, ...]:
    """Numbers of devices from the command line, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,4}", word) for word in words) or len(words) > _MOST_NUMBERS:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of devices: write 1,2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


def scaled_devices(
    arguments: argparse.Namespace, experiment: Experiment, recorded: str, targets: Sequence[StepPrediction]
) -> list[ScaledDevice]:
    """What the options ask for; nothing without --devices.

    Args:
        recorded: name of the recorded device, which counts where there are no targets.

    Raises:
        UsageError: a link without devices, an unknown link, or a trace that does not tell what devices exchange.
    """
    from stepscope.predict.links import named_link
    from stepscope.predict.scaling import data_parallel, exchange_of

    if arguments.devices is None:
        if arguments.link is not None:
            raise UsageError("--link joins devices: say how many, --devices 1,2,4,8")
        return []
    link = None if arguments.link is None else named_link(arguments.link)
    others = other_ranks(arguments)
    known: list[StepPrediction | None] = [each for each in targets if each.step_ns is not None]
    if targets and not known:
        why = f": {targets[0].notes[-1]}" if targets[0].notes else ""
        raise UsageError(f"for none of these devices a step time is given, so neither for several of them{why}")
    used = link or exchange_of(experiment, others).link
    return [
        ScaledDevice(
            each.device.name if each is not None else recorded,
            used,
            data_parallel(experiment, arguments.devices, link, target=each, others=others),
        )
        for each in known or [None]
    ]


def joined(
    arguments: argparse.Namespace, experiment: Experiment, targets: Sequence[DevicePeaks]
) -> tuple[DevicePeaks, ...]:
    """The devices of --to, where there are several of each joined as --link says, or else as they were recorded."""
    from stepscope.analysis.roofline import device_peaks
    from stepscope.machine.devices import named_device
    from stepscope.predict.links import named_link
    from stepscope.predict.scaling import over_link

    if arguments.devices is None:
        return tuple(targets)
    link = None if arguments.link is None else named_link(arguments.link)
    known = device_peaks(experiment.trace, experiment.device or "")
    recorded = named_device(arguments.source) if arguments.source is not None else known
    return tuple(over_link(each, link, recorded) for each in targets)


def other_ranks(arguments: argparse.Namespace) -> list[Experiment]:
    """The same steps of other ranks, where the word stands for several."""
    from stepscope.whatif.experiment import MOST_RANKS, Experiment

    paths = trace_paths(arguments.trace) if arguments.trace != "-" else []
    if not 1 < len(paths) <= MOST_RANKS:
        return []
    return [Experiment(open_from(arguments, path)) for path in paths[1:]]


def scaling_json_of(scaled: Sequence[ScaledDevice]) -> list[dict[str, Any]]:
    """All of them for programs."""
    from stepscope.report.predict import scaling_json

    return [scaling_json(*each) for each in scaled]
