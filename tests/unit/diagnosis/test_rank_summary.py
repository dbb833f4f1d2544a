"""A rank's summary is found again by its content, says what its trace says, and is never a damaged one."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stepscope.analysis.matching import matched_collectives
from stepscope.diagnosis.rank_summary import (
    RankSummary,
    keep_summary,
    kept_summary,
    rank_summary,
    recorded_once,
    summary_place,
)
from stepscope.diagnosis.ranks import across_ranks
from stepscope.diagnosis.view import View
from tests.unit.diagnosis.test_ranks import rank

SMALL = 2 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def summaries(*arrivals_ns: int) -> list[RankSummary]:
    world = len(arrivals_ns)
    return [rank_summary(View(rank(number, at, world=world))) for number, at in enumerate(arrivals_ns)]


def kept_again(place: Path, summary: RankSummary) -> RankSummary:
    keep_summary(place, summary)
    found = kept_summary(place, summary.steps.path)
    assert found is not None
    return found


def test_kept_summaries_give_the_answers_of_the_traces(tmp_path: Path) -> None:
    # Given
    whole = summaries(100, 500)

    # When
    again = [kept_again(tmp_path / str(place), summary) for place, summary in enumerate(whole)]

    # Then
    assert [each.steps for each in again] == [each.steps for each in whole]
    assert across_ranks([each.record for each in again]) == across_ranks([each.record for each in whole]) != ()
    assert max(place.stat().st_size for place in tmp_path.iterdir() if place.is_file()) < SMALL


def test_a_job_has_the_last_recording_of_each_rank() -> None:
    first, second = summaries(100, 500)
    later = replace(first.at("later.json"), start_ns=first.start_ns + 1)

    kept, left_out = recorded_once([later, first, second], lambda each: each)
    assert kept == [later, second]
    assert recorded_once([first, later], lambda each: each) == ([first, later], [])  # of one rank
    [(path, why)] = left_out
    assert path == first.steps.path
    assert "later.json" in why


def test_of_each_rank_of_a_large_job_fewer_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = summaries(100, 500)[0].record.collectives.table["step"].to_list()
    for most in (len(whole) - 1, 0):  # at least the first step stays, whole
        monkeypatch.setattr("stepscope.diagnosis.rank_summary._MOST_OF_ALL_RANKS", 2 * most)
        part = summaries(100, 500)[0].record.collectives
        steps = part.table["step"].to_list()
        assert 0 < len(steps) < len(whole)
        assert steps == [step for step in whole if step <= steps[-1]]
        assert part.before is not None
        assert part.before.height == len(steps)


def test_a_job_that_has_less_than_one_rank_is_summarised() -> None:
    assert rank_summary(View(rank(0, 100, world=-4))).record.collectives.table.height


def test_a_rank_without_a_number_has_the_name_of_its_file(tmp_path: Path) -> None:
    [summary] = summaries(100)
    keep_summary(tmp_path / "kept", summary)
    moved = kept_summary(tmp_path / "kept", "elsewhere.json")
    assert moved is not None
    assert (moved.steps.name, moved.steps.path) == ("rank 0", "elsewhere.json")


@pytest.mark.parametrize("cut", [0, 10, 40, -1])
def test_a_damaged_summary_is_none(tmp_path: Path, cut: int) -> None:
    place = tmp_path / "kept"
    keep_summary(place, summaries(100)[0])
    place.write_bytes(place.read_bytes()[:cut])
    assert kept_summary(place, "trace.json") is None


@pytest.mark.parametrize("table", [b"", b"no table", 5, None])
def test_a_summary_with_another_kind_of_table_is_none(tmp_path: Path, table: object) -> None:
    place = tmp_path / "kept"
    keep_summary(place, summaries(100)[0])
    content = msgspec.msgpack.decode(place.read_bytes()[32:])
    content["record"]["collectives"]["table"] = table
    data = msgspec.msgpack.encode(content)
    place.write_bytes(hashlib.sha256(data).digest() + data)
    assert kept_summary(place, "trace.json") is None


def test_the_place_is_that_of_the_content_and_of_how_it_is_read(tmp_path: Path) -> None:
    # Given two files of one content, which are old enough to be known by their times
    for name in ("a", "b"):
        (tmp_path / name).write_text("the same")
        os.utime(tmp_path / name, ns=(1, 1))
    first = summary_place(tmp_path / "a", [None])

    # Then
    assert summary_place(tmp_path / "b", [None]) == first == summary_place(tmp_path / "a", [None])
    assert summary_place(tmp_path / "a", ["1ms:2ms"]) != first
    (tmp_path / "a").write_text("different")
    assert summary_place(tmp_path / "a", [None]) != first


def test_many_ranks_match_like_two() -> None:
    # Given 40 ranks, of which each comes 10 ns after the one before
    found = [each.record.collectives for each in summaries(*range(100, 500, 10))]

    # When
    matched = matched_collectives(found)

    # Then
    assert set(matched["last"]) == {39}
    assert set(matched["late_ns"]) == {10}
    expected = np.arange(390, -1, -10)
    assert all((np.array(waits) == expected).all() for waits in matched["waits_ns"])
