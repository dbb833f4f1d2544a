"""Shared by rules about the host: calls that make it wait for a device, its own work, and counts of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSE_CODES, TABLES
from stepscope.diagnosis.finding import Remedy
from stepscope.diagnosis.rule import InServing
from stepscope.diagnosis.view import View
from stepscope.trace.naming import cause_of_name
from stepscope.trace.nesting import Rows, inherit
from stepscope.trace.program_facts import StepFacts
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_cause, together

Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to wait.

    Attributes:
        what: the call, as the subject of a sentence.
        remedy: what to do instead; "{every}" is replaced by a number of steps, "{torch}" by torch.cuda or
            torch.accelerator.
        serving: the remedy where an engine serves or a loop generates.
    """

    what: str
    remedy: Remedy
    serving: InServing | None = None

    def told_for(self, view: View, every: int = 100) -> Kind:
        """The kind with its words filled in for the view's device, with values read every `every` steps."""

        def filled(text: str) -> str:
            return text.replace("{every}", str(every)).replace("{torch}", view.torch_device)

        remedy = replace(self.remedy, text=filled(self.remedy.text), code=filled(self.remedy.code))
        if self.serving is not None and view.serves:
            remedy = self.serving.remedy(view)
        return Kind(filled(self.what), remedy)


_READ_LATER: Final = InServing(
    "Leave what is read on the device, tokens above all, and begin the next iteration; read it while that runs.",
    "overlap",
    "tokens.append(next_token)              # stays on the device\n"
    "if len(tokens) % 16 == 0 and (next_token == end).all():\n    break                              # rarely",
)
INPUTS_AHEAD: Final = InServing(
    "Copy what an iteration needs from pinned memory, without waiting.",
    "inputs",
    "tokens = tokens.pin_memory().to(device, non_blocking=True)",
)
KINDS: Final[dict[str, Kind]] = {
    "print": Kind(
        "printing or logging a tensor",
        Remedy(
            "Log every {every} steps, and keep the values on the device meanwhile.",
            "if step % {every} == 0:\n    print(step, loss.item())\n"
            "# or each of them, without making any step wait:\n"
            "from stepscope.remedies import DeferredScalars\n"
            "scalars = DeferredScalars(print)        # or a SummaryWriter, or wandb; scalars.close() at the end\n"
            "scalars.add(step, loss=loss)",
            apply=("deferred-logging",),
        ),
        _READ_LATER,
    ),
    "before_optimizer": Kind(
        "a value read between the backward pass and the optimizer's step",
        Remedy(
            "Let the optimizer's work be launched before anything is read: a fused optimizer takes GradScaler's "
            "verdict on the device, clip_grad_norm_ needs no .item(), and the norm can be read after the step.",
            "optimizer = torch.optim.AdamW(model.parameters(), fused=True)       # for GradScaler\n"
            "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)      # stays on the device\n"
            "optimizer.step()\n"
            "if step % {every} == 0:\n    print(norm.item())",
            apply=("fuse-optimizer", "clip-in-one-pass"),
        ),
    ),
    "in_optimizer": Kind(
        "a value that the optimizer's step reads",
        Remedy(
            "Keep the optimizer's own numbers on the device.",
            "optimizer = torch.optim.AdamW(model.parameters(), fused=True)       # or capturable=True",
            apply=("fuse-optimizer",),
        ),
    ),
    "item": Kind(
        ".item()",
        Remedy(
            "Keep the value on the device and read it rarely, or after the step.",
            "running_loss += loss.detach()          # no .item(): stays on the device\n"
            "if step % 100 == 0:\n    print(running_loss.item() / 100)\n"
            "# or, to log it, without a step that waits:\n"
            "from stepscope.remedies import DeferredScalars\n"
            "scalars = DeferredScalars(print)        # or a SummaryWriter, or wandb; scalars.close() at the end\n"
            "scalars.add(step, loss=loss)",
            apply=("deferred-logging",),
        ),
        _READ_LATER,
    ),
    "boolean_indexing": Kind(
        "indexing with a mask",
        Remedy(
            "tensor[mask] must know how many elements are chosen: use the mask without changing the shape.",
            "loss = torch.where(mask, per_token_loss, 0).sum() / mask.sum()   # instead of per_token_loss[mask]",
        ),
    ),
    "shape": Kind(
        "an operator whose output size depends on values",
        Remedy(
            "nonzero(), masked_select() and unique() must know how many elements there are: use a fixed size, with a "
            "mask for what is not there.",
            "chosen = torch.nonzero_static(mask, size=most)      # or torch.where(mask, values, 0)",
        ),
    ),
    "copy_out": Kind(
        "a copy to the host",
        Remedy(
            "Copy without waiting, and read the result when it is needed.",
            'host = tensor.to("cpu", non_blocking=True)   # pinned memory, then synchronise once before reading',
        ),
        _READ_LATER,
    ),
    "copy_in": Kind(
        "a copy to the device from pageable memory",
        Remedy(
            "Copy from pinned memory without waiting.",
            "loader = DataLoader(dataset, ..., pin_memory=True)\nbatch = batch.to(device, non_blocking=True)\n"
            "# or, the next batches while this one computes:\n"
            "from stepscope.remedies import prefetch_to_device\n"
            "for batch in prefetch_to_device(loader, device):\n    ...",
            apply=("pin-memory", "non-blocking"),
        ),
        INPUTS_AHEAD,
    ),
    "synchronous_copy": Kind(
        "a synchronous copy",
        Remedy(
            "Copy with the asynchronous call, from or to pinned memory, and wait only where the result is read.",
            "batch = batch.pin_memory().to(device, non_blocking=True)      # cudaMemcpyAsync instead of cudaMemcpy",
            apply=("pin-memory", "non-blocking"),
        ),
        INPUTS_AHEAD,
    ),
    "device": Kind(
        "{torch}.synchronize()",
        Remedy(
            "Remove {torch}.synchronize() from the step, or keep it for measuring only.",
            "# {torch}.synchronize()   <- drains the queues in every step",
        ),
    ),
    "queue": Kind(
        "waiting for a queue or an event",
        Remedy(
            "Let the device wait instead of the host; read the time between two events after the last step.",
            "{torch}.current_stream().wait_event(event)      # instead of event.synchronize()",
        ),
        _READ_LATER,
    ),
}
"""By key; the first kind that fits applies, but "copy_in" takes precedence over the operator's name."""

