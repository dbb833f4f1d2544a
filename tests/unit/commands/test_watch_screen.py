"""The terminal view of a watched job, on a terminal that Textual simulates."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.watch_log import Watched

pytest.importorskip("textual")


def test_the_view_shows_recordings_and_what_was_told_and_ends_with_q() -> None:
    from textual.widgets import DataTable, RichLog, Static

    from stepscope.commands.watch.screen import Screen

    known: dict[str, Any] = {"recorded_step_ns": 3e8, "causes": {"input": 1e8, "new cause": 3e7}, "cost_s": 1.0}
    history = [Watched(job="[b]", unix_s=600.0 * number, memory_bytes=2**30 + number, **known) for number in range(20)]
    history.append(Watched(job="[b]", unix_s=12_000.0, problem="nothing listens [there]"))
    screen = Screen()
    screen._watch = SimpleNamespace(job="[b]", history=history, ended=threading.Event())  # type: ignore[assignment]
    screen._work = threading.Thread(target=lambda: screen.show(["firing: [it]"]))

    async def looked_at() -> tuple[str, int, list[str]]:
        async with screen.run_test(size=(120, 60)) as pilot:
            await pilot.pause()
            assert screen._work is not None
            await asyncio.to_thread(screen._work.join)
            await pilot.pause()
            now = str(screen.query_one("#now", Static).render())
            rows = screen.query_one("#recordings", DataTable).row_count
            told = [line.text.strip() for line in screen.query_one("#told", RichLog).lines]
            await pilot.press("q")
        return now, rows, told

    now, rows, told = asyncio.run(looked_at())
    assert "step 300.0 ms while recorded" in now
    assert "nothing listens [there]" in now
    assert (rows, told) == (12, ["firing: [it]"])
    assert not screen.is_running


def test_a_view_before_the_first_recording() -> None:
    from textual.widgets import Static

    from stepscope.commands.watch.screen import Screen

    async def now() -> str:
        screen = Screen()
        async with screen.run_test() as pilot:
            await pilot.pause()
            return str(screen.query_one("#now", Static).render())

    assert "the first recording is awaited" in asyncio.run(now())
