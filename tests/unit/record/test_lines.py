"""Noting at which line of the user's code threads are, and joining that to a trace's operators."""

from __future__ import annotations

import cProfile
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.analysis.attribution import attribute
from stepscope.errors import UnreadableTraceError
from stepscope.readers import open_trace
from stepscope.record import lines as line_watches
from stepscope.record import lines as module
from stepscope.record import repetition
from stepscope.record.equal_values import ValueLook
from stepscope.record.lines import LineTracker
from stepscope.trace import Trace
from stepscope.trace.cache import TraceCache
from stepscope.trace.line_records import LineRecords, Location, ThreadLines, lines_path, read_lines, write_lines
from tests.unit.small_traces import complete, counted

WATCHES = [line_watches.Tracing, *([line_watches.Monitoring] if hasattr(sys, "monitoring") else [])]
FORWARD, BACKWARD, MODEL, HOOK = range(4)
PLACES = [
    Location("/srv/ada/train.py", 20, "main"),
    Location("/srv/ada/train.py", 21, "main"),
    Location("/srv/ada/model.py", 7, "forward"),
    Location("/srv/ada/model.py", 30, "hook"),
]


@pytest.fixture(autouse=True, params=WATCHES, ids=lambda watch: watch.__name__)
def _watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_new_watch", request.param)
    before = sys.gettrace()
    yield
    assert sys.gettrace() is before


def inner(value: int) -> int:
    doubled = value + value
    return doubled + 0


def outer() -> int:
    first = inner(1)
    return (
        first
        + inner(2)
    )  # fmt: skip


def numbers() -> Iterator[int]:
    yield 1
    yield 2


def tracked(function: Callable[[], Any]) -> LineRecords:
    tracker = LineTracker()
    tracker.start()
    try:
        function()
    finally:
        tracker.stop()
    records = tracker.records()
    assert records is not None
    return records


def path_of(records: LineRecords, *functions: str, thread: int | None = None) -> list[str]:
    """The lines one thread came to in these functions, each as "function+offset", repetitions left out."""
    number = threading.get_native_id() if thread is None else thread
    (notes,) = [found for found in records.threads if found.thread == number]
    beginnings = {name: globals()[name].__code__.co_firstlineno for name in functions}
    found: list[str] = []
    for index in array("i", notes.locations):
        place = records.locations[index] if index >= 0 else None
        if place is not None and place.function in functions:
            assert place.file == os.path.abspath(__file__)
            text = f"{place.function}+{place.line - beginnings[place.function]}"
            if found[-1:] != [text]:
                found.append(text)
    return found


def test_statements_calls_and_returns() -> None:
    records = tracked(outer)

    path = path_of(records, "outer", "inner")
    assert path[:6] == ["outer+1", "inner+1", "inner+2", "outer+1", "outer+3", "outer+4"]
    assert path[6:9] == ["inner+1", "inner+2", "outer+4"]
    times = array("q", records.threads[0].times).tolist()
    assert times == sorted(times)
    assert records.start_unix_ns <= times[0]
    assert times[-1] <= records.end_unix_ns
    assert records.problem is None


def test_generators_go_on_where_they_were() -> None:
    def total() -> int:
        return sum(number for number in numbers())

    path = [line for line in path_of(tracked(total), "numbers") if line != "numbers+0"]  # its beginning
    assert path == ["numbers+1", "numbers+2"]


def test_functions_that_run_already_are_noted() -> None:
    tracker = LineTracker()
    tracker.start()
    here = sys._getframe().f_lineno
    tracker.stop()
    records = tracker.records()

    assert records is not None
    assert here in [place.line for place in records.locations if "already" in place.function]


def test_code_of_others_is_not_noted() -> None:
    records = tracked(lambda: json.dumps({"a": [1, 2]}, indent=1))

    assert {place.file for place in records.locations} == {os.path.abspath(__file__)}


def test_threads_that_begin_later_have_notes_of_their_own() -> None:
    numbers: list[int] = []

    def work() -> None:
        numbers.append(threading.get_native_id())
        inner(3)

    def begin() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    records = tracked(begin)
    assert path_of(records, "inner", thread=numbers[-1]) == ["inner+1", "inner+2"]


