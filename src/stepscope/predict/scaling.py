"""Prediction of the recorded steps on several devices with data-parallel training.

Each device works on a batch as large as the recorded one, and they add up their gradients (weak scaling). Messages are
added to the dependency graph (`exchanges`), which is replayed: a message begins when its gradients are ready and the
previous message has ended, the rest of the backward pass overlaps it, and the optimizer waits for all messages. The
wait for the slowest device is added: the expected longest of n steps, drawn from the recorded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.analysis.batch_size import batch_size_of
from stepscope.analysis.roofline import device_peaks
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.buckets import BUCKET_BYTES, CutExperiment, buckets_of, gradients_of
from stepscope.predict.exchanges import AddedExchange, Exchange, RecordedExchange, recorded_exchange
from stepscope.predict.limits import MOST_DEVICES, TABLE_ERROR, Link, named_link
from stepscope.predict.prediction import StepPrediction
from stepscope.predict.ranges import step_band, with_host
from stepscope.predict.trace_operations import CalledOperations
from stepscope.predict.work_times import WorkTimes, work_times
from stepscope.trace.nesting import Rows
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.graph import Graph

Numbers = npt.NDArray[np.float64]
LEAST_STEPS: Final = 3
"""Fewest recorded steps that show how much steps vary. With two more, the first and the last are left out, since a cold
start and the end of the recording make them longer.
"""
_AT_ONCE: Final = (
    "only the sum of a step's gradients is known: they are sent after the backward pass, which hides none of it; at "
    "the lower end of the range all of it"
)
SLOWEST_BESIDE: Final = 1.6
"""Largest slowdown of computation beside messages: recordings of ranks on V100 and A100 show 1.25 and 1.58."""
NOTICEABLE: Final = 1.005  # a slowdown below this gets no note
_ONE: Final = (
    "one device was recorded: the host's own time for messages is not counted, and copies of gradients into buckets "
    "and computation that slows down beside messages only at the upper end of the range"
)
_OTHERS: Final = (
    "exchanges that do not add up gradients, such as all-to-all, use that link too, and take equally long among any "
    "number of devices"
)
_ALONE: Final = "a single device exchanges nothing; what other devices computed for it is not added"
_HOST_LIMITS: Final = (
    "without a device the messages also need the processors that compute: this slowdown is not counted"
)


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """Mean step on several devices.

    Attributes:
        low_ns, high_ns: step with quicker and slower transfers than expected; low excludes the wait for the slowest
            device, high includes slower computation beside messages and copies of gradients into buckets and back.
        recorded_ranks: number of ranks among which the messages were recorded. From 2 on `exposed_ns` includes waiting
            for late ranks and slower computation beside messages, so that it can exceed `communication_ns`.
    """

    devices: int  # number of devices; each works on a batch as large as the recorded one
    step_ns: float  # step time, including the wait for the slowest device
    low_ns: float
    high_ns: float
    communication_ns: float  # time of a step's messages, without waiting
    exposed_ns: float  # how much longer they make the step
    efficiency: float  # single-device step over this step, 0 to 1; throughput is `devices` times this
    samples_per_s: float | None  # of all devices; None where the batch size is unknown
    notes: tuple[str, ...] = ()  # what was not counted or is uncertain, in sentences
    straggler_ns: float = 0.0  # expected wait for the slowest device, from the variation of the recorded steps
    recorded_ranks: int = 1


def data_parallel(
    experiment: Experiment,
    devices: Sequence[int],
    link: Link | str | None = None,
    *,
    target: StepPrediction | None = None,
    others: Sequence[Experiment] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[ScaledStep, ...]:
    """Predict the mean step on each of these numbers of devices.

    Args:
        link: interconnect of the devices, or its name as in `links.named_link`; None for the link that carried the
            trace's own collectives.
        target: prediction for the device to use instead of the recorded one.
        others: traces of the same steps on other ranks, which separate transfers from waiting.
        bucket_bytes: bucket size limit for a trace of a single device.

    Raises:
        UsageError: gradients are unknown; no link is given or recorded; the target has no step time; or the number of
            devices is impossible.
    """
    exchange = exchange_of(experiment, others, bucket_bytes)
    scaling = Scaling(exchange, named_link(link) if isinstance(link, str) else link, target)
    return tuple(scaling.step(count) for count in devices)


def exchange_of(
    experiment: Experiment, others: Sequence[Experiment] = (), bucket_bytes: int = BUCKET_BYTES
) -> Exchange:
    """Messages between ranks: as recorded, or the buckets that a single device would send.

    Raises:
        UsageError: the trace does not show the gradients.
    """
    recorded = recorded_exchange(experiment, others)
    if recorded is not None:
        return recorded
    gradients = gradients_of(experiment)
    buckets = buckets_of(gradients, bucket_bytes=bucket_bytes)
    if experiment.device is None:
        last = np.append(buckets.step[1:] != buckets.step[:-1], True)
        main = np.full(int(last.sum()), experiment.lane, np.int32)
        experiment = CutExperiment(experiment, main, buckets.ready[last])
    return AddedExchange(experiment, buckets, gradients.accumulated, gradients.at_once)


def over_link(device: DevicePeaks, link: Link | None, recorded: DevicePeaks | None = None) -> DevicePeaks:
    """The device joined to others by this link, or by the recorded device's if None.

    Recorded collectives are then predicted over that link.
    """
    if link is not None:
        return replace(device, peer_link_bytes_s=link.peak_bytes_s or link.bandwidth_bytes_s)
    if recorded is None or recorded.peer_link_bytes_s is None:
        return device
    return replace(device, peer_link_bytes_s=recorded.peer_link_bytes_s)


def expected_longest(lengths: npt.ArrayLike, draws: int) -> float:
    """Expected maximum of this many draws, with replacement, from these values.

    With x1 <= ... <= xk the values, it is the sum of xi ((i / k)^n - ((i - 1) / k)^n). It assumes no distribution, and
    is never above the largest value.
    """
    values = np.sort(np.asarray(lengths, np.float64))
    reached = (np.arange(len(values) + 1) / len(values)) ** draws
    return float(values @ np.diff(reached))


def _notes_of_ranks(exchange: RecordedExchange) -> list[str]:
    notes = [f"waiting for late ranks stays as recorded among {exchange.ranks}"]
    if exchange.slowdown is not None and exchange.slowdown >= NOTICEABLE:
        notes.append(
            f"computation beside messages took {exchange.slowdown:.2f} times as long as alone, which is part of the "
            "recorded times of several devices"
        )
    return notes


class Scaling:
    """One trace on different numbers of devices.

    Args:
        exchange: what they exchange in a step.
        link: as in `data_parallel`.
        target: as in `data_parallel`.

    Raises:
        UsageError: the target has no step time, or no link is given or recorded.
    """

    def __init__(self, exchange: Exchange, link: Link | None, target: StepPrediction | None) -> None:
        if target is not None and target.step_ns is None:
            raise UsageError(f"a step on one {target.device.name} cannot be predicted, nor one on several of them")
        self.target = target
        self._replays: dict[tuple[bytes, float, int], float] = {}
        self.exchange = exchange
        if link is not None and isinstance(exchange, RecordedExchange):
            self.exchange = exchange = exchange.by_link_of(self._recorded)
        self.link, used = link, link or exchange.link
        self.error = TABLE_ERROR if used is None else used.error
        self.experiment = exchange.experiment
        messages = exchange.table["row"].to_numpy() if isinstance(exchange, RecordedExchange) else np.zeros(0, np.int64)
        self.graphs = target_graph(self.experiment, target, messages)
        self.factor = self.graphs.factor
        self.messages = len(exchange.transfers_ns(link, 2))
        self.alone_ns = self._replayed(np.zeros(self.messages), 0.0)

    @cached_property
    def _recorded(self) -> DevicePeaks | None:
        if self.target is not None and self.target.predictor is not None:
            return self.target.predictor.recorded_device
        device = self.exchange.experiment.device
        return None if device is None else device_peaks(self.exchange.experiment.trace, device)

    def step(self, devices: int) -> ScaledStep:
        """The step on this many devices.

        Raises:
            UsageError: the number of devices is impossible.
        """
        if not 1 <= devices <= MOST_DEVICES:
            raise UsageError(f"{devices} devices are not possible; the number must be 1 to {MOST_DEVICES:,}")
        transfers, experiment = self.exchange.transfers_ns(self.link, devices), self.experiment
        others = self._others_factor
        expected, low, high = (
            self._replayed(transfers * factor, 0.0 if devices == 1 else other) * self.factor
            for factor, other in (
                (1.0, others),
                (max(1 - self.error, 0.0), min(others, 1.0)),
                (1 + self.error, max(others, 1.0)),
            )
        )
        straggler, notes = self._straggler_ns(devices)
        alone, step = self.alone_ns * self.factor, expected + straggler
        if isinstance(self.exchange, AddedExchange) and self.exchange.at_once:
            low = alone
        messages_ns = float(transfers.sum()) / experiment.step_count
        if devices == 1:
            low, high = self._alone(step)
        else:
            narrow, wide = self._band
            low = min(low * narrow, step)
            high = max((high + straggler + self._not_counted_ns(messages_ns, expected - alone)) * wide, step)
        samples = self._samples_per_step
        return ScaledStep(
            devices=devices,
            step_ns=step,
            low_ns=low,
            high_ns=high,
            communication_ns=messages_ns + (self._others_ns if devices > 1 else 0.0),
            exposed_ns=max(expected - alone, 0.0),
            efficiency=min(alone / step, 1.0),
            samples_per_s=None if samples is None else devices * samples / step * 1e9,
            notes=(*notes, *(self._notes if devices > 1 else (_ALONE,) if self._others_ns else ())),
            straggler_ns=straggler,
            recorded_ranks=self.exchange.ranks,
        )

    def _not_counted_ns(self, messages_ns: float, exposed: float) -> float:
        """Bound on what a single device's trace hides: slower computation beside messages, copies of gradients."""
        if not isinstance(self.exchange, AddedExchange) or not messages_ns:
            return 0.0
        beside = max(messages_ns - max(exposed, 0.0), 0.0)
        return beside * (SLOWEST_BESIDE - 1) + self._copies_ns(self.exchange)

    def _copies_ns(self, exchange: AddedExchange) -> float:
        """Time to copy a step's gradients into buckets and back, each read and written; 0 for an unknown device."""
        peaks = self._recorded if self.target is None else self.target.device
        moved = 4 * float(exchange.buckets.bytes.sum()) / self.experiment.step_count
        return 0.0 if peaks is None else moved / peaks.bandwidth_bytes_s * 1e9

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        exchange, experiment = self.exchange, self.experiment
        notes = [] if exchange.ranks > 1 else [_ONE]
        if experiment.device is None and self.target is None:
            notes.append(_HOST_LIMITS)
        if isinstance(exchange, AddedExchange) and exchange.accumulated > 1:
            passes = exchange.accumulated
            notes.append(f"of {passes} backward passes in a step only the last one's gradients are sent (no_sync)")
        if isinstance(exchange, RecordedExchange):
            notes += _notes_of_ranks(exchange)
        if self._others_ns:
            notes.append(_OTHERS)
        if isinstance(exchange, AddedExchange) and exchange.at_once:
            notes.append(_AT_ONCE)
        world = experiment.trace.metadata.world_size or 1
        if exchange.ranks == 1 and world > 1:
            notes.append(f"the trace is one of {world} ranks': its other exchanges stay as recorded")
        if self.link is not None and not self.link.has_latency:
            notes.append("the link's latency is unknown and not counted (add it: 12GB/s+5us)")
        if experiment.why_not is not None:
            notes.append(f"not certain: {experiment.why_not}")
        return tuple(notes)

    @cached_property
    def _samples_per_step(self) -> float | None:
        """Samples per step on one device: the target's batch, or the recorded one; None where unknown."""
        if self.target is not None:
            rate = self.target.samples_per_s
            return None if rate is None or self.target.step_ns is None else rate * self.target.step_ns / 1e9
        return batch_size_of(self.experiment.trace)

    @cached_property
    def _band(self) -> tuple[float, float]:
        target = self.target
        if target is None or not target.step_ns:
            return 1.0, 1.0
        return (target.low_ns or target.step_ns) / target.step_ns, (target.high_ns or target.step_ns) / target.step_ns

    @cached_property
    def _others(self) -> Rows:
        """Rows of device work that exchange data outside of `exchange`."""
        table, device = self.experiment.trace.device_work, self.experiment.device
        if device is None:
            return np.zeros(0, np.int64)
        chosen = ((table["kind"] == "communication") & (table["device"] == device)).fill_null(False).to_numpy().copy()
        if isinstance(self.exchange, RecordedExchange):
            rows = self.exchange.table["row"].to_numpy()
            chosen[rows[rows < len(chosen)]] = False
        return np.flatnonzero(chosen)

    @cached_property
    def _others_ns(self) -> float:
        rows, graph = np.intersect1d(self._others, self.experiment.works), self.graphs.expected
        took = graph.works.duration[rows] * graph.work_scale[rows]
        return float(took.sum()) * self._others_factor / self.experiment.step_count

    @cached_property
    def _others_factor(self) -> float:
        """Factor on the time of these over the requested link; a target's times include it already."""
        peaks = self._recorded
        if self.link is None or self.target is not None or peaks is None or peaks.peer_link_bytes_s is None:
            return 1.0
        return peaks.peer_link_bytes_s / (self.link.peak_bytes_s or self.link.bandwidth_bytes_s)

    def _alone(self, step: float) -> tuple[float, float]:
        """Range of the step on one device, which exchanges nothing: the target's band without communication."""
        if self.graphs.low is None or self.graphs.high is None:
            return step * self._band[0], step * self._band[1]
        nothing = np.zeros(self.messages)
        low, high = (self._replayed(nothing, 0.0, graph) * self.factor for graph in (self.graphs.low, self.graphs.high))
        busy = None if self.target is None else self.target.device_ns
        ends = with_host(step, step if busy is None else busy, low, high)
        return float(ends[0]), float(ends[1])

    def _replayed(self, transfers: Numbers, others: float, graph: Graph | None = None) -> float:
        """Step with messages of this length, and with other exchanges scaled by this factor."""
        base = self.graphs.expected if graph is None else graph
        key = transfers.tobytes(), others, id(base)  # a single device has the same messages at both ends: none
        if key not in self._replays:
            base = base.with_work(self._others, others) if len(self._others) else base
            self._replays[key] = self.experiment.run(self.exchange.graph(base, transfers)).step_ns
        return self._replays[key]

    def _straggler_ns(self, devices: int) -> tuple[float, tuple[str, ...]]:
        """Wait for the slowest device; the messages of a trace of several ranks include it already."""
        if devices < 2 or self.exchange.ranks > 1:
            return 0.0, ()
        if self.target is not None and self.experiment.device is None:
            return 0.0, ("steps on a processor do not show how much those on a device vary: no waiting is counted",)
        lengths = self.experiment.steps.sort("start_ns")["duration_ns"].to_numpy()
        if len(lengths) < LEAST_STEPS:
            return 0.0, (
                f"fewer than {LEAST_STEPS} steps were recorded: waiting for the slowest device is not counted",
            )
        lengths = lengths[1:-1] if len(lengths) >= LEAST_STEPS + 2 else lengths
        return (expected_longest(lengths, devices) - float(np.mean(lengths))) * self.factor, ()


