"""Where a whole training could run, how long it would take there and what it would cost.

    steps = iterations x recorded devices / devices / how many times as large the batch is
    energy = steps x devices x energy of a device's step

Each device works on the recorded batch, so several need fewer steps for the same samples. The step time on several
comes from `stepscope.predict.scaling`, never from division.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Final

import polars as pl

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks, device_table
from stepscope.predict.batch import recorded_batch
from stepscope.predict.cost.carbon import J_PER_KWH, emitted_kg, grid_of
from stepscope.predict.cost.energy_parts import step_energy
from stepscope.predict.cost.prices import Price, unpriced_devices
from stepscope.predict.links import Link, link_of, link_table
from stepscope.predict.prediction import PredictedSteps, StepPrediction, StepPredictor, predicted_steps
from stepscope.predict.scaling import ScaledStep, data_parallel, over_link
from stepscope.whatif.experiment import Experiment

NS_PER_HOUR: Final = 3.6e12
HOST_LIMITS: Final = ("host", "input")  # what limits a step that no faster accelerator makes shorter
_MUCH: Final = 0.5  # share of a step from which on messages, and waiting for the slowest device, limit it
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be done.

    Attributes:
        iterations: of the recorded steps, with as many samples as one step of all recorded devices had.
    """

    iterations: float  # of the recorded steps, with as many samples as one step of all recorded devices had
    counts: tuple[int, ...] | None = None  # numbers of accelerators that a machine may have; None for any
    spot: bool = False  # whether to take spot prices
    deadline_h: float | None = None
    budget_usd: float | None = None  # with deadline_h: what it may take and cost; None for no limit
    link: Link | None = None  # between the accelerators of every machine, in place of its own


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that could do it.

    Attributes:
        step_ns, step_low_ns, step_high_ns: on all of its devices.
        kwh, kilograms: estimated bounds of its accelerators' energy and its CO2 equivalents; None where unknown.
    """

    price: Price  # its price, with the day it is of
    prediction: StepPrediction  # for a single one of its devices
    scaled: ScaledStep | None  # the step on all of them; None where that is the single one's
    step_ns: float
    step_low_ns: float
    step_high_ns: float
    steps: float  # how many of these are needed
    usd_h: float
    kwh: Range | None = None  # estimated bounds of what its accelerators use; None where no estimate is possible
    kilograms: Range | None = None  # of CO2 equivalents that that emits; None without an estimate or a known region
    on_front: bool = False  # whether no other machine is cheaper without being slower

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
        """What limits the step; None where unknown.

        That is the prediction's, except that communication differs on another number of devices.
        """
        if self.scaled is None:
            return self.prediction.limit
        waits = self.scaled.exposed_ns + self.scaled.straggler_ns
        if waits > _MUCH * self.step_ns:
            return "communication"
        return None if self.prediction.limit == "communication" else self.prediction.limit

    @property
    def is_limited_by_host(self) -> bool:
        """Whether the step would be as long with a faster accelerator."""
        return self.limit in HOST_LIMITS


@dataclass(frozen=True, slots=True)
class Refused:
    """Machines without a plan, and why; `machines` are their number."""

    what: str
    reason: str
    machines: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every machine that could do it, the cheapest first.

    Attributes:
        recorded_samples: of a recorded step on one device; None where unknown, or where a step has several batches.
        recorded_batch, batch: samples of a batch on one device, as recorded and as planned; None where unknown.
        batch_factor: how many times as large the planned one is.
    """

    recorded: PredictedSteps  # the steps as they were recorded
    request: Request  # what is to be done
    recorded_devices: int  # how many devices a recorded iteration ran on
    recorded_batch: int | None
    batch: int | None
    batch_factor: float  # how many times as large the planned one is
    today: date  # the day that ages of prices count from
    machines: tuple[Machine, ...]  # with prices and predictions
    refused: tuple[Refused, ...] = ()  # machines left out, by reason
    without_price: tuple[str, ...] = ()  # devices that no price is known of, among those of the table
    notes: tuple[str, ...] = ()  # what predictions assumed or could not count, each once
    recorded_samples: int | None = None

    @property
    def front(self) -> tuple[Machine, ...]:
        """Machines that no other beats in time and cost at once, the cheapest first."""
        return tuple(machine for machine in self.machines if machine.on_front)

    def meets(self, machine: Machine) -> bool:
        deadline, budget = self.request.deadline_h, self.request.budget_usd
        return (deadline is None or machine.hours <= deadline) and (budget is None or machine.usd <= budget)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the points that no other is below in one value without being above in the other.

    The front begins with the least first value; of equal points all are on it.
    """
    order = sorted(range(len(points)), key=lambda at: points[at])
    front: list[int] = []
    for at in order:
        # In this order a point is beaten exactly where an earlier one, other than its equal, is no worse in the second.
        if not front or points[at][1] < points[front[-1]][1] or points[at] == points[front[-1]]:
            front.append(at)
    return front


_TRAINING: Final = r"(?i)backward|autograd|accumulategrad|optimizer|gradient|dgrad|wgrad"
_INDEPENDENT: Final = (
    "nothing in the trace computes gradients: several devices are taken to work each for itself, and exchange nothing"
)
_DEVICE: Final = "\0"  # stands for a device's name in what predictions say of several


def make_plan(
    predictor: StepPredictor,
    prices: Sequence[Price],
    request: Request,
    *,
    today: date,
    others: Sequence[Experiment] = (),
) -> Plan:
    """Predict and price the work on every machine.

    Args:
        predictor: of the recorded trace.
        prices: of machines; of one in several regions the cheapest region counts.
        others: traces of the same steps of other ranks, which separate transfers from waiting.

    Raises:
        UsageError: nothing was recorded that takes time, or an unknown number type.
    """
    recorded = predicted_steps(predictor, ())
    offered = _cheapest(prices, request.spot)
    planner = _Planner(predictor, request, recorded.devices, others, offered)
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


class _Planner:
    """What predictions for the machines of one plan share."""

    def __init__(
        self,
        predictor: StepPredictor,
        request: Request,
        devices_of_trace: int,
        others: Sequence[Experiment],
        offered: Sequence[Price],
    ) -> None:
        self.predictor, self.request, self.others = predictor, request, others
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
            self._refuse(price, price.gpu, "the device table does not know it, or could mean several by that name")
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
        """The machine's device with the link that joins several, over which ranks exchange what they do."""
        device = self.devices[price.device or ""]
        link = self.request.link or _link_of(price, device)
        if self.recorded_devices == 1 or link is None:
            return device
        if price.count > 1:
            return over_link(device, link)
        return over_link(device, None, self.predictor.recorded_device)  # it exchanges nothing: let that limit nothing

    def _predicted(self, device: DevicePeaks) -> StepPrediction:
        key = (device.name, device.peer_link_bytes_s)
        if key not in self._predictions:
            self._predictions[key] = self.predictor.on(device)
        return self._predictions[key]

    def _on_several(self, price: Price, prediction: StepPrediction) -> ScaledStep | str | None:
        """The step on all devices of a machine; None where nothing changes, or why it is unknown."""
        if price.count == 1 and self.recorded_devices == 1:
            return None
        if self.recorded_devices == 1 and self._is_inference:
            self.notes.setdefault(_INDEPENDENT, [""])
            return None
        link = self.request.link or _link_of(price, prediction.device)
        if link is None:
            return "what joins its devices is not known; --link says it"
        key = (prediction.device.name, link.name, prediction.device.peer_link_bytes_s)
        if key not in self._scaled:
            self._scaled[key] = self._shared(prediction, link)
        known = self._scaled[key]
        return known if isinstance(known, str) else known[price.count]

    def _shared(self, prediction: StepPrediction, link: Link) -> dict[int, ScaledStep] | str:
        numbers = sorted(self._counts[prediction.device.name])
        try:
            steps = data_parallel(self.predictor.experiment, numbers, link, target=prediction, others=self.others)
        except UsageError as error:
            return str(error)
        return dict(zip(numbers, steps, strict=True))

    @cached_property
    def _is_inference(self) -> bool:
        """Whether operators were recorded and nothing computes gradients: devices then exchange nothing."""
        trace = self.predictor.trace
        if trace.operators.is_empty():
            return False
        names = pl.concat([trace.operators["name"], trace.annotations["name"], trace.device_work["name"]])
        return not names.drop_nulls().unique().str.contains(_TRAINING).any()

    def _refuse(self, price: Price, what: str, reason: str) -> None:
        self.refused.setdefault((what, reason), set()).add((price.provider, price.instance))


