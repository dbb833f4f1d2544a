"""How far a long piece of work is, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Final

from stepscope.report.format import printable, share, size, span

if TYPE_CHECKING:
    import rich.progress

_SHOWN_AFTER_S: Final = 2.0
_REDRAWN_AFTER_S: Final = 0.1
_LINE_AFTER_S: Final = 10.0


class Progress:
    """A context manager that is called with what is done and, if known, the total.

    What it writes contains a carriage return, by which kept answers leave it out.

    Args:
        work: what is done, such as "reading trace.json".
        in_bytes: whether amounts are bytes; else they are counts.
        things: what is counted, whose rate is shown.
        arguments: the command's, which show nothing if they have --quiet, or --redact, since work may name a file.
    """

    def __init__(
        self, work: str, *, in_bytes: bool = True, arguments: argparse.Namespace, things: str | None = None
    ) -> None:
        self._work = printable(work)
        self._things = things
        self._in_bytes = in_bytes
        self._is_quiet = any(getattr(arguments, name, False) for name in ("quiet", "redact"))
        self._begun = time.monotonic()
        self._drawn = self._begun
        self._bar: rich.progress.Progress | None = None

    def __call__(self, done: int, total: int | None, work: str | None = None) -> None:
        """Show the amount, and from now on the work if that is given."""
        self._work = self._work if work is None else printable(work)
        now = time.monotonic()
        if self._is_quiet or now - self._begun < _SHOWN_AFTER_S:
            return
        is_terminal = sys.stderr.isatty()
        if now - self._drawn < (_REDRAWN_AFTER_S if is_terminal else _LINE_AFTER_S):
            return
        self._drawn = now
        if is_terminal:
            self._draw(done, total)
        else:
            sys.stderr.write(f"\r{self._line(done, total, now - self._begun)}\n")
            sys.stderr.flush()

    def _line(self, done: int, total: int | None, took_s: float) -> str:
        amount = size(done) if self._in_bytes else str(done)
        if not total:
            return f"stepscope: {self._work}: {amount}"
        left = f", {span(took_s * (total / done - 1))} left" if 0 < done < total else ""
        of = size(total) if self._in_bytes else total
        return f"stepscope: {self._work}: {share(done / total)} of {of}{self._rate(done)}{left}"

    def _rate(self, done: int) -> str:
        took_s = time.monotonic() - self._begun
        return f", {done / took_s:,.1f} {self._things} per second" if self._things and took_s else ""

    def _draw(self, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = _bar(in_bytes=self._in_bytes)
            # What was done before the bar began is a part of its rate, too.
            self._bar.add_task(self._work, total=total)
            self._bar.tasks[0].start_time = self._bar.get_time() - (time.monotonic() - self._begun)
            self._bar.start()
        work = self._work + self._rate(done)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=work, refresh=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(*, in_bytes: bool) -> rich.progress.Progress:
    from rich import progress
    from rich.console import Console

    rate = [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()] if in_bytes else []
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        *rate,
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        auto_refresh=False,
    )
