"""Reader for Chrome traces of Intel Gaudi, written by its PyTorch bridge and its hardware tracer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from stepscope.readers import kineto
from stepscope.readers.assembly import Assembly, Spill
from stepscope.readers.gathering import warnings
from stepscope.readers.gaudi import columns as names
from stepscope.readers.gaudi.columns import DIALECT, HARDWARE, GaudiColumns
from stepscope.readers.kineto.events import EventStream
from stepscope.readers.kineto.scanned import Scan, scan
from stepscope.readers.source import ByteSource, Reader, ReadResult
from stepscope.trace.metadata import Device
from stepscope.trace.model import StoreWriter
from stepscope.trace.naming import FORWARD_BACKWARD_FLOWS
from stepscope.trace.tables import rows_frame
from stepscope.trace.window import StepRange, Window

_COPYING: Final = ("PDMA", "DMA")
"""Engines that copy between host and device."""
_NODE: Final = ("home", "recipe", "name", "node")


def with_launches(work: pl.DataFrame, calls: pl.DataFrame, flows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both tables with `correlation`, a number that a call shares with the work it launched.

    Work that one graph node does at the same time on several units of an engine is merged into one row. `flows` come
    from `Sorting._ends_of_flows`, or are empty.
    """
    work, calls = work.sort("start_ns", "row"), calls.sort("start_ns", "row")
    calls = calls.with_columns(correlation=pl.lit(None, pl.Int64))
    if flows.width and flows.height:
        work = joined_units(_by_flow(work, calls, flows))
        started = work["correlation"].drop_nulls().unique()
        calls = calls.with_columns(
            correlation=pl.when(pl.col("row").cast(pl.Int64).is_in(started.implode())).then(
                pl.col("row").cast(pl.Int64)
            )
        )
        return work, calls
    work = joined_units(work.with_columns(correlation=pl.lit(None, pl.Int64)))
    launching = calls.filter((pl.col("call") == "graph_launch") & pl.col("recipe").is_not_null())
    if launching.height and work.height:
        work = _by_recipe(work, launching)
    copies = calls.filter(pl.col("call") == "copy")
    work = _copies_in_order(work, copies)
    starts = pl.concat([launching["row"], copies["row"]])
    is_start = pl.col("row").is_in(starts.implode())
    return work, calls.with_columns(correlation=pl.when(is_start).then(pl.col("row").cast(pl.Int64)))


def joined_units(work: pl.DataFrame) -> pl.DataFrame:
    """Merge overlapping rows of the same node, call and engine into one, from the first start to the last end.

    An engine has several units, such as 24 TPCs, that work on parts of one node in parallel.
    """
    keys = [*_NODE, "correlation"]
    work = work.sort([*keys, "start_ns", "row"], nulls_last=True)
    end = pl.col("start_ns") + pl.col("duration_ns")
    same = pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in keys)
    before = end.cum_max().over(keys).shift(1)
    joins = same & (pl.col("start_ns") < before)
    work = work.with_columns(_end=end, _piece=(~joins.fill_null(False)).cast(pl.UInt32).cum_sum())
    others = [name for name in work.columns if name not in ("_piece", "_end", "duration_ns", "bytes")]
    whole = work.group_by("_piece", maintain_order=True).agg(
        *(pl.col(name).first() for name in others),
        pl.col("_end").max(),
        bytes=pl.when(pl.col("bytes").is_not_null().any()).then(pl.col("bytes").sum()),
    )
    whole = whole.with_columns(duration_ns=pl.col("_end") - pl.col("start_ns")).drop("_piece", "_end")
    return whole.sort("start_ns", "row")


def _by_flow(work: pl.DataFrame, calls: pl.DataFrame, flows: pl.DataFrame) -> pl.DataFrame:
    sources = calls.select("row", source_lane="written_lane", source_ns="start_ns").unique(
        ["source_lane", "source_ns"], keep="first", maintain_order=True
    )
    targets = (
        flows.join(sources, on=["source_lane", "source_ns"])
        .select(lane="target_lane", start_ns="target_ns", correlation=pl.col("row").cast(pl.Int64))
        .unique(["lane", "start_ns"], keep="first", maintain_order=True)
    )
    return work.join(targets, on=["lane", "start_ns"], how="left", maintain_order="left")


