"""The patches applied to one process, how they are undone, and what is reported about them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from stepscope import guard
from stepscope.errors import StepscopeError
from stepscope.files import with_checksum
from stepscope.record.apply.flags import MOST_SENTENCES, PREFIX
from stepscope.record.lines import compiling
from stepscope.record.manifest import rank_and_world_size
from stepscope.record.run_folder import RunFolder, write_json
from stepscope.record.run_process import is_distributed, is_helper

Changed = TypeVar("Changed")

PACKAGE: Final = str(Path(__file__).resolve().parents[2]) + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FOLDERS: Final = re.compile(r"(?<![\w.:/\\])(?:[A-Za-z]:)?[/\\][^\s'\"(),:]*[/\\]")
"""The folders of a path in a text, all but the last part; parts of a URL do not match."""
_LONGEST_REASON: Final = 200
_STANDARD_LIBRARY: Final = os.path.dirname(os.__file__) + os.sep


class Applying:
    """The remedies applied in this process, and their outcomes.

    Args:
        chosen: the requested flags with their values.
        unseen: for each flag, the reason reported if the program never does what it changes.
        folder: the run folder, into which the process writes the outcomes; None keeps them in memory.
        is_recorded: whether a profiler will record the process; otherwise its steps are only timed.

    Attributes:
        shared: objects that several families use, by class.
    """

    def __init__(
        self,
        chosen: Mapping[str, str],
        unseen: Mapping[str, str],
        folder: RunFolder | None,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.chosen = dict(chosen)
        self.is_recorded = is_recorded
        self.shared: dict[type, Any] = {}
        self._unseen = dict(unseen)
        self._folder = folder
        self._said: dict[bool, dict[tuple[str, str], None]] = {True: {}, False: {}}
        self._undo = contextlib.ExitStack()
        self._at_end: list[Callable[[], None]] = []
        self._process = os.getpid()
        self._is_rank = False
        self._rank: int | None = None
        self._written: Path | None = None
        guard.on_failure("", self._abandon)

    def did(self, flag: str, sentence: str) -> None:
        """Report that a flag changed something; the sentence has no full stop."""
        self._say(True, flag, sentence)

    def could_not(self, flag: str, sentence: str) -> None:
        self._say(False, flag, sentence)

    def said_about(self, flag: str) -> bool:
        return any(flag == name for entries in self._said.values() for name, _ in entries)

    @contextlib.contextmanager
    def guarded(self, *flags: str) -> Iterator[None]:
        """Record any error in the block as the reason why the flags are not applied; the program continues."""
        with guard.attempt() as applying:
            yield
        if applying.error is not None:
            for flag in flags:
                self.could_not(flag, in_a_line(applying.error))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(guard.put(owner, name, value))

    def wrap(
        self, owner: Any, name: str, around: Callable[..., Any], *, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Replace a function by `around(original, *positional, **named)`, keeping its name and signature."""
        place = f"apply.{owner.__name__}.{name}"
        self.replace(owner, name, guard.replaced(getattr(owner, name), around, place, unless=unless))

    def replace_constructor(
        self,
        kind: Any,
        flags: Collection[str],
        change: Callable[[dict[str, Any]], Changed],
        tell: Callable[[Any, str, Changed], None],
    ) -> None:
        """Change the constructor arguments of a class and its subclasses for all objects made from now on.

        Args:
            flags: the flags that the change belongs to.
            change: changes a constructor's arguments in place and returns a description of the change.
            tell: called with the object, its name with its place in the program, and the description. If the
                constructor refuses the changed arguments, it is called with the original ones and no flag is applied.
        """
        signature = inspect.signature(kind.__init__)

        def made(original: Any, own: Any, *positional: Any, **named: Any) -> None:
            with guard.attempt() as changing:
                bound = signature.bind(own, *positional, **named)
                changed = change(bound.arguments)
                original(*bound.args, **bound.kwargs)
            if changing.error is None:
                tell(own, made_here(type(own).__name__), changed)
                return
            original(own, *positional, **named)  # an error in the user's own arguments is raised here
            for flag in flags:
                self.could_not(flag, f"{made_here(type(own).__name__)} refuses it: {in_a_line(changing.error)}")

        self.wrap(kind, "__init__", made)

    def on_remove(self, action: Callable[[], object]) -> None:
        self._undo.callback(action)

    def at_end(self, action: Callable[[], None]) -> None:
        self._at_end.append(action)

    def remove(self) -> None:
        """Remove the patches from torch; objects that were already made stay changed."""
        self._undo.close()

    @guard.entry
    def end(self) -> None:
        """At the program's end, report what was never seen and write the outcomes."""
        if os.getpid() != self._process:
            return  # a forked child, which has nothing to report
        for action in self._at_end:
            with guard.attempt():
                action()
        self._at_end.clear()
        for flag in self.chosen:
            if not self.said_about(flag):
                self.could_not(flag, self._unseen[flag])

    def to_json(self) -> dict[str, list[dict[str, str]]]:
        return {
            kind: [{"flag": flag, "sentence": sentence} for flag, sentence in self._said[applied]]
            for kind, applied in (("applied", True), ("not_applied", False))
        }

    def _abandon(self) -> None:
        """After an internal error, remove the patches and report every flag as no longer applied."""
        guard.attempted(self.remove)
        for flag in self.chosen:
            self.could_not(flag, "stepscope failed in the program, which continued without it")

    def _say(self, applied: bool, flag: str, sentence: str) -> None:
        if os.getpid() != self._process:  # forked: a separate rank, or a helper process that is not reported
            self._process, self._written, self._is_rank, self._rank = os.getpid(), None, False, None
            self._said = {True: {}, False: {}}
        entries = self._said[applied]
        if (flag, sentence) in entries or sum(flag == name for name, _ in entries) >= MOST_SENTENCES:
            return
        entries[flag, sentence] = None
        with contextlib.suppress(OSError, StepscopeError):
            self._write()

    def _write(self) -> None:
        """Write after every outcome, since the program may be killed, for the rank known by then."""
        self._is_rank = self._is_rank or not is_helper()
        if self._folder is None or not self._is_rank:
            return
        if self._rank is None or is_distributed():  # the rank is not available once its process group is destroyed
            self._rank = rank_and_world_size()[0]
        path = self._folder.rank_folder(self._rank) / f"{PREFIX}{self._process}.json"
        write_json(path, with_checksum(self.to_json()))
        if self._written not in (None, path):
            assert self._written is not None
            self._written.unlink(missing_ok=True)
        self._written = path


