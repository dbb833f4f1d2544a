"""One truth in every dress: whichever profiler writes a simulated machine's run, its file tells the same story."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import idle_time
from stepscope.analysis.steps import step_table
from stepscope.commands import main
from stepscope.compare import compare_traces
from stepscope.diagnosis.diagnosis import Diagnosis, diagnose
from stepscope.readers import open_trace
from stepscope.trace import Trace, Window
from stepscope.trace.window import StepRange
from tests.property.test_idle_law import pieces
from tests.simulator import IdlePiece, Machine, write_kineto
from tests.simulator.nsight_schema import TABLES
from tests.simulator.nsight_systems import NsightOptions, write_nsight
from tests.simulator.perfetto import PerfettoOptions, write_perfetto
from tests.simulator.programs import PROGRAMS
from tests.simulator.rocprof import HIP_NAMES, RocprofOptions, write_rocprof
from tests.simulator.sight import Reading, Sight, by_name_alone, calls_alone, ranges_alone, without_frames
from tests.simulator.strategies import programs
from tests.simulator.xplane import XPlaneOptions, write_xplane
from tests.tries import tries

PROPERTY = settings(deadline=None, max_examples=tries(12), suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Format:
    """A format: how it is written, what it can show, and how it names the device's API.

    ``unable`` are the rules that need what the format does not hold: their reason, and the less precise rule that
    speaks where they would have spoken, if there is one.
    """

    name: str
    suffix: str
    write: Callable[[Machine, Path], Path]
    shuffled: Callable[[Machine, Path], Path]
    sight: Sight
    call_names: dict[str, str] = field(default_factory=dict)
    unable: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def read(self, machine: Machine, folder: Path, *, shuffled: bool = False) -> Trace:
        write = self.shuffled if shuffled else self.write
        trace = open_trace(write(machine, folder / f"{self.name}{self.suffix}"))
        trace.check()
        return trace


NO_TYPES = ("NVTX and roctx ranges tell shapes without types", None)
NO_SHAPES = ("XLA's events tell no shapes", None)
NO_MESSAGES = ("only PyTorch's profiler tells how much a collective exchanges", "exposed-communication")
NO_MEMORY_KINDS = ("AMD's copies do not tell pageable memory from pinned", "device-tail")
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
        unable={"unaligned-dimensions": NO_TYPES, "late-rank": NO_MESSAGES},
    ),
    Format(
        "rocprof",
        "_results.json",
        write_rocprof,
        lambda machine, path: write_rocprof(machine, path, RocprofOptions(shuffle_seed=5)),
        Sight(without_frames, overheads="none"),
        call_names=HIP_NAMES,
        unable={
            "unaligned-dimensions": NO_TYPES,
            "late-rank": NO_MESSAGES,
            "exposed-copy": NO_MEMORY_KINDS,
        },
    ),
    Format(
        "xplane",
        ".xplane.pb",
        write_xplane,
        lambda machine, path: write_xplane(machine, path, XPlaneOptions(shuffle_seed=5)),
        Sight(by_name_alone, overheads="apart"),
        unable={
            "unaligned-dimensions": NO_SHAPES,
            "unfused-attention": NO_SHAPES,
            "late-rank": NO_MESSAGES,
            "wrong-backend": ("without shapes it is not known how much gloo exchanges", "wrong-backend"),
        },
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
SAME_NAMES = ("nsight_systems", "xplane", "perfetto")
"""Formats of the same device, whose calls, kernels and copies are therefore called alike."""
KINETO, *OTHERS = FORMATS
"""test_idle_law holds Kineto's reader to the truth; here its findings are what the others' are compared with."""
in_every_format = pytest.mark.parametrize("dress", OTHERS, ids=IDS[1:])
BASIC = (
    "input_bound_training",
    "two_queue_dependency",
    "two_devices",
    "backward_thread",
    "exposed_all_reduce",
    "print_tensor_fault",
    "replicated_model_fault",
)
FAULTS = (
    "item_fault",
    "starved_loader_fault",
    "pageable_copy_fault",
    "launch_bound_training",
    "single_tensor_optimizer",
    "recompilation",
    "cpu_fallback_fault",
    "layout_conversion_fault",
    "unaligned_vocabulary_fault",
    "written_out_attention_fault",
    "late_rank_fault",
    "exchange_through_host_fault",
    "graph_decode",
)
SILENT_OF_THEM = {"rocprof": {"exposed-copy"}, "xplane": {"wrong-backend"}}
"""Rules that speak all the same, by another name or with another number, and so are not said to be unable."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


