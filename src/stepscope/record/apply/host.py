"""Remedies on the host: threads, memory allocator, garbage collection, progress bars, debugging aids."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from stepscope import guard
from stepscope.errors import UsageError
from stepscope.record.apply.flags import MOST_PROCESSES, Flag, Value
from stepscope.record.apply.patching import Applying, made_here, users_place
from stepscope.record.hooks import Marker
from stepscope.record.lines import compiling

HOST_FLAGS: Final = (
    Flag(
        "threads",
        "lets an operator use N threads of the host",
        "torch's threads were not set",
        "Workers of DataLoaders keep their one thread.",
        Value("N", least=1, most=MOST_PROCESSES),
    ),
    Flag(
        "allocator",
        "allocates the host's memory with a library that keeps freed memory",
        "torch was not imported",
        "Only if the library is installed; stepscope says how. Linux and macOS.",
        Value("jemalloc|tcmalloc", choices=("jemalloc", "tcmalloc")),
    ),
)
_WORKER: Final = "torch.utils.data._utils.worker"


def host_environment(chosen: Mapping[str, str], variables: dict[str, str]) -> dict[str, str]:
    """Return the environment to start the program with.

    Raises UsageError if the allocator is missing or cannot be loaded.
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


def install_host(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Limit the threads, and report which allocator is loaded."""
    if "threads" in chosen:
        with applying.guarded("threads"):
            _set_threads(applying, int(chosen["threads"]))
    if "allocator" in chosen:
        with applying.guarded("allocator"):
            _look_at_allocator(applying, chosen["allocator"])


def _set_threads(applying: Applying, wanted: int) -> None:
    """Set the number of threads, and ignore the program's later requests for another number."""
    import torch

    original, before = torch.set_num_threads, torch.get_num_threads()

    def set_num_threads(_: Any, asked: Any) -> None:
        if sys._getframe(2).f_globals.get("__name__") == _WORKER:
            original(asked)
        elif asked != wanted:
            applying.did("threads", f"the program asks for {asked} and still gets {wanted}")

    original(wanted)
    applying.on_remove(lambda: original(before))
    applying.wrap(torch, "set_num_threads", set_num_threads)
    applying.did("threads", f"PyTorch computes with {wanted} thread{'s' if wanted > 1 else ''}")


def _look_at_allocator(applying: Applying, wanted: str) -> None:
    from stepscope.remedies.allocators import loaded_allocator

    try:
        found = loaded_allocator()
    except OSError:  # the system does not show it; the environment still has the requested value
        found = wanted
    if found == wanted:
        applying.did("allocator", f"the host's memory comes from {wanted}")
    else:
        applying.could_not("allocator", f"{wanted} was requested, but is not in the process's memory map")


GARBAGE_FLAGS: Final = (
    Flag(
        "garbage-at-steps",
        "runs Python's garbage collector after every 50 steps, and not within them",
        "no optimizer stepped",
        "Not if the program has turned the collector off itself. Memory held only by reference cycles is freed later. "
        "Under `stepscope bench` live objects are also frozen, which shortens collections and would hide them from "
        "recordings.",
    ),
)
_EVERY: Final = 50
"""The default of `collect_garbage_at_steps`."""


def install_garbage(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Install at the first optimizer step; with nested optimizers, the outermost counts."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from stepscope.remedies import collect_garbage_at_steps

    garbage = _Garbage(applying, collect_garbage_at_steps(_EVERY, freeze=not applying.is_recorded))
    is_compiling = compiling()

    def stepped(optimizer: Any, positional: Any, named: Any) -> None:
        if not is_compiling():
            garbage.stepped(optimizer)

    applying.on_remove(partial(guard.unhook, register_optimizer_step_post_hook(stepped)))
    applying.on_remove(garbage.collection.close)


class _Garbage:
    def __init__(self, applying: Applying, collection: Any) -> None:
        self.collection = collection
        self._applying = applying
        self._marker = Marker()
        self._is_on = False

    @guard.entry
    def stepped(self, optimizer: Any) -> None:
        flag = "garbage-at-steps"
        if not self._marker.hit(id(optimizer)):
            return
        if self._is_on:
            self.collection.step()
        elif not gc.isenabled():
            self._applying.could_not(flag, "the program has turned the collector off itself")
        else:
            self._is_on = True
            self._applying.did(flag, f"garbage is collected after every {_EVERY} steps, and not within them")
            self.collection.start()


DEFAULT_STEPS: Final = "20"
"""The largest number of updates that the Gaudi optimisation guide recommends."""
PROGRESS_FLAGS: Final = (
    Flag(
        "quiet-progress",
        f"redraws each tqdm bar after N steps at the earliest ({DEFAULT_STEPS})",
        "no bar of tqdm was made",
        "Only tqdm bars. Values that the program reads from the device to show them are still read.",
        Value("N", least=1, default=DEFAULT_STEPS),
    ),
)


def install_progress(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Make new progress bars redraw rarely, even when their texts change."""
    module: Any = sys.modules.get("tqdm.std")  # torch imports tqdm if it is installed
    if module is None:
        applying.could_not("quiet-progress", "tqdm is not installed")
        return
    wanted = int(chosen["quiet-progress"])
    bar = module.tqdm

    def change(arguments: dict[str, Any]) -> int:
        arguments["miniters"] = max(wanted, arguments.get("miniters") or 0)
        return int(arguments["miniters"])

    def say(made: Any, name: str, least: int) -> None:
        if not made.disable:
            applying.did("quiet-progress", f"{made_here('the bar')} is redrawn after {least} steps at the earliest")

    def quietly(inner: Any, self: Any, *positional: Any, **named: Any) -> Any:
        bound = inspect.signature(inner).bind(self, *positional, **named)
        bound.arguments["refresh"] = False  # the next redraw shows the new text
        return inner(*bound.args, **bound.kwargs)

    applying.replace_constructor(bar, ["quiet-progress"], change, say)
    for name in ("set_postfix", "set_postfix_str", "set_description", "set_description_str"):
        applying.wrap(bar, name, quietly)


DEBUG_FLAGS: Final = (
    Flag(
        "no-debug",
        "switches off anomaly detection, gradcheck, CUDA_LAUNCH_BLOCKING and the debug level of torch.distributed",
        "no debugging aid was switched on",
        "Errors that they would have found stay hidden.",
    ),
)
_VARIABLES: Final = {
    "CUDA_LAUNCH_BLOCKING": ("0", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", ""),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", ""),
}
"""Variables that slow every step down, with the values at which they do not."""
_FOUND: Final = "STEPSCOPE_APPLIED_NO_DEBUG"


def debug_environment(chosen: Mapping[str, str], variables: dict[str, str]) -> dict[str, str]:
    """Remove the variables that slow the program down."""
    if "no-debug" not in chosen:
        return variables
    found = [name for name, harmless in _VARIABLES.items() if variables.get(name, "") not in harmless]
    kept = {name: value for name, value in variables.items() if name not in found}
    return {**kept, _FOUND: ",".join(found)} if found else kept


def install_debugging(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Keep anomaly detection off, and make gradcheck return immediately."""
    import torch

    for name in filter(None, os.environ.get(_FOUND, "").split(",")):
        applying.did("no-debug", f"{name} is not set")

    def set_anomaly_enabled(original: Any, mode: bool, *positional: Any, **named: Any) -> None:
        if mode:
            applying.did("no-debug", f"anomaly detection requested at {users_place() or 'an unknown place'} stays off")
        original(False, *positional, **named)

    def gradcheck(original: Any, *positional: Any, **named: Any) -> bool:
        applying.did("no-debug", f"gradcheck at {users_place() or 'an unknown place'} is skipped")
        return True

    applying.wrap(torch, "set_anomaly_enabled", set_anomaly_enabled)
    for name in ("gradcheck", "gradgradcheck"):
        for module in ("torch.autograd", "torch.autograd.gradcheck"):
            applying.wrap(sys.modules[module], name, gradcheck)
