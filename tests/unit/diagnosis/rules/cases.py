"""What the tests of rules share: traces of simulated machines, and asking one rule about one trace."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from stepscope.diagnosis.finding import Finding, RuleResult
from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.trace import Trace
from stepscope.trace.metadata import Device
from stepscope.trace.tables import SCHEMAS
from tests.recount import Recount, differences
from tests.simulator import Machine, kineto_bytes
from tests.simulator.device import Queue
from tests.simulator.host import Host
from tests.unit.recording import Recording

Cases: TypeAlias = dict[str, Callable[[], Trace]]
US = 1_000


def recorded(machine: Machine) -> Trace:
    """What the profiler's file of this machine holds, in memory."""
    return _read(kineto_bytes(machine))


@lru_cache(maxsize=100)
def _read(data: bytes) -> Trace:
    """Once for all tests of the same machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(data)
        trace = open_trace(path)
        tables = {name: trace.table(name) for name in SCHEMAS}
    return Trace.from_tables(tables, dataclasses.replace(trace.metadata, path="trace.json"), trace.warnings)


def training(
    step: Callable[[Host, Queue], None], steps: int = 4, *, wait: bool = True, with_frames: bool = True
) -> Machine:
    """Steps of train.py's function step; with `wait`, each ends when the device has finished."""
    machine = Machine(tick_ns=US, with_frames=with_frames)
    main, queue = machine.host("main"), machine.queue()
    for index in range(steps):
        with main.step(index), main.frame("train.py(12): step", before_ns=3 * US):
            step(main, queue)
            if wait:
                main.synchronize_device()
    return machine


def layers(host: Host, queue: Queue, count: int = 6, kernel_us: int = 150, name: str = "gemm") -> None:
    """A model's forward pass of different layers, which is no loop."""
    for index in range(count):
        with (
            host.frame("model.py(30): forward", before_ns=5 * US),
            host.operator(f"aten::layer{index}", before_ns=8_000),
        ):
            host.launch(name, queue, kernel_us * US)


def true_idle_ns(machine: Machine, causes: Collection[str], *, triggered: bool = False) -> int:
    """The device's idle time for these reasons, from the first step's beginning to the last work's end."""
    truth = machine.truth()
    begin = truth.steps[0].start_ns
    return sum(
        max(piece.end_ns - max(piece.start_ns, begin), 0)
        for piece in truth.pieces_of(0)
        if piece.cause in causes and (piece.trigger is not None or not triggered)
    )


def asked(rule: Rule, trace: Trace, **settings: float) -> RuleResult:
    """What a rule says, with thresholds set by their short names; counted again, the trace says the same."""
    view = View(trace, {f"{rule.id}.{name}": value for name, value in settings.items()})
    result = rule.ask(view)
    assert isinstance(result, RuleResult)
    assert [differences(finding, Recount(view)) for finding in result.findings] == [[] for _ in result.findings]
    return result


def the_finding(rule: Rule, trace: Trace, **settings: float) -> Finding:
    [found] = asked(rule, trace, **settings).findings
    return found


def figures_of(finding: Finding) -> list[tuple[str, float, str, float | None]]:
    return [(figure.name, figure.value, figure.unit, figure.threshold) for figure in finding.evidence.figures]


def places_of(finding: Finding) -> list[tuple[str, int, str]]:
    return [(place.file, place.line, place.function) for place in finding.where]


def with_capability(trace: Trace, capability: str | None) -> Trace:
    """The same trace from a device of this compute capability."""
    device = Device("0", "Simulated Device 80GB", compute_capability=capability)
    return dataclasses.replace(trace, metadata=dataclasses.replace(trace.metadata, devices=(device,)))


def empty_trace() -> Trace:
    return Trace.from_tables({})


def busy_device() -> Trace:
    """A device that is never idle, driven well ahead: nothing is wrong."""
    recording = Recording()
    recording.step(0, 1000, 1)
    recording.frame(0, 1000, "train.py(12): step")
    for number in range(5):
        recording.operator(
            20 * number + 5, 10, f"aten::layer{number}", input_shapes="[[2, 2]]", input_types='["float"]'
        )
        recording.launched(20 * number + 8, 200 * number + 50, 200, f"kernel{number}", 100 + number)
    return recording.trace()
