"""memory-headroom: memory is unused while the device waits for the host."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.diagnosis.rules.memory_headroom import RULE as rule
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import LoaderFacts, ProgramFacts
from stepscope.trace.tables import SCHEMAS
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.recording import Recording

MIB = 2**20


def waiting(
    reserved: int = 30,
    capacity: int | None = 100,
    *,
    late_ns: int = 40,
    batch_size: int | None = None,
    before: int = 10,
) -> Trace:
    """A step in which the device waits `late_ns` for each of ten launches; it holds up to 20 MiB of 10 from before."""
    program = ProgramFacts(loaders=(LoaderFacts(batch_size=batch_size),))
    device = Device("0", memory_bytes=None if capacity is None else capacity * MIB)
    recording = Recording(Metadata(devices=(device,), program=program))
    recording.step(0, 1000, 1)
    for number in range(10):
        begin = 100 * number
        recording.operator(begin, 100, "aten::mm")
        recording.launch(begin + late_ns - 2, 2, 101 + number)
        recording.work(begin + late_ns, 100 - late_ns, "gemm", 101 + number)
    more = {"total_reserved": reserved * MIB, "address": 1}
    recording.allocation(20, 10 * MIB, total_allocated=(before + 10) * MIB, **more)
    recording.allocation(960, -10 * MIB, total_allocated=before * MIB, **more)
    return recording.trace()


def without_totals() -> Trace:
    trace = waiting()
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["memory"] = trace.memory.with_columns(pl.lit(None).alias("total_allocated"))
    return Trace.from_tables(tables, trace.metadata)


FIRES: Cases = {"room for more": waiting}
SILENT: Cases = {
    "what was there before is not known": without_totals,
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "memory in use": lambda: waiting(50),
    "the device is busy": lambda: waiting(late_ns=5),
    "size unknown": lambda: waiting(capacity=None),
    "what grows with the batch does not fit twice": lambda: waiting(49, 100, before=75),
}


def test_how_much_larger_a_batch_fits() -> None:
    finding = the_finding(rule, waiting())

    # Of 90 MiB that may be used, 10 were there before and 10 are held and unused: 70 for what takes 10 now.
    assert finding.title == (
        "only 30.0 MiB of 100.0 MiB are ever used, while the device waits 40% of the time for the host: "
        "a batch about 7 times as large would fit"
    )
    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert figures_of(finding) == [
        ("share of the device's memory in use at most", 0.3, "share", 0.5),
        ("share of the steps in which the device waits for the host", 0.4, "share", 0.1),
        ("memory in use at most", 30 * MIB, "bytes", None),
        ("memory there is", 100 * MIB, "bytes", None),
        ("times as large a batch that fits, estimated", 7, "count", None),
    ]
    assert "batch_size=2 * batch_size" in finding.remedy.code


def test_a_program_of_jax_is_not_told_of_torchs_loader() -> None:
    trace = waiting()
    tables = {name: trace.table(name) for name in SCHEMAS}
    tables["operators"] = trace.operators.with_columns(name=pl.lit("PjitFunction(step)"))

    finding = the_finding(rule, Trace.from_tables(tables, replace(trace.metadata, format="xplane")))

    assert (finding.remedy.text[:40], finding.remedy.code) == ("Raise the batch size step by step until ", "")


def test_the_remedy_begins_with_the_loaders_batch_size() -> None:
    code = the_finding(rule, waiting(batch_size=16)).remedy.code

    assert code == "loader = DataLoader(dataset, batch_size=32, ...)   # from here on, up to about 112"


def test_the_thresholds_decide() -> None:
    assert asked(rule, waiting(), share=0.3).findings == ()
    assert asked(rule, waiting(), idle=0.41).findings == ()
    assert asked(rule, waiting(), kept_free=0.65).findings == ()
