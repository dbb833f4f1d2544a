"""`stepscope predict`: the recorded steps on other hardware; `stepscope plan`: where to train, and at what cost."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections import OrderedDict
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stepscope.commands.plan.devices import of_providers, price_store, provider_names
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    HOURS,
    RANKS,
    Command,
    CommandParser,
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_trace,
    number,
    whole,
    whole_list,
)
from stepscope.commands.shared.reading import open_from, readable, redactor_of, trace_paths
from stepscope.errors import TraceError, UsageError

if TYPE_CHECKING:
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.machine.devices import DevicePeaks
    from stepscope.predict.cost.plan import Known, Plan, Request
    from stepscope.predict.exchanges import Exchange
    from stepscope.predict.limits import Link
    from stepscope.predict.prediction import PredictedSteps, StepPrediction, StepPredictor
    from stepscope.predict.scaling import ScaledStep
    from stepscope.whatif.experiment import Experiment

USUAL: Final = (
    "T4", "L4", "A10", "L40S", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-PCIe", "H100-SXM", "H200-SXM", "B200-SXM",
    "MI300X",
)  # fmt: skip
"""Devices predicted if the user names none."""
_TOP: Final = 20
_HOW: Final = ("precision", "batch", "recorded_batch", "source", "host_factor")
"""Options that another predictor answers."""
_MOST_PREDICTORS: Final = 2
"""That stay for the next choice: one of another batch holds a copy of the trace's operators."""
_MOST_TARGETS: Final = 200
_batch = whole(1, 999_999_999, "batch size")
host_factor = number(
    "is not a factor on the host's time: write 0.8, at least 0.01, at most 100", least=0.01, most=100.0
)


def _prepare_predict_parser(parser: CommandParser) -> None:
    add_trace(parser, RANKS)
    parser.add_argument(
        "--to", metavar="DEVICES", help="devices separated by commas, or all; stepscope devices lists them"
    )
    add_prediction_options(parser)
    group = parser.add_argument_group("several devices that share the work, as data-parallel training does")
    group.add_argument(
        "--devices",
        metavar="NUMBERS",
        type=whole_list("numbers of devices", most=99_999, longest=32),
        help="numbers of each device of --to, or of the recorded one: 1,2,4,8",
    )
    group.add_argument(
        "--link",
        metavar="LINK",
        help="their link: nvlink4, pcie4, ethernet-100, or a bandwidth in one direction, 12GB/s or, with the "
        "latency of each hop, 12GB/s+5us (default: their own)",
    )
    add_top_option(parser, f"devices, 0 for all ({_TOP})", _TOP)
    add_report_options(parser, json="for programs; - for standard output")
    add_redact_option(parser)
    add_reading_options(parser)


def add_prediction_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--precision", metavar="TYPE", help="the number type to compute in: fp32, tf32, fp16, bf16, fp8"
    )
    parser.add_argument("--batch", metavar="N", type=_batch, help="another batch size for each device")
    parser.add_argument(
        "--recorded-batch", metavar="M", type=_batch, help="the recorded batch size, if the trace does not contain it"
    )
    parser.add_argument(
        "--from", metavar="DEVICE", dest="source", help="the recorded device, if the trace does not name it"
    )
    parser.add_argument(
        "--host-factor",
        metavar="FACTOR",
        type=host_factor,
        default=1.0,
        help="the host's time there over its recorded time, such as 0.8 for a faster processor (1)",
    )


def _run_predict(arguments: argparse.Namespace) -> int:
    from stepscope.report.document import Document
    from stepscope.report.predict import predict_document, scaling_section

    answer, scaled = prediction_of(arguments, opened(arguments))
    if arguments.redact:
        answer = _redacted(answer, arguments)

    def document() -> Document:
        sections = tuple(scaling_section(*each) for each in scaled)
        if scaled and not answer.predictions:
            return Document("prediction", sections)
        return predict_document(answer, sections, top=arguments.top)

    output.write_reports(arguments, document, json=lambda: prediction_json(answer, scaled))
    return 0


def _redacted(answer: PredictedSteps, arguments: argparse.Namespace) -> PredictedSteps:
    redactor = redactor_of(arguments, paths=[answer.path, *(each.path for each in answer.unreadable)])
    parts = {name: redactor.value(name, getattr(answer, name)) for name in ("path", "warnings", "unreadable")}
    return dataclasses.replace(answer, **parts)