def _notes(notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The notes of predictions; those that differ by the device alone once."""
    for note, devices in notes.items():
        several = f"{devices[0]} and {len(devices) - 1} other device{'s' if len(devices) > 2 else ''}"
        yield note.replace(_DEVICE, several if len(devices) > 1 else devices[0])


def _cheapest(prices: Sequence[Price], spot: bool) -> list[Price]:
    """For each machine the price of its cheapest region."""
    best: dict[tuple[object, ...], Price] = {}
    for price in prices:
        key = (price.provider, price.instance, price.device or price.gpu, price.count)
        known = best.get(key)
        usd, before = price.usd_h(spot=spot), known.usd_h(spot=spot) if known is not None else None
        if known is None or (usd is not None and (before is None or usd < before)):
            best[key] = price
    return list(best.values())


def _link_of(price: Price, device: DevicePeaks) -> Link | None:
    """What joins the devices of a machine: their own link, or the host's where the price's source says PCIe."""
    if price.count == 1:
        return link_table()[0]  # a single device sends nothing
    peak = device.host_link_bytes_s if price.link == "PCIe" else device.peer_link_bytes_s
    return None if peak is None else link_of(device, peak)


def _energy(
    price: Price, prediction: StepPrediction, step_ns: float, steps: float
) -> tuple[Range | None, Range | None]:
    """Kilowatt-hours of all devices over all steps, and kilograms of CO2 where the region's electricity is known."""
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