ITEM: Final = "^aten::(item|_local_scalar_dense|is_nonzero)$"
SHAPE: Final = "^aten::(nonzero|masked_select|unique.*|_unique2)$"
MASK: Final = "^aten::(index|index_put_|_index_put_impl_)$"
_COPY: Final = "^aten::(_?to|_to_copy|copy_|cpu)$"
_SYNCHRONOUS: Final = r"^(?:cuda|hip)Memcpy(?:2D|3D)?$|^cuMemcpy(?:DtoH|HtoD)(?:_v2)?$"
_DEVICE: Final = "DeviceSynchronize|CtxSynchronize"


def kinds_of(view: View, calls: pl.DataFrame) -> pl.Series:
    """The kind of each call, a key of KINDS.

    Args:
        calls: columns launch (row in launches), start_ns, name, operator (row in operators), in order of time.
    """
    slices = view.activity.slices_of("launches")[calls["launch"].to_numpy().astype(np.int64)]
    causes = view.activity.cause_of(slices)
    logging = outermost_logging(view)
    direct = view.trace.operators["name"].gather(calls["operator"])
    frame = calls.select("name", operator=direct).with_columns(
        copies_in=pl.Series(causes == CAUSE_CODES["host_to_device_copy"], dtype=pl.Boolean),
        logs=pl.Series(((slices >= 0) & (logging[slices] >= 0)) | _on_logging_line(view, calls), dtype=pl.Boolean),
        masks=pl.Series(_inside(view, calls["operator"], MASK), dtype=pl.Boolean),
        before=pl.Series(_before_optimizer(view, calls), dtype=pl.Boolean),
        within=pl.Series(_in_optimizer(view, slices), dtype=pl.Boolean),
    )
    name, operator = pl.col("name"), pl.col("operator")
    kinds = {
        "copy_in": pl.col("copies_in"),
        "print": pl.col("logs"),
        "in_optimizer": pl.col("within"),
        "before_optimizer": pl.col("before"),
        "boolean_indexing": pl.col("masks"),
        "item": operator.str.contains(ITEM),
        "shape": operator.str.contains(SHAPE),
        "synchronous_copy": name.str.contains(_SYNCHRONOUS),
        "copy_out": operator.str.contains(_COPY),
        "device": name.str.contains(_DEVICE),
    }
    kind = pl.coalesce(*(pl.when(fits).then(pl.lit(key)) for key, fits in kinds.items()), pl.lit("queue"))
    return frame.select(kind=kind)["kind"]


