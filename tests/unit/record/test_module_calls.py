"""Calls of modules, noted with lines: names, nesting, and the table they become."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from stepscope.readers import open_trace
from stepscope.record.lines import LineTracker
from stepscope.record.program_objects import call_time, module_ref, named_calls
from stepscope.trace import Window
from stepscope.trace.program_facts import MODULE_LEFT, LineRecords, ThreadLines, read_lines, write_lines
from tests.unit.small_traces import complete

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("on purpose")
        return self.body(x)


def calls_of(records: LineRecords) -> list[str]:
    """Names as they were entered, and "-" where a call ended, of the thread that recorded."""
    numbers = array("i")
    numbers.frombytes(records.threads[0].modules)
    return ["-" if number == MODULE_LEFT else records.modules[number] for number in numbers]


def recorded(*modules: torch.nn.Module) -> LineRecords:
    tracker = LineTracker()
    tracker.start()
    for module in modules:
        try:
            module(torch.zeros(1, 2))
        except ValueError:
            continue
    tracker.stop()
    records = tracker.records()
    assert records is not None
    assert records.problem is None
    return records


def test_modules_have_their_qualified_names_behind_the_outermost_ones_class() -> None:
    assert calls_of(recorded(Net())) == ["Net", "Net.body", "Net.body.0", "-", "Net.body.1", "-", "-", "-"]


def test_a_call_that_fails_has_ended() -> None:
    assert calls_of(recorded(Net(fails=True), torch.nn.ReLU())) == ["Net", "-", "ReLU", "-"]


def test_several_of_one_class_are_numbered_and_a_part_called_alone_keeps_its_name() -> None:
    net, other = Net(), Net()

    assert calls_of(recorded(net.body[0], net, other))[:3] == ["Net.body.0", "-", "Net"]
    assert "Net_1.body.0" in calls_of(recorded(net, other))


def test_after_the_recording_nothing_is_noted() -> None:
    tracker = LineTracker()
    tracker.start()
    tracker.stop()
    Net()(torch.zeros(1, 2))

    records = tracker.records()

    assert records is not None
    assert records.modules == []


def test_a_call_that_began_before_the_recording_is_passed_over_and_strangers_are_named_by_class() -> None:
    net = Net()
    stranger = torch.nn.ReLU()

    first, second = module_ref(net, {}), module_ref(stranger, {})
    named = named_calls([[5, None, 10, first, 12, second, 13, None, 20, None, 30]])

    assert (named.names, named.evaluating) == (["Net", "Net.ReLU"], [])
    [(times, modules)] = named.threads
    assert (list(times), list(modules)) == ([10, 12, 13, 20], [0, 1, MODULE_LEFT, MODULE_LEFT])


def test_calls_in_evaluation_mode_are_told_apart() -> None:
    net = Net()
    called = module_ref(net, {})
    named = named_calls([[10, called, 20, None, -30, called, 40, None]])

    assert (named.names, named.evaluating) == (["Net", "Net"], [1])
    assert [list(each) for each in named.threads[0]] == [[10, 20, 30, 40], [0, MODULE_LEFT, 1, MODULE_LEFT]]
    assert call_time(net) > 0 > call_time(net.eval())


ORIGIN_NS = 1_700_000_000_000_000_000


def write_trace_with(folder: Path, records: LineRecords) -> Path:
    path = folder / "trace.json"
    document = {"baseTimeNanoseconds": ORIGIN_NS, "traceEvents": [complete("aten::mm", "cpu_op", 1, 50, pid=7, tid=7)]}
    path.write_text(json.dumps(document))
    write_lines(records, path)
    return path


def records_with(times: list[int], modules: list[int], names: list[str]) -> LineRecords:
    thread = ThreadLines(
        7, b"", b"", array("q", [ORIGIN_NS + time for time in times]).tobytes(), array("i", modules).tobytes()
    )
    return LineRecords(
        process=7,
        start_unix_ns=ORIGIN_NS,
        end_unix_ns=ORIGIN_NS + 60_000,
        locations=[],
        threads=[thread],
        modules=names,
    )


def test_the_table_of_modules(tmp_path: Path) -> None:
    records = records_with([2000, 3000, 9000, 20000, 30000, 31000], [0, 1, -1, -1, 0, 9], ["Net", "Net.body"])
    path = write_trace_with(tmp_path, records)

    trace = open_trace(path, cache=None)
    trace.check()
    shift = trace.operators["start_ns"][0] - 1000

    assert trace.modules.with_columns(start_ns=trace.modules["start_ns"] - shift).rows() == [
        (2000, 18000, "Net", 0, False),
        (3000, 6000, "Net.body", 0, False),
        (30000, 30000, "Net", 0, False),
    ]
    part = open_trace(path, cache=None, window=Window(4000, 10_000))
    assert part.modules["name"].to_list() == ["Net", "Net.body"]


def test_a_file_of_lines_whose_modules_are_damaged_is_refused(tmp_path: Path) -> None:
    records = records_with([1, 2], [0], ["Net"])
    path = write_trace_with(tmp_path, records)

    with pytest.raises(Exception, match="times and modules of a thread differ"):
        read_lines(Path(f"{path}.lines"))
    assert "damaged_lines" in [warning.kind for warning in open_trace(path, cache=None).warnings]
