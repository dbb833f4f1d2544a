"""Remedies for optimizer steps, and for how gradients are cleared, clipped and reduced."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from stepscope import guard
from stepscope.record.apply.flags import Flag, Value
from stepscope.record.apply.patching import Applying, in_a_line, made_here, users_place

OPTIMIZER_FLAGS: Final = (
    Flag(
        "fuse-optimizer",
        "has each optimizer update all parameters in one kernel, or in few",
        "no optimizer stepped",
        "Optimizers that torch can fuse: Adam, AdamW, SGD and others. The update is the same up to rounding.",
    ),
    Flag(
        "clip-in-one-pass",
        "has clip_grad_norm_ measure and scale all gradients in one pass, without waiting for the device",
        "torch.nn.utils.clip_grad_norm_ was not called",
        "Not where the program asks for error_if_nonfinite, or where gradients are distributed tensors.",
    ),
    Flag(
        "zero-grad",
        "has zero_grad drop the gradients instead of filling them with zeros",
        "no zero_grad was called",
        "Only where the program asks for set_to_none=False. It must not read gradients before backward.",
    ),
)


def install_optimizers(applying: Applying, chosen: Mapping[str, str]) -> None:
    if "fuse-optimizer" in chosen:
        with applying.guarded("fuse-optimizer"):
            _Fusing(applying).install()
    if "clip-in-one-pass" in chosen:
        with applying.guarded("clip-in-one-pass"):
            _clip_in_one_pass(applying)
    if "zero-grad" in chosen:
        with applying.guarded("zero-grad"):
            _drop_gradients(applying)


class _Fusing:
    """Fuses each optimizer at its first step, when its parameters are on their device."""

    def __init__(self, applying: Applying) -> None:
        self._applying = applying
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

        self._applying.wrap(Optimizer, "__init__", self._made)
        self._applying.on_remove(partial(guard.unhook, register_optimizer_step_pre_hook(self._steps)))

    def _made(self, original: Any, optimizer: Any, *positional: Any, **named: Any) -> None:
        original(optimizer, *positional, **named)
        self._names[optimizer] = made_here(type(optimizer).__name__)

    @guard.entry
    def _steps(self, optimizer: Any, positional: Any, named: Any) -> None:
        if optimizer in self._done:
            return
        self._done.add(optimizer)
        name = self._names.get(optimizer) or type(optimizer).__name__
        with guard.attempt() as fusing:
            self._fuse(optimizer, name)
        if fusing.error is not None:
            self._applying.could_not("fuse-optimizer", f"{name}: {in_a_line(fusing.error)}")

    def _fuse(self, optimizer: Any, name: str) -> None:
        from stepscope.remedies import fuse_optimizer

        if all(group.get("fused") for group in optimizer.param_groups):
            self._applying.did("fuse-optimizer", f"{name} runs fused as it was made")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # their message is replaced by the run's own wording
            fused: Any = fuse_optimizer(optimizer)
        if fused is not optimizer:  # a vendor's optimizer with the same groups and state
            optimizer.step = fused.step
        made, reasons = fused.fusion.implementation, "; ".join(fused.fusion.reasons)
        if made in ("unchanged", "mixed"):
            self._applying.could_not("fuse-optimizer", f"{name}: {reasons}")
        elif made == "foreach":
            self._applying.did("fuse-optimizer", f"{name} now updates lists of tensors at once, not fused: {reasons}")
        else:
            self._applying.did("fuse-optimizer", f"{name} now runs {made}")


def _clip_in_one_pass(applying: Applying) -> None:
    import torch

    from stepscope.remedies import clip_grad_norm

    flag = "clip-in-one-pass"

    def clipped(
        original: Any,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *positional: Any,
        **named: Any,
    ) -> Any:
        place = users_place() or "an unknown place"
        parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
        every = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        why = "it asks for error_if_nonfinite" if error_if_nonfinite else ""
        if any(type(each.grad) is not torch.Tensor for each in every if each.grad is not None):
            why = "gradients are not plain tensors"
        if not why:
            try:
                norm = clip_grad_norm(parameters, max_norm, norm_type)
            except (ValueError, TypeError) as error:  # checked before anything is changed
                why = in_a_line(error)
            else:
                applying.did(flag, f"gradients are clipped in one pass at {place}")
                return norm
        applying.could_not(flag, f"clip_grad_norm_ at {place}: {why}")
        return original(parameters, max_norm, norm_type, error_if_nonfinite, *positional, **named)

    for module in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
        applying.wrap(sys.modules[module], "clip_grad_norm_", clipped)


def _drop_gradients(applying: Applying) -> None:
    """Make zero_grad of optimizers and modules set gradients to None, whatever its argument."""
    import torch

    def cleared(original: Any, owner: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            applying.could_not("zero-grad", "gradients are set to None already")
        else:
            applying.did("zero-grad", f"zero_grad at {users_place() or 'an unknown place'} now sets gradients to None")
        original(owner, set_to_none=True)

    for owner in (torch.optim.Optimizer, torch.nn.Module):
        applying.wrap(owner, "zero_grad", cleared)


_NO_DATA_PARALLEL: Final = "no DistributedDataParallel was made"
DATA_PARALLEL_FLAGS: Final = (
    Flag(
        "bucket-mb",
        "reduces gradients in buckets of N MB",
        _NO_DATA_PARALLEL,
        "The first bucket stays small, so that reducing begins early.",
        Value("N", least=1),
    ),
    Flag(
        "gradient-view",
        "keeps gradients in the buckets that are reduced, instead of copying them there and back",
        _NO_DATA_PARALLEL,
        "The program must not replace or detach gradients in place.",
    ),
    Flag(
        "static-graph",
        "tells DistributedDataParallel that every step uses the same parameters in the same order",
        _NO_DATA_PARALLEL,
        "Only where that is so: torch ends the program, or gradients are wrong, where it is not.",
    ),
    Flag(
        "no-find-unused",
        "does not look for parameters without gradients in every step",
        _NO_DATA_PARALLEL,
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
"""Torch's default (documented for DistributedDataParallel)."""


def install_data_parallel(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Apply the flags to every DistributedDataParallel module made from now on."""
    from torch.nn.parallel import DistributedDataParallel

    def tell(module: Any, name: str, said: dict[str, str]) -> None:
        for flag, sentence in said.items():
            applying.did(flag, f"{name} {sentence}")

    applying.replace_constructor(DistributedDataParallel, chosen, lambda arguments: _change(arguments, chosen), tell)


def _change(arguments: dict[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """Change the arguments in place; return the end of a sentence for each flag."""
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
