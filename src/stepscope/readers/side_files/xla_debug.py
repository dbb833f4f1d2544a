"""What PyTorch/XLA prints under PT_XLA_DEBUG: why each graph was compiled or executed, and its profiler's warnings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stepscope.errors import UsageError
from stepscope.readers.side_files.text import LARGEST_COUNT, MOST_NAMES, lines
from stepscope.readers.side_files.xla_metrics import duration_ns
from stepscope.trace.evidence import CodePlace, Evidence, Fallback, Tally, Trigger

_BLOCK: Final = re.compile(r"(?<!Post )(Compilation|Execution) Analysis: ?(.{0,4000})$")
_FRAME: Final = re.compile(r"^  (.{1,500}) \((.{1,1000}):(\d{1,9})\)$")
_FREQUENT: Final = re.compile(r"pt-xla-profiler: (\w{1,100}) too frequent: (\d{1,18}) counts during (\d{1,18}) steps")
_SLOW: Final = re.compile(r"pt-xla-profiler: (\w{1,100}) too slow: longest instance took ([\w.]{1,60}?)\.? ")
_NOT_LOWERED: Final = re.compile(r"pt-xla-profiler: Op\(s\) not lowered: (.{1,60000}?)(?:, *)?(?: Please open|$)")
_MOST_FRAMES: Final = 100


@dataclass(slots=True)
class _Open:
    """A block whose end has not come yet."""

    expects: str = ""
    cause: str = ""
    frames: list[CodePlace] = field(default_factory=list)


@dataclass(slots=True)
class _Log:
    triggers: dict[str, Counter[tuple[str, tuple[CodePlace, ...]]]] = field(
        default_factory=lambda: {"Compilation": Counter(), "Execution": Counter()}
    )
    blocks: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    steps: int | None = None
    not_lowered: dict[str, None] = field(default_factory=dict)


def read_xla_debug_log(path: str | Path) -> Evidence:
    """What the debugging output in a file says of the whole run.

    Raises:
        UsageError: there is none in it.
        TraceError: it cannot be read.
    """
    log, open_blocks = _Log(), {"Compilation": _Open(), "Execution": _Open()}
    for line in lines(path):
        if "Analysis:" in line and (block := _BLOCK.search(line)):
            _take_block(log, block[1], open_blocks[block[1]], block[2].rstrip())
        elif "pt-xla-profiler:" in line:
            _take_warning(log, line)
    if not log.blocks and not log.counts and not log.longest and not log.not_lowered:
        raise UsageError(
            f"{path} holds no debugging output of PyTorch/XLA: it has lines that begin with 'Compilation Analysis:' or "
            "'pt-xla-profiler:', and is printed where PT_XLA_DEBUG_LEVEL=2 is set"
        )
    return _evidence(log, str(path))


def _take_block(log: _Log, kind: str, block: _Open, text: str) -> None:
    """One line of a block, without its prefix."""
    if text.startswith("---") or (text.startswith("===") and block.cause):
        triggers = log.triggers[kind]
        key = (block.cause, tuple(block.frames))
        if block.cause:
            log.blocks[kind] += 1
            if key in triggers or len(triggers) < MOST_NAMES:
                triggers[key] += 1
        block.expects, block.cause, block.frames = "", "", []
    elif text.endswith(" Cause"):
        block.expects = "cause"
    elif text.startswith("Python Frame"):
        block.expects = "frames"
    elif text and not text.startswith(" "):
        block.expects = ""
    elif block.expects == "cause" and text.strip():
        block.cause, block.expects = text.strip(), ""
    elif block.expects == "frames" and len(block.frames) < _MOST_FRAMES and (frame := _FRAME.match(text)):
        block.frames.append(CodePlace(frame[1], frame[2], int(frame[3])))


def _take_warning(log: _Log, line: str) -> None:
    """Counts only grow, so the last line of a kind tells most."""
    if match := _FREQUENT.search(line):
        if match[1] in log.counts or len(log.counts) < MOST_NAMES:
            log.counts[match[1]] = min(int(match[2]), LARGEST_COUNT)
        log.steps = min(int(match[3]), LARGEST_COUNT)
    elif match := _SLOW.search(line):
        time = duration_ns(match[2])
        if time is not None and len(log.longest) < MOST_NAMES:
            log.longest[match[1]] = max(time, log.longest.get(match[1], 0))
    elif match := _NOT_LOWERED.search(line):
        for name in match[1].split(","):
            if name.strip() and len(log.not_lowered) < MOST_NAMES:
                log.not_lowered[name.strip()] = None


def _evidence(log: _Log, path: str) -> Evidence:
    out = log.counts.get("TransferFromDeviceTime", log.counts.get("TransferFromServerTime"))
    return Evidence(
        sources=(path,),
        steps=log.steps,
        compilations=_tally(log, "CompileTime", log.blocks["Compilation"]),
        executions=_tally(log, "ExecuteTime", log.blocks["Execution"]),
        transfers_out=Tally(out) if out is not None else None,
        fallbacks=tuple(Fallback(name) for name in sorted(log.not_lowered)),
        compile_triggers=_triggers(log, "Compilation"),
        execute_triggers=_triggers(log, "Execution"),
    )


def _tally(log: _Log, name: str, blocks: int) -> Tally | None:
    count, longest = max(log.counts.get(name, 0), blocks), log.longest.get(name)
    return Tally(max(count, 1), None, longest) if count or longest is not None else None


def _triggers(log: _Log, kind: str) -> tuple[Trigger, ...]:
    return tuple(Trigger(cause, frames, count) for (cause, frames), count in log.triggers[kind].most_common())