def test_exceptions_pass() -> None:
    def fails() -> None:
        inner(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tracked(fails)


def test_nothing_is_noted_afterwards() -> None:
    tracker = LineTracker()
    tracker.start()
    tracker.stop()
    inner(1)
    tracker.stop()
    records = tracker.records()

    assert records is not None
    assert "inner" not in [place.function for place in records.locations]
    assert tracker.records() is None


def test_several_recordings_in_one_process() -> None:
    assert [path_of(tracked(outer), "inner")[:2] for _ in range(3)] == [["inner+1", "inner+2"]] * 3


def test_a_debugger_keeps_its_place(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["_watch"] is not line_watches.Tracing:
        pytest.skip("sys.monitoring serves several tools")
    before = sys.gettrace()
    seen: list[str] = []

    def debugger(frame: Any, event: str, argument: object) -> None:
        seen.append(frame.f_code.co_name)

    sys.settrace(debugger)
    try:
        records = tracked(outer)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)

    assert records.problem == "source lines were not recorded: a debugger or a coverage tool traces the program"
    assert "outer" in seen


def test_too_many_lines_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_watches, "MOST_NOTES", 50)

    def much() -> None:
        for value in range(1000):
            inner(value)
        time.sleep(0.001)

    records = tracked(much)
    after = time.time_ns()

    assert records.problem == "source lines were recorded only in part: the steps run too many of them"
    assert len(records.threads[0].times) // 8 == 50
    assert records.end_unix_ns < after - 1_000_000


def brighten(pixels: list[int]) -> list[int]:
    result = []
    for pixel in pixels:
        bright = pixel + 1
        result.append(bright)
    return result


