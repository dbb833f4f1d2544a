"""Iterations of an engine that serves a model, or of a loop that generates: prefill, decode and what is put aside.

An iteration is one pass of the model over a batch of requests. Engines mark them with ranges of their own; without
ranges, the engine's function that runs one tells them, then the calls of the model inside a function that generates,
then the lookups of token embeddings. `data/engines.toml` lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from stepscope.files import shipped
from stepscope.trace import Trace
from stepscope.trace.nesting import conformed, parents

ITERATION_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "phase": pl.String,  # one of PHASES; null if unknown
    "requests": pl.Int64,  # in this iteration; null if unknown
    "tokens": pl.Int64,  # processed, of all requests; null if unknown
    "context": pl.Int64,  # tokens that all decoded requests had before this iteration; null if unknown
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
    "MIXED": "mixed",
    "IDLE": "idle",
}
_NO_ITERATIONS: Final = ("idle", "draft")
_SHAPES: Final = r"^\[\[(?P<entries>\d+),\s*\d+\],\s*\[(?P<first>\d+)(?:,\s*(?P<second>\d+))?\]"
"""Shapes of a lookup of embeddings: the table's, then that of the indices: (tokens,) or (requests, tokens each)."""
_ONE_ATTENDS: Final = r"^\[\[1, \d+, (?P<new>\d+), \d+\], \[1, \d+, (?P<keys>\d+), \d+\]"
"""Shapes of queries and keys of one request: (requests, heads, tokens, size of a head)."""
_FEWEST: Final = 4
"""Fewest lookups that make a loop: one of a prompt, then three of a single token for each request."""
_OF_TRAINING: Final = (
    r"^autograd::engine|Backward\d*$|^aten::_fused_(?:adam|sgd|adagrad)"
    r"|^Optimizer\.|^OptimizerStep|optimizer_step|^backward$"
)
_MOST_DIGITS: Final = 15
_NEARLY_ALL: Final = 0.8
"""A function that takes this share of the iterations is looked into."""
_WORTH_NAMING: Final = 0.05
_MOST_FUNCTIONS: Final = 5
_CAPTURES: Final = r"^(?:cuda|hip|cu)StreamBeginCapture"


class Engine(msgspec.Struct, frozen=True):
    """One engine of data/engines.toml."""

    name: str
    files: str = ""
    operators: str = ""
    modules: str = ""
    ranges: tuple[str, ...] = ()
    captures: str = "requests"
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
    drafting: str
    drafting_functions: str
    verifying: str
    engines: tuple[Engine, ...]


def _known() -> _Engines:
    return shipped("engines.toml", _Engines)


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
    fewest_requests: int | None
    most_requests: int | None
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
        captured_sizes: of the graphs that were captured in the recording.
        functions: which Python functions take the host's time in the iterations of the first phase, longest first.
    """

    engine: str
    source: str
    phases: tuple[PhaseSummary, ...]
    put_aside: tuple[PhaseSummary, ...]
    time_per_output_token_ns: int | None
    time_to_first_token_ns: int | None
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
    rows = rows.with_columns(phase=_with_put_aside(trace, rows))
    rows = rows.filter(~pl.col("phase").is_in(_NO_ITERATIONS).fill_null(False))
    engine = engine_of(trace) or next(filter(None, rows["engine"]), "")  # captures have the same ranges everywhere
    return conformed(rows.with_columns(engine=pl.lit(engine)), ITERATION_SCHEMA)


def trains(trace: Trace) -> bool:
    """Whether a backward pass or an optimizer's step was recorded."""
    operators, annotations = trace.operators["name"], trace.annotations["name"]
    return bool(operators.str.contains(_OF_TRAINING).any() or annotations.str.contains(_OF_TRAINING).any())


