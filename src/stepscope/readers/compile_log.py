"""Read the structured log that torch.compile writes into the folder TORCH_TRACE: what it compiled, and why again.

A record is a line such as `V0101 12:00:00.000000 4321 torch/_dynamo/utils.py:2009] {"compilation_metrics": {...}}`, and
a payload of lines that begin with a tab. Records carry the numbers of the frame and of its compilation. Most payloads
are graphs and code, of which only the names of fused kernels are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from stepscope.errors import UsageError
from stepscope.readers.side_files import LARGEST_COUNT, MOST_NAMES, lines
from stepscope.trace.metadata import CodePlace, Compilation, CompiledGraph, GraphBreak, RunCounts

LOG_NAME: Final = "dedicated_log_torch_trace_*.log*"
"""Names of the files in the folder TORCH_TRACE."""
_LONGEST_RECORD: Final = 2**20
_LONGEST_PAYLOAD: Final = 2**16
_MOST_COMPILATIONS: Final = 10_000
_MOST_KERNELS: Final = 1_000
_MOST_BREAKS: Final = 100
_MOST_FRAMES: Final = 50
_LONGEST_TEXT: Final = 2_000
_HEAD: Final = re.compile(
    r"(?:\[rank\d{1,6}\]:)?[VDIWEC]\d{4} \d\d:\d\d:\d\d\.\d{6} (\d{1,10}) [^\]\n]{1,400}:\d{1,9}\] (\{.*)", re.DOTALL
)
_KERNEL: Final = re.compile(r"^\s*(\w{1,200}) = async_compile\.")
_GRAPH_KEY: Final = re.compile(r'"key": "(f\w{10,100})"')
_CACHE: Final = frozenset({"fx_graph_cache_hit", "fx_graph_cache_miss", "fx_graph_cache_bypass"})
_BREAK_AT: Final = re.compile(r"^Graph [Bb]reak (?:in|from) user code at (.{1,1000}):(\d{1,9})$", re.MULTILINE)
_REASON: Final = re.compile(r"^(?:Graph Break )?Reason: (.{1,1000})$", re.MULTILINE)
_FRAME: Final = re.compile(r'^\s*File "(.{1,1000})", line (\d{1,9}), in (.{1,200})$', re.MULTILINE)
_LABELLED: Final = re.compile(r"^\s*(Explanation|Hint): (.{1,1000})$", re.MULTILINE)
_USERS_TRACEBACK: Final = "User code traceback:"
_TRACEBACK: Final = "Traceback (most recent call last):"
_OF_THE_COMPILER: Final = re.compile(r"/torch/_?(?:dynamo|inductor|nn/modules/module)\b")
_MICROSECOND: Final = 1_000


@dataclass(slots=True)
class _Open:
    """One compilation of a frame while its records come in."""

    function: str = ""
    place: CodePlace | None = None
    called_from: tuple[CodePlace, ...] = ()
    start_unix_ns: int | None = None
    compile_ns: int | None = None
    backward_ns: int | None = None
    hits: int = 0
    misses: int = 0
    guards: int | None = None
    operators: int | None = None
    graphs: list[CompiledGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    reason: str | None = None
    failure: str | None = None
    logging_ns: int = 0


def compile_logs(path: str | Path) -> list[Path]:
    """The logs of a folder, or the file itself.

    Raises UsageError if the folder has none.
    """
    place = Path(path)
    if not place.is_dir():
        return [place]
    found = sorted(file for file in place.glob(LOG_NAME) if file.is_file())
    if not found:
        raise UsageError(
            f"the folder {path} contains no log of torch.compile ({LOG_NAME}), which a program writes that compiles "
            "while TORCH_TRACE names the folder"
        )
    return found


def read_compile_log(path: str | Path) -> RunCounts:
    """Return the compilations in one log.

    Raises UsageError if it contains no record, TraceError if it is unreadable.
    """
    reading = _Reading()
    for line in lines(path, longest=_LONGEST_RECORD):
        reading.take(line)
    reading.finish()
    if not reading.records:
        raise UsageError(
            f"{path} is not a log of torch.compile, which a program writes into the folder TORCH_TRACE: it has no line "
            "such as 'V0101 12:00:00.000000 4321 torch/_dynamo/utils.py:2009] {...}'"
        )
    return RunCounts(sources=(str(path),), compiled=tuple(reading.compilations()))


class _Reading:
    """Takes the lines of one file; keeps what `Compilation` has of each frame's compilation."""

    def __init__(self) -> None:
        self.records = 0
        self._process = ""
        self._names: dict[int, str] = {}
        self._found: dict[tuple[str, str], _Open] = {}
        self._record: dict[str, Any] | None = None
        self._payload: list[str] = []
        self._size = 0

    def take(self, line: str) -> None:
        if line.startswith("\t"):
            self._take_payload(line[1:])
            return
        self.finish()
        match = _HEAD.match(line)
        if match is None:
            return
        try:
            record = msgspec.json.decode(match[2].encode("utf-8", "replace"))
        except (msgspec.MsgspecError, RecursionError):
            return
        if isinstance(record, dict):
            self.records += 1
            self._process = match[1]
            self._record = record

    def finish(self) -> None:
        """Use the last record, whose payload is complete."""
        record, self._record = self._record, None
        if record is not None:
            self._use(record, "\n".join(self._payload))
        self._payload, self._size = [], 0

    def _take_payload(self, line: str) -> None:
        if self._record is None:
            return
        if "inductor_output_code" in self._record:
            kernel = _KERNEL.match(line)
            line = kernel[1] if kernel is not None else ""
        if line and self._size < _LONGEST_PAYLOAD:
            self._payload.append(line[: _LONGEST_PAYLOAD - self._size])
            self._size += len(line)

    def _use(self, record: dict[str, Any], payload: str) -> None:
        text = record.get("str")
        if isinstance(text, list) and len(text) == 2 and isinstance(text[0], str) and isinstance(text[1], int):
            if len(self._names) < MOST_NAMES:
                self._names[text[1]] = text[0]
            return
        frame, compilation = record.get("frame_id"), record.get("frame_compile_id")
        if not isinstance(frame, int) or not isinstance(compilation, int):
            return
        key = (self._process, f"{frame}/{compilation}")
        if key not in self._found and len(self._found) >= _MOST_COMPILATIONS:
            return
        mine = self._found.setdefault(key, _Open())
        artifact = record.get("artifact")
        if isinstance(artifact, dict):
            self._use_artifact(mine, artifact.get("name"), payload)
        elif isinstance(start := record.get("dynamo_start"), dict):
            self._use_stack(mine, start.get("stack"))
        elif isinstance(metrics := record.get("compilation_metrics"), dict):
            _use_metrics(mine, metrics)
        elif isinstance(metrics := record.get("bwd_compilation_metrics"), dict):
            mine.backward_ns = (mine.backward_ns or 0) + (_nanoseconds(metrics, "duration_us") or 0)
            mine.logging_ns += _nanoseconds(metrics, "structured_logging_overhead_us") or 0
        elif "inductor_output_code" in record and len(mine.graphs) < _MOST_KERNELS:
            kernels = tuple(dict.fromkeys(payload.split("\n")))[:_MOST_KERNELS] if payload else ()
            mine.graphs.append(CompiledGraph(None, kernels))

    def _use_artifact(self, mine: _Open, name: object, payload: str) -> None:
        if name == "dynamo_graph_break_reason":
            found = _graph_break(payload)
            if found is not None and found not in mine.breaks and len(mine.breaks) < _MOST_BREAKS:
                mine.breaks.append(found)
        elif name == "recompile_reasons" and mine.reason is None:
            mine.reason = payload.strip().strip('[]"').partition("\n")[0][:_LONGEST_TEXT] or None
        elif isinstance(name, str) and name in _CACHE:
            mine.hits += name == "fx_graph_cache_hit"
            mine.misses += name != "fx_graph_cache_hit"
            key = _GRAPH_KEY.search(payload)
            if key is not None and mine.graphs and mine.graphs[-1].key is None:
                mine.graphs[-1] = replace(mine.graphs[-1], key=key[1])

    def _use_stack(self, mine: _Open, stack: object) -> None:
        found = [self._place(each) for each in stack] if isinstance(stack, list) else []
        frames = [place for place in found if place is not None]
        if frames:
            mine.place = mine.place or frames[-1]
            mine.function = mine.function or frames[-1].function
            called = [place for place in reversed(frames[:-1]) if not _OF_THE_COMPILER.search(place.file)]
            mine.called_from = tuple(called[:_MOST_FRAMES])

    def _place(self, frame: object) -> CodePlace | None:
        if not isinstance(frame, dict):
            return None
        file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
        if isinstance(file, int):
            file = self._names.get(file)
        if not isinstance(file, str) or not isinstance(line, int) or not 0 <= line < 2**31:
            return None
        return CodePlace(str(name)[:_LONGEST_TEXT], file[:_LONGEST_TEXT], line)

    def compilations(self) -> Iterator[Compilation]:
        """The compilations in the order of the log; those of which only a part is in the file, too."""
        for (process, number), mine in self._found.items():
            if mine.place is None:
                continue
            yield Compilation(
                process=process,
                number=number,
                function=mine.function,
                file=mine.place.file,
                line=mine.place.line,
                called_from=mine.called_from,
                start_unix_ns=mine.start_unix_ns,
                compile_ns=mine.compile_ns,
                backward_ns=mine.backward_ns,
                cached=mine.misses == 0 if mine.hits + mine.misses else None,
                guards=mine.guards,
                operators=mine.operators,
                graphs=tuple(mine.graphs),
                breaks=tuple(mine.breaks),
                reason=mine.reason,
                failure=mine.failure,
                logging_ns=mine.logging_ns,
            )


