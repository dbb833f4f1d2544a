"""Shared by the rules about Python functions: what is said of a kind of work, what to do, and what remains."""

from __future__ import annotations

from typing import Final

from stepscope.diagnosis.finding import Figure, Remedy
from stepscope.diagnosis.lines.function_work import Kind, Work
from stepscope.diagnosis.view import View

_LEFT: Final[dict[Kind, float]] = {"growing": 0.05, "row": 0.05, "lookup": 0.05, "loop": 0.1}
"""Share of the time that the better way still takes; nothing of what need not be computed again."""


def left_of(work: Work) -> float:
    """Share of the work's time that remains after the remedy, 0 to 1."""
    return _LEFT.get(work.kind, 0.0)


def said_of(view: View, work: Work) -> str:
    """What the work is, as the beginning of a sentence."""
    name = work.name or "its result"
    if work.kind == "equal":
        different = "one value" if work.distinct == 1 else f"{work.distinct:,} different values"
        often = f"has {different} in {work.calls:,} calls" if work.calls > 1 else "is the same"
        return f"{name} {often} {view.a_step}, and is computed each time"
    if work.kind == "constant":
        return f"{work.function} computes {name} in each call, although it does not depend on the arguments"
    if work.kind == "growing":
        return f"{work.function} reads a slice of {name} that grows with its loop, from one end in each repetition"
    if work.kind == "row":
        return f"{work.function} takes single rows from the table {name}"
    if work.kind == "lookup":
        length = f"its {work.length:,} entries" if work.length else "its entries"
        return f"{work.function} searches the list {name}, {length} one after another"
    return f"{work.function} goes through elements in a Python loop"


def figures_of(work: Work) -> list[Figure]:
    """The evidence for the kind of work."""
    known = {
        "entries of the list": work.length,
        "values in a step": work.calls,
        "different ones among them": work.distinct,
    }
    found = [Figure(name, value, "count") for name, value in known.items() if value]
    if work.runs is not None:
        found.append(Figure("times that a step comes to the costliest line", work.runs, "count"))
    return found


def remedy_of(work: Work, *, is_collate: bool = False, hides: str = "") -> Remedy:
    """What to change.

    Args:
        is_collate: whether the function puts samples together into a batch.
        hides: a sentence about what else helps.
    """
    name = work.name.rpartition(".")[2] or "table"
    variable = name if name.isidentifier() else "result"
    if work.kind in ("equal", "constant"):
        what = f"{work.name or 'the result'}"
        text = f"Compute {what} once, before the first sample, and keep it: in the constructor, or at module level."
        code = (
            f"self.{variable} = compute(...)            # once, in __init__\n"
            f"use(self.{variable})                      # in {work.function}, instead of computing it there"
        )
    elif work.kind == "growing":
        over = work.name or "the positions"
        text = f"Carry a running result through the loop over {over}: one pass then does, not one for each position."
        code = (
            "running = 0.0\n"
            f"for value in {variable}:              # or reversed({variable}), numpy.cumsum, torch.cumsum\n"
            "    running = update(running, value)      # instead of reading the slice again"
        )
    elif work.kind == "row":
        text = f"Turn {work.name or 'the table'} into arrays or tensors once, and index those."
        code = (
            f"self.values = torch.tensor({work.name or 'table'}[columns].to_numpy())      # once, in __init__\n"
            "return self.values[index]                                   # for each sample"
        )
    elif work.kind == "lookup":
        text = f"Make a dictionary from {work.name or 'the list'} once: it finds an entry at once."
        code = (
            f"position = {{entry: number for number, entry in enumerate({work.name or 'entries'})}}      # once\n"
            "number = position.get(value, 0)                              # instead of `in` and .index()"
        )
    else:
        text, code = _without_loop(work, is_collate)
    return Remedy(text + hides, code)


def _without_loop(work: Work, is_collate: bool) -> tuple[str, str]:
    if is_collate:
        return (
            f"Let {work.function} pad or stack whole samples instead of going through their elements.",
            "torch.nn.utils.rnn.pad_sequence([torch.as_tensor(sample) for sample in samples], batch_first=True)\n"
            "torch.stack(samples)                      # where all have one length",
        )
    return (
        f"Let {work.function} compute on whole arrays or tensors instead of element by element; where that cannot be, "
        "do it once for each sample before training, and keep the results.",
        "result = numpy.where(values > limit, a, b)        # instead of a loop with an if over values\n"
        "samples = [prepare(sample) for sample in dataset]  # or once, before training",
    )
