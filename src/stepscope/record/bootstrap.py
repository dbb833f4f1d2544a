"""The beginning of `stepscope run` inside the program, called by `bootstrap_path/sitecustomize.py`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path

from stepscope import guard
from stepscope.record.bench_steps import BenchSteps
from stepscope.record.controller import StepController, controller, set_controller
from stepscope.record.first_recording import FirstRecording
from stepscope.record.hooks import AllHooks
from stepscope.record.manifest import rank_and_world_size
from stepscope.record.run_folder import RunFolder, is_run_folder
from stepscope.record.run_process import RUN, RUN_OPTIONS, RunOptions
from stepscope.record.step_times import mark

_hooks: AllHooks | None = None
"""Those of the plan that this process is recorded by."""


def _run_of_environment() -> tuple[RunFolder, RunOptions] | None:
    path = os.environ.get(RUN, "")
    if not is_run_folder(path):
        return None
    return RunFolder(Path(path)), RunOptions.parse(os.environ.get(RUN_OPTIONS, ""))


@guard.entry
def was_imported(module: str) -> None:
    """Have this process recorded as the environment says; does nothing where it says nothing.

    Args:
        module: what was imported just now: torch, jax, torch_xla.debug.profiler, or a tracker's.
    """
    run = _run_of_environment()
    if run is None:
        return
    folder, options = run
    package = module.partition(".")[0]
    folder.sign(package)
    if options.trackers:
        from stepscope.record.telemetry.log import keep_tracked_values

        keep_tracked_values(module)
        return
    if options.apply and module == "torch":
        _apply(folder, options)
    if options.measure:
        measured = _measure(folder, options) if module == "torch" else None
        if measured is not None:
            measured.watch_torch()
        return
    hooks = _hooks_for(folder, options)
    if hooks is not None:
        mark(f"{package}_imported")
        hooks.install_in(module)


@guard.entry
def steps_are_marked() -> None:
    """Have `stepscope bench` see the steps that the program marks itself, also where it never imports torch."""
    run = _run_of_environment()
    if run is not None and run[1].measure:
        _measure(*run)


def _apply(folder: RunFolder, options: RunOptions) -> None:
    """Apply remedies to this process, and have it say at its end what came of them."""
    from stepscope.record.apply import install

    applying = install(options.apply, folder, is_recorded=not options.measure)
    atexit.register(applying.end)
    _before_exit(applying.end)


def _hooks_for(folder: RunFolder, options: RunOptions) -> AllHooks | None:
    """The hooks of this process's recording, made where there is none; None where something else counts its steps."""
    global _hooks
    if controller() is None:
        steps = StepController(lambda: folder.new_trace_path(rank_and_world_size()[0]))
        _hooks = AllHooks(steps)
        _have_listen(steps, FirstRecording(steps, _hooks, folder, options))
        return _hooks
    listens = _hooks is not None and isinstance(getattr(controller(), "listener", None), FirstRecording)
    return _hooks if listens else None


def _measure(folder: RunFolder, options: RunOptions) -> BenchSteps | None:
    """Have this process note when its steps end; None where something else listens to them already."""
    steps = controller() or StepController()
    if steps.listener is None:
        _have_listen(steps, BenchSteps(steps, folder, options))
    return steps.listener if isinstance(steps.listener, BenchSteps) else None


def _have_listen(steps: StepController, plan: FirstRecording | BenchSteps) -> None:
    """Tell the plan of this process's steps, and of its end however that comes."""
    steps.listener = plan
    set_controller(steps)
    atexit.register(plan.program_ends)
    _before_exit(plan.program_ends)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _forked(steps, plan))
    guard.on_failure("", plan.abandon)


def _before_exit(action: Callable[[], None]) -> None:
    """Also do it for a program that ends by os._exit, for which nothing registered is called."""
    os._exit = guard.around(os._exit, before=lambda *_, **__: action())


@guard.entry
def _forked(steps: StepController, plan: FirstRecording | BenchSteps) -> None:
    """A process forked before the first step may be a rank; one that is forked later helps the one it came from."""
    if plan.has_begun:
        plan.let_go()
        set_controller(None)
    else:
        plan.process = os.getpid()
    steps.forget()
