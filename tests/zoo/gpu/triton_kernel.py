"""A Triton kernel; imported where Triton is installed, which looks for `tl` among a module's names."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def doubled(source, target, count, each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads them
    """Each program writes twice the numbers of its part, BLOCK at a time."""
    first = tl.program_id(0) * each
    for begin in range(0, each, BLOCK):
        inside = begin + tl.arange(0, BLOCK)
        places = first + inside
        kept = (inside < each) & (places < count)
        tl.store(target + places, tl.load(source + places, mask=kept) * 2.0, mask=kept)
