import dataclasses
import re

import polars as pl
import pytest

from stepscope.diagnosis.finding import DeviceSummary, Remedy, Together, Unreadable
from stepscope.report.words import causes_of, headline, joined_causes, rank_table, together_sentence
from stepscope.trace import Metadata
from tests.unit.hand_built import FULL, HOST, IDLE, INPUT_BOUND, empty, full
from tests.unit.rendered import golden, markdown_report, text_report, text_reports

EMPTY_TEXT = """\
No device was recorded; 0 ns recorded, without steps.

Nothing was found that would save a noticeable part of the recording.
"""


def test_the_empty_diagnosis() -> None:
    assert text_report(empty(), width=100, colour=False, top=5) == EMPTY_TEXT


def test_the_whole_report() -> None:
    text = text_report(full(), width=100, colour=False, top=1)
    assert text == golden("diagnosis.txt", text)


def test_several_ranks_begin_with_a_table_and_show_the_one_that_can_save_most() -> None:
    ranks = [full(), empty(metadata=Metadata(rank=4), step_ns=90, step_source="inferred")]
    best = text_reports(ranks, width=100, colour=False, top=1)
    assert best == golden("ranks.txt", best)
    assert best.endswith(text_report(full(), width=100, colour=False, top=1))
    every = text_reports(ranks, width=100, colour=False, top=1, every=True)
    assert "== rank 3\n" in every
    assert every.endswith(
        "== rank 4\n\n"
        + EMPTY_TEXT.replace("part of the recording", "part of the step").replace(
            "0 ns recorded, without steps", "a step takes 90 ns (1 step, inferred from what repeats)"
        )
    )


def test_a_replayed_saving_carries_no_mark() -> None:
    finding = dataclasses.replace(INPUT_BOUND, saving_from="replayed")
    report = text_report(full(findings=(finding,)), width=100, colour=False, top=1)
    assert "(33.2 %); the idle time with the cause input; confidence high\n" in report


REPLAYED = dataclasses.replace(INPUT_BOUND, saving_from="replayed")


@pytest.mark.parametrize(
    ("findings", "together", "sentence"),
    [
        (2, Together(2, 1, 0.41, 0.63), "All of these together: 41.0 % of the step, not 63.0 %: they overlap."),
        (2, Together(2, 1, 0.41, 0.412), "All of these together: 41.0 % of the step: they add up."),
        (
            3,
            Together(2, 1, 0.41, 0.3),
            "The 2 of them that were replayed, together: 41.0 % of the step, more than their sum of 30.0 %: some only "
            "count once others are gone.",
        ),
    ],
)
def test_what_findings_save_together_stands_below_them(findings: int, together: Together, sentence: str) -> None:
    diagnosis = full(findings=(REPLAYED,) * findings, together=together)
    assert together_sentence(diagnosis) == sentence
    assert f"\n\n{sentence}\n\n2 more findings" in text_report(diagnosis, width=200, colour=False, top=1)
    assert f"\n\n{sentence}\n\n2 more findings" in markdown_report(diagnosis, top=1)


def test_colour_adds_nothing_but_colour_and_lets_no_escape_of_the_trace_through() -> None:
    coloured = text_report(full(), width=100, colour=True, top=1)
    assert "\x1b[1;31m1. The device" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    expected = text_report(full(), width=100, colour=False, top=1)
    assert [line.rstrip() for line in plain.splitlines()] == expected.splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 79, 200])
def test_every_width_keeps_what_matters(width: int) -> None:
    report = " ".join(text_report(full(), width=width, colour=False, top=0).split())
    for words in ("1. The device waits 40.0 ms", "40.0 ms of 120.3 ms per step", "33.2 %", "num_workers=8"):
        assert words in report
    if width >= 60:
        lines = text_report(full(), width=width, colour=False, top=0).splitlines()
        assert max(len(line) for line in lines) <= width


def test_hostile_names_stay_one_line_of_ordinary_characters() -> None:
    name = "a\nb\x1b]0;title\x07\u202e[/red]:bomb:\x9b2J"
    device = dataclasses.replace(FULL["devices"][0], name=name, device=name)
    report = text_report(
        full(
            devices=(device,),
            idle=pl.DataFrame([(name, name, None, 568_000_000, 0.472)], schema=IDLE, orient="row"),
            kernels=pl.DataFrame({name: [name]}),
        ),
        width=300,
        colour=False,
        top=0,
    )
    written = "a\\nb\\x1b]0;title\\x07\\u202e[/red]:bomb:\\x9b2J"
    assert report.count(written) == 7
    assert all(character.isprintable() or character == "\n" for character in report)