def _on_logging_line(view: View, calls: pl.DataFrame) -> Mask:
    """Which calls' operators are on a line of the user's code that logs, where the logged values are computed."""
    place = pl.when(pl.col("source_line").is_not_null()).then(pl.format("{}:{}", "source_file", "source_line"))
    places = view.trace.operators.select(place=place)["place"]
    logging = places.filter(view.trace.operators["name"].str.starts_with("stepscope.logging#")).drop_nulls().unique()
    result: Mask = places.gather(calls["operator"]).is_in(logging.implode()).fill_null(False).to_numpy()
    return result


def _inside(view: View, operators: pl.Series, pattern: str) -> Mask:
    """Which of these rows of `operators`, null for none, have a matching name or run inside such an operator."""
    known = operators.cast(pl.Int64).fill_null(-1).to_numpy()
    rows = np.flatnonzero(view.trace.operators["name"].str.contains(pattern).to_numpy())
    if not len(rows):
        return np.zeros(len(known), np.bool_)
    result: Mask = (known >= 0) & view.inside(rows)[np.maximum(known, 0)]
    return result


def _in_optimizer(view: View, slices: Rows) -> Mask:
    """Which slices run inside an optimizer's step but not in a closure that it calls."""
    annotations = view.trace.annotations["name"].str.starts_with("Optimizer.step#").to_numpy()
    activity = view.activity
    own = np.full(len(activity.row), -1, np.int64)
    mine = np.flatnonzero(activity.table == TABLES.index("annotations"))
    steps = mine[annotations[activity.row[mine]]]
    own[steps] = 1
    if not steps.size:
        return slices < -1
    inside = np.where(slices >= 0, inherit(own, activity.around)[np.maximum(slices, 0)] > 0, False)
    backward = np.sort(_backward_ends(view))
    starts, ends = np.sort(activity.start[steps]), np.sort(activity.end[steps])
    closures = (np.searchsorted(backward, ends) - np.searchsorted(backward, starts)) > 0
    step = np.searchsorted(starts, activity.start[np.maximum(slices, 0)], side="right") - 1
    result: Mask = inside & ~closures[np.maximum(step, 0)]
    return result


def _before_optimizer(view: View, calls: pl.DataFrame) -> Mask:
    """Which calls come between the last backward operator and the next optimizer step."""
    backward = np.sort(_backward_ends(view))
    steps = view.trace.annotations.filter(pl.col("name").str.starts_with("Optimizer.step#"))["start_ns"].sort()
    starts = calls["start_ns"].to_numpy()
    if not len(backward) or steps.is_empty():
        return starts < -1
    following = np.searchsorted(steps.to_numpy(), starts, side="left")
    step = np.append(steps.to_numpy(), -1)[following]
    ended = np.searchsorted(backward, starts, side="right")
    same_pass = ended == np.searchsorted(backward, step, side="right")
    previous_step = np.append(-1, steps.to_numpy())[following]
    since_step = np.searchsorted(backward, previous_step, side="right")
    result: Mask = (step >= 0) & same_pass & (ended > since_step)
    return result


def _backward_ends(view: View) -> Rows:
    engine = view.trace.operators.filter(pl.col("name").str.starts_with("autograd::engine"))
    ends: Rows = (engine["start_ns"] + engine["duration_ns"]).to_numpy()
    return ends


BACKWARD_NODE: Final = "autograd::engine::evaluate_function"
"""Prefix of the engine's name for running a node. Values read directly inside are not the program's: anomaly detection
checks whether they are NaN."""


