"""The terminal view of a watched job, by Textual: now, the last hours as curves and bars, and what was told."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Label, RichLog, Sparkline, Static

from stepscope.compare.watching import idle_ns, step_ns
from stepscope.report.format import duration, printable, share, size
from stepscope.report.palette import cause_palette, kind_palette
from stepscope.report.watch import clock, figures

if TYPE_CHECKING:
    from stepscope.commands.watch.job import Watch
    from stepscope.record.watch_log import Watched

_ROWS: Final = 8
"""Of the picture of causes, whose columns are recordings."""
_MOST_COLUMNS: Final = 110
_COLUMNS: Final = ("time", "step", "idle", "communication", "late rank", "memory", "cost", "told")
_END_S: Final = 15.0


class Screen(App[None]):  # type: ignore[misc, unused-ignore]  # Textual may be absent
    """The view of one watch, whose recordings another thread makes."""

    CSS = """
    Sparkline { height: 3; margin: 0 1; }
    Label { margin: 1 1 0 1; text-style: bold; }
    Static { margin: 0 1; }
    DataTable { height: auto; max-height: 14; margin: 0 1; }
    RichLog { height: 6; margin: 0 1; }
    """
    BINDINGS: ClassVar = [("q", "quit", "End the watch")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self) -> None:
        super().__init__()
        self._watch: Watch | None = None
        self._said: list[str] = []
        self._work: threading.Thread | None = None

    def follow(self, watch: Watch, work: Callable[[], None]) -> None:
        """Show the watch until the user ends it; raises what its work raises."""
        self._watch = watch
        failed: list[Exception] = []

        def worked() -> None:
            try:
                work()
                self.tell("the watch has ended: q leaves this view")
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
                self.call_from_thread(self.exit)

        self._work = threading.Thread(target=worked, name="stepscope-watch", daemon=True)
        self.run()
        watch.ended.set()
        self._work.join(_END_S)
        if failed:
            raise failed[0]

    def tell(self, sentence: str) -> None:
        """Add a sentence to what was told; from any thread."""
        self._said.append(printable(sentence))
        self._later(self._show_told)

    def show(self, events: Sequence[str]) -> None:
        """Show the latest recording, and tell its alerts; from any thread."""
        self._later(self._refresh_all)
        for event in events:
            self.tell(event)

    def _later(self, call: Callable[[], None]) -> None:
        if self.is_running:
            self.call_from_thread(call) if self._thread_id != threading.get_ident() else call()

    def compose(self) -> ComposeResult:
        """Make the parts, from top to bottom."""
        with VerticalScroll():
            yield Static(id="now")
            yield Label("Step time", id="step-title")
            yield Sparkline([], id="step")
            yield Label("Memory", id="memory-title")
            yield Sparkline([], id="memory")
            yield Label("Causes, of the recorded step")
            yield Static(id="causes")
            yield Label("Recordings")
            yield DataTable(id="recordings", cursor_type="none")
            yield Label("Told")
            yield RichLog(id="told", wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        """Fill the view, and begin to record."""
        self.title = f"stepscope watch {self._watch.job}" if self._watch else "stepscope watch"
        self.query_one("#recordings", DataTable).add_columns(*_COLUMNS)
        self._refresh_all()
        self._show_told()
        if self._work is not None:
            self._work.start()

    def _show_told(self) -> None:
        log = self.query_one("#told", RichLog)
        log.clear()
        for sentence in self._said[-100:]:
            log.write(Text(sentence))

    def _refresh_all(self) -> None:
        history = self._watch.history if self._watch else []
        whole = [each for each in history if each.problem is None]
        now = "  ".join([clock(whole[-1].unix_s), *figures(whole)]) if whole else "the first recording is awaited"
        told = [now, whole[-1].finding if whole else None, history[-1].problem if history else None]
        self.query_one("#now", Static).update(Text("\n".join(printable(each) for each in told if each)))
        steps = [ns for each in whole if (ns := step_ns(each)) is not None]
        memory = [float(each.memory_bytes) for each in whole if each.memory_bytes is not None]
        self._draw("step", "Step time", steps, duration)
        self._draw("memory", "Memory", memory, size)
        self.query_one("#causes", Static).update(_stacked(whole[-_MOST_COLUMNS:]))
        table = self.query_one("#recordings", DataTable)
        table.clear()
        for each in history[:-13:-1]:
            table.add_row(*_cells(each))

    def _draw(self, name: str, title: str, values: list[float], words: Callable[[float], str]) -> None:
        span = f", {words(min(values))} to {words(max(values))}" if values else ""
        self.query_one(f"#{name}-title", Label).update(title + span)
        self.query_one(f"#{name}", Sparkline).data = values


def _cells(recording: Watched) -> Sequence[Text]:
    whole = recording.recorded_step_ns

    def of_step(ns: float | None) -> str:
        return "" if ns is None or not whole else share(ns / whole)

    step, cost = step_ns(recording), recording.cost_s
    cells = (
        clock(recording.unix_s),
        "" if step is None else duration(step),
        of_step(idle_ns(recording)),
        of_step(recording.communication_ns),
        printable(recording.late_rank or ""),
        "" if recording.memory_bytes is None else size(recording.memory_bytes),
        "" if cost is None else f"{max(cost, 0.0):.2f} s",
        printable(recording.problem or "; ".join(event.sentence for event in recording.events)),
    )
    return [Text(cell) for cell in cells]


def _stacked(history: Sequence[Watched]) -> Text:
    """The causes of each recording as a column, the largest below, and their names and last shares."""
    if not history:
        return Text()
    palette = {**kind_palette(), **cause_palette()}
    total: Counter[str] = Counter()
    for each in history:
        total.update(each.causes)
    order = [cause for cause, _ in total.most_common()]
    colours = {cause: palette[cause]["colour"] if cause in palette else "#9aa0a6" for cause in order}
    picture = Text()
    for row in reversed(range(_ROWS)):
        for each in history:
            height = (row + 0.5) / _ROWS * (each.recorded_step_ns or 1.0)
            sums = accumulate(each.causes.get(cause, 0.0) for cause in order)
            found = next((cause for cause, top in zip(order, sums, strict=True) if height < top), None)
            picture.append("█", colours[found]) if found else picture.append(" ")
        picture.append("\n")
    last = history[-1]
    for cause in order:
        of_step = last.causes.get(cause, 0.0) / (last.recorded_step_ns or 1.0)
        picture.append(f"■ {cause.replace('_', ' ')} {share(of_step)}  ", colours[cause])
    return picture