def renamed(dress: Format, idle: list[IdlePiece]) -> list[IdlePiece]:
    """The idle pieces with their triggers as the format names them."""
    return [replace(piece, trigger=dress.call_names.get(piece.trigger or "", piece.trigger)) for piece in idle]


def steps_of(trace: Trace) -> list[tuple[int, int, int]]:
    return list(step_table(trace).select("index", "start_ns", "duration_ns").iter_rows())


def is_true(dress: Format, machine: Machine, trace: Trace) -> None:
    """Idle causes with their triggers, the devices' time and the steps are those of the machine, to the nanosecond."""
    truth = dress.sight.truth(machine)
    assert pieces(idle_time(trace)) == renamed(dress, truth.merged())
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
@pytest.mark.parametrize("name", BASIC)
def test_ready_made_programs_have_their_true_causes(dress: Format, name: str, tmp_path: Path) -> None:
    machine = PROGRAMS[name]()
    is_true(dress, machine, dress.read(machine, tmp_path))


@in_every_format
@pytest.mark.parametrize("name", ["exposed_all_reduce", "graph_decode", "two_devices", "print_tensor_fault"])
def test_the_order_of_a_file_does_not_matter(dress: Format, name: str, tmp_path: Path) -> None:
    machine = PROGRAMS[name]()
    is_true(dress, machine, dress.read(machine, tmp_path, shuffled=True))


@in_every_format
@pytest.mark.parametrize(
    "part", [{"steps": StepRange(1, 2)}, {"window": Window(400_000, 1_900_000)}], ids=["steps", "window"]
)
@pytest.mark.parametrize("name", ["exposed_all_reduce", "print_tensor_fault", "two_devices"])
def test_a_part_of_a_file_is_that_part_of_the_run(
    dress: Format, name: str, part: dict[str, Any], tmp_path: Path
) -> None:
    machine = PROGRAMS[name]()
    expected = open_trace(write_kineto(dress.sight.of(machine), tmp_path / "kineto.json.gz"), **part)
    found = open_trace(dress.write(machine, tmp_path / f"part{dress.suffix}"), **part)
    found.check()
    assert pieces(idle_time(found)) == renamed(dress, pieces(idle_time(expected)))
    assert device_time(found).equals(device_time(expected))
    assert step_table(found).equals(step_table(expected))
    for table in ("launches", "device_work"):
        times = ("start_ns", "duration_ns")
        assert found.table(table).select(times).sort(times).equals(expected.table(table).select(times).sort(times)), (
            table
        )


@in_every_format
@pytest.mark.parametrize("name", FAULTS)
def test_causes_are_true_and_findings_those_of_the_same_run_in_kineto(dress: Format, name: str, tmp_path: Path) -> None:
    machine = PROGRAMS[name]()
    trace = dress.read(machine, tmp_path)
    is_true(dress, machine, trace)
    expected = dict(savings_in_kineto(name, dress.sight.reading, tmp_path))
    diagnosis = diagnose(trace)
    found = savings(diagnosis)
    for rule, (_, instead) in dress.unable.items():
        if rule in expected:
            del expected[rule]
            assert rule in SILENT_OF_THEM.get(dress.name, ()) or rule in could_not_look(diagnosis), rule
            if instead is not None:
                assert found.pop(instead) > 0
    assert found == expected


