"""Starts the items, each in a process of its own with a time limit, and keeps what came of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_campaign import summary
from benchmarks.gpu_campaign.plan import PARTS, REPOSITORY, Item
from benchmarks.gpu_campaign.results import Results, problems
from tests.zoo.registry import TURN

LEAST_S: Final = 10.0
"""With less time than this left no item begins."""
SIDE_BY_SIDE: Final = 4
"""Items whose programs take turns on the device: the others start, or read what was recorded, meanwhile."""
_PATIENCE_S: Final = 8.0
"""How long an item that is ended may take to end its own programs."""
_ERROR: Final = 1500


@dataclass
class _Running:
    item: Item
    process: subprocess.Popen[bytes]
    work: Path
    began_s: float
    until_s: float


class Campaign:
    """Runs items one after another, or several at a time where times do not matter.

    Args:
        limit_s: seconds for all items; each part has its share, and what one leaves the later ones have too.
        jobs: items at a time.
    """

    def __init__(
        self, results: Results, items: Sequence[Item], limit_s: float, *, device: str, is_dry: bool, jobs: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._results = results
        self._items = items
        self._device, self._is_dry, self._jobs, self._say = device, is_dry, jobs, say
        self._running: list[_Running] = []
        self._ends_s = part_ends([item for item in items if not results.is_over(item.path)], limit_s)

    def run(self) -> None:
        """Run what is not over yet; after an interruption nothing of it runs on, and what is done is kept."""
        waiting = [item for item in self._items if not self._results.is_over(item.path)]
        began_s = time.monotonic()
        try:
            while waiting or self._running:
                while waiting and self._has_room(waiting[0]):
                    self._start(waiting.pop(0), began_s)
                self._reap()
                time.sleep(0.05)
        finally:
            for running in self._running:
                stop(running.process)
                seconds = time.monotonic() - running.began_s
                self._close(running, "interrupted", "the campaign was interrupted", seconds)
            self._save()
            Path(own_environment(Path(), is_dry=False)[TURN]).unlink(missing_ok=True)

    def _has_room(self, item: Item) -> bool:
        together = item.takes_turns and all(running.item.takes_turns for running in self._running)
        return len(self._running) < (SIDE_BY_SIDE if together and not self._is_dry else self._jobs)

    def _start(self, item: Item, began_s: float) -> None:
        now_s = time.monotonic()
        left_s = began_s + self._ends_s[item.part] - now_s
        if left_s < LEAST_S:
            return  # not reached; another call continues with it
        if item.missing:
            lacking = ", ".join(item.missing)
            self._results.note(item.path, "skipped", 0.0, error=f"this Python has no {lacking}")
            self._save()
            return
        work = Path(tempfile.mkdtemp(prefix=f"gpu-campaign-{item.name}-"))
        seconds = min(item.most_s, left_s)
        words = [item.work, item.about, "--device", self._device, "--seconds", f"{seconds:.0f}", "--folder", str(work)]
        with (work / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_campaign.child", *words, *["--dry"] * self._is_dry],
                cwd=REPOSITORY,
                env=own_environment(work, is_dry=self._is_dry),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the campaign alone
            )
        self._running.append(_Running(item, process, work, now_s, now_s + seconds))

    def _reap(self) -> None:
        for running in list(self._running):
            seconds = time.monotonic() - running.began_s
            if running.process.poll() is None and time.monotonic() < running.until_s:
                continue
            self._running.remove(running)
            if running.process.poll() is None:
                stop(running.process)
                if running.until_s - running.began_s < running.item.most_s:  # it might have needed only a little more
                    self._close(running, "interrupted", "the time of its part was over", seconds)
                else:
                    self._close(running, "failed", f"it took longer than {seconds:.0f} s", seconds)
            else:
                self._close(running, "failed", f"its process ended with {running.process.returncode}", seconds)
            self._save()
            entry = self._results.items[running.item.path]
            error = f": {summary.reason(entry['error'])[:200]}" if "error" in entry else ""
            self._say(f"{running.item.path}: {entry['outcome']} in {seconds:.0f} s{error}")

    def _close(self, running: _Running, outcome: str, error: str, seconds: float) -> None:
        """Take over what the item left; outcome and error hold where it wrote no result."""
        said = {"outcome": outcome, "error": error}
        with contextlib.suppress(OSError, json.JSONDecodeError):
            said = json.loads((running.work / "result.json").read_text(encoding="utf-8"))
        more: dict[str, Any] = {key: value for key, value in said.items() if key != "outcome"}
        if said["outcome"] in ("failed", "interrupted"):
            more["log"] = (running.work / "log.txt").read_text(errors="replace")[-_ERROR:]
        if (running.work / "keep").is_dir():
            try:
                left_out = self._results.carry(running.item.path, running.work / "keep")
            except Exception as problem:  # a damaged trace of an item that was ended
                left_out = [f"{type(problem).__name__}: {problem}"]
            more |= {"left_out": left_out} if left_out else {}
        self._results.note(running.item.path, str(said["outcome"]), seconds, **more)
        shutil.rmtree(running.work, ignore_errors=True)

    def _save(self) -> None:
        self._results.save()
        summary.write(self._results, self._items)
        for problem in problems(self._results.folder):
            self._say(f"too large: {problem}")


def part_ends(items: Sequence[Item], limit_s: float) -> dict[str, float]:
    """By part: seconds after the beginning at which it must have ended; the parts of these items share the limit."""
    parts = [part for part in PARTS if any(item.part == part for item in items)]
    whole, passed, ends = sum(PARTS[part] for part in parts), 0.0, {}
    for part in parts:
        passed += PARTS[part]
        ends[part] = limit_s * passed / whole
    return ends


def own_environment(work: Path, *, is_dry: bool) -> dict[str, str]:
    """Variables of an item: this checkout's stepscope, whose data lies in the item's folder."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    if is_dry:  # its many short programs need torch's compiler rarely, and importing it takes longer than they do
        paths.insert(0, str(REPOSITORY / "tests" / "without_compiler"))
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    if not is_dry:
        own[TURN] = str(Path(tempfile.gettempdir()) / f"gpu-campaign-{os.getpid()}.turn")
    for name in ("DATA", "CACHE", "CONFIG"):
        own[f"STEPSCOPE_{name}_DIR"] = str(work / name.lower())
    return {**os.environ, **own}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End an item and every program that it started: first asked, then killed."""
    started = [process.pid, *descendants(process.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    process.wait()


def descendants(pid: int) -> Iterator[int]:
    """Processes that this one started, and theirs."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)
