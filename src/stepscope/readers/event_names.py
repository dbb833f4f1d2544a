"""What event names mean, independent of the profiler that wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from stepscope.trace.naming import TELLING, first_match, name_patterns

FORWARD_BACKWARD_FLOWS: Final = frozenset({"fwdbwd", "forward_backward"})
"""Categories of flows from a forward operator to its backward operator."""
_ANNOTATION_NAMES = re.compile(r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.(?:step|zero_grad)#")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})(?!\d)")
_OWN_STEP = re.compile(r"stepscope\.step#(\d{1,18}) ")
_FRAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
_MODULE = re.compile(r"nn\.Module: (.+)")

_LAUNCHES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("graph_launch", r"graphlaunch"),
        ("compile", r"moduleload|linkcomplete|nvrtc|libraryload|compile"),
        ("allocate", r"malloc|memfree|(?:cuda|hip)free|hostalloc|hostregister|memcreate|memmap|memaddress|memunmap"),
        ("queue_wait", r"streamwaitevent|streamwaitvalue"),
        ("synchronise", r"synchronize|eventquery_wait|wait_for"),
        ("copy", r"memcpy|copybuffer"),
        ("set", r"memset"),
        ("event", r"event(?:record|create|destroy|query|elapsed)"),
        ("launch", r"launch|enqueue|submit|runfunction"),
    )
)


class Frame(NamedTuple):
    """The parts of a Python frame's name; None for missing parts."""

    file: str | None
    line: int | None
    function: str | None
    module: str | None


def is_annotation(name: str) -> bool:
    """Whether the name is a framework annotation, which old files list among the operators."""
    return _ANNOTATION_NAMES.match(name) is not None


def step_number(name: str, *, own: bool = True) -> int | None:
    """Return the number of a step annotation by torch.profiler or, with `own`, by `stepscope.step`."""
    match = _STEP.match(name) or (_OWN_STEP.match(name) if own else None)
    return int(match[1]) if match else None


def are_steps_marked(names: Iterable[str]) -> bool:
    """Whether torch.profiler marked the steps, in which case marks by `stepscope.step` are ignored."""
    return any(_STEP.match(name) for name in names)


def frame(name: str) -> Frame:
    """Split the name of a Python frame into file, line and function, or module."""
    if match := _MODULE.fullmatch(name):
        return Frame(None, None, None, match[1])
    if match := _FRAME.fullmatch(name):
        return Frame(match[1], int(match[2]), match[3], None)
    return Frame(None, None, name, None)


def launch_kind(name: str) -> str:
    """Return the kind of a device API call, one of `tables.LAUNCH_KINDS`."""
    return next((kind for kind, pattern in _LAUNCHES if pattern.search(name)), "other")


_COPIES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("copy_in", re.compile(r"HtoD|HostToDevice|HOST_TO_DEVICE|Host -> Device", re.I)),
    ("copy_out", re.compile(r"DtoH|DeviceToHost|DEVICE_TO_HOST|Device -> Host", re.I)),
    ("copy_on_device", re.compile(r"DtoD|PtoP|DeviceToDevice|DEVICE_TO_DEVICE|Peer", re.I)),
)


@lru_cache(maxsize=65536)
def is_communication(name: str) -> bool:
    """Whether device work of this name is a collective of a known communication library."""
    return bool(first_match(name_patterns("collectives.tsv")["library"], name[:TELLING]))


def copy_kind(text: str) -> str:
    """Return the kind of a copy from text that contains its direction, one of `tables.DEVICE_WORK_KINDS`."""
    return next((kind for kind, pattern in _COPIES if pattern.search(text)), "copy_on_device")


def synchronisation_kind(name: str) -> str:
    """Return the kind of a recorded wait on the device, one of `tables.SYNCHRONISATION_KINDS`."""
    lowered = name.lower()
    for kind, word in (("queue_wait", "wait event"), ("event", "event"), ("queue", "stream"), ("device", "context")):
        if word in lowered:
            return kind
    return "other"


_SCRIPTED_FRAME: Final = re.compile(r"\$(.*):(\d{1,9}) (.*)", re.DOTALL)
_MARKS: Final = re.compile(rf"{_ANNOTATION_NAMES.pattern}|stepscope\.\w+#|(?:gloo|mpi|ucc):|nn\.Module: ")
_DEVICE_CALL: Final = re.compile(
    r"(?:cuda|hip)[A-Z]\w*(?:_v\d+)?$|cu[A-Z]\w*$|hsa_\w+$|_?_?(?:cuda|hip)LaunchKernel\w*$"
)
_OPERATOR: Final = re.compile(r"[A-Za-z_]\w*(?:::[\w.~<>]+)+$")


def frame_name(name: str) -> str:
    """Convert JAX's frame name "$file.py:12 f" to PyTorch's "file.py(12): f"; other names are returned unchanged."""
    match = _SCRIPTED_FRAME.fullmatch(name)
    return f"{match[1]}({match[2]}): {match[3]}" if match else name


@lru_cache(maxsize=65536)
def host_slice_table(name: str) -> str | None:
    """Return the table for a host slice, for formats that give only a name; None if the name does not say."""
    if _MARKS.match(name):
        return "annotations" if not name.startswith("nn.Module: ") else "frames"
    if _SCRIPTED_FRAME.fullmatch(name) or (_FRAME.fullmatch(name) and ".py(" in name):
        return "frames"
    if _DEVICE_CALL.match(name):
        return "launches"
    return "operators" if _OPERATOR.match(name) else None