def prediction_of(arguments: argparse.Namespace, basis: Basis) -> tuple[PredictedSteps, Sequence[ScaledDevice]]:
    """The steps on the devices that the options name, and on several of each.

    Raises:
        UsageError: an unknown device or link, or a trace that does not say what devices exchange.
    """
    from stepscope.predict.prediction import predicted_steps

    targets = devices_named(arguments.to) if arguments.to is not None or arguments.devices is None else ()
    predictor, _ = basis.predictor(arguments)
    answer = predicted_steps(predictor, _over_links(arguments, basis.experiment, targets))
    scaled = _scaled_devices(arguments, basis, answer)
    missing = () if arguments.devices is None else basis.unreadable  # the other ranks are not asked
    return dataclasses.replace(answer, unreadable=missing), scaled


def prediction_json(answer: PredictedSteps, scaled: Sequence[ScaledDevice]) -> dict[str, Any]:
    from stepscope.report.predict import predict_json, scaling_json

    return predict_json(answer) | {"scaling": [scaling_json(*each) for each in scaled]}


def predictor_of(arguments: argparse.Namespace, experiment: Experiment) -> StepPredictor:
    """Build the predictor from the options of `add_prediction_options`."""
    from stepscope.machine.devices import named_device
    from stepscope.predict.prediction import StepPredictor

    return StepPredictor(
        experiment,
        precision=arguments.precision,
        batch=arguments.batch,
        recorded_batch=arguments.recorded_batch,
        source=None if arguments.source is None else named_device(arguments.source),
        host_factor=arguments.host_factor,
        sampled_memory_bytes=_sampled_memory(experiment),
    )


def _sampled_memory(experiment: Experiment) -> int | None:
    """Memory in use on the experiment's busiest device, in bytes, from the telemetry beside the trace."""
    from stepscope.predict.batch import sampled_memory
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    place = Path(experiment.trace.metadata.path)
    files = [file for file in telemetry_files(place) if file != place]  # Nsight Systems exports share the suffix
    try:
        return sampled_memory(read_telemetry(files), experiment.device) if files else None
    except UsageError:
        return None


def devices_named(text: str | None) -> tuple[DevicePeaks, ...]:
    """The devices of `--to`, each once.

    Raises:
        UsageError: a name that the table does not know, or no name.
    """
    from stepscope.machine.devices import device_table, named_device

    if text is None:
        table = {row.name: row for row in device_table()}
        return tuple(table[name] for name in USUAL if name in table)
    if text.strip().lower() == "all":
        return device_table()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(names) > _MOST_TARGETS:
        problem = "names no device" if not names else f"names {len(names)} devices, more than {_MOST_TARGETS}"
        raise UsageError(f"--to {problem}: write H100-SXM,L4 or all; stepscope devices lists them")
    return tuple({row.name: row for row in map(named_device, names)}.values())


def _over_links(
    arguments: argparse.Namespace, experiment: Experiment, targets: Sequence[DevicePeaks]
) -> tuple[DevicePeaks, ...]:
    """The devices of --to; with --devices, joined by the link of --link, by their own, or else by the recorded one.

    Raises:
        UsageError: a device does not have the link of --link.
    """
    from stepscope.predict.limits import check_link
    from stepscope.predict.limits import link_of as own_link_of
    from stepscope.predict.scaling import over_link

    if arguments.devices is None:
        return tuple(targets)
    link, recorded = link_of(arguments), _recorded_device(arguments, experiment)
    for each in targets or ((recorded,) if recorded is not None else ()):
        if link is not None:
            check_link(link, each)
    return tuple(over_link(each, link or own_link_of(each), recorded) for each in targets)


def _recorded_device(arguments: argparse.Namespace, experiment: Experiment) -> DevicePeaks | None:
    from stepscope.analysis.roofline import device_peaks
    from stepscope.machine.devices import named_device

    if arguments.source is not None:
        return named_device(arguments.source)
    return device_peaks(experiment.trace, experiment.device or "")


def link_of(arguments: argparse.Namespace) -> Link | None:
    from stepscope.predict.limits import named_link

    return None if arguments.link is None else named_link(arguments.link)


class ScaledDevice(NamedTuple):
    """The predicted steps on several of one device.

    Attributes:
        device: its name; "" if unknown.
        link: the link over which the devices exchange gradients.
        steps: one for each number of devices.
    """

    device: str
    link: Link | None
    steps: tuple[ScaledStep, ...]


