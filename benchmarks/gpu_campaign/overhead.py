"""Part 6: what recording costs on the device, beside torch.profiler."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.gpu_campaign.plan import REPOSITORY, At
from tests.zoo import measure


def recorder(at: At, bound: str) -> dict[str, Any]:
    """Milliseconds of a step that is bound by "launch" or "device", without a profiler and under each."""
    file = at.work / "cost.json"
    words = [sys.executable, str(REPOSITORY / "benchmarks" / "recording_cost.py"), "--device", at.device]
    words += ["--bound", bound, "--cycles", "0", "--after", "0", "--json", str(file)]
    words += ["--rounds", "1", "--steps", "2", "--tiny"] if at.is_dry else ["--rounds", "3"]
    measure.output_of(words, at.work)
    return dict(json.loads(file.read_text(encoding="utf-8")))
