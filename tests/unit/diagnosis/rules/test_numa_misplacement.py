"""numa-misplacement: the program runs far from its device."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.diagnosis.rules.numa_misplacement import RULE as rule
from stepscope.trace import Trace
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, the_finding
from tests.unit.diagnosis.rules.host_steps import counted

NODES = "0-3,8-11;4-7,12-15"


def running(core: int | None = 9, *, devices: str | None = "1", nodes: str | None = NODES, **more: Any) -> Trace:
    process = {"numa_processors": nodes, "device_numa_nodes": devices}
    return counted(process=process, core=core, **{"device": True, **more})


FIRES: Cases = {"on the other node": running}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "on the device's node": lambda: running(13),
    "cards on both nodes": lambda: running(devices="0,1"),
    "one node": lambda: running(nodes=None),
    "cards not known": lambda: running(devices=None),
    "core not known": lambda: running(None),
    "core of no node": lambda: running(99),
    "no device": lambda: running(device=False),
    "numbers without end": lambda: running(nodes="0-" + "9" * 9000 + ";1-2", devices="9" * 9000),
    "damaged lists": lambda: running(nodes="0-;x,,3-y;-", devices="one"),
}


def test_the_node_is_named() -> None:
    finding = the_finding(rule, running())

    assert (finding.severity, finding.saving_ns_per_step) == ("note", 0)
    assert finding.title == "100% of the steps ran on a memory node without the device"
    assert figures_of(finding)[0] == ("steps that ended on a node without the device", 1.0, "share", 0.5)
    assert figures_of(finding)[2] == ("nodes that the steps ran on", 1, "count", None)
    assert finding.remedy.code.startswith("numactl --cpunodebind=1 --membind=1 ")


@pytest.mark.parametrize(("core", "far"), [(0, 1), (3, 1), (4, 0), (7, 0), (8, 1), (11, 1), (12, 0), (15, 0)])
def test_processors_of_a_node(core: int, far: int) -> None:
    assert len(asked(rule, running(core)).findings) == far


def test_the_thresholds_decide() -> None:
    assert asked(rule, running(), steps=1.1).findings == ()
    assert asked(rule, running(), share=0.99).findings == ()
