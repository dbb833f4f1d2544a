"""host-created-tensor: tensors are made on the host and copied to the device."""

from __future__ import annotations

import pytest

from stepscope.diagnosis.rules.host_created_tensor import RULE as rule
from tests.simulator.programs import PROGRAMS
from tests.unit.diagnosis.rules.cases import (
    Cases,
    asked,
    busy_device,
    empty_trace,
    figures_of,
    places_of,
    recorded,
    the_finding,
)

FIRES: Cases = {
    "a mask in each step": lambda: recorded(PROGRAMS["host_created_tensor_fault"]()),
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "made on the device": lambda: recorded(PROGRAMS["host_created_tensor_clean"]()),
    "a batch from the loader": lambda: recorded(PROGRAMS["input_bound_training"]()),
    "what came from the device": lambda: recorded(PROGRAMS["device_ping_pong_fault"]()),
}


def test_the_copy_and_the_idle_time_around_it_are_saved() -> None:
    finding = the_finding(rule, recorded(PROGRAMS["host_created_tensor_fault"]()))

    # The step is 501 us long, and 403 us without the fault.
    assert finding.saving_ns_per_step == 96_000
    assert finding.title == "1 tensors a step are made on the host (aten::zeros) and copied to the device"
    assert figures_of(finding)[1:] == [
        ("such tensors per step", 1.0, "count", None),
        ("bytes copied per step", 1 << 20, "bytes", None),
    ]
    assert places_of(finding) == [("model.py", 50, "mask")]
    assert finding.remedy.code.startswith("mask = torch.zeros(..., device=batch.device)")


@pytest.mark.parametrize(("share", "count"), [(0.19, 1), (0.2, 0)])
def test_the_threshold_decides(share: float, count: int) -> None:
    assert len(asked(rule, recorded(PROGRAMS["host_created_tensor_fault"]()), share=share).findings) == count
