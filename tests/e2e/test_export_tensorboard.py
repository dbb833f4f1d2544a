"""What `export --format tensorboard` writes, opened by the converters of xprof, which make TensorBoard's pages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.readers import open_trace
from tests.simulator import write_kineto
from tests.simulator.programs import launch_bound_training

PYTHON = os.environ.get("STEPSCOPE_JAX_PYTHON", "")
PAGES = """
import json, sys
from xprof.convert.raw_to_tool_data import xspace_to_tool_data
pages = {}
for tool in ("trace_viewer", "overview_page", "kernel_stats"):
    data, _ = xspace_to_tool_data([sys.argv[1]], tool, {})
    pages[tool] = json.loads(data)
print(json.dumps(pages))
"""

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="STEPSCOPE_JAX_PYTHON names no Python with JAX and xprof; scripts/test sets it"
)


def pages(path: Path) -> dict[str, Any]:
    process = subprocess.run([PYTHON, "-c", PAGES, str(path)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_xprof_makes_its_pages_of_it(tmp_path: Path) -> None:
    trace = write_kineto(launch_bound_training(steps=4), tmp_path / "gpu.json")
    assert main(["export", str(trace), str(tmp_path / "logs"), "--format", "tensorboard", "--no-cache"]) == 0
    tables = open_trace(trace)

    found = pages(tmp_path / "logs" / "plugins" / "profile" / "gpu" / "localhost.xplane.pb")

    events = [event for event in found["trace_viewer"]["traceEvents"] if event.get("ph") == "X"]
    names = [event["name"] for event in events]
    assert [names.count(name) for name in ("aten::addmm", "cudaLaunchKernel", "gemm")] == [160, 160, 160]
    first = min(tables.device_work.filter(name="gemm")["start_ns"])
    assert min(event["ts"] for event in events if event["name"] == "gemm") == first / 1000
    shown = next(table["p"] for table in found["overview_page"] if "steptime_ms_average" in table.get("p", {}))
    assert shown["hardware_type"] == "GPU"
    rows = [[cell["v"] for cell in row["c"]] for row in found["kernel_stats"]["rows"]]
    assert [row[1] for row in rows] == ["gemm"]
