"""Will it fit: a device's recorded allocations, replayed through PyTorch's caching allocator with a change.

The allocator's rules and constants are those of c10/cuda/CUDACachingAllocator.cpp and of its HIP twin: requests are
rounded to 512 bytes; those of up to 1 MiB share segments of 2 MiB, larger ones take segments of 20 MiB or of their own
size; the smallest free block that is large enough is cut; where the driver has no memory left, unused segments go back
to it first. With expandable segments each pool is one range of addresses, to which pages are added at its end.

The replay knows one stream: a program that allocates on several needs more. It begins with an empty cache, so segments
that earlier work left behind are not counted. A block of the recording is as large as the allocator made it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Final

import numpy as np
import polars as pl

from stepscope.analysis.blocks import FIXED
from stepscope.analysis.memory import DeviceMemory, alive_at
from stepscope.errors import UsageError

_MIB: Final = 1 << 20
_ROUND: Final = 512
_SMALL: Final = _MIB  # larger requests come from the other pool
_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE_SEGMENT: Final = 20 * _MIB
_OWN_SEGMENT: Final = 10 * _MIB  # from here on a segment has its request's size
_ROUND_SEGMENT: Final = 2 * _MIB
_ENDLESS: Final = 1 << 62  # addresses of an expandable segment


class _Block:
    """A piece of a segment, linked to its neighbours: in use, free, or a hole without memory in an expandable one."""

    __slots__ = ("before", "behind", "is_free", "is_hole", "number", "offset", "pool", "size")

    def __init__(self, pool: _Pool, number: int, offset: int, size: int) -> None:
        self.pool, self.number, self.offset, self.size = pool, number, offset, size
        self.before: _Block | None = None
        self.behind: _Block | None = None
        self.is_free = self.is_hole = False


class _Pool:
    def __init__(self, *, is_small: bool, page: int | None) -> None:
        self.is_small = is_small
        self.page = page  # of expandable segments, else None
        self.free: list[tuple[int, int]] = []  # size and number, in order
        self.blocks: dict[int, _Block] = {}  # the free ones by number
        self.holes: list[_Block] = []

    def add(self, block: _Block) -> None:
        block.is_free = True
        self.blocks[block.number] = block
        insort(self.free, (block.size, block.number))

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.blocks[block.number]
        del self.free[bisect_left(self.free, (block.size, block.number))]

    def best(self, size: int) -> _Block | None:
        place = bisect_left(self.free, (size, 0))
        return self.blocks[self.free[place][1]] if place < len(self.free) else None


class OutOfMemoryError(Exception):
    """The replayed allocator has no memory left for a request."""


class CachingAllocator:
    """PyTorch's allocator of one device.

    Attributes:
        reserved: bytes taken from the driver.
        allocated: bytes in use.
    """

    def __init__(self, limit: int | None = None, *, expandable: bool = False, held: int = 0) -> None:
        """Start with an empty cache.

        Args:
            limit: bytes that the driver has; None for any number.
            expandable: whether segments are expandable.
            held: bytes in use for good.
        """
        pages = (_SMALL_SEGMENT, _LARGE_SEGMENT) if expandable else (None, None)
        self._small, self._large = _Pool(is_small=True, page=pages[0]), _Pool(is_small=False, page=pages[1])
        self._limit = limit
        self._made = 0
        for pool in (self._small, self._large) if expandable else ():
            self._add_hole(self._block(pool, 0, _ENDLESS))
        self.allocated = held
        self.reserved = -(-held // _ROUND_SEGMENT) * _ROUND_SEGMENT

    def allocate(self, size: int) -> _Block:
        """Return a block of at least so many bytes.

        Raises:
            OutOfMemoryError: the limit does not allow it, although all unused segments were given back.
        """
        rounded = max(-(-size // _ROUND) * _ROUND, _ROUND)
        pool = self._small if rounded <= _SMALL else self._large
        block = pool.best(rounded)
        if block is None:
            block = self._expanded(pool, rounded) if pool.page else self._new_segment(pool, rounded)
        pool.remove(block)
        if block.size - rounded >= _ROUND if pool.is_small or pool.page else block.size - rounded > _SMALL:
            pool.add(self._cut(block, rounded))
        self.allocated += block.size
        return block

    def release(self, block: _Block) -> None:
        """Take a block back into the cache."""
        self.allocated -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                block.pool.remove(other)
                self._join(block, other)
        block.pool.add(block)

    def _block(self, pool: _Pool, offset: int, size: int) -> _Block:
        self._made += 1
        return _Block(pool, self._made, offset, size)

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.is_small:
            total = _SMALL_SEGMENT
        else:
            total = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._reserve(total)
        block = self._block(pool, 0, total)
        pool.add(block)
        return block

    def _expanded(self, pool: _Pool, size: int) -> _Block:
        """A free block that is large enough, with memory in the first holes where that is possible."""
        page = pool.page or 1
        walk = next(filter(None, (_room(hole, size) for hole in sorted(pool.holes, key=lambda hole: hole.offset))))
        missing, left = [], size
        for block in walk:
            needed = min(block.size, -(-left // page) * page) if block.is_hole else 0
            missing.append(needed)
            left -= needed or block.size
        self._reserve(sum(missing), walk)
        for block, needed in zip(walk, missing, strict=True):
            if not block.is_hole:
                pool.remove(block)
                continue
            if block.size > needed:
                self._add_hole(self._cut(block, needed))
            block.is_hole = False
            pool.holes.remove(block)
        first, *others = walk
        for block in others:
            self._join(first, block)
        pool.add(first)
        return first

    def _add_hole(self, block: _Block) -> None:
        block.is_hole = True
        block.pool.holes.append(block)

    def _reserve(self, size: int, needed: Sequence[_Block] = ()) -> None:
        """Take bytes from the driver; `needed` are free blocks that must stay."""
        if self._limit is not None and self.reserved + size > self._limit:
            for pool in (self._small, self._large):
                for block in list(pool.blocks.values()):
                    if block not in needed:
                        self._give_back(pool, block)
            if self.reserved + size > self._limit:
                raise OutOfMemoryError
        self.reserved += size

    def _give_back(self, pool: _Pool, block: _Block) -> None:
        """Return a free block to the driver: a whole segment, or the pages in it."""
        if not pool.page:
            if block.before is None and block.behind is None:
                pool.remove(block)
                self.reserved -= block.size
            return
        first, end = -(-block.offset // pool.page) * pool.page, (block.offset + block.size) // pool.page * pool.page
        if first >= end:
            return
        pool.remove(block)
        if block.offset + block.size > end:
            pool.add(self._cut(block, end - block.offset))
        hole = block
        if block.offset < first:
            hole = self._cut(block, first - block.offset)
            pool.add(block)
        self.reserved -= hole.size
        self._add_hole(hole)

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shorten a block, and return the rest of it."""
        rest = self._block(block.pool, block.offset + size, block.size - size)
        block.size = size
        rest.before, rest.behind, block.behind = block, block.behind, rest
        if rest.behind is not None:
            rest.behind.before = rest
        return rest

    def _join(self, block: _Block, other: _Block) -> None:
        """Make `other`, a neighbour, part of `block`."""
        block.size += other.size
        if other.offset < block.offset:
            block.offset, block.before = other.offset, other.before
            if block.before is not None:
                block.before.behind = block
            return
        block.behind = other.behind
        if block.behind is not None:
            block.behind.before = block