def savings_in_kineto(name: str, reading: Reading, folder: Path) -> dict[str, int]:
    """What the diagnosis of a program's Kineto trace says, which holds no more than a format reads."""
    if (name, reading) not in _SAVINGS:
        seen = Sight(reading).of(PROGRAMS[name]())
        _SAVINGS[name, reading] = savings(diagnose(KINETO.read(seen, folder)))
    return _SAVINGS[name, reading]


_SAVINGS: dict[tuple[str, Reading], dict[str, int]] = {}


def savings(diagnosis: Diagnosis) -> dict[str, int]:
    """Rule -> what its finding saves, in ns per step."""
    return {finding.rule: finding.saving_ns_per_step for finding in diagnosis.findings}


def could_not_look(diagnosis: Diagnosis) -> set[str]:
    return {rule for question in diagnosis.not_answered for rule in (question.rule, *question.rules)}


@pytest.mark.parametrize(
    "options",
    [
        NsightOptions(empty_tables=True),
        NsightOptions(
            without=frozenset(
                {
                    *("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "PROFILER_OVERHEAD", "ThreadNames", "TARGET_INFO_GPU"),
                    *("PROCESSES", "TARGET_INFO_SESSION_START_TIME", "TARGET_INFO_CUDA_STREAM", "ANALYSIS_DETAILS"),
                    *(table for table in TABLES if table.startswith(("ENUM_", "META_"))),
                }
            )
        ),
    ],
    ids=["tables without rows", "without what is optional"],
)
def test_an_export_of_nsight_systems_with_other_tables(options: NsightOptions, tmp_path: Path) -> None:
    for name in ("exposed_all_reduce", "item_fault", "two_devices"):
        machine = PROGRAMS[name]()
        trace = open_trace(write_nsight(machine, tmp_path / "export.sqlite", options))
        trace.check()
        is_true(NAMED["nsight_systems"], machine, trace)


def test_the_recorded_environment_is_kept_nowhere(tmp_path: Path) -> None:
    path = write_nsight(PROGRAMS["item_fault"](), tmp_path / "export.sqlite")
    open_trace(path).save(tmp_path / "saved")
    assert b"a secret" in path.read_bytes()
    assert all(b"a secret" not in file.read_bytes() for file in (tmp_path / "saved").iterdir())


@pytest.mark.parametrize(
    ("lost", "reading"), [("hip_api", ranges_alone), ("marker_api", calls_alone)], ids=["no calls", "no ranges"]
)
def test_a_rocprof_file_without_a_kind_of_records(lost: str, reading: Reading, tmp_path: Path) -> None:
    options = RocprofOptions(without=frozenset({lost}))
    dress = replace(
        NAMED["rocprof"],
        write=lambda machine, path: write_rocprof(machine, path, options),
        sight=Sight(reading, overheads="none"),
    )
    for name in ("two_devices", "item_fault", "graph_decode"):
        is_true(dress, PROGRAMS[name](), dress.read(PROGRAMS[name](), tmp_path))


@pytest.mark.parametrize("dress", [NAMED[name] for name in SAME_NAMES], ids=SAME_NAMES)
def test_one_run_in_two_formats_does_not_differ(
    dress: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = PROGRAMS["item_every_step"]()
    before = write_kineto(dress.sight.of(machine), tmp_path / "kineto.json.gz")
    after = dress.write(machine, tmp_path / f"same{dress.suffix}")

    found = compare_traces(open_trace(before), open_trace(after))
    for table in (found.causes, found.operators, found.kernels, found.communication):
        assert set(table["match"]) <= {"same"}
        assert set(table["difference_ns"]) <= {0.0}

    assert main(["compare", str(before), str(after), "--no-cache"]) == 0
    said = capsys.readouterr().out
    assert "No difference shown" in said
    assert "No cause of busy or idle time differs" in said


@pytest.mark.parametrize("sight", [Sight(without_frames), Sight(by_name_alone)], ids=["no frames", "names"])
@PROPERTY
@given(machine=programs())
def test_what_a_format_shows_of_a_machine_is_a_machine(sight: Sight, machine: Machine, folder: Path) -> None:
    is_true(KINETO, sight.of(machine), KINETO.read(sight.of(machine), folder))
