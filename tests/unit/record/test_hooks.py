"""Seeing steps in programs that say nothing of them; with the real torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from stepscope.record.controller import StepController, StepSource  # noqa: E402
from stepscope.record.hooks import Marker, StepHooks  # noqa: E402


@pytest.fixture
def controller() -> Iterator[StepController]:
    controller = StepController()
    hooks = StepHooks(controller)
    hooks.install()
    yield controller
    hooks.remove()


def train(optimizers: list[object], times: int = 1) -> None:
    for _ in range(times):
        for optimizer in optimizers:
            optimizer.step()  # type: ignore[attr-defined]


def optimizer(parameters: int = 1) -> object:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in range(parameters)], lr=0.1)


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ("", 0),
        ("a", 1),
        ("aaaa", 4),
        ("abababab", 4),
        ("aabaabaab", 4 + 2),  # b comes less often: from its second time on, it marks the steps
        ("aaaaabaaaaabaaaaab", 10 + 2),
        ("a" + "b" * 40, 1 + 25),  # a never comes again
        ("abcabcabc", 3),
    ],
)
def test_which_thing_marks_the_steps(keys: str, steps: int) -> None:
    marker = Marker()
    assert sum(marker.hit(ord(key)) for key in keys) == steps


def test_optimizer_steps(controller: StepController) -> None:
    train([optimizer()], 3)
    assert (controller.current_step(), controller.source) == (3, StepSource.OPTIMIZER)


def test_two_optimizers_that_take_turns_are_one_step(controller: StepController) -> None:
    train([optimizer(), optimizer()], 4)
    assert controller.current_step() == 4


def test_an_optimizer_that_is_made_anew_in_each_step_is_one(controller: StepController) -> None:
    model = torch.nn.Linear(2, 2)
    for _ in range(4):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert controller.current_step() == 4


def test_batches_are_steps_until_an_optimizer_steps(controller: StepController) -> None:
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
    assert [len(batch) for batch in loader] == [2, 2, 2, 2]
    assert (controller.current_step(), controller.source) == (4, StepSource.LOADER)

    train([optimizer()])
    list(loader)
    assert (controller.current_step(), controller.source) == (5, StepSource.OPTIMIZER)


def test_forward_calls_of_the_outermost_module(controller: StepController) -> None:
    class Slow(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: object) -> object:
            time.sleep(0.002)
            return x

    inner = Slow()
    outer = torch.nn.Sequential(inner, inner)
    until = time.monotonic() + 20
    while controller.current_step() < 5 and time.monotonic() < until:
        outer(torch.ones(1))
    before = controller.current_step()
    outer(torch.ones(1))

    assert (controller.source, before, controller.current_step()) == (StepSource.FORWARD, 5, 6)


def test_modules_are_left_as_they_were() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    own_calls = [(kind, vars(kind).get("__call__")) for kind in (torch.nn.Module, torch.nn.Sequential)]
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    before = (iterator.__next__, torch.autograd.profiler._enable_profiler)
    hooks = StepHooks(StepController())
    hooks.install()
    until = time.monotonic() + 20
    while "__call__" not in vars(torch.nn.Sequential) and time.monotonic() < until:
        module(torch.ones(2))
    assert "__call__" in vars(torch.nn.Sequential)
    assert torch.nn.modules.module._global_forward_pre_hooks == {}  # hooks there make torch.compile compile anew
    hooks.remove()

    assert [(kind, vars(kind).get("__call__")) for kind, _ in own_calls] == own_calls
    assert (iterator.__next__, torch.autograd.profiler._enable_profiler) == before
    assert module(torch.ones(2)).shape == (2,)


def test_what_was_removed_sees_nothing() -> None:
    controller = StepController()
    hooks = StepHooks(controller)
    hooks.install()
    hooks.remove()
    hooks.remove()
    train([optimizer()], 3)
    list(torch.utils.data.DataLoader([1, 2]))

    assert controller.current_step() == 0


def test_explicit_steps_overrule_all(controller: StepController) -> None:
    controller.step_boundary()
    train([optimizer()], 3)
    assert (controller.current_step(), controller.source) == (1, StepSource.EXPLICIT)


def test_the_programs_own_profiler_goes_first(controller: StepController) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert controller.others.active()
    assert (controller.others.active(), controller.others.seen) == (False, True)
    assert threading.active_count() >= 1


def test_the_first_call_of_a_model_in_each_call_of_a_repeated_function_is_a_step(controller: StepController) -> None:
    class Slow(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: object) -> object:
            time.sleep(0.002)
            return x

    def generate() -> None:
        model = Slow()  # made for each request
        for _ in range(3):
            model(torch.ones(1))

    until = time.monotonic() + 20
    while controller.source is not StepSource.CALL and time.monotonic() < until:
        generate()
    before = controller.current_step()
    generate()
    generate()

    assert (controller.source, controller.current_step()) == (StepSource.CALL, before + 2)
