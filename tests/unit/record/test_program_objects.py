"""The program's objects are read, noted and named without running their code or keeping them alive."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.readers import open_trace
from stepscope.record.hooks import _key_of
from stepscope.record.input_functions import sampler_function, stage_functions
from stepscope.record.lines import LineTracker
from stepscope.record.program_objects import (
    attributes,
    call_time,
    module_ref,
    modules_in,
    named_calls,
    names_in_roots,
    numbers_of,
    parameters_in,
    parameters_of,
    unseen,
)
from stepscope.record.step_objects import EvaluationWatch
from stepscope.trace import Window
from stepscope.trace.line_records import MODULE_LEFT, LineRecords, ThreadLines, read_lines, write_lines
from tests.unit.small_traces import complete

torch = pytest.importorskip("torch")
asked: list[str] = []


class Answers:
    """Notes whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            asked.append(name)
        raise AttributeError(name)

    def __len__(self) -> int:
        asked.append("__len__")
        return 8

    def __eq__(self, other: object) -> bool:
        asked.append("__eq__")
        return True

    def __hash__(self) -> int:
        asked.append("__hash__")
        return 1

    def __repr__(self) -> str:
        asked.append("__repr__")
        return "answers"

    def __setattr__(self, name: str, value: object) -> None:
        asked.append(f"set {name}")
        object.__setattr__(self, name, value)


class WatchedNet(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        self.again = self.first[0]

    def named_modules(self, *_: Any, **__: Any) -> Any:
        asked.append("named_modules")

    def parameters(self, recurse: bool = True) -> Any:
        asked.append("parameters")

    def modules(self) -> Any:
        asked.append("modules")

    __len__, __eq__, __hash__ = Answers.__len__, Answers.__eq__, Answers.__hash__

    def forward(self, x: Any) -> Any:
        return self.first(x)


@pytest.fixture(autouse=True)
def _asked() -> None:
    asked.clear()


def test_modules_and_parameters_are_those_that_torch_names() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1)))

    assert [name for name, _ in modules_in(plain).values()] == [name for name, _ in plain.named_modules()]
    assert list(map(id, parameters_in(plain))) == list(map(id, plain.parameters()))
    assert names_in_roots([plain])[id(plain[1][1])] == "Sequential.1.1"
    assert (modules_in(3), attributes(3), parameters_of(3)) == ({}, {}, [])


def test_a_module_whose_methods_do_something_is_not_asked() -> None:
    net = WatchedNet()
    optimizer = torch.optim.SGD([net.first[0].weight], 0.1)

    names = names_in_roots([net])
    assert names[id(net.first[0])] == "WatchedNet.first.0"
    assert len(list(parameters_in(net))) == 2
    assert _key_of(optimizer) == id(net.first[0].weight)
    watch = EvaluationWatch()
    watch.switched(net, False)
    tracker = LineTracker()
    tracker.start()
    net(torch.ones(1, 2))
    tracker.stop()
    records = tracker.records()

    assert asked == []
    assert records is not None
    assert "WatchedNet.first.0" in records.modules


def test_a_recorded_model_that_the_program_deletes_is_gone() -> None:
    tracker = LineTracker()
    tracker.start()
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2))
        gone = weakref.ref(model[0].weight)
        del model
        gc.collect()
        assert gone() is None
    tracker.stop()
    records = tracker.records()

    assert records is not None
    assert set(records.modules) == {"Sequential", "Sequential.Linear"}


def test_data_sets_transforms_and_collate_functions_are_not_asked() -> None:
    class Data(Answers):
        def __getitem__(self, index: int) -> int:
            return index

    data, called = Data(), Answers()
    object.__setattr__(data, "transform", lambda value: value)
    object.__setattr__(data, "target_transform", type("Call", (Answers,), {"__call__": lambda self, value: value})())

    found = [each.name for each in stage_functions(data, called)]
    loader = type("Loader", (), {})()
    vars(loader).update(batch_sampler=called, sampler=called)
    sampler_function(loader)

    assert asked == []
    assert [name.rpartition(".")[2] for name in found] == ["__getitem__", "Answers", "<lambda>", "Call"]


def test_modes_and_subclasses_of_the_program_see_nothing_of_ours() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append("function")
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append("operator")
            return function(*args, **(kwargs or {}))

    with Functions(), Operators():
        with unseen, unseen:
            assert float(torch.ones(2).sum()) == 2
            assert asked == []
        torch.ones(2)
    assert asked == ["function", "operator"]


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


def test_a_librarys_forward_is_noted_but_torchs_and_the_users_are_not(tmp_path: Path) -> None:
    source = tmp_path / "site-packages" / "layers.py"
    code = compile("\n\ndef forward(self, x):\n    return x\n", str(source), "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    kind = type("Layer", (torch.nn.Module,), {"forward": space["forward"]})
    wrapped = functools.wraps(space["forward"])(lambda self, x: x)
    outer = type("Outer", (torch.nn.Module,), {"forward": wrapped})
    modules = [kind(), outer(), torch.nn.ReLU(), Net()]

    notes = [each for number, module in enumerate(modules) for each in (number, module_ref(module, {}), number, None)]
    named = named_calls([notes])

    assert named.names == ["Layer", "Outer", "ReLU", "Net"]
    assert named.functions == [f"{source}:3 Layer.forward", f"{source}:3 Outer.forward", "", ""]


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
    functions = {"Net": "layers.py:1 Net.forward"}
    write_lines(msgspec.structs.replace(records, module_functions=["layers.py:1 Net.forward", ""]), path)
    program = open_trace(path, cache=None).metadata.program
    assert program is not None
    assert program.module_functions == functions
    write_lines(records, path)
    part = open_trace(path, cache=None, window=Window(4000, 10_000))
    assert part.modules["name"].to_list() == ["Net", "Net.body"]


def test_a_file_of_lines_whose_modules_are_damaged_is_refused(tmp_path: Path) -> None:
    records = records_with([1, 2], [0], ["Net"])
    path = write_trace_with(tmp_path, records)

    with pytest.raises(Exception, match="times and modules of a thread differ"):
        read_lines(Path(f"{path}.lines"))
    assert "damaged_lines" in [warning.kind for warning in open_trace(path, cache=None).warnings]


def test_numbers_of_views_of_any_strides() -> None:
    base = torch.arange(60).reshape(3, 4, 5)
    views = [base, base[1:, :, 2], base.permute(2, 0, 1)[::2], base[:1].expand(2, 4, 5), base > 7, base[:0], base.int()]

    assert [numbers_of(each).tolist() for each in views] == [each.tolist() for each in views]


def test_numbers_of_a_tensor_whose_memory_was_given_back() -> None:
    tensor = torch.arange(60)
    tensor.untyped_storage().resize_(8)

    with pytest.raises(ValueError, match="memory"):
        numbers_of(tensor)
