"""Captured steps, marks and loop constants; what graphs compute is held against the function run as it is, exactly."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from stepscope.remedies import LoopConstants, capture_step, mark_step  # noqa: E402
from stepscope.remedies.graphs.recording import CudaRecorder, GraphedSteps  # noqa: E402
from stepscope.remedies.graphs.static_arguments import (  # noqa: E402
    GraphedOptimizers,
    NotStatic,
    StaticArguments,
    flat,
)

SOURCES = Path(__file__).resolve().parents[3] / "src"


class ReplayedOnHost:
    """Stands for CUDA's recorder: recording changes nothing, and a launch writes the recorded results again.

    It holds what `GraphedSteps` does around graphs. What graphs themselves do, the tests marked gpu show.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        kept: Callable[[], list[Tensor]],
        parameters: Callable[[], list[nn.Parameter]] = list,
        waits: tuple[str, ...] = (),
    ) -> None:
        self.kept, self.parameters = kept, parameters
        self.waits = list(waits)
        self.recorded = 0
        self.launched = 0

    def run_aside(self, call: Callable[[], Any]) -> Any:
        return call()

    def waits_of(self, call: Callable[[], Any]) -> tuple[Any, list[str]]:
        return call(), self.waits

    def record(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        before = [each.grad for each in self.parameters()]
        held = [(each, each.detach().clone()) for each in (*self.kept(), *before) if each is not None]
        result = call()
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)
        outputs, after = flat(result).tensors, [each.grad for each in self.parameters()]

        def launch() -> None:
            self.launched += 1
            for parameter, gradient in zip(self.parameters(), before, strict=True):
                parameter.grad = gradient  # a graph knows no other memory
            new = flat(call()).tensors
            with torch.no_grad():
                for old, each in zip(outputs, new, strict=True):
                    old.copy_(each)
                for gradient, parameter in zip(after, self.parameters(), strict=True):
                    if gradient is not None and parameter.grad is not gradient:
                        gradient.copy_(parameter.grad)

        return result, launch


class Training:
    """A small model with its optimizer and step."""

    def __init__(self, optimizer: str = "SGD", **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), **{"lr": 0.1, **settings})

    def step(self, batch: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        output = self.model(batch)
        loss = (output - target).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "output": output}

    def state(self) -> list[Tensor]:
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *(each for each in held if isinstance(each, Tensor))]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def batches(count: int, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(count)
    ]


def both(data: list[tuple[Tensor, Tensor]], **settings: Any) -> tuple[Training, Training, GraphedSteps, ReplayedOnHost]:
    """A training run as it is and one with graphs, on the same batches; their results are the same, to the bit."""
    plain, graphed = Training(**settings), Training(**settings)
    recorder = ReplayedOnHost(graphed.state, graphed.parameters)
    steps = GraphedSteps(graphed.step, recorder, warm_up=2)
    results = [(plain.step(*each), steps(*each)) for each in data]
    for expected, result in results:  # compared at the end: earlier results must not have been written over
        assert set(result) == set(expected)
        assert all(torch.equal(result[name], expected[name]) for name in expected)
    for expected_state, state in zip(plain.state(), graphed.state(), strict=True):
        assert torch.equal(state, expected_state)
    return plain, graphed, steps, recorder


def test_a_captured_training_step_takes_the_same_course_to_the_bit() -> None:
    _, _, steps, recorder = both(batches(8), optimizer="SGD", momentum=0.9)
    assert (recorder.recorded, recorder.launched) == (1, 5)  # one call shows what runs, two warm up
    assert steps.captures == ["float32 [6, 4], float32 [6, 1]"]
    assert steps.refused is None


def test_gradients_stay_readable_after_a_launch() -> None:
    plain, graphed, _, _ = both(batches(7))
    for expected, parameter in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_every_shape_has_a_graph_of_its_own_up_to_a_limit() -> None:
    data = [each for pair in zip(batches(9), batches(9, rows=3), strict=True) for each in pair]
    _, _, steps, recorder = both(data, optimizer="Adam")
    assert recorder.recorded == 2
    assert sorted(steps.captures) == ["float32 [3, 4], float32 [3, 1]", "float32 [6, 4], float32 [6, 1]"]

    training = Training()
    steps = GraphedSteps(training.step, ReplayedOnHost(training.state), warm_up=1, most_graphs=1)
    for batch in batches(4):
        steps(*batch)
    with pytest.warns(RuntimeWarning, match=r"recorded 1 graphs; other arguments run as they are, such as float32 \[2"):
        steps(*batches(1, rows=2)[0])
    assert len(steps.captures) == 1
    assert steps.refused is None