def _scaled_devices(arguments: argparse.Namespace, basis: Basis, answer: PredictedSteps) -> list[ScaledDevice]:
    """The steps on several of each predicted device, or of the recorded one; empty without --devices.

    Raises:
        UsageError: a link without devices, an unknown link, or a trace that does not say what devices exchange.
    """
    from stepscope.predict.limits import link_of as own_link_of
    from stepscope.predict.scaling import Scaling

    if arguments.devices is None:
        if arguments.link is not None:
            raise UsageError("--link needs a number of devices, such as --devices 1,2,4,8")
        return []
    link = link_of(arguments)
    targets = answer.predictions
    known: list[StepPrediction | None] = [each for each in targets if each.step_ns is not None]
    if targets and not known:
        why = f": {targets[0].notes[-1]}" if targets[0].notes else ""
        raise UsageError(f"none of these devices has a step time, so several of them have none either{why}")
    recorded = _recorded_device(arguments, basis.experiment)
    exchange = basis.exchange()
    shown = exchange.link
    numbers = tuple(dict.fromkeys(arguments.devices))
    scaled = []
    for each in known or [None]:
        device = recorded if each is None else each.device
        is_shown = shown is not None and (each is None or (recorded is not None and each.device.name == recorded.name))
        joined = link or (None if device is None or is_shown else own_link_of(device))
        scaling = Scaling(exchange, joined, each)
        steps = tuple(map(scaling.step, numbers))
        name = each.device.name if each is not None else answer.device or ""
        scaled.append(ScaledDevice(name, joined or shown, steps))
    return scaled


class Basis:
    """A trace that is predicted from, and the same steps on other ranks; what one choice found serves the next.

    Args:
        arguments: with the options of reading.
        unreadable: files of ranks that are known not to be readable.
    """

    def __init__(
        self, arguments: argparse.Namespace, experiment: Experiment, unreadable: Sequence[Unreadable] = ()
    ) -> None:
        self.experiment = experiment
        self._unreadable = list(unreadable)
        self._arguments = arguments
        self._predictors: OrderedDict[tuple[object, ...], tuple[StepPredictor, Known]] = OrderedDict()

    def predictor(self, arguments: argparse.Namespace) -> tuple[StepPredictor, Known]:
        """The predictor of these options, and what plans with it found."""
        from stepscope.predict.cost.plan import Known

        key = tuple(getattr(arguments, name) for name in _HOW)
        if key not in self._predictors:
            self._predictors[key] = predictor_of(arguments, self.experiment), Known(self.exchange)
        self._predictors.move_to_end(key)
        while len(self._predictors) > _MOST_PREDICTORS:
            self._predictors.popitem(last=False)
        return self._predictors[key]

    def exchange(self) -> Exchange:
        """What several devices exchange in a step.

        Raises:
            UsageError: the trace does not show it.
        """
        if isinstance(self._exchange, str):
            raise UsageError(self._exchange)
        return self._exchange

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """Files of ranks that could not be read."""
        if self._files:
            _ = self._exchange  # reads them
        return tuple(self._unreadable)

    @cached_property
    def _exchange(self) -> Exchange | str:
        from stepscope.predict.scaling import exchange_of

        try:
            return exchange_of(self.experiment, self._other_ranks())
        except UsageError as error:
            return str(error)

    def _other_ranks(self) -> list[Experiment]:
        """The same steps on the other ranks, if the argument names several and not too many."""
        from stepscope.whatif.experiment import Experiment

        known = (self.experiment.trace.metadata.path, *(each.path for each in self._unreadable))
        others = [file for file in self._files if os.path.realpath(file) not in map(os.path.realpath, known)]
        found = (readable(self._arguments, file, self._unreadable) for file in others)
        return [Experiment(trace) for trace in found if trace is not None]

    @cached_property
    def _files(self) -> list[Path]:
        from stepscope.whatif.experiment import MOST_RANKS

        files = trace_paths(self._arguments.trace) if self._arguments.trace != "-" else []
        return files if 1 < len(files) <= MOST_RANKS else []


def opened(arguments: argparse.Namespace) -> Basis:
    """The trace that the arguments name; of several, the first that can be read.

    Raises:
        TraceError: none can be read.
    """
    from stepscope.whatif.experiment import Experiment

    unreadable: list[Unreadable] = []
    try:
        trace = open_from(arguments, arguments.trace)
    except TraceError:
        files = trace_paths(arguments.trace) if arguments.trace != "-" else []
        found = (readable(arguments, file, unreadable) for file in files) if len(files) > 1 else iter(())
        first = next((trace for trace in found if trace is not None), None)
        if first is None:
            raise
        trace = first
    return Basis(arguments, Experiment(trace), unreadable)


PREDICT: Final = Command(
    "predict",
    "How long the recorded steps would take on other hardware, how certain that is, and what limits them there.",
    _prepare_predict_parser,
    _run_predict,
    """\
examples:
  stepscope predict trace.json                               on the usual devices
  stepscope predict trace.json --to H100-SXM,L4,MI300X
  stepscope predict trace.json --to all --precision bf16     on every device in the table (stepscope devices)
  stepscope predict trace.json --to H100-SXM --batch 256     with another batch size
  stepscope predict trace.json --to L4 --host-factor 0.8     with a processor that takes a fifth less time
  stepscope predict report.sqlite --from A100-SXM4-80GB      if the trace does not name its device
  stepscope predict trace.json --to H100-SXM --devices 1,2,4,8 --link nvlink4
  stepscope predict trace.json --to H100-SXM --json -

The device's work is predicted; the host's part stays as measured. docs/predict.md explains how, and when not to
believe it. A language model without a trace: stepscope serving config.json --to H100-SXM.""",
)


