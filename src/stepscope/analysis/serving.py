"""Iterations of an engine that serves a model, or of a loop that generates: prefill, decode and what is put aside.

An iteration is one pass of the model over a batch of requests. Engines mark them with ranges of their own; without
ranges, the engine's function that runs one tells them, then the calls of the model inside a function that generates,
then the lookups of token embeddings. `data/engines.toml` lists the names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from stepscope.trace import Trace
from stepscope.trace.nesting import conformed, parents

ITERATION_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "phase": pl.String,  # one of PHASES; null if unknown
    "requests": pl.Int64,  # in this iteration; null if unknown
    "tokens": pl.Int64,  # processed, of all requests; null if unknown
    "captured_size": pl.Int64,  # of a captured graph, in requests or tokens
    "engine": pl.String,  # "" for a loop of no known engine
    "source": pl.String,  # "annotation", or "inferred" from functions or operators
}
PHASES: Final = ("prefill", "decode", "mixed", "capture", "warm_up")
PUT_ASIDE: Final = ("capture", "warm_up")
"""Phases in which nothing is served."""
_MODES: Final = {
    "EXTEND": "prefill",
    "SPLIT_PREFILL": "prefill",
    "PREFILL": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "decode",
    "DRAFT_EXTEND": "decode",
    "MIXED": "mixed",
    "IDLE": "idle",
}
_SHAPES: Final = r"^\[\[(?P<entries>\d+),\s*\d+\],\s*\[(?P<first>\d+)(?:,\s*(?P<second>\d+))?\]"
"""Shapes of a lookup of embeddings: the table's, then that of the indices: (tokens,) or (requests, tokens each)."""
_FEWEST: Final = 4
"""Fewest lookups that make a loop: one of a prompt, then three of a single token for each request."""
_OF_TRAINING: Final = (
    r"^autograd::engine|Backward\d*$|^aten::_fused_(?:adam|sgd|adagrad)"
    r"|^Optimizer\.|^OptimizerStep|optimizer_step|^backward$"
)
_NEARLY_ALL: Final = 0.8
"""A function that takes this share of the iterations is looked into."""
_WORTH_NAMING: Final = 0.05
_MOST_FUNCTIONS: Final = 5
_CAPTURES: Final = r"^(?:cuda|hip|cu)StreamBeginCapture"


class Engine(msgspec.Struct, frozen=True):
    """One engine of data/engines.toml."""

    name: str
    files: str
    operators: str = ""
    modules: str = ""
    ranges: tuple[str, ...] = ()
    iteration: str = ""
    prefill: str = ""
    decode: str = ""
    loop: str = ""
    reserves: bool = False
    batches: bool = False
    options: Mapping[str, str] = {}


class _Engines(msgspec.Struct, frozen=True):
    warm_up: str
    capture: str
    engines: tuple[Engine, ...]


