"""Functions that remedies leave with torch and Python: an error in them reaches no program."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import pytest
import torch

import stepscope.remedies
from stepscope import guard
from stepscope.record.apply import install
from stepscope.remedies import attempts, fuse_optimizer
from stepscope.remedies.attempts import BACKGROUND, guard_with
from stepscope.remedies.compile_caches import BackgroundEviction
from stepscope.remedies.optimizers.fused import GradientWatch

for _module in pkgutil.walk_packages(stepscope.remedies.__path__, f"{stepscope.remedies.__name__}."):
    importlib.import_module(_module.name)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = dict(guard.ENTRIES)
    yield
    guard_with(None)
    guard.ENTRIES.clear()
    guard.ENTRIES.update(before)


@pytest.mark.fails
@pytest.mark.parametrize("name", BACKGROUND)
def test_an_error_goes_through_the_guard_under_apply(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def probe(entered: str) -> None:
        if entered == name:
            raise RuntimeError("planted")

    install([], None).remove()
    guard.probe = probe

    assert BACKGROUND[name]() is None
    assert guard._failed_in == name
    assert "stepscope leaves this process" in capsys.readouterr().err


def test_an_error_in_the_users_own_program_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fuse_optimizer(torch.optim.SGD([parameter], 0.5))
    watch: GradientWatch = optimizer._gradient_watch  # type: ignore[attr-defined]
    monkeypatch.setattr(watch, "_waiting", [None])
    parameter.grad = torch.ones(3)

    with pytest.warns(RuntimeWarning, match=r"GradientWatch\._look failed: TypeError"):
        optimizer.step()

    assert parameter.tolist() == [0.5, 0.5, 0.5]
    assert attempts._guard is None


def test_an_error_in_a_closure_is_the_programs() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fuse_optimizer(torch.optim.SGD([parameter], 0.5))

    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)


def test_an_interrupt_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundEviction, "run", lambda _: sys.exit(3))
    with pytest.raises(SystemExit):
        BACKGROUND["remedies.compile_caches.BackgroundEviction._run_alone"](BackgroundEviction(()))