def _use_metrics(mine: _Open, metrics: dict[str, Any]) -> None:
    function, file, line = (metrics.get(name) for name in ("co_name", "co_filename", "co_firstlineno"))
    if isinstance(function, str) and isinstance(file, str) and isinstance(line, int) and 0 <= line < 2**31:
        mine.function = function[:_LONGEST_TEXT]
        mine.place = CodePlace(mine.function, file[:_LONGEST_TEXT], line)
    mine.start_unix_ns = _nanoseconds(metrics, "start_time_us")
    mine.compile_ns = _nanoseconds(metrics, "duration_us")
    if mine.compile_ns is None and isinstance(seconds := metrics.get("entire_frame_compile_time_s"), (int, float)):
        mine.compile_ns = round(min(max(seconds, 0), 1e9) * 1e9)
    mine.logging_ns += _nanoseconds(metrics, "structured_logging_overhead_us") or 0
    mine.guards, mine.operators = (_count(metrics.get(name)) for name in ("guard_count", "graph_op_count"))
    if isinstance(reason := metrics.get("recompile_reason"), str) and reason:
        mine.reason = reason.strip().partition("\n")[0][:_LONGEST_TEXT]
    if isinstance(failure := metrics.get("fail_reason"), str) and failure:
        mine.failure = failure.strip().splitlines()[0][:_LONGEST_TEXT] if failure.strip() else None


