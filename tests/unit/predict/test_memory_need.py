"""How much memory a step needs, and whether a device has it."""

from __future__ import annotations

import math

import polars as pl
import pytest

from stepscope.machine.devices import DevicePeaks, named_device
from stepscope.predict.batch import MemoryNeed, memory_need, sampled_memory
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ModelFacts, ProgramFacts
from stepscope.trace.telemetry import MISSING_SCHEMA, SAMPLE_SCHEMA, Telemetry
from tests.unit.recording import Recording

GB = 10**9


def recorded(*, total: bool, device: str = "0", model: ModelFacts | None = None) -> Trace:
    """A block of 3 GB, then 2 GB more, of which 1 GB is given back; with totals 4 GB were there before."""
    recording = Recording(Metadata(program=ProgramFacts(model=model)))
    recording.step(0, 1000, 1)
    held = 4 * GB
    for time, size in ((10, 3 * GB), (20, 2 * GB), (30, -1 * GB)):
        held += size
        more = {"total_allocated": held, "total_reserved": 12 * GB} if total else {}
        recording.allocation(time, size, address=time, device=device, **more)
    return recording.trace()


def l4() -> DevicePeaks:
    return named_device("L4")


def test_nothing_recorded() -> None:
    need = memory_need(Trace.from_tables({}), "0")

    assert need == MemoryNeed(None, False, "memory was not recorded")
    kineto = memory_need(Trace.from_tables({}, Metadata(format="kineto")), "0")
    assert kineto.note == "memory was not recorded: record with profile_memory=True"
    assert need.fits(l4()) is None


def test_the_most_that_was_allocated_at_once() -> None:
    need = memory_need(recorded(total=True), "0")

    assert need == MemoryNeed(9 * GB, False, "the peak of allocated memory")
    assert need.fits(l4()) is True


def test_without_totals_it_is_a_lower_bound() -> None:
    """Which can be too much for a device, and never little enough."""
    need = memory_need(recorded(total=False), "0")

    assert (need.bytes, need.at_least) == (5 * GB, True)
    assert need.fits(l4()) is None
    assert MemoryNeed(30 * GB, True, "").fits(l4()) is False


def test_on_a_processor_the_models_own_comes_on_top() -> None:
    model = ModelFacts(parameter_bytes=2 * GB, buffer_bytes=1 * GB, optimizer_state_bytes=4 * GB)

    need = memory_need(recorded(total=False, device="cpu", model=model), None)

    assert (need.bytes, need.at_least) == (12 * GB, False)
    assert need.note.endswith("with what the model and its optimizer hold")


@pytest.mark.parametrize(("bytes", "fits"), [(21_600_000_000, True), (21_600_000_001, False)])
def test_a_tenth_stays_free(bytes: int, fits: bool) -> None:
    """An L4 has 24 GB."""
    assert MemoryNeed(bytes, False, "").fits(l4()) is fits


def test_with_the_batch_all_but_what_was_there_before_grows() -> None:
    """4 GB were held before the recording; the other 5 double."""
    need = memory_need(recorded(total=True), "0", batch_factor=2.0)

    assert need.bytes == 14 * GB
    assert "everything but parameters, gradients and the optimizer's state grows" in need.note


def sampled(*rows: tuple[str, str, float | None]) -> Telemetry:
    """Samples of devices' memory: name of the series, device, value."""
    samples = [(0, 1, "device", name, device, "bytes", 0, None, value) for name, device, value in rows]
    nothing = pl.DataFrame(schema=MISSING_SCHEMA)
    return Telemetry(pl.DataFrame(samples, schema=SAMPLE_SCHEMA, orient="row"), nothing)


def test_telemetry_tells_where_allocations_were_not_recorded() -> None:
    used = "memory_used_bytes"
    one = sampled(
        (used, "0", 3e9), (used, "0", math.inf), (used, "0", None), (used, "0", 5e9), ("memory_bytes", "0", 9e9)
    )
    two = sampled((used, "0", 3e9), (used, "1", 5e9))

    assert sampled_memory(one, "0") == sampled_memory(one, "gpu:0") == 5 * GB
    assert (sampled_memory(two, "0"), sampled_memory(two, "gpu:0")) == (3 * GB, None)
    assert sampled_memory(one, None) is None
    assert sampled_memory(sampled(), "0") is None
    assert memory_need(Trace.from_tables({}), "0", sampled_bytes=5 * GB, batch_factor=2.0).bytes == 10 * GB
    assert memory_need(recorded(total=True), "0", sampled_bytes=50 * GB).bytes == 9 * GB