def test_a_learning_rate_that_changes_outside_is_not_lost() -> None:
    plain, graphed = Training(), Training()
    recorder = ReplayedOnHost(graphed.state)
    steps = GraphedSteps(graphed.step, recorder, warm_up=1)
    schedules = [torch.optim.lr_scheduler.StepLR(each.optimizer, 5, 0.5) for each in (plain, graphed)]
    for batch in batches(10):
        assert torch.equal(steps(*batch)["loss"], plain.step(*batch)["loss"])
        for schedule in schedules:
            schedule.step()
    assert recorder.recorded == 2


def test_zeroing_and_accumulating_outside_are_the_callers_to_do() -> None:
    def step_of(training: Training) -> Callable[[Tensor, Tensor], Tensor]:
        def step(batch: Tensor, target: Tensor) -> Tensor:
            loss = (training.model(batch) - target).square().mean()
            loss.backward()
            training.optimizer.step()
            return loss

        return step

    plain, graphed = Training(), Training()
    eager = step_of(plain)
    steps = GraphedSteps(step_of(graphed), ReplayedOnHost(graphed.state, graphed.parameters), warm_up=1)
    for number, batch in enumerate(batches(12)):
        if number % 3 == 0:  # gradients of three steps add up
            plain.optimizer.zero_grad()
            graphed.optimizer.zero_grad()
        assert torch.equal(steps(*batch), eager(*batch))
    assert steps.refused is None
    assert len(steps.captures) == 2


def test_training_and_evaluation_are_different_graphs_and_new_addresses_are_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    recorder = ReplayedOnHost(list)
    steps = GraphedSteps(model, recorder, warm_up=1)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model.eval()
        for _ in range(4):
            assert torch.equal(steps(x), model[0](x))
        model.train()
        for _ in range(3):
            steps(x)
        assert recorder.recorded == 2
        model.eval()
        model[0].weight = nn.Parameter(torch.zeros(4, 4))
        for _ in range(4):
            assert torch.equal(steps(x), model[0].bias.expand(2, 4))
        assert recorder.recorded == 3


def reason(call: Callable[[GraphedSteps], Any], function: Callable[..., Any], **others: Any) -> str:
    recorder = ReplayedOnHost(list, **others)
    steps = GraphedSteps(function, recorder, warm_up=1)
    with pytest.warns(RuntimeWarning, match="capture_step runs the step as it is"):
        [call(steps) for _ in range(4)]
    assert steps.refused is not None
    assert recorder.recorded == 0
    return steps.refused


def test_what_cannot_be_captured_runs_as_it_is_and_says_why() -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    training = Training()
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)

    def backward_only(x: Tensor) -> None:
        model(x).sum().backward()

    def scheduled(x: Tensor) -> None:
        training.step(x, torch.zeros(2, 1))
        schedule.step()

    def in_place(x: Tensor) -> Tensor:
        return x.add_(1)

    class Batch:
        data = x

    assert "backward pass outside" in reason(lambda steps: steps(x), model)
    assert "gradients to an optimizer outside" in reason(lambda steps: steps(x), backward_only)
    assert "schedule of learning rates" in reason(lambda steps: steps(x), scheduled)
    assert "holds a Batch" in reason(lambda steps: steps(Batch()), lambda batch: batch.data + 1)
    assert "holds a Tensor" in reason(lambda steps: steps(x.to_sparse()), lambda x: x)
    assert "the result holds a Batch" in reason(lambda steps: steps(x), lambda x: Batch())
    assert "requires a gradient" in reason(lambda steps: steps(x.clone().requires_grad_()), lambda x: x.detach() + 1)
    assert "at train.py:31 and 1 more places" in reason(
        lambda steps: steps(x), lambda x: x + 1, waits=("train.py:31", "train.py:40")
    )
    counted = torch.zeros(1)
    assert "changes a tensor among its arguments" in reason(lambda steps: steps(counted), in_place)
    assert counted.item() == 4  # as often as it was called


def test_what_runs_elsewhere_stays_there() -> None:
    class OnDevice(ReplayedOnHost):
        device = torch.device("meta")

    steps = GraphedSteps(lambda x: x + 1, OnDevice(list))
    with pytest.warns(RuntimeWarning, match="nothing that it gets or runs is on a meta device"):
        result = steps(torch.ones(2))
    assert result.tolist() == [2, 2]