def engine_of(trace: Trace) -> str:
    """The engine whose files, operators or models the trace holds; "" for none."""
    program = trace.metadata.program
    seen = program.model_calls.files if program is not None and program.model_calls is not None else ()
    names = {
        "files": pl.concat([trace.frames["file"].unique(), pl.Series(seen, dtype=pl.String)]),
        "operators": trace.operators["name"].unique(),
        "modules": trace.modules["name"].unique(),
    }
    for engine in _known().engines:
        patterns = ((of, getattr(engine, what)) for what, of in names.items())
        if any(pattern and of.str.contains(pattern).any() for of, pattern in patterns):
            return engine.name
    return ""


def iteration_costs(trace: Trace, iterations: pl.DataFrame) -> pl.DataFrame:
    """The iterations with `launches` and `graph_launches` (calls in each) and `device_ns` (null without a device).

    Args:
        iterations: as from `iteration_table`.
    """
    numbered = iterations.with_row_index("iteration")
    calls = _calls_in(trace, numbered)
    counts = calls.group_by("iteration").agg(
        launches=pl.len().cast(pl.Int64), graph_launches=(pl.col("kind") == "graph_launch").sum().cast(pl.Int64)
    )
    work = trace.device_work.join(calls.select("launch", "iteration"), on="launch").sort("iteration", "start_ns")
    earlier = _end().cum_max().shift(1).over("iteration").fill_null(0)
    alone = (_end() - pl.max_horizontal("start_ns", earlier)).clip(0)
    busy = work.with_columns(alone=alone).group_by("iteration").agg(device_ns=pl.col("alone").sum())
    found = numbered.join(counts, on="iteration", how="left").join(busy, on="iteration", how="left").sort("iteration")
    missing = pl.lit(None if trace.device_work.is_empty() else 0)
    return found.drop("iteration").with_columns(
        pl.col("launches", "graph_launches").fill_null(0), pl.col("device_ns").fill_null(missing).cast(pl.Int64)
    )


def work_launched_in(trace: Trace, ranges: pl.DataFrame) -> pl.DataFrame:
    """Rows of `device_work` that were launched in these ranges, in order of start.

    Columns row (of `device_work`), iteration (index of the range), in_graph, start_ns, duration_ns, name and grid.

    Args:
        ranges: columns lane, start_ns and duration_ns; of one lane, none reaches into another.
    """
    calls = _calls_in(trace, ranges.select("lane", "start_ns", "duration_ns").with_row_index("iteration"))
    calls = calls.select("launch", "iteration", in_graph=pl.col("kind") == "graph_launch")
    work = trace.device_work.with_row_index("row").join(calls, on="launch").sort("start_ns", "row")
    return work.select("row", "iteration", "in_graph", "start_ns", "duration_ns", "name", "grid")


def _calls_in(trace: Trace, ranges: pl.DataFrame) -> pl.DataFrame:
    """Calls that give the device work inside ranges with an `iteration`, with that and their row as `launch`."""
    spans = ranges.select("iteration", "lane", begin="start_ns", until=_end()).sort("begin")
    calls = trace.launches.with_row_index("launch").filter(
        pl.col("kind").is_in(["launch", "graph_launch", "copy", "set"])
    )
    calls = calls.sort("start_ns").join_asof(
        spans, left_on="start_ns", right_on="begin", by="lane", check_sortedness=False
    )
    return calls.filter(pl.col("start_ns") < pl.col("until"))


def drafting_ranges(trace: Trace) -> pl.DataFrame:
    """Ranges in which an engine drafts tokens, or else its functions that do, none inside another.

    Columns lane, start_ns, duration_ns.
    """
    named = pl.col("name").str.contains(_known().drafting)
    rows = trace.annotations.filter(named, pl.col("kind") == "host")
    if rows.is_empty():
        rows = trace.frames.filter(_place().str.contains(_known().drafting_functions))
    return outermost_of(rows.select("lane", "start_ns", "duration_ns"))


def verifies(trace: Trace) -> bool:
    """Whether kernels that accept or reject drafted tokens ran."""
    return bool(trace.device_work["name"].str.contains(_known().verifying).any())


