"""Several devices that share the work, on the command line of `stepscope predict`: --devices and --link."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.commands._reading import open_from, trace_paths
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.devices import DevicePeaks
    from stepscope.predict.links import Link
    from stepscope.predict.prediction import StepPrediction
    from stepscope.predict.scaling import ScaledStep
    from stepscope.whatif.experiment import Experiment

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
    from stepscope.devices import named_device
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
    from stepscope.whatif.experiment import Experiment
    from stepscope.whatif.ranks import MOST_RANKS

    paths = trace_paths(arguments.trace) if arguments.trace != "-" else []
    if not 1 < len(paths) <= MOST_RANKS:
        return []
    return [Experiment(open_from(arguments, path)) for path in paths[1:]]


def scaling_text_of(scaled: Sequence[ScaledDevice], width: int) -> list[str]:
    """Each of them for a terminal."""
    from stepscope.report.scaling_text import scaling_text

    return [scaling_text(*each, width=width) for each in scaled]


def scaling_json_of(scaled: Sequence[ScaledDevice]) -> list[dict[str, Any]]:
    """All of them for programs."""
    from stepscope.report.scaling_text import scaling_json

    return [scaling_json(*each) for each in scaled]
