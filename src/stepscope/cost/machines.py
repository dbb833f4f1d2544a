"""What a plan consists of: what is to be done, and the machines that could do it with their time and cost.

hours = steps x step time / 3.6e12 ns
cost  = hours x price of the machine
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Final

from stepscope.cost.prices import Price
from stepscope.predict.answer import PredictedSteps
from stepscope.predict.links import Link
from stepscope.predict.prediction import StepPrediction
from stepscope.predict.scaling import ScaledStep

NS_PER_HOUR: Final = 3.6e12
HOST_LIMITS: Final = ("host", "input")
"""What limits a step that no faster accelerator makes shorter."""
_MUCH: Final = 0.5
"""Share of a step from which on messages, and waiting for the slowest device, limit it."""
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be done.

    Attributes:
        iterations: of the recorded steps, with as many samples as one step of all recorded devices had.
        counts: numbers of accelerators that a machine may have; None for any.
        spot: whether to take spot prices.
        deadline_h, budget_usd: what it may take and cost; None for anything.
        link: between the accelerators of every machine, in place of its own.
    """

    iterations: float
    counts: tuple[int, ...] | None = None
    spot: bool = False
    deadline_h: float | None = None
    budget_usd: float | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that could do it.

    Attributes:
        price: its price, with the day it is of.
        prediction: for a single one of its devices.
        scaled: the step on all of them; None where that is the single one's.
        step_ns, step_low_ns, step_high_ns: on all of its devices.
        steps: how many of these are needed.
        hours, hours_low, hours_high: for all of them.
        usd, usd_low, usd_high: cost of these hours.
        kwh: estimated bounds of what its accelerators use; None where no estimate is possible.
        kilograms: of CO2 equivalents that that emits; None without an estimate or a known region.
        on_front: whether no other machine is cheaper without being slower.
    """

    price: Price
    prediction: StepPrediction
    scaled: ScaledStep | None
    step_ns: float
    step_low_ns: float
    step_high_ns: float
    steps: float
    usd_h: float
    kwh: Range | None = None
    kilograms: Range | None = None
    on_front: bool = False

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
        """What limits the step; None where that is not known.

        The prediction's, but for communication: that is other than recorded on another number of devices.
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
    """Machines that nothing is planned for, and why; `machines` are their number."""

    what: str
    reason: str
    machines: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every machine that could do it, the cheapest first.

    Attributes:
        recorded: the steps as they were recorded.
        request: what is to be done.
        recorded_devices: how many devices a recorded iteration ran on.
        recorded_samples: of a recorded step on one device; None where not known, or where a step has several batches.
        recorded_batch, batch: samples of a batch on one device, as recorded and as planned; None where not known.
        batch_factor: how many times as large the planned one is.
        today: the day that ages of prices count from.
        machines: with prices and predictions.
        refused: machines left out, by reason.
        without_price: devices that no price is known of, among those of the table.
        notes: what predictions assumed or could not count, each once.
    """

    recorded: PredictedSteps
    request: Request
    recorded_devices: int
    recorded_batch: int | None
    batch: int | None
    batch_factor: float
    today: date
    machines: tuple[Machine, ...]
    refused: tuple[Refused, ...] = ()
    without_price: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    recorded_samples: int | None = None

    @property
    def front(self) -> tuple[Machine, ...]:
        """Machines that no other beats in time and cost at once, the cheapest first."""
        return tuple(machine for machine in self.machines if machine.on_front)

    def meets(self, machine: Machine) -> bool:
        """Whether the machine is expected to keep to deadline and budget."""
        deadline, budget = self.request.deadline_h, self.request.budget_usd
        return (deadline is None or machine.hours <= deadline) and (budget is None or machine.usd <= budget)