def test_inference_mode_is_captured_too() -> None:
    model = nn.Linear(4, 2)
    recorder = ReplayedOnHost(list)
    steps = GraphedSteps(model, recorder, warm_up=1)
    with torch.inference_mode():
        for number in range(5):
            x = torch.full((2, 4), float(number))
            assert torch.equal(steps(x), model(x))
    assert (recorder.recorded, recorder.launched, steps.refused) == (1, 3, None)


def test_a_failed_recording_leaves_the_step_as_it_was() -> None:
    class Failing(ReplayedOnHost):
        def record(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            for each in training.model.parameters():
                each.grad = torch.full_like(each, float("nan"))
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain, training = Training(), Training()
    steps = GraphedSteps(training.step, Failing(training.state), warm_up=1)
    with pytest.warns(RuntimeWarning, match="recording failed: operation not permitted when stream is capturing$"):
        losses = [steps(*batch)["loss"] for batch in batches(6)]
    assert losses == [plain.step(*batch)["loss"] for batch in batches(6)]


def test_arguments_are_taken_apart_and_put_together_again() -> None:
    first, second = torch.ones(2), torch.zeros(3, dtype=torch.int64)
    value = ((first, [second, 3]), {"mask": None, "more": (True, "word")})
    found = flat(value)
    assert [each.shape for each in found.tensors] == [(2,), (3,)]
    assert found.rebuilt(found.tensors) == value
    same = flat(((first + 1, [second, 3]), {"mask": None, "more": (True, "word")}))
    assert same.signature == found.signature
    assert hash(same.signature) == hash(found.signature)
    for other in (
        ((first, [second, 4]), {"mask": None, "more": (True, "word")}),
        ((first, [second, 3]), {"mask": None, "more": (1, "word")}),
        ((first.double(), [second, 3]), {"mask": None, "more": (True, "word")}),
        ((first, (second, 3)), {"mask": None, "more": (True, "word")}),
    ):
        assert flat(other).signature != found.signature
    assert flat(torch.ones(2, 3)).signature != flat(torch.ones(3, 2).t()).signature
    with pytest.raises(NotStatic, match="holds a set"):
        flat({1, 2})


def test_static_arguments_keep_their_place() -> None:
    given = flat(((torch.ones(2),), {"scale": torch.full((1,), 3.0)}))
    static = StaticArguments(given, torch.device("cpu"))
    places = [each.data_ptr() for each in static.buffers]
    static.fill([torch.tensor([1.0, 2.0]), torch.tensor([4.0])])
    assert static.call(lambda x, scale: (x * scale).tolist()) == [4.0, 8.0]
    assert [each.data_ptr() for each in static.buffers] == places


def test_optimizers_are_made_ready_for_graphs() -> None:
    training = Training("Adam")
    training.step(*batches(1)[0])
    graphed = GraphedOptimizers(device_types=("cpu",))
    graphed.add([training.optimizer])
    group = training.optimizer.param_groups[0]
    assert group["capturable"] is True
    assert isinstance(group["lr"], Tensor)
    assert all(state["step"].item() == 1 for state in training.optimizer.state.values())
    rate, key = group["lr"], graphed.key
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5).step()
    assert not graphed.refresh()
    assert group["lr"] is rate
    assert rate.item() == pytest.approx(0.05)
    assert graphed.key == key
    group["lr"] = 0.025  # as code that sets it by hand does
    assert not graphed.refresh()
    assert group["lr"] is rate
    assert rate.item() == pytest.approx(0.025)
    group["weight_decay"] = 0.5
    assert graphed.key != key
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert graphed.refresh()
    assert isinstance(training.optimizer.param_groups[0]["lr"], Tensor)


def test_without_a_device_auto_runs_the_step_as_it_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("here auto makes CUDA graphs")
    training = Training()
    step = capture_step(training.step)
    assert step.mode == "none"
    assert 'mode="compile"' in step.why
    assert step.captures == ()
    assert step.__name__ == "step"
    plain = Training()
    for batch in batches(2):
        assert torch.equal(step(*batch)["loss"], plain.step(*batch)["loss"])
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        capture_step(training.step, mode="cuda-graph")


