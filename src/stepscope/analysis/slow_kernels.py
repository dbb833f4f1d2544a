"""Why a kernel stays below its device's limits, from its operator's shapes, its name and its launch's own figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from stepscope.analysis.work import LARGEST, Call, Shape, broadcast, call_of
from stepscope.analysis.work_formulas import CONVOLUTIONS, expert_sizes
from stepscope.machine.devices import DevicePeaks
from stepscope.machine.occupancy import REGISTERS, SHARED_UNIT, WARP, blocks_by_limit, multiprocessor_of, product_of
from stepscope.trace import Trace


class Reason(NamedTuple):
    """Why a kernel stays below its limit, and the shape or option that does better.

    Attributes:
        numbers: every number in the two sentences by its name; "share of" and "shared memory" (bytes) begin the names
            of those that are no counts.
    """

    code: str
    why: str
    better: str
    numbers: Mapping[str, float] = MappingProxyType({})


class _Kernel(NamedTuple):
    name: str  # operator without "aten::"
    call: Call
    row: dict[str, Any]
    blocks: int  # thread blocks, -1 if unknown
    tile: tuple[int, int] | None  # rows and columns of the result that a block computes
    peaks: DevicePeaks
    faster: float  # 16-bit peak over FP32's; 1 if unknown

    @property
    def processors(self) -> int | None:
        return self.peaks.multiprocessors

    @property
    def is_wide(self) -> bool:
        return bool(self.row["number_type"] == "fp32")


def reasons(trace: Trace, row: dict[str, Any], peaks: DevicePeaks) -> tuple[Reason, ...]:
    """Why the kernels of an operator stay below their limit, the most telling first; at least one.

    Args:
        row: columns row, operator, work_kind, number_type, limit, kernel, flops, bytes and the launch's own figures,
            as in `roofline_calls`.
    """
    call = call_of(*trace.operators.select("input_shapes", "input_types", "input_values").row(row["row"]))
    kernel = row["kernel"] or ""
    half, single = peaks.flops_s.get("bf16") or peaks.flops_s.get("fp16"), peaks.flops_s.get("fp32")
    faster = max(half / single, 1.0) if half and single else 1.0
    found: list[Reason] = []
    if call is not None:
        name = row["operator"].removeprefix("aten::").removesuffix("_")
        about = _Kernel(name, call, row, block_count(row["grid"]), _tile(kernel), peaks, faster)
        found += _BY_KIND.get(row["work_kind"], _of_vectors)(about)
        found = [*(found or [_UNEXPLAINED]), *_width(about)]
    return tuple(found) or (_UNEXPLAINED,)


_UNEXPLAINED: Final = Reason(
    "kernel",
    "nothing in its sizes explains it: the kernel itself is slow",
    "another kernel for the same work: the compiler's, or another library's",
)


def block_count(grid: str | None) -> int:
    """The number of thread blocks of a grid "x,y,z"; -1 if unknown or empty."""
    sizes = (grid or "").strip("[]").split(",")
    if not all(size.strip().isdigit() and len(size) < 12 for size in sizes):
        return -1
    return min(prod(map(int, sizes)), LARGEST) or -1


_SMALL: Final = 32
_TILE: Final = re.compile(r"(?<!\d)(\d{2,3})x(\d{2,3})(?!\d)")
_SPLITS: Final = re.compile(r"_GSU(\d+)_")


def _tile(kernel: str) -> tuple[int, int] | None:
    sizes = ((int(rows), int(columns)) for rows, columns in _TILE.findall(kernel))
    return next((tile for tile in sizes if not any(side % 8 for side in tile)), None)


_FACTORS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "matmul"), (0, 1)),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm"), (1, 2)),
}


def product_sizes(name: str, call: Call) -> tuple[int, int, int, int] | None:
    """Batch, rows, columns and length of the sums of a matrix product such as "mm"; None for other operators."""
    if name == "linear" and (left := call.shape(0)) and (weight := call.shape(1)) and len(weight) == 2:
        return 1, prod(left[:-1]), weight[0], weight[1]
    first, second = (call.shape(place) for place in _FACTORS.get(name, (-1, -1))) if name in _FACTORS else (None, None)
    if not first or not second or len(first) < 2 or len(second) < 2:
        return None
    return prod(broadcast([first[:-2], second[:-2]]) or (1,)), first[-2], second[-1], first[-1]


def _matrix(kernel: _Kernel) -> list[Reason]:
    sizes = product_sizes(kernel.name, kernel.call)
    if sizes is None:
        return []
    batch, rows, columns, inner = sizes
    found = []
    if batch > 1 and max(rows, columns) <= _SMALL:
        numbers = {"products": batch, "largest side of a result": _SMALL}
        why = f"small products: {batch:,} of {rows}x{inner} by {inner}x{columns}, less than a tile each"
        better = f"one product of them all where one side is the same, or more than {_SMALL:,} rows each"
        found.append(Reason("small_products", why, better, numbers))
    intensity = kernel.row["flops"] / max(kernel.row["bytes"] or 0, 1)
    if kernel.row["limit"] == "memory" and max(rows, columns) >= 16 * min(rows, columns) and min(rows, columns) <= 64:
        found.append(_skinny(rows, columns, inner, intensity))
    return found + _fill(kernel, batch, rows, columns, inner)


def _skinny(rows: int, columns: int, inner: int, intensity: float) -> Reason:
    numbers = {"operations per byte": intensity}
    if min(rows, columns) <= 16:
        why = (
            f"few rows: {rows}x{inner} by {inner}x{columns} does {intensity:.3g} operations a byte, so memory limits it"
        )
        return Reason("few_rows", why, "more rows at once (a larger batch), or weights of fewer bits", numbers)
    of = f"{rows}x{inner} by {inner}x{columns}"
    why = f"tall and skinny: {of} is {intensity:.3g} operations a byte"
    better = "one product with several matrices side by side, or fused with its neighbours: the tall one is read once"
    return Reason("tall_skinny", why, better, numbers)


def _fill(kernel: _Kernel, batch: int, rows: int, columns: int, inner: int) -> list[Reason]:
    """How the tiles of a product's result fill the device."""
    found, blocks, tile, processors = [], kernel.blocks, kernel.tile, kernel.processors
    if tile is not None and blocks < 0:
        splits = _SPLITS.search(kernel.row["kernel"])
        blocks = batch * max(_tiles(rows, columns, tile), _tiles(columns, rows, tile)) * int(splits[1] if splits else 1)
    of = f" of {tile[0]}x{tile[1]}" if tile else ""
    if processors and 0 < blocks < processors:
        numbers = {"thread blocks": blocks, "multiprocessors": processors}
        why = f"few tiles: {blocks:,} block{'s' * (blocks > 1)}{of} for {processors:,} multiprocessors"
        if inner >= 4 * max(rows, columns):
            better = f"sums of {inner:,} split over more blocks (split-K, stream-K)"
            found.append(Reason("few_tiles", why, better, numbers | {"length of the sums": inner}))
        else:
            better = f"a {processors / blocks:.3g} times larger batch, or smaller tiles"
            found.append(Reason("few_tiles", why, better, numbers | {"times larger": processors / blocks}))
    elif processors and blocks > 0:
        found += _tail(blocks, processors, of)
    if tile is not None:
        useful = max(_useful(rows, columns, tile), _useful(columns, rows, tile))
        if useful < _FULL and kernel.row["limit"] == "compute":  # else the bytes of a larger result take time, too
            why = f"sizes off the tile: {rows}x{columns} fills {useful:.0%} of its tiles of {tile[0]}x{tile[1]}"
            fits = f"{_up(rows, tile[0])}x{_up(columns, tile[1])}"
            better = f"a result of {fits}, which takes as long, or one that is smaller by the rest"
            found.append(Reason("off_tile", why, better, {"share of the tiles filled": useful}))
    odd = next((size for size in (inner, columns) if size % 8), 0)
    if odd and kernel.row["number_type"] in ("fp16", "bf16"):
        numbers = {"length of a row": odd, "padded length": _up(odd, 8)}
        why = f"rows of {odd:,} 16-bit numbers do not begin at multiples of 16 bytes"
        found.append(Reason("unaligned", why, f"rows of {_up(odd, 8):,}", numbers))
    return found


