"""Debugging aids that are left switched on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from stepscope.record.apply.flags import Flag
from stepscope.record.apply.patching import Applying, users_place

FLAGS: Final = (
    Flag(
        "no-debug",
        "switches off anomaly detection, gradcheck, CUDA_LAUNCH_BLOCKING and the debug level of torch.distributed",
        "no debugging aid was switched on",
        "What the program would have found by them is not found.",
    ),
)
_VARIABLES: Final = {
    "CUDA_LAUNCH_BLOCKING": ("0", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", ""),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", ""),
}
"""Variables that slow every step down, with the values at which they do not."""
_FOUND: Final = "STEPSCOPE_APPLIED_NO_DEBUG"


def environment(chosen: Mapping[str, str], variables: dict[str, str]) -> dict[str, str]:
    """Without the variables that slow the program down."""
    if "no-debug" not in chosen:
        return variables
    found = [name for name, harmless in _VARIABLES.items() if variables.get(name, "") not in harmless]
    kept = {name: value for name, value in variables.items() if name not in found}
    return {**kept, _FOUND: ",".join(found)} if found else kept


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have anomaly detection stay off whoever asks for it, and gradcheck pass at once."""
    import torch

    for name in filter(None, os.environ.get(_FOUND, "").split(",")):
        applying.did("no-debug", f"{name} is not set")

    def set_anomaly_enabled(original: Any, mode: bool, *positional: Any, **named: Any) -> None:
        if mode:
            applying.did("no-debug", f"anomaly detection asked for at {users_place() or 'an unknown place'} stays off")
        original(False, *positional, **named)

    def gradcheck(original: Any, *positional: Any, **named: Any) -> bool:
        applying.did("no-debug", f"gradcheck at {users_place() or 'an unknown place'} is passed over")
        return True

    applying.wrap(torch, "set_anomaly_enabled", set_anomaly_enabled)
    for name in ("gradcheck", "gradgradcheck"):
        for module in ("torch.autograd", "torch.autograd.gradcheck"):
            applying.wrap(sys.modules[module], name, gradcheck)
