"""padding-waste: batches are mostly padding."""

from __future__ import annotations

import random

import pytest

from stepscope.diagnosis.rules.padding_waste import RULE as rule
from stepscope.diagnosis.rules.padding_waste import _remedy
from stepscope.remedies import PadCollate
from stepscope.trace import Trace
from stepscope.trace.program_facts import PaddingFacts, ProgramFacts
from tests.unit.diagnosis.rules.cases import Cases, asked, busy_device, empty_trace, figures_of, places_of, the_finding
from tests.unit.shaped import Shaped


def padded(share: float | None = 0.75, left: float = 0.0, *, linear_ns: int = 20_000, scores_ns: int = 0) -> Trace:
    """Batches of 4 rows of 32 positions in a step of 100,000 ns."""
    facts = PaddingFacts(
        name="tokens", batches=8, positions=8 * 128, padding_share=share, sorted_padding_share=left, longest=32
    )
    step = Shaped(facts=ProgramFacts(padding=(facts,)) if share is not None else None)
    step.call("aten::embedding", 100, (1000, 16), (4, 32), types=["float", "long int"], number=1)
    step.call("aten::linear", linear_ns, (4, 32, 16), (16, 16))
    if scores_ns:
        step.call("aten::softmax", scores_ns, (4, 2, 32, 32))
    step.call("aten::_fused_adam_", 10_000, (1000, 16))
    return step.trace()


FIRES: Cases = {"three quarters": padded, "a quarter is left": lambda: padded(0.75, 0.25)}
SILENT: Cases = {
    "empty": empty_trace,
    "nothing is wrong": busy_device,
    "little padding": lambda: padded(0.1),
    "no better by length": lambda: padded(0.75, 0.75),
    "nothing is known": lambda: padded(None),
    "little grows with it": lambda: padded(linear_ns=2_000),
}


def test_what_grows_with_the_positions_shrinks_with_them() -> None:
    finding = the_finding(rule, padded())

    assert finding.saving_ns_per_step == (20_000 + 100) * 0.75
    assert finding.title == "75% of the positions in the batches are padding; batched by length it would be 0%"
    assert figures_of(finding) == [
        ("share of the batches' positions that is padding", 0.75, "share", 0.2),
        ("share that would be padding in batches by length", 0.0, "share", None),
        ("share of the step that less padding would save", 0.15075, "share", 0.05),
        ("length of the longest row", 32, "count", None),
        ("batches that were looked at", 8, "count", None),
    ]
    assert places_of(finding) == [("train.py", 20, "step")]
    assert "batch_sampler=batches" in finding.remedy.code


def test_positions_by_positions_shrink_twice() -> None:
    both = the_finding(rule, padded(scores_ns=10_000)).saving_ns_per_step

    assert both == (20_000 + 100) * 0.75 + 10_000 * (1 - 0.25**2)


def test_padding_that_stays_is_taken_off() -> None:
    assert the_finding(rule, padded(0.75, 0.5)).saving_ns_per_step == (20_000 + 100) * 0.5


def test_the_thresholds_decide() -> None:
    assert asked(rule, padded(), padding=0.76).findings == ()
    assert asked(rule, padded(), share=0.16).findings == ()
    assert len(asked(rule, padded(0.1), padding=0.1, share=0.01).findings) == 1


@pytest.mark.parametrize("name", ["input_ids", "0", ""], ids=["mappings", "tuples", "sequences"])
def test_the_snippet_works_for_datasets_of(name: str) -> None:
    torch = pytest.importorskip("torch")
    rows = [torch.arange(length) for length in (3, 9, 4, 8)]
    dataset = [{name: row, "labels": row} for row in rows] if name == "input_ids" else [(row, row) for row in rows]
    code = _remedy(PaddingFacts(name=name, longest=9)).code

    space = {
        "dataset": dataset if name else rows, "batch_size": 2, "random": random, "pad_to_longest": PadCollate(),
        "DataLoader": torch.utils.data.DataLoader,
    }  # fmt: skip
    exec(code, space)

    assert space["lengths"] == [3, 9, 4, 8]
    assert sorted(map(sorted, space["batches"])) == [[0, 2], [1, 3]]
    padded = [batch[name] if name == "input_ids" else batch[0] if name else batch for batch in space["loader"]]
    assert sorted(batch.shape[1] for batch in padded) == [8, 16]