def _room(hole: _Block, size: int) -> list[_Block] | None:
    """Blocks in a row from a hole, or the free block before it, that have so many bytes together; None without them."""
    block: _Block | None = hole.before if hole.before is not None and hole.before.is_free else hole
    found: list[_Block] = []
    while block is not None and (block.is_free or block.is_hole):
        found.append(block)
        size -= block.size
        if size <= 0:
            return found
        block = block.behind
    return None


@dataclass(frozen=True)
class Change:
    """What is different in a replay.

    Attributes:
        batch_factor: size of the batch over the recorded one; everything but FIXED grows with it.
        checkpointed: paths of modules whose activations are computed again in the backward pass.
        expandable: whether segments are expandable.
    """

    batch_factor: float = 1.0
    checkpointed: tuple[str, ...] = ()
    expandable: bool = False


FIT_SCHEMA: Final[dict[str, type[pl.DataType] | pl.DataType]] = {
    "batch_factor": pl.Float64,
    "checkpointed": pl.List(pl.String),
    "expandable": pl.Boolean,
    "peak_bytes": pl.Int64,  # most bytes in use at once, up to the failure if there is one
    "reserved_bytes": pl.Int64,  # most bytes taken from the driver
    "fits": pl.Boolean,  # whether every request was met; null without a limit
    "freed_bytes": pl.Int64,  # of activations, over all steps, that checkpointing frees until the backward pass
    "added_per_step_ns": pl.Int64,  # forward time of the checkpointed modules, which is spent twice; null if unknown
    "failed_bytes": pl.Int64,  # the request that was not met, and its place; null if all were
    "file": pl.String,
    "line": pl.Int32,
    "function": pl.String,
    "module": pl.String,
}


