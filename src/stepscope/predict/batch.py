"""The same step with another batch size: which input dimensions are the batch, how work scales with it, and the memory
that the step needs.

Activations begin with the batch: [batch, channels, ...], [batch, tokens, features], and, where a layer flattens tokens
and samples, [batch * tokens, features]. Weights do not. So the batch is the size with which nearly all inputs of
convolutions, linear layers, attention and embeddings begin. With another batch, every size that is the batch, or the
batch times further leading sizes of an activation, scales with it. In a matrix product, either the rows are the batch's
(forward, and for the gradient of the input) or the inner dimension is (for the gradient of the weight, whose shape the
result has).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.batch_size import batch_size_of
from stepscope.analysis.blocks import FIXED, contradictory_totals, memory_levels
from stepscope.analysis.memory import DeviceMemory, alive_table, device_memories
from stepscope.analysis.work import Shape, base_name, call_of
from stepscope.analysis.work_formulas import CONVOLUTIONS, SIZES_FROM_PARENT
from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks
from stepscope.predict.operations import Numbers
from stepscope.predict.trace_operations import CalledOperations, in_optimizer, launching_operators
from stepscope.trace import Trace, Window
from stepscope.trace.program_facts import ProgramFacts
from stepscope.trace.telemetry import Telemetry

AGREEING: Final = 0.9  # share of the layers' calls that must begin with the same size for it to be the batch
LARGEST: Final = 10**9
SHORTEST: Final = 0.1  # quantile of recorded kernels' durations below which no smaller batch takes one
_WEIGHT_OF: Final = {
    "linear": 1, "embedding": 0,
    **{name: one.weight for name, one in CONVOLUTIONS.items() if name not in SIZES_FROM_PARENT},
}  # fmt: skip
"""Input position of the weight, by layer."""
_ANCHORS: Final = {
    "linear": 0, "embedding": 1, "scaled_dot_product_attention": 0, "conv1d": 0, "conv2d": 0, "conv3d": 0,
}  # fmt: skip
"""Input position that begins with the batch, by layer; inputs with a single dimension are left out."""
_PRODUCTS: Final = {"mm": (0, 1), "addmm": (1, 2)}
_Shapes = list[Shape | None]


@dataclass(frozen=True, slots=True)
class BatchChange:
    recorded: int
    wanted: int

    @property
    def factor(self) -> float:
        return self.wanted / self.recorded


def recorded_batch(trace: Trace) -> int | None:
    """Batch size of the recorded steps, from the data loaders or else from the layers' inputs; None where unknown."""
    return batch_size_of(trace) or _leading_size(trace)


def passes_of_a_step(trace: Trace, steps: int, span: Window) -> float | None:
    """Number of forward passes per step, from the least called layer; None where the trace shows no layer.

    Args:
        steps: number of steps in the span.
    """
    inside = pl.col("start_ns").is_between(span.start_ns, span.end_ns, closed="left")
    names = [f"aten::{name}" for name in _ANCHORS]
    calls = trace.operators.filter(pl.col("name").is_in(names) & pl.col("input_shapes").is_not_null() & inside)
    counts = calls.group_by("name", "input_shapes").len()["len"]
    return int(counts.to_numpy().min()) / steps if len(counts) else None


def batch_change(trace: Trace, wanted: int, recorded: int | None = None) -> BatchChange:
    """Describe the change from the recorded batch size to another one.

    Args:
        recorded: batch size given by the user, which overrides the trace's.

    Raises:
        UsageError: the recorded batch size is unknown, or no layer of the trace works on such a batch.
    """
    known = recorded or recorded_batch(trace)
    if known is None:
        raise UsageError(
            "the trace does not show its batch size, since no single size begins the inputs of nearly all layers: give "
            "it with --recorded-batch M (record_shapes=True records shapes)"
        )
    if not any(size % known == 0 for size in _leading_sizes(trace)):
        raise UsageError(
            f"no layer of the trace has an input that begins with the batch size {known}, or a multiple of it, so its "
            "growth is unknown (record_shapes=True records shapes)"
        )
    return BatchChange(known, wanted)


def with_batch(trace: Trace, change: BatchChange) -> Trace:
    """Copy the trace with operator shapes for another batch size; times and everything else stay."""
    sizes = _BatchSizes(trace, change)
    columns = ["name", "input_shapes", "input_types"]
    distinct = trace.operators.select(columns).filter(pl.col("input_shapes").is_not_null()).unique(maintain_order=True)
    texts = [sizes.rescaled(*row) for row in distinct.iter_rows()]
    changed = distinct.with_columns(rescaled=pl.Series(texts, dtype=pl.String))
    operators = trace.operators.join(changed, on=columns, how="left", nulls_equal=True, maintain_order="left")
    operators = operators.with_columns(input_shapes=pl.coalesce("rescaled", "input_shapes")).drop("rescaled")
    tables = {name: trace.table(name) for name in ("lanes", "launches", "device_work", "annotations")}
    return Trace.from_tables({**tables, "operators": operators}, trace.metadata)