@cache
def _known() -> _Engines:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = files("stepscope").joinpath("data/engines.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Engines)


def engine_called(name: str) -> Engine:
    """The engine of this name; for an unknown one, an engine without options."""
    return next((each for each in _known().engines if each.name == name), Engine(name, ""))


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """The iterations of one phase; medians, None where the trace does not tell.

    Attributes:
        phase: one of PHASES; "" if unknown.
        total_ns: of the host.
        host_ns: from an iteration's start to its end on the host, which may end before the device does.
        device_ns: for the work launched in an iteration, each moment once.
        launches: calls that launch work, in an iteration.
        graph_share: share of the iterations that launch a graph, 0 to 1.
    """

    phase: str
    count: int
    total_ns: int
    host_ns: int
    device_ns: int | None
    requests: float | None
    tokens: float | None
    launches: float
    graph_share: float


@dataclass(frozen=True, slots=True)
class FunctionShare:
    """A Python function in iterations of one phase; `share` is of the host's time in them, 0 to 1."""

    function: str
    file: str
    share: float


@dataclass(frozen=True, slots=True)
class ServingSummary:
    """What was served in a recording.

    Attributes:
        phases: without what was put aside, the longest in total first.
        put_aside: captures and warm-up.
        time_per_output_token_ns: median time from one decoding iteration's start to the next; None with fewer than two.
        time_to_first_token_ns: median time from a prefill's start to the start of the iteration after it, which begins
            with its token; None if none follows.
        most_requests: in one iteration.
        captured_sizes: of the graphs that were captured in the recording.
        functions: which Python functions take the host's time in the iterations of the first phase, longest first.
    """

    engine: str
    source: str
    phases: tuple[PhaseSummary, ...]
    put_aside: tuple[PhaseSummary, ...]
    time_per_output_token_ns: int | None
    time_to_first_token_ns: int | None
    most_requests: int | None
    captured_sizes: tuple[int, ...]
    functions: tuple[FunctionShare, ...] = ()


def iteration_table(trace: Trace) -> pl.DataFrame:
    """Iterations of the thread with most of them, in order; columns as in ITERATION_SCHEMA.

    Iterations of an idle engine, which have no requests, are left out.
    """
    rows = _marked(trace)
    for find in (_of_functions, _of_calls, _of_lookups):
        if rows.is_empty():
            rows = find(trace)
    if rows.is_empty():
        return pl.DataFrame(schema=dict(ITERATION_SCHEMA))
    rows = rows.filter(pl.col("lane") == rows["lane"].mode().min()).sort("start_ns")
    rows = rows.with_columns(phase=_with_put_aside(trace, rows)).filter(pl.col("phase").ne_missing("idle"))
    engine = engine_of(trace) or next(filter(None, rows["engine"]), "")  # captures have the same ranges everywhere
    return conformed(rows.with_columns(engine=pl.lit(engine)), ITERATION_SCHEMA)


def _of_lookups(trace: Trace) -> pl.DataFrame:
    """Iterations of a loop that generates: from one lookup of tokens to the next, mostly of one token a request."""
    lookups = _lookups(trace)
    if lookups.height < _FEWEST or trains(trace):
        return lookups.clear()
    lookups = lookups.filter(pl.col("lane") == lookups["lane"].mode().min())
    single = lookups["each"] == 1
    if single.sum() * _FEWEST < lookups.height * (_FEWEST - 1) or not (lookups["each"] > 1).any():
        return lookups.clear()
    own = trace.operators.filter(pl.col("lane") == lookups["lane"][0])
    last = int((own["start_ns"] + own["duration_ns"]).max())
    until = pl.col("start_ns").shift(-1, fill_value=last)
    return lookups.with_columns(
        duration_ns=until - pl.col("start_ns"), engine=pl.lit(""), source=pl.lit("inferred"), captured_size=None
    )


def is_within_an_answer(operators: pl.DataFrame) -> bool:
    """Whether these operators decode, and at most one prompt is read: nothing of an answer has ended."""
    each = _lookups_of(operators)["each"]
    return bool((each == 1).any()) and int((each > 1).sum()) < 2


def _lookups(trace: Trace) -> pl.DataFrame:
    """Lookups of tokens in the largest table of embeddings, with phase, requests and tokens by their shapes."""
    return _lookups_of(trace.operators)


def _lookups_of(operators: pl.DataFrame) -> pl.DataFrame:
    rows = operators.filter(pl.col("name") == "aten::embedding", pl.col("input_shapes").is_not_null())
    shapes = pl.col("input_shapes").str.extract_groups(_SHAPES)
    rows = rows.with_columns(shapes).unnest("input_shapes")
    rows = rows.cast(dict.fromkeys(("entries", "first", "second"), pl.Int64))
    rows = rows.filter(pl.col("entries") == pl.col("entries").max()).sort("start_ns")
    each = pl.col("second")
    return rows.select(
        "lane",
        "start_ns",
        each=each,
        phase=pl.when(each == 1).then(pl.lit("decode")).when(each > 1).then(pl.lit("prefill")),
        requests=pl.when(each.is_not_null()).then("first"),
        tokens=pl.col("first") * each.fill_null(1),
    )


def _with_lookups(rows: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Iterations with the phase, requests and tokens of the first lookup of tokens in them."""
    found = _lookups(trace).select("lane", "phase", "requests", "tokens", at="start_ns")
    rows = rows.sort("start_ns").join_asof(
        found, left_on="start_ns", right_on="at", by="lane", strategy="forward", check_sortedness=False
    )
    inside = pl.col("at") < _end()
    told = {name: pl.when(inside).then(name) for name in ("phase", "requests", "tokens")}
    return rows.with_columns(**told, captured_size=pl.lit(None, pl.Int64))
