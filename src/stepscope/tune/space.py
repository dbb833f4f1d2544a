"""The search space of a program: remedies from its findings, the user's own knobs, and standard knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import polars as pl

from stepscope.compare.bench import Bench, BenchCommand, BenchSettings
from stepscope.compare.run_times import profile_commands
from stepscope.diagnosis import diagnose
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.diffs import Diffs, UserSource
from stepscope.diagnosis.finding import Finding
from stepscope.errors import TraceError, UsageError
from stepscope.machine.checks.host import usable_cores
from stepscope.machine.devices import find_device
from stepscope.machine.observed import Machine
from stepscope.record.apply import all_flags, parse_applications
from stepscope.remedies.allocators import find_allocator
from stepscope.trace import Trace
from stepscope.tune.trials import ON, Knob, Losses, Space, named_once

_MOST_WORKERS: Final = 16
_PROCESSOR_BF16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags for bf16 in /proc/cpuinfo, on x86 and on Arm."""
_LOADER: Final = "enumerate(DataLoader)#"
_OPTIMIZER: Final = "Optimizer.step#"
_TF32_CAPABILITY: Final = 8
"""The first compute capability of NVIDIA with TF32 and bf16 tensor cores."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts that decide which knobs make sense; None if unknown.

    Attributes:
        cores: number that a rank can keep busy.
        accelerator: whether the program uses one.
        cuda: whether that is a CUDA device.
        half: whether the device, or without one the CPU, multiplies bf16 in hardware.
        tf32: whether the device multiplies TF32.
        loader, optimizer: whether the program iterates a DataLoader, and steps an optimizer of torch.
        ranks: number of the program's ranks.
        allocators: those installed on the system.
        shares: part of the step by cause, 0 to 1: of the device's idle time, or of the host's without a device, where
            "compute" is what it works.
    """

    cores: int | None = None
    accelerator: bool | None = None
    cuda: bool | None = None
    half: bool | None = None
    tf32: bool | None = None
    loader: bool | None = None
    optimizer: bool | None = None
    ranks: int = 1
    allocators: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)