_LONGEST_H: Final = 24.0 * 366 * 100
iterations = number("is not a number of iterations: write 4e6 or 4000000, at most 1e15", least=1, most=1e15)
hours = number("is not a time that can be planned: write 12h, 90min or 2d", HOURS, above=0, most=_LONGEST_H)
counts = whole_list("numbers of accelerators", most=9999, longest=64)
_dollars = number(
    "is not a budget: write an amount of US dollars, such as 500", {"": 1, "USD": 1, "usd": 1}, above=0, most=1e12
)


def budget(text: str) -> float:
    """Parse US dollars: 500, $500 or 1,200.50."""
    return _dollars(text.strip().removeprefix("$"))


def _prepare_plan_parser(parser: CommandParser) -> None:
    add_trace(parser, RANKS)
    parser.add_argument(
        "--iterations", metavar="N", type=iterations, required=True, help="number of training steps, such as 4e6"
    )
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument("--deadline", metavar="TIME", type=hours, help="time limit, such as 12h, 90min or 2d")
    wanted.add_argument("--budget", metavar="USD", type=budget, help="what it may cost, such as 500")
    wanted.add_argument("--providers", metavar="A,B", type=provider_names, help="only these providers' machines")
    wanted.add_argument(
        "--gpus", metavar="N,N", type=counts, help="only machines with these numbers of accelerators, such as 1,2,4,8"
    )
    wanted.add_argument(
        "--spot", action="store_true", help="at spot prices: cheaper, but the machine can be taken back at any time"
    )
    how = parser.add_argument_group("how it would run")
    add_prediction_options(how)
    how.add_argument(
        "--link",
        metavar="LINK",
        help="the link between a machine's devices, such as nvlink4 or 12GB/s (default: its own)",
    )
    reports = parser.add_argument_group("reports (- writes to standard output)")
    add_report_options(reports, json="for programs", html="one page that needs nothing else, with a plot")
    add_top_option(reports, f"machines, 0 for all ({_TOP})", _TOP)
    add_redact_option(reports)
    add_reading_options(parser)


def _run_plan(arguments: argparse.Namespace) -> int:
    from stepscope.report.plan import plan_document, plan_json

    plan = plan_of(arguments, opened(arguments))
    if arguments.redact:
        plan = dataclasses.replace(plan, recorded=_redacted(plan.recorded, arguments))

    output.write_reports(arguments, lambda: plan_document(plan), top=arguments.top, json=lambda: plan_json(plan))
    return 0


def plan_of(arguments: argparse.Namespace, basis: Basis) -> Plan:
    """Where the recorded training could run, as the options say.

    Raises:
        UsageError: no machine is meant, or no price is known.
    """
    from stepscope.predict.cost.plan import make_plan

    request = _request(arguments)
    prices = of_providers(price_store().known(), arguments.providers)
    if request.counts is not None and not any(price.count in request.counts for price in prices):
        there = ", ".join(map(str, sorted({price.count for price in prices})))
        raise UsageError(f"no machine with --gpus {','.join(map(str, request.counts))} has a price; there are {there}")
    predictor, known = basis.predictor(arguments)
    plan = make_plan(predictor, prices, request, today=date.today(), known=known)
    recorded = dataclasses.replace(plan.recorded, unreadable=basis.unreadable)
    return dataclasses.replace(plan, recorded=recorded)


def _request(arguments: argparse.Namespace) -> Request:
    from stepscope.predict.cost.plan import Request

    return Request(
        iterations=arguments.iterations,
        counts=None if arguments.gpus is None else tuple(sorted(set(arguments.gpus))),
        spot=arguments.spot,
        deadline_h=arguments.deadline,
        budget_usd=arguments.budget,
        link=link_of(arguments),
    )


PLAN: Final = Command(
    "plan",
    "Where a whole training could run, how long it would take there and what it would cost.",
    _prepare_plan_parser,
    _run_plan,
    """\
An iteration is a step as it was recorded. On several devices each works on a batch as large as the recorded one, so
the same samples take fewer steps; their length is predicted, not divided.

examples:
  stepscope plan trace.json --iterations 4e6
  stepscope plan trace.json --iterations 4e6 --deadline 12h --budget 500
  stepscope plan trace.json --iterations 4e6 --spot --gpus 1,2 --providers lambda,runpod
  stepscope plan trace.json --iterations 4e6 --precision bf16 --html plan.html

stepscope prices lists the prices and imports others. docs/plan.md has the formulas, and what is not counted.""",
)
