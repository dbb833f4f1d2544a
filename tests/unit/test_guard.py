"""The guard between the user's process and stepscope."""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import stepscope
from stepscope import guard
from stepscope.guard import around, attempt, entry, hide, on_failure, replaced
from stepscope.machine.energy_counters import SampledPower
from stepscope.machine.quiet import _SeedWhenImported
from stepscope.record import bootstrap
from stepscope.record import lines as line_watches
from stepscope.record.apply.code_swaps import Guard
from stepscope.record.constant_calls import ConstantLook
from stepscope.record.equal_values import ValueLook
from stepscope.record.lines import LineTracker
from stepscope.record.repetition import BusyFunctions
from stepscope.threads import Lock, Thread
from stepscope.trace.energy_records import Counter
from tests.guest import entries

fails = pytest.mark.fails


@entry
def _hook(error: BaseException | None = None) -> str:
    if error is not None:
        raise error
    return "done"


@entry(otherwise="instead", raises=KeyError)
def _asked(error: BaseException | None = None) -> str:
    return _hook(error)


@pytest.fixture(autouse=True)
def _listed() -> Iterator[None]:
    before = dict(guard.ENTRIES)
    yield
    guard.ENTRIES.clear()
    guard.ENTRIES.update(before)


class TestEntries:
    def test_an_entry_returns_what_its_function_does(self) -> None:
        assert (_hook(), _asked()) == ("done", "done")

    @fails
    @pytest.mark.parametrize("error", [RuntimeError("a"), OSError(28, "full"), MemoryError(), BaseException("panic")])
    def test_an_error_ends_in_one_line_and_no_entry_works_any_more(
        self, error: BaseException, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found: Any = _hook(error)

        assert found is None
        assert (_hook(), _asked()) == (None, "instead")
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert type(error).__name__ in told
        report = Path(told.strip().rpartition("details: ")[2])
        assert report.stat().st_mode & 0o077 == 0
        assert type(error).__qualname__ in report.read_text()
        report.unlink()

    @fails
    def test_everything_is_taken_off_the_latest_first(self, capsys: pytest.CaptureFixture[str]) -> None:
        done: list[str] = []
        on_failure("the first", lambda: done.append("first"))
        on_failure("the second", lambda: 1 / 0)
        guard.off(on_failure("what ended", lambda: done.append("ended")))
        on_failure("", lambda: done.append("last"))

        _hook(ValueError())

        assert done == ["last", "first"]
        assert "loses the first, the second:" in capsys.readouterr().err

    @fails
    def test_what_an_outer_entry_puts_on_later_is_taken_off_too(self) -> None:
        done: list[str] = []

        def outer() -> None:
            _hook(ValueError())
            on_failure("later", lambda: done.append("later"))
            assert done == []  # the outer entry is not over

        entry_of(outer)()

        assert done == ["later"]

    @fails
    def test_what_only_one_thread_may_take_off_waits_for_it(self) -> None:
        done: list[int] = []
        on_failure("", lambda: done.append(threading.get_ident()), thread=threading.get_ident())

        other = threading.Thread(target=_hook, args=[ValueError()])
        other.start()
        other.join()
        before = list(done)
        _hook()

        assert (before, done) == ([], [threading.get_ident()])

    @fails
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
    def test_a_forked_child_leaves_what_is_its_parents(self) -> None:
        done: list[str] = []
        on_failure("", lambda: done.append("taken off"))
        child = os.fork()
        if not child:
            _hook(ValueError())
            os._exit(len(done))

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_a_mistake_of_the_callers_passes(self) -> None:
        with pytest.raises(KeyError):
            entry_of(lambda: {}["missing"], raises=KeyError)()
        assert not guard.has_failed()

    def test_an_entry_can_be_listed(self) -> None:
        with pytest.raises(ValueError, match="module or class"):
            entry(lambda: None)


def entry_of(function: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
    """A function as an entry, as if it stood in a module."""
    function.__qualname__ = "function"
    return entry(**settings)(function) if settings else entry(function)


class TestUsersOwn:
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
    def test_ends_pass(self, error: BaseException) -> None:
        with pytest.raises(type(error)):
            _hook(error)
        assert not guard.has_failed()

    @pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals")
    def test_what_a_signal_handler_raises_passes(self) -> None:
        class Late(Exception):
            pass

        def handler(number: int, frame: Any) -> None:
            raise Late

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(Late):
                entry_of(lambda: signal.raise_signal(signal.SIGUSR1))()
            with pytest.raises(Late), attempt():
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not guard.has_failed()

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 shows the frame that raises again")
    def test_a_traceback_has_the_programs_frames_alone(self) -> None:
        def program() -> None:
            raise ValueError("the program's")

        patched = around(around(program), before=lambda: None, after=lambda *_: None)
        with pytest.raises(ValueError, match="the program's") as raised:
            patched()

        files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert set(files) == {__file__}

    def test_frames_of_ours_inside_are_kept(self) -> None:
        with pytest.raises(UnicodeDecodeError) as raised:
            stepscope.open_trace(b"\xff".decode("ascii"))
        before = traceback.format_tb(raised.value.__traceback__)
        hide(raised.value)
        assert traceback.format_tb(raised.value.__traceback__) == before

    def test_an_attempt_keeps_no_frames_alive(self) -> None:
        with attempt() as tried:
            raise ValueError("of ours")
        assert isinstance(tried.error, ValueError)
        assert tried.error.__traceback__ is None


class TestReplaced:
    def test_the_originals_error_passes_and_it_is_called_once(self) -> None:
        calls: list[int] = []

        def original(value: int) -> None:
            calls.append(value)
            raise KeyError(value)

        with pytest.raises(KeyError):
            replaced(original, lambda call, value: call(value), "name")(3)
        assert calls == [3]
        assert not guard.has_failed()

    @fails
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_where_ours_fails_the_original_has_been_called_once_as_the_program_did(self, when: str) -> None:
        calls: list[int] = []

        def original(value: int) -> int:
            calls.append(value)
            return value * 2

        def ours(call: Any, value: int) -> int:
            if when == "after":
                call(value)
            raise RuntimeError("ours")

        assert replaced(original, ours, "name")(3) == 6
        assert calls == [3]
        assert guard.has_failed()

    @fails
    def test_where_ours_fails_after_the_originals_error_that_one_is_raised(self) -> None:
        def original() -> None:
            raise KeyError("original")

        def ours(call: Any) -> None:
            try:
                call()
            except KeyError:
                raise RuntimeError("ours") from None

        with pytest.raises(KeyError):
            replaced(original, ours, "name")()


@fails
def test_a_watch_of_lines_that_fails_ends_and_the_program_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = LineTracker()
    monkeypatch.setattr(line_watches, "_is_user", defaultdict(bool, {__file__: True}))
    ticks = itertools.count()

    def time_ns() -> int:
        if next(ticks) == 6:
            raise RuntimeError("planted")
        return 0

    clock = ModuleType("time")
    clock.time_ns = time_ns  # type: ignore[attr-defined]
    monkeypatch.setattr(line_watches, "time", clock)
    on_failure("", tracker.stop)
    before = sys.gettrace()
    sys.settrace(None)
    try:
        tracker.start()
        total = 0
        for number in range(20):
            total += number
        left = sys.gettrace()
    finally:
        sys.settrace(before)

    assert (total, left) == (190, None)
    assert guard._failed_in in guard.INLINE


@fails
def test_a_thread_that_samples_power_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = SampledPower(Counter("gpu", "0", "power samples"), lambda: 1.0, interval_s=0.001)
    guard.probe = _fails_in("machine.energy_counters.SampledPower._run")

    thread = threading.Thread(target=sampled._run)
    thread.start()
    thread.join(10)
    sampled.close()

    assert guard._failed_in == "machine.energy_counters.SampledPower._run"


@fails
def test_a_thread_that_samples_lines_fails_alone() -> None:
    guard.probe = _fails_in("record.repetition.BusyFunctions._sample")

    thread = threading.Thread(target=BusyFunctions(lambda file: True)._sample)
    thread.start()
    thread.join(10)

    assert guard._failed_in == "record.repetition.BusyFunctions._sample"


@fails
def test_a_late_exit_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(bootstrap, "_EXIT", ended.append)
    guard.probe = _fails_in("record.bootstrap._exit_late")
    bootstrap._exit_late(3)

    assert (guard.has_failed(), ended) == (True, [])


@fails
def test_a_seed_that_cannot_be_fixed_lets_the_import_pass() -> None:
    loader = ModuleType("loader")
    loader.exec_module = lambda module: setattr(module, "imported", True)  # type: ignore[attr-defined]
    module = ModuleType("module")
    _SeedWhenImported({"module": lambda module, seed: 1 / 0}, 3)._wrap("module", loader)

    loader.exec_module(module)

    assert module.imported
    assert guard._failed_in == "machine.quiet._SeedWhenImported._imported"


@fails
def test_a_rewrite_that_cannot_be_asked_about_is_left_out() -> None:
    guard.probe = _fails_in("record.apply.code_swaps.Guard.__call__")

    assert Guard(lambda *_: True)(0) is False
    assert guard.has_failed()


def test_the_collector_rests_while_frames_of_threads_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs, a callback of it may let a thread begin, which waits for ever: see `guard.current_frames`."""
    states: list[bool] = []
    reading = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (states.append(gc.isenabled()), reading())[1])
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        assert threading.get_ident() in guard.current_frames()
        states.append(gc.isenabled())
    gc.enable()

    assert states == [False, True, False, False]
    modules = Path(guard.__file__).parent.rglob("*.py")
    assert [path.name for path in modules if "sys._current_frames()" in path.read_text()] == ["guard.py"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_lock_is_free_in_a_forked_child_and_for_the_thread_that_holds_it() -> None:
    lock, held, over = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock, lock:
            held.set()
            over.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout_s=0) else 1)
    here = lock.acquire(timeout_s=0)
    over.set()
    thread.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not here
    assert lock.acquire(timeout_s=0)


def test_no_thread_of_the_program_waits_for_another_kind_of_lock() -> None:
    """These three are never waited for."""
    root = Path(guard.__file__).parent
    modules = [path for room in ("record", "machine") for path in (root / room).rglob("*.py")]
    kinds = ("threading.Lock()", "threading.RLock()", "threading.Condition()")
    found = {path.name: path.read_text() for path in modules if any(kind in path.read_text() for kind in kinds)}

    assert set(found) == {"recorder.py", "profile_block.py", "values.py"}
    assert all("acquire(blocking=False)" in text for text in found.values())


def test_the_programs_list_of_threads_has_none_of_ours() -> None:
    over, before = threading.Event(), threading.enumerate()
    thread = Thread(over.wait)
    thread.start()
    during, alive = threading.enumerate(), thread.is_alive()
    thread.join(0.001)
    over.set()
    thread.join(10)

    assert during == before
    assert (alive, thread.is_alive()) == (True, False)


@fails
def test_an_entry_needs_no_more_of_a_nearly_full_stack_than_a_function_does() -> None:
    def deep(left: int, function: Callable[[], Any]) -> Any:
        return function() if left == 0 else deep(left - 1, function)

    def plain() -> str:
        return "done"

    def fits(left: int, function: Callable[[], Any]) -> bool:
        try:
            deep(left, function)
        except RecursionError:
            return False
        return True

    depths = range(sys.getrecursionlimit() - 200, sys.getrecursionlimit())
    deepest = max(left for left in depths if fits(left, plain))
    assert all(fits(left, _hook) for left in range(deepest - 40, deepest + 1))


def _values() -> Callable[[], object]:
    look = ValueLook()
    look.start()
    return look.stop


def _constants() -> Callable[[], object]:
    look = ConstantLook()
    look.start()
    look.leave()
    return look.stop


def _lines() -> Callable[[], object]:
    tracker = LineTracker()
    tracker.start()
    on_failure("", tracker.stop)
    return tracker.stop


INLINE: dict[str, Callable[[], Callable[[], object]]] = {
    "record.equal_values.ValueLook": _values,
    "record.constant_calls.ConstantLook._next": _constants,
    "record.lines.Tracing" if sys.version_info < (3, 12) else "record.lines.Monitoring": _lines,
}


def _other() -> int:
    return 3


@fails
@pytest.mark.parametrize("name", sorted(INLINE))
def test_a_watch_that_fails_at_once_leaves_nothing(name: str) -> None:
    before, modes = (sys.gettrace(), sys.getprofile()), torch._C._len_torch_function_stack()
    sys.settrace(None)
    sys.setprofile(None)
    found = []
    try:
        guard.probe = _fails_in(name)
        stop = INLINE[name]()
        thread = threading.Thread(target=_other)
        thread.start()
        thread.join()
        found.append(_other())
        guard.probe = None
        left = (sys.gettrace(), sys.getprofile(), threading.gettrace())
        stop()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])

    assert (found, left) == ([3], (None, None, None))
    assert guard._failed_in == name
    assert torch._C._len_torch_function_stack() == modes


def _fails_in(name: str) -> Callable[[str], None]:
    def probe(entered: str) -> None:
        if entered == name:
            raise RuntimeError("planted")

    return probe


WAYS_IN = {
    "atexit.register",
    "os.register_at_fork",
    "threading.Thread",
    "Thread",
    "_thread.start_new_thread",
    "threading.Timer",
    "gc.callbacks.append",
    "weakref.finalize",
    "util.Finalize",
    "sys.settrace",
    "sys.setprofile",
    "threading.settrace",
    "threading.setprofile",
}
"""Calls by which Python is given something of ours to call; patched functions are made by `around` and `replaced`."""


def _is_way_in(called: str) -> bool:
    return called in WAYS_IN or re.search(r"\bregister_\w*hook$", called) is not None


def _guards_itself(function: ast.AST, entered: set[str]) -> bool:
    """Whether a function is an entry, gives its errors to the guard, or does no more than call an entry."""
    if not isinstance(function, ast.FunctionDef):
        return False
    decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in function.decorator_list}
    if decorators & {"entry", "inline", "in_background"} or "guard.caught(" in ast.unparse(function):
        return True
    last = function.body[-1]
    is_short = len(function.body) == 1 and isinstance(last, ast.If) and len(last.body) == 1
    called = {each.attr for each in ast.walk(last) if isinstance(each, ast.Attribute)}
    return is_short and not called.isdisjoint(entered)


def test_whatever_python_is_given_to_call_is_an_entry() -> None:
    package = Path(inspect.getfile(guard)).parent
    names = {name.rpartition(".")[2] for name in entries()} | {"close", "end", "program_ends", "forget"}
    wrong = []
    rooms = ("record", "machine", "integrations", "remedies")
    for path in sorted(path for room in rooms for path in (package / room).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        here = {each.name for each in nodes if isinstance(each, ast.FunctionDef) and _guards_itself(each, names)}
        here |= {f"_{name}" for name in here} | names
        for node in nodes:
            if isinstance(node, ast.Call) and _is_way_in(ast.unparse(node.func)):
                what = [*node.args, *(each.value for each in node.keywords)]
                parts = [part for each in what for part in ast.walk(each)]
                given = {each.attr for each in parts if isinstance(each, ast.Attribute)}
                given |= {each.id for each in parts if isinstance(each, ast.Name)}
                if given and given.isdisjoint(here) and path.name not in ELSEWHERE:
                    wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
    assert guard.INLINE - set(INLINE) <= {"record.lines.Tracing", "record.lines.Monitoring"}


ELSEWHERE = {
    "http.py": "threads of requests, whose errors the server takes",
    "profiler_server.py": "processes of its own",
    "launch.py": "in the command's process",
    "model.py": "an error in it ends the backward pass, whose gradients would stay scaled",
    "recording.py": "what the program's own call of `capture_step` or `CapturedStep` waits for",
    "padding.py": "part of the program's model",
    "prefetch.py": "hands each error to the program's next",
    "mixed_precision_loops.py": "what is restored would be wrong without it",
}


def test_time_stands_still_for_nobody() -> None:
    """The clock of the watch that was exchanged above is the module's own again."""
    assert line_watches.time is time
