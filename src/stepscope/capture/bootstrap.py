"""The beginning of `stepscope run` inside the program, called by `bootstrap_path/sitecustomize.py`."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import NoReturn

from stepscope.capture.bootstrap_plan import FirstRecording, RunOptions
from stepscope.capture.controller import StepController, controller, set_controller
from stepscope.capture.hooks import StepHooks
from stepscope.capture.manifest import rank_and_world_size
from stepscope.capture.run_folder import RunFolder, is_run_folder
from stepscope.capture.start_marks import mark

RUN: str = "STEPSCOPE_RUN"
RUN_OPTIONS: str = "STEPSCOPE_RUN_OPTIONS"


def torch_was_imported() -> None:
    """Have this process recorded as the environment says; does nothing where it says nothing."""
    path = os.environ.get(RUN, "")
    if controller() is not None or not is_run_folder(path):
        return
    mark("torch_imported")
    folder = RunFolder(Path(path))
    folder.sign("torch")
    steps = StepController(lambda: folder.new_trace_path(rank_and_world_size()[0]))
    hooks = StepHooks(steps)
    plan = FirstRecording(steps, hooks, folder, RunOptions.parse(os.environ.get(RUN_OPTIONS, "")))
    hooks.install()
    steps.listener = plan
    set_controller(steps)
    atexit.register(plan.program_ends)
    _before_exit(plan)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _forked(steps, plan))


def _before_exit(plan: FirstRecording) -> None:
    """Keep the recording of a program that ends by os._exit, for which nothing registered is called."""
    original = os._exit

    def leave(status: int) -> NoReturn:
        try:
            plan.program_ends()
        finally:
            original(status)

    os._exit = leave


def _forked(steps: StepController, plan: FirstRecording) -> None:
    """A process forked before the first step may be a rank; one that is forked later helps the one it came from."""
    if plan.has_begun:
        plan.let_go()
        set_controller(None)
    else:
        plan.process = os.getpid()
    steps.forget()
