"""memory-growth: memory grows with every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.diagnosis.diagnosis import diagnose
from stepscope.diagnosis.rules.memory_growth import RULE as rule
from stepscope.readers import open_trace
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import BindingFacts, KeptGraphFacts, MadeFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.recording import Recording

REPOSITORY = Path(__file__).resolve().parents[4]
MIB = 2**20


def leaking(
    kept: tuple[int, ...] = (8192,) * 6,
    *,
    given_back: bool = False,
    memory_bytes: int | None = None,
    by: str = "aten::mm",
) -> Trace:
    """Steps of 1000 ns that use 1 MiB each for a while; `kept` bytes of each stay, or live until the next step."""
    process = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    recording = Recording(Metadata(program=ProgramFacts(process=process)))
    for step, size in enumerate(kept):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        lines = {"source_file": "train.py", "source_line": 8, "source_function": "evaluate"}
        recording.operator(begin + 10, 100, by, **lines)
        recording.operator(begin + 200, 100, "aten::relu")
        recording.block(begin + 20, begin + 900, MIB, device="cpu")
        if size:
            recording.block(begin + 30, begin + 1950 if given_back else None, size, device="cpu")
    return recording.trace()


def cache_of_limited_size() -> Trace:
    """Each step keeps 8 KiB and gives back the 8 KiB of three steps before."""
    recording = Recording()
    for step in range(8):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.operator(begin + 10, 100, "aten::mm")
        recording.block(begin + 20, begin + 3050 if step < 5 else None, 8192, device="cpu")
    recording.block(10, 900, MIB, device="cpu")
    return recording.trace()


def keeping(blocks: int, size: int, memory_bytes: int, by: str = "aten::mm") -> Trace:
    """Steps of 1000 ns that use 1 MiB each for a while, and each keep so many blocks."""
    recording = Recording(Metadata(program=ProgramFacts(process={"memory_bytes": memory_bytes})))
    for step in range(6):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.operator(begin + 10, 100, by)
        recording.block(begin + 20, begin + 900, MIB, device="cpu")
        for number in range(blocks):
            recording.block(begin + 30 + number, None, size, device="cpu")
    return recording.trace()


FIRES: Cases = {
    "graphs, however large the memory is": lambda: keeping(16, 1024, 80 * 2**30),
    "many numbers of a small memory": lambda: keeping(16, 512, 2**30),
    "each step leaves something": leaking,
    "each batch is kept": lambda: leaking(by="aten::randn"),
    "just enough steps": lambda: leaking((8192,) * 5),
    "a size of its own in each step": lambda: leaking((9000, 8192, 20000, 8500, 12000, 9000)),
}
SILENT: Cases = {
    "empty": empty_trace,
    "numbers, of which a device gives 512 bytes each": lambda: keeping(16, 512, 80 * 2**30),
    "batches that would never fill the memory": lambda: keeping(1, 8192, 80 * 2**30, by="aten::randn"),
    "nothing is wrong": busy_device,
    "given back in the next step": lambda: leaking(given_back=True),
    "a number in each step": lambda: leaking((4,) * 6),
    "too few steps": lambda: leaking((8192,) * 4),
    "a cache that fills in the first steps": lambda: leaking((8192, 8192, 0, 0, 0, 0)),
    "only warm-up": lambda: leaking((65536, 0, 0, 0, 0, 0)),
    "a cache of limited size": cache_of_limited_size,
    "a real training": lambda: open_trace(REPOSITORY / "tests/fixtures/gpt2_batched_loss_cpu.json.gz"),
}


def test_the_leak_is_what_each_step_leaves_behind() -> None:
    finding = the_finding(rule, leaking())

    assert finding.title == "the host's memory grows by 8.0 KiB every step"
    assert (finding.severity, finding.saving_ns_per_step, finding.ends_run_in_ns) == ("note", 0, None)
    assert figures_of(finding) == [
        ("memory that each step leaves behind", 8192, "bytes", 4096),
        ("the same as a share of the peak", 8192 / (MIB + 6 * 8192), "share", 0.001),
        ("steps that left something behind", 4, "count", 3),
        ("blocks left behind per step", 1.0, "count", None),
        ("memory at the end of the first step", 8192, "bytes", None),
        ("memory at the end of the last step", 6 * 8192, "bytes", None),
    ]
    assert places_of(finding) == [("train.py", 8, "evaluate")]
    assert finding.where[0].exact_line
    assert "loss.item()" in finding.remedy.code


def test_a_batch_that_is_kept_has_its_own_remedy() -> None:
    assert "seen.append" in the_finding(rule, leaking(by="aten::randn")).remedy.code


def test_a_leak_that_ends_the_run_comes_before_every_saving() -> None:
    trace = leaking(memory_bytes=100 * MIB)

    finding = the_finding(rule, trace)

    free = 100 * MIB - 6 * 8192
    assert finding.ends_run_in_ns == free // 8192 * 1000
    assert finding.severity == "high"
    assert diagnose(trace).findings[0].rule == "memory-growth"


@pytest.mark.parametrize(
    ("hours", "severity"), [(0.9, "high"), (1.1, "medium"), (25.0, "low"), (200.0, "note")]
)  # fmt: skip
def test_the_sooner_it_ends_the_run_the_severer(hours: float, severity: str) -> None:
    steps = int(hours * 3600e9 / 1000)
    finding = the_finding(rule, leaking(memory_bytes=steps * 8192 + 6 * 8192))

    assert finding.severity == severity
    assert (finding.ends_run_in_ns is None) == (severity == "note")


def test_the_thresholds_decide() -> None:
    assert asked(rule, leaking(), bytes=8193).findings == ()
    assert asked(rule, leaking(), share=0.01).findings == ()
    assert asked(rule, leaking(), steps=5).findings == ()
    assert len(asked(rule, leaking((4,) * 6), bytes=1, share=0).findings) == 1
    assert len(asked(rule, leaking((8192,) * 4), steps=2).findings) == 1


def test_modules_that_are_made_in_each_step_are_kept_by_the_recording() -> None:
    trace = leaking()
    program = ProgramFacts(made=(MadeFacts(kind="module", name="Net", calls=1),))

    assert not asked(rule, replace(trace, metadata=replace(trace.metadata, program=program))).findings


def summing(*kept: KeptGraphFacts) -> Trace:
    """Steps of 1000 ns that keep 4 bytes each, which line 8 adds to a sum."""
    bindings = tuple(BindingFacts(file="train.py", name="total", first=line, last=line) for line in (3, 8))
    recording = Recording(Metadata(program=ProgramFacts(kept_graphs=kept, bindings=bindings)))
    for step in range(6):
        begin = 1000 * step
        recording.step(begin, 1000, step)
        recording.line(begin, 1000, "train.py(8): <module>")
        recording.operator(begin + 10, 100, "aten::add")
        recording.block(begin + 20, None, 4, device="cpu")
    return recording.trace()


SUM = KeptGraphFacts(file="train.py", function="<module>", name="total", nodes=40)
FIRES["a sum of losses with their graphs"] = lambda: summing(SUM)
SILENT["a sum of numbers"] = summing


def test_a_graph_without_activations_is_told_by_its_variable() -> None:
    finding = the_finding(rule, summing(SUM))

    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert places_of(finding) == [("train.py", 8, "<module>")]
    assert figures_of(finding) == [("autograd nodes that each step adds", 40, "count", 1)]
    assert "total" in finding.title
