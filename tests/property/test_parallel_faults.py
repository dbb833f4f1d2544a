"""Programs whose device multiplies, converts or exchanges too much: the planted fault is found first, and honestly."""

from __future__ import annotations

import pytest

from stepscope.diagnosis import diagnose
from tests.simulator.parallel_faults import PARALLEL_FAULTS
from tests.unit.diagnosis.rules.cases import recorded

EXPECTED = {
    "layout_conversion": "layout-conversion",
    "unaligned_vocabulary": "unaligned-dimensions",
    "written_out_attention": "unfused-attention",
    "small_reductions": "small-buckets",
    "late_rank": "late-rank",
    "replicated_model": "data-parallel",
    "exchange_through_host": "wrong-backend",
    "gradient_copies": "gradient-copies",
}


def test_every_program_has_a_twin() -> None:
    assert set(PARALLEL_FAULTS) == {f"{name}_{twin}" for name in EXPECTED for twin in ("fault", "clean")}


@pytest.mark.parametrize(("name", "rule"), EXPECTED.items())
def test_the_fault_is_found_and_its_saving_is_near_what_the_twin_gains(name: str, rule: str) -> None:
    faulty, clean = (diagnose(recorded(PARALLEL_FAULTS[f"{name}_{twin}"]())) for twin in ("fault", "clean"))

    assert faulty.findings[0].rule == rule
    assert faulty.findings[0].saving_ns_per_step == pytest.approx(faulty.step_ns - clean.step_ns, rel=0.2)
    assert [finding.rule for finding in clean.findings if finding.saving_share >= 0.05] == []
