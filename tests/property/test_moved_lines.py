"""Lines of a source file are found again after edits, whatever the edits."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from stepscope.trace.line_records import moved_lines, split_lines

LINES = st.lists(
    st.sampled_from(["", "x = 1", "    y = model(x)", "    loss.backward()", "for x in data:"]), max_size=30
)


@given(LINES, LINES)
def test_lines_keep_their_order_and_the_unchanged_ones_their_text(before: list[str], after: list[str]) -> None:
    found = moved_lines(before, after)

    pairs = sorted(found.now.items())
    assert [new for _, new in pairs] == sorted(set(found.now.values()))
    assert all(1 <= old <= len(before) and 1 <= new <= len(after) for old, new in pairs)
    for old, new in pairs:
        assert (before[old - 1] != after[new - 1]) == (new in found.changed)
    assert found.changed <= set(found.now.values())


@given(st.integers(1, 40), st.data())
def test_lines_that_differ_are_found_after_others_were_added_and_removed(count: int, data: st.DataObject) -> None:
    before = [f"value_{number} = compute({number * 7919})" for number in range(count)]
    kept = data.draw(st.lists(st.sampled_from(range(count)), unique=True).map(sorted))
    after: list[str] = []
    places = {}
    for number in kept:
        after += data.draw(st.lists(st.just("# added"), max_size=3))
        after.append(before[number])
        places[number + 1] = len(after)

    found = moved_lines(before, after)

    exact = {old: new for old, new in found.now.items() if new not in found.changed}
    assert exact == places


@given(st.text("a\r\n\x0c", max_size=8))
def test_splitting_gives_back_the_text(text: str) -> None:
    assert "\n".join(split_lines(text)).rstrip("\n") == text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")


def test_a_rewritten_line_is_found_by_its_text() -> None:
    before = ["for batch in loader:", "    loss = model(batch)", "    loss.backward()", "    print(loss.item())"]
    after = ["import torch", *before[:1], "    loss = model(batch.to(device))", *before[2:3], "    unread.append(loss)"]

    found = moved_lines(before, after)

    assert found.now == {1: 2, 2: 3, 3: 4}
    assert found.changed == {3}


def test_a_kept_text_that_makes_comparing_slow_is_compared_at_its_ends_only() -> None:
    after = [f"line {number}" for number in range(2_000)]
    before = ["first", *(each for line in after for each in (line, "other")), *["other"] * 300_000, "last"]
    begin = time.process_time()

    found = moved_lines(before, [*after, "last"])

    assert time.process_time() - begin < 2
    assert found.now == {len(before): 2_001}


def test_a_long_file_edited_at_both_ends_takes_little_time() -> None:
    before = [f"    total += weights[{number % 997}] * {number}" if number % 6 else "" for number in range(10_000)]
    after = ["import os", *before[:5_000], *before[5_010:], "print(total)"]
    begin = time.process_time()

    found = moved_lines(before, after)

    assert time.process_time() - begin < 2
    assert len(found.now) >= 9_900
