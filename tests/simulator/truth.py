"""The truth a simulated machine tells about itself: why each device was idle, and what it was busy with.

Idle time is the complement of the union of a device's work between its first start and its last end. For an idle
gap [g0, g1):

* The next work is the one that starts at g1. If several do, those without a launch in the trace are passed over,
  and the one whose launch call started latest decides; on a tie the lowest correlation id, then the lowest queue.
* No next work has a launch: the whole gap is ``unknown``.
* From the start L of its launch call on, the gap is the device's: ``dependency`` if L <= g0 and no work that ended
  at g0 ran on the next work's queue, else ``launch_latency``.
* Before L it is the host's. It is cut where the innermost slice of the launching thread changes, and each piece
  has the cause the thread logged then. While that thread had no slice open at all, the main thread's log is read
  instead. What the profiler's overhead covers is ``profiler_overhead``.
* Every piece of the gap carries the same trigger: the last synchronising call or copy to the host of the launching
  thread that was in progress at g0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tests.simulator.device import COMMUNICATION, COMPUTE, COPY, Launch, Work
from tests.simulator.timeline import STEP_PREFIX, Slice, Stretch, Timeline

CAUSES = (
    "input",
    "synchronisation",
    "host_to_device_copy",
    "allocation",
    "compilation",
    "optimizer",
    "dispatch",
    "python",
    "untraced",
    "profiler_overhead",
    "launch_latency",
    "dependency",
    "unknown",
)

Interval = tuple[int, int]


@dataclass(frozen=True, order=True)
class IdlePiece:
    """A stretch of a device's idle time with one cause."""

    device: int
    start_ns: int
    duration_ns: int
    cause: str
    trigger: str | None = None

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def says(self) -> tuple[int, str, str | None]:
        return (self.device, self.cause, self.trigger)


@dataclass(frozen=True)
class DeviceTruth:
    """A device's time in ns, each figure a union over its queues; exposed means not covered by a compute kernel."""

    device: int
    start_ns: int
    window_ns: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int

    @property
    def idle_ns(self) -> int:
        return self.window_ns - self.busy_ns


@dataclass(frozen=True)
class StepTruth:
    index: int
    start_ns: int
    duration_ns: int


@dataclass(frozen=True)
class Truth:
    """Everything a simulated machine knows about its own run, in machine time (0 is where the host clocks start)."""

    pieces: list[IdlePiece]
    devices: dict[int, DeviceTruth]
    steps: list[StepTruth]

    def pieces_of(self, device: int) -> list[IdlePiece]:
        return [piece for piece in self.pieces if piece.device == device]

    def cause_ns(self, device: int) -> dict[str, int]:
        """The idle time of a device by cause; causes that did not occur are absent."""
        sums: Counter[str] = Counter()
        for piece in self.pieces_of(device):
            sums[piece.cause] += piece.duration_ns
        return dict(sums)

    def totals(self) -> dict[tuple[int, str, str | None], int]:
        """Idle ns by (device, cause, trigger)."""
        sums: Counter[tuple[int, str, str | None]] = Counter()
        for piece in self.pieces:
            sums[piece.device, piece.cause, piece.trigger] += piece.duration_ns
        return dict(sums)

    def merged(self) -> list[IdlePiece]:
        """The pieces with neighbours of the same cause and trigger joined."""
        return merge_pieces(self.pieces)

    def shifted(self, offset_ns: int) -> Truth:
        """The same truth on a clock that shows ``offset_ns`` more."""
        return Truth(
            [replace(piece, start_ns=piece.start_ns + offset_ns) for piece in self.pieces],
            {key: replace(device, start_ns=device.start_ns + offset_ns) for key, device in self.devices.items()},
            [replace(step, start_ns=step.start_ns + offset_ns) for step in self.steps],
        )