_FULL: Final = 0.8
"""Share of tiles or of the last wave below which they count as badly filled."""


def _tail(blocks: int, processors: int, of: str) -> list[Reason]:
    """The last wave of blocks, if few of the multiprocessors work in it; from four waves on it matters little."""
    waves = -(-blocks // processors)
    last = blocks - (waves - 1) * processors
    if waves > 4 or blocks / (waves * processors) >= _FULL:
        return []
    why = f"tail wave: of {blocks:,} blocks{of}, the last {last:,} keep {processors:,} multiprocessors waiting"
    better = f"{(waves - 1) * processors:,} or {waves * processors:,} blocks, or tiles of another size"
    numbers = {"thread blocks": blocks, "blocks in the last wave": last, "multiprocessors": processors,
               "blocks of whole waves, one less": (waves - 1) * processors,
               "blocks of whole waves": waves * processors}  # fmt: skip
    return [Reason("tail_wave", why, better, numbers)]


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return -(-rows // tile[0]) * -(-columns // tile[1])


def _useful(rows: int, columns: int, tile: tuple[int, int]) -> float:
    return rows * columns / max(_tiles(rows, columns, tile) * tile[0] * tile[1], 1)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _sides(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


_FEW_CHANNELS: Final = 16
_LARGE_IMAGE: Final = 2**16


def _convolution(kernel: _Kernel) -> list[Reason]:
    layout = CONVOLUTIONS.get(kernel.name)
    if layout is None:
        return []
    given, weight = kernel.call.shape(layout.input), kernel.call.shape(layout.weight)
    if not given or not weight or len(given) != len(weight) or len(weight) < 3:
        return []
    flag = layout.transposed if isinstance(layout.transposed, bool) else kernel.call.flag(layout.transposed)
    sides, image = weight[2:], given[2:]
    steps = kernel.call.integers(layout.stride) if layout.stride is not None else None
    gaps = kernel.call.integers(layout.dilation) if layout.dilation is not None else None
    found = []
    if flag:
        found.append(_transposed(sides, image, steps))
        return found + _fill(kernel, 1, given[0] * prod(image), weight[1] * prod(sides), given[1])
    groups = given[1] // max(weight[1], 1)
    inner, positions = weight[1] * prod(sides), _positions(kernel.row["flops"], weight)
    if groups > 1:
        found.append(_grouped(groups, weight[1]))
    if gaps and max(gaps) > 1:
        better = "a larger step before it, or channels-last, where neighbours in memory are channels"
        found.append(Reason("dilated", f"dilated by {_sides(gaps)}: what it reads lies apart", better))
    if prod(image) >= _LARGE_IMAGE and weight[1] < _FEW_CHANNELS and groups == 1:
        found.append(_large_image(image, weight[1]))
    if prod(sides) == 1:
        why = f"pointwise (1x1): in fact a product of {positions}x{inner} by {inner}x{weight[0]}"
        better = "channels-last, in which it is one matrix product without copies of the layout"
        found.append(Reason("pointwise", why, better))
    elif len(sides) == 3:
        why = f"three-dimensional weights of {_sides(sides)}, for which libraries have few fast algorithms"
        better = "channels-last (torch.channels_last_3d), or a convolution over the image and one over its depth"
        found.append(Reason("volumetric", why, better))
    elif len(set(sides)) > 1:
        why = f"asymmetric weights of {_sides(sides)}, for which libraries have few fast algorithms"
        better = "square weights such as 3x3, or channels-last, in which it is one product"
        found.append(Reason("asymmetric", why, better))
    elif max(sides) >= 7 and not found:
        why = f"large weights of {_sides(sides)}, for which there is no fast algorithm such as Winograd's"
        found.append(Reason("large_weights", why, "several layers of 3x3 in its place, or channels-last"))
    return found + _fill(kernel, groups, positions, weight[0] // max(groups, 1), inner)


def _positions(flops: int | None, weight: Shape) -> int:
    return (flops or 0) // max(2 * prod(weight), 1)


def _transposed(sides: Shape, image: Shape, steps: Shape | None) -> Reason:
    by = f" by steps of {_sides(steps)}" if steps else ""
    why = (
        f"transposed convolution: weights of {_sides(sides)} spread an image of {_sides(image)}{by}, which leaves holes"
    )
    better = "a convolution to as many more channels, then F.pixel_shuffle; or F.interpolate and a convolution"
    return Reason("transposed", why, better)


def _grouped(groups: int, channels: int) -> Reason:
    numbers = {"groups": groups, "channels of a group": channels}
    if channels == 1:
        why = f"depthwise: each of the {groups:,} groups has {channels:,} channel, too few for a matrix product"
        better = "channels-last with a kernel made for it, or wider groups"
        return Reason("depthwise", why, better, numbers)
    why = f"grouped: {groups:,} products of {channels:,} channels each"
    return Reason("grouped", why, "fewer, wider groups, and channels-last", numbers)


def _large_image(image: Shape, channels: int) -> Reason:
    why = f"large images ({_sides(image)}) with few channels ({channels:,}), which fill the matrix units badly"
    better = "F.pixel_unshuffle first, which trades positions for channels; channels padded to a multiple of 8"
    return Reason("large_image", why, better, {"input channels": channels})


def attention_sizes(name: str, call: Call) -> tuple[int, int, int, int, int] | None:
    """Batch, heads, queries, keys and size of a head of fused attention; None where shapes do not show them."""
    first = 1 if name.endswith("_backward") else 0
    query, key = call.shape(first), call.shape(first + 1)
    if not query or not key or len(query) != 4 or len(key) != 4:
        return None
    at, heads = (2, 1) if "scaled_dot_product" in name else (1, 2)
    return query[0], query[heads], query[at], key[at], query[3]


_SHORT: Final = 1024
_ROWS_OF_TILE: Final = 128
"""Rows that usual kernels of attention and of experts give a block."""
_LONG: Final = 8192


def _attention(kernel: _Kernel) -> list[Reason]:
    sizes = attention_sizes(kernel.name, kernel.call)
    if sizes is None:
        return []
    batch, heads, queries, keys, width = sizes
    found, pairs = [], batch * heads
    if queries <= 16 < keys:
        numbers = {"queries of a head": queries, "keys of a head": keys}
        why = f"few queries: {queries:,} for {keys:,} keys a head"
        found.append(Reason("few_queries", why, "a kernel that splits the keys, a larger batch", numbers))
    elif max(queries, keys) <= _SHORT:
        numbers = {"positions": max(queries, keys), "heads of all sequences": pairs}
        why = f"short sequences: {pairs:,} heads of {max(queries, keys):,} positions, too little work for a block each"
        better = "several sequences packed into one row (variable lengths), a larger batch, or the compiler's kernel"
        found.append(Reason("short_sequences", why, better, numbers))
    elif max(queries, keys) >= _LONG and kernel.row["limit"] == "compute":
        why = f"long sequences: {queries}x{keys} scores a head, limited by arithmetic that the kernel does slowly"
        better = "another attention kernel (on AMD: CK instead of AOTriton; else cuDNN, FlashAttention-3), or a window"
        found.append(Reason("long_sequences", why, better))
    if width < 64 or width % 32:
        why = f"small or odd heads: {width:,} numbers a head fill the matrix units badly"
        found.append(Reason("small_heads", why, "heads of 64 or 128", {"size of a head": width}))
    elif width > 128:
        why = f"wide heads: {width:,} numbers a head leave few registers"
        found.append(Reason("wide_heads", why, "heads of 64 or 128", {"size of a head": width}))
    if not found:
        found += _occupancy(kernel)
    blocks = kernel.blocks if kernel.blocks > 0 else pairs * -(-queries // _ROWS_OF_TILE)
    if kernel.processors and blocks < kernel.processors:
        found += _few_blocks(blocks, kernel.processors)
    return found


def _few_blocks(blocks: int, processors: int) -> list[Reason]:
    numbers = {"thread blocks": blocks, "multiprocessors": processors}
    why = f"few blocks: {blocks:,} for {processors:,} multiprocessors"
    return [Reason("few_tiles", why, "a larger batch, or a kernel that splits its sums", numbers)]


def _experts(kernel: _Kernel) -> list[Reason]:
    sizes = expert_sizes(kernel.name, kernel.call)
    if sizes is None:
        return []
    found, rows = [], sizes.tokens * sizes.chosen / sizes.experts
    enough = -(-_ROWS_OF_TILE * sizes.experts // sizes.chosen)
    numbers = {"experts": sizes.experts, "tokens": sizes.tokens,
               "tokens of an expert": rows, "tokens that fill a tile of each expert": enough,
               "rows of a tile": _ROWS_OF_TILE}  # fmt: skip
    better = f"{enough:,} tokens at once give each expert {_ROWS_OF_TILE:,}; else smaller tiles, fewer experts a device"
    if rows < _ROWS_OF_TILE:
        to = "one expert a token (top-1)" if sizes.chosen == 1 else "many experts, few tokens"
        why = f"{to}: {sizes.tokens:,} tokens over {sizes.experts:,} experts, {rows:.3g} each"
        found.append(Reason("few_tokens", why, f"a larger batch: {better}", numbers))
    else:
        why = f"large capacity: {rows:,.0f} tokens for each of {sizes.experts:,} experts, limited by arithmetic"
        found.append(Reason("large_capacity", why, "weights of 8 bits, or another grouped kernel", numbers))
    if kernel.processors and 0 < kernel.blocks < kernel.processors:
        found += _few_blocks(kernel.blocks, kernel.processors)
    return found


_ATOMIC: Final = re.compile(r"(?i)atomic|index_?add|index_?put|scatter_?add|embedding_(?:dense_)?backward|grad_weight")
_ONE_BY_ONE: Final = re.compile(
    r"(?<!vectorized_)(?:unrolled_)?elementwise_kernel|strided|transpose|nchw", re.IGNORECASE
)
_LOW_OCCUPANCY: Final = 0.25
_SHORT_ROW: Final = 256


def _of_vectors(kernel: _Kernel) -> list[Reason]:
    """Of work that memory limits."""
    found, row, name = [], kernel.row, kernel.row["kernel"] or ""
    shapes = kernel.call.shape(0) or ()
    odd = shapes[-1] if row["work_kind"] in ("softmax", "normalisation") and shapes else 0
    if odd % 8 and row["number_type"] in ("fp16", "bf16"):
        numbers = {"length of a row": odd, "padded length": _up(odd, 8)}
        why = f"rows of {odd:,} 16-bit numbers do not begin at multiples of 16 bytes"
        found.append(Reason("unaligned", why, f"rows of {_up(odd, 8):,}", numbers))
    elif row["work_kind"] in ("softmax", "normalisation") and 0 < odd <= _SHORT_ROW:
        why = f"short rows: {odd:,} numbers each, too few to keep a block busy"
        better = "the compiler's kernel, which takes several rows a block, fused with its neighbours"
        found.append(Reason("short_rows", why, better, {"length of a row": odd}))
    if _ATOMIC.search(name):
        why = "atomics: blocks add to the same places in memory one after the other"
        found.append(Reason("atomics", why, "sorted indices, or sums over segments"))
    elif _ONE_BY_ONE.search(name):
        why = "layout: it reads across the layout or broadcasts, one number at a time"
        found.append(Reason("layout", why, "contiguous tensors, or the compiler, which fuses it with its neighbours"))
    found += _occupancy(kernel)
    if kernel.processors and 0 < kernel.blocks < kernel.processors:
        found += _few_blocks(kernel.blocks, kernel.processors)
    return found


def _occupancy(kernel: _Kernel) -> list[Reason]:
    """Whether a block's registers or shared memory leave most of a multiprocessor's threads unused."""
    row, limits = kernel.row, multiprocessor_of(kernel.peaks)
    threads, registers, shared = product_of(row["block"]), row["registers"] or 0, row["shared_memory_bytes"] or 0
    figures = [np.array([float(each)]) for each in (threads, registers, shared)]
    allowed = blocks_by_limit(figures[0], figures[1], figures[2], kernel.peaks)
    if limits is None or allowed is None or not threads > 0:
        return []
    blocks = {name: float(values[0]) for name, values in allowed.items()}
    limit = min(("registers", "shared memory"), key=lambda name: blocks[name])
    held = blocks[limit]
    share = held * threads / limits.threads
    if not 1 <= held < min(blocks["threads"], blocks["blocks"]) or share >= _LOW_OCCUPANCY:
        return []
    numbers = {"share of a multiprocessor's threads in use": share, "threads of a block": threads,
               "blocks at a time on a multiprocessor": held}  # fmt: skip
    at_a_time = f"{held:,.0f} block{'s' * (held > 1)} of {threads:,.0f} threads at a time on a multiprocessor"
    if limit == "registers":
        fewer = REGISTERS / (2 * held * -(-threads // WARP) * WARP) // 8 * 8
        numbers |= {"registers of a thread": registers, "registers of a thread for twice as many": fewer}
        why = f"occupancy {share:.0%}: {registers:,} registers a thread leave {at_a_time}"
        return [
            Reason("occupancy", why, f"{fewer:,.0f} registers a thread (launch bounds), for twice as many", numbers)
        ]
    less = limits.shared_memory_bytes / (2 * held) // SHARED_UNIT * SHARED_UNIT - limits.shared_memory_reserved
    numbers |= {"shared memory of a block": shared, "shared memory of a block for twice as many": less}
    why = f"occupancy {share:.0%}: {shared:,} bytes of shared memory a block leave {at_a_time}"
    return [
        Reason("occupancy", why, f"{less:,.0f} bytes a block (smaller tiles, fewer stages), for twice as many", numbers)
    ]


def _width(kernel: _Kernel) -> list[Reason]:
    """Whether 16 bits would serve instead of 32."""
    if not kernel.is_wide:
        return []
    if kernel.row["limit"] == "memory":
        return [Reason("fp32", "FP32: 16-bit numbers take half the bytes", "torch.autocast to bf16")]
    faster = int(kernel.faster)
    if faster <= 1:
        return []
    why = f"FP32: the device multiplies 16-bit numbers at least {faster:,} times as fast"
    return [Reason("fp32", why, "torch.autocast to bf16", {"16-bit peak over FP32's": faster})]


_BY_KIND: Final[Mapping[str, Callable[[_Kernel], list[Reason]]]] = {
    "matrix": _matrix,
    "convolution": _convolution,
    "attention": _attention,
    "experts": _experts,
}
