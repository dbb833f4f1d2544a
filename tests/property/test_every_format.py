"""One truth in every dress: whichever profiler writes a simulated machine's run, its file tells the same story."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import idle_time
from stepscope.analysis.steps import step_table
from stepscope.readers import open_trace
from stepscope.trace import Trace
from tests.property.test_idle_law import pieces
from tests.simulator import IdlePiece, Machine, Truth, write_kineto
from tests.simulator.nsight_systems import NsightOptions, write_nsight
from tests.simulator.perfetto import PerfettoOptions, write_perfetto
from tests.simulator.programs import PROGRAMS
from tests.simulator.rocprof import HIP_NAMES, RocprofOptions, write_rocprof
from tests.simulator.sight import Sight, by_name_alone, without_frames
from tests.simulator.strategies import programs
from tests.simulator.xplane import XPlaneOptions, write_xplane

PROPERTY = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Format:
    """A format: how it is written, what it can show, and how it names the device's API.

    ``unable`` are the rules that need what the format does not hold, and why.
    """

    name: str
    suffix: str
    write: Callable[[Machine, Path], Path]
    shuffled: Callable[[Machine, Path], Path]
    sight: Sight
    call_names: dict[str, str] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)

    def read(self, machine: Machine, folder: Path, *, shuffled: bool = False) -> Trace:
        write = self.shuffled if shuffled else self.write
        trace = open_trace(write(machine, folder / f"{self.name}{self.suffix}"))
        trace.check()
        return trace


FORMATS = (
    Format(
        "kineto",
        ".json.gz",
        write_kineto,
        write_kineto,
        Sight(),
    ),
    Format(
        "nsight_systems",
        ".sqlite",
        write_nsight,
        lambda machine, path: write_nsight(machine, path, NsightOptions(shuffle_seed=5)),
        Sight(without_frames),
    ),
    Format(
        "rocprof",
        "_results.json",
        write_rocprof,
        lambda machine, path: write_rocprof(machine, path, RocprofOptions(shuffle_seed=5)),
        Sight(without_frames, overheads="none"),
        call_names=HIP_NAMES,
    ),
    Format(
        "xplane",
        ".xplane.pb",
        write_xplane,
        lambda machine, path: write_xplane(machine, path, XPlaneOptions(shuffle_seed=5)),
        Sight(by_name_alone, overheads="apart"),
    ),
    Format(
        "perfetto",
        ".pftrace",
        write_perfetto,
        lambda machine, path: write_perfetto(machine, path, PerfettoOptions(interned=False, shuffle_seed=5)),
        Sight(),
    ),
)
IDS = [each.name for each in FORMATS]
NAMED = dict(zip(IDS, FORMATS, strict=True))
in_every_format = pytest.mark.parametrize("dress", FORMATS, ids=IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


def named_in(dress: Format, truth: Truth) -> list[IdlePiece]:
    """The true idle pieces, with their triggers as the format names them."""
    return [
        IdlePiece(
            piece.device,
            piece.start_ns,
            piece.duration_ns,
            piece.cause,
            dress.call_names.get(piece.trigger or "", piece.trigger),
        )
        for piece in truth.merged()
    ]


def steps_of(trace: Trace) -> list[tuple[int, int, int]]:
    return list(step_table(trace).select("index", "start_ns", "duration_ns").iter_rows())


def is_true(dress: Format, machine: Machine, trace: Trace) -> None:
    """Idle causes with their triggers, the devices' time and the steps are those of the machine, to the nanosecond."""
    truth = dress.sight.truth(machine)
    assert pieces(idle_time(trace)) == named_in(dress, truth)
    for row in device_time(trace).iter_rows(named=True):
        true = truth.devices[int(row["device"])]
        for name, value in row.items():
            if name != "device":
                assert value == getattr(true, name), (row["device"], name)
    assert trace.device_work["device"].n_unique() == len(truth.devices)
    if truth.steps:
        assert steps_of(trace) == [(step.index, step.start_ns, step.duration_ns) for step in truth.steps]


@in_every_format
@PROPERTY
@given(machine=programs())
def test_random_programs_have_their_true_causes(dress: Format, machine: Machine, folder: Path) -> None:
    seen = dress.sight.of(machine)
    assume(seen.works)  # else there may be nothing in the file at all
    is_true(dress, machine, dress.read(machine, folder))


@in_every_format
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_ready_made_programs_have_their_true_causes(dress: Format, name: str, tmp_path: Path) -> None:
    machine = PROGRAMS[name]()
    is_true(dress, machine, dress.read(machine, tmp_path))


@pytest.mark.parametrize("sight", [Sight(without_frames), Sight(by_name_alone)], ids=["no frames", "names"])
@PROPERTY
@given(machine=programs())
def test_what_a_format_shows_of_a_machine_is_a_machine(sight: Sight, machine: Machine, folder: Path) -> None:
    is_true(NAMED["kineto"], sight.of(machine), NAMED["kineto"].read(sight.of(machine), folder))
