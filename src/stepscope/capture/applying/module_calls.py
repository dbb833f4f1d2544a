"""Calls of the modules that the program itself calls, those inside them not counted.

`torch.nn.Module.__call__` is watched until these modules are known, and afterwards only their classes are, so that the
calls inside them cost what they did. No hook of torch.nn is used: torch.compile would compile anew when it goes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from stepscope.capture import guard
from stepscope.capture.applying.patching import Applying

_ENOUGH_CALLS: Final = 64
"""Outermost calls after which the program's modules are known."""

Around = Callable[..., Any]
"""Called as around(call, module, *arguments, **named): returns what call(*arguments, **named) does, or changes it."""


class OutermostCalls:
    """Stands around the outermost calls of one process's modules.

    Args:
        applying: of the process; its `remove` leaves torch's classes as they were.
    """

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
        """Those of a process, made when they are first asked for."""
        found: OutermostCalls = applying.shared.setdefault(cls, cls(applying))
        return found

    def on_new(self, flag: str, action: Callable[[Any], Around | None]) -> None:
        """Have something done before the first call of each such module, and around this call and all later ones.

        Args:
            flag: that wants it; what goes wrong in the action is the reason why it is not applied.
            action: gets a module that has parameters; what it returns stands around the module's calls. It is to keep
                no reference to the module.
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

        def restore() -> None:
            if vars(module).get("__call__") is called:
                module.__call__ = original

        module.__call__ = called
        self._unwatch = restore
        self._applying.on_remove(restore)

    def _adopt(self, module: Any) -> None:
        """Take note of a module; what cannot be done with it leaves it as it was."""
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
        """See the calls of a class's modules, later ones too, also when nothing else is watched any more."""
        is_compiling = compiling()

        def unless() -> bool:
            return is_compiling() or getattr(self._thread, "is_inside", False)

        self._applying.wrap(kind, "__call__", self._run, unless=unless)

    def _run(self, original: Callable[..., Any], module: Any, /, *positional: Any, **named: Any) -> Any:
        """The module's call with all that stands around it, what came first innermost."""
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


def compiling() -> Callable[[], bool]:
    """What tells whether torch.compile is tracing, which is not to see what stands around calls."""
    import torch

    found: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
    return found


def _is_the_programs(module: Any) -> bool:
    """Whether it is a module with parameters that is called by the program itself, not by backward or DataParallel."""
    import torch

    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_former_parameters"):  # a replica's
        return False
    task = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return task == -1 and next(module.parameters(), None) is not None