def test_compiled_steps_give_what_the_step_gives() -> None:
    """Tolerance 1e-6: a compiler may sum in another order. Torch's own takes long and is tried by the benchmark."""
    model = nn.Linear(4, 2)

    def score(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(model(x)).sum(1)

    captured = capture_step(score, mode="compile", backend="aot_eager")
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(captured(x), score(x), atol=1e-6, rtol=1e-6)
    assert (captured.mode, captured.why) == ("compile", "as asked for")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "graph"}, "mode is 'graph'; it takes auto, cuda-graph"),
        ({"compile_mode": "fast"}, "compile_mode is 'fast'; it takes default"),
        ({"warm_up": 0}, "warm_up is 0; it takes a whole number from 1 on"),
        ({"most_graphs": -1}, "most_graphs is -1; it takes"),
    ],
)
def test_mistaken_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture_step(lambda: None, **arguments)


def test_mistaken_steps_and_missing_packages() -> None:
    with pytest.raises(TypeError, match="a function or a module, not int"):
        capture_step(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"import habana_frameworks\.torch\.hpu first"):
        capture_step(nn.Linear(1, 1), mode="hpu-graph")


# What calls the vendors' packages get, by their documented signatures.


@pytest.fixture
def gaudi(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Modules that stand for Gaudi's package and note the calls that they get."""
    calls: list[tuple[Any, ...]] = []

    def wrap_in_hpu_graph(
        module: nn.Module,
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
        max_graphs: int | None = None,
    ) -> nn.Module:
        calls.append(("wrap_in_hpu_graph", module, disable_tensor_cache, max_graphs))
        return module

    class ModuleCacher:
        def __init__(self, max_graphs: int = 10) -> None:
            self.max_graphs = max_graphs

        def __call__(self, model: nn.Module, inplace: bool = True, have_grad_accumulation: bool = False) -> None:
            calls.append(("ModuleCacher", model, self.max_graphs, inplace, have_grad_accumulation))

    state = types.SimpleNamespace(calls=calls, lazy=True)
    made = {
        "habana_frameworks.torch.core": {"mark_step": lambda: calls.append(("mark_step",))},
        "habana_frameworks.torch.hpu": {
            "wrap_in_hpu_graph": wrap_in_hpu_graph,
            "ModuleCacher": ModuleCacher,
            "is_available": lambda: True,
        },
        "habana_frameworks.torch.utils.internal": {"is_lazy": lambda: state.lazy},
    }
    for name, content in made.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return state


def test_on_gaudi_modules_go_into_its_graphs(gaudi: types.SimpleNamespace) -> None:
    model = nn.Linear(2, 2)
    trained = capture_step(model, vendor_arguments={"max_graphs": 3, "have_grad_accumulation": True})
    assert (trained.mode, trained.why) == ("hpu-graph", "Gaudi is in use in lazy mode")
    assert gaudi.calls == [("ModuleCacher", model, 3, True, True)]
    gaudi.calls.clear()
    x = torch.ones(1, 2)
    asked = capture_step(model.eval(), vendor_arguments={"disable_tensor_cache": True})
    assert gaudi.calls == [("wrap_in_hpu_graph", model, True, None)]
    assert torch.equal(asked(x), model(x))
    step = capture_step(lambda: 3)
    assert step.mode == "none"
    assert "give capture_step the model" in step.why
    assert step() == 3
    gaudi.lazy = False
    with pytest.raises(RuntimeError, match="need lazy mode"):
        capture_step(model, mode="hpu-graph")


def test_marks_end_the_graph_where_one_is_collected(
    gaudi: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_step()
    assert gaudi.calls == [("mark_step",)]
    gaudi.lazy = False
    mark_step()
    assert gaudi.calls == [("mark_step",)]

    started = [False]
    xla = types.ModuleType("torch_xla")
    vars(xla).update(
        sync=lambda: gaudi.calls.append(("sync",)),
        _XLAC=types.SimpleNamespace(_xla_runtime_is_initialized=lambda: started[0]),
    )
    monkeypatch.setitem(sys.modules, "torch_xla", xla)
    mark_step()
    assert gaudi.calls == [("mark_step",)]  # loaded, but no device of it in use
    started[0] = True
    mark_step()
    assert gaudi.calls[-1] == ("sync",)
    older = types.ModuleType("torch_xla.core.xla_model")
    vars(older).update(mark_step=lambda: gaudi.calls.append(("xm.mark_step",)))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", older)
    del xla.sync
    mark_step()
    assert gaudi.calls[-1] == ("xm.mark_step",)


@pytest.mark.slow
def test_marks_import_nothing() -> None:
    program = (
        "import sys; from stepscope.remedies import mark_step; mark_step()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch_xla', 'habana_frameworks', 'numpy')\n"
        "       and name.split('.')[0] != 'numpy' or name.startswith('stepscope.') and 'remedies' not in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SOURCES), "PATH": ""},
    )
    assert done.stdout == "[]\n"


class Counting:
    """A compiler that counts what it is given and runs it as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


VALUES = [0.9, 0.5, 0.25, 0.125]


def compiled_loop(values: Any) -> tuple[int, list[float]]:
    """How many graphs a loop over the values takes, and what it computes."""
    torch._dynamo.reset()
    compiler = Counting()

    @torch.compile(backend=compiler, dynamic=False, fullgraph=True)
    def iteration(x: Tensor, value: Any) -> Tensor:
        y = x * value + value
        mark_step()  # would break the graph, which fullgraph does not allow
        return y

    x = torch.ones(2)
    for value in values:
        x = iteration(x, value)
    return compiler.graphs, x.tolist()


def test_loop_constants_are_compiled_once() -> None:
    plain_graphs, expected = compiled_loop(VALUES)
    assert plain_graphs == 4
    for rolled in (False, True):
        assert compiled_loop(LoopConstants(VALUES, rolled=rolled)) == (1, expected)


@pytest.mark.parametrize("rolled", [False, True])
def test_loop_constants_hold_the_values(rolled: bool) -> None:
    constants = LoopConstants(VALUES, rolled=rolled, dtype=torch.float64)
    assert len(constants) == 4
    assert [each.item() for each in constants] == VALUES == [each.item() for each in constants]
    assert all(each.shape == () and each.dtype == torch.float64 for each in constants)
    assert [tuple(each.item() for each in pair) for pair in constants.windows(2)] == [
        (0.9, 0.5),
        (0.5, 0.25),
        (0.25, 0.125),
    ]
    assert list(constants.windows(5)) == []
    assert len(list(constants.windows(4))) == 1
    rows = torch.arange(6).reshape(2, 3)
    taken = LoopConstants(rows, rolled=rolled)
    rows.zero_()
    assert [each.tolist() for each in taken] == [[0, 1, 2], [3, 4, 5]]
    assert repr(taken) == "LoopConstants(2 values of shape (3,), torch.int64, cpu)"
    assert list(LoopConstants([], rolled=rolled)) == []
    assert [each.shape for each in LoopConstants(torch.ones(2, 0), rolled=rolled)] == [(0,), (0,)]


def test_loop_constants_begin_where_compiled_code_takes_them() -> None:
    assert all(each.data_ptr() % 16 == 0 for each in LoopConstants(VALUES, rolled=False))
    assert all(each.data_ptr() % 16 == 0 for each in LoopConstants(torch.ones(5, 3, dtype=torch.bfloat16)))


def test_mistaken_loop_constants() -> None:
    for wrong in (3, "abc", [object()]):
        with pytest.raises(TypeError, match="takes numbers or a tensor"):
            LoopConstants(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without dimensions"):
        LoopConstants(torch.tensor(1.0))
    with pytest.raises(ValueError, match="one value or more, not 0"):
        list(LoopConstants([1.0]).windows(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_cuda_graphs_take_the_same_course(optimizer: str) -> None:
    """Tolerance 1e-5: a capturable optimizer corrects its bias in single precision."""
    plain, graphed = Training(optimizer), Training(optimizer)
    for each in (plain, graphed):
        each.model.cuda()
    step = capture_step(graphed.step)
    data = [each for pair in zip(batches(8), batches(8, rows=3), strict=True) for each in pair]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in data:
            on_device = tuple(each.cuda() for each in batch)
            expected, result = plain.step(*on_device), step(*on_device)
            torch.testing.assert_close(result["loss"], expected["loss"].detach(), atol=1e-5, rtol=1e-5)
    assert step.mode == "cuda-graph"
    assert len(step.captures) == 2
    for expected, parameter in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_steps_that_wait_are_not_recorded() -> None:
    def step(x: Tensor) -> float:
        return float((x * 2).sum())

    captured = capture_step(step)
    with pytest.warns(RuntimeWarning, match="waits for the device at"):
        results = [captured(torch.full((2,), float(number), device="cuda")) for number in range(6)]
    assert results == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    assert captured.mode == "none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_recording_that_fails_leaves_a_device_that_works() -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        recorder.record(lambda: (x * 2).cpu())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.nn.functional.dropout(x, 0.5).shape == (4,)
