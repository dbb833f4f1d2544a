"""Machines on which a whole training run could take place, with time and cost on each.

    steps = iterations x recorded devices / devices / how many times as large the batch is
    energy = steps x devices x energy of a device's step

Each device works on the recorded batch, so several need fewer steps for the same samples. The step time on several
comes from `stepscope.predict.scaling`, never from division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Final

import polars as pl

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks, device_table
from stepscope.predict.batch import recorded_batch
from stepscope.predict.cost.energy_parts import J_PER_KWH, emitted_kg, grid_of, step_energy
from stepscope.predict.cost.prices import Price, unpriced_devices
from stepscope.predict.exchanges import Exchange
from stepscope.predict.limits import Link, check_link, link_of, link_table
from stepscope.predict.prediction import PredictedSteps, StepPrediction, StepPredictor, predicted_steps
from stepscope.predict.scaling import ScaledStep, Scaling, exchange_of, over_link

NS_PER_HOUR: Final = 3.6e12
HOST_LIMITS: Final = ("host", "input")  # limits that a faster accelerator does not relieve
_MUCH: Final = 0.5  # least share of a step for messages and waiting for the slowest device to limit it
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Request:
    """Work to plan for."""

    iterations: float  # of the recorded steps, each with the samples of one step on all recorded devices
    counts: tuple[int, ...] | None = None  # allowed numbers of accelerators per machine; None for any
    spot: bool = False  # whether to use spot prices
    deadline_h: float | None = None
    budget_usd: float | None = None  # deadline_h, budget_usd: limits on time and cost; None for no limit
    link: Link | None = None  # interconnect of the accelerators of every machine, instead of its own


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that could do the work.

    Attributes:
        step_ns, step_low_ns, step_high_ns: step time on all of its devices, with bounds.
    """

    price: Price  # with its date
    prediction: StepPrediction  # for a single one of its devices
    scaled: ScaledStep | None  # step on all of its devices; None where a single device does the work
    step_ns: float
    step_low_ns: float
    step_high_ns: float
    steps: float  # number of such steps needed
    usd_h: float
    kwh: Range | None = None  # bounds of its accelerators' energy; None where no estimate is possible
    kilograms: Range | None = None  # CO2 equivalents of that energy; None without an estimate or a known region
    on_front: bool = False  # on the Pareto front: no other machine is cheaper without being slower

    @property
    def hours(self) -> float:
        return self.steps * self.step_ns / NS_PER_HOUR

    @property
    def hours_low(self) -> float:
        return self.steps * self.step_low_ns / NS_PER_HOUR

    @property
    def hours_high(self) -> float:
        return self.steps * self.step_high_ns / NS_PER_HOUR

    @property
    def usd(self) -> float:
        return self.hours * self.usd_h

    @property
    def usd_low(self) -> float:
        return self.hours_low * self.usd_h

    @property
    def usd_high(self) -> float:
        return self.hours_high * self.usd_h

    @property
    def limit(self) -> str | None:
        """Limit of the step; None where unknown.

        It is the prediction's limit, unless communication limits the step on this number of devices.
        """
        if self.scaled is None:
            return self.prediction.limit
        waits = self.scaled.exposed_ns + self.scaled.straggler_ns
        if waits > _MUCH * self.step_ns:
            return "communication"
        return None if self.prediction.limit == "communication" else self.prediction.limit

    @property
    def is_limited_by_host(self) -> bool:
        """Whether a faster accelerator would leave the step as long."""
        return self.limit in HOST_LIMITS