def _graph_break(payload: str) -> GraphBreak | None:
    """What a break's text says: its place, the reason, an explanation and a hint."""
    at = _BREAK_AT.search(payload)
    if at is None:
        return None
    reason = _REASON.search(payload)
    following = payload[reason.end() :].splitlines() if reason is not None else []
    said = [line.strip() for line in (reason[1] if reason is not None else "", *following)]
    labelled: dict[str, str] = {}
    for match in _LABELLED.finditer(payload):
        labelled.setdefault(match[1], match[2].strip())
    _, _, users = payload.partition(_USERS_TRACEBACK)
    frames = [CodePlace(each[3], each[1], int(each[2])) for each in _FRAME.finditer(users.partition(_TRACEBACK)[0])]
    kept = [place for place in reversed(frames) if not _OF_THE_COMPILER.search(place.file)]
    return GraphBreak(
        file=at[1],
        line=int(at[2]),
        reason=next((line for line in said if line and not line.endswith(":")), ""),  # what ends so introduces it
        explanation=labelled.get("Explanation", ""),
        hint=labelled.get("Hint", ""),
        frames=tuple(kept[:_MOST_FRAMES]),
    )


def _count(value: object) -> int | None:
    return min(value, LARGEST_COUNT) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _nanoseconds(metrics: dict[str, Any], name: str) -> int | None:
    microseconds = _count(metrics.get(name))
    return None if microseconds is None else min(microseconds * _MICROSECOND, LARGEST_COUNT)
