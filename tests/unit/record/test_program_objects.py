"""Reading the program's objects runs none of its code."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from stepscope.record.hooks import _key_of
from stepscope.record.input_functions import sampler_function, stage_functions
from stepscope.record.lines import LineTracker
from stepscope.record.program_objects import (
    attributes,
    modules_in,
    names_in_roots,
    parameters_in,
    parameters_of,
    unseen,
)
from stepscope.record.step_objects import EvaluationWatch

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


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
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
    net = Net()
    optimizer = torch.optim.SGD([net.first[0].weight], 0.1)

    names = names_in_roots([net])
    assert names[id(net.first[0])] == "Net.first.0"
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
    assert "Net.first.0" in records.modules


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
