"""How DistributedDataParallel reduces gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stepscope.record.apply.flags import Flag, Value
from stepscope.record.apply.patching import Applying

_NONE_MADE: Final = "no DistributedDataParallel was made"
FLAGS: Final = (
    Flag(
        "bucket-mb",
        "reduces gradients in buckets of N MB",
        _NONE_MADE,
        "The first bucket stays small, so that reducing begins early.",
        Value("N", least=1),
    ),
    Flag(
        "gradient-view",
        "keeps gradients in the buckets that are reduced, instead of copying them there and back",
        _NONE_MADE,
        "The program must not replace or detach gradients in place.",
    ),
    Flag(
        "static-graph",
        "tells DistributedDataParallel that every step uses the same parameters in the same order",
        _NONE_MADE,
        "Only where that is so: torch ends the program, or gradients are wrong, where it is not.",
    ),
    Flag(
        "no-find-unused",
        "does not look for parameters without gradients in every step",
        _NONE_MADE,
        "Only where every parameter gets a gradient: torch ends the program in its second step where one does not.",
    ),
)
_ARGUMENTS: Final = {
    "bucket-mb": ("bucket_cap_mb", "reduces gradients in buckets of {value} MB instead of {before}"),
    "gradient-view": ("gradient_as_bucket_view", "keeps gradients in its buckets"),
    "static-graph": ("static_graph", "takes every step's graph for the same"),
    "no-find-unused": ("find_unused_parameters", "does not look for unused parameters"),
}
_DEFAULT_BUCKET_MB: Final = 25
"""What torch takes where nothing is given (documented for DistributedDataParallel)."""


def install(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Have the DistributedDataParallel modules that are made from now on be as the flags say."""
    from torch.nn.parallel import DistributedDataParallel

    def tell(module: Any, name: str, said: dict[str, str]) -> None:
        for flag, sentence in said.items():
            applying.did(flag, f"{name} {sentence}")

    applying.replace_constructor(DistributedDataParallel, chosen, lambda arguments: _change(arguments, chosen), tell)


def _change(arguments: dict[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """Change the arguments in place; returns the end of a sentence for each flag."""
    said = {}
    for flag, value in chosen.items():
        name, sentence = _ARGUMENTS[flag]
        wanted: Any = {"bucket-mb": float(value or 0), "no-find-unused": False}.get(flag, True)
        before = arguments.get(name)
        if flag == "bucket-mb":
            arguments.pop("bucket_cap_mb_list", None)
            before = _DEFAULT_BUCKET_MB if before is None else before
        elif bool(before) == wanted:
            sentence += " as it was made"
        arguments[name] = wanted
        said[flag] = sentence.format(value=value, before=f"{before:g}" if flag == "bucket-mb" else before)
    return said
