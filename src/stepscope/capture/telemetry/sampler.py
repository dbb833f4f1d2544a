"""The thread that samples the machine: processor, memory, disk and network, and each NVIDIA device."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

from stepscope.capture import guard
from stepscope.capture.telemetry.nvidia import NvidiaDevices
from stepscope.capture.telemetry.processes import ProcessTree
from stepscope.capture.telemetry.store import Sample, Series
from stepscope.capture.telemetry.writer import Writer

DEFAULT_INTERVAL_S: Final = 1.0
_LONGEST_STOP_S: Final = 2.0


class Source(Protocol):
    """Something to ask for values at each interval."""

    @property
    def series(self) -> Series:
        """What is said to be missing where the source fails as a whole."""

    def sample(self, now_ns: int) -> list[tuple[Series, float | None]]:
        """The values at this moment of a clock that never steps back; None for what could not be had just now."""


class Sampler:
    """Asks its sources at a fixed interval and appends what they say.

    Args:
        interval_s: seconds between two samples.
        sources: whom to ask; by default all that this machine has.
    """

    def __init__(self, writer: Writer, interval_s: float, sources: Sequence[Source] | None = None) -> None:
        self._writer = writer
        self._interval_s = interval_s
        self._sources = sources
        self._ended = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="stepscope telemetry sampler", daemon=True)

    def start(self) -> None:
        """Begin; a package that is missing is complained of in one sentence."""
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and end; a driver that hangs is left behind."""
        self._ended.set()
        self._thread.join(_LONGEST_STOP_S)

    def abandon(self) -> None:
        """End without a last sample, and without waiting."""
        self._abandoned = True
        self._ended.set()

    @guard.entry(in_background=True)
    def _run(self) -> None:
        sources = available_sources(self._writer) if self._sources is None else self._sources
        due = time.monotonic()
        while sources:
            last = self._ended.is_set()
            if self._abandoned:
                return
            self._sample(sources)
            if last:
                return
            due = max(due + self._interval_s, time.monotonic())
            self._ended.wait(due - time.monotonic())

    def _sample(self, sources: Sequence[Source]) -> None:
        for source in sources:
            with self._writer.guarded(source.series):
                values = source.sample(time.monotonic_ns())
                now = time.time_ns()
                for series, value in values:
                    self._writer.add(Sample(series, now, None, value))


def available_sources(writer: Writer) -> list[Source]:
    """The sources of this machine; what it lacks is noted, and a missing package said on standard error."""
    sources: list[Source] = []
    absent = []
    try:
        sources.append(ProcessTree(writer))
    except ImportError:
        absent.append("psutil")
        writer.lacks(ProcessTree.series, "the package psutil is missing: pip install psutil")
    try:
        sources.append(NvidiaDevices(writer))
    except ImportError:
        if _has_nvidia_driver():
            absent.append("nvidia-ml-py")
        writer.lacks(NvidiaDevices.series, "the package nvidia-ml-py is missing: pip install nvidia-ml-py")
    except LookupError as error:
        writer.lacks(NvidiaDevices.series, str(error.args[0]))
    if absent:
        what = "processor, memory, disk and network" if "psutil" in absent else "NVIDIA devices"
        print(
            f"stepscope: {what} are not sampled, for want of {' and '.join(absent)}: pip install {' '.join(absent)}",
            file=sys.stderr,
        )
    return sources


def _has_nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi") is not None
