"""Checks of settings: debugging aids left on, the garbage collector, slow versions, power supply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepscope.machine.observed import Check, Machine, Observation

_OFF: Final = ("", "0", "false", "off", "no", "n")


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable that costs speed.

    Attributes:
        why: its effect on timings.
        values: values (lower case) with that effect; empty for any value that does not mean "off".
        problem: whether it makes steps slow; otherwise it is only worth knowing.
    """

    name: str
    why: str
    values: tuple[str, ...] = ()
    problem: bool = True

    def is_on(self, value: str) -> bool:
        """Whether this value of the variable has the effect."""
        value = value.strip().lower()
        return value in self.values if self.values else value not in _OFF


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("CUDA_LAUNCH_BLOCKING", "every kernel launch waits until the kernel has ended"),
    Setting("HIP_LAUNCH_BLOCKING", "every kernel launch waits until the kernel has ended"),
    Setting("AMD_SERIALIZE_KERNEL", "kernels run one after the other, with waits between them"),
    Setting("AMD_SERIALIZE_COPY", "copies run one after the other, with waits between them"),
    Setting("TORCH_USE_CUDA_DSA", "kernels check assertions on the device, in builds that have them"),
    Setting("PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor is allocated and freed by the driver, which waits"),
    Setting("TORCH_DISTRIBUTED_DEBUG", "collectives are checked or logged in every step", ("info", "detail")),
    Setting("NCCL_DEBUG", "NCCL logs; TRACE logs every call", ("trace", "info"), problem=False),
    Setting("TORCH_NCCL_BLOCKING_WAIT", "the host waits for every collective", ()),
    Setting("NCCL_BLOCKING_WAIT", "the host waits for every collective", ()),
    Setting("TORCH_COMPILE_DEBUG", "torch.compile writes every intermediate form to disk"),
    Setting("TORCH_COMPILE_DISABLE", "torch.compile does nothing, the model runs eagerly"),
    Setting("TORCHDYNAMO_DISABLE", "torch.compile does nothing, the model runs eagerly"),
    Setting("TORCH_LOGS", "PyTorch logs what this names", problem=False),
    Setting("TORCH_SHOW_CPP_STACKTRACES", "every error collects a C++ stack", problem=False),
    Setting("PYTORCH_ENABLE_MPS_FALLBACK", "operators that Metal lacks silently run on the CPU", problem=False),
    Setting("NVIDIA_TF32_OVERRIDE", "TF32 is off whatever the program says", ("0",)),
    Setting("CUDA_INJECTION64_PATH", "another tool is loaded into every CUDA process"),
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "all queues of the device share one connection", ("1",), problem=False),
    Setting("CUBLAS_WORKSPACE_CONFIG", "cuBLAS may be held to slower, deterministic kernels", problem=False),
    Setting("PYTHONDEVMODE", "Python checks memory and arguments at every call"),
    Setting("PYTHONTRACEMALLOC", "Python keeps a traceback for every allocation"),
)
"""Debugging aids and limits, by variable, as documented by PyTorch, NVIDIA, AMD and Python."""


@dataclass(frozen=True, slots=True)
class SlowVersions:
    """A version range of a package that is known to be slow.

    Attributes:
        package: its name on PyPI, or "python".
        first: the first version of the range, as numbers.
        end: the first version after the range.
        what: what is slow.
        change: what to do.
        source: address of the source.
    """

    package: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    what: str
    change: str
    source: str


SLOW_VERSIONS: Final[tuple[SlowVersions, ...]] = (
    SlowVersions(
        "torch",
        (2, 9, 0),
        (2, 10),
        "3D convolutions in bfloat16 or float16 avoid cuDNN: about four times slower, with far more memory",
        "If the model has 3D convolutions, install PyTorch 2.10, or 2.9.1 with cuDNN 9.15 or newer.",
        "https://github.com/pytorch/pytorch/issues/166122 and /166643",
    ),
    SlowVersions(
        "torch",
        (0,),
        (2, 0),
        "optimizers update tensors one by one unless foreach=True, and there is no torch.compile",
        "Install PyTorch 2.",
        "https://github.com/pytorch/pytorch/releases/tag/v2.0.0",
    ),
    SlowVersions(
        "python",
        (3, 14, 0),
        (3, 14, 5),
        "the incremental garbage collector lets memory grow; it was taken back in 3.14.5",
        "Install Python 3.14.5 or newer.",
        "https://github.com/python/cpython/pull/149398",
    ),
    SlowVersions(
        "python",
        (3,),
        (3, 11),
        "pure Python code runs 10 to 60 % slower than in 3.11",
        "Install Python 3.11 or newer, if launching work or loading data limits the step.",
        "https://docs.python.org/3/whatsnew/3.11.html#faster-cpython",
    ),
)
"""Versions with measured or announced slowness; each row needs a source."""


