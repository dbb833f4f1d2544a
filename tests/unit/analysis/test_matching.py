"""Exchanges of groups and pairs are found in the traces of their ranks, on one clock."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from stepscope.analysis import matching
from stepscope.analysis.matching import RankCollectives, clocks, matched_collectives, participants

SECOND = 1_000_000_000


def rank(number: int, rows: list[dict[str, Any]], clock_ns: int = 0) -> RankCollectives:
    """A rank's exchanges, all of one step; each has start_ns and end_ns on a true clock."""
    usual = {"step": 0, "kind": "all_reduce", "group": "", "bytes": 64}
    table = [usual | row | {"start_ns": row["start_ns"] + clock_ns} for row in rows]
    frame = pl.DataFrame(table, infer_schema_length=None).with_columns(
        duration_ns=pl.col("end_ns") + clock_ns - pl.col("start_ns")
    )
    return RankCollectives(frame.drop("end_ns"), rank=number)


def group(name: str, members: list[int], start_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
    return {
        "group": name,
        "members": str(members),
        "group_size": len(members),
        "start_ns": start_ns,
        "end_ns": end_ns,
    } | more


def test_no_exchange_no_match() -> None:
    assert matched_collectives([]).is_empty()
    assert clocks(matched_collectives([])) == {}


def test_groups_of_ranks_match_among_themselves_and_join_their_clocks() -> None:
    # Given pairs (0, 1) and (2, 3) that exchange in turn with pairs (0, 2) and (1, 3), on four clocks
    rows: list[list[dict[str, Any]]] = [[], [], [], []]
    for at in range(0, 40, 2):
        for number, tensor, data in (
            (0, [0, 1], [0, 2]),
            (1, [0, 1], [1, 3]),
            (2, [2, 3], [0, 2]),
            (3, [2, 3], [1, 3]),
        ):
            rows[number].append(group("1", tensor, 100 * at + 10 * number, 100 * at + 90))
            rows[number].append(group("2", data, 100 * at + 110, 100 * at + 190 + number % 2))
    found = matched_collectives([rank(number, mine, clock_ns=7_000 * number) for number, mine in enumerate(rows)])

    # Then each is matched in its own group, although both pairs of a kind have the same name
    assert found.height == 20 * 4
    assert sorted(found.filter(group="1")["ranks"].unique().to_list()) == [[0, 1], [2, 3]]
    assert found.filter(group="1").select("last", "late_ns", "size").unique().sort("last").rows() == [
        (1, 10, 2),
        (3, 10, 2),
    ]
    assert {number: clock.ahead_ns for number, clock in clocks(found).items()} == {0: 0, 1: 7_000, 2: 14_000, 3: 21_000}
    assert set(participants(found.filter(group="2"))["wait_ns"]) == {0}


def test_a_send_meets_the_receive_of_its_peer() -> None:
    def between(start_ns: int, end_ns: int, **peer: int) -> dict[str, Any]:
        return {"kind": "send_receive", "group": "pipe", "start_ns": start_ns, "end_ns": end_ns} | peer

    # Given three stages, of which the middle one receives from one side and sends to the other
    first = [between(50, 100, target=1), between(150, 200, target=1)]
    middle = [between(0, 100, source=0), between(130, 240, target=2), between(160, 200, source=0)]
    last = [between(0, 240, source=1)]
    found = matched_collectives([rank(number, rows) for number, rows in enumerate((first, middle, last))])

    # Then
    assert found.select("source", "ranks", "last", "waiting_ns").rows() == [
        (0, [0, 1], 0, 50), (1, [1, 2], 1, 130), (0, [0, 1], 1, 10),
    ]  # fmt: skip


def test_members_that_are_not_here_are_not_waited_for_and_long_lists_are_counted() -> None:
    pair = [rank(number, [group("0", [0, 1, 2, 3], 10 * number, 90)]) for number in (0, 2)]
    assert matched_collectives(pair)["ranks"].to_list() == [[0, 1]]

    cut = {"members": "[0, 1, ...]", "group_size": 3}
    rows = [rank(number, [group("0", [], 10, 90) | cut]) for number in range(4)]
    assert matched_collectives(rows[:2])["size"].to_list() == [3]  # of these ranks, any may be meant
    assert matched_collectives(rows[:3])["ranks"].to_list() == [[0, 1, 2]]
    assert matched_collectives(rows).is_empty()


def test_numbers_of_members_that_no_rank_has_are_no_ranks() -> None:
    listed = {"members": f"[0, 1, {'9' * 5000}]"}
    pair = [rank(number, [group("0", [0, 1], 10, 90) | listed]) for number in (0, 1)]
    assert matched_collectives(pair)["ranks"].to_list() == [[0, 1]]


def test_ranks_that_share_no_exchange_keep_their_own_clocks() -> None:
    rows = [[group("1", [0, 1], 0, 90)], [group("1", [0, 1], 10, 90)], [group("2", [2, 3], 0, 50)],
            [group("2", [2, 3], 30, 50)], []]  # fmt: skip
    empty = RankCollectives(
        pl.DataFrame(schema={"step": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64}), rank=4
    )
    ranks = [rank(number, mine, SECOND * number) for number, mine in enumerate(rows[:4])]
    found = matched_collectives([*ranks, empty])
    assert {number: clock.ahead_ns for number, clock in clocks(found).items()} == {0: 0, 1: SECOND, 2: 0, 3: SECOND}
    assert found["late_ns"].to_list() == [10, 30]


def test_a_piece_of_the_steps_at_a_time_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": at // 3, "start_ns": 100 * at + at % 2, "end_ns": 100 * at + 90} for at in range(30)]
    ranks = [rank(number, rows[number:], clock_ns=7_000 * number) for number in range(3)]
    whole = matched_collectives(ranks)
    monkeypatch.setattr(matching, "_PIECE_ROWS", 10)
    assert matched_collectives(ranks).equals(whole)
    assert whole.height == 27  # that of the first step ended on one rank before it began on the next