def test_the_headline_is_about_the_busiest_device() -> None:
    busy = DeviceSummary("1", None, 1_203_000_000, 1_200_000_000, 3_000_000, 1_200_000_000, 0, 0, 0, 0)
    assert headline(full(devices=(busy, *FULL["devices"]), metadata=Metadata())).startswith(
        "Device 1, the busiest of 2: a step takes 100.0 ms (median of 10, mean 120.3 ms, annotated), busy 99.8 %, idle "
    )
    assert headline(full(devices=(busy,), metadata=Metadata())) == (
        "Device 1: a step takes 100.0 ms (median of 10, mean 120.3 ms, annotated), busy 99.8 %, idle 0.2 %."
    )


def test_without_a_device_the_host_is_reported() -> None:
    report = text_report(
        empty(host=FULL["host"], step_ns=1_000_000_000, step_count=1, step_source="inferred"),
        width=100,
        colour=False,
        top=0,
    )
    assert report.startswith(
        "No device was recorded; a step takes 1.00 s (1 step, inferred from what repeats); computing 60.0 %,\n"
        "and most of the rest: the host was loading data (40.0 %).\n"
    )
    assert "Where the host's time went\n  compute ████████████" in report


def test_without_anything_computed_the_largest_cause_is_most_of_the_time() -> None:
    diagnosis = empty(host=FULL["host"].filter(pl.col("cause") == "input"), step_ns=5)
    assert headline(diagnosis) == (
        "No device was recorded; 5 ns recorded, without steps; "
        "most of the host's time: the host was loading data (40.0 %)."
    )


def test_code_can_be_copied_from_a_narrow_terminal() -> None:
    code = "model = DistributedDataParallel(model, bucket_cap_mb=50, static_graph=True)"
    finding = dataclasses.replace(INPUT_BOUND, remedy=Remedy("Do this.", code))

    assert f"          {code}\n" in text_report(full(findings=(finding,)), width=60, colour=False, top=0)


def test_ranks_without_a_device_have_no_columns_of_one() -> None:
    ranks = [empty(metadata=Metadata(rank=rank), step_ns=rank + 1) for rank in range(2)]

    assert rank_table(ranks).columns == ["rank", "step_ns", "top_finding"]
    assert rank_table([*ranks, full()]).columns[-4:-1] == ["busy_share", "idle_share", "exposed_communication_share"]


UNREADABLE = (Unreadable("/data/rank2.json", "/data/rank2.json is empty"), Unreadable("r\x1b", "r\x1b is no trace."))


def test_files_that_could_not_be_read_stand_below_the_table_of_the_others() -> None:
    ranks = [empty(metadata=Metadata(rank=rank)) for rank in range(2)]
    report = text_reports(ranks, width=100, colour=False, top=1, unreadable=UNREADABLE)
    assert "rank" not in report[report.index("2 files") :].splitlines()[0]
    assert (
        "\n2 files are not in this report\n  - /data/rank2.json is empty.\n  - r\\x1b is no trace.\n\nBelow: rank 0,"
    ) in report


def test_a_file_that_could_not_be_read_stands_below_the_only_other() -> None:
    report = text_reports([full()], width=100, colour=False, top=1, unreadable=UNREADABLE[:1])
    alone = text_report(full(), width=100, colour=False, top=1)
    assert report == f"{alone}\n1 file is not in this report\n  - /data/rank2.json is empty.\n"


def test_a_cause_that_has_its_name_in_brackets_gets_no_second_pair() -> None:
    idle = pl.DataFrame([("0", "dispatch", None, 568_000_000, 0.472)], schema=IDLE, orient="row")
    assert headline(full(idle=idle)).endswith(
        "biggest cause: the host was inside operators, too slow to launch work (launch-bound, 47.2 %)."
    )


def test_without_steps_small_savings_are_shares_of_the_recording() -> None:
    report = text_report(full(step_source="none"), width=100, colour=False, top=1)
    assert "2 more findings save less than 1 % of the recording; --all shows them." in report
    assert "saves  40.0 ms of 120.3 ms recorded (33.2 %)" in report


def test_idle_by_cause_keeps_every_nanosecond() -> None:
    causes = joined_causes(causes_of(FULL["idle"]))
    assert [each.cause for each in causes] == ["input", "python", "2 others"]
    assert sum(each.ns for each in causes) == FULL["idle"]["ns"].sum()
    assert causes_of(pl.DataFrame(schema=HOST)) == ()
