"""Part 1: the machine, what slows it down, and what its device can do."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from benchmarks.gpu_campaign.plan import At
from tests.zoo import measure

PACKAGES: Final = (
    "torch", "triton", "numpy", "polars", "msgspec", "isal", "xxhash", "zstandard", "pytest", "optuna", "nvidia-ml-py",
    "zeus", "psutil", "transformers",
)  # fmt: skip
_SETTINGS: Final = (
    "name,driver_version,vbios_version,power.limit,clocks.max.sm,clocks.max.memory,persistence_mode,mig.mode.current"
)


def machine(at: At, _: str) -> dict[str, Any]:
    """The device as torch and its driver describe it, the host, and the versions of what matters."""
    said: dict[str, Any] = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: known for name in PACKAGES if (known := _version(name))},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "device": platform.processor() or "CPU",
    }
    device = torch.device(at.device)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        said |= {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", f"--query-gpu={_SETTINGS}", "--format=csv"]
        said["driver"] = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()
    return said


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def stepscope_environment(at: At, _: str) -> dict[str, Any]:
    """What `stepscope environment` says: a list of observations, without what was read, which names other processes."""
    text = measure.output_of([sys.executable, "-m", "stepscope", "environment", "--format", "json"], at.work)
    kept = ("check", "verdict", "title")
    return {"observations": [{key: each[key] for key in kept} for each in json.loads(text)["observations"]]}


def measured(at: At, _: str) -> dict[str, Any]:
    """The device's figures, as `stepscope devices measure` writes them."""
    file = at.work / "device.toml"
    words = [sys.executable, "-m", "stepscope", "devices", "measure", "--device", at.device, "--output", str(file)]
    measure.output_of([*words, *["--quick"] * at.is_dry], at.work)
    return {"toml": file.read_text(encoding="utf-8")}
