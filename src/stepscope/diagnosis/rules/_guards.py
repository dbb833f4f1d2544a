"""What torch.compile's own words say about why it compiled a function again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stepscope.diagnosis.finding import Remedy
from stepscope.program_facts import CompilationFacts

_SIZE: Final = re.compile(r"tensor '(.{1,200}?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)")
_PROPERTY: Final = re.compile(
    r"tensor '(.{1,200}?)' (dtype|device|stride|requires_grad|dispatch key set|rank|Tensor) ?(?:mismatch|set mismatch)"
)
_EQUAL: Final = re.compile(r"^(?:\d+/\d+: )?(.{1,200}?) (?:==|is) (.{1,60}?)(?:\s{2,}|\n|$)")
_OWN_FILE: Final = re.compile(r"/stepscope/capture/")
_MOST_VALUES: Final = 4


@dataclass(frozen=True, slots=True)
class VaryingGuard:
    """One thing that a function was compiled for again and again.

    Attributes:
        count: compilations that it caused.
        what: what varied, as the end of a sentence after "because".
        remedy: what keeps it from causing compilations.
    """

    function: str
    file: str | None
    line: int | None
    count: int
    what: str
    remedy: Remedy


def varying_guards(compilations: Sequence[CompilationFacts]) -> list[VaryingGuard]:
    """What varied, the most frequent first; compilations of stepscope's own functions and first ones say nothing."""
    found: defaultdict[tuple[str, str | None, int | None, str, str], list[str]] = defaultdict(list)
    for fact in compilations:
        if fact.reason and not (fact.file and _OWN_FILE.search(fact.file)):
            kind, name, values = _read(fact.reason)
            found[fact.function, fact.file, fact.line, kind, name].extend(values)
    guards = [
        VaryingGuard(function, file, line, max(len(values) // 2, 1), _what(kind, name, values), _remedy(kind, name))
        for (function, file, line, kind, name), values in found.items()
    ]
    return sorted(guards, key=lambda guard: -guard.count)


def _read(reason: str) -> tuple[str, str, list[str]]:
    """The kind of guard, what it was about, and two values: the expected, and the actual one or nothing."""
    if size := _SIZE.search(reason):
        return "size", f"{size[1]}, {size[2]}", [size[3], size[4]]
    if other := _PROPERTY.search(reason):
        return "property", f"{other[2]} of {other[1]}", ["", ""]
    if equal := _EQUAL.search(reason):
        return "constant", equal[1].strip(), [equal[2].strip(), ""]
    return "other", reason.splitlines()[0][:120].strip(), ["", ""]


def _what(kind: str, name: str, values: Sequence[str]) -> str:
    seen = list(dict.fromkeys(value for value in values if value))
    listed = ", ".join(seen[:_MOST_VALUES]) + (", ..." if len(seen) > _MOST_VALUES else "")
    if kind == "size":
        tensor, _, dimension = name.rpartition(", ")
        return f"dimension {dimension} of {tensor} varies ({listed})"
    if kind == "constant":
        return f"{name} is a constant of the compiled code and changes ({listed})"
    if kind == "property":
        return f"the {name} changes"
    return f"a guard failed: {name}"


def _remedy(kind: str, name: str) -> Remedy:
    if kind == "size":
        tensor, _, dimension = name.rpartition(", ")
        return Remedy(
            "Say that the dimension varies, or pad it to few sizes.",
            f"torch._dynamo.mark_dynamic({tensor}, {dimension})     # before the compiled call\n"
            "# or pad:\n"
            "from stepscope.remedies import PadCollate\n"
            "loader = DataLoader(dataset, ..., collate_fn=PadCollate(lengths=(64, 128, 256)))",
        )
    if kind == "constant":
        return Remedy(
            "Keep the number in a tensor, so that compiled code reads it instead of being made for it.",
            f"{name} = torch.tensor({name})     # once; then {name}.add_(1) instead of {name} += 1\n"
            "from stepscope.remedies import LoopConstants\n"
            "for value in LoopConstants(values, device=device):     # where it runs through known numbers\n"
            "    ...",
        )
    return Remedy(
        "Give compiled code the same kind of input each time.",
        "# TORCH_LOGS=recompiles names the guard and the line of each compilation",
    )
