"""What the names of events mean, whatever profiler wrote them: why the host is busy, kinds of work, steps, and which
files are the user's own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from stepscope.files import shipped_rows


@cache
def _frameworks() -> dict[str, tuple[list[str], list[str]]]:
    """Packages of frameworks, with the names of their source checkouts and the entries that identify them, if any."""
    rows = [(*row, "", "")[:3] for row in shipped_rows("frameworks.tsv")]
    return {package: (checkouts.split(), entries.split()) for package, checkouts, entries in rows}


_BETWEEN: Final = frozenset({"src", "python", "lib"})
_FORK: Final = re.compile(r"[-_.](?:v?\d[\w.+-]*|main|master|fork|custom|rocm|cuda|dev|src|source|upstream)$")


def is_framework(path: str, *, imported: bool) -> bool:
    """Whether a file belongs to a framework.

    Args:
        path: with forward slashes.
        imported: whether the path is relative to Python's package path, so that it starts with the package. Otherwise
            the package only counts inside a checkout of its sources, such as `/opt/vllm/vllm` or
            `/src/triton/python/triton`, because users may name a project's folder like a framework.
    """
    folders = [part for part in path.split("/") if part]
    if imported:
        return len(folders) > 1 and folders[0] in _frameworks() and _is_in(folders[0], folders[1])
    return any(
        name in _frameworks() and _is_checkout(name, folders[:position]) and _is_in(name, folders[position + 1])
        for position, name in enumerate(folders[:-1])
    )


def _is_in(package: str, inside: str) -> bool:
    entries = _frameworks()[package][1]
    return not entries or inside in entries


def _is_checkout(package: str, around: Sequence[str]) -> bool:
    """Whether the folder around a package (or around its src) has the name of the package's sources."""
    if around and around[-1].lower() in _BETWEEN:
        around = around[:-1]
    if not around:
        return False
    names = {_plain(name) for name in (package, *_frameworks()[package][0])}
    return bool(names & {_plain(around[-1]), _plain(_FORK.sub("", around[-1].lower()))})


def _plain(name: str) -> str:
    return re.sub(r"[-_.]", "", name.lower())


LOADER_START: Final = r"^DataLoader\.__iter__$|torch/utils/data/dataloader\.py\(\d+\): _get_iterator$"
"""Calls that create an iterator over a loader and start its workers."""

Patterns: TypeAlias = list[tuple[str, re.Pattern[str]]]

TELLING: Final = 20_000
"""Characters at the beginning of a kernel's name that may tell what it is; some names have megabytes."""


@lru_cache(maxsize=8)
def name_patterns(file: str) -> dict[str, Patterns]:
    """Patterns of a file in data/ by table, in order: the first that occurs in a name counts.

    Consecutive rows of one word are one pattern.
    """
    patterns: dict[str, Patterns] = {}
    for (table, word), same in groupby(shipped_rows(file), key=lambda row: (row[0], row[1])):
        patterns.setdefault(table, []).append((word, re.compile("|".join(row[2] for row in same))))
    return patterns


def first_match(patterns: Patterns, name: str) -> str:
    """The word of the first pattern that occurs in a name; "" if none does."""
    return next((word for word, pattern in patterns if pattern.search(name)), "")


HOST_BACKEND: Final = r"^(?:gloo|mpi|ucc):"
"""Collectives that run on the host itself, on their own threads."""
LAZY_EXECUTION: Final = r"^StepMarker$|^SyncLiveTensorsGraph$"
"""Events where PyTorch/XLA cuts and runs a lazily recorded graph."""

_LIBRARY_PATH: Final = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|/lib/python\d|(?:^|/)torchinductor_[^/]*/|/\.triton/|^<(?!ipython-input-)"
)
"""Packages and generated code; a name in angle brackets is not a file, except for a notebook's cell."""
_DRIVE: Final = re.compile(r"[A-Za-z]:/")


@lru_cache(maxsize=65536)
def cause_of_name(name: str) -> str | None:
    """Return the cause that a slice's name reveals, or None."""
    return first_match(name_patterns("host_names.tsv")["cause"], name) or None


_OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))).replace("\\", "/") + "/"
_OWN_PARTS: Final = re.compile(r"(?:^|/)stepscope/(?:(?:record|remedies|integrations|trace)/|guard\.py$|__main__\.py$)")
"""Parts of stepscope that run in the user's process, wherever it was installed there."""


