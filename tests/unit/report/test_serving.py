"""What was served: a section of text and pages, and a key of the JSON report."""

from __future__ import annotations

from stepscope.diagnosis import diagnose
from stepscope.report.places import serving_glance
from stepscope.report.words import exceptional_sentences
from stepscope.trace import Trace
from tests.unit.recording import Recording
from tests.unit.rendered import json_report, text_report

MS = 1_000_000


def served(*marks: tuple[int, str]) -> Trace:
    """Ranges of these milliseconds one after the other, each with half as long a kernel."""
    recording, now = Recording(), 0
    for number, (length, name) in enumerate(marks, start=1):
        recording.annotation(now, length * MS, name)
        recording.launched(now + 1, now + MS // 10, length * MS // 2, "gemm", number)
        now += length * MS
    return recording.trace()


def some() -> Trace:
    return served((6, "capture_8_FULL"), (40, "step[EXTEND bs=4 toks=4000]"), *[(10, "step[DECODE bs=4]")] * 3)


def test_each_phase_has_its_times_and_batch() -> None:
    diagnosis = diagnose(some())
    assert diagnosis.serving is not None
    rows = {label: (value, meaning) for label, value, meaning in serving_glance(diagnosis.serving).rows}

    assert rows["decode"] == (
        "3 iterations",
        "10.0 ms on the host, 5.0 ms of work on the device, 4 requests, 4 tokens, 1 launch (medians)",
    )
    assert rows["prefill"][0] == "1 iteration"
    assert "4,000 tokens" in rows["prefill"][1]
    assert rows["time per token"][0] == "10.0 ms"
    assert rows["first token"][0] == "40.0 ms"
    assert rows["graph capture"][1].endswith("for 8 at once")


def test_batches_that_differ_and_speculation_are_told() -> None:
    diagnosis = diagnose(served(*[(10, f"execute_context_0(0)_generation_{n}({3 * n})") for n in (2, 4, 6)]))
    assert diagnosis.serving is not None
    [(_, _, meaning), *_] = serving_glance(diagnosis.serving).rows
    assert "4 requests (2 to 6), 12 tokens, 3 of each request at once" in meaning


def test_a_recording_of_captures_serves_nothing() -> None:
    diagnosis = diagnose(served((6, "capture_8_FULL"), (6, "capture_16_FULL")))
    assert diagnosis.serving is not None
    assert diagnosis.step_source == "none"
    assert any("serves nothing" in sentence for sentence in exceptional_sentences(diagnosis))
    rows = {label: value for label, value, _ in serving_glance(diagnosis.serving).rows}
    assert rows["served"] == "nothing"


def test_the_json_report_has_the_key_only_of_what_serves() -> None:
    report = json_report(diagnose(some()))["serving"]
    assert report["engine"] == "SGLang"
    assert [(each["phase"], each["count"]) for each in report["phases"]] == [("prefill", 1), ("decode", 3)]
    assert [each["phase"] for each in report["put_aside"]] == ["capture"]
    assert report["captured_sizes"] == [8]
    training = Recording()
    training.step(0, 100, 1)
    training.launched(1, 5, 50, "gemm", 1)
    assert "serving" not in json_report(diagnose(training.trace()))


def test_the_text_has_the_section() -> None:
    diagnosis = diagnose(some())
    assert "What SGLang served" in text_report(diagnosis, width=100, top=5)


def test_a_prompt_that_is_set_apart_is_called_so() -> None:
    marks = [(10, "step[DECODE bs=4]")] * 3 + [(900, "step[EXTEND bs=1 toks=9000]")] + [(10, "step[DECODE bs=5]")] * 9
    diagnosis = diagnose(served(*marks))
    assert (diagnosis.step_count, [each.phase for each in diagnosis.set_apart][-1]) == (9, "prefill")
    [sentence] = [each for each in exceptional_sentences(diagnosis) if "outlier" in each]
    assert sentence.startswith("Step 3, a prefill, is an outlier")
    assert "3 more are left out" in sentence
