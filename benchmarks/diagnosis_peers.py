"""What other tools say of a trace, as score.py of the labelled set understands it.

Each runs in the Python that has it, by a script that prints what it says as JSON. HTA: idle time by its categories, and
time that is neither idle nor computing. torch-tb-profiler: its recommendations. nsys-ai: its ranked findings. xprof:
the statements of its overview page.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

sys.path[:0] = [str(Path(__file__).parents[1])]

from benchmarks.labelled.judging import Said  # noqa: E402

SECONDS: Final = 300
NOTHING: Final = "nothing"
FAILED: Final = "fails: "
HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
whole = analysis.get_temporal_breakdown(visualize=False).to_dict("records")[0]
table = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
by_kind = table.groupby("idle_category")["idle_time"].sum()
idle = whole["idle_time_pctg"] / 100
rows = [(f"idle, {name}", idle * part / max(by_kind.sum(), 1e-9)) for name, part in by_kind.items()]
rows.append(("communication and memory that no computation overlaps", whole["non_compute_time_pctg"] / 100))
rows = sorted((row for row in rows if row[1] > 0.005), key=lambda row: -row[1])
findings = [{"words": f"{words}: {share:.0%}", "saving": share} for words, share in rows]
print(json.dumps({"findings": findings, "busy": [1 - idle]}))
"""
TB_PROFILER = """
import json, re, sys, tempfile
from torch_tb_profiler.profiler.data import RunProfileData
with tempfile.TemporaryDirectory() as cache:
    profile = RunProfileData.parse("worker", None, sys.argv[1], cache)
print(json.dumps({"findings": [{"words": re.sub(r"<[^>]*>", "", words)} for words in profile.recommendations]}))
"""
NSYS_AI = """
import json, os, re, shutil, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder:  # a copy: nsys-ai writes indexes into the export, a lock beside it
    path = shutil.copy(sys.argv[1], folder)
    os.chmod(path, 0o600)
    out = os.path.join(folder, "findings.json")
    tool = os.path.join(os.path.dirname(sys.executable), "nsys-ai")
    words = [tool, "diagnose", path, "--format", "json", "-o", out, "--session", os.path.join(folder, "session")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    found = json.load(open(out))["findings"]
findings = []
for each in found:
    words = f"{each.get('category', '')}: {each.get('label', '')}; {each.get('note', '')}"
    share = re.search(r"([0-9.]+)% of profile", words)
    findings.append({"words": words, "saving": float(share[1]) / 100 if share else None})
print(json.dumps({"findings": findings}))
"""
XPROF = """
import json, os, sys, tempfile
from xprof.convert import raw_to_tool_data
with tempfile.TemporaryDirectory() as folder:  # of its own: xprof keeps what it made beside the file
    path = os.path.join(folder, "host.xplane.pb")
    os.symlink(os.path.abspath(sys.argv[1]), path)
    data, _ = raw_to_tool_data.xspace_to_tool_data([path], "overview_page", {})
pages = [page.get("p") or {} for page in json.loads(data)]
said = {key: value for page in pages for key, value in page.items()}
parts = ("", "kernel_launch_", "all_other_", "device_collectives_", "precision_")
words = [said.get(f"{part}statement") or "" for part in parts]
words = [each for each in words if each and "NOT input-bound" not in each and "No step time" not in each]
step = float(said.get("steptime_ms_average") or 0)
print(json.dumps({"findings": [{"words": each} for each in words], "step_ms": step or None}))
"""


@dataclass(frozen=True)
class Peer:
    """A tool, the Python that has it, and a script that prints what it says of a trace.

    Attributes:
        package: what the tool is imported as.
        suffixes: of the files that it reads.
    """

    name: str
    package: str
    python: str
    script: str
    suffixes: tuple[str, ...] = (".json", ".json.gz")

    def is_installed(self) -> bool:
        """Whether its Python can import it; if not, standard error gets a sentence."""
        done = subprocess.run([self.python, "-c", f"import {self.package}"], capture_output=True)
        if done.returncode:
            print(f"{self.name} is not asked: {self.python} cannot import {self.package}.", file=sys.stderr)
        return done.returncode == 0

    def reads(self, trace: Path) -> bool:
        """Whether files of this name are its own."""
        return trace.name.endswith(self.suffixes)

    def said(self, trace: Path) -> Said:
        """What it says of a trace; refused, where it fails."""
        words = [self.python, "-c", self.script, str(trace.resolve())]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Said(refused=f"no answer in {SECONDS} s")
        if done.returncode:
            return Said(refused=done.stderr.strip() or NOTHING)
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Said)

    def says(self, trace: Path) -> str:
        """The same in a line."""
        said = self.said(trace)
        if said.refused is not None:
            return f"{FAILED}{said.refused.splitlines()[-1]}"
        return "; ".join(finding.words for finding in said.findings) or NOTHING


def known(hta_python: str, tb_profiler_python: str) -> tuple[Peer, ...]:
    """Those that read traces of torch.profiler, whether installed or not."""
    return (
        Peer("HTA, idle time", "hta", hta_python, HTA),
        Peer("torch-tb-profiler", "torch_tb_profiler", tb_profiler_python, TB_PROFILER),
    )


def nsys_ai(python: str) -> Peer:
    """The one that reads exports of Nsight Systems."""
    return Peer("nsys-ai", "nsys_ai", python, NSYS_AI, (".sqlite",))


def xprof(python: str) -> Peer:
    """The one that reads XLA's profiles."""
    return Peer("xprof", "xprof", python, XPROF, (".xplane.pb",))