def _leading_sizes(trace: Trace) -> Counter[int]:
    names = [f"aten::{name}" for name in _ANCHORS]
    calls = trace.operators.filter(pl.col("name").is_in(names) & pl.col("input_shapes").is_not_null())
    found: Counter[int] = Counter()
    for name, shapes, types, calls_of in calls.group_by("name", "input_shapes", "input_types").len().iter_rows():
        call = call_of(shapes, types, None)
        shape = None if call is None else call.shape(_ANCHORS[base_name(name)])
        if shape and len(shape) > 1 and shape[0] > 0:
            found[shape[0]] += calls_of
    return found


def _leading_size(trace: Trace) -> int | None:
    sizes = _leading_sizes(trace)
    if not sizes:
        return None
    size, calls = max(sizes.items(), key=lambda item: (item[1], -item[0]))
    return size if calls >= AGREEING * sizes.total() else None


class _BatchSizes:
    """Dimensions that are the batch, found from the shapes of a whole trace."""

    def __init__(self, trace: Trace, change: BatchChange) -> None:
        self._change = change
        columns = ["name", "input_shapes", "input_types"]
        self._distinct = trace.operators.select(columns).drop_nulls("input_shapes").unique(maintain_order=True)
        self._leading = _leading_sizes(trace)

    @cached_property
    def _weights(self) -> frozenset[Shape]:
        """Weight shapes, each also with its two dimensions swapped."""
        found: set[Shape] = set()
        for name, shapes, types in self._distinct.iter_rows():
            place = _WEIGHT_OF.get(base_name(name))
            call = call_of(shapes, types, None) if place is not None else None
            shape = None if call is None or place is None else call.shape(place)
            if shape and len(shape) > 1:
                found.update({shape, shape[::-1]} if len(shape) == 2 else {shape})
        return frozenset(found)

    @cached_property
    def _sizes(self) -> frozenset[int]:
        """The batch, and the batch times trailing activation dimensions (batch * tokens, batch * heads)."""
        recorded = self._change.recorded
        found = {recorded, *(size for size in self._leading if size % recorded == 0)}
        for _, shapes, types in self._distinct.iter_rows():
            call = call_of(shapes, types, None)
            for shape in map(call.shape, range(len(call.shapes))) if call is not None else ():
                if shape and len(shape) > 2 and shape not in self._weights:
                    if shape[0] == recorded:
                        found.update(_prefixes(shape))
                    elif self._is_second and shape[1] == recorded:
                        found.add(shape[0] * shape[1])
        return frozenset(found)

    @cached_property
    def _is_second(self) -> bool:
        """Whether layers take inputs of which the batch is the second size, after the positions of a sequence."""
        recorded = self._change.recorded
        for name, shapes, types in self._distinct.iter_rows():
            call = call_of(shapes, types, None) if base_name(name) in _ANCHORS else None
            shape = None if call is None else call.shape(_ANCHORS[base_name(name)])
            if shape and len(shape) == 3 and shape[1] == recorded and shape[0] % recorded:
                return True
        return False

    def rescaled(self, name: str, shapes: str, types: str | None) -> str:
        call = call_of(shapes, types, None)
        if call is None:
            return shapes
        parsed = json.loads(shapes)
        short = base_name(name)
        places = _PRODUCTS.get(short)
        found: _Shapes = [call.shape(index) for index in range(len(parsed))]
        if places is not None and all(len(found[place] or ()) == 2 for place in places):
            changed = self._product(found, *places)
        elif short in _WEIGHT_OF:
            changed = [self._of_layer(shape, short, place) for place, shape in enumerate(found)]
        else:
            changed = [self._activation(shape) for shape in found]
        return json.dumps([self._written(before, new) for before, new in zip(parsed, changed, strict=True)])

    def _written(self, before: Any, new: Shape | None) -> Any:
        if new is not None:
            return list(new)
        if isinstance(before, list) and before and all(isinstance(one, list) for one in before):
            return [list(self._activation(_shape(one)) or one) for one in before]
        return before

    def _of_layer(self, shape: Shape | None, layer: str, place: int) -> Shape | None:
        """Scale a layer's input by its position, since a weight may have the same shape."""
        is_bias = shape is not None and len(shape) < 2 and layer != "embedding"
        return shape if not shape or is_bias or place == _WEIGHT_OF[layer] else self._grown(shape)

    def _activation(self, shape: Shape | None) -> Shape | None:
        return shape if not shape or shape in self._weights else self._grown(shape)

    def _grown(self, shape: Shape) -> Shape:
        if shape[0] in self._sizes:
            return (self._scaled(shape[0]), *shape[1:])
        if self._is_second and len(shape) > 2 and shape[1] in self._sizes:
            return (shape[0], self._scaled(shape[1]), *shape[2:])
        return shape

    def _product(self, shapes: _Shapes, first: int, second: int) -> _Shapes:
        """Scale a product of two matrices, whose batch is in its rows or in its inner dimension."""
        (rows, inner), (_, columns) = shapes[first] or (0, 0), shapes[second] or (0, 0)
        result = list(shapes)
        is_gradient = (rows, columns) in self._weights and inner in self._sizes
        if is_gradient and not (rows in self._sizes and (inner, columns) in self._weights):
            result[first], result[second] = (rows, self._scaled(inner)), (self._scaled(inner), columns)
        elif rows in self._sizes:
            result[first] = (self._scaled(rows), inner)
        return result

    def _scaled(self, size: int) -> int:
        return max(round(size * self._change.wanted / self._change.recorded), 1)


