"""Prices imported and a training planned as users do it: processes, pipes, files."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import PER_TOKEN, Stepscope

VMS = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
cheap,L4,1,4,16,0.01,us-east-1,,
"=HYPERLINK(""http://x"")",L4,1,4,16,0.01,us-east-1,,
"""


def test_an_imported_price_is_planned_with(run: Stepscope, tmp_path: Path) -> None:
    (tmp_path / "vms.csv").write_text(VMS)
    home = {"STEPSCOPE_DATA_DIR": str(tmp_path / "data")}

    imported = run("prices", "import", "vms.csv", "--provider", "aws", folder=tmp_path, **home)
    assert imported.code == 0
    assert "1 row with a name of the instance that begins like a formula" in imported.out

    plan = run("plan", PER_TOKEN, "--iterations", "1e5", "--json", "-", "--html", "plan.html", folder=tmp_path, **home)
    assert plan.code == 0
    cheapest = plan.json()["machines"][0]
    assert (cheapest["instance"], cheapest["usd_h"], cheapest["price_source"]) == ("cheap", 0.01, "vms.csv")
    assert "HYPERLINK" not in (tmp_path / "plan.html").read_text()