def users_place() -> str:
    """Return where the user's code is now, such as "train.py:31"; "" if no frame is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_users_file(file: str) -> bool:
    """Whether a file is the user's own: not of a library, not of Python, and not generated at run time."""
    return not (file.startswith(("<", PACKAGE, _STANDARD_LIBRARY)) or any(folder in file for folder in _INSTALLED))


def made_here(kind: str) -> str:
    """Return a description such as "AdamW made at train.py:31"."""
    place = users_place()
    return f"{kind} made at {place}" if place else kind


def in_a_line(error: BaseException) -> str:
    """Format an exception as the end of a sentence, without folders, in at most 200 characters."""
    text = _FOLDERS.sub("", " ".join(str(error).split())) or type(error).__name__
    return text[:_LONGEST_REASON].rstrip(". ")


_ENOUGH_CALLS: Final = 64
"""After this many outermost calls, all of the program's modules are assumed to be known."""

Around = Callable[..., Any]
"""Called as around(call, module, *arguments, **named); returns the result of call(*arguments, **named), or a changed
one.
"""


class OutermostCalls:
    """Wraps the outermost module calls of one process."""

    def __init__(self, applying: Applying) -> None:
        self._applying = applying
        self._on_new: list[tuple[str, Callable[[Any], Around | None]]] = []
        self._around: weakref.WeakKeyDictionary[Any, list[Around]] = weakref.WeakKeyDictionary()
        self._classes: set[type] = set()
        self._thread = threading.local()
        self._calls = 0
        self._is_watching = False
        self._unwatch: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, applying: Applying) -> OutermostCalls:
        found: OutermostCalls = applying.shared.setdefault(cls, cls(applying))
        return found

    def on_new(self, flag: str, action: Callable[[Any], Around | None]) -> None:
        """Run an action before a module's first call, and wrap this call and all later ones in its result.

        Args:
            flag: the flag that the action belongs to; if the action fails, the error is the reason why it is not
                applied.
            action: receives a module that has parameters; returns a wrapper for the module's calls. It must not keep a
                reference to the module.
        """
        self._on_new.append((flag, action))
        if not self._is_watching:
            self._is_watching = True
            self._watch()

    def _watch(self) -> None:
        import torch

        module: Any = torch.nn.Module
        original = module.__call__
        is_compiling = compiling()

        def unless() -> bool:
            return is_compiling() or not self._is_watching or getattr(self._thread, "is_inside", False)

        called = guard.replaced(original, self._run, "apply.Module.__call__", unless=unless)
        self._unwatch = guard.put(module, "__call__", called)
        self._applying.on_remove(self._unwatch)

    def _adopt(self, module: Any) -> None:
        found: list[Around] = []
        for flag, action in self._on_new:
            with self._applying.guarded(flag):
                around = action(module)
                if around is not None:
                    found.append(around)
        self._around[module] = found
        if found and type(module) not in self._classes:
            self._classes.add(type(module))
            self._follow(type(module))

    def _follow(self, kind: Any) -> None:
        """Wrap the calls of a class's modules permanently, even when nothing else is watched any more."""
        is_compiling = compiling()

        def unless() -> bool:
            return is_compiling() or getattr(self._thread, "is_inside", False)

        self._applying.wrap(kind, "__call__", self._run, unless=unless)

    def _run(self, original: Callable[..., Any], module: Any, /, *positional: Any, **named: Any) -> Any:
        """Call the module inside all its wrappers, the first one innermost."""
        call: Callable[..., Any] = functools.partial(original, module)
        self._calls += 1
        if self._is_watching and self._calls >= _ENOUGH_CALLS:
            self._is_watching = False
            self._unwatch()
        if module not in self._around and _is_the_programs(module):
            self._adopt(module)
        self._thread.is_inside = True
        try:
            for around in self._around.get(module, ()):
                call = functools.partial(around, call, module)
            return call(*positional, **named)
        finally:
            self._thread.is_inside = False


def _is_the_programs(module: Any) -> bool:
    """Whether this is a module with parameters called by the program itself, not by backward or DataParallel."""
    import torch

    # a replica made by DataParallel
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_former_parameters"):
        return False
    task = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return task == -1 and next(module.parameters(), None) is not None
