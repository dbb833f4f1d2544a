"""Progress of long work: a bar on a terminal, lines elsewhere, nothing for what is short."""

from __future__ import annotations

import argparse
import io

import pytest

from stepscope.commands.shared import output


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def shown(
    monkeypatch: pytest.MonkeyPatch, *at_s: float, is_terminal: bool, total: int | None = 4 << 20, **options: bool
) -> str:
    """What is written if a MiB is read at each of these times."""
    clock = [0.0]
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with output.Progress("reading a\x1b.json", arguments=argparse.Namespace(**options)) as told:
        for done, clock[0] in enumerate(at_s, 1):
            told(done << 20, total)
    return screen.getvalue()


def test_a_bar_after_two_seconds_that_goes_when_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 0.5, 2.5, 2.55, 3.0, is_terminal=True)

    assert "reading a\\x1b.json" in text
    assert "50%" in text
    assert "75%" not in text  # too soon after the one before
    assert "100%" in text
    assert text.endswith("\x1b[2K")
    assert all("\r" in line or "\x1b" in line for line in text.splitlines())  # kept answers leave these out


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 9.0, 12.0, 15.0, 30.0, is_terminal=False)

    assert text == (
        "\rstepscope: reading a\\x1b.json: 50.0 % of 4.0 MiB, 12 s left\n"
        "\rstepscope: reading a\\x1b.json: 100.0 % of 4.0 MiB\n"
    )


def test_of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1.0 MiB\n" in shown(monkeypatch, 12.0, is_terminal=False, total=None)
    assert "1.0" in shown(monkeypatch, 12.0, is_terminal=True, total=None)


@pytest.mark.parametrize("option", ["quiet", "redact"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_shown_if_it_is_not_wanted(option: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 30.0, 60.0, is_terminal=is_terminal, **{option: True}) == ""


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 0.5, 1.0, 1.9, is_terminal=True) == ""