_REDUCER: Final = r"^torch(\.|::)distributed(\.ddp\.|::)reducer::"
"""Names that DistributedDataParallel's reducer gives its own work."""


_EVERY: Final = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def every_steps(cost_ns: int, length_ns: int, share: float) -> int:
    """Smallest round number of steps between logs that keeps logging within this share of the rest."""
    wanted = math.ceil(cost_ns / (share * max(length_ns - cost_ns, 1)))
    return next((number for number in _EVERY if number >= wanted), _EVERY[-1])


def reads_of_reducer(view: View) -> Rows:
    """Rows in `operators` of values that DistributedDataParallel itself reads.

    Its search for unused parameters reads whether any rank used each one: `used[number].item()` on the line of the
    backward pass.
    """
    place = pl.format("{}:{}", "source_file", "source_line")
    operators = view.trace.operators.with_row_index("row").select(
        "row", "name", "lane", "start_ns", "parent", place=place
    )
    lines = operators.filter(pl.col("name").str.contains(_REDUCER))["place"].drop_nulls().unique()
    if lines.is_empty():
        return np.zeros(0, np.int64)
    outermost = operators.filter(pl.col("parent").is_null()).sort("lane", "start_ns", maintain_order=True)
    found = outermost.with_columns(before=pl.col("name").shift(1).over("lane")).filter(
        (pl.col("name") == "aten::item") & (pl.col("before") == "aten::select") & pl.col("place").is_in(lines.implode())
    )
    return found["row"].to_numpy().astype(np.int64)


def outermost_logging(view: View) -> Rows:
    """For each slice, the outermost logging call around it or itself, -1 for none."""
    activity = view.activity
    is_logging = np.zeros(len(activity.row), np.bool_)
    for code, table in enumerate(TABLES):
        names = view.trace.table(table)["name"]
        wanted = names.is_in([name for name in names.unique() if cause_of_name(name) == "logging"]).to_numpy()
        mine = np.flatnonzero(activity.table == code)
        is_logging[mine] = wanted[activity.row[mine]]
    inside = inherit(np.where(is_logging, 1, -1), activity.around) > 0
    around = activity.around
    is_inner = (around >= 0) & inside[np.maximum(around, 0)]
    rows = np.arange(len(inside))
    return inherit(np.where(is_logging & ~is_inner, rows, -1), around)


HOST_WORK: Final = (
    "python", "dispatch", "optimizer", "compute", "untraced", "garbage_collection", "logging", "graph_tracing",
    "step_marker",
)  # fmt: skip
"""Causes of time that the launching thread spent on its own work."""


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Sums of the operating system's counts over the complete steps of the span.

    Attributes:
        length_ns: wall time of the steps.
    """

    steps: tuple[StepFacts, ...]
    length_ns: int

    def total(self, figure: Callable[[StepFacts], int | None]) -> int | None:
        known = [value for step in self.steps if (value := figure(step)) is not None]
        return sum(known) if known and len(known) == len(self.steps) else None

    def per_step(self, figure: Callable[[StepFacts], int | None]) -> float | None:
        total = self.total(figure)
        return None if total is None else total / len(self.steps)

    def share(self, ns: int) -> float:
        """A time as a share of the counted steps' wall time, 0 to 1."""
        return min(ns / self.length_ns, 1.0) if self.length_ns else 0.0


def host_counts(view: View) -> HostCounts | None:
    """The counts of the complete steps; None if the recording has none."""
    wanted = set(view.complete_steps["index"].to_list())
    steps = tuple(step for step in view.program.steps if step.index in wanted and step.duration_ns > 0)
    return HostCounts(steps, sum(step.duration_ns for step in steps)) if steps else None


def host_work_ns(view: View) -> int:
    """Time in the span spent on the launching thread's own work; with a device, the device's idle time during it."""
    return int(view.pieces_of(*HOST_WORK)["duration_ns"].sum())


def scaled_host_work(factor: float) -> Change:
    """Multiply the time of the threads' own work; "compute" is left out, because without a device it is dispatch."""
    return together(*(scaled_cause(cause, factor) for cause in HOST_WORK if cause != "compute"))
