"""What the host does around the steps: its threads, and where its memory comes from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from stepscope.errors import UsageError
from stepscope.record.apply.flags import MOST_PROCESSES, Flag, Value
from stepscope.record.apply.patching import Applying

FLAGS: Final = (
    Flag(
        "threads",
        "has an operator use N threads of the host",
        "torch was not asked for its threads",
        "Workers of DataLoaders keep their one thread.",
        Value("N", least=1, most=MOST_PROCESSES),
    ),
    Flag(
        "allocator",
        "gets the host's memory from a library that keeps what is freed",
        "torch was not imported",
        "Only where the library is installed: stepscope says how to. Linux and macOS.",
        Value("jemalloc|tcmalloc", choices=("jemalloc", "tcmalloc")),
    ),
)
_WORKER: Final = "torch.utils.data._utils.worker"


def environment(chosen: Mapping[str, str], variables: dict[str, str]) -> dict[str, str]:
    """The environment that the program is to start with.

    Raises:
        UsageError: the allocator is not there, or cannot be loaded.
    """
    if "threads" in chosen:
        variables = {**variables, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), chosen["threads"])}
    if "allocator" in chosen:
        from stepscope.remedies.allocators import allocator_environment

        try:
            variables = {**variables, **allocator_environment(chosen["allocator"], variables)}
        except RuntimeError as error:
            raise UsageError(str(error)) from error
    return variables


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """See to the threads, and say which allocator is there."""
    if "threads" in chosen:
        with applying.guarded("threads"):
            _set_threads(applying, int(chosen["threads"]))
    if "allocator" in chosen:
        with applying.guarded("allocator"):
            _look_at_allocator(applying, chosen["allocator"])


def _set_threads(applying: Applying, wanted: int) -> None:
    """Have the process use so many threads, whatever the program asks for later."""
    import torch

    original, before = torch.set_num_threads, torch.get_num_threads()

    def set_num_threads(_: Any, asked: Any) -> None:
        if sys._getframe(2).f_globals.get("__name__") == _WORKER:
            original(asked)
        elif asked != wanted:
            applying.did("threads", f"the program asks for {asked} and keeps {wanted}")

    original(wanted)
    applying.on_remove(lambda: original(before))
    applying.wrap(torch, "set_num_threads", set_num_threads)
    applying.did("threads", f"PyTorch computes with {wanted} thread{'s' if wanted > 1 else ''}")


def _look_at_allocator(applying: Applying, wanted: str) -> None:
    from stepscope.remedies.allocators import loaded_allocator

    try:
        found = loaded_allocator()
    except OSError:  # a system that does not show it; what was asked for is in the environment
        found = wanted
    if found == wanted:
        applying.did("allocator", f"the host's memory comes from {wanted}")
    else:
        applying.could_not("allocator", f"{wanted} was to be loaded, and is not in the process's memory map")