def _copies_in_order(work: pl.DataFrame, copies: pl.DataFrame) -> pl.DataFrame:
    """Match host-device copies to calls in order, if the counts agree and no copy starts before its call."""
    is_copy = work["engine"].is_in(_COPYING) & work["recipe"].is_null() & work["correlation"].is_null()
    started = work.filter(is_copy)
    if not 0 < started.height == copies.height or (started["start_ns"] < copies["start_ns"]).any():
        return work
    calls = started.select("row", _call=copies["row"].cast(pl.Int64))
    work = work.join(calls, on="row", how="left", maintain_order="left")
    return work.with_columns(correlation=pl.coalesce("correlation", "_call")).drop("_call")


def _by_recipe(work: pl.DataFrame, launching: pl.DataFrame) -> pl.DataFrame:
    """Find the call that launched each piece of work, given that recipes run in the order they were enqueued.

    A recipe does the same work on each run. If the number of times a node ran is a multiple of its launches, the n-th
    runs belong to the n-th launch; if the recording cut some off, to the last launches. If that would put work before
    its launch, the recipe's last launch before the work is used.
    """
    starts = launching.select("recipe", called="start_ns", row="row").sort("called")
    starts = starts.with_columns(ordinal=pl.int_range(pl.len(), dtype=pl.Int64).over("recipe"))
    counts = starts.group_by("recipe").agg(launches=pl.len().cast(pl.Int64))
    node = list(_NODE)
    runs = work.join(counts, on="recipe", how="left", maintain_order="left").with_columns(
        occurrence=pl.int_range(pl.len(), dtype=pl.Int64).over(node), occurrences=pl.len().cast(pl.Int64).over(node)
    )
    divides = pl.col("occurrences") % pl.col("launches") == 0
    times = pl.when(divides).then(pl.col("occurrences") // pl.col("launches")).otherwise(1)
    missing = pl.when(divides).then(0).otherwise((pl.col("occurrences") - pl.col("launches")).clip(lower_bound=0))
    runs = runs.with_columns(ordinal=((pl.col("occurrence") - missing) / times).floor().cast(pl.Int64))
    runs = runs.join(starts, on=["recipe", "ordinal"], how="left", maintain_order="left", suffix="_of_call")
    causal = (pl.col("called") <= pl.col("start_ns")).fill_null(True).all().over(node)
    runs = runs.with_columns(causal=causal, in_order=pl.col("row_of_call")).drop("called", "row_of_call")
    last = starts.select("recipe", start_ns="called", last="row")
    runs = runs.sort("start_ns", "row").join_asof(
        last.sort("start_ns"), on="start_ns", by="recipe", check_sortedness=False
    )
    chosen = pl.when("causal").then("in_order").otherwise("last").cast(pl.Int64)
    return runs.with_columns(correlation=chosen).select(work.columns)


_FEWEST_CALLS: Final = 3
"""Launches that a row without a thread number needs, all inside one thread's calls, to be assigned to that thread."""
_MOST_SYNAPSE_ROWS: Final = 100
"""Synapse thread rows for which the real thread is searched; a program has a few."""
_CALLING: Final = r"^(?:syn)?[Ll]aunch"


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the timeline: a device's, with its engine if known, or a host thread's if `device` is None."""

    device: str | None
    engine: str | None
    queue: str | None


class Sorting:
    """Splits the table HARDWARE into device_work, launches and operators; call `sort` once, after the last batch."""

    def __init__(self, columns: GaudiColumns, spill: Spill) -> None:
        self._columns = columns
        self._spill = spill
        self._pool = columns.pool
        self._strings = pl.Series([], dtype=pl.String)
        self._keys = {lane: key for key, lane in columns.lanes.items()}

    def sort(self) -> None:
        rows = self._spill.take(HARDWARE)
        if rows is None:
            return
        flows = self._spill.take("flows")
        strings = self._strings = self._pool.strings()
        rows = rows.with_row_index("row")
        places = self._places(rows)
        on_device = pl.col("lane").is_in([lane for lane, place in places.items() if place.device is not None])
        work, host = rows.filter(on_device), rows.filter(~on_device)
        work = self._measured(self._on_engines(work, places))
        calls = self._calls(host)
        work, calls = with_launches(work, calls, self._ends_of_flows(flows, strings))
        self._add("device_work", self._device_work(work))
        self._add("launches", calls.filter(pl.col("call").is_not_null()).pipe(self._launches))
        self._add("operators", calls.filter(pl.col("call").is_null()).select("start_ns", "duration_ns", "name", "lane"))
        self._keep_forward_backward(flows, strings)

    def _places(self, rows: pl.DataFrame) -> dict[int, _Row]:
        lanes = rows.group_by("lane").agg(
            pl.col("event").drop_nulls().first(),
            pl.col("device").drop_nulls().first(),
            names=pl.col("name").unique().sort().head(100),
        )
        lanes = lanes.with_columns(self._strings.gather(lanes[name]).alias(name) for name in ("event", "device"))
        return {row["lane"]: self._place(row) for row in lanes.iter_rows(named=True)}

    def _place(self, lane: dict[str, Any]) -> _Row:
        process, thread = self._keys[int(str(lane["lane"]))]
        title = self._columns.process_names.get(process) or self._columns.process_labels.get(process) or ""
        row_name = self._columns.thread_names.get((process, thread), "")
        if title in names.LOGGERS or names.SYNAPSE_THREAD.match(row_name):
            return _Row(None, None, None)
        is_device = names.DEVICE_PROCESS.search(title)
        engine = names.engine_of_thread(row_name)
        by_event = names.engine_of_event(str(lane["event"] or ""))
        if engine is None and (is_device or (process == "0" and not title)):
            work = self._strings.gather(pl.Series(lane["names"], dtype=pl.UInt32)).to_list()
            by_number = names.engine_of_number(thread)
            agree = by_number is not None and (by_event is None or by_number.endswith(by_event))
            engine = by_number if agree else by_event or next(filter(None, map(names.engine_of_work, work)), None)
        engine = engine or by_event
        if engine is None and not is_device:
            return _Row(None, None, None)
        number = is_device[1] if is_device and is_device[1] else lane["device"]
        device = str(number) if number is not None else (process if process.isdecimal() else "0")
        return _Row(device[:100], engine, engine or row_name or thread)

    def _on_engines(self, work: pl.DataFrame, places: dict[int, _Row]) -> pl.DataFrame:
        """Add device and engine; all units of an engine share the lane of the first unit."""
        columns = self._columns
        first: dict[tuple[str, str], int] = {}
        facts = []
        for lane in sorted(work["lane"].unique().to_list()):
            place = places[lane]
            device, queue = str(place.device), str(place.queue)
            home = first.setdefault((device, queue), lane)
            if home == lane:
                columns.queues[lane] = (device, queue)
                columns.thread_names[self._keys[lane]] = queue
            else:
                columns.units.add(lane)
            facts.append((lane, home, device, place.engine, queue))
        schema = {"lane": pl.Int32, "home": pl.Int32, "on_device": pl.String, "engine": pl.String, "queue": pl.String}
        return work.join(rows_frame(facts, schema), on="lane", how="left", maintain_order="left")

    def _measured(self, work: pl.DataFrame) -> pl.DataFrame:
        """Drop hardware events that mark only a part of work that another event of the engine measures in full."""
        known = self._strings.to_frame("word").with_row_index("code").filter(pl.col("word").is_in(list(names.MEASURED)))
        measured = pl.col("event").is_in(known["code"].implode())
        measures = work.group_by("home").agg(some=measured.fill_null(False).any())
        work = work.join(measures, on="home", how="left", maintain_order="left")
        is_mark = pl.col("event").is_not_null() & pl.col("some") & ~measured
        kept = work.filter(~is_mark).drop("event", "device", "recipe_name", "some")
        if kept.height < work.height:
            self._columns.damage["hardware_mark"] += work.height - kept.height
        return kept

    def _calls(self, host: pl.DataFrame) -> pl.DataFrame:
        """Move host rows to the lanes of their real threads, and set `call` to the kind of API call, or null."""
        codes = host["name"].unique()
        texts = self._strings.gather(codes)
        kinds = pl.DataFrame(
            {"name": codes, "name_text": texts, "call": [names.call_kind(name) for name in texts]},
            schema={"name": pl.UInt32, "name_text": pl.String, "call": pl.String},
        )
        host = host.join(kinds, on="name", how="left", maintain_order="left")
        real = self._real_lanes(host)
        lane = pl.col("lane").replace(list(real), list(real.values())) if real else pl.col("lane")
        host = host.with_columns(written_lane=pl.col("lane"), lane=lane.cast(pl.Int32))
        self._columns.host_lanes.update(host["lane"].unique().to_list())
        return host

    def _real_lanes(self, host: pl.DataFrame) -> dict[int, int]:
        """Map lanes in the file to the lanes of the real threads, where known."""
        found = self._lanes_of_loggers(host)
        keys = {number: key for key, number in self._columns.lanes.items()}
        threads: dict[str, set[int]] = {}
        for lane in self._columns.host_lanes | set(found.values()):
            threads.setdefault(keys[lane][1], set()).add(lane)
        calling = _calling(host, found)
        synapse = []
        for lane in sorted(set(host["lane"].unique().to_list()) - set(found)):
            match = names.SYNAPSE_THREAD.match(self._columns.thread_names.get(keys[lane], ""))
            if match is not None:
                synapse.append((lane, match[1]))
        for lane, name in synapse[:_MOST_SYNAPSE_ROWS]:
            same = {only for word in name.split() if word.isdecimal() for only in threads.get(word, ())}
            inside = _inside(host.filter(pl.col("lane") == lane), calling) if len(same) != 1 else same.pop()
            if inside is not None:
                found[lane] = inside
        return found

    def _lanes_of_loggers(self, host: pl.DataFrame) -> dict[int, int]:
        """Map lanes of the bridge's artificial processes to the lanes of the real process's threads."""
        lanes = self._columns.lanes
        processes = {process for process, _ in lanes}
        found: dict[int, int] = {}
        for lane in host["lane"].unique().to_list():
            process, thread = self._keys[lane]
            offset = names.LOGGERS.get(self._columns.process_names.get(process, ""))
            if offset is not None and process.isdecimal() and len(process) < 19:
                real = str(int(process) - offset)
                if real in processes:
                    found[lane] = lanes[real, thread]
        return found

    def _ends_of_flows(self, flows: pl.DataFrame | None, strings: pl.Series) -> pl.DataFrame:
        """Flows from a call to work, with columns flow, source_lane, source_ns, target_lane and target_ns."""
        if flows is None:
            return pl.DataFrame()
        others = flows.filter(~strings.gather(flows["category"]).is_in(list(FORWARD_BACKWARD_FLOWS)))
        end = strings.gather(others["end"])
        ends = {
            word: others.filter(end == word)
            .unique("flow", keep="first", maintain_order=True)
            .select("flow", pl.col("lane").alias(f"{word}_lane"), pl.col("start_ns").alias(f"{word}_ns"))
            for word in ("source", "target")
        }
        return ends["source"].join(ends["target"], on="flow", maintain_order="left")

    def _device_work(self, work: pl.DataFrame) -> pl.DataFrame:
        """Rows of `device_work`; names of computations include the number type, as kernel names do."""
        keys = ["engine", "category", "name", "data_type"]
        sorts = work.select(keys).unique(maintain_order=True)
        words = [self._strings.gather(sorts[name]).to_list() for name in keys[1:]]
        kinds, named = [], []
        for engine, category, name, data_type in zip(sorts["engine"], *words, strict=True):
            kind = names.work_kind(engine, category, name)
            typed = kind == "compute" and data_type is not None and data_type not in name.lower()
            kinds.append(kind)
            named.append(f"{name} ({data_type})" if typed else name)
        sorts = sorts.with_columns(kind=self._pool.codes(kinds), named=self._pool.codes(named))
        work = work.join(sorts, on=keys, how="left", maintain_order="left", nulls_equal=True)
        return work.select(
            "start_ns",
            "duration_ns",
            pl.col("home").alias("lane"),
            pl.col("named").alias("name"),
            "kind",
            self._coded(work["on_device"]).alias("device"),
            self._coded(work["queue"]).alias("queue"),
            "correlation",
            "bytes",
        )

    def _coded(self, texts: pl.Series) -> pl.Series:
        different = texts.unique()
        codes: pl.Series = texts.replace_strict(
            different, self._pool.codes(different.to_list()), return_dtype=pl.UInt32
        )
        return codes

    def _launches(self, calls: pl.DataFrame) -> pl.DataFrame:
        """Rows of `launches`; a call that starts a recipe has the recipe in its name."""
        recipe = self._pool.strings().gather(calls["recipe_name"])
        starts = (calls["call"] == "graph_launch") & recipe.is_not_null()
        both = calls["name_text"] + pl.lit(" (") + recipe.fill_null("") + pl.lit(")")
        named = calls.with_columns(full=pl.when(starts).then(both).otherwise(pl.col("name_text")))
        return named.select(
            "start_ns",
            "duration_ns",
            "lane",
            "correlation",
            "bytes",
            name=self._pool.codes(named["full"].to_list()),
            kind=self._pool.codes(named["call"].to_list()),
        )

    def _add(self, table: str, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        torch = self._spill.take(table)
        self._spill.add({table: frame if torch is None else pl.concat([torch, frame], how="diagonal")})

    def _keep_forward_backward(self, flows: pl.DataFrame | None, strings: pl.Series) -> None:
        if flows is not None:
            kept = flows.filter(strings.gather(flows["category"]).is_in(list(FORWARD_BACKWARD_FLOWS)))
            self._spill.add({"flows": kept})


def _calling(host: pl.DataFrame, found: dict[int, int]) -> pl.DataFrame:
    """Launch calls of real threads: lane, start_ns, end_ns."""
    known = list(found)
    calls = host.filter(pl.col("lane").is_in(known) & pl.col("name_text").str.contains(_CALLING))
    lane = pl.col("lane").replace(known, [found[one] for one in known]) if known else pl.col("lane")
    return calls.select(lane=lane, start_ns="start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"))


def _inside(calls: pl.DataFrame, calling: pl.DataFrame) -> int | None:
    """Return the one thread whose launch calls enclose all launches of a row; None unless there is exactly one."""
    starts = calls.filter(pl.col("call") == "graph_launch").select("start_ns").sort("start_ns")
    if starts.height < _FEWEST_CALLS:
        return None
    around = []
    for (lane,), mine in calling.group_by("lane"):
        spans = mine.sort("start_ns").with_columns(pl.col("end_ns").cum_max())
        nearest = starts.join_asof(spans.select("start_ns", "end_ns"), on="start_ns")
        if nearest["end_ns"].is_not_null().all() and (nearest["end_ns"] >= nearest["start_ns"]).all():
            around.append(int(str(lane)))
    return around[0] if len(around) == 1 else None


EXPLANATIONS: Final = {
    **kineto.EXPLANATIONS,
    "hardware_mark": "hardware events that mark only part of the work of another event were left out",
}
_MOST_REFUSED: Final = 2
_SIGNS: Final = re.compile(
    rb'"cat"\s*:\s*"hpu_op"'
    rb'|"HW event name"\s*:'
    rb'|"(?:name|labels)"\s*:\s*"(?:/device:HPU:\d|Synapse Logger"|Bridge Logs"|Synapse/)'
    rb'|"deviceProperties"\s*:\s*\[\s*\{[^\]]{0,400}"name"\s*:\s*"(?:GAUDI|HL-)',
    re.IGNORECASE,
)
_IS_TRACE: Final = re.compile(rb'"traceEvents"\s*:|"ph"\s*:')


def recognises(head: bytes) -> bool:
    """Whether decompressed text is a Chrome trace with events of Intel's bridge or hardware tracer."""
    return kineto.recognises(head) and _IS_TRACE.search(head) is not None and _SIGNS.search(head) is not None


def read(source: ByteSource, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> ReadResult:
    """Read the events of PyTorch and of Intel's bridge into the tables of `writer`.

    Raises the errors of `kineto.read`.
    """
    stream = EventStream(source)
    columns = GaudiColumns(stream.damage)  # no window here: matching calls to work needs all events
    spill = Spill(writer.directory)
    kineto.gather(source.name, stream.scans(_Scanning()), columns, spill)
    header = kineto.header_of(stream)
    Sorting(columns, spill).sort()
    spill.flush()
    origin_ns, strings = columns.origin_ns or 0, columns.pool.strings()
    assembly = Assembly(strings, spill, writer, stream.damage, origin_ns, window, steps)
    assembly.write(columns.lane_rows())
    spill.clean()
    kineto.count_endings(stream, source)
    metadata = kineto.metadata_of(source.name, header, columns, assembly.window)
    devices = _devices(header.get("deviceProperties"), columns) or metadata.devices
    return replace(metadata, format="gaudi", devices=devices), warnings(stream.damage, EXPLANATIONS)


class _Scanning:
    """The scanner, until it refused some texts: files with calls as pairs of begin and end have them everywhere."""

    def __init__(self) -> None:
        self._left = _MOST_REFUSED

    def __call__(self, text: bytes, *, exact: bool) -> Scan | None:
        found = scan(text, exact=exact, dialect=DIALECT) if self._left else None
        self._left -= found is None and self._left > 0
        return found


def _devices(properties: Any, columns: GaudiColumns) -> tuple[Device, ...]:
    """The devices that did work; the bridge describes only one, without a number."""
    first = next((item for item in properties if isinstance(item, dict)), {}) if isinstance(properties, list) else {}
    name, memory = first.get("name"), first.get("totalGlobalMem")
    memory = int(memory) if isinstance(memory, str) and memory.isdecimal() and len(memory) < 19 else memory
    return tuple(
        Device(
            device=device,
            name=name[:100].encode("utf-8", "replace").decode() if isinstance(name, str) and name else None,
            memory_bytes=memory if isinstance(memory, int) and 0 < memory < 2**62 else None,
        )
        for device in sorted({device for device, _ in columns.queues.values()})
    )


READER: Final = Reader("gaudi", recognises, read)