def test_a_busy_function_is_noted_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line of its definition, whenever it is called; lines around it are noted as before."""
    monkeypatch.setattr(repetition, "_BUSY_NS", 10**12)
    monkeypatch.setattr(repetition, "_INTERVAL_S", 5)
    definition = brighten.__code__.co_firstlineno

    def images() -> None:
        for _ in range(3):
            brighten(list(range(2000)))
            outer()

    records = tracked(images)

    noted = path_of(records, "brighten", "outer")
    busy_from = noted.index("brighten+0")
    assert set(noted[:busy_from]) == {"brighten+1", "brighten+2", "brighten+3", "brighten+4"}
    assert [line for line in noted[busy_from:] if line.startswith("brighten")] == ["brighten+0"] * 3
    around = [line for line in noted if line.startswith("outer")]
    assert around == around[: len(around) // 3] * 3
    assert {"outer+1", "outer+3", "outer+4"} <= set(around)
    assert definition in [place.line for place in records.locations]


def test_a_busy_function_is_sampled() -> None:
    """The part of a call before the first sample belongs to its line as well."""
    busy = repetition.BusyFunctions(lambda file: file == __file__)
    frame = sys._getframe()
    code, first = frame.f_code, frame.f_code.co_firstlineno
    busy[code] = 1
    notes: list[object] = [10, code, first]

    busy._note(notes, frame)
    assert notes == [10, code, frame.f_lineno - 1]

    busy._note(notes, frame)
    assert notes[4:] == [code, frame.f_lineno - 1]

    busy._note(notes, (lambda: sys._getframe())())  # a function that is noted line by line itself
    assert len(notes) == 6


def test_a_function_that_is_called_very_often_belongs_to_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_BUSY_NS", 10**12)

    def often() -> None:
        for value in range(20_000):
            inner(value)

    notes = path_of(tracked(often), "inner")

    assert 2 <= len(notes) < 10_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_children_are_not_watched() -> None:
    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if not module._running and sys.gettrace() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    tracked(fork)


def records_of(*notes: tuple[int, int], thread: int = 2, problem: str | None = None) -> LineRecords:
    """Lines of one thread: (microseconds since 1970 less the trace's base, place or -1)."""
    times = array("q", [1_000_000_000_000_000_000 + 1000 * since for since, _ in notes])
    places = array("i", [place for _, place in notes])
    return LineRecords(
        process=1,
        start_unix_ns=1_000_000_000_000_000_000,
        end_unix_ns=1_000_000_000_001_000_000,
        locations=PLACES,
        threads=[ThreadLines(thread, times.tobytes(), places.tobytes())],
        problem=problem,
    )


def forward(name: str, start: float, duration: float, sequence: int | None = None, **more: Any) -> dict[str, Any]:
    args = {} if sequence is None else {"Sequence number": sequence, "Fwd thread id": 0}
    return complete(name, "cpu_op", start, duration, args=args) | more


def backward(name: str, start: float, duration: float, sequence: int, thread: int = 1, **more: Any) -> dict[str, Any]:
    args = {"Sequence number": sequence, "Fwd thread id": thread}
    return complete(name, "cpu_op", start, duration, args=args) | more


def joined(folder: Path, records: LineRecords | None, *events: dict[str, Any], **how: Any) -> Trace:
    path = folder / "trace.json"
    document = {"baseTimeNanoseconds": 1_000_000_000_000_000_000, "traceEvents": list(events)}
    path.write_text(json.dumps(document))
    write_lines(records, path)
    trace = open_trace(path, **how)
    trace.check()
    return trace


def lines_in(trace: Trace) -> dict[str, tuple[str, int, str] | None]:
    table = trace.operators.select("name", "source_file", "source_line", "source_function")
    return {name: place if place[0] is not None else None for name, *rest in table.iter_rows() for place in [(*rest,)]}


def test_an_empty_file_of_lines_says_nothing(tmp_path: Path) -> None:
    trace = joined(tmp_path, records_of(), forward("aten::mm", 10, 5))

    assert lines_in(trace) == {"aten::mm": None}
    assert trace.warnings == ()


def test_lines_without_operators_are_kept(tmp_path: Path) -> None:
    trace = joined(tmp_path, records_of((20, FORWARD), (24, -1)), forward("aten::mm", 10, 5))

    assert lines_in(trace) == {"aten::mm": None}
    assert trace.lines.select("line", "function", "duration_ns").rows() == [(20, "main", 4000)]


def test_operators_get_the_line_their_thread_was_at(tmp_path: Path) -> None:
    records = records_of((5, FORWARD), (8, MODEL), (30, FORWARD), (40, -1))
    trace = joined(
        tmp_path,
        records,
        forward("aten::early", 4, 0.5),
        forward("aten::linear", 10, 15),
        forward("aten::addmm", 11, 10),
        forward("aten::sum", 31, 5),
        forward("aten::outside", 41, 5),
        forward("aten::elsewhere", 12, 5, tid=3),
        forward("aten::late", 1_000_001, 5),
    )

    assert lines_in(trace) == {
        "aten::early": None,
        "aten::linear": ("/srv/ada/model.py", 7, "forward"),
        "aten::addmm": ("/srv/ada/model.py", 7, "forward"),
        "aten::sum": ("/srv/ada/train.py", 20, "main"),
        "aten::outside": None,
        "aten::elsewhere": None,
        "aten::late": None,
    }
    assert trace.metadata.recorded == ("lines",)


def test_lines_are_a_table_of_their_own(tmp_path: Path) -> None:
    records = records_of((5, FORWARD), (8, MODEL), (9, MODEL), (30, -1), (40, FORWARD))
    trace = joined(tmp_path, records, forward("aten::linear", 10, 15), forward("aten::sum", 31, 5))

    assert trace.lines.rows() == [
        (0, 20_000, "/srv/ada/model.py(7): forward", 0, "/srv/ada/model.py", 7, "forward"),
        (30_000, 960_000, "/srv/ada/train.py(20): main", 0, "/srv/ada/train.py", 20, "main"),
    ]


def test_backward_operators_get_the_line_of_their_forward(tmp_path: Path) -> None:
    records = records_of((5, MODEL), (20, FORWARD), (50, BACKWARD))
    engine = "autograd::engine::evaluate_function: "
    trace = joined(
        tmp_path,
        records,
        forward("aten::zeros", 21, 1, 4),  # sees number 4 coming; the last of them makes the node
        forward("aten::linear", 6, 9, 3),
        forward("aten::mean", 23, 2, 4),
        backward(engine + "MeanBackward0", 51, 4, 4),
        backward("MeanBackward0", 52, 2, 4),
        forward("aten::expand", 52.5, 1),
        backward(engine + "AddmmBackward0", 60, 9, 3),
        forward("aten::mm", 62, 2),
        forward(engine + "torch::autograd::AccumulateGrad", 70, 3),
        backward("aten::unknown", 80, 3, 77),
    )

    found = lines_in(trace)
    model, train, call = (("/srv/ada/model.py", 7, "forward"), ("/srv/ada/train.py", 20, "main"),
                          ("/srv/ada/train.py", 21, "main"))  # fmt: skip
    assert found["MeanBackward0"] == found["aten::expand"] == found[engine + "MeanBackward0"] == train
    assert found[engine + "AddmmBackward0"] == found["aten::mm"] == model
    assert found[engine + "torch::autograd::AccumulateGrad"] == call
    assert found["aten::unknown"] == call


def test_python_code_inside_a_backward_node_has_lines_of_its_own(tmp_path: Path) -> None:
    records = records_of((5, MODEL), (50, BACKWARD), (62, HOOK), (66, BACKWARD))
    trace = joined(
        tmp_path,
        records,
        forward("aten::linear", 6, 9, 3),
        backward("AddmmBackward0", 60, 20, 3),
        forward("aten::before", 61, 0.5),
        forward("aten::in_hook", 63, 2),
        forward("aten::after", 70, 2),
    )

    found = lines_in(trace)
    assert found["aten::before"] == found["aten::after"] == ("/srv/ada/model.py", 7, "forward")
    assert found["aten::in_hook"] == ("/srv/ada/model.py", 30, "hook")


def test_a_forward_run_again_inside_the_backward_leads_its_own_backward(tmp_path: Path) -> None:
    records = records_of((5, FORWARD), (50, BACKWARD), (62, MODEL), (68, BACKWARD))
    trace = joined(
        tmp_path,
        records,
        forward("CheckpointFunction", 6, 9, 3),
        backward("CheckpointFunctionBackward", 60, 30, 3),
        forward("aten::linear", 63, 4, 8),
        backward("AddmmBackward0", 75, 10, 8),
    )

    found = lines_in(trace)
    assert found["CheckpointFunctionBackward"] == ("/srv/ada/train.py", 20, "main")
    assert found["aten::linear"] == found["AddmmBackward0"] == ("/srv/ada/model.py", 7, "forward")


def test_the_engines_own_threads_get_the_line_that_called_it(tmp_path: Path) -> None:
    records = records_of((5, MODEL), (50, BACKWARD))
    engine = "autograd::engine::evaluate_function: "
    trace = joined(
        tmp_path,
        records,
        forward("aten::linear", 6, 9, 3),
        backward(engine + "AddmmBackward0", 60, 9, 3, tid=9),
        forward(engine + "torch::autograd::AccumulateGrad", 70, 3, tid=9),
        forward("aten::add_", 71, 1, tid=9),
        forward("aten::other", 80, 1, tid=9),
    )

    found = lines_in(trace)
    assert found[engine + "AddmmBackward0"] == ("/srv/ada/model.py", 7, "forward")
    assert found["aten::add_"] == ("/srv/ada/train.py", 21, "main")
    assert found["aten::other"] is None


def test_compiled_code_is_warned_of(tmp_path: Path) -> None:
    trace = joined(
        tmp_path, records_of((5, FORWARD)), forward("Torch-Compiled Region: 0/0", 6, 9), forward("aten::mm", 7, 5)
    )

    assert counted(trace) == {"compiled_lines": 1}
    assert lines_in(trace)["aten::mm"] == ("/srv/ada/train.py", 20, "main")


def test_what_kept_lines_from_being_recorded_is_a_warning(tmp_path: Path) -> None:
    trace = joined(tmp_path, records_of(problem="a debugger was there"), forward("aten::mm", 7, 5))

    assert [(warning.kind, warning.detail) for warning in trace.warnings] == [("lines", "a debugger was there")]


def test_much_python_code_is_warned_of(tmp_path: Path) -> None:
    few, many = (records_of(*[(number, MODEL) for number in range(count)]) for count in (100, 400))
    found = [counted(joined(tmp_path, records, forward("aten::mm", 7, 5))) for records in (few, many)]

    assert found == [{}, {"lines_cost": 1}]


@pytest.mark.parametrize(
    "damage",
    [
        {"start_unix_ns": 2**63, "end_unix_ns": 2**64 - 1},
        {"end_unix_ns": -1},
        {"locations": [Location("x.py", 2**31, "f")]},
        {"locations": [Location("x.py", -1, "f")]},
        {"locations": [Location("x" * 5000, 1, "f")]},
        {"modules": ["M" * 1001]},
        {"modules": ["M" + ".m" * 101]},
    ],
)
def test_numbers_and_names_that_no_recording_has_are_damage(tmp_path: Path, damage: dict[str, Any]) -> None:
    trace = joined(tmp_path, msgspec.structs.replace(records_of((5, 0)), **damage), forward("aten::mm", 10, 5))

    assert counted(trace) == {"damaged_lines": 1}


def test_a_pipe_is_no_file_of_lines(tmp_path: Path) -> None:
    os.mkfifo(lines_path(tmp_path / "trace.json"))

    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [forward("aten::mm", 10, 5)]}))
    assert open_trace(tmp_path / "trace.json", cache=TraceCache(tmp_path / "cache")).warnings == ()


