"""Operators: number of calls, host and device time, and allocations; device work by name, and how it was launched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from stepscope.analysis.captured import graph_operators
from stepscope.analysis.host import host_activity
from stepscope.analysis.steps import span_of, step_table
from stepscope.errors import UsageError
from stepscope.trace import Trace
from stepscope.trace.naming import DEFAULT_USER_CODE, TELLING, UserCode, first_match, name_patterns
from stepscope.trace.nesting import Rows, at, by_level, depths, innermost_at, nullable, row_numbers

OPERATOR_GROUPINGS: Final = ("name", "input_shapes", "stack")

COST_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "host_self_ns": pl.Int64,  # without nested operators
    "device_self_ns": pl.Int64,  # work launched by the operator itself
    "device_total_ns": pl.Int64,  # including work launched by nested operators
    "bytes_allocated": pl.Int64,  # without nested operators
}


def operator_costs(trace: Trace) -> pl.DataFrame:
    """Cost of each operator call: one row per row of `operators`, in order; columns as in COST_SCHEMA."""
    operators = trace.operators
    duration = operators["duration_ns"].to_numpy()
    parent = row_numbers(operators["parent"])
    children = np.zeros(len(duration), np.int64)
    inside = parent >= 0
    np.add.at(children, parent[inside], duration[inside])
    device = _device_self_ns(trace)
    return pl.DataFrame(
        {
            "host_self_ns": np.maximum(duration - children, 0),
            "device_self_ns": device,
            "device_total_ns": with_inner(device, parent),
            "bytes_allocated": _bytes_allocated(trace),
        }
    )


def with_inner(values: Rows, parent: Rows) -> Rows:
    """Each operator's value plus those of all nested operators; shape (n,)."""
    total: Rows = values.copy()
    for rows in reversed(by_level(depths(parent))[1:]):
        np.add.at(total, parent[rows], total[rows])
    return total


def _device_self_ns(trace: Trace) -> Rows:
    work = trace.device_work.filter(pl.col("launch").is_not_null())
    operator = row_numbers(trace.launches["operator"].gather(work["launch"]))
    result = np.zeros(trace.operators.height, np.int64)
    np.add.at(result, operator[operator >= 0], work["duration_ns"].to_numpy()[operator >= 0])
    return result


def _bytes_allocated(trace: Trace) -> Rows:
    memory = trace.memory.filter(pl.col("bytes") > 0)
    result = np.zeros(trace.operators.height, np.int64)
    rows = innermost_operators(trace, memory)
    np.add.at(result, rows[rows >= 0], memory["bytes"].to_numpy()[rows >= 0])
    return result


