"""The folders in which compilers cache what they compiled: how large they are, and keeping them below a limit.

    from stepscope.remedies.compile_caches import find_caches, evict, evict_in_background

    evict(find_caches()[0], limit_bytes=10 * 2**30)
    with evict_in_background(10 * 2**30):      # beside the training: looks after each write
        train()

Knows the caches of torch.compile (Inductor), Triton, XLA (JAX and PyTorch/XLA) and the recipes of Intel Gaudi, and
needs none of them installed, nor torch. An evicted entry is compiled again when it is needed; nothing else is lost.
"""

from __future__ import annotations

from stepscope.remedies.compile_caches.entries import CompileCache, Entry, entries_of, find_caches, hit_counts
from stepscope.remedies.compile_caches.eviction import (
    BackgroundEviction,
    Eviction,
    EvictionBusy,
    evict,
    evict_in_background,
)

__all__ = [
    "BackgroundEviction",
    "CompileCache",
    "Entry",
    "Eviction",
    "EvictionBusy",
    "entries_of",
    "evict",
    "evict_in_background",
    "find_caches",
    "hit_counts",
]
