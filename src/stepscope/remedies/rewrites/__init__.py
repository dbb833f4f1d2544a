"""Rewrites of the user's source text: replace slow code wherever the syntax alone shows that it is safe.

    rewrites = rewrites_of(source)
    print(unified_diff("train.py", source, rewrites))

Pure text and syntax trees: neither torch nor the program is imported. Code that cannot be shown to be safe to change is
left alone.

Edits are spans of the text, found by `ast`, not a libcst transformation. Written for libcst, the zero-grad rewrite
had as many lines, took 235 ms instead of 8 for a script of 149 lines, and 0.4 s to import; and `run --apply`, which
compiles the rewritten text inside the user's process, needs the spans without another package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stepscope.remedies.rewrites import batched_loss, training_loops
from stepscope.remedies.rewrites.context import (
    Context,
    Criterion,
    Edit,
    Expected,
    Positions,
    Rewrite,
    SourceText,
    rewritten,
    unified_diff,
    without_overlaps,
)

__all__ = [
    "REWRITES",
    "Criterion",
    "Edit",
    "Expected",
    "Kind",
    "Positions",
    "Rewrite",
    "rewrites_of",
    "rewritten",
    "unified_diff",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rewrite.

    Attributes:
        name: the name of the flag, if `stepscope run --apply` can do the same.
        rules: the diagnosis rules whose findings it answers.
        find: yields all rewrites of this kind in a module.
        anywhere: whether the edit may be elsewhere in the file than the code it makes faster.
    """

    name: str
    rules: tuple[str, ...]
    find: Callable[[Context], Iterator[Rewrite]]
    anywhere: bool = False


REWRITES: Final[tuple[Kind, ...]] = (
    Kind(batched_loss.NAME, ("loop-in-step",), batched_loss.find),
    Kind(training_loops.NAME, ("host-synchronisation", "frequent-logging"), training_loops.find),
    Kind(
        training_loops.LOADER,
        ("input-bound", "exposed-copy", "loader-restart", "loader-contention", "step-variance", "device-tail"),
        training_loops.find_loaders,
        anywhere=True,
    ),
    Kind(training_loops.OPTIMIZER, ("single-tensor-optimizer",), training_loops.find_optimizers, anywhere=True),
    Kind(
        training_loops.DATA_PARALLEL,
        ("small-buckets", "gradient-copies", "unused-parameters", "exposed-communication"),
        training_loops.find_data_parallel,
        anywhere=True,
    ),
    Kind(training_loops.NON_BLOCKING, ("exposed-copy", "host-synchronisation"), training_loops.find_copies),
    Kind(training_loops.ZERO_GRAD, ("zero-grad",), training_loops.find_zeroed, anywhere=True),
    Kind(training_loops.NO_DEBUG, ("debug-mode",), training_loops.find_debugging, anywhere=True),
    Kind(training_loops.ON_DEVICE, ("host-created-tensor",), training_loops.find_host_made),
)
"""Every kind of rewrite."""


def rewrites_of(
    source: str,
    *,
    names: Collection[str] | None = None,
    line: int | None = None,
    function: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[Rewrite]:
    """Find all rewrites in a module, in order of place, without overlaps.

    Args:
        source: the module's text.
        names: kinds of rewrites to look for; None for all.
        line: only those that change the statement in this line.
        function: only those in a function of this name, qualified or not.
        settings: keywords for calls that take them, as source text, such as {"num_workers": "4"}.

    Raises:
        ValueError: the text is not Python or too long, or there is no such kind.
    """
    unknown = sorted(set(names or ()) - {kind.name for kind in REWRITES})
    if unknown:
        raise ValueError(
            f"no kind of rewrite is called {unknown[0]!r}: the kinds are {', '.join(k.name for k in REWRITES)}"
        )
    context = Context(SourceText(source), dict(settings or {}))
    try:
        found = [each for kind in REWRITES if names is None or kind.name in names for each in kind.find(context)]
    except RecursionError as error:
        raise ValueError("the source nests too deeply to be searched") from error
    chosen = [
        each
        for each in found
        if (line is None or each.line <= line <= each.last_line)
        and (function is None or function in (each.function, each.function.rpartition(".")[2]))
    ]
    return without_overlaps(chosen)