def test_modules_whose_names_begin_with_a_dot(tmp_path: Path) -> None:
    base = 1_000_000_000_000_000_000
    times, modules = array("q", [base, base + 1_000]), array("i", [0, 1])
    thread = ThreadLines(2, b"", b"", times.tobytes(), modules.tobytes())
    records = msgspec.structs.replace(records_of(), threads=[thread], modules=[".a", "..b"])
    trace = joined(tmp_path, records, forward("aten::mm", 10, 5))

    assert attribute(trace).operators()["module"].to_list() == ["..b"]


def test_a_damaged_file_of_lines_leaves_the_trace_readable(tmp_path: Path) -> None:
    trace = joined(tmp_path, records_of((5, FORWARD)), forward("aten::mm", 7, 5))
    assert lines_in(trace)["aten::mm"] is not None
    path = lines_path(tmp_path / "trace.json")
    content = path.read_bytes()

    for damaged in (b"", b"{}", content[:-3], b"\xff" * 90, content.replace(b"version\x01", b"version\x02")):
        path.write_bytes(damaged)
        found = open_trace(tmp_path / "trace.json")
        assert counted(found) == {"damaged_lines": 1}
        assert lines_in(found) == {"aten::mm": None}


def test_times_and_places_must_be_as_many(tmp_path: Path) -> None:
    records = records_of((5, FORWARD))
    records.threads[0].locations = b""
    lines_path(tmp_path / "trace.json").write_bytes(msgspec.msgpack.encode(records))

    with pytest.raises(UnreadableTraceError, match="times and locations of a thread differ in number"):
        read_lines(lines_path(tmp_path / "trace.json"))