@dataclass(frozen=True, slots=True)
class Refused:
    """Number of machines left out of the plan for one reason."""

    what: str
    reason: str
    machines: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Machines that could do the work, the cheapest first.

    Attributes:
        recorded_samples: samples of a recorded step on one device; None where unknown, or where a step has several
            batches.
        recorded_batch, batch: samples of a batch on one device, as recorded and as planned; None where unknown.
    """

    recorded: PredictedSteps
    request: Request
    recorded_devices: int  # number of devices that a recorded iteration ran on
    recorded_batch: int | None
    batch: int | None
    batch_factor: float  # planned batch over the recorded one
    today: date  # date from which ages of prices count
    machines: tuple[Machine, ...]  # with prices and predictions
    refused: tuple[Refused, ...] = ()  # machines left out, by reason
    without_price: tuple[str, ...] = ()  # devices of the table without a known price
    notes: tuple[str, ...] = ()  # assumptions of the predictions and what they could not count, each once
    recorded_samples: int | None = None

    @property
    def front(self) -> tuple[Machine, ...]:
        """Machines on the Pareto front of time and cost, the cheapest first."""
        return tuple(machine for machine in self.machines if machine.on_front)

    def meets(self, machine: Machine) -> bool:
        deadline, budget = self.request.deadline_h, self.request.budget_usd
        return (deadline is None or machine.hours <= deadline) and (budget is None or machine.usd <= budget)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point dominates (lower in one value, not higher in the other).

    The front begins with the least first value; of equal points all are on it.
    """
    order = sorted(range(len(points)), key=lambda at: points[at])
    front: list[int] = []
    for at in order:
        # In this order a point is dominated if and only if an earlier, different one is no worse in the second value.
        if not front or points[at][1] < points[front[-1]][1] or points[at] == points[front[-1]]:
            front.append(at)
    return front


_TRAINING: Final = r"(?i)backward|autograd|accumulategrad|optimizer|gradient|dgrad|wgrad"
_INDEPENDENT: Final = "nothing in the trace computes gradients: several devices are assumed to exchange nothing"
_DEVICE: Final = "\0"  # placeholder for the device's name in notes shared by several predictions


def make_plan(
    predictor: StepPredictor,
    prices: Sequence[Price],
    request: Request,
    *,
    today: date,
    known: Known | None = None,
) -> Plan:
    """Predict and price the work on every machine.

    Args:
        predictor: predictor of the recorded trace.
        prices: machine prices; of a machine offered in several regions the cheapest counts.
        known: what earlier plans of this predictor found, which serves again; new results are added.

    Raises:
        UsageError: nothing recorded takes time, or the number type is unknown.
    """
    recorded = predicted_steps(predictor, ())
    offered = _cheapest(prices, request.spot)
    known = known or Known(lambda: exchange_of(predictor.experiment))
    planner = _Planner(predictor, request, recorded.devices, known, offered)
    machines = [machine for price in offered for machine in planner.machines(price)]
    machines.sort(key=lambda each: (each.usd, each.hours, each.price.provider, each.price.instance))
    front = set(pareto_front([(each.hours, each.usd) for each in machines]))
    asked = [price for price in prices if request.counts is None or price.count in request.counts]
    before = recorded_batch(predictor.trace) if predictor.change is None else predictor.change.recorded
    return Plan(
        recorded=recorded,
        request=request,
        recorded_devices=planner.recorded_devices,
        recorded_samples=None if predictor.samples is None else before,
        recorded_batch=before,
        batch=predictor.batch,
        batch_factor=predictor.batch_factor,
        today=today,
        machines=tuple(replace(each, on_front=at in front) for at, each in enumerate(machines)),
        refused=tuple(Refused(what, why, len(which)) for (what, why), which in planner.refused.items()),
        without_price=tuple(unpriced_devices(asked, (row.name for row in device_table()))),
        notes=tuple(_notes(planner.notes)),
    )


