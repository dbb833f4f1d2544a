"""What other tools say of a trace: HTA's idle-time breakdown, torch-tb-profiler's recommendations."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SECONDS = 300
NOTHING = "nothing"
FAILED = "fails: "
HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
table = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
shares = table.groupby("idle_category")["idle_time"].sum()
print("; ".join(f"{name} {share:.0%}" for name, share in (shares / max(shares.sum(), 1e-9)).items()))
"""
TB_PROFILER = """
import sys, tempfile
from torch_tb_profiler.profiler.data import RunProfileData
with tempfile.TemporaryDirectory() as cache:
    profile = RunProfileData.parse("worker", None, sys.argv[1], cache)
print("; ".join(profile.recommendations) or "nothing")
"""


@dataclass(frozen=True)
class Peer:
    """A tool, the Python that has it, and a script that prints what it says of a trace.

    Attributes:
        package: what the tool is imported as.
    """

    name: str
    package: str
    python: str
    script: str

    def is_installed(self) -> bool:
        """Whether its Python can import it; if not, standard error gets a sentence."""
        done = subprocess.run([self.python, "-c", f"import {self.package}"], capture_output=True)
        if done.returncode:
            print(f"{self.name} is not asked: {self.python} cannot import {self.package}.", file=sys.stderr)
        return done.returncode == 0

    def says(self, trace: Path) -> str:
        """What it says of a trace, in a line; or how it failed."""
        words = [self.python, "-c", self.script, str(trace.resolve())]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"{FAILED}no answer in {SECONDS} s"
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [NOTHING]
        said = re.sub(r"<[^>]*>", "", lines[-1])
        return said if done.returncode == 0 else f"{FAILED}{said}"


def known(hta_python: str, tb_profiler_python: str) -> tuple[Peer, ...]:
    """All peers, whether installed or not."""
    return (
        Peer("HTA, idle time", "hta", hta_python, HTA),
        Peer("torch-tb-profiler", "torch_tb_profiler", tb_profiler_python, TB_PROFILER),
    )