def tokens_gained(iterations: pl.DataFrame) -> pl.DataFrame:
    """Decoding iterations with `gained`: tokens that their requests had more at the next iteration.

    Only those that another decoding iteration of as many requests follows, with more tokens than before but no more
    than were processed: else requests came or went in between.

    Args:
        iterations: as from `iteration_table`, with other columns if any.
    """
    rows = iterations.sort("start_ns").with_columns(gained=pl.col("context").shift(-1) - pl.col("context"))
    same = (pl.col("phase").shift(-1) == "decode") & (pl.col("requests").shift(-1) == pl.col("requests"))
    return rows.filter(
        same, pl.col("phase") == "decode", pl.col("gained").is_between(pl.col("requests"), pl.col("tokens"))
    )


def serving_summary(trace: Trace, iterations: pl.DataFrame | None = None) -> ServingSummary | None:
    """Summarise the iterations; None without any.

    Args:
        iterations: as from `iteration_costs`, if already known.
    """
    if iterations is None:
        iterations = iteration_costs(trace, iteration_table(trace))
    if iterations.is_empty():
        return None
    aside = pl.col("phase").is_in(PUT_ASIDE).fill_null(False)
    served = iterations.filter(~aside)
    later = served.with_columns(until_next=pl.col("start_ns").shift(-1) - pl.col("start_ns"))
    decodes = later.filter((pl.col("phase") == "decode") & (pl.col("phase").shift(-1) == "decode"))
    phases = _phases(served)
    first = served.filter(pl.col("phase").fill_null("") == phases[0].phase) if phases else served
    return ServingSummary(
        iterations["engine"][0],
        iterations["source"][0],
        phases,
        _phases(iterations.filter(aside)),
        _median_ns(decodes["until_next"]),
        _median_ns(later.filter(pl.col("phase") == "prefill")["until_next"]),
        tuple(iterations["captured_size"].drop_nulls().unique().sort()),
        _functions(first, trace.frames),
    )


def _functions(iterations: pl.DataFrame, frames: pl.DataFrame) -> tuple[FunctionShare, ...]:
    """The costliest functions at the first level of calls at which no single one takes nearly all of the iterations."""
    total = int(iterations["duration_ns"].sum())
    if frames.is_empty() or not total:
        return ()
    spans = iterations.select("lane", begin="start_ns", until=_end()).sort("begin")
    of_file = pl.col("file").is_not_null() | pl.col("module").is_not_null()
    frames = frames.with_row_index("row").filter(of_file, pl.col("lane") == iterations["lane"][0])
    frames = frames.with_columns(function=pl.coalesce("function", pl.col("module").str.replace(r"_\d+$", "")))
    frames = frames.sort("start_ns").join_asof(
        spans, left_on="start_ns", right_on="begin", by="lane", check_sortedness=False
    )
    frames = frames.filter(pl.col("start_ns") < pl.col("until"))
    level = outermost_of(frames)
    shares: list[FunctionShare] = []
    while level.height:
        times = level.group_by("function", "file").agg(ns=pl.col("duration_ns").sum(), rows=pl.col("row"))
        times = times.sort("ns", "function", "file", descending=[True, False, False])
        if shares and times["ns"][0] < _WORTH_NAMING * total:
            break
        shares = [FunctionShare(name, file or "", min(ns / total, 1.0)) for name, file, ns, _ in times.iter_rows()]
        if times["ns"][0] < _NEARLY_ALL * total:
            break
        level = frames.filter(pl.col("parent").is_in(times["rows"][0].implode()))
    return tuple(each for each in shares[:_MOST_FUNCTIONS] if each.share >= _WORTH_NAMING)


def _phases(rows: pl.DataFrame) -> tuple[PhaseSummary, ...]:
    sums = rows.group_by(pl.col("phase").fill_null("")).agg(
        count=pl.len(),
        total_ns=pl.col("duration_ns").sum(),
        host_ns=pl.col("duration_ns").median().cast(pl.Int64),
        device_ns=pl.col("device_ns").median().cast(pl.Int64),
        requests=pl.col("requests").median(),
        fewest_requests=pl.col("requests").min(),
        most_requests=pl.col("requests").max(),
        tokens=pl.col("tokens").median(),
        launches=pl.col("launches").median(),
        graph_share=(pl.col("graph_launches") > 0).mean(),
    )
    return tuple(PhaseSummary(*row) for row in sums.sort("total_ns", "phase", descending=[True, False]).iter_rows())