class Known:
    """Steps on several devices, replayed once for all plans of a predictor.

    Args:
        exchange: finds what the devices exchange; may raise `UsageError`.
    """

    def __init__(self, exchange: Callable[[], Exchange]) -> None:
        self._exchange = exchange
        self._steps: dict[tuple[DevicePeaks, Link, int], ScaledStep] = {}

    def steps(self, prediction: StepPrediction, link: Link, numbers: Sequence[int]) -> dict[int, ScaledStep]:
        """The step on each of these numbers of devices; raises `UsageError` where it is unknown what they exchange."""
        device = prediction.device
        new = [number for number in numbers if (device, link, number) not in self._steps]
        if new:
            scaling = Scaling(self._exchange(), link, prediction)
            self._steps.update({(device, link, number): scaling.step(number) for number in new})
        return {number: self._steps[device, link, number] for number in numbers}


class _Planner:
    """State shared by the predictions for the machines of one plan."""

    def __init__(
        self,
        predictor: StepPredictor,
        request: Request,
        devices_of_trace: int,
        known: Known,
        offered: Sequence[Price],
    ) -> None:
        self.predictor, self.request, self._known = predictor, request, known
        self.recorded_devices = max(predictor.trace.metadata.world_size or 1, devices_of_trace, 1)
        self.devices = {row.name: row for row in device_table()}
        self.refused: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self.notes: dict[str, list[str]] = {}
        self._predictions: dict[tuple[str, float | None], StepPrediction] = {}
        self._counts: dict[str | None, set[int]] = {}
        for price in offered:
            if request.counts is None or price.count in request.counts:
                self._counts.setdefault(price.device, set()).add(price.count)
        self._scaled: dict[tuple[str, str, float | None], dict[int, ScaledStep] | str] = {}

    def machines(self, price: Price) -> Iterator[Machine]:
        counts, usd_h = self.request.counts, price.usd_h(spot=self.request.spot)
        if counts is not None and price.count not in counts:
            return
        if usd_h is None:
            known = "an on-demand" if self.request.spot else "a spot"
            self._refuse(price, "", f"only {known} price is known")
            return
        if price.device is None:
            self._refuse(price, price.gpu, "the device table lacks it, or has several devices of that name")
            return
        prediction = self._predicted(self._joined(price))
        if prediction.step_ns is None:
            why = prediction.notes[-1] if prediction.notes else "no step time is given"
            self._refuse(price, price.device, why.replace(f"the {price.device}", "it").replace(price.device, "it"))
            return
        if prediction.fits is False:
            self._refuse(price, price.device, "the step needs more memory than it has")
            return
        scaled = self._on_several(price, prediction)
        if isinstance(scaled, str):
            self._refuse(price, f"{price.count} x {price.device}", scaled)
            return
        yield self._machine(price, usd_h, prediction, scaled)

    def _machine(self, price: Price, usd_h: float, prediction: StepPrediction, scaled: ScaledStep | None) -> Machine:
        step = prediction if scaled is None else scaled
        assert step.step_ns is not None
        steps = self.request.iterations * self.recorded_devices / price.count / self.predictor.batch_factor
        kwh, kilograms = _energy(price, prediction, step.step_ns, steps)
        name = prediction.device.name
        for note in (*prediction.notes, *(scaled.notes if scaled is not None else ())):
            devices = self.notes.setdefault(note.replace(name, _DEVICE), [])
            if name not in devices:
                devices.append(name)
        return Machine(
            price=price,
            prediction=prediction,
            scaled=scaled,
            step_ns=step.step_ns,
            step_low_ns=step.step_ns if step.low_ns is None else step.low_ns,
            step_high_ns=step.step_ns if step.high_ns is None else step.high_ns,
            steps=steps,
            usd_h=usd_h,
            kwh=kwh,
            kilograms=kilograms,
        )

    def _joined(self, price: Price) -> DevicePeaks:
        """The machine's device with its interconnect, over which ranks exchange data."""
        device = self.devices[price.device or ""]
        link = self.request.link or _link_of(price, device)
        if self.recorded_devices == 1 or link is None:
            return device
        if price.count > 1:
            return over_link(device, link)
        return over_link(device, None, self.predictor.recorded_device)  # no messages: the link must not limit the step

    def _predicted(self, device: DevicePeaks) -> StepPrediction:
        key = (device.name, device.peer_link_bytes_s)
        if key not in self._predictions:
            self._predictions[key] = self.predictor.on(device)
        return self._predictions[key]

    def _on_several(self, price: Price, prediction: StepPrediction) -> ScaledStep | str | None:
        """Scale the step to all devices of a machine; None if nothing changes, a string that says why if unknown."""
        if price.count == 1 and self.recorded_devices == 1:
            return None
        if self.recorded_devices == 1 and self._is_inference:
            self.notes.setdefault(_INDEPENDENT, [""])
            return None
        link = self.request.link or _link_of(price, prediction.device)
        if link is None:
            return "the link between its devices is unknown; --link names it"
        if price.count > 1:
            try:
                check_link(link, self.devices[prediction.device.name])
            except UsageError as error:
                return str(error)
        key = (prediction.device.name, link.name, prediction.device.peer_link_bytes_s)
        if key not in self._scaled:
            self._scaled[key] = self._shared(prediction, link)
        known = self._scaled[key]
        return known if isinstance(known, str) else known[price.count]

    def _shared(self, prediction: StepPrediction, link: Link) -> dict[int, ScaledStep] | str:
        numbers = sorted(self._counts[prediction.device.name])
        try:
            return self._known.steps(prediction, link, numbers)
        except UsageError as error:
            return str(error)

    @cached_property
    def _is_inference(self) -> bool:
        """Whether operators were recorded and none computes gradients, so that devices exchange nothing."""
        trace = self.predictor.trace
        if trace.operators.is_empty():
            return False
        names = pl.concat([trace.operators["name"], trace.annotations["name"], trace.device_work["name"]])
        return not names.drop_nulls().unique().str.contains(_TRAINING).any()

    def _refuse(self, price: Price, what: str, reason: str) -> None:
        self.refused.setdefault((what, reason), set()).add((price.provider, price.instance))