def fit_table(
    memory: DeviceMemory, changes: Sequence[Change], limit: int | None, forward_ns: Mapping[str, int]
) -> pl.DataFrame:
    """Replay a device's allocations with each change; columns as in FIT_SCHEMA.

    Args:
        forward_ns: time of a module's forward pass per step, by its path.

    Raises:
        UsageError: no activation of a checkpointed module was recorded.
    """
    rows = []
    for change in changes:
        known = [forward_ns.get(module) for module in change.checkpointed]
        added = None if not known or None in known else sum(each or 0 for each in known)
        rows.append({**fit(memory, change, limit), "added_per_step_ns": added})
    return pl.DataFrame(rows, schema=FIT_SCHEMA)


def fit(memory: DeviceMemory, change: Change, limit: int | None) -> dict[str, Any]:
    """Replay a device's recorded allocations with a change; keys as in FIT_SCHEMA.

    Args:
        memory: with addressed blocks.
        limit: bytes of the device's memory; None for any number.

    Raises:
        UsageError: no activation of a checkpointed module was recorded.
    """
    blocks = _with_batch(memory.blocks, change.batch_factor).select(
        "bytes",
        "category",
        "module",
        source=pl.int_range(pl.len()),
        begin=pl.col("row").cast(pl.Float64).fill_null(-1.0),
        end=pl.col("freed_row").cast(pl.Float64).fill_null(float("inf")),
    )
    freed = 0
    if change.checkpointed:
        blocks, freed = _checkpointed(blocks, change.checkpointed)
    before = int(memory.levels["allocated_bytes"][0]) - _first_change(memory.blocks)
    known = int(memory.blocks.filter(pl.col("row").is_null())["bytes"].sum())
    allocator = CachingAllocator(limit, expandable=change.expandable, held=max(before - known, 0))
    peak, reserved = allocator.allocated, allocator.reserved
    failed: dict[str, Any] = {}
    live: dict[int, _Block] = {}
    for begins, number, size, source in _events(blocks):
        if not begins:
            allocator.release(live.pop(number))
            continue
        try:
            live[number] = allocator.allocate(size)
        except OutOfMemoryError:
            failed = memory.blocks.select("file", "line", "function", "module").row(source, named=True)
            failed["failed_bytes"] = size
            break
        peak, reserved = max(peak, allocator.allocated), max(reserved, allocator.reserved)
    return {
        **vars(change),
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "fits": None if limit is None else not failed,
        "freed_bytes": freed,
        **failed,
    }


def _with_batch(blocks: pl.DataFrame, factor: float) -> pl.DataFrame:
    grown = (pl.col("bytes") * factor).round().cast(pl.Int64).clip(1)
    return (
        blocks
        if factor == 1
        else blocks.with_columns(bytes=pl.when(pl.col("category").is_in(FIXED)).then("bytes").otherwise(grown))
    )


def _first_change(blocks: pl.DataFrame) -> int:
    """Bytes that the first event added."""
    begun = blocks.drop_nulls("row").sort("row").select("row", "bytes").head(1).rows()
    ended = blocks.drop_nulls("freed_row").sort("freed_row").select("freed_row", "bytes").head(1).rows()
    if ended and (not begun or ended[0][0] < begun[0][0]):
        return -int(ended[0][1])
    return int(begun[0][1]) if begun else 0


def _events(blocks: pl.DataFrame) -> Iterator[tuple[bool, int, int, int]]:
    """Requests and releases in order: whether it is a request, the block's number, its bytes and its source."""
    numbered = blocks.with_row_index("number")
    columns = ["number", "bytes", "source"]
    requests = numbered.select(pl.col("begin").alias("at"), pl.lit(True).alias("begins"), *columns)
    releases = numbered.filter(pl.col("end").is_finite()).select(
        pl.col("end").alias("at"), pl.lit(False).alias("begins"), *columns
    )
    ordered = pl.concat([releases, requests]).sort("at", maintain_order=True)  # at once: what ends, then what begins
    return ordered.select("begins", *columns).iter_rows()


