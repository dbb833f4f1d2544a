"""Time to first token and per output token of a language model on a device, from its shapes alone.

A pass of a transformer over some tokens is a list of operations, each timed by `operation_times`. The prompt's pass
ends with the first token; each pass after it has one token for each request, whose attention reads the whole cache. A
pass takes what its operations take one after another, as in a captured graph, and what it waits for the host.

With tensor parallelism each device has its share of the heads and of the columns between them, and sums of the tokens'
states follow attention and the feed-forward part (Shoeybi and others, "Megatron-LM", 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks, is_nvidia, with_measured_shares
from stepscope.predict.batch import KEPT_FREE
from stepscope.predict.limits import TABLE_ERROR, Link, link_of
from stepscope.predict.matrix_laws import CACHE_BYTES_PER_CLOCK
from stepscope.predict.model_shape import ModelShape
from stepscope.predict.operation_times import guessed_band, operation_times, sustained_bandwidth
from stepscope.predict.operations import BYTES, Operations, roofline_ns
from stepscope.predict.ranges import joint_band
from stepscope.predict.work_times import KNOWLEDGE

ONE_SHOT_NS: Final = 4_900.0
TWO_SHOTS_NS: Final = 12_800.0
OWN_SUM_SHARE: Final = 0.73
"""Engines' own sums: their start and the share of the link's bandwidth, fitted to public timings of vLLM's, SGLang's
and TensorRT-LLM's on two to eight A100, H100, H200 and B200 (`scripts/predictor/serving_kernels.py`).
"""
OWN_SUM_BAND: Final = (0.62, 1.76)  # factors that hold nine of ten of these on a generation that was left out
_OWN_SUMS: Final = ("nvlink",)  # links of which such kernels were timed
ROUTING_KERNELS: Final = 6
"""Short kernels that sort a layer's tokens by expert, copy them and add what comes back: beside the products, public
timings of engines' expert layers have 12 to 19 us for a token on five devices (`scripts/predictor/serving_kernels.py`).
"""
TOKENS_A_PASS: Final = 8192
"""Most tokens of prompts and answers in one pass: TensorRT-LLM's default."""
HOST_NS: Final = 2_400_000.0
"""What the host of vLLM took for a decoding pass of 32 requests that was one graph, in a public MI300X trace. Engines
that prepare a pass while the device works on the one before hide it; with others the device waits for it.
"""


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """What is served at once: `batch` requests of `prompt` tokens, each answered with `output` tokens."""

    batch: int = 1
    prompt: int = 1024
    output: int = 256
    devices: int = 1  # that share every layer
    weights: str | None = None  # one of TYPES; None for the model's own
    cache: str | None = None  # one of TYPES; None for the type of the arithmetic
    host_ns: float | None = None  # that each pass waits for the host; None: none, and up to HOST_NS in the range


@dataclass(frozen=True, slots=True)
class PassTime:
    """One pass over the model; nanoseconds.

    Attributes:
        parts: the expected time by kind of operation, the longest first; "link" for sums between devices, "host" for
            what was given.
        knowledge: share of the device's time by what it rests on, as the values of `work_times.KNOWLEDGE`.
        roofline_ns: arithmetic at the peak, or traffic at the bandwidth, without anything between devices.
        limit: "compute", "memory bandwidth", "communication" or "host", which takes most of the time.
    """

    ns: float
    low_ns: float
    high_ns: float
    parts: dict[str, float]
    knowledge: dict[str, float]
    roofline_ns: float
    limit: str


