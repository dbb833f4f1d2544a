"""large-logits: scores of many classes, or embedding tables, are processed whole."""

from __future__ import annotations

from stepscope.diagnosis.rules.large_logits import RULE as rule
from stepscope.trace import Trace
from stepscope.trace.program_facts import PaddingFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.shaped import Shaped

TABLE = (40_000, 32)


def scoring(
    classes: int = 4000,
    *,
    wide: bool = False,
    ignored: float | None = None,
    positions: int = 64,
    faults: int | None = None,
) -> Trace:
    """A linear layer of 4,000 ns and a loss of 3,000 with their gradients, in a step of 100,000 ns.

    Clearing a tensor as large as the scores takes the loss 1,000 ns.

    Args:
        faults: pages that a step maps before the recording.
    """
    samples = PaddingFacts(name="labels", batches=2, positions=2 * positions, ignored_share=ignored)
    facts = ProgramFacts(
        padding=(samples,) if ignored is not None else (),
        process={} if faults is None else {"warm_up_ns": 100_000, "warm_up_faults": faults},
    )
    step = Shaped(facts=facts)
    scores = (64, classes)
    with step.inside("aten::linear", 4_000, (64, 32), (classes, 32), number=1):
        step.call("aten::mm", 3_900, (64, 32), (32, classes), number=2)
    if wide:
        with step.inside("aten::to", 2_000, scores, number=3):
            step.call("aten::copy_", 1_900, scores, scores, types=["double", "float"])
    with step.inside("aten::cross_entropy_loss", 3_000, scores, (64,), number=4):
        step.call("aten::_log_softmax", 2_500, scores, number=5)
    with step.inside("autograd::engine::evaluate_function: NllLossBackward0", 1_200, number=4, backward=True):
        step.call("aten::zero_", 1_000, scores)
    step.gradient("LogSoftmaxBackward0", 3_000, 5)
    if wide:
        step.gradient("ToCopyBackward0", 1_500, 3)
    step.gradient("MmBackward0", 8_000, 2)
    return step.trace()


def looking_up(rows: int = 40_000, indices: int = 400, *, cleared: bool = True, tied: bool = False) -> Trace:
    """A lookup whose gradient of 2,000 ns is a whole table, which the optimizer goes through in 5,000."""
    step = Shaped()
    table = (rows, 32)
    step.call("aten::embedding", 100, table, (indices,), types=["float", "long int"], number=1)
    if tied:
        step.call("aten::linear", 100, (8, 32), table, number=2)
    with step.inside("autograd::engine::evaluate_function: EmbeddingBackward0", 2_000, number=1, backward=True):
        if cleared:
            step.call("aten::zero_", 900, table)
    step.call("aten::add_", 5_000, table, table)
    return step.trace()


def answering(positions: int = 64, kept: int = 2) -> Trace:
    """A linear layer of 40,000 ns for 2 rows, of whose scores the next operator takes some, in 100,000 ns."""
    step = Shaped()
    with step.inside("aten::linear", 40_000, (2, positions, 32), (4000, 32)):
        step.call("aten::matmul", 39_000, (2, positions, 32), (32, 4000))
    step.call("aten::slice", 10, (2, positions, 4000))
    step.call("aten::argmax", 1_000, (2, kept // 2, 4000))
    return step.trace()


FIRES: Cases = {
    "a loss over many classes": scoring,
    "converted": lambda: scoring(wide=True),
    "a table with a dense gradient": looking_up,
}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "few classes": lambda: scoring(1000),
    "steps that are not recorded map no memory": lambda: scoring(faults=0),
    "a sparse gradient": lambda: looking_up(cleared=False),
    "a small table": lambda: looking_up(rows=4000, indices=40),
    "most rows are read": lambda: looking_up(indices=39_000),
    "tied to the output": lambda: looking_up(tied=True),
    "all scores are used": lambda: answering(kept=128),
    "only the last position is computed": lambda: answering(positions=1),
}


def test_tensors_as_large_as_the_scores_are_saved() -> None:
    finding = the_finding(rule, scoring())

    # Scores, their logarithms and the gradients of both, each fresh memory of 1,000 ns.
    assert finding.saving_ns_per_step == 4 * 1_000
    assert finding.title == "the loss handles 64 by 4,000 scores at once: 19% of the step"
    assert figures_of(finding) == [
        ("share of the step that processing them in parts would save", 0.04, "share", 0.03),
        ("classes", 4000, "count", 2000),
        ("positions", 64, "count", None),
        ("bytes of the scores", 4 * 64 * 4000, "bytes", None),
        ("share of the step in making the scores and the loss", 0.192, "share", None),
        ("share of it in the loss and conversions", (3_000 + 1_200 + 3_000) / 19_200, "share", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert ".split(128)" in finding.remedy.code


def test_only_tensors_whose_memory_is_new_in_each_step_are_saved() -> None:
    pages_of_scores = 4 * 64 * 4000 // 4096
    saved = {
        tensors: the_finding(rule, scoring(faults=tensors * pages_of_scores), share=0.02).saving_ns_per_step
        for tensors in (3, 9)
    }

    assert saved == {3: 3_000, 9: 4_000}


def test_conversions_go_with_them() -> None:
    assert the_finding(rule, scoring(wide=True)).saving_ns_per_step == 2_000 + 4 * 1_000


def test_positions_that_the_loss_ignores_are_saved_with_their_scores() -> None:
    finding = the_finding(rule, scoring(ignored=0.75))

    assert finding.saving_ns_per_step == 0.75 * 19_200 + 0.25 * 4_000
    assert "75% of which do not count" in finding.title
    assert "features[counted]" in finding.remedy.code


def test_targets_of_other_positions_say_nothing() -> None:
    assert the_finding(rule, scoring(ignored=0.75, positions=640)).saving_ns_per_step == 4 * 1_000


def test_rows_that_are_not_read_are_saved() -> None:
    finding = the_finding(rule, looking_up())

    assert finding.saving_ns_per_step == (2_000 + 5_000) * 0.98
    assert finding.title == (
        "a batch reads 1.0% of a table's 40,000 rows, but its gradient and the optimizer go through all: 7% of the step"
    )
    assert figures_of(finding)[1:4] == [
        ("rows of the table", 40_000, "count", 5000),
        ("share of its rows that a batch reads at most", 0.01, "share", 0.25),
        ("bytes of its gradient", 4 * 40_000 * 32, "bytes", None),
    ]
    assert "sparse=True" in finding.remedy.code


def test_the_thresholds_decide() -> None:
    assert asked(rule, scoring(), share=0.041).findings == ()
    assert asked(rule, scoring(), classes=5000).findings == ()
    assert asked(rule, looking_up(), rows=50_000).findings == ()
    assert asked(rule, looking_up(), read=0.005).findings == ()


def test_scores_that_an_answer_does_not_use_are_saved() -> None:
    finding = the_finding(rule, answering())

    assert finding.saving_ns_per_step == int(40_000 * (1 - 2 / 128))
    assert finding.title.startswith("the scores of 128 positions by 4,000 classes are computed, of which 2 are used")
    assert "logits_to_keep" in finding.remedy.code
