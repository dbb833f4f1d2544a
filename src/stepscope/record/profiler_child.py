"""One capture of a profiler server by the `xprof` package, in a process that holds nothing else.

Its client is C++ that writes on standard output and error and may crash or hang; here it takes nobody down with it.
Started by `stepscope.record.profiler_server`, which reads one JSON object a line from the standard output: {"ready":
true} once xprof is there, then, when a line came in, {"done": true} or {"problem": sentence}. What the client writes
itself goes to standard error, a log file. Imports only the standard library, and xprof.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from stepscope import guard


def main(order: dict[str, Any]) -> None:
    """Carry out one order.

    Args:
        order: `address` of the server, `folder` for the profile, `milliseconds`, and the client's `options`.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    with guard.attempt() as loading:  # whatever is wrong with the package
        trace: Any = importlib.import_module("xprof.convert._pywrap_profiler_plugin").trace
    if loading.error is not None:
        answer(problem=f"the xprof package cannot be used: {type(loading.error).__name__}: {loading.error}")
        return
    answer(ready=True)
    if not sys.stdin.readline():  # nobody waits any more
        return
    with guard.attempt() as tracing:  # of C++, by whatever type
        trace(order["address"], order["folder"], "", True, order["milliseconds"], 1, order["options"])
    answer(**({"done": True} if tracing.error is None else {"problem": str(tracing.error)}))