def test_places_that_do_not_exist_are_nowhere(tmp_path: Path) -> None:
    trace = joined(tmp_path, records_of((5, 99), (6, -7)), forward("aten::mm", 5.5, 0.2), forward("aten::sum", 7, 1))

    assert lines_in(trace) == {"aten::mm": None, "aten::sum": None}


def test_the_cache_tells_traces_with_other_lines_apart(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path / "cache")
    events = (forward("aten::mm", 7, 5),)
    places = [
        lines_in(joined(tmp_path, records, *events, cache=cache))["aten::mm"]
        for records in (records_of((5, FORWARD)), records_of((5, MODEL)), None, records_of((5, MODEL)))
    ]

    assert [place and place[1] for place in places] == [20, 7, None, 7]
    assert len(cache.entries()) == 3


def test_a_store_of_before_there_were_lines_can_be_read(tmp_path: Path) -> None:
    from stepscope.trace import model

    trace = joined(tmp_path, None, forward("aten::mm", 7, 5))
    folder = tmp_path / "store"
    folder.mkdir()
    writer = model.StoreWriter(folder)
    for table in ("lanes", "operators"):
        rows = trace.table(table)
        writer.write_part(table, rows.drop([name for name in rows.columns if name.startswith("source_")]))
    writer.finish(trace.metadata, ())
    model.seal(folder)

    old = open_trace(folder)

    old.check()
    assert lines_in(old) == {"aten::mm": None}