def _notes(notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Notes of predictions; notes that differ only in the device appear once."""
    for note, devices in notes.items():
        several = f"{devices[0]} and {len(devices) - 1} other device{'s' if len(devices) > 2 else ''}"
        yield note.replace(_DEVICE, several if len(devices) > 1 else devices[0])


def _cheapest(prices: Sequence[Price], spot: bool) -> list[Price]:
    best: dict[tuple[object, ...], Price] = {}
    for price in prices:
        key = (price.provider, price.instance, price.device or price.gpu, price.count)
        known = best.get(key)
        usd, before = price.usd_h(spot=spot), known.usd_h(spot=spot) if known is not None else None
        if known is None or (usd is not None and (before is None or usd < before)):
            best[key] = price
    return list(best.values())


def _link_of(price: Price, device: DevicePeaks) -> Link | None:
    """Interconnect of a machine's devices: their own link, or the host's where the price's source says PCIe."""
    if price.count == 1:
        return link_table()[0]  # a single device sends nothing, so any link will do
    peak = device.host_link_bytes_s if price.link == "PCIe" else device.peer_link_bytes_s
    return None if peak is None else link_of(device, peak)


def _energy(
    price: Price, prediction: StepPrediction, step_ns: float, steps: float
) -> tuple[Range | None, Range | None]:
    """Kilowatt-hours of all devices over all steps, and kilograms of CO2 where the region's grid is known."""
    one = step_energy(prediction.device, step_ns, prediction.device_ns)
    if one is None:
        return None, None
    low, high = one.low_j * price.count * steps, one.high_j * price.count * steps
    kwh = low / J_PER_KWH, high / J_PER_KWH
    if price.region is None:
        return kwh, None
    try:
        grid = grid_of(f"{price.provider}:{price.region}")
    except UsageError:
        return kwh, None
    return kwh, (emitted_kg(low, grid), emitted_kg(high, grid))
