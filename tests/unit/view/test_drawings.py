"""What the page draws says the same as the commands, and adds up."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope.analysis.matching import MATCHED_SCHEMA, Clock
from stepscope.analysis.memory import GROUPINGS
from stepscope.diagnosis.rank_groups import Exchanges
from stepscope.diagnosis.rank_summary import RankSteps, rank_steps
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.readers import open_trace
from stepscope.report.document import sentences
from stepscope.report.whatif import whatif_document
from stepscope.view.drawings import (
    flame_json,
    loading_json,
    memory_alive_json,
    memory_levels_json,
    ranks_json,
    roofline_json,
)
from stepscope.whatif.answer import NamedChange, Tried, what_if
from stepscope.whatif.changes import scaled, without_cause

SAMPLE = Path(__file__).parents[3] / "examples" / "gpt2_per_token_loss_cpu.json.gz"


@cache
def view() -> View:
    return View(open_trace(SAMPLE))


def test_frames_are_no_wider_than_the_one_below_and_the_lowest_add_up() -> None:
    flame = flame_json(view())
    inside = np.zeros(len(flame["frames"]), np.int64)
    for _, parent, ns in flame["frames"]:
        if parent >= 0:
            inside[parent] += ns
    assert all(inside[place] <= ns for place, (_, _, ns) in enumerate(flame["frames"]))
    assert sum(ns for _, parent, ns in flame["frames"] if parent < 0) <= flame["total_ns"]
    assert len(flame["kinds"]) == len(flame["names"])


def test_bands_of_any_grouping_add_up_to_the_level() -> None:
    by = {name: memory_levels_json(view(), by=name) for name in GROUPINGS}
    memory = view().memories[0]
    for levels in by.values():
        total = np.sum([band["bytes"] for band in levels["bands"]], axis=0)
        at = np.searchsorted(memory.levels["start_ns"].to_numpy(), levels["times"], side="right") - 1
        assert total.tolist() == memory.levels["allocated_bytes"].to_numpy()[at].tolist()
        assert max(total) == levels["peak_bytes"] == memory.peak_bytes
    assert {"category", "line", "operator"} <= set(by["category"]["by"])
    assert by["line"]["bands"][-1]["name"].rpartition(":")[2].isdecimal()


def test_what_is_alive_adds_up_to_the_level_and_was_allocated_before() -> None:
    peak = view().memories[0].peak_ns
    alive = memory_alive_json(view(), None, peak)
    assert alive["bytes"] == view().memories[0].peak_bytes
    assert sum(block["bytes"] for block in alive["blocks"]) == alive["bytes"]
    assert all(block["start_ns"] is None or block["start_ns"] <= peak for block in alive["blocks"])
    assert all(block["end_ns"] is None or block["end_ns"] > peak for block in alive["blocks"])
    assert memory_alive_json(view(), None, -1)["blocks"] == []


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="no memory of device '7'"):
        memory_levels_json(view(), "7")


def test_the_recorded_number_of_workers_takes_the_measured_step_and_more_are_never_slower() -> None:
    loading = loading_json(view())
    steps = {each["workers"]: each["step_ns"] for each in loading["with_workers"]}
    assert steps[loading["workers"]] == loading["step_ns"] == view().step_ns
    assert max(ns for workers, ns in steps.items() if workers >= loading["workers"]) == loading["step_ns"]
    assert loading["step_ns"] - min(steps.values()) <= loading["wait_ns"]


def test_a_trace_without_a_device_has_no_roof() -> None:
    assert roofline_json(view().trace) == {"roofs": [], "operators": []}


def test_causes_of_all_steps_add_up_to_the_steps_without_a_device() -> None:
    steps = rank_steps(view())
    assert steps.index == view().steps.filter("complete")["index"].to_list()
    total = np.sum(list(steps.cause_ns.values()), axis=0)
    assert total.sum() == pytest.approx(sum(steps.step_ns), rel=0.01)


def ranks() -> list[RankSteps]:
    return [
        RankSteps("rank 0", 0, "a", [3, 4], [10, 20], {"input": [1, 2]}),
        RankSteps("rank 1", 1, "b", [4, 5], [30, 5], {"python": [7, 0]}),
    ]


def test_ranks_stand_on_the_steps_that_any_of_them_has() -> None:
    nothing = pl.DataFrame(schema=dict(MATCHED_SCHEMA))
    whole = ranks_json(ranks(), None, nothing, ["late"])
    assert whole["steps"] == [3, 4, 5]
    assert whole["ns"] == [[10, 20, None], [None, 30, 5]]
    assert whole["causes"] == ["step", "python", "input"]
    assert whole["slowest"] == [0, 1, 1]  # without collectives, whose step is longest
    assert (whole["exchanges"], whole["clocks"]) == ([], "")
    assert ranks_json(ranks(), "input", nothing, [])["ns"] == [[1, 2, None], [None, 0, 0]]


def test_what_ranks_exchange_stands_beside_them() -> None:
    row = {"kind": "all_reduce", "bytes": 64, "per_step": 1.0, "wait_ns": 5, "transfer_ns": 2, "bus_gb_per_s": 3.0,
           "last": "rank 1", "last_share": 1.0}  # fmt: skip
    together = Exchanges(pl.DataFrame([row]), 3, (("rank 0", Clock(0, 0.0, 0)), ("rank 1", Clock(9, 2e-5, 1_000))))
    shown = ranks_json(ranks(), None, pl.DataFrame(schema=dict(MATCHED_SCHEMA)), [], together=together)
    assert shown["exchanges"] == [row]
    assert "3 exchanges; what remains is at most 1.0 us (rank 1" in shown["clocks"]
    assert "rank 1 drifts by 20.0 us in a second" in shown["clocks"]


def test_a_steps_exchanges_are_drawn_on_one_clock() -> None:
    arrivals = [[70, 50], [10, 40], [80]]
    waits = [[max(each) - one for one in each] for each in arrivals]
    late = pl.DataFrame({
        "step": [4, 5, 5], "kind": ["all_reduce", "all_gather", "all_to_all"], "bytes": [64, None, 8],
        "last": [0, 1, 0], "late_ns": [20, 30, 20], "arrivals_ns": arrivals, "ranks": [[0, 1], [0, 1], [1]],
        "waits_ns": waits, "transfer_ns": [3, 4, 5],
    })  # fmt: skip
    together = Exchanges(pl.DataFrame(), 3, (("rank 0", Clock(0, 0.0, 0)),))

    def drawn(step: int | None) -> Any:
        return ranks_json(ranks(), None, late, [], together=together, step=step)["drawn"]

    assert drawn(None) == {
        "step": 5, "kinds": ["all_gather", "all_to_all"], "bytes": [None, 8], "arrivals_ns": [[0, 30], [None, 70]],
        "ends_ns": [34, 75], "left_out": 0,
    }  # fmt: skip
    assert drawn(4)["arrivals_ns"] == [[20, 0]]
    assert drawn(99) is None
    assert ranks_json(ranks(), None, late, [])["drawn"] is None


def test_the_slowest_rank_is_the_one_that_others_wait_for_longest() -> None:
    arrivals = [[7, 5], [1, 4], [8, 6]]
    times = {"late_ns": [2, 3, 2], "arrivals_ns": arrivals}
    late = pl.DataFrame({"step": [4, 4, 4], "last": [0, 1, 0], **times, "ranks": [[0, 1]] * 3})
    shown = ranks_json(ranks(), None, late, [])
    assert shown["slowest"] == [None, 0, None]
    assert (shown["cause"], shown["ns"]) == ("late", [[0, 4, None], [None, 3, 0]])
    assert (shown["read"], shown["of"]) == (2, 2)


def test_earlier_results_change_no_answer_and_the_prose_is_the_commands() -> None:
    experiment = view().experiment
    changes = [NamedChange("--remove python", without_cause("python")), NamedChange("half", scaled("aten::fill_", 0.5))]
    tried = Tried()
    for count in (1, 2, 2):
        known, _ = what_if(experiment, changes[:count], tried)
        anew, _ = what_if(experiment, changes[:count])
        assert (known.alone, known.together) == (anew.alone, anew.together)
    assert set(tried.alone) == {"--remove python", "half"}
    prose = sentences(whatif_document(known))
    assert any("With all of these, a step would take" in text for part in prose for text in part["texts"])