@lru_cache(maxsize=65536)
def is_stepscope_file(file: str | None) -> bool:
    """Whether a Python file is stepscope's own, which is never the place of a finding."""
    path = (file or "").replace("\\", "/")
    return path.startswith(_OWN_FOLDER) or _OWN_PARTS.search(path) is not None


@lru_cache(maxsize=65536)
def is_user_file(file: str | None) -> bool:
    """Whether a Python file is the user's, not from the standard library, an installed package or a framework."""
    path = (file or "").replace("\\", "/")
    if not path or is_stepscope_file(path) or _LIBRARY_PATH.search(path):
        return False
    if path.startswith("/") or _DRIVE.match(path):
        return not is_framework(path, imported=False)
    path = path.lstrip("./")
    top = path.split("/", 1)[0].removesuffix(".py")
    if top in sys.stdlib_module_names:
        return top == "__main__"
    return not (is_framework(path, imported=True) or is_framework(path, imported=False))


_WITHOUT_MEANING: Final = re.compile(r"(?:^|/)torch/|^<")
"""Files whose functions do not reveal what is done: torch's calls of modules and operators, and generated code."""


@lru_cache(maxsize=65536)
def is_third_party_file(file: str | None) -> bool:
    """Whether a file is a library's, other than torch's own, the standard library's and generated code."""
    path = (file or "").replace("\\", "/")
    if not path or _WITHOUT_MEANING.search(path) or is_stepscope_file(path) or is_user_file(path):
        return False
    if path.startswith("/") or _DRIVE.match(path):
        return re.search(r"/lib/python[\d.]+/(?!(?:site|dist)-packages/)", path) is None
    return path.lstrip("./").split("/", 1)[0].removesuffix(".py") not in sys.stdlib_module_names


_INSTALLED: Final = re.compile(r".*/(?:site|dist)-packages/")


def package_path(path: str) -> str:
    """A library's file from its package on, if it is installed: "transformers/trainer.py"."""
    return _INSTALLED.sub("", path)


_NUMBERED: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


def module_pattern(path: str) -> str:
    """A module's path with a star for each number, which stands for all layers alike: "h.3.mlp" is "h.*.mlp"."""
    return _NUMBERED.sub("*", path)


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user's settings for which files are their code, in addition to `is_user_file`.

    Patterns are globs for a path or for its end, where * also matches several folders; a folder's name matches
    everything in it.

    Attributes:
        also: further files of the user, such as a framework that the user maintains.
        not_those: files that are not the user's; takes precedence.
    """

    also: tuple[str, ...] = ()
    not_those: tuple[str, ...] = ()

    def __contains__(self, file: str | None) -> bool:
        return _is_users(self, file)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> UserCode:
        """Read STEPSCOPE_USER_CODE and STEPSCOPE_NOT_USER_CODE, whose patterns are separated as in PATH."""
        also, not_those = (
            tuple(part for part in variables.get(name, "").split(os.pathsep) if part.strip("/ "))
            for name in ("STEPSCOPE_USER_CODE", "STEPSCOPE_NOT_USER_CODE")
        )
        return cls(also, not_those)


DEFAULT_USER_CODE: Final = UserCode()


@lru_cache(maxsize=65536)
def _is_users(code: UserCode, file: str | None) -> bool:
    if not file or is_stepscope_file(file) or _matches(file, code.not_those):
        return False
    return _matches(file, code.also) or is_user_file(file)


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    path = file.replace("\\", "/")
    for pattern in patterns:
        inside = pattern.rstrip("/") + "/*"
        if any(fnmatchcase(path, each) for each in (pattern, f"*/{pattern}", inside, f"*/{inside}")):
            return True
    return False


FORWARD_BACKWARD_FLOWS: Final = frozenset({"fwdbwd", "forward_backward"})
"""Categories of flows from a forward operator to its backward operator."""
_ANNOTATION_NAMES = re.compile(r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.(?:step|zero_grad)#")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})(?!\d)")
_OWN_STEP = re.compile(r"stepscope\.step#(\d{1,18}) ")
_FRAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
_MODULE = re.compile(r"nn\.Module: (.+)")


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
    return first_match(name_patterns("host_names.tsv")["launch"], name) or "other"


@lru_cache(maxsize=65536)
def is_communication(name: str) -> bool:
    """Whether device work of this name is a collective of a known communication library."""
    return bool(first_match(name_patterns("collectives.tsv")["library"], name[:TELLING]))


def copy_kind(text: str) -> str:
    """Return the kind of a copy from text that contains its direction, one of `tables.DEVICE_WORK_KINDS`."""
    return first_match(name_patterns("host_names.tsv")["copy"], text) or "copy_on_device"


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