def _median_ns(durations: pl.Series) -> int | None:
    known = durations.drop_nulls().to_numpy()
    return int(np.median(known)) if known.size else None


def _marked(trace: Trace) -> pl.DataFrame:
    """Iterations that the engine marked; where one such range lies in another, the outer one."""
    known = _known()
    patterns = [(each.name, re.compile(pattern)) for each in known.engines for pattern in each.ranges]
    patterns.append(("", re.compile(known.capture)))
    anyone = "|".join(re.sub(r"\?P<\w+>", "", pattern.pattern) for _, pattern in patterns)
    on_host = trace.annotations.filter(pl.col("kind") == "host")
    if not on_host["name"].str.contains(anyone).any():
        return on_host.clear()
    patterns.insert(0, ("", re.compile(known.drafting)))  # a draft model's own iterations are inside
    marks = outermost_of(on_host.filter(pl.col("name").str.contains(f"{anyone}|{known.drafting}")))
    told = pl.DataFrame([_told(name, patterns) for name in marks["name"].unique()], schema=dict(_TOLD))
    return marks.join(told, on="name", how="left", maintain_order="left").with_columns(source=pl.lit("annotation"))


_TOLD: Final[dict[str, type[pl.DataType]]] = {
    "name": pl.String,
    **{name: ITERATION_SCHEMA[name] for name in ("engine", "phase", "requests", "tokens", "context", "captured_size")},
}


def _told(name: str, patterns: list[tuple[str, re.Pattern[str]]]) -> dict[str, Any]:
    """What a range's name says of its iteration."""
    engine, found = next((engine, found) for engine, pattern in patterns if (found := pattern.search(name)))
    groups = found.groupdict()
    if not groups:
        return {"name": name, "engine": engine, "phase": None if engine else "draft"}
    if any(value is not None and len(value) > _MOST_DIGITS for value in groups.values()):
        return {"name": name, "engine": engine}  # no engine wrote that
    number = {key: int(value) for key, value in groups.items() if value is not None and key != "mode"}
    if "size" in number:
        return {"name": name, "engine": engine, "phase": "capture", "captured_size": number["size"]}
    if groups.get("mode"):
        phase = _MODES.get(groups["mode"].upper())
        requests = number["requests"]
        tokens = number.get("tokens", requests if groups["mode"].upper() == "DECODE" else None)
        return {"name": name, "engine": engine, "phase": phase, "requests": requests, "tokens": tokens}
    context, generation = number["context"], number["generation"]
    phase = ("mixed" if generation else "prefill") if context else ("decode" if generation else "idle")
    both = [
        number.get("context_tokens") if context else 0,
        number.get("generation_tokens", generation if not context else None) if generation else 0,
    ]
    tokens = None if None in both else sum(each for each in both if each is not None)
    told = {"name": name, "engine": engine, "phase": phase, "requests": context + generation, "tokens": tokens}
    keys = number.get("generation_keys")
    return told if keys is None or not generation else {**told, "context": keys - number["generation_tokens"]}


def _with_put_aside(trace: Trace, rows: pl.DataFrame) -> pl.Series:
    """The phases, with captures and warm-up, which other calls inside and functions around the iterations show."""
    starts = rows["start_ns"].to_numpy()
    ends = starts + rows["duration_ns"].to_numpy()
    captures = trace.launches.filter(pl.col("name").str.contains(_CAPTURES))["start_ns"].sort().to_numpy()
    captured = np.searchsorted(captures, ends) > np.searchsorted(captures, starts)
    functions = trace.frames.filter(pl.col("function").str.contains(_known().warm_up))
    warm = np.zeros(len(starts), np.bool_)
    for begin, duration in functions.select("start_ns", "duration_ns").iter_rows():
        warm |= (starts >= begin) & (starts < begin + duration)
    named = pl.col("phase") == "capture"
    phase = pl.when(named | pl.Series(captured)).then(pl.lit("capture")).when(pl.Series(warm)).then(pl.lit("warm_up"))
    return rows.select(phase.otherwise("phase").alias("phase")).to_series()


