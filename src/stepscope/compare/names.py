"""Names of kernels and operators without what compilers and libraries number: counters, hashes, tuning parameters.

What torch.compile generates is named by its place in the graph, so that one more operation gives all that follow other
numbers; libraries choose among instances of one kernel that differ in a parameter at the end.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

_LONGEST: Final = 2_000
"""Longer names are kept as they are; none that a compiler made is."""
_FEWEST_DIGITS: Final = 4
"""Of a hash among its letters; a word has fewer."""
_COUNTER: Final = re.compile(r"_\d{1,9}(?:_\d[\dcde]{0,200})?$")  # with the kinds of arguments, as Triton 2 had them
_HASH: Final = re.compile(r"(?<![0-9A-Za-z])[0-9a-z]{24,}(?![0-9A-Za-z])")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{6,16}")
_REGION: Final = re.compile(r"^(Torch-Compiled Region: )\d{1,9}/\d{1,9}")
_TENSILE: Final = re.compile(r"^(Cijk_\w{0,200}?_MT\d{1,5}x\d{1,5}x\d{1,5}(?:_MI[\dx]{1,30})?)_\w+")
_CUTLASS_NUMBER: Final = re.compile(r"(?:(?<=_)|(?<=align))\d{1,6}(?!\w)")


def numberless(name: str) -> str:
    """The name with `#` for numbers and hashes that differ from one compilation, or choice of a library, to the next.

    Such as `triton_poi_fused_add_mul_#`, `CompiledFxGraph #`, `Torch-Compiled Region: #`; of a Tensile kernel what is
    computed and its tile, of a CUTLASS kernel all but the alignment.
    """
    if len(name) > _LONGEST:
        return name
    name = _ADDRESS.sub("#", _HASH.sub(_without_hash, name))
    name = _TENSILE.sub(r"\1_#", _REGION.sub(r"\1#", name))
    if "_fused_" in name:
        name = _COUNTER.sub("_#", name)
    return _CUTLASS_NUMBER.sub("#", name) if "cutlass" in name else name


def with_families(before: pl.DataFrame, after: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables with a column `family`: the `numberless` of a `name` that only one of them has, else the name."""
    names = [set(table["name"].to_list()) for table in (before, after)]
    common = names[0] & names[1]
    families = pl.DataFrame(
        [(name, name if name in common else numberless(name)) for name in names[0] | names[1]],
        schema={"name": pl.String, "family": pl.String},
        orient="row",
    )
    left, right = (table.join(families, on="name", how="left", maintain_order="left") for table in (before, after))
    return left, right


def _without_hash(found: re.Match[str]) -> str:
    text = found[0]
    digits = sum(character.isdigit() for character in text)
    return "#" if digits >= _FEWEST_DIGITS and digits < len(text) else text
