"""Timings of operators over shapes and number types, for the predictor: one row for each case.

Sizes are drawn at random, so that any beginning of the sweep is a sample of the whole. A short operator is replayed
from a CUDA graph, which leaves the host's part out; where it cannot be captured it is launched by the host, and its row
says so. Caches are warm: an operator that fits into them reads from there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional as F

from benchmarks.gpu_campaign.plan import At
from tests.zoo.timing import Ends

Work = Callable[[], object]
COLUMNS: Final = ("kind", "operation", "number_type", "sizes", "ns", "low_ns", "high_ns", "calls", "in_graph")
"""`ns` of one call is the median of five groups of `calls`; `sizes` are in the order of SIZES."""
SIZES: Final = {
    "product": ("batch", "m", "n", "k"),
    "attention": ("batch", "heads", "queries", "keys", "width of a head"),
    "normalisation": ("rows", "width"),
    "convolution": ("batch", "channels", "out", "side", "kernel", "stride"),
    "copy": ("bytes",),
}
"""By kind: what `sizes` holds."""
DTYPES: Final = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
GROUPS: Final = 5
GROUP_NS: Final = 2e6
"""A group of calls takes at least this long."""
SHORT_NS: Final = 100_000.0
SPARE_S: Final = 30.0
"""For the start of the process and the end of the table."""
_SAVED_S: Final = 20.0


@dataclass
class Sweep:
    """Draws cases, times them and keeps the rows.

    Attributes:
        largest: elements of the largest tensor.
        failures: how often an error of torch came up, by its first words.
    """

    device: torch.device
    largest: int
    file: Path
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float, most: int | None = None) -> None:
        """Time cases until the time is over, or so many; the table is written now and then, and at the end."""
        began = saved = time.monotonic()
        draw = random.Random(0)
        with torch.no_grad():
            for number in itertools.count():
                if time.monotonic() - began > seconds or number == most:
                    break
                # in turn, so that a short sweep has every kind
                self._one(draw, list(_KINDS)[number % len(_KINDS)])
                if time.monotonic() - saved > _SAVED_S:
                    saved = time.monotonic()
                    self.save()
        self.save()

    def save(self) -> None:
        """Write the rows so far; without polars as JSON."""
        if find_spec("polars") is None:
            self.file.with_suffix(".json").write_text(json.dumps([COLUMNS, *self.rows]))
            return
        import polars as pl

        pl.DataFrame(self.rows, schema=COLUMNS, orient="row").write_parquet(self.file, compression="zstd")

    def _one(self, draw: random.Random, kind: str) -> None:
        number_type = draw.choice(list(DTYPES))
        try:
            with self.device:
                case = _KINDS[kind](draw, number_type, self)
            if case is None:
                return
            operation, sizes, work = case
            with _tf32(number_type == "tf32"):
                timed = self._timed(work, may_capture=kind != "copy")
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self.failures[f"{kind} {number_type}: {str(error).split(chr(10))[0][:80]}"] += 1
            if "CUDA error" in str(error):  # the device answers no more in this process
                self.save()
                raise
            return
        self.rows.append((kind, operation, "bytes" if kind == "copy" else number_type, list(sizes), *timed))

    def _timed(self, work: Work, *, may_capture: bool) -> tuple[int, int, int, int, bool]:
        for _ in range(2):
            work()
        once = self._group(work, 1)
        calls = max(1, min(200, round(GROUP_NS / max(once, 1.0))))
        in_graph = False
        run: Work = work
        if may_capture and once < SHORT_NS and self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # what cannot be captured
                run, in_graph = _captured(work, calls), True
        times = [self._group(run, 1 if in_graph else calls) / calls for _ in range(GROUPS)]
        return round(statistics.median(times)), round(min(times)), round(max(times)), calls, in_graph

    def _group(self, work: Work, calls: int) -> float:
        ends = Ends(self.device)
        ends.mark()
        for _ in range(calls):
            work()
        ends.mark()
        return float(ends.steps_ns()[0])


def _captured(work: Work, calls: int) -> Work:
    """A replay of so many calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    return graph.replay


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    yield