@dataclass(frozen=True, slots=True)
class ServingPrediction:
    """Serving on one kind of device; times in nanoseconds, None where refused.

    Attributes:
        prefill: from the prompts to every request's first token.
        decode: the mean pass that gives each request another token.
        weight_bytes, cache_bytes: on each device; of the cache at the end of the answers.
        most_requests: how many of these requests fit at once beside the weights.
        notes: what was refused or assumed, in sentences.
    """

    device: DevicePeaks
    request: ServingRequest
    link: Link | None
    weight_bytes: int
    cache_bytes: int
    fits: bool | None
    most_requests: int | None
    prefill: PassTime | None = None
    decode: PassTime | None = None
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> tuple[float, float, float] | None:
        """Expected time of the whole answers, and its range."""
        if self.prefill is None or self.decode is None:
            return None
        more, first, then = self.request.output - 1, self.prefill, self.decode
        return first.ns + more * then.ns, first.low_ns + more * then.low_ns, first.high_ns + more * then.high_ns

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all requests for each second, where a new request takes the place of each that ends.

        Prompts then pass with the others' tokens, at most TOKENS_A_PASS together: such a pass reads the weights once.
        """
        if self.total is None or self.prefill is None or self.decode is None:
            return None
        batch, tokens = self.request.batch, self.request.batch * self.request.prompt
        shared = tokens / max(TOKENS_A_PASS - batch, 1) * (batch - 1) / batch  # passes that have both
        products = self.decode.parts["matrix"] - batch * self.prefill.parts["matrix"] / tokens
        saved = min(shared, self.request.output - 1) * max(products, 0.0)
        return batch * self.request.output / (self.total[0] - saved) * 1e9


def serving_prediction(
    model: ModelShape, request: ServingRequest, device: DevicePeaks, link: Link | None = None
) -> ServingPrediction:
    """Predict the passes of these requests on `request.devices` of a device.

    Args:
        link: that joins the devices; None for their own.

    Raises:
        UsageError: the devices cannot share the model's heads.
    """
    if request.devices > 1 and model.heads % request.devices:
        raise UsageError(f"{request.devices} devices cannot share {model.heads} heads of attention equally")
    weights = request.weights or model.weights
    device = with_measured_shares(device)
    arithmetic = _arithmetic(model, device)
    kept = request.cache or arithmetic or "bf16"
    parts = model.kv_heads / max(model.kv_heads // request.devices, 1)  # more devices than heads keep copies
    each = model.cache_bytes(request.prompt + request.output, kept) / parts
    weight_bytes = round(model.parameters * BYTES[weights] / request.devices)
    room = None if device.memory_bytes is None else device.memory_bytes * (1 - KEPT_FREE) - weight_bytes
    joined = (link or link_of(device)) if request.devices > 1 else None
    found = ServingPrediction(
        device=device,
        request=request,
        link=joined,
        weight_bytes=weight_bytes,
        cache_bytes=round(each * request.batch),
        fits=None if room is None else room >= each * request.batch,
        most_requests=None if room is None else max(int(room // each), 0),
        notes=tuple(_notes(model, request)),
    )
    refusal = _refusal(device, request, joined, arithmetic, weights)
    if refusal or arithmetic is None:
        return replace(found, notes=(*found.notes, *([refusal] if refusal else [])))
    kinds = _Types(weights if weights == "fp8" else arithmetic, arithmetic, kept)
    context = request.prompt + (request.output - 1) / 2  # its traffic grows by the same with each token
    first = _Pass(model, request, kinds, new=request.prompt, context=0)
    then = _Pass(model, request, kinds, new=1, context=context)
    return replace(found, prefill=first.time_on(device, joined), decode=then.time_on(device, joined))


def _arithmetic(model: ModelShape, device: DevicePeaks) -> str | None:
    """The 16-bit type of the tokens' states on a device: the model's, else the other one that it has."""
    own = model.weights if model.weights in ("bf16", "fp16") else "bf16"
    return next((kind for kind in (own, "bf16", "fp16") if kind in device.flops_s), None)


def _refusal(
    device: DevicePeaks, request: ServingRequest, link: Link | None, arithmetic: str | None, weights: str
) -> str:
    if arithmetic is None:
        return "its rate in 16 bits is unknown"
    if weights == "fp8" and "fp8" not in device.flops_s:
        return "it does not multiply in fp8"
    if request.devices > 1 and link is None:
        return "the link between several of it is unknown: --link names it"
    return ""


def _notes(model: ModelShape, request: ServingRequest) -> Iterator[str]:
    if model.window is not None and model.window < request.prompt + request.output:
        yield (
            f"some layers look back at most {model.window:,} tokens: here every layer reads the whole context, so "
            "attention and its cache are too large"
        )
    if model.longest and request.prompt + request.output > model.longest:
        yield (
            f"the model takes {model.longest:,} tokens by its configuration; prompt and answer are "
            f"{request.prompt + request.output:,}"
        )


@dataclass(frozen=True, slots=True)
class _Types:
    products: str  # of the layers' products; the others are in `states`
    states: str
    cache: str


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation of a pass on one of the devices, and how often it runs."""

    name: str
    kind: str
    number_type: str
    times: float
    bytes: float
    flops: float = 0.0
    batch: float = 1.0
    rows: float = 1.0
    columns: float = 1.0
    inner: float = 1.0


