"""The palette: causes are told apart, and look alike in the terminal and on the page."""

from __future__ import annotations

from stepscope.analysis.host import CAUSES
from stepscope.report.palette import cause_palette, kind_palette, memory_look, series_colours, terminal_bar


def test_every_cause_has_a_look_of_its_own() -> None:
    looks = cause_palette()
    assert len({(looks[cause]["colour"], looks[cause]["hatched"]) for cause in CAUSES}) == len(CAUSES)
    assert len({terminal_bar(cause) for cause in CAUSES}) == len(CAUSES)
    assert looks["compute"]["colour"] == kind_palette()["compute"]["colour"]


def test_a_terminal_has_the_nearest_of_its_colours() -> None:
    # Vermillion is #d55e00: number 166 is #d75f00
    assert terminal_bar("synchronisation") == ("█", "38;5;166")
    assert terminal_bar("logging") == ("▒", "38;5;166")
    assert terminal_bar("of another version") == terminal_bar("unknown")


def test_series_repeat_colours_only_when_there_are_no_more() -> None:
    colours = series_colours(["a", "", *"bcdefghi"])
    assert len({colours[name] for name in "abcdefgh"}) == 8
    assert colours["i"] == colours["a"]
    assert colours[""] == memory_look("before")["colour"]
