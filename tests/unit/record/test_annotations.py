"""`stepscope.step` and `stepscope.annotate`: what profilers see of them, and that they keep out of the way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stepscope
from stepscope.analysis.steps import step_table
from stepscope.record import annotations
from stepscope.trace import Trace

torch = pytest.importorskip("torch")


@contextmanager
def _recorded(path: Path, **options: Any) -> Iterator[list[Trace]]:
    found: list[Trace] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
        yield found
    profiler.export_chrome_trace(str(path))
    found.append(stepscope.open_trace(path))


class _Spy:
    """A profiler's class of annotations that notes what happens to them."""

    def __init__(self, log: list[Any], kind: str) -> None:
        self._log, self._kind = log, kind

    def __call__(self, *arguments: Any, **named: Any) -> _Spy:
        self._log.append((self._kind, *arguments, *named.items()))
        return self

    def __enter__(self) -> None:
        self._log.append("in")

    def __exit__(self, *_: object) -> None:
        self._log.append("out")


def test_a_block_a_function_and_a_step(tmp_path: Path) -> None:
    @stepscope.annotate("evaluate")
    def evaluate() -> int:
        """What it says."""
        with stepscope.annotate("inside"):
            return 3

    with _recorded(tmp_path / "trace.json") as found, stepscope.step("train", 12):
        assert evaluate() == 3

    names = found[0].annotations.filter(found[0].annotations["kind"] == "host")["name"].to_list()
    assert names == ["stepscope.step#12 train", "evaluate", "inside"]
    assert evaluate.__doc__ == "What it says."


def test_numbered_steps_are_the_traces_steps(tmp_path: Path) -> None:
    with _recorded(tmp_path / "trace.json") as found:
        for number in (3, 4, 5):
            with stepscope.step(number=number):
                torch.ones(3)
        with stepscope.step("evaluate", number=9):
            torch.ones(3)

    steps = step_table(found[0])

    assert steps["index"].to_list() == [3, 4, 5]
    assert steps["source"].unique().to_list() == ["annotation"]


def test_torchs_own_steps_come_first(tmp_path: Path) -> None:
    found: list[Trace] = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(tmp_path / "trace.json")),
    ) as profiler:
        for _ in range(4):
            with stepscope.step("train", number=70):
                torch.ones(3)
            profiler.step()
    found.append(stepscope.open_trace(tmp_path / "trace.json"))

    assert step_table(found[0])["index"].to_list() == [1, 2]
    assert "stepscope.step#70 train" in found[0].annotations["name"].to_list()


def test_steps_without_a_number_are_counted_by_name(tmp_path: Path) -> None:
    annotations._numbers.clear()
    with _recorded(tmp_path / "trace.json") as found:
        for name in ("train", "train", "evaluate", "train"):
            with stepscope.step(name):
                pass

    names = found[0].annotations.filter(found[0].annotations["kind"] == "host")["name"].to_list()
    assert names == ["stepscope.step#0 train", "stepscope.step#1 train", "stepscope.step#0 evaluate",
                     "stepscope.step#2 train"]  # fmt: skip


def test_one_object_may_be_open_several_times_and_on_several_threads(tmp_path: Path) -> None:
    mark = stepscope.annotate("mark")
    met = threading.Barrier(2)

    def other() -> None:
        with mark:
            met.wait()
            met.wait()

    thread = threading.Thread(target=other)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with _recorded(tmp_path / "trace.json", experimental_config=config) as found:
        thread.start()
        met.wait()
        with mark, mark:
            met.wait()
        thread.join()

    marks = found[0].annotations.filter(found[0].annotations["name"] == "mark")
    assert sorted(marks.group_by("lane").len()["len"].to_list()) == [1, 2]


def test_exceptions_pass_and_close_what_is_open(tmp_path: Path) -> None:
    with _recorded(tmp_path / "trace.json") as found:
        with pytest.raises(KeyError), stepscope.step(number=1), stepscope.annotate("forward"):
            raise KeyError
        with stepscope.annotate("after"):
            pass

    names = found[0].annotations.filter(found[0].annotations["kind"] == "host")["name"].to_list()
    assert names == ["stepscope.step#1 train", "forward", "after"]
    assert annotations._opened.stack == []


def test_functions_that_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=_Spy([], "nvtx")))
    monkeypatch.setattr(annotations, "_UNDER_NSIGHT", True)

    @stepscope.annotate("wait")
    async def wait(value: int) -> int:
        opened.append(len(annotations._opened.stack))
        await asyncio.sleep(0)
        return value

    async def both() -> list[int]:
        return await asyncio.gather(wait(1), wait(2))

    assert asyncio.run(both()) == [1, 2]
    assert opened == [1, 2]
    assert annotations._opened.stack == []


def test_xla_and_jax_and_nsight_see_them_where_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    xla = SimpleNamespace(Trace=SimpleNamespace(__bases__=(_Spy(log, "xla event"),)))
    jax = SimpleNamespace(TraceAnnotation=_Spy(log, "jax"), StepTraceAnnotation=_Spy(log, "jax step"))
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_xla.debug.profiler", xla)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(profiler=jax))
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=_Spy(log, "nvtx")))
    monkeypatch.setattr(annotations, "_UNDER_NSIGHT", True)

    with stepscope.annotate("forward"):
        pass
    with stepscope.step("train", 4):
        pass

    assert log == [
        ("xla event", "forward"), "in", ("jax", "forward"), "in", ("nvtx", "forward"), "in", "out", "out", "out",
        ("xla event", "train", ("_r", 1), ("step_num", 4)), "in", ("jax step", "train", ("step_num", 4)), "in",
        ("nvtx", "stepscope.step#4 train"), "in", "out", "out", "out",
    ]  # fmt: skip


def test_nsight_by_torchs_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(annotations, "_UNDER_NSIGHT", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))

    with stepscope.annotate("forward"):
        pass

    assert log == ["forward", "pop"]


def test_a_profiler_that_fails_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(annotations, "_UNDER_NSIGHT", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", broken)

    with stepscope.annotate("forward"):
        pass


def test_the_controller_hears_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    boundaries: list[int] = []
    controller = SimpleNamespace(step_boundary=lambda: boundaries.append(1))
    module = SimpleNamespace(controller=lambda: controller)
    monkeypatch.setitem(sys.modules, "stepscope.record.controller", module)

    with stepscope.annotate("forward"):
        pass
    for _ in range(2):
        with stepscope.step():
            assert len(boundaries) < 2

    assert boundaries == [1, 1]


def test_nothing_is_imported_for_them() -> None:
    program = (
        "import sys, stepscope\n"
        "with stepscope.step('train', 1), stepscope.annotate('forward'):\n"
        "    pass\n"
        "print([name for name in ('torch', 'jax', 'torch_xla', 'polars', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