@dataclass(frozen=True, slots=True)
class _Pass:
    model: ModelShape
    request: ServingRequest
    types: _Types
    new: int  # tokens of each request in this pass
    context: float  # tokens of each request before it

    @property
    def tokens(self) -> int:
        return self.request.batch * self.new

    def time_on(self, device: DevicePeaks, link: Link | None) -> PassTime:
        operations = tuple(self._operations())
        columns = {
            name: np.array([getattr(each, name) for each in operations])
            for name in ("name", "kind", "number_type", "flops", "bytes", "batch", "rows", "columns", "inner")
        }
        described = Operations(**columns, is_backward=np.zeros(len(operations), np.bool_))
        times = operation_times(_cached(described, device), device)
        often = np.array([each.times for each in operations])
        learned = (times.basis == "learned") & is_nvidia(device)
        low, high = guessed_band(times.ns, times.low_ns, times.high_ns, device)
        low, high = np.where(learned, times.low_ns, low), np.where(learned, times.high_ns, high)
        kinds = np.where(learned, described.kind, "datasheet")
        sums, sums_low, sums_high = self._sums_ns(link)
        device_ns, given = np.append(times.ns * often, sums), self.request.host_ns or 0.0
        hidden = HOST_NS if self.request.host_ns is None else 0.0
        ns = np.append(device_ns, given)
        low, high = np.append(low * often, (sums_low, given)), np.append(high * often, (sums_high, given + hidden))
        names = np.append(kinds, ("link", "host"))
        by_timings = link is not None and link.hardware in _OWN_SUMS
        bases = np.append(np.where(learned, "shapes", "datasheet"), "shapes" if by_timings else "datasheet")
        low, high = joint_band(ns, low, high, names, np.arange(len(ns)), np.arange(len(ns)))
        roofs = roofline_ns(described, device) * often
        reached = np.minimum(times.ns * often, _least(described, often, roofs, device))
        low = np.maximum(low, np.append(reached, (0.0, given)))
        return PassTime(
            ns=float(ns.sum()),
            low_ns=float(low.sum()),
            high_ns=float(high.sum()),
            parts=_sums(np.append(described.kind, ("link", "host")), ns),
            knowledge=_shares(bases, device_ns),
            roofline_ns=float(roofs.sum()),
            limit=_limit(described, device, times.ns * often, {"communication": sums, "host": given}),
        )

    def _sums_ns(self, link: Link | None) -> tuple[float, float, float]:
        """The pass's sums between devices, and their range: which of both kernels an engine has is unknown."""
        if link is None:
            return 0.0, 0.0, 0.0
        size, devices = float(self.tokens * self.model.hidden * BYTES[self.types.states]), self.request.devices
        ns, library = sum_ns(link, size, devices), link.transfer_ns("all_reduce", size, devices)
        least, most = library * (1 - TABLE_ERROR), library * (1 + TABLE_ERROR)
        if link.hardware in (*_OWN_SUMS, "infinity fabric"):
            own = min(own_sum_ns(link, size, devices), library)
            least, most = own * OWN_SUM_BAND[0], max(own * OWN_SUM_BAND[1], most)
        times = 2 * self.model.layers
        return times * ns, times * least, times * most

    def _operations(self) -> Iterator[_Operation]:
        model, shared, size = self.model, self.request.devices, BYTES[self.types.states]
        states = self.tokens * model.hidden * size
        keys = model.head_size * max(model.kv_heads // shared, 1)
        heads = model.head_size * model.heads // shared
        rows = float(self.tokens * model.hidden)
        yield _Operation("embedding", "embedding", self.types.states, 1, 2.0 * states, columns=rows)
        yield self._streamed("norm", 2 * model.layers + 1, 4 * states)  # with the sum before it
        yield from self._quantised(model.hidden, model.layers)
        yield self._product("qkv", self.tokens, heads + 2 * keys, model.hidden, model.layers)
        yield self._streamed("rotary", model.layers, 2 * self.tokens * (heads + keys) * size)
        yield self._streamed("cache", model.layers, 2 * self.tokens * keys * (size + BYTES[self.types.cache]))
        yield self._attention(heads, keys)
        yield from self._quantised(heads, model.layers)
        yield self._product("projection", self.tokens, model.hidden, heads, model.layers)
        yield from self._feed_forward()
        last = self.request.batch
        yield self._product("output", last, -(-model.vocabulary // shared), model.hidden, 1, self.types.states)
        logits = last * model.vocabulary * 4.0
        yield _Operation("argmax", "reduction", "fp32", 1, logits, columns=logits / 4)

    def _attention(self, heads: int, keys: int) -> _Operation:
        """Each new token meets the context and those before it; keys and values are read once for each request."""
        seen = self.new * (self.context + (self.new + 1) / 2)
        moved = 2 * self.tokens * heads * BYTES[self.types.states]
        cache = self.request.batch * (self.context + self.new) * 2 * keys * BYTES[self.types.cache]
        return _Operation(
            "attention",
            "attention",
            self.types.states,
            self.model.layers,
            bytes=moved + cache,
            flops=4.0 * self.request.batch * heads * seen,
            batch=self.request.batch * heads / self.model.head_size,
            rows=self.new,
            columns=self.context + self.new,
            inner=self.model.head_size,
        )

    def _feed_forward(self) -> Iterator[_Operation]:
        model = self.model
        sparse = model.layers - model.dense_layers if model.experts else 0
        yield from self._dense(model.feed_forward, model.layers - sparse, "")
        if not sparse:
            return
        yield self._product("router", self.tokens, model.experts, model.hidden, sparse, self.types.states)
        yield from self._dense(model.shared_experts * model.expert_feed_forward, sparse, "shared ")
        share = model.experts_per_token / model.experts
        used = model.experts * (1 - (1 - share) ** self.tokens)  # experts that at least one token is sent to
        rows = self.tokens * model.experts_per_token / used
        copied = 2 * self.tokens * (1 + model.experts_per_token) * model.hidden * BYTES[self.types.states]
        yield self._streamed("routing", ROUTING_KERNELS * sparse, copied / ROUTING_KERNELS)
        yield from self._dense(model.expert_feed_forward, sparse, "expert ", used, rows)

    def _dense(
        self, width: int, layers: int, name: str, batch: float = 1.0, rows: float | None = None
    ) -> Iterator[_Operation]:
        """A feed-forward part: into `width` columns, which the devices share, and back."""
        if not layers or not width:
            return
        model, rows = self.model, self.tokens if rows is None else rows
        inside = width / self.request.devices
        wide = inside * (2 if model.gated else 1)
        yield from self._quantised(model.hidden, layers, batch * rows)
        yield self._product(f"{name}up", rows, wide, model.hidden, layers, batch=batch)
        moved = batch * rows * (wide + inside) * BYTES[self.types.states]
        yield self._streamed(f"{name}act", layers, moved)
        yield from self._quantised(inside, layers, batch * rows)
        yield self._product(f"{name}down", rows, model.hidden, inside, layers, batch=batch)

    def _quantised(self, inner: float, layers: int, rows: float | None = None) -> Iterator[_Operation]:
        """The kernel that brings a product's input into fp8."""
        if self.types.products == "fp8":
            numbers = (self.tokens if rows is None else rows) * inner
            yield self._streamed("quantisation", layers, numbers * (BYTES[self.types.states] + BYTES["fp8"]))

    def _streamed(self, name: str, times: float, moved: float) -> _Operation:
        """An engine's own kernel that passes over its numbers once, such as one that adds and normalises.

        In recordings of vLLM and SGLang on a B200 and an MI300X these take 4 to 9 us, as their traffic and a start do;
        the timings of PyTorch's normalisation have one block of few threads for each row instead.
        """
        size = BYTES[self.types.states]
        return _Operation(name, "elementwise", self.types.states, times, float(moved), columns=moved / size / 2)

    def _product(
        self,
        name: str,
        rows: float,
        columns: float,
        inner: float,
        times: float,
        number_type: str | None = None,
        batch: float = 1.0,
    ) -> _Operation:
        kind = number_type or self.types.products
        outputs = rows * columns * BYTES[self.types.states]
        moved = batch * ((rows * inner + inner * columns) * BYTES[kind] + outputs)
        flops = 2.0 * batch * rows * columns * inner
        return _Operation(name, "matrix", kind, times, moved, flops, batch, rows, columns, inner)


def sum_ns(link: Link, size: float, devices: int) -> float:
    """Nanoseconds of a sum of `size` bytes between devices: the engine's own kernel, or the communication library."""
    library = link.transfer_ns("all_reduce", size, devices)
    return min(own_sum_ns(link, size, devices), library) if link.hardware in _OWN_SUMS else library


def own_sum_ns(link: Link, size: float, devices: int) -> float:
    """In one shot each device reads all of the others' numbers; in two it sums its share and reads the others' sums."""
    own = OWN_SUM_SHARE * link.bandwidth_bytes_s / 1e9
    if link.peers is not None:
        own *= min(devices - 1, link.peers) / link.peers
    shares = 2 * (devices - 1) / devices * size / own
    return min(ONE_SHOT_NS + (devices - 1) * size / own, TWO_SHOTS_NS + shares)


def _cached(operations: Operations, device: DevicePeaks) -> Operations:
    """As if streaming kernels moved less, which find in the last-level cache what fits it, where that is quicker."""
    rate = CACHE_BYTES_PER_CLOCK * (device.multiprocessors or 0) * (device.clock_mhz or 0) * 1e6
    fits = (operations.kind == "elementwise") & (operations.bytes <= (device.cache_bytes or 0))
    share = min(sustained_bandwidth(device) / rate, 1.0) if rate and is_nvidia(device) else 1.0
    return replace(operations, bytes=np.where(fits, operations.bytes * share, operations.bytes))


def _least(operations: Operations, often: Any, roofs: Any, device: DevicePeaks) -> Any:
    """The products' roofline, less the part of the weights that the cache may still hold."""
    is_product = operations.kind == "matrix"
    read = float((operations.bytes * often)[is_product].sum())
    return np.where(is_product, roofs, 0.0) * max(1 - (device.cache_bytes or 0) / read, 0.0)


def _sums(names: Any, ns: Any) -> dict[str, float]:
    found = {str(name): float(ns[names == name].sum()) for name in np.unique(names)}
    return dict(sorted(((name, each) for name, each in found.items() if each > 0), key=lambda one: -one[1]))


def _shares(bases: Any, ns: Any) -> dict[str, float]:
    return {KNOWLEDGE[basis]: each / float(ns.sum()) for basis, each in _sums(bases, ns).items()}


def _limit(operations: Operations, device: DevicePeaks, ns: Any, others: Mapping[str, float]) -> str:
    rates = np.array([device.flops_s.get(kind, np.inf) for kind in operations.number_type.tolist()])
    computes = operations.flops / rates > operations.bytes / device.bandwidth_bytes_s
    by_limit = {
        "compute": float(ns[computes].sum()),
        "memory bandwidth": float(ns[~computes].sum()),
        **others,
    }
    return max(by_limit, key=lambda name: by_limit[name])
