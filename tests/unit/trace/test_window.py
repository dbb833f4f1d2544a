"""Windows and ranges of steps, as a user writes them."""

from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.trace.window import StepRange, Window

ENDLESS = 2**62


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2s:4s", Window(2_000_000_000, 4_000_000_000)),
        ("150ms:", Window(150_000_000, ENDLESS)),
        (":1.5s", Window(0, 1_500_000_000)),
        (":", Window(0, ENDLESS)),
        ("1:2", Window(1_000_000_000, 2_000_000_000)),
        (" 7us : 9 us ", Window(7_000, 9_000)),
        ("3ns:4ns", Window(3, 4)),
        ("0.000000001s:0.000000003s", Window(1, 3)),
        ("1s:999999999999s", Window(1_000_000_000, ENDLESS)),
    ],
)
def test_windows(text: str, expected: Window) -> None:
    assert Window.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a window is START:END, such as 2s:4s or 150ms:, not ''"),
        ("4s", "a window is START:END, such as 2s:4s or 150ms:, not '4s'"),
        ("4s:2s", "the window '4s:2s' ends before it begins"),
        ("2s:2s", "the window '2s:2s' ends before it begins"),
        ("-1s:2s", "'-1s' in the window '-1s:2s' is not a time"),
        ("1s:two", "'two' in the window '1s:two' is not a time"),
        ("1s:2h", "'2h' in the window '1s:2h' is not a time"),
        ("1s:2s:3s", "'2s:3s' in the window '1s:2s:3s' is not a time"),
    ],
)
def test_what_is_no_window(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Window.parse(text)

    assert message in str(raised.value)


def test_a_window_has_a_length() -> None:
    assert Window(3, 10).duration_ns == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", StepRange(3, 3)),
        ("3:5", StepRange(3, 5)),
        ("3:", StepRange(3, ENDLESS)),
        (":5", StepRange(0, 5)),
        (" 3 : 5 ", StepRange(3, 5)),
        ("0", StepRange(0, 0)),
    ],
)
def test_ranges_of_steps(text: str, expected: StepRange) -> None:
    assert StepRange.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "steps are FIRST:LAST, such as 3:5, or one number, not ''"),
        (":", "steps are FIRST:LAST, such as 3:5, or one number, not ':'"),
        ("3-5", "steps are FIRST:LAST, such as 3:5, or one number, not '3-5'"),
        ("-3", "steps are FIRST:LAST, such as 3:5, or one number, not '-3'"),
        ("3:5:7", "steps are FIRST:LAST, such as 3:5, or one number, not '3:5:7'"),
        ("3 5", "steps are FIRST:LAST, such as 3:5, or one number, not '3 5'"),
        ("5:3", "the steps '5:3' end before they begin"),
    ],
)
def test_what_is_no_range_of_steps(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        StepRange.parse(text)

    assert str(raised.value) == message
