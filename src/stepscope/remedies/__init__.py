"""The fixes that findings recommend, ready to import into training code; they need torch and nothing else of stepscope.

    from stepscope.remedies import attention, fuse_optimizer, prefetch_to_device

Importing the package is cheap: a submodule is imported when one of its names is first used. No submodule has the name
of a public function, so importing a submodule never hides one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stepscope.remedies.allocators import allocator_environment as allocator_environment
    from stepscope.remedies.allocators import find_allocator as find_allocator
    from stepscope.remedies.allocators import loaded_allocator as loaded_allocator
    from stepscope.remedies.deferred_scalars import DeferredNumber as DeferredNumber
    from stepscope.remedies.deferred_scalars import DeferredScalars as DeferredScalars
    from stepscope.remedies.deferred_scalars import every as every
    from stepscope.remedies.fused_attention import attention as attention
    from stepscope.remedies.fused_attention import recompute_attention as recompute_attention
    from stepscope.remedies.fused_attention import recompute_attention_enabled as recompute_attention_enabled
    from stepscope.remedies.fused_attention import set_recompute_attention as set_recompute_attention
    from stepscope.remedies.graphs import CapturedStep as CapturedStep
    from stepscope.remedies.graphs import capture_step as capture_step
    from stepscope.remedies.graphs import mark_step as mark_step
    from stepscope.remedies.loading.padding import LengthBucketSampler as LengthBucketSampler
    from stepscope.remedies.loading.padding import PadCollate as PadCollate
    from stepscope.remedies.loading.padding import pad_dimension as pad_dimension
    from stepscope.remedies.loading.padding import pad_to_lengths as pad_to_lengths
    from stepscope.remedies.loading.padding import pad_vocabulary as pad_vocabulary
    from stepscope.remedies.loading.padding import padded_size as padded_size
    from stepscope.remedies.loading.prefetch import prefetch_to_device as prefetch_to_device
    from stepscope.remedies.loading.trials import LoaderChoice as LoaderChoice
    from stepscope.remedies.loading.trials import tune_loader as tune_loader
    from stepscope.remedies.losses import chunked_cross_entropy as chunked_cross_entropy
    from stepscope.remedies.losses import linear_cross_entropy as linear_cross_entropy
    from stepscope.remedies.mixed_precision_loops import MixedPrecision as MixedPrecision
    from stepscope.remedies.mixed_precision_loops import PrecisionDrift as PrecisionDrift
    from stepscope.remedies.mixed_precision_loops import allow_tf32 as allow_tf32
    from stepscope.remedies.mixed_precision_loops import mixed_precision as mixed_precision
    from stepscope.remedies.optimizers.fused import Fusion as Fusion
    from stepscope.remedies.optimizers.fused import fuse_optimizer as fuse_optimizer
    from stepscope.remedies.optimizers.horizontal import HorizontalTrainer as HorizontalTrainer
    from stepscope.remedies.optimizers.vendor import clip_grad_norm as clip_grad_norm
    from stepscope.remedies.rewrites import rewrites_of as rewrites_of
    from stepscope.remedies.rewrites import unified_diff as unified_diff
    from stepscope.remedies.settings import DataParallelSettings as DataParallelSettings
    from stepscope.remedies.settings import ThreadCounts as ThreadCounts
    from stepscope.remedies.settings import collect_garbage_at_steps as collect_garbage_at_steps
    from stepscope.remedies.settings import set_thread_counts as set_thread_counts
    from stepscope.remedies.settings import thread_counts as thread_counts
    from stepscope.remedies.tied_weights import LoopConstants as LoopConstants
    from stepscope.remedies.tied_weights import check_tied as check_tied
    from stepscope.remedies.tied_weights import keeps_ties as keeps_ties
    from stepscope.remedies.tied_weights import tie_again as tie_again
    from stepscope.remedies.tied_weights import tied_parameters as tied_parameters

_PUBLIC: Final = {
    "allocators": "allocator_environment find_allocator loaded_allocator",
    "deferred_scalars": "DeferredNumber DeferredScalars every",
    "fused_attention": "attention recompute_attention recompute_attention_enabled set_recompute_attention",
    "graphs": "CapturedStep capture_step mark_step",
    "settings": "DataParallelSettings ThreadCounts collect_garbage_at_steps set_thread_counts thread_counts",
    "loading.padding": "LengthBucketSampler PadCollate pad_dimension pad_to_lengths pad_vocabulary padded_size",
    "loading.prefetch": "prefetch_to_device",
    "loading.trials": "LoaderChoice tune_loader",
    "losses": "chunked_cross_entropy linear_cross_entropy",
    "mixed_precision_loops": "MixedPrecision PrecisionDrift allow_tf32 mixed_precision",
    "optimizers.fused": "Fusion fuse_optimizer",
    "optimizers.horizontal": "HorizontalTrainer",
    "optimizers.vendor": "clip_grad_norm",
    "rewrites": "rewrites_of unified_diff",
    "tied_weights": "LoopConstants check_tied keeps_ties tie_again tied_parameters",
}
"""Module of this folder -> its public names."""
_HOMES: Final = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
