"""`run.json`: what was run, with which versions and settings, where, and how it ended.

Only environment variables on an allow list of performance-related names are kept; possible secrets in these and in
the command are masked. Imports only the standard library.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

from stepscope import guard

SCHEMA: Final = 1

_NAMES: Final = frozenset(
    """OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE OMP_WAIT_POLICY OMP_DYNAMIC MKL_NUM_THREADS MKL_DYNAMIC
    OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS VECLIB_MAXIMUM_THREADS GOMP_CPU_AFFINITY MALLOC_CONF LD_PRELOAD
    MALLOC_ARENA_MAX TOKENIZERS_PARALLELISM PYTHONHASHSEED PYTHONGIL PYTHON_GIL PYTHONMALLOC PYTHONOPTIMIZE
    PYTHONUNBUFFERED RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK SLURM_PROCID SLURM_NTASKS
    SLURM_JOB_NUM_NODES SLURM_CPUS_PER_TASK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE""".split()  # noqa: SIM905
)
_PREFIXES: Final = (
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "NCCL_", "UCX_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "KMP_"),
    *("HIP_", "HSA_", "ROCR_", "MIOPEN_", "RCCL_", "ONEDNN_", "DNNL_", "ATEN_", "XLA_", "PJRT_", "ZE_", "HABANA_"),
)
_SECRET: Final = re.compile(
    r"token(?!i[sz]|s)|secret|passw|passphrase|credential|auth(?!or)|cookie|bearer|signature|dsn$|pwd$"
    r"|(?:api|access|private|account|license|encryption|ssh|signing)[-_]?key|(?:^|[-_.])keys?$",
    re.IGNORECASE,
)
_SECRET_VALUE: Final = re.compile(
    r"://[^/\s@]+:[^/\s@]*@|\bBearer\s|\b(?:sk|pk|hf|ghp|gho|ghs|glpat|xox[abp]|wandb)[-_][\w-]{8,}"
    r"|\bgithub_pat_\w{8,}|\bAKIA[0-9A-Z]{12,}|\beyJ[\w-]{10,}\.",
    re.ASCII,
)
_SHOWN_VERSIONS: Final = (
    *("torch", "numpy", "lightning", "pytorch_lightning", "transformers", "accelerate", "deepspeed"),
    *("jax", "jaxlib", "flax", "optax", "equinox", "torch_xla"),
)
_ASSIGNMENT: Final = re.compile(r"[-\w.]+")
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}", re.ASCII)
_HIDDEN: Final = "***"
_LONGEST_VALUE: Final = 500
_GIT_PATIENCE_S: Final = 3.0
_LATEST_S: Final = 2.0**37
"""Upper limit for times, in seconds since 1970, that dates can represent."""
_LARGEST: Final = 2**31


@dataclass(frozen=True, slots=True)
class RunManifest:
    """The content of `run.json`; unknown values are None or empty.

    Attributes:
        command: the program and its arguments, without secrets.
        folder: the working directory; None if redacted.
        host: the machine's name; None if redacted.
        started_unix_s, ended_unix_s: wall-clock times.
        exit_code: 128 + N if signal N ended the program.
        git: state of the program's repository, as from `git_state`.
        versions: of stepscope, python, and of torch, numpy, cuda and others if the program has imported them.
        devices: names of the accelerators, indexed by the program's device numbers.
        environment: variables that affect performance.
        options: recording options.
        recordings: outcome of each process's recording.
        applied: outcomes of remedies, {"flag", "sentence", "applied", "ranks"} each; "ranks" is absent if all ranks
            agree.
        schema: version of this file's format.
    """

    command: tuple[str, ...]
    folder: str | None = None
    host: str | None = None
    started_unix_s: float = 0.0
    ended_unix_s: float | None = None
    exit_code: int | None = None
    git: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    recordings: tuple[dict[str, Any], ...] = ()
    applied: tuple[dict[str, Any], ...] = ()
    schema: int = SCHEMA

    @classmethod
    def begin(
        cls, command: Sequence[str], started_unix_s: float, *, options: Mapping[str, Any], redact: bool
    ) -> RunManifest:
        """Make the manifest of a program that is about to start; with `redact`, without machine and folder names."""
        from stepscope import __version__

        shown = without_secrets(command)
        return cls(
            command=tuple(_base_name(word) for word in shown) if redact else tuple(shown),
            folder=None if redact else os.getcwd(),
            host=None if redact else platform.node(),
            started_unix_s=started_unix_s,
            git=git_state(_place_of(command), redact=redact),
            versions={"stepscope": __version__},
            system={"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
            environment=speed_environment(os.environ, redact=redact),
            options=dict(options),
        )

    def ended(
        self,
        ended_unix_s: float,
        exit_code: int,
        recordings: Sequence[Mapping[str, Any]],
        applied: Sequence[dict[str, Any]] = (),
    ) -> RunManifest:
        """Add how the program ended, and the versions, devices and environment reported by its first process."""
        found: Mapping[str, Any] = next((one["facts"] for one in recordings if one.get("facts")), {})
        return replace(
            self,
            ended_unix_s=ended_unix_s,
            exit_code=exit_code,
            versions={**self.versions, **found.get("versions", {})},
            devices=tuple(found.get("devices", ())),
            environment=found.get("environment", self.environment),
            recordings=tuple({name: value for name, value in one.items() if name != "facts"} for one in recordings),
            applied=tuple(applied),
        )

    def suggested_name(self) -> str:
        """Return a name made of the program's name and the start time."""
        program = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(_program_of(self.command)).stem).strip("-.") or "run"
        started = datetime.fromtimestamp(self.started_unix_s, timezone.utc).astimezone()
        return f"{program[:60]}-{started:%Y%m%d-%H%M%S}"

    @property
    def command_line(self) -> str:
        return shlex.join(self.command)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> tuple[RunManifest, bool]:
        """Read `run.json`; return also whether all of it could be read. Keys of later versions are ignored.

        Raises ValueError if the command is missing.
        """
        if not isinstance(content.get("command"), list) or not _fits(content["command"], list[str]):
            raise ValueError("it does not say which command was run")
        values: dict[str, Any] = {}
        whole = True
        for name, kind in _kept_types().items():
            value = content.get(name)
            if value is None:
                continue
            if isinstance(value, list) and name in ("recordings", "applied"):  # validate each key separately
                kept = [one for one in value if isinstance(one, dict)]
                whole &= len(kept) == len(value)
                values[name] = tuple(map(of_recording if name == "recordings" else dict, kept))
            elif _fits(value, kind):
                values[name] = tuple(value) if isinstance(value, list) else value
            else:
                whole = False
        return cls(**values), whole


