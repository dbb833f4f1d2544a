"""What the host does around the steps: its threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stepscope.capture.applying.flags import Flag, Value
from stepscope.capture.applying.patching import Applying

FLAGS: Final = (
    Flag(
        "threads",
        "has an operator use N threads of the host",
        "torch was not asked for its threads",
        "Workers of DataLoaders keep their one thread.",
        Value("N", least=1),
    ),
)
_WORKER: Final = "torch.utils.data._utils.worker"


def environment(chosen: Mapping[str, str], variables: dict[str, str]) -> dict[str, str]:
    """The environment that the program is to start with."""
    if "threads" in chosen:
        variables = {**variables, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), chosen["threads"])}
    return variables


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have the process use so many threads, whatever the program asks for later."""
    import torch

    wanted = int(chosen["threads"])
    original = torch.set_num_threads

    def set_num_threads(asked: Any) -> None:
        import sys

        if sys._getframe(1).f_globals.get("__name__") == _WORKER:
            original(asked)
        elif asked != wanted:
            applying.did("threads", f"the program asks for {asked} and keeps {wanted}")

    original(wanted)
    applying.replace(torch, "set_num_threads", set_num_threads)
    applying.did("threads", f"PyTorch computes with {wanted} thread{'s' if wanted > 1 else ''}")