def debug_settings(machine: Machine) -> list[Observation]:
    """Check the environment for debugging aids."""
    check = Check("debug-settings")
    if machine.environ is None:
        where = f"/{machine.proc}/environ cannot be read"
        return [check.unknown("The process's environment variables cannot be read", where)]
    found = [
        check.says(
            "problem" if setting.problem else "note",
            f"{setting.name} is set: {setting.why}",
            f"{setting.name}={machine.variable(setting.name)}",
            "It is meant for finding faults, or it is left over from another experiment.",
            f"unset {setting.name}",
        )
        for setting in SETTINGS
        if setting.name in machine.environ and setting.is_on(machine.variable(setting.name))
    ]
    fine = check.fine("No debugging aid is set in the environment", f"{len(SETTINGS)} environment variables")
    return found or [fine]


def program_settings(machine: Machine) -> list[Observation]:
    """Check for debugging aids that the program itself switched on; only visible from inside the process."""
    check, runtime = Check("program-settings"), machine.runtime
    if runtime.anomaly_mode is None:
        return [
            check.unknown(
                "Whether the program sets anomaly mode, sync debug mode or deterministic algorithms is not known",
                "they are set inside the program: look for set_detect_anomaly, set_sync_debug_mode and "
                "use_deterministic_algorithms; stepscope run --quiet-machine reads them while it runs",
            )
        ]
    aids = (
        (runtime.anomaly_mode, "Anomaly mode is on", "each operator keeps a traceback and is searched for NaN"),
        (bool(runtime.sync_debug_mode), "Sync debug mode is on", "each synchronisation is checked and warned of"),
        (bool(runtime.deterministic), "Only deterministic algorithms are used", "they are slower, and some wait"),
        (bool(runtime.tracer), f"{runtime.tracer or 'Nothing'} traces every Python call", "Python runs much slower"),
    )
    found = [
        check.problem(f"{title}: {why}", "read in the process", "It slows every step down.", "Turn it off.")
        for is_on, title, why in aids
        if is_on
    ]
    return found or [check.fine("The program has no debugging aid on", "read in the process")]


def garbage_collector(machine: Machine) -> Observation:
    """Check whether Python's garbage collector may run within a step."""
    check, runtime = Check("garbage-collector"), machine.runtime
    if runtime.collector is None:
        return check.unknown("The garbage collector is not known", "only the process itself can tell")
    read = f"gc.isenabled(): {runtime.collector}; thresholds {runtime.collector_thresholds}"
    if not runtime.collector:
        return check.fine("The garbage collector is off", read)
    return check.note(
        "The garbage collector runs whenever enough objects were made",
        read,
        "A full collection stops the launching thread in some step or other, for longer the more objects there are; "
        "in a distributed run all ranks wait for the one that collects.",
        "stepscope run --quiet-machine holds it off while steps are recorded; in your code: gc.freeze() after "
        "building the model, or gc.disable() and gc.collect() every hundred steps.",
    )


def versions(machine: Machine) -> list[Observation]:
    """Check for versions that are known to be slow."""
    check, runtime = Check("versions"), machine.runtime
    if runtime.python is None or runtime.versions is None:
        return [check.unknown("The process's versions are not known", "it may use another Python")]
    installed = {"python": runtime.python, **runtime.versions}
    read = ", ".join(f"{name} {version}" for name, version in installed.items())
    found = [
        check.note(f"{row.package} {installed[row.package]}: {row.what}", read, f"Source: {row.source}", row.change)
        for row in SLOW_VERSIONS
        if row.package in installed and row.first <= release(installed[row.package]) < row.end
    ]
    return found or [check.fine("No version is known to be slow", read)]


def power_supply(machine: Machine) -> Observation:
    """Check whether a laptop runs on its battery."""
    check, folder = Check("power-supply"), "sys/class/power_supply"
    if not (machine.root / folder).is_dir():
        return check.unknown("The power supply cannot be read", f"/{folder} is not there")
    supplies = [f"{folder}/{path.name}" for path in machine.matching(folder, "*")]
    mains = [path for path in supplies if machine.read(f"{path}/type") == "Mains"]
    if not mains:
        return check.fine("No battery is known to feed the machine", f"/{folder}: no mains adapter listed")
    if any(machine.number(f"{path}/online") == 1 for path in mains):
        return check.fine("The machine runs on mains power", f"/{folder}")
    return check.problem(
        "The machine runs on its battery",
        f"/{folder}: mains adapter not connected",
        "Processor and device lower their clocks to save energy.",
        "Connect the power supply.",
    )


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "2.9.0+cu128" is (2, 9, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