def of_recording(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a process's recording report without invalid values."""
    kinds = _types_of_recording()
    return {name: value for name, value in content.items() if value is None or _fits(value, kinds.get(name, Any))}


def _fits(value: object, kind: Any) -> bool:
    import msgspec  # not imported in the user's program, which only writes

    from stepscope.files import converted

    try:
        converted(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@cache
def _kept_types() -> dict[str, Any]:
    from msgspec import Meta

    time_s = Annotated[float, Meta(ge=0, lt=_LATEST_S)]
    whole = Annotated[int, Meta(gt=-_LARGEST, lt=_LARGEST)]
    return {
        **dict.fromkeys(("command", "devices"), list[str]),
        **dict.fromkeys(("folder", "host"), str),
        **dict.fromkeys(("started_unix_s", "ended_unix_s"), time_s),
        **dict.fromkeys(("exit_code", "schema"), whole),
        **dict.fromkeys(("versions", "environment"), dict[str, str]),
        **dict.fromkeys(("git", "system", "options", "recordings", "applied"), dict[str, Any]),
    }


@cache
def _types_of_recording() -> dict[str, Any]:
    from msgspec import Meta

    whole = Annotated[int, Meta(gt=-_LARGEST, lt=_LARGEST)]
    return {
        **dict.fromkeys(("steps", "first_step", "asked_steps", "world_size", "process", "captures"), whole),
        **dict.fromkeys(("trace", "problem", "host", "source", "own_profiler_name"), str),
        **dict.fromkeys(("facts", "energy", "evaluations", "model_calls"), dict[str, Any]),
        "said": list[str],
        "complete": bool,
        "step_times": list[dict[str, Any]],
    }


def speed_environment(environment: Mapping[str, str], *, redact: bool = False) -> dict[str, str]:
    """Return the variables on the allow list, without secrets; with `redact`, without folders."""
    return {
        name: value[:_LONGEST_VALUE]
        for name, value in sorted(environment.items())
        if (name in _NAMES or name.startswith(_PREFIXES))
        and not _SECRET.search(name)
        and not _SECRET_VALUE.search(value)
        and not (redact and "/" in value)
    }


def without_secrets(command: Sequence[str]) -> list[str]:
    """Return the command with *** for the value of each option or assignment whose name suggests a secret."""
    shown: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        named = bool(_ASSIGNMENT.fullmatch(name)) and bool(_SECRET.search(name))
        if hide and not word.startswith("--"):
            shown.append(_HIDDEN)
        elif equals and named:
            shown.append(f"{name}={_HIDDEN}")
        elif _SECRET_VALUE.search(word):
            shown.append(f"{name}={_HIDDEN}" if equals and _ASSIGNMENT.fullmatch(name) else _HIDDEN)
        else:
            shown.append(word)
        hide = named and not equals and word.startswith("-")
    return shown


def git_state(folder: Path, *, redact: bool = False) -> dict[str, Any] | None:
    """Return the state of the repository around a folder; None without one.

    Returns:
        {"commit": hash, "dirty": whether tracked files were changed} and, if dirty, "changes": changed lines per file,
        or with `redact` only the totals.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    state = {"commit": commit, "dirty": None if changes is None else bool(changes)}
    if not changes:
        return state
    stat = _git(folder, "diff", "--no-ext-diff", "--shortstat" if redact else "--stat=100", "HEAD")
    return {**state, "changes": _in_one_line(stat)} if stat else state


def git_difference(folder: Path, before: str, after: str) -> str | None:
    """Summarise the difference between two commits in files and lines; None if the repository does not have them."""
    if not (_COMMIT.fullmatch(before) and _COMMIT.fullmatch(after)):
        return None
    stat = _git(folder, "diff", "--no-ext-diff", "--shortstat", before, after, "--")
    return None if stat is None else _in_one_line(stat) or "no difference"


def _in_one_line(stat: str) -> str:
    text = "; ".join(" ".join(line.split()) for line in stat.splitlines())
    return text if len(text) <= _LONGEST_VALUE else f"...{text[-_LONGEST_VALUE:]}"


def process_facts(*, redact: bool = False) -> dict[str, Any]:
    """Return what only the program's process knows: versions, devices, environment. Starts no device."""
    from stepscope.remedies.compile_caches import hit_counts

    versions = {"python": platform.python_version()}
    for name in _SHOWN_VERSIONS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    torch = sys.modules.get("torch")
    for name in ("cuda", "hip"):
        version = getattr(getattr(torch, "version", None), name, None)
        if version is not None:
            versions[name] = str(version)
    return {
        "versions": versions,
        "devices": _devices(torch) or guard.attempted(_jax_devices) or [],
        "environment": speed_environment(os.environ, redact=redact),
        "compile_caches": hit_counts(),
    }


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size: torch.distributed's or jax.distributed's, else the launcher's, else (0, 1)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    processes = getattr(state, "num_processes", None)
    if isinstance(processes, int) and processes > 1:
        return int(getattr(state, "process_id", None) or 0), processes
    rank = _number("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    size = _number("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    return rank or 0, max(size or 1, (rank or 0) + 1)


def _number(*names: str) -> int | None:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if re.fullmatch(r"[0-9]{1,9}", value)), None)


def _devices(torch: Any) -> list[str]:
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            return [str(module.get_device_name(number)) for number in range(module.device_count())]
    return []


def _jax_devices() -> list[str]:
    """Return names of the accelerators that JAX uses, through a private attribute of jax; starts no device."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return []
    jax: Any = sys.modules["jax"]
    return [str(each.device_kind) for each in jax.local_devices() if each.platform != "cpu"]


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_PATIENCE_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _program_of(command: Sequence[str]) -> str:
    """Return the most descriptive word of a command: its script or module, else the program itself."""
    script = next((word for word in command if word.endswith(".py")), None)
    if script is not None:
        return script
    if "-m" in command[:-1]:
        return command[list(command).index("-m") + 1].rsplit(".", 1)[-1]
    return command[0] if command else "run"


def _place_of(command: Sequence[str]) -> Path:
    """Return the folder of the script, or else the working directory."""
    script = _program_of(command)
    parent = Path(script).parent
    return parent if script.endswith(".py") and parent.is_dir() else Path()


def _base_name(word: str) -> str:
    name, equals, value = word.rpartition("=")
    return name + equals + (os.path.basename(value.rstrip("/")) if "/" in value else value)
