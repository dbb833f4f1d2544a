"""Runs at the start of every Python process of a program that `stepscope run` started.

Waits for the process to import torch or JAX; a process that imports neither has almost no cost. The folder of this
file is removed from `sys.path`, and the user's own `sitecustomize` runs as if this one were not there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # like typing.TYPE_CHECKING; importing typing would cost each of these processes milliseconds
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Imports:
    """Watches for imports of torch, JAX and PyTorch/XLA, and calls stepscope after each."""

    def __init__(self) -> None:
        self._awaited = {"torch", "jax", "torch_xla.debug.profiler"}
        if '"trackers": true' in os.environ.get("STEPSCOPE_RUN_OPTIONS", ""):
            self._awaited = {"wandb.sdk.wandb_run", "torch.utils.tensorboard.writer", "tensorboardX.writer"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._awaited:
            return None
        spec = None
        with _Guard():
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            spec = next((each for each in found if each is not None), None)
            self._listen(name, getattr(spec, "loader", None))
        return spec

    def _listen(self, name: str, loader: Any) -> None:
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return  # not found, or found by a custom importer: the program continues unrecorded
        execute = loader.exec_module

        def execute_and_tell(module: Any) -> None:
            with _Guard():
                del loader.exec_module
                # only when it runs: programs also look up a spec just to check that a module exists
                self._awaited.discard(name)
            with _Hidden():
                execute(module)
            with _Guard():
                _stepscope()
                from stepscope.record.bootstrap import was_imported

                was_imported(name)

        loader.exec_module = execute_and_tell


class _Hidden:
    """A block that removes our frames from the traceback of passing errors."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None and error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next


class _Guard:
    """Replaces `stepscope.guard` before torch is imported: an internal error never reaches the program."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"stepscope: this process is not recorded: {type(error).__name__}: {error}\n")
        _sign("left")  # as `run_folder.LEFT`
        return True


def _stepscope() -> None:
    """Import the stepscope that was called, even if the program's Python has none or another version."""
    if "stepscope" not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        package = os.path.dirname(os.path.dirname(_HERE))
        spec = spec_from_file_location(
            "stepscope", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            sys.modules["stepscope"] = module
            spec.loader.exec_module(module)


def _sign(name: str) -> None:
    """Leave a marker file that shows that a Python process of the run was reached ("python"), or left."""
    with contextlib.suppress(OSError, KeyError):
        folder = os.path.join(os.environ["STEPSCOPE_RUN"], "seen")
        os.makedirs(folder, 0o700, exist_ok=True)
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY, 0o600))


def _run_users_own() -> None:
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


with _Guard():
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    if os.path.isfile(os.path.join(os.environ.get("STEPSCOPE_RUN", ""), "run.json")):
        _sign("python")
        sys.meta_path.insert(0, _Imports())
_run_users_own()
