"""# What it finds
Batches of sequences that are mostly padding.

# Why it costs time
A batch is a rectangle: every row is as long as the longest. The padding of short rows is multiplied, normalised and
attended to like everything else, and a mask discards it in the end.

# How it is measured
While recording, stepscope looks at the integer tensors of the batches that loaders return, or without loaders at those
with which the model is called: how many positions are padding, and how many would remain if the same rows were batched
by length. Tensors whose rows are of another length than those that embeddings look up do not count. The time of
operators whose inputs are as large as the batch is reduced accordingly: linearly for work that grows with the number of
positions, quadratically for operators on matrices of positions by positions.

# Known false positives
Numbers that legitimately repeat at the end of rows. Rows sorted by length are less random: shuffle the batches among
each other.

# What to do
Make batches of rows of similar length (`group_by_length=True` in Transformers, a batch sampler by length), pad to the
longest row of the batch instead of a fixed maximum, or concatenate rows without padding (nested tensors, packing).

# Reference
Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021): half of a BERT batch is padding.
"""

from __future__ import annotations

import json
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.patterns import NUMBER_BYTES
from stepscope.analysis.work import elements, shapes_of, types_of
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View
from stepscope.trace.program_facts import PaddingFacts
from stepscope.whatif.changes import scaled_work_of, together

_LOOKUPS: Final = ("aten::embedding", "aten::embedding_bag")
_SHORTEST: Final = 8
"""Fewest positions of a row that is a sequence; a decoding step has one."""


def check(view: View, limits: Limits) -> Answers:
    padded = [facts for facts in view.program.padding if facts.padding_share and facts.longest]
    if not padded:
        return
    lengths = _lengths(view)
    padded = [facts for facts in padded if not lengths or _is_one_of(facts.longest or 0, lengths)]
    if not padded:
        return
    facts = max(padded, key=lambda each: (each.padding_share or 0.0) * each.positions)
    share = facts.padding_share or 0.0
    least = limits["padding"]
    left = min(facts.sorted_padding_share or 0.0, share)
    if share < least or facts.batches < 1:
        return
    kept = (1 - share) / max(1 - left, share * 0.01)
    once, twice = growing_with_positions(view)
    everything = np.concatenate([once, twice])
    squared = view.cost_ns(twice)
    saved = (view.cost_ns(everything) - squared) * (1 - kept) + squared * (1 - kept * kept)
    rows = view.outermost(np.unique(everything))
    yield Found(
        f"{share:.0%} of the positions in the batches are padding; batched by length it would be {left:.0%}",
        saved,
        basis="the operators that grow with the batch's positions, by what is left of them if the sampled rows are put "
        "in batches by length",
        confidence="medium" if facts.batches > 1 else "low",
        share_at=2,
        figures=[
            Figure("share of the batches' positions that is padding", share, "share", least),
            Figure("share that would be padding in batches by length", left, "share"),
            Figure("length of the longest row", facts.longest or 0, "count"),
            Figure("batches that were looked at", facts.batches, "count"),
        ],
        remedy=_remedy(facts) if view.trains else _remedy_of_inference(facts.longest),
        where=view.at_operators(rows),
        change=_shorter_rows(view, once, twice, kept),
    )


def _shorter_rows(view: View, once: Rows, twice: Rows, kept: float) -> Change:
    """Scale work by the share of positions kept, and work that grows with their square by its square."""
    if view.device is not None:
        return scaled_work_of(np.concatenate([once, twice]), np.repeat([kept, kept * kept], [len(once), len(twice)]))
    alone = once[~view.inside(twice)[once]]
    within = view.inside(alone)[twice]
    # Inside operators that are scaled already, only the second factor of the square remains.
    return together(
        scaled_work_of(alone, kept), scaled_work_of(twice[within], kept), scaled_work_of(twice[~within], kept * kept)
    )


def _lengths(view: View) -> set[int]:
    """Row lengths of batches of indices that embeddings look up."""
    lookups = view.operators.filter(pl.col("name").is_in(_LOOKUPS))["input_shapes"].unique()
    shapes = [shapes_of(text) for text in lookups]
    return {shape[1][1] for shape in shapes if len(shape) > 1 and len(shape[1]) == 2 and shape[1][1] >= _SHORTEST}


def _is_one_of(length: int, lengths: set[int]) -> bool:
    """Whether rows of this length are looked up, or one shorter, as inputs are than what is loaded."""
    return any(length - 1 <= each <= length for each in lengths)


def growing_with_positions(view: View) -> tuple[Rows, Rows]:
    """Rows of operators that grow with the positions, and of those that grow with their square.

    A step's positions are the shape of its largest embedding lookup, or else of its largest integer input.
    """
    once: list[int] = []
    twice: list[int] = []
    batch, length = 0, 0
    columns = view.operators.select("row", "name", "input_shapes", "input_types")
    for row, name, text, types in columns.iter_rows():
        shapes = shapes_of(text)
        if name in _LOOKUPS and len(shapes) > 1 and len(shapes[1]) == 2:
            batch, length = shapes[1]
        if (
            length < _SHORTEST
            or "_foreach" in name
            or "_fused" in name
            or not (set(types_of(types)) & set(NUMBER_BYTES))
        ):
            continue
        sizes = [shape for shape in shapes if shape]
        if any(shape[-2:] == (length, length) for shape in sizes if len(shape) >= 3):
            twice.append(row)
        elif any(batch * length in (elements(shape[:-1]), shape[-1]) or shape[:2] == (batch, length)
                 or elements(shape) % (batch * length) == 0 for shape in sizes):  # fmt: skip
            once.append(row)
    return np.array(once, np.int64), np.array(twice, np.int64)


def _remedy(facts: PaddingFacts) -> Remedy:
    field = f"[{facts.name}]" if facts.name.isdecimal() else f"[{json.dumps(facts.name)}]" if facts.name else ""
    return Remedy(
        f"Put rows of about equal length into one batch, and pad only to the longest of them, not to {facts.longest}.",
        f"lengths = [len(sample{field}) for sample in dataset]\n"
        "order = sorted(range(len(dataset)), key=lengths.__getitem__)\n"
        "batches = [order[begin:begin + batch_size] for begin in range(0, len(order), batch_size)]\n"
        "random.shuffle(batches)\n"
        "loader = DataLoader(dataset, batch_sampler=batches, collate_fn=pad_to_longest)\n"
        "# or, in another order each epoch, and padded to few shapes:\n"
        "from stepscope.remedies import LengthBucketSampler, PadCollate\n"
        "sampler = LengthBucketSampler(lengths, batch_size)\n"
        "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PadCollate(multiple=8))",
    )


def _remedy_of_inference(longest: int | None) -> Remedy:
    return Remedy(
        f"Put prompts of about equal length into one batch, and pad only to the longest of them, not to {longest}. An "
        "engine with continuous batching pads none.",
        "order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))\n"
        "for begin in range(0, len(order), batch_size):\n"
        "    chosen = [prompts[index] for index in order[begin:begin + batch_size]]\n"
        '    batch = tokenizer.pad({"input_ids": chosen}, return_tensors="pt")     # padding_side="left" to generate\n'
        "# Transformers, without padding: model.generate_batch(prompts, generation_config=config)",
    )


RULE: Final = Rule(
    id="padding-waste",
    title="Batches are mostly padding",
    thresholds={
        "padding": Threshold(0.2, "share", "share of the batches' positions that is padding"),
        "share": Threshold(0.05, "share", "share of the {period} that less padding would save"),
    },
    check=check,
    needs=("operators", "shapes", "types"),
)