def only_tracing(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["_watch"] is not line_watches.Tracing:
        pytest.skip("sys.monitoring serves several tools")


def frames() -> Iterator[Any]:
    for _ in range(3):
        yield sys._getframe()


def test_frames_that_go_on_are_as_they_were(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    only_tracing(request)
    monkeypatch.setattr(repetition, "_BUSY_NS", 10**12)
    tracker = LineTracker()

    def busy() -> tuple[Any, bool]:
        total = 0
        for number in range(3000):
            total += number
        was_less = not sys._getframe().f_trace_lines
        tracker.stop()
        return sys._getframe(), was_less

    tracker.start()
    frame, was_less = busy()

    assert was_less
    assert (frame.f_trace, frame.f_trace_lines) == (None, True)
    assert (sys._getframe().f_trace, sys._getframe().f_trace_lines) == (None, True)


def test_a_debugger_that_begins_meanwhile_keeps_its_frames(request: pytest.FixtureRequest) -> None:
    only_tracing(request)
    seen: list[int] = []

    def debugger(frame: Any, event: str, argument: object) -> Any:
        seen.append(frame.f_lineno)
        return debugger

    frame = sys._getframe()
    tracker = LineTracker()
    tracker.start()
    frame.f_trace = debugger
    sys.settrace(debugger)
    tracker.stop()
    first = frame.f_lineno
    found = frame.f_trace, sys.gettrace()
    sys.settrace(None)
    frame.f_trace = None

    assert found == (debugger, debugger)
    assert first in seen


def test_a_generator_that_goes_on_elsewhere_is_left_when_it_does(request: pytest.FixtureRequest) -> None:
    only_tracing(request)
    seen: list[str] = []

    def debugger(frame: Any, event: str, argument: object) -> Any:
        seen.append(event)

    tracker = LineTracker()
    going_on = frames()
    tracker.start()
    frame = next(going_on)
    tracker.stop()
    sys.settrace(debugger)
    try:
        next(going_on)
    finally:
        sys.settrace(None)

    assert (frame.f_trace, frame.f_trace_lines, "call" in seen) == (None, True, True)
    assert tracker.records() is not None


def test_a_tracer_of_threads_keeps_its_place(request: pytest.FixtureRequest) -> None:
    only_tracing(request)
    threading.settrace(print)
    try:
        assert "debugger" in (tracked(outer).problem or "")
        assert threading.gettrace() is print
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


def test_a_profiler_may_begin_meanwhile() -> None:
    tracker, profile = LineTracker(), cProfile.Profile()
    tracker.start()
    profile.enable()
    outer()
    profile.disable()
    tracker.stop()

    assert {entry.code.co_name for entry in profile.getstats() if not isinstance(entry.code, str)} >= {"outer"}


def test_a_tool_that_has_taken_our_place_keeps_it(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["_watch"] is line_watches.Tracing:
        pytest.skip("sys.settrace has no places")
    api: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tracker = LineTracker()
    tracker.start()
    place = next(place for place in range(6) if api.get_tool(place) == "stepscope")
    api.free_tool_id(place)
    api.use_tool_id(place, "another")
    tracker.stop()
    assert api.get_tool(place) == "another"
    api.free_tool_id(place)


def test_a_second_recording_tells_other_tools_nothing_twice(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["_watch"] is line_watches.Tracing:
        pytest.skip("sys.settrace has no places")
    api: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    met: list[int] = []

    def once(code: Any, line: int) -> Any:
        met.append(line)
        return api.DISABLE

    api.use_tool_id(api.COVERAGE_ID, "another")
    api.register_callback(api.COVERAGE_ID, api.events.LINE, once)
    api.set_local_events(api.COVERAGE_ID, inner.__code__, api.events.LINE)
    paths = [path_of(tracked(outer), "inner")[:2] for _ in range(3)]
    api.set_local_events(api.COVERAGE_ID, inner.__code__, 0)
    api.free_tool_id(api.COVERAGE_ID)

    assert paths == [["inner+1", "inner+2"]] * 3
    assert len(met) == 2


@pytest.mark.parametrize("interval_s", [0.005, 0.0002])  # 200 us, set again as they are read, would become 199
def test_the_interval_between_threads_is_given_back_without_the_thread_that_samples(interval_s: float) -> None:
    """A forked child has no such thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    usual = sys.getswitchinterval()
    busy = repetition.BusyFunctions(lambda file: True)
    thread = threading.Thread(target=busy._sample, daemon=True)
    thread.start()
    while busy._intervals_s is None:
        time.sleep(0.001)
    busy.stop()
    found = sys.getswitchinterval()
    thread.join(10)
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)

    assert (found, after) == (usual, usual)


def down(left: int) -> int:
    return down(left - 1) + 1 if left else 0


def fits(left: int) -> bool:
    try:
        return down(left) == left
    except RecursionError:
        return False


def test_a_stack_that_the_program_just_fits_on_is_enough() -> None:
    limit, tracker, look = sys.getrecursionlimit(), LineTracker(), ValueLook()
    deepest = next(left for left in range(limit, 0, -1) if fits(left))
    for start, stop in ((tracker.start, tracker.stop), (look.start, look.stop)):
        start()
        found = fits(deepest)
        stop()
        assert found
    assert sys.getrecursionlimit() == limit
