"""What goes along with a recorded program: its telemetry, and quiet while its steps are recorded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stepscope.capture.manifest import rank_and_world_size


class Company:
    """Starts with a rank's first step, when its rank is known; what it cannot do it says, and the program goes on.

    Attributes:
        said: sentences for the end of the run, about what was done and what could not be.
    """

    def __init__(self, folder: Path, *, telemetry: bool, quiet: bool, seed: int | None) -> None:
        self.said: list[str] = []
        self._folder = folder
        self._telemetry = telemetry
        self._quiet = quiet
        self._seed = seed
        self._begun = False
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        """Start telemetry and pin the process; only the first call does anything."""
        if self._begun:
            return
        self._begun = True
        rank, world_size = rank_and_world_size()
        if self._telemetry:
            from stepscope.capture.telemetry.log import start_for_run

            problem = start_for_run(self._folder, rank).problem
            self.said.extend([problem] if problem else [])
        if self._quiet:
            from stepscope.capture.quiet import prepare_quiet

            local = os.environ.get("LOCAL_WORLD_SIZE", "")
            report = prepare_quiet(rank, int(local) if local.isdecimal() else world_size, seed=self._seed)
            self._undo.callback(report.undo)
            self.said.extend(report.sentences())

    def recording_begins(self) -> None:
        """Stop garbage collection for the steps that are recorded."""
        if self._quiet and self._begun:
            from stepscope.capture.quiet import quiet_steps

            steps = self._undo.enter_context(quiet_steps())
            self.said.extend(f"Quiet machine: {phrase}." for phrase in [*steps.done, *steps.noise])

    def recording_ends(self) -> None:
        """Leave the process as it was."""
        self._undo.close()
