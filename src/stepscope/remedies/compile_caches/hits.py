"""How often this process found what it needed in its compile caches, as torch itself counts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

_COUNTERS: Final = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))


def hit_counts() -> dict[str, tuple[int, int]]:
    """Hits and misses so far, by cache: "fxgraph_cache" (Inductor's graphs) and "autograd_cache" (both passes).

    Empty where torch.compile was not used. Where the second hits, the first one is not asked. Imports nothing.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if not isinstance(counters, Mapping):
        return {}
    found = {}
    for group, name in _COUNTERS:
        counts = counters.get(group) or {}
        hits, misses = int(counts.get(f"{name}_hit", 0)), int(counts.get(f"{name}_miss", 0))
        if hits or misses:
            found[name] = (hits, misses)
    return found
