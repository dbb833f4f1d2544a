"""What a recording that has ended leaves in the program's process: nothing that a step could meet."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from stepscope import guard  # noqa: E402
from stepscope.record import bootstrap, hooks  # noqa: E402
from stepscope.record.bootstrap import FirstRecording, Phase  # noqa: E402
from stepscope.record.controller import StepController  # noqa: E402
from stepscope.record.manifest import RunManifest  # noqa: E402
from stepscope.record.run_folder import RunFolder  # noqa: E402
from stepscope.record.run_process import RunOptions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")
CONTAINERS = (dict, list, set)
CACHES = {"linecache", "re", "_sre", "inspect", "tokenize", "typing", "sys", "posix", "os", "encodings", "torch._ops"}
"""Modules that remember what was asked of them."""


def attributes() -> Iterator[tuple[str, object]]:
    """Every function of the program's modules and classes by identity, and how much every container there holds."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.startswith(("stepscope", "tests", "_pytest", "pytest")):
            continue
        for key, value in list(vars(module).items()):
            yield f"{name}.{key}", value
            if isinstance(value, type) and value.__module__ == name:
                for inner, each in list(vars(value).items()):
                    yield f"{name}.{key}.{inner}", each


def state() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in attributes():
        if isinstance(value, CONTAINERS):
            found[name] = len(value)
        elif callable(value) or isinstance(value, (property, classmethod, staticmethod)):
            found[name] = id(value)
    monitoring: Any = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring is not None else []
    return {
        **found,
        "trace": (sys.gettrace(), threading.gettrace()),
        "profile": (sys.getprofile(), threading.getprofile()),
        "tools": [(tool, monitoring.get_events(number)) for number, tool in enumerate(tools) if tool is not None],
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    }


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    known = {name.rpartition(".")[0] for name in before}
    return [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in after.items()
        if name.rpartition(".")[0] in known and before.get(name) != value and name.partition(".")[0] not in CACHES
    ]


def own_threads() -> dict[int, str]:
    """Functions of stepscope that other threads run, by thread."""
    here = threading.get_ident()
    folder = str(Path(guard.__file__).parent)
    return {
        thread: str(frame)
        for thread, frame in guard.current_frames().items()
        if thread != here and frame.f_code.co_filename.startswith(folder)
    }


class Training:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.batches = torch.utils.data.DataLoader([torch.ones(4) for _ in range(8)], 2)

    def epoch(self) -> None:
        for batch in self.batches:
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()


@pytest.fixture(autouse=True)
def hooks_of_optimizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """Torch's hooks of all optimizers, as in a process that has recorded and compiled nothing yet."""
    monkeypatch.setattr(hooks, "compiles", lambda: False)
    found: dict[int, Any] = vars(sys.modules["torch.optim.optimizer"])["_global_optimizer_post_hooks"]
    before = dict(found)
    found.clear()
    yield found
    found.clear()
    found.update(before)


def recorded(folder: Path) -> FirstRecording:
    """Attach to this process as `stepscope run` does."""
    run = RunFolder.create(folder, "run", RunManifest(command=("train.py",)))
    controller = StepController(lambda: run.new_trace_path(0))
    installed = hooks.AllHooks(controller)
    controller.listener = FirstRecording(controller, installed, run, RunOptions(telemetry=False, warmup=3, steps=2))
    installed.install_in("torch")
    return controller.listener


def test_nothing_stays_after_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooks_of_optimizers: dict[int, Any]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bootstrap, "TIMED_STEPS", 2)
    others = own_threads().keys()  # of earlier tests
    training = Training()
    training.epoch()
    for name in ("first", "second"):  # the first time, torch imports and remembers some things
        before = state()
        recording = recorded(tmp_path / name)
        while recording.phase is not Phase.RESTING:
            training.epoch()
        assert len(recording._folder.traces()) == 1
        training.epoch()

    assert differences(before, state()) == []
    assert not hooks_of_optimizers
    assert not own_threads().keys() - others
    assert not any(vars(module).get("_forward_hooks") for module in training.model.modules())


def test_a_hook_among_others_stays_and_does_nothing(hooks_of_optimizers: dict[int, Any]) -> None:
    """Torch may be calling them when it is removed, and fails at the next one where one was removed."""
    called: list[int] = []
    training, controller = Training(), StepController()
    ours = hooks.StepHooks(controller)
    ours.install()
    register_optimizer_step_post_hook(lambda *_: called.append(1))
    training.epoch()
    ours.remove()
    training.epoch()

    assert (len(called), controller.current_step(), len(hooks_of_optimizers)) == (8, 4, 2)


def test_what_was_imported_meanwhile_has_torchs_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.Module.__call__
    ours: Any = guard.around(own)
    module = types.ModuleType("imported_meanwhile")
    vars(module).update(unpatched=ours, other=len)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hooks._restore_copies(ours, own)

    assert (vars(module)["unpatched"], vars(module)["other"]) == (own, len)
