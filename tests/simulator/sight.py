"""What a format can show of a machine's run: the same run without what the format has no place for.

The truth of what is left is the truth that a file of that format can tell, and its Kineto trace holds the same facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.simulator.device import Launch, Work
from tests.simulator.host import Host
from tests.simulator.machine import Machine
from tests.simulator.timeline import (
    ANNOTATION,
    CALL,
    DATA_LOADER_PREFIX,
    DRIVER_CALL,
    FRAME,
    LOGGING_PREFIX,
    OPERATOR,
    OPTIMIZER_PREFIX,
    STEP_PREFIX,
    Slice,
    Stretch,
    definite_cause,
)
from tests.simulator.truth import Truth, tell_truth

MARKS = (STEP_PREFIX, OPTIMIZER_PREFIX, DATA_LOADER_PREFIX)
MODULE_PREFIX = "nn.Module: "
KNOWN_NAME = re.compile("|".join([r"\w+::?", *map(re.escape, (*MARKS, LOGGING_PREFIX))]))
"""How names begin that tell what they are: a library's function, a collective of the host's, a mark of PyTorch's."""

Reading = Callable[[Slice, bool], "tuple[str, str] | None"]
"""The category and the name that a slice has in a format, None where the format has no place for it; told whether the
slice is on the main thread."""


def everything(slice_: Slice, is_main: bool) -> tuple[str, str] | None:
    """A format that keeps every slice as it is."""
    return slice_.category, slice_.name


def without_frames(slice_: Slice, is_main: bool) -> tuple[str, str] | None:
    """A format that knows no Python."""
    return None if slice_.category == FRAME else (slice_.category, slice_.name)


def calls_alone(slice_: Slice, is_main: bool) -> tuple[str, str] | None:
    """A recording of the device's API without ranges."""
    return (slice_.category, slice_.name) if slice_.category in (CALL, DRIVER_CALL) else None


def ranges_alone(slice_: Slice, is_main: bool) -> tuple[str, str] | None:
    """A recording of ranges without the device's API."""
    return None if slice_.category in (CALL, DRIVER_CALL, FRAME) else (slice_.category, slice_.name)


def by_name_alone(slice_: Slice, is_main: bool) -> tuple[str, str] | None:
    """Slices with no more than a name, as TensorFlow's and JAX's TraceMe.

    What has no library's name is a mark of the program on its main thread, and a library's doing on any other. Python
    frames have the name of their file without its folders; calls of modules are not recorded. What takes no time is an
    instant, unless it is a step or has a number beside that the device's work has too.
    """
    category, name = slice_.category, slice_.name
    if slice_.closed_ns == slice_.start_ns and category not in (CALL, DRIVER_CALL) and not name.startswith(STEP_PREFIX):
        return None
    if category == FRAME:
        return None if name.startswith(MODULE_PREFIX) else (FRAME, name.rpartition("/")[2])
    if category in (ANNOTATION, OPERATOR) and not KNOWN_NAME.match(name):
        return (ANNOTATION if is_main else OPERATOR), name
    return category, name


@dataclass(frozen=True)
class Sight:
    """What a format shows.

    ``overheads``: what the profiler did for its own business; ``apart`` where it is written without saying whom it kept
    from work. ``main_by_number``: the main thread is told by its number, not only by the steps and other marks on it.
    ``kinds``: what a kind of device work is in it.
    """

    reading: Reading = everything
    overheads: Literal["shown", "apart", "none"] = "shown"
    main_by_number: bool = True
    kinds: Mapping[str, str] = field(default_factory=dict)

    def of(self, machine: Machine) -> Machine:
        """The machine as the format shows it; the one given stays as it is."""
        seen = Machine(tick_ns=machine.ledger.tick_ns, with_frames=machine.ledger.with_frames)
        seen.ledger.queues = dict(machine.ledger.queues)
        seen.ledger.overheads = list(machine.ledger.overheads) if self.overheads == "shown" else []
        slices: dict[int, Slice] = {}
        hosts: dict[int, Host] = {}
        for host in machine.hosts:
            hosts[id(host)] = self._host(host, seen, slices)
        seen.hosts = list(hosts.values())
        seen.ledger.works = [self._work(work, hosts, slices) for work in machine.works]
        return seen

    def truth(self, machine: Machine) -> Truth:
        """What a file of the format can tell, on the clock of its tables: 0 is the first thing in it."""
        seen = self.of(machine)
        main = seen.main
        known = main is not None and (
            self.main_by_number or any(slice_.name.startswith(MARKS) for slice_ in main.slices)
        )
        truth = tell_truth(main if known else None, seen.works, seen.ledger.overheads)
        apart = [(start, end) for start, end in machine.ledger.overheads if self.overheads == "apart" and end > start]
        return truth.shifted(-min([seen.first_event_ns(), *(start_ns for start_ns, _ in apart)]))

    def _host(self, host: Host, seen: Machine, slices: dict[int, Slice]) -> Host:
        ledger = seen.ledger
        copy = Host(
            host.name,
            host.thread_id,
            host.tick_ns,
            ledger.identifiers,
            host.now_ns,
            ledger=ledger,
            is_main=host.is_main,
        )
        for slice_ in host.slices:
            read = self.reading(slice_, host.is_main)
            if read is None:
                continue
            category, name = read
            own = slice_.cause != definite_cause(slice_.category, slice_.name)
            cause = slice_.cause if own else definite_cause(category, name)
            parent = self._visible(slice_.parent, slices)
            slices[id(slice_)] = replace(slice_, category=category, name=name, cause=cause, parent=parent)
            copy.slices.append(slices[id(slice_)])
        for stretch in host.stretches:
            innermost = self._visible(stretch.innermost, slices)
            copy.stretches.append(Stretch(stretch.start_ns, stretch.end_ns, innermost, _cause(innermost)))
        return copy

    @staticmethod
    def _visible(slice_: Slice | None, slices: dict[int, Slice]) -> Slice | None:
        while slice_ is not None and id(slice_) not in slices:
            slice_ = slice_.parent
        return None if slice_ is None else slices[id(slice_)]

    def _work(self, work: Work, hosts: dict[int, Host], slices: dict[int, Slice]) -> Work:
        launch = work.launch
        if launch is not None:
            call = slices.get(id(launch.call))
            launch = Launch(hosts[id(launch.thread)], call, launch.correlation) if call else None
        return replace(work, launch=launch, kind=self.kinds.get(work.kind, work.kind))


def _cause(innermost: Slice | None) -> str:
    """The cause a slice stands for as the innermost of its thread."""
    categories: set[str] = set()
    while innermost is not None:
        if innermost.cause is not None:
            return innermost.cause
        categories.add(innermost.category)
        innermost = innermost.parent
    if categories & {OPERATOR, CALL, DRIVER_CALL}:
        return "dispatch"
    return "python" if FRAME in categories else "untraced"