def _shape(sizes: list[Any]) -> Shape | None:
    return tuple(sizes) if all(type(size) is int and 0 <= size < LARGEST for size in sizes) else None


def _prefixes(shape: Shape) -> Iterable[int]:
    return (prod(shape[:end]) for end in range(1, len(shape)) if prod(shape[:end]) < LARGEST)


@dataclass(frozen=True, slots=True)
class Growth:
    """Factors on the time of works; arrays in the row order of `device_work`."""

    expected: Numbers
    low: Numbers
    high: Numbers
    is_known: npt.NDArray[np.bool_]  # whether shapes or the kind of work give the factor


class BatchGrowth:
    """Effect of another batch size on a trace's device work.

    Args:
        recorded: the trace's operator calls.
    """

    def __init__(self, trace: Trace, recorded: CalledOperations, change: BatchChange) -> None:
        self._trace, self._recorded, self._change = trace, recorded, change
        self.grown_trace = with_batch(trace, change)
        self._grown = CalledOperations(self.grown_trace)

    def on(self, target: DevicePeaks, precision: str | None) -> Growth:
        work, factor = self._trace.device_work, self._change.factor
        kind = work["kind"].fill_null("other").to_numpy()
        expected = np.where(kind == "copy_in", factor, np.ones(len(kind)))
        low, high = expected.copy(), expected.copy()
        in_optimizers = np.append(in_optimizer(self._trace), False)[launching_operators(self._trace)]
        stays = in_optimizers | np.isin(kind, ("communication", "copy_out"))
        known = stays | (kind == "copy_in")
        ratios = self._ratios(target, precision)
        chosen = ~known & np.isfinite(ratios[0])
        for array, ratio in zip((expected, low, high), ratios, strict=True):
            array[chosen] = ratio[chosen]
        known = known | chosen
        duration = work["duration_ns"].to_numpy().astype(np.float64)
        computing = known & ~stays & (kind != "copy_in")
        total = float(duration[computing].sum())
        mean = float((expected * duration)[computing].sum() / total) if total else factor
        expected[~known], low[~known], high[~known] = mean, min(mean, 1.0), max(mean, factor, 1.0)
        if factor < 1 and computing.any():  # no kernel becomes shorter than the shortest ones that were recorded
            least = np.quantile(duration[kind == "compute"], SHORTEST) / np.maximum(duration, 1.0)
            for array in (expected, high):
                np.maximum(array, np.minimum(least, 1.0), out=array, where=kind == "compute")
        return Growth(expected, low, high, known)

    def _ratios(self, target: DevicePeaks, precision: str | None) -> tuple[Numbers, Numbers, Numbers]:
        """Time of known operators at the new batch size over the recorded one: expected, low and high."""
        call = self._recorded.of_work
        if not len(self._recorded.operations):
            nothing = np.full(len(call), np.nan)
            return nothing, nothing, nothing
        before, after = (each.times_in(precision, target) for each in (self._recorded, self._grown))
        # A batch r times as large takes at most as long as ceil(r) batches of the recorded size in sequence;
        # within that bound the ratio may be as wrong as the model is.
        ends = min(1.0, 1 / np.ceil(1 / self._change.factor)), max(1.0, np.ceil(self._change.factor))
        ratio = np.clip(after.ns / before.ns, *ends)
        low = np.clip(ratio * after.low_ns / after.ns, *ends)
        high = np.clip(ratio * after.high_ns / after.ns, *ends)
        same = self._grown.operations.bytes == self._recorded.operations.bytes
        low, high = np.where(same, ratio, np.minimum(low, ratio)), np.where(same, ratio, np.maximum(high, ratio))
        place = np.maximum(call, 0)
        found = tuple(np.where(call >= 0, one[place], np.nan) for one in (ratio, low, high))
        return found[0], found[1], found[2]