def merge_pieces(pieces: Iterable[IdlePiece]) -> list[IdlePiece]:
    """Join pieces that touch and say the same; pieces come sorted by device and start."""
    joined: list[IdlePiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.end_ns == piece.start_ns and last.says == piece.says:
            joined[-1] = replace(last, duration_ns=last.duration_ns + piece.duration_ns)
        else:
            joined.append(piece)
    return joined


def tell_truth(main: Timeline | None, works: Sequence[Work], overheads: Sequence[Interval]) -> Truth:
    """Read the truth off the logs of a machine that has run."""
    by_device: dict[int, list[Work]] = defaultdict(list)
    for work in works:
        by_device[work.device].append(work)
    pieces: list[IdlePiece] = []
    for device in sorted(by_device):
        pieces.extend(_idle_pieces(by_device[device], main, union(overheads)))
    devices = {device: _device_truth(device, by_device[device]) for device in sorted(by_device)}
    return Truth(pieces, devices, _steps(main))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of half-open intervals: sorted, apart from each other, none empty."""
    joined: list[Interval] = []
    for start_ns, end_ns in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start_ns <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_ns))
        else:
            joined.append((start_ns, end_ns))
    return joined


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end_ns - start_ns for start_ns, end_ns in union(intervals))


def _steps(main: Timeline | None) -> list[StepTruth]:
    slices: list[Slice] = [slice_ for slice_ in main.slices if slice_.name.startswith(STEP_PREFIX)] if main else []
    return [
        StepTruth(int(slice_.name.removeprefix(STEP_PREFIX)), slice_.start_ns, slice_.closed_ns - slice_.start_ns)
        for slice_ in slices
    ]


def _device_truth(device: int, works: Sequence[Work]) -> DeviceTruth:
    spans: dict[str, list[Interval]] = defaultdict(list)
    for work in works:
        spans[work.kind].append((work.start_ns, work.end_ns))
    compute = spans[COMPUTE]
    start_ns = min(work.start_ns for work in works)
    return DeviceTruth(
        device=device,
        start_ns=start_ns,
        window_ns=max(work.end_ns for work in works) - start_ns,
        busy_ns=_length(span for kind in spans.values() for span in kind),
        compute_ns=_length(compute),
        communication_ns=_length(spans[COMMUNICATION]),
        copy_ns=_length(spans[COPY]),
        exposed_communication_ns=_length(compute + spans[COMMUNICATION]) - _length(compute),
        exposed_copy_ns=_length(compute + spans[COPY]) - _length(compute),
    )


def _idle_pieces(works: Sequence[Work], main: Timeline | None, overheads: list[Interval]) -> Iterator[IdlePiece]:
    """The idle pieces of one device, in order of time."""
    starting: dict[int, list[Work]] = defaultdict(list)
    ending: dict[int, list[Work]] = defaultdict(list)
    for work in works:
        starting[work.start_ns].append(work)
        ending[work.end_ns].append(work)
    busy = union((work.start_ns, work.end_ns) for work in works)
    device = works[0].device
    for (_, gap_start_ns), (gap_end_ns, _) in pairwise(busy):
        following = _deciding_work(starting[gap_end_ns])
        launch = following.launch if following else None
        if following is None or launch is None:
            yield IdlePiece(device, gap_start_ns, gap_end_ns - gap_start_ns, "unknown")
            continue
        trigger = launch.thread.synchronising_call_at(gap_start_ns)
        for stretch in _explain(gap_start_ns, gap_end_ns, following, launch, ending[gap_start_ns], main, overheads):
            length_ns = stretch.end_ns - stretch.start_ns
            yield IdlePiece(device, stretch.start_ns, length_ns, stretch.cause, trigger)


def _deciding_work(candidates: Sequence[Work]) -> Work | None:
    launched = [(work.launch.start_ns, work) for work in candidates if work.launch]
    if not launched:
        return None
    return min(launched, key=lambda pair: (-pair[0], pair[1].correlation, pair[1].queue))[1]


def _explain(
    gap_start_ns: int,
    gap_end_ns: int,
    following: Work,
    launch: Launch,
    ended: Sequence[Work],
    main: Timeline | None,
    overheads: list[Interval],
) -> Iterator[Stretch]:
    """Cut one gap into the host's pieces and the device's."""
    late = launch.start_ns > gap_start_ns
    if late:
        host_end_ns = min(launch.start_ns, gap_end_ns)
        stretches = _host_stretches(launch.thread, main, gap_start_ns, host_end_ns)
        yield from _with_overhead(stretches, overheads)
    waited = not late and all(work.queue != following.queue for work in ended)
    device_start_ns = max(gap_start_ns, launch.start_ns)
    if device_start_ns < gap_end_ns:
        yield Stretch(device_start_ns, gap_end_ns, None, "dependency" if waited else "launch_latency")


def _host_stretches(thread: Timeline, main: Timeline | None, start_ns: int, end_ns: int) -> Iterator[Stretch]:
    """What the launching thread did, or the main thread while the launching one had no slice open."""
    for stretch in thread.between(start_ns, end_ns):
        if stretch.innermost is None and main is not None:
            yield from main.between(stretch.start_ns, stretch.end_ns)
        else:
            yield stretch


def _with_overhead(stretches: Iterable[Stretch], overheads: list[Interval]) -> Iterator[Stretch]:
    """Cut stretches where the profiler's overhead begins and ends, then join what was cut for no reason."""
    last: Stretch | None = None
    for stretch in stretches:
        for piece in _cut(stretch, overheads):
            if last and (last.innermost, last.cause) == (piece.innermost, piece.cause):
                last = replace(last, end_ns=piece.end_ns)
                continue
            if last:
                yield last
            last = piece
    if last:
        yield last


def _cut(stretch: Stretch, overheads: list[Interval]) -> Iterator[Stretch]:
    position_ns = stretch.start_ns
    for start_ns, end_ns in overheads:
        start_ns, end_ns = max(start_ns, position_ns), min(end_ns, stretch.end_ns)
        if start_ns >= end_ns:
            continue
        if position_ns < start_ns:
            yield replace(stretch, start_ns=position_ns, end_ns=start_ns)
        yield replace(stretch, start_ns=start_ns, end_ns=end_ns, cause="profiler_overhead")
        position_ns = end_ns
    if position_ns < stretch.end_ns:
        yield replace(stretch, start_ns=position_ns)
