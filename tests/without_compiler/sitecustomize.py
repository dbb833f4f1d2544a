"""For programs that tests start: torch's compiler is imported when the program uses it, and not by each optimizer.

`torch.optim` and `torch.profiler` import `torch._dynamo` and `torch._inductor` for two functions that do nothing
outside of compiled code and one setting, which takes more than half of the time of a short program. Stand-ins have
these three; whatever else is asked of them, the real ones are imported and answer.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

STAND_INS: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "__path__": [],
        "disable": lambda function, recursive=True, wrapping=True: function,
        "graph_break": lambda: None,
    },
    "torch._inductor": {"__path__": []},
    "torch._inductor.config": {"triton": SimpleNamespace(cudagraphs=False)},
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `import` and `inspect` ask of every module
            raise AttributeError(name)
        _give_way()
        return getattr(importlib.import_module(self.__name__), name)


class _Finder:
    """Finds and loads the stand-ins, until anything else of these packages is asked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in STAND_INS:
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        if not name.startswith(("torch._dynamo.", "torch._inductor.")):
            return None
        _give_way()
        importlib.import_module(name.rpartition(".")[0])
        return importlib.util.find_spec(name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(STAND_INS[module.__name__])


def _give_way() -> None:
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)  # type: ignore[arg-type]
        for name in STAND_INS:
            sys.modules.pop(name, None)


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)  # type: ignore[arg-type]