@dataclass(frozen=True, slots=True)
class TargetGraph:
    """Dependency graph of the recorded device or of another one.

    Attributes:
        low, high: graph with all work but communication at the ends of its range; None without communication,
            since the step's own band then includes it.
    """

    expected: Graph  # with expected times
    low: Graph | None = None
    high: Graph | None = None
    factor: float = 1.0  # the target's step over that of the graph, when messages take the target's times as well


def target_graph(experiment: Experiment, target: StepPrediction | None, messages: Rows) -> TargetGraph:
    """Build the graph with the target's times: of its works, or without a device of all host time.

    Args:
        target: with a step time; None for the recorded device.
        messages: works that keep their recorded time.
    """
    graph = experiment.graph
    if target is None or target.step_ns is None:
        return TargetGraph(graph)
    if experiment.device is None:
        slower = target.step_ns / (experiment.recorded_ns / experiment.step_count)
        lanes = np.unique(graph.stretches.lane)
        start = np.full(len(lanes), experiment.span.start_ns)
        end = np.full(len(lanes), experiment.span.end_ns)
        changed = graph.with_host_time(lanes, start, end, np.full(len(lanes), slower))
        return TargetGraph(changed, factor=target.step_ns / experiment.run(changed).step_ns)
    by = target.predictor
    times = work_times(experiment.trace, target.device) if by is None else by.times_on(target.device)[0]
    graph = graph if by is None else by.replays.graph
    rows = np.arange(len(times.ns))
    factors = _factors(times, times.ns)
    whole = experiment.run(graph.with_work(rows, factors)).step_ns
    stays = messages[messages < len(rows)]
    factors[stays] = 1.0
    expected, scale = graph.with_work(rows, factors), target.step_ns / whole
    exchanged = (experiment.trace.device_work["kind"] == "communication").fill_null(False).to_numpy()
    if not exchanged.any():
        return TargetGraph(expected, factor=scale)
    ends = [_factors(times, end) for end in _ends(experiment, times, exchanged)]
    for end in ends:
        end[stays] = 1.0
    low, high = (graph.with_work(rows, end) for end in ends)
    return TargetGraph(expected, low, high, scale)


def _factors(times: WorkTimes, ns: Numbers) -> Numbers:
    """Factor on the time of each work; unknown work gets the mean factor of the rest."""
    known = np.isfinite(times.ns) & (times.measured_ns > 0)
    factors = np.ones(len(ns))
    if known.any():
        factors[:] = float(ns[known].sum() / times.measured_ns[known].sum())
        factors[known] = ns[known] / times.measured_ns[known]
    return factors


def _ends(experiment: Experiment, times: WorkTimes, exchanged: npt.NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """Ends of the range of all work but communication, which stays at its estimate."""
    known, kinds = np.isfinite(times.ns), CalledOperations.of(experiment.trace)
    ns = np.where(known, times.ns, 0.0)
    low, high = (np.where(known & ~exchanged, end, ns) for end in (times.low_ns, times.high_ns))
    return step_band(ns, low, high, kinds.kinds, kinds.calls, experiment.works)