def swept(at: At, _: str) -> dict[str, Any]:
    """Time operators until the time is nearly over; `sweep.parquet` has a row for each."""
    device = torch.device(at.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 << 30
    found = Sweep(device, 1 << 17 if at.is_dry else min(1 << 28, free // 64), at.keep / "sweep.parquet")
    found.run(at.seconds - SPARE_S, most=60 if at.is_dry else None)
    return {"rows": len(found.rows), "failures": dict(found.failures.most_common(20))}


Case = tuple[str, tuple[int, ...], Work] | None


def _size(draw: random.Random, low: int, high: int) -> int:
    """Log-uniform; two in three are multiples of 64, as most programs' are."""
    size: int = round(low * (high / low) ** draw.random())
    return max(64, size // 64 * 64) if high >= 256 and draw.random() < 2 / 3 else size


def _numbers(number_type: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPES[number_type])


def _product(draw: random.Random, number_type: str, sweep: Sweep) -> Case:
    m, n, k = (_size(draw, 16, min(16384, isqrt(sweep.largest))) for _ in range(3))
    batch = draw.choice((1, 1, 1, 4, 16, 64)) if number_type != "fp8" else 1
    if max(m * n, m * k, n * k) * batch > sweep.largest or batch * m * n * k > 2**11 * sweep.largest:
        return None
    if number_type == "fp8":
        m, n, k = (-(-size // 16) * 16 for size in (m, n, k))
        left, right, one = _numbers("fp8", m, k), _numbers("fp8", n, k), torch.ones(())
        return (
            "scaled_mm",
            (1, m, n, k),
            lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        )
    if batch == 1:
        rows, weight = _numbers(number_type, m, k), _numbers(number_type, n, k)
        return "linear", (1, m, n, k), lambda: F.linear(rows, weight)
    first, second = _numbers(number_type, batch, m, k), _numbers(number_type, batch, k, n)
    return "bmm", (batch, m, n, k), lambda: torch.bmm(first, second)


def _attention(draw: random.Random, number_type: str, sweep: Sweep) -> Case:
    if number_type == "fp8":
        return None
    batch, heads, width = draw.choice((1, 4, 16)), draw.choice((8, 12, 16, 32)), draw.choice((64, 80, 128))
    keys = _size(draw, 64, min(8192, isqrt(sweep.largest)))
    queries = draw.choice((1, keys, keys))
    if batch * heads * keys * width > sweep.largest or batch * heads * queries * keys > 8 * sweep.largest:
        return None
    query = _numbers(number_type, batch, heads, queries, width)
    key, value = (_numbers(number_type, batch, heads, keys, width) for _ in range(2))
    sizes = (batch, heads, queries, keys, width)
    causal = queries == keys and draw.random() < 0.5
    if queries == 1 or draw.random() < 0.6:
        name = "attention, causal" if causal else "attention"
        return name, sizes, lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    for each in (query, key, value):
        each.requires_grad_()

    def both_ways() -> None:
        with torch.enable_grad():
            answer = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        torch.autograd.grad(answer, (query, key, value), answer.detach())

    return f"attention{', causal' if causal else ''}, forward and backward", sizes, both_ways


def _normalisation(draw: random.Random, number_type: str, sweep: Sweep) -> Case:
    if number_type in ("tf32", "fp8"):
        return None
    most = isqrt(sweep.largest)
    rows, width = _size(draw, 64, min(1 << 17, 8 * most)), _size(draw, 64, min(1 << 15, 2 * most))
    if rows * width > sweep.largest:
        return None
    x, weight = _numbers(number_type, rows, width), _numbers(number_type, width)
    works: dict[str, Work] = {
        "layer_norm": lambda: F.layer_norm(x, (width,), weight),
        "rms_norm": lambda: F.rms_norm(x, (width,), weight),
        "softmax": lambda: x.softmax(-1),
        "gelu": lambda: F.gelu(x),
        "add": lambda: x + x,
        "sum": lambda: x.sum(-1),
    }
    name = draw.choice(list(works))
    return name, (rows, width), works[name]


def _convolution(draw: random.Random, number_type: str, sweep: Sweep) -> Case:
    if number_type == "fp8":
        return None
    batch, channels, out = draw.choice((1, 8, 32, 64)), *(draw.choice((3, 32, 64, 128, 256, 512)) for _ in range(2))
    side, kernel, stride = draw.choice((7, 14, 28, 56, 112, 224)), draw.choice((1, 3, 3, 5, 7)), draw.choice((1, 1, 2))
    area = batch * side * side
    if area * max(channels, out) > sweep.largest or area * channels * out * kernel**2 > 2**11 * sweep.largest:
        return None
    last = draw.random() < 0.5
    order = torch.channels_last if last else torch.contiguous_format
    images = _numbers(number_type, batch, channels, side, side).contiguous(memory_format=order)
    weight = _numbers(number_type, out, channels, kernel, kernel).contiguous(memory_format=order)
    return (
        "conv2d, channels last" if last else "conv2d",
        (batch, channels, out, side, kernel, stride),
        lambda: F.conv2d(images, weight, stride=stride, padding=kernel // 2),
    )


def _copy(draw: random.Random, _: str, sweep: Sweep) -> Case:
    count = min(_size(draw, 256, 1 << 29), 2 * sweep.largest)
    on_device = torch.ones(count, dtype=torch.uint8)
    other = torch.empty_like(on_device)
    pinned = torch.ones(count, dtype=torch.uint8, device="cpu", pin_memory=sweep.device.type == "cuda")
    pageable = torch.ones(count, dtype=torch.uint8, device="cpu")
    works: dict[str, Work] = {
        "copy on the device": lambda: other.copy_(on_device),
        "to the device, pinned": lambda: other.copy_(pinned, non_blocking=True),
        "to the device, pageable": lambda: other.copy_(pageable),
        "from the device, pinned": lambda: pinned.copy_(on_device, non_blocking=True),
        "from the device, pageable": lambda: pageable.copy_(on_device),
    }
    name = draw.choice(list(works))
    return name, (count,), works[name]


_KINDS: Final[dict[str, Callable[[random.Random, str, Sweep], Case]]] = {
    "product": _product,
    "attention": _attention,
    "normalisation": _normalisation,
    "convolution": _convolution,
    "copy": _copy,
}