def surroundings_of(
    trace: Trace | None,
    facts: Mapping[str, Any],
    ranks: int,
    machine: Machine | None = None,
    shares: Mapping[str, float] | None = None,
) -> Surroundings:
    """Collect the facts for a program on this machine.

    Args:
        trace: the baseline's; None if nothing could be recorded.
        facts: what its process reported about itself (`stepscope.record.manifest.process_facts`).
        shares: as in `Surroundings`.
    """
    machine = machine or Machine()
    cores = usable_cores(machine).usable
    found = Surroundings(
        cores=None if cores is None else max(1, cores // max(ranks, 1)),
        ranks=ranks,
        allocators=tuple(name for name in ("jemalloc", "tcmalloc") if find_allocator(name) is not None),
        shares=shares or {},
    )
    if trace is None:
        return found
    names = set(trace.annotations["name"].unique().to_list()) | set(trace.operators["name"].unique().to_list())
    described = trace.metadata.devices
    accelerator = bool(described) or not trace.device_work.is_empty()
    versions = facts.get("versions") or {}
    row = find_device(described[0]) if described else None
    capability = described[0].compute_capability if described else None
    major = int(capability.split(".")[0]) if capability and capability.split(".")[0].isdecimal() else 0
    cuda = accelerator and "cuda" in versions and "hip" not in versions
    is_new = cuda and major >= _TF32_CAPABILITY
    return replace(
        found,
        accelerator=accelerator,
        cuda=cuda,
        half=is_new or (row is not None and "bf16" in row.flops_s) if accelerator else _processor_has_bf16(machine),
        tf32=is_new,
        loader=any(name.startswith(_LOADER) for name in names),
        optimizer=any(name.startswith(_OPTIMIZER) for name in names),
    )


def _processor_has_bf16(machine: Machine) -> bool:
    for line in (machine.read("proc/cpuinfo") or "").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _PROCESSOR_BF16.isdisjoint(flags.split())
    return False


def search_space(findings: Sequence[Finding], user: Sequence[Knob], around: Surroundings) -> Space:
    """List what is worth measuring: findings by promised saving, the user's knobs, then the standard ones.

    Of the standard ones, those that act on the largest part of the step come first.

    Args:
        findings: the baseline's, largest saving first.
    """
    known = {flag.name for flag in all_flags()}
    prescribed = [knob for finding in findings for knob in _of_finding(finding)]
    standard = sorted(_standard(around), key=lambda each: -around.shares.get(_ACTS_ON.get(each[0].name, ""), 0.0))
    first, second = [knob for knob in prescribed if knob.promised_ns], [k for k in prescribed if not k.promised_ns]
    first.sort(key=lambda knob: -(knob.promised_ns or 0))
    knobs = []
    for knob in named_once([*first, *second, *user, *(knob for knob, why_not in standard if why_not is None)]):
        values = tuple(value for value in knob.values if _is_allowed(knob, value, known, around))
        if values:
            knobs.append(replace(knob, values=values))
    left_out: dict[str, list[str]] = {}
    for knob, why_not in standard:
        if why_not is not None and knob.name not in {each.name for each in knobs}:
            left_out.setdefault(why_not, []).append(knob.name)
    said = (f"{_listed(names)} left out: {why_not}" for why_not, names in left_out.items())
    return Space(tuple(knobs), tuple(said))


def _listed(names: Sequence[str]) -> str:
    """Join names, such as "a was", or "a, b and c were"."""
    if len(names) == 1:
        return f"{names[0]} was"
    return f"{', '.join(names[:-1])} and {names[-1]} were"


def chosen_space(space: Space, only: Sequence[str] | None, skip: Sequence[str]) -> Space:
    """The space with these names only; the user's own knobs always stay.

    Raises UsageError if no knob has one of the names.
    """
    known = {flag.name for flag in all_flags()} | {knob.name for knob in space.knobs}
    for name in (*(only or ()), *skip):
        if name not in known:
            raise UsageError(f"there is no knob {name!r}; the knobs are {', '.join(sorted(known))}")
    knobs = [
        knob
        for knob in space.knobs
        if knob.source == "user" or (knob.name not in skip and (only is None or knob.name in only))
    ]
    return replace(space, knobs=tuple(knobs), said=() if only is not None else space.said)


def _is_allowed(knob: Knob, value: str, known: set[str], around: Surroundings) -> bool:
    """Whether `--apply` accepts the word here; knobs of other kinds are always allowed."""
    if knob.kind != "apply":
        return True
    if knob.name == "allocator" and value not in around.allocators:
        return False
    try:
        return knob.name in known and bool(parse_applications(knob.shown(value)))
    except UsageError:
        return False


def _of_finding(finding: Finding) -> Iterator[Knob]:
    """A knob for each word of a finding's remedy; the first carries the promised saving."""
    for place, word in enumerate(finding.remedy.apply):
        name, _, value = word.partition("=")
        losses, draws, needs = _NATURE.get(name, ("reordered", False, ""))
        yield Knob(
            name,
            (value or ON,),
            losses=losses,
            draws=draws,
            needs=needs if place else "",
            source="finding",
            why=f"{finding.rule}: {finding.title}",
            promised_ns=finding.saving_ns_per_step if place == 0 else None,
            code=finding.remedy.code if place == 0 else "",
            diff=finding.remedy.diff if place == 0 else "",
        )


_NATURE: Final[dict[str, tuple[Losses, bool, str]]] = {
    "workers": ("reordered", True, ""),
    "prefetch": ("reordered", True, "workers"),
    "persistent-workers": ("reordered", True, "workers"),
    "bf16": ("half", False, ""),
    "fp16": ("half", False, ""),
    "tf32": ("tf32", False, ""),
    "compile": ("compiled", True, ""),
    "channels-last": ("compiled", False, ""),
    "cudnn-benchmark": ("compiled", False, ""),
}
"""How close losses stay, whether other random numbers may be drawn, and the knob without which it does nothing.

Knobs not listed here at most change the order of the same computation.
"""


def _standard(around: Surroundings) -> Iterator[tuple[Knob, str | None]]:
    """The standard knobs, each with the reason why it makes no sense here, or None."""
    for name, values, needed in _STANDARD:
        losses, draws, needs = _NATURE.get(name, ("reordered", False, ""))
        reason = next((why for need in needed for holds, why in [_NEEDED[need]] if not holds(around)), None)
        found = values(around)
        if reason is None and not found:
            reason = "this machine offers no choice"
        yield Knob(name, found or (ON,), losses=losses, draws=draws, needs=needs, why="worth a try anywhere"), reason


def _worker_counts(around: Surroundings) -> tuple[str, ...]:
    counts = [2**power for power in range(5) if 2**power <= min(around.cores or 1, _MOST_WORKERS)]
    return tuple(map(str, counts[-4:]))


def _thread_counts(around: Surroundings) -> tuple[str, ...]:
    """One thread, half of the cores, and all: torch's own default is one per physical core."""
    cores = around.cores or 1
    return tuple(map(str, dict.fromkeys([1, max(1, cores // 2), cores]))) if cores > 1 else ()


_ACTS_ON: Final = {
    **dict.fromkeys(("workers", "prefetch", "persistent-workers"), "input"),
    **dict.fromkeys(("fuse-optimizer", "clip-in-one-pass", "zero-grad"), "optimizer"),
    **dict.fromkeys(("bf16", "tf32", "fp16", "compile", "threads", "channels-last", "cudnn-benchmark"), "compute"),
    **dict.fromkeys(("deferred-logging",), "synchronisation"),
    **dict.fromkeys(("pin-memory", "non-blocking"), "host_to_device_copy"),
    **dict.fromkeys(("bucket-mb", "gradient-view", "static-graph"), "communication"),
    "garbage-at-steps": "garbage_collection",
}
"""Standard knob -> the cause whose time it can shorten at most; others can be judged by trial alone."""


_NEEDED: Final[dict[str, tuple[Callable[[Surroundings], bool], str]]] = {
    "loader": (lambda around: around.loader is not False, "the program iterates no DataLoader"),
    "optimizer": (lambda around: around.optimizer is not False, "the program steps no optimizer of torch"),
    "accelerator": (lambda around: bool(around.accelerator), "the program uses no accelerator"),
    "cuda": (lambda around: bool(around.cuda), "the program uses no CUDA device"),
    "tf32": (lambda around: bool(around.tf32), "the device has no TF32"),
    "bf16": (lambda around: bool(around.half), "neither the device nor the processor multiplies bf16 in hardware"),
    "no bf16": (lambda around: not around.half, "bf16 needs no scaling of the loss"),
    "ranks": (lambda around: around.ranks > 1, "the program is one process"),
    "allocators": (lambda around: bool(around.allocators), "neither jemalloc nor tcmalloc is installed"),
}
"""Requirement of a knob -> (whether it is met, the message if not)."""


def _only(*values: str) -> Callable[[Surroundings], tuple[str, ...]]:
    return lambda around: values


_SWITCH: Final = _only(ON)
_STANDARD: Final[tuple[tuple[str, Callable[[Surroundings], tuple[str, ...]], tuple[str, ...]], ...]] = (
    ("batched-loss", _SWITCH, ()),
    ("fuse-optimizer", _SWITCH, ("optimizer",)),
    ("workers", _worker_counts, ("loader",)),
    ("bf16", _SWITCH, ("bf16",)),
    ("tf32", _SWITCH, ("cuda", "tf32")),
    ("fp16", _SWITCH, ("cuda", "no bf16")),
    ("compile", lambda around: (ON, "reduce-overhead") if around.cuda else (ON,), ()),
    ("threads", _thread_counts, ()),
    ("deferred-logging", _SWITCH, ("accelerator",)),
    ("pin-memory", _SWITCH, ("accelerator", "loader")),
    ("non-blocking", _SWITCH, ("accelerator",)),
    ("channels-last", _SWITCH, ("cuda",)),
    ("cudnn-benchmark", _SWITCH, ("cuda",)),
    ("allocator", lambda around: around.allocators, ("allocators",)),
    ("garbage-at-steps", _SWITCH, ()),
    ("clip-in-one-pass", _SWITCH, ("optimizer",)),
    ("zero-grad", _SWITCH, ("optimizer",)),
    ("bucket-mb", _only("50", "100"), ("ranks",)),
    ("gradient-view", _SWITCH, ("ranks",)),
    ("static-graph", _SWITCH, ("ranks",)),
    ("prefetch", _only("4"), ("loader",)),
    ("persistent-workers", _SWITCH, ("loader",)),
)
"""Knob, its values, and its requirement."""


def program_hash(words: Sequence[str]) -> str:
    """The hash of the content of the script among a command's words; "" without one."""
    from hashlib import sha256

    script = next((Path(word) for word in words[1:] if word.endswith(".py") and Path(word).is_file()), None)
    return "" if script is None else sha256(script.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of profiling the unchanged program."""

    trace: Trace | None = None
    findings: tuple[Finding, ...] = ()
    facts: dict[str, Any] | None = None
    ranks: int = 1
    shares: dict[str, float] = field(default_factory=dict)


def _shares(diagnosis: Diagnosis) -> dict[str, float]:
    """Part of the step by cause: of the busiest device's idle time, or of the host's without a device."""
    device = max(diagnosis.in_steps, key=lambda each: each.busy_ns, default=None)
    if device is None:
        return {str(cause): float(share) for cause, share in diagnosis.host.select("cause", "share").iter_rows()}
    idle = diagnosis.idle_in_steps.filter(pl.col("device") == device.device).group_by("cause").agg(pl.col("ns").sum())
    window_ns = max(device.window_ns, 1)
    return {"compute": device.busy_ns / window_ns, **{str(cause): ns / window_ns for cause, ns in idle.iter_rows()}}


def baseline_of(
    command: Sequence[str],
    words: Sequence[str],
    folder: Path,
    settings: BenchSettings,
    open_trace: Callable[[str], Trace],
    read: Callable[[str], UserSource | None],
    say: Callable[[str], None],
) -> Baseline:
    """Record a few steps of the program and diagnose them; if recording fails, say so and continue.

    Args:
        read: returns a source file that the trace names, for diffs; None if it may not be read.

    Raises:
        UsageError: the program cannot be started.
        KeyboardInterrupt: on Ctrl-C.
    """
    bench = Bench((BenchCommand("baseline", " ".join(command), tuple(words), {}),), settings, folder)
    run = profile_commands(bench, say).get("baseline")
    if run is None:
        say("so there are no findings to start from, and the standard knobs are tried")
        return Baseline()
    recordings = [one for one in run.recordings() if one.get("trace")]
    try:
        trace = open_trace(str(run.latest_traces()[0]))
        diagnosis = Diffs(read).filled(diagnose(trace))
    except TraceError as error:
        say(f"the profile cannot be read, so there are no findings to start from: {error}")
        return Baseline()
    facts = recordings[0].get("facts") if recordings else None
    ranks = max([int(one.get("world_size", 1)) for one in recordings], default=1)
    known = facts if isinstance(facts, dict) else None
    return Baseline(trace, diagnosis.findings, known, ranks, _shares(diagnosis))