def _of_functions(trace: Trace) -> pl.DataFrame:
    """Iterations by the engine's function that runs one, or the model's calls inside its function that generates."""
    engine = next((each for each in _known().engines if each.name == engine_of(trace)), None)
    if engine is None or not trace.frames.height:
        return trace.frames.clear()
    place = _place()
    rows = trace.frames.filter(place.str.contains(engine.iteration or engine.loop))
    if engine.loop:
        rows = _calls_inside(rows, trace.frames, drafting_ranges(trace))
    rows = _with_lookups(rows.with_columns(engine=pl.lit(engine.name), source=pl.lit("inferred")), trace)
    if engine.loop:  # without a cache, or with several tokens to check, later calls have more than one token
        again = pl.col("is_later") & (pl.col("phase") == "prefill")
        rows = rows.with_columns(phase=pl.when(again).then(pl.lit("decode")).otherwise("phase"))
    for phase, pattern in (("prefill", engine.prefill), ("decode", engine.decode)):
        if pattern and rows.height:
            has = _has_inside(rows, trace.frames.filter(place.str.contains(pattern)))
            rows = rows.with_columns(phase=pl.when(has).then(pl.lit(phase)).otherwise("phase"))
    return rows


def _place() -> pl.Expr:
    """A frame as "file: function"."""
    return pl.concat_str(pl.col("file"), pl.lit(": "), pl.col("function"))


def _has_inside(rows: pl.DataFrame, frames: pl.DataFrame) -> pl.Series:
    """Which of the rows, in order of start, are among these frames or have one inside."""
    begins = frames["start_ns"].sort().to_numpy()
    starts = rows["start_ns"].to_numpy()
    ends = starts + rows["duration_ns"].to_numpy()
    return pl.Series(np.searchsorted(begins, ends) > np.searchsorted(begins, starts))


def _calls_inside(loops: pl.DataFrame, frames: pl.DataFrame, drafts: pl.DataFrame) -> pl.DataFrame:
    """From each outermost call of a module inside a loop, and not of one that drafts, to the next one.

    The last call of a loop gets what usually follows one: behind it, a loop may do more, such as decode an image.
    """
    loops = outermost_of(loops).select("lane", loop=pl.int_range(pl.len()), begin="start_ns", end=_end()).sort("begin")
    calls = outermost_of(frames.filter(pl.col("module").is_not_null())).sort("start_ns")
    calls = calls.join_asof(loops, left_on="start_ns", right_on="begin", by="lane", check_sortedness=False)
    calls = calls.filter(pl.col("start_ns") < pl.col("end"))
    if drafts.height:
        drafts = drafts.select("lane", drafted="start_ns", until=_end()).sort("drafted")
        calls = calls.join_asof(drafts, left_on="start_ns", right_on="drafted", by="lane", check_sortedness=False)
        calls = calls.filter((pl.col("start_ns") >= pl.col("until")).fill_null(True)).drop("drafted", "until")
    most = calls["module"].mode().sort().first()
    calls = calls.filter(pl.col("module") == pl.lit(most, pl.String))
    following = pl.col("start_ns").shift(-1).over("loop")
    usual = (following - _end()).median().cast(pl.Int64)
    until = pl.coalesce(following, pl.min_horizontal(_end() + usual, "end"))
    is_later = pl.int_range(pl.len()).over("loop") > 0
    return calls.with_columns(duration_ns=until - pl.col("start_ns"), is_later=is_later)


