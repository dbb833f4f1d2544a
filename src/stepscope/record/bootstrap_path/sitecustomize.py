"""Runs at the start of every Python process of a program that `stepscope run` started.

Waits for the process to import torch or JAX, and costs next to nothing where it never does. The folder of this file is
taken out of `sys.path`, and the user's own `sitecustomize` runs as if this one were not there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # as typing has it, whose import costs each of these processes milliseconds
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Imports:
    """Sees torch, JAX and PyTorch/XLA being imported, and calls stepscope when that is done."""

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
            return  # not there, or by an importer of its own kind: the program goes on unrecorded
        execute = loader.exec_module

        def execute_and_tell(module: Any) -> None:
            with _Guard():
                del loader.exec_module
                self._awaited.discard(name)  # not before: programs also ask for a spec to see whether it is there
            with _Hidden():
                execute(module)
            with _Guard():
                _stepscope()
                from stepscope.record.bootstrap import was_imported

                was_imported(name)

        loader.exec_module = execute_and_tell


class _Hidden:
    """A block whose errors pass without the frame of ours that they have come through."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None and error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next


class _Guard:
    """What `stepscope.guard` is behind the import of torch: whatever fails in us, the program goes on."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"stepscope: this process is not recorded: {type(error).__name__}: {error}\n")
        return True


def _stepscope() -> None:
    """The stepscope that was called, also where the program's Python has none or another."""
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


def _sign() -> None:
    """Leave a sign that a Python process of the run could be reached."""
    with contextlib.suppress(OSError):
        folder = os.path.join(os.environ["STEPSCOPE_RUN"], "seen")
        os.makedirs(folder, 0o700, exist_ok=True)
        os.close(os.open(os.path.join(folder, "python"), os.O_CREAT | os.O_WRONLY, 0o600))


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
        _sign()
        sys.meta_path.insert(0, _Imports())
_run_users_own()