def innermost_operators(trace: Trace, events: pl.DataFrame) -> Rows:
    """Row of the innermost operator around each event, by lane and start_ns; -1 for none."""
    if trace.operators.is_empty():
        return np.full(events.height, -1, np.int64)
    lanes, starts, durations = (trace.operators[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
    parent = row_numbers(trace.operators["parent"])
    asked = events["lane"].to_numpy(), events["start_ns"].to_numpy()
    return innermost_at(*asked, lanes, starts, durations, parent)


def operator_table(
    trace: Trace,
    *,
    group_by: Sequence[str] = ("name",),
    costs: pl.DataFrame | None = None,
    steps: pl.DataFrame | None = None,
    user_code: UserCode = DEFAULT_USER_CODE,
) -> pl.DataFrame:
    """Group operators, costliest first.

    Args:
        group_by: any of "name", "input_shapes" and "stack" (the user's line as "file(line): function" where the
            recording kept lines, else the user's innermost frame, else the call stack).
        user_code: which files are the user's.

    Returns:
        The grouping columns, then calls, calls_per_step (in complete steps; null without steps), host_total_ns,
        host_self_ns, host_self_share (of all operators' self time, 0 to 1), device_total_ns, device_self_ns,
        device_self_share, bytes_allocated. Totals include nested operators, so they do not add up to the whole.
        The device's time includes kernels of graphs whose capture tells their operator; those calls are not counted.

    Raises:
        UsageError: a grouping is unknown.
    """
    check_groupings("operators", group_by, OPERATOR_GROUPINGS)
    rows = pl.concat([trace.operators, operator_costs(trace) if costs is None else costs], how="horizontal")
    if "stack" in group_by:
        rows = rows.with_columns(stack=_user_frames(trace, user_code))
    rows = pl.concat([rows, *_in_graphs(trace, rows.schema)])
    steps = (step_table(trace) if steps is None else steps).filter(pl.col("complete"))
    table = rows.group_by(list(group_by)).agg(
        calls=pl.col("start_ns").count(),
        calls_per_step=calls_in_steps(steps, pl.col("start_ns")),
        host_total_ns=pl.col("duration_ns").sum(),
        host_self_ns=pl.col("host_self_ns").sum(),
        device_total_ns=pl.col("device_total_ns").sum(),
        device_self_ns=pl.col("device_self_ns").sum(),
        bytes_allocated=pl.col("bytes_allocated").sum(),
    )
    table = table.with_columns(
        host_self_share=share_of_sum("host_self_ns"), device_self_share=share_of_sum("device_self_ns")
    )
    order = "device_self_ns" if trace.device_work.height else "host_self_ns"
    columns = [
        *group_by, "calls", "calls_per_step", "host_total_ns", "host_self_ns", "host_self_share", "device_total_ns",
        "device_self_ns", "device_self_share", "bytes_allocated",
    ]  # fmt: skip
    return table.select(columns).sort(
        [order, "host_self_ns", *group_by], descending=[True, True, *[False] * len(group_by)]
    )


def _in_graphs(trace: Trace, schema: pl.Schema) -> list[pl.DataFrame]:
    """Rows of operators without a call for the kernels that they put into graphs; columns as in `schema`."""
    found = graph_operators(trace)
    if found is None:
        return []
    times = trace.device_work.select(device_self_ns="duration_ns", device_total_ns="duration_ns")
    rows = pl.concat(
        [found.rename({"graph_operator": "name", "graph_shapes": "input_shapes"}), times], how="horizontal"
    )
    zero = pl.lit(0, pl.Int64)
    rows = rows.filter(pl.col("name").is_not_null()).with_columns(
        duration_ns=zero, host_self_ns=zero, bytes_allocated=zero
    )
    missing = [pl.lit(None).alias(name) for name in schema.names() if name not in rows.columns]
    return [rows.with_columns(missing).select(pl.col(name).cast(kind) for name, kind in schema.items())]


def check_groupings(things: str, group_by: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in group_by if name not in known]
    if unknown or not group_by:
        raise UsageError(f"{things} can be grouped by {', '.join(known)}, not by {', '.join(unknown) or 'nothing'}")


def calls_in_steps(steps: pl.DataFrame, time: pl.Expr) -> pl.Expr:
    """Expression for the number of calls with `time` in these steps per step; null without steps."""
    span = span_of(steps)
    if span is None:
        return pl.lit(None, pl.Float64)
    return time.is_between(span.start_ns, span.end_ns, closed="left").sum() / steps.height


def share_of_sum(column: str) -> pl.Expr:
    """Expression for a column as a share of its sum, 0 to 1."""
    total = pl.col(column).sum()
    return pl.when(total > 0).then(pl.col(column) / total).otherwise(0.0)


def _user_frames(trace: Trace, user_code: UserCode) -> pl.Series:
    activity = host_activity(trace, user_code)
    slices = activity.slices_of("operators")
    names = trace.frames["name"].gather(nullable(at(activity.user_frame, slices)))
    line = pl.format("{}({}): {}", "source_file", "source_line", "source_function")
    return trace.operators.select(stack=pl.coalesce(line, names.alias("frame"), pl.col("call_stack")))["stack"]


KERNEL_GROUPINGS: Final = ("name", "kind", "device", "queue", "grid", "block")

_TENSOR_CORES: Final = re.compile(
    r"tensorop_|OpClassTensorOp|(?i:tensor_?core|[hib]mma|wgmma|xmma(?!.*ffma)|(?<![a-z])mma|s1688|s16816|h1688|h16816|"
    r"i8816|i16832|[shd]884|mfma|xdl|gtcx|Cijk_.*_MI\d|flash_?(?:fwd|bwd|attn|attention)|fmha|nvjet|tcgen05)"
)
MATRIX_KINDS: Final = ("matrix", "convolution", "attention", "experts")
"""Kinds of kernels that multiply matrices."""
_PRECISIONS: Final = {
    "fp4": r"(?i:(?:mx|nv)?e2m1_?(?:mx|nv)?e2m1|nvfp4|(?:mx)?fp4xmxfp4)",
    "fp8": r"(?i:fp8(?!kv)|e4m3|e5m2|float8)|nvjet_(?:sm\d+_)?q|_(?:[FB]8N?){1,2}_?[BHS]S_",
    "bf16": r"(?i:bf16|bfloat16)|DF16b|_B_?BS_|_BSS_|nvjet_(?:sm\d+_)?t",
    "fp16": r"(?i:half|fp16|(?<![b\d])f16|hgemm|h884|h1688|h16816|s884)|DF16_|_H_?HS_|_HSS_|_HBH_|nvjet_(?:sm\d+_)?h",
    "tf32": r"(?i:tf32|s1688|s16816gemm_f32)",
    "int8": r"(?i:int8|i8816|(?<![a-z])imma)|_s8_|s8s8",
    "fp64": r"(?i:double|dgemm|d884|f64)|_DB_",
    "fp32": r"(?i:float|sgemm|scudnn|f32|fp32|simt)|_SB_|_S_B_",
}
"""Number type -> its names in kernel names; the first match counts.

Weights of 4 bits count as the other input's type: times FP8 they take as long as FP8, times bf16 they are converted.
"""
_FOUR_BITS: Final = re.compile(r"(?i)e2m1|(?:mx|nv)?fp4|(?<![a-z])u?int4(?!\d)|w4a\d|(?<![a-z])awq")

LAUNCH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "works": pl.Int64,
    "works_without_launch": pl.Int64,
    "launch_calls": pl.Int64,
    "works_per_graph_launch": pl.Float64,  # mean; null without graph launches
    "shorter_than_launch": pl.Int64,  # works shorter than their launch call
    "launch_call_ns": pl.Float64,  # median duration of a call
    "launch_delay_ns": pl.Float64,  # median, from the start of the call to the start of the work
    "queue_depth": pl.Float64,  # time-weighted mean of launched but unfinished works
    "deepest_queue": pl.Int64,
}


class KernelClass(NamedTuple):
    """What a kernel's name says about it; "" for what the name does not say.

    Attributes:
        kind: "matrix", "convolution", "attention", "experts", "normalisation", "elementwise" and the like.
        library: such as "cuDNN", "hipBLASLt" or "FlashInfer".
        algorithm: such as "Winograd", "split-K" or "paged attention".
    """

    kind: str
    library: str
    algorithm: str


@lru_cache(maxsize=65536)
def kernel_class(name: str) -> KernelClass:
    """Kind, library and algorithm of a kernel by its name."""
    tables, name = name_patterns("kernels.tsv"), name[:TELLING]
    kind = first_match(tables["kind"], name)
    algorithms = tables.get(f"algorithm of {kind}", []) + tables["algorithm"]
    return KernelClass(kind, first_match(tables["library"], name), first_match(algorithms, name))


class Arithmetic(NamedTuple):
    """Arithmetic implied by a kernel's name; None where the name does not show it."""

    precision: str | None
    tensor_cores: bool | None
    is_matrix: bool


@lru_cache(maxsize=65536)
def arithmetic(name: str) -> Arithmetic:
    """Parse number type, tensor core use and whether it is a matrix product from a kernel's name."""
    name = name[:TELLING]
    is_matrix = kernel_class(name).kind in MATRIX_KINDS
    precision = next((word for word, pattern in _PRECISIONS.items() if re.search(pattern, name)), None)
    uses = True if _TENSOR_CORES.search(name) else (False if is_matrix and precision in ("fp32", "fp64") else None)
    return Arithmetic(precision, uses if is_matrix or uses else None, is_matrix)


@lru_cache(maxsize=65536)
def has_four_bits(name: str) -> bool:
    """Whether a kernel's name says that it multiplies by numbers of 4 bits, such as weights in MXFP4."""
    return kernel_class(name).kind in MATRIX_KINDS and _FOUR_BITS.search(name[:TELLING]) is not None


def kernel_table(
    trace: Trace,
    *,
    group_by: Sequence[str] = ("name",),
    steps: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Group device work, costliest first.

    Args:
        group_by: any of "name", "kind", "device", "queue", "grid" and "block".

    Returns:
        The grouping columns, then calls, calls_per_step (null without steps), total_ns, share (of all device work,
        0 to 1), mean_ns, deviation_ns (standard deviation), shortest_ns, longest_ns, launch_delay_ns (median, from
        the launch call's start to the work's; null if no launch is known), shorter_than_launch (works shorter than
            their launch call); where grouped by name also precision, tensor_cores, is_matrix, from the name.

    Raises:
        UsageError: an unknown grouping.
    """
    check_groupings("kernels", group_by, KERNEL_GROUPINGS)
    work = _with_launch(trace)
    steps = (step_table(trace) if steps is None else steps).filter(pl.col("complete"))
    table = (
        work.group_by(list(group_by))
        .agg(
            calls=pl.len(),
            calls_per_step=calls_in_steps(steps, pl.coalesce("launch_start_ns", "start_ns")),
            total_ns=pl.col("duration_ns").sum(),
            mean_ns=pl.col("duration_ns").mean(),
            deviation_ns=pl.col("duration_ns").std(ddof=0),
            shortest_ns=pl.col("duration_ns").min(),
            longest_ns=pl.col("duration_ns").max(),
            launch_delay_ns=(pl.col("start_ns") - pl.col("launch_start_ns")).median(),
            shorter_than_launch=(pl.col("duration_ns") < pl.col("launch_duration_ns")).sum(),
        )
        .with_columns(share=share_of_sum("total_ns"))
    )
    columns = [
        *group_by, "calls", "calls_per_step", "total_ns", "share", "mean_ns", "deviation_ns", "shortest_ns",
        "longest_ns", "launch_delay_ns", "shorter_than_launch",
    ]  # fmt: skip
    table = table.select(columns).sort(["total_ns", *group_by], descending=[True, *[False] * len(group_by)])
    if "name" not in group_by:
        return table
    found = [arithmetic(name) for name in table["name"]]
    schema = {"precision": pl.String, "tensor_cores": pl.Boolean, "is_matrix": pl.Boolean}
    return pl.concat([table, pl.DataFrame(found, schema=schema, orient="row")], how="horizontal")


def _with_launch(trace: Trace) -> pl.DataFrame:
    calls = trace.launches.select(launch_start_ns="start_ns", launch_duration_ns="duration_ns", launch_kind="kind")
    return trace.device_work.join(calls.with_row_index("launch"), on="launch", how="left", maintain_order="left")


def launch_table(trace: Trace) -> pl.DataFrame:
    """Launch statistics, one row per device; columns as in LAUNCH_SCHEMA."""
    rows = []
    for (device,), mine in _with_launch(trace).group_by("device", maintain_order=True):
        launched = mine.filter(pl.col("launch").is_not_null())
        graph = launched.filter(pl.col("launch_kind") == "graph_launch")
        mean_depth, deepest = _queue_depth(launched)
        rows.append(
            {
                "device": device,
                "works": mine.height,
                "works_without_launch": mine.height - launched.height,
                "launch_calls": launched["launch"].n_unique(),
                "works_per_graph_launch": graph.height / graph["launch"].n_unique() if graph.height else None,
                "shorter_than_launch": launched.filter(pl.col("duration_ns") < pl.col("launch_duration_ns")).height,
                "launch_call_ns": launched["launch_duration_ns"].median(),
                "launch_delay_ns": (launched["start_ns"] - launched["launch_start_ns"]).median(),
                "queue_depth": mean_depth,
                "deepest_queue": deepest,
            }
        )
    return pl.DataFrame(rows, schema=dict(LAUNCH_SCHEMA)).sort("device")


def _queue_depth(launched: pl.DataFrame) -> tuple[float, int]:
    """Time-weighted mean and maximum of launched but unfinished works."""
    if launched.is_empty():
        return 0.0, 0
    begin = launched["launch_start_ns"].to_numpy()
    end = np.maximum((launched["start_ns"] + launched["duration_ns"]).to_numpy(), begin)
    times = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(begin), np.int64), -np.ones(len(end), np.int64)])
    order = np.lexsort((change, times))
    depth = np.cumsum(change[order])
    span = int(times.max() - times.min())
    return (float((end - begin).sum()) / span if span else 0.0), int(depth.max())


_ELIGIBLE: Final = re.compile(
    r"^(?:"
    r"aten::(?:_?(?:scaled|grouped|scaled_grouped|int)_mm|mm|bmm|addmm_?|_addmm_activation|baddbmm_?|addbmm_?|matmul|linear"
    r"|_?(?:cudnn|miopen|mps|mkldnn)_(?:convolution|rnn)\w*|miopen_depthwise_convolution\w*|_?convolution\w*|conv(?:_transpose)?[123]d"
    r"|_?slow_conv\w*|_?thnn_conv\w*|_convolution_double_backward"
    r"|_?scaled_dot_product_\w*attention\w*|_?(?:flash|efficient|cudnn|fused|flex)_attention\w*)"
    r"|flash_attn\w*::\w+|xformers\w*::\w*attention\w*"
    r")$"
)


@lru_cache(maxsize=65536)
def is_eligible(operator: str) -> bool:
    """Whether tensor cores can run an operator of this type: matrix products, convolutions, attention."""
    return _ELIGIBLE.match(operator) is not None


_LAUNCHED_WITH: Final = ("grid", "block", "registers", "shared_memory_bytes", "occupancy")


def described_work(trace: Trace) -> pl.DataFrame:
    """Device work with the operator that launched it and the arithmetic in the kernel's name.

    Returns:
        Columns work (row in device_work), name, device, queue, kind, launch, start_ns, duration_ns, grid, block,
        registers, shared_memory_bytes, occupancy; row (in operators; null for a graph's kernels that its capture tells
        of),
        operator, input_shapes, input_types, is_eligible (as `is_eligible`), null without an operator; and the fields of
            `Arithmetic`.
    """
    operators = trace.operators.select(operator="name", input_shapes="input_shapes", input_types="input_types")
    launching = trace.launches.select(row="operator").with_row_index("launch")
    work = (
        trace.device_work.select(
            "name", "device", "queue", "kind", "launch", "start_ns", "duration_ns", *_LAUNCHED_WITH
        )
        .with_row_index("work")
        .join(launching, on="launch", how="left", maintain_order="left")
        .join(operators.with_row_index("row"), on="row", how="left", maintain_order="left")
        .with_columns(pl.col("row").cast(pl.Int64))
    )
    in_graphs = graph_operators(trace)
    if in_graphs is not None:
        new = zip(("operator", "input_shapes", "input_types"), in_graphs.columns, strict=True)
        work = work.with_columns(
            pl.when(in_graphs[in_graphs.columns[0]].is_null()).then("row").alias("row"),
            *(pl.coalesce(in_graphs[column], name).alias(name) for name, column in new),
        )
    told = pl.DataFrame(
        [(name, *arithmetic(name)) for name in work["name"].unique().to_list()],
        schema={"name": pl.String, "precision": pl.String, "tensor_cores": pl.Boolean, "is_matrix": pl.Boolean},
        orient="row",
    )
    eligible = [name for name in work["operator"].drop_nulls().unique().to_list() if is_eligible(name)]
    return work.join(told, on="name", how="left", maintain_order="left").with_columns(
        is_eligible=pl.col("operator").is_in(eligible)
    )


_KEYS: Final = ("name", "grid", "block")
_ANONYMOUS: Final = re.compile(r"\(anonymous namespace\)|<unnamed>|\(anonymous\)|\{anonymous\}")
_CAST: Final = re.compile(
    r"\((?:unsigned |signed )?(?:bool|char|short|int|long|long long|float|double|[\w:]+)\)(?=-?\d)"
)
_SUFFIX: Final = re.compile(r"(?<=\d)(?:ull|ul|u|ll|l)\b", re.IGNORECASE)
_WORDS: Final = {"true": "1", "false": "0"}


@dataclass(frozen=True)
class Joined:
    """Counters joined to a trace's device work."""

    counters: pl.DataFrame  # one row per row of device_work; the counters of its launch, else null
    measured: int  # measured launches
    matched: int  # rows of device_work with counters
    ambiguous: int  # rows whose kernel was measured, but without a unique measurement for each
    lost: int  # measured launches whose kernel is not in the trace


def join_counters(trace: Trace, launches: pl.DataFrame) -> Joined:
    """Match measurements of kernel launches to the trace's kernels.

    Kernels are the same if their names without parameters and their grid and block sizes are equal. If the trace has as
    many launches of a kernel as were measured, or a whole multiple (the same step several times), they match in order.
    With any other number the match is ambiguous, and they get no counters.

    Args:
        launches: name, grid and block ("x,y,z") and counters, in order, as from `read_ncu`.
    """
    names = [column for column in launches.columns if column not in _KEYS]
    measured = _keyed(launches).with_row_index("launch")
    work = _keyed(trace.device_work.select("start_ns", *_KEYS)).with_row_index("row")
    sized = measured["size"].null_count() == 0
    keys = ["kernel", "size"] if sized else ["kernel"]
    counts = measured.group_by(keys).agg(measured=pl.len())
    found = work.join(counts, on=keys, how="left", maintain_order="left", nulls_equal=True)
    place = pl.int_range(pl.len()).over(keys)
    fits = pl.len().over(keys) % pl.col("measured") == 0
    found = found.with_columns(place=place % pl.col("measured"), fits=fits)
    orders = measured.select(*keys, *names, place=place, fits=pl.lit(True))
    joined = found.join(orders, on=[*keys, "place", "fits"], how="left", maintain_order="left", nulls_equal=True)
    known = measured.join(work.select(keys).unique(), on=keys, how="semi", nulls_equal=True)
    was_measured = found.filter(pl.col("measured").is_not_null())["fits"]
    matched = int(was_measured.sum())
    return Joined(
        joined.select(names), measured.height, matched, len(was_measured) - matched, measured.height - known.height
    )


def _keyed(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the columns kernel and size, which identify a kernel."""
    names = frame["name"].unique()
    keys = [kernel_key(name or "") for name in names]
    kernels = pl.DataFrame({"name": names, "kernel": pl.Series(keys, dtype=pl.String)})
    numbers = pl.col("grid", "block").str.extract_all(r"\d+").list.join(",")  # tools separate the numbers differently
    size = pl.concat_str(numbers, separator=" ")
    return frame.join(kernels, on="name", how="left", maintain_order="left").with_columns(size=size)


@lru_cache(maxsize=65536)
def kernel_key(name: str) -> str:
    """Normalise a kernel's name across tools: without parameters, return type, blanks and casts."""
    text = _CAST.sub("", _ANONYMOUS.sub("{}", name.strip()))
    text = _SUFFIX.sub("", _without_parameters(text))
    text = re.sub(r"\b(?:true|false)\b", lambda match: _WORDS[match[0]], text)
    return re.sub(r"\s+", "", text.removeprefix("void ")).removesuffix(".kd")


def _without_parameters(text: str) -> str:
    """Text up to the parenthesis outside of all angle brackets."""
    depth = 0
    for place, letter in enumerate(text):
        if letter == "<":
            depth += 1
        elif letter == ">" and text[place - 1 : place] != "-":
            depth -= 1
        elif letter == "(" and depth <= 0 and place:
            return text[:place]
    return text


def with_counters(table: pl.DataFrame, trace: Trace, joined: Joined, *, group_by: Sequence[str]) -> pl.DataFrame:
    """Add each counter's time-weighted mean over the launches that have it to a kernel table; null if none has it."""
    work = pl.concat([trace.device_work, joined.counters], how="horizontal")
    names = joined.counters.columns
    means = [
        ((pl.col(name) * pl.col("duration_ns")).sum() / pl.col("duration_ns").filter(pl.col(name).is_not_null()).sum())
        .fill_nan(None)
        .alias(name)
        for name in names
    ]
    found = work.group_by(list(group_by)).agg(means)
    return table.join(found, on=list(group_by), how="left", maintain_order="left", nulls_equal=True)