KEPT_FREE: Final = 0.1  # share of a device's memory kept free, as in `stepscope batch-size`


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Device memory that a step needs."""

    bytes: int | None  # peak allocated bytes; None where unknown
    at_least: bool  # whether the need is larger, since allocations before the recording are unknown
    note: str  # source of the figure, or why it is missing, in a sentence

    def fits(self, device: DevicePeaks) -> bool | None:
        """Whether a device has enough memory, KEPT_FREE aside; None where unknown."""
        if self.bytes is None or device.memory_bytes is None:
            return None
        has_room = self.bytes <= device.memory_bytes * (1 - KEPT_FREE)
        return None if has_room and self.at_least else has_room


def memory_need(
    trace: Trace, device: str | None, *, batch_factor: float = 1.0, sampled_bytes: int | None = None
) -> MemoryNeed:
    """Memory that a step of the trace needs on another device.

    Args:
        device: the trace's device whose memory counts; None for a CPU trace.
        batch_factor: new batch size over the recorded one.
        sampled_bytes: from `sampled_memory`, for a trace without allocations.
    """
    wanted = "cpu" if device is None else device
    levels = memory_levels(trace).filter(pl.col("device") == wanted)
    if levels.is_empty() and sampled_bytes is not None:
        note = "the device's peak memory in use while the program ran, including its allocator's reserve"
        grown = "; all of it is assumed to grow with the batch" if batch_factor != 1.0 else ""
        return MemoryNeed(round(sampled_bytes * batch_factor), False, note + grown)
    if levels.is_empty():
        how = ": record with profile_memory=True" if trace.metadata.format == "kineto" else ""
        return MemoryNeed(None, False, f"memory was not recorded{how}")
    if batch_factor == 1.0:
        peak, constant = int(levels["allocated_bytes"].to_numpy().max()), 0
    else:
        memory = next(each for each in device_memories(trace) if each.device == wanted)
        peak, constant = memory.peak_bytes, _constant_bytes(memory)
    program = trace.metadata.program or ProgramFacts()
    before = 0
    recorded = trace.memory.filter(device=wanted)["total_allocated"].null_count() == 0
    is_total = wanted != "cpu" and recorded and wanted not in contradictory_totals(trace)
    if not is_total and program.model is not None:
        model = program.model
        parts = (model.parameter_bytes, model.buffer_bytes, model.optimizer_state_bytes)
        before = sum(part for part in parts if part is not None)
    needed = round((peak - constant) * batch_factor) + constant + before
    at_least = not is_total and not before
    return MemoryNeed(needed, at_least, _note(is_total, bool(before), batch_factor))


def sampled_memory(telemetry: Telemetry, device: str | None) -> int | None:
    """Peak memory in use on a device by a run's telemetry; None without samples of that device alone.

    Args:
        device: the device's name in the trace.
    """
    used = telemetry.samples.filter((pl.col("source") == "device") & (pl.col("name") == "memory_used_bytes"))
    used = used.filter(pl.col("value").is_finite() & pl.col("value").is_between(0, 2**62))
    chosen = used.filter(pl.col("device") == device) if used["device"].n_unique() > 1 else used
    if device is None or chosen.is_empty():
        return None
    return int(chosen["value"].to_numpy().max())


def _constant_bytes(memory: DeviceMemory) -> int:
    """Bytes alive at the peak that do not grow with the batch; 0 where blocks have no categories."""
    if not memory.blocks.height:
        return 0
    stays = alive_table(memory, "category").filter(pl.col("category").is_in(FIXED))["bytes"]
    return min(int(stays.sum()), memory.peak_bytes)


def _note(is_total: bool, with_model: bool, batch_factor: float) -> str:
    text = "the peak of allocated memory"
    if not is_total and with_model:
        text += " while recording, with what the model and its optimizer hold"
    elif not is_total:
        text += " while recording; what was allocated before is unknown and adds to it"
    if batch_factor != 1.0:
        text += "; everything but parameters, gradients and the optimizer's state grows with the batch"
    return text