def outermost_of(rows: pl.DataFrame) -> pl.DataFrame:
    """The slices among these that lie in no other of them."""
    if rows.is_empty():
        return rows
    around = parents(*(rows[name].to_numpy() for name in ("lane", "start_ns", "duration_ns")))
    return rows.filter(pl.Series(around < 0))


def _end() -> pl.Expr:
    return pl.col("start_ns") + pl.col("duration_ns")


def _of_calls(trace: Trace) -> pl.DataFrame:
    """Iterations by the recorder's look at the tokens of the model's calls, from each call to the next one."""
    program, origin = trace.metadata.program, trace.metadata.origin_unix_ns
    own = trace.operators.filter(pl.col("parent").is_null())
    if program is None or program.model_calls is None or origin is None or own.is_empty() or trains(trace):
        return trace.frames.clear()
    lane = own["lane"].mode().min()
    last = int((own["start_ns"] + own["duration_ns"]).max())
    rows = pl.DataFrame(program.model_calls.calls, schema=_CALLS, orient="row").with_columns(
        pl.col("start_ns") - origin
    )
    rows = rows.filter(pl.col("start_ns").is_between(int(own["start_ns"].min()), last))  # type: ignore[arg-type]
    if all(begun == requests for _, requests, begun, _ in program.model_calls.calls):  # no sequence is continued
        return rows.clear()
    is_decode = pl.col("tokens") == pl.col("requests")
    phase = (
        pl.when(is_decode).then(pl.lit("decode")).when(pl.col("begun") == pl.col("requests")).then(pl.lit("prefill"))
    )
    return rows.with_columns(
        lane=pl.lit(lane, pl.Int32),
        duration_ns=pl.col("start_ns").shift(-1, fill_value=last) - pl.col("start_ns"),
        phase=phase.otherwise(pl.lit("mixed")),
        context=pl.lit(None, pl.Int64),
        captured_size=pl.lit(None, pl.Int64),
        engine=pl.lit(""),
        source=pl.lit("inferred"),
    )


_CALLS: Final = {"start_ns": pl.Int64, "requests": pl.Int64, "begun": pl.Int64, "tokens": pl.Int64}


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
        duration_ns=until - pl.col("start_ns"),
        engine=pl.lit(""),
        source=pl.lit("inferred"),
        captured_size=None,
        context=None,
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
    rows = rows.cast(dict.fromkeys(("entries", "first", "second"), pl.Int64), strict=False)
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
    """Iterations with the phase, requests and tokens of the first lookup of tokens in them, and the context."""
    found = _lookups(trace).select("lane", "phase", "requests", "tokens", at="start_ns")
    rows = rows.sort("start_ns").join_asof(
        found, left_on="start_ns", right_on="at", by="lane", strategy="forward", check_sortedness=False
    )
    rows = rows.join_asof(
        _attentions(trace),
        left_on="start_ns",
        right_on="attends",
        by="lane",
        strategy="forward",
        check_sortedness=False,
    )
    inside = pl.col("at") < _end()
    told = {name: pl.when(inside).then(name) for name in ("phase", "requests", "tokens")}
    knows = inside & (pl.col("attends") < _end()) & (pl.col("requests") == 1) & (pl.col("new") == pl.col("tokens"))
    context = pl.when(knows).then(pl.col("keys") - pl.col("new"))
    return rows.with_columns(**told, context=context, captured_size=pl.lit(None, pl.Int64))


def _attentions(trace: Trace) -> pl.DataFrame:
    """Attention of one request: columns lane, attends (when it begins), new (tokens) and keys (tokens with those)."""
    rows = trace.operators.filter(pl.col("name") == "aten::scaled_dot_product_attention")
    shapes = rows.select("lane", "input_shapes", attends="start_ns").sort("attends")
    lengths = pl.col("input_shapes").str.extract_groups(_ONE_ATTENDS).struct
    columns = {name: lengths.field(name).cast(pl.Int64, strict=False) for name in ("new", "keys")}
    return shapes.select("lane", "attends", **columns).drop_nulls()