def _checkpointed(blocks: pl.DataFrame, modules: Sequence[str]) -> tuple[pl.DataFrame, int]:
    """Blocks with the activations of these modules freed after the forward pass and made again for the backward one.

    Each call's last activation is its result and stays. What the forward pass needs only for a moment, its largest
    block, is needed once more.
    """
    parts: list[pl.DataFrame] = []
    gone: list[int] = []
    freed: list[int] = []
    backward = np.sort(blocks.filter(pl.col("category") == "gradient")["begin"].to_numpy())
    begun, over = (np.searchsorted(backward, blocks[column].to_numpy()) for column in ("begin", "end"))
    blocks = blocks.with_columns(lasts=pl.Series(over > begun))  # alive while a gradient was made
    activation = pl.col("category") == "activation"
    for module in modules:
        inside = (pl.col("module") == module) | pl.col("module").str.starts_with(f"{module}.")
        mine = blocks.filter(inside & pl.col("end").is_finite()).sort("begin")
        passing = mine.filter(~pl.col("lasts") & (activation | (pl.col("category") == "temporary")))
        scratch = max(passing["bytes"].to_list(), default=0)
        for call in _calls(mine.filter(pl.col("lasts") & activation)):
            kept, behind = call[:-1], float(call["begin"][-1]) + 0.5
            again = min(kept["end"].to_list(), default=behind) - 0.5
            if again <= behind:
                continue
            gone += kept["source"].to_list()
            freed.append(int(kept["bytes"].sum()))
            parts.append(kept.with_columns(end=pl.lit(behind)))
            parts.append(kept.with_columns(begin=pl.lit(again)))
            if scratch:
                parts.append(
                    kept[:1].with_columns(
                        bytes=pl.lit(scratch, pl.Int64), begin=pl.lit(again), end=pl.lit(again + 0.25)
                    )
                )
    if not parts:
        others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        raise UsageError(f"nothing to checkpoint in {modules[0]}{others}: {_NO_BACKWARD}")
    rest = blocks.filter(~pl.col("source").is_in(gone))
    return pl.concat([rest, *parts]), sum(freed)


def _calls(activations: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The activations of each call of a module: a new one begins where an earlier activation was freed."""
    first, ends = 0, float("inf")
    for place, (begin, end) in enumerate(activations.select("begin", "end").iter_rows()):
        if begin > ends:
            yield activations[first:place]
            first, ends = place, float("inf")
        ends = min(ends, end)
    if activations.height > first:
        yield activations[first:]


_MOST_SIBLINGS: Final = 512


def candidates(memory: DeviceMemory) -> tuple[tuple[str, ...], ...]:
    """Modules worth checkpointing: the one that holds most activations at the peak, and all modules like it.

    A module that holds more than half of the activations at the peak is not worth it: most would be made again at once.
    """
    if memory.blocks.filter(pl.col("category") == "gradient").is_empty():
        return ()
    alive = alive_at(memory, memory.peak_row).filter(
        (pl.col("category") == "activation") & pl.col("module").is_not_null()
    )
    held: dict[str, int] = {}
    for module, size in alive.group_by("module").agg(pl.col("bytes").sum()).iter_rows():
        for path in accumulate(module.split("."), "{}.{}".format):
            held[path] = held.get(path, 0) + size
    total = sum(size for path, size in held.items() if "." not in path)
    small = {path: size for path, size in held.items() if 2 * size <= total}
    families: dict[str, list[str]] = {}
    for path in small:
        families.setdefault(_NUMBER.sub("", path), []).append(path)
    best = max(families.values(), key=lambda paths: (sum(small[path] for path in paths), -len(paths[0])), default=[])
    if not 1 < len(best) <= _MOST_SIBLINGS:
        return ()
    return (max(best, key=lambda path: (small[path], path)),), tuple(sorted(best, key=_natural))


_NO_BACKWARD: Final = (
    "none of its activations but the result lasts until a backward pass, as in inference, or where it is checkpointed"
)
_NO_MODULES: Final = (
    "the recorded allocations do not show which modules made them: with_stack=True records modules, and so does "
    "stepscope run"
)
_NUMBER: Final = re.compile(r"\d+$")


def _natural(path: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def usual_changes(memory: DeviceMemory) -> list[Change]:
    """Nothing, expandable segments, half and twice the batch, and checkpointing of `candidates`."""
    checkpointed = [Change(checkpointed=modules) for modules in candidates(memory)]
    return [Change(), Change(expandable=True), Change(batch_factor=0.5), Change(batch_factor=2.0), *checkpointed]


def modules_like(memory: DeviceMemory, patterns: Sequence[str]) -> tuple[str, ...]:
    """Outermost modules whose path matches one of these patterns, such as `layers.*`, from its beginning or a dot on.

    Raises:
        UsageError: a pattern matches no module that made an activation.
    """
    paths = {
        path
        for module in memory.blocks.filter(pl.col("category") == "activation")["module"].drop_nulls().unique()
        for path in accumulate(module.split("."), "{}.{}".format)
    }
    found: set[str] = set()
    for pattern in patterns:
        depth = pattern.count(".") + 1
        matching = {path for path in paths if fnmatchcase(".".join(path.split(".")[-depth:]), pattern)}
        if not paths:
            raise UsageError(_NO_MODULES)
        if not matching:
            raise UsageError(f"no module that made an activation matches {pattern!r}: stepscope modules lists them")
        found |= matching
    return tuple(sorted((path for path in found if not _is_inside(path, found)), key=_natural))


def _is_inside(path: str, others: Set[str]) -> bool:
    return any(around in others for around in list(accumulate(path.split("."), "{}.{}".format))[:-1])
