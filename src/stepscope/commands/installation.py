"""`stepscope doctor`: whether this installation works on this machine; `stepscope completion`: for the Tab key."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.machine import scanner, text_lines
from stepscope.commands.shared import output
from stepscope.commands.shared.options import Command, CommandParser
from stepscope.report.format import size

if TYPE_CHECKING:
    import subprocess

    from stepscope.machine.observed import Observation

_FRAMEWORKS: Final = {"torch": "PyTorch", "torch_xla": "PyTorch/XLA", "jax": "JAX", "habana_frameworks": "Intel Gaudi"}
_NOT_FOR_USERS: Final = ("cloud-tests", "dev", "jax-tests", "predictor")
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*\])?[^;]*;.*\bextra *== *['\"]([\w-]+)['\"]")
_SELF_TEST_S: Final = 120
_STEPS: Final = 5
_PROGRAM: Final = """\
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


_ASK: Final = """\
import json, torch
accelerator = getattr(torch, "accelerator", None)
device = accelerator and accelerator.current_accelerator(True)
module = getattr(torch, device.type, None) if device else None
count = accelerator.device_count() if device else 0
name = getattr(module, "get_device_name", str)
print(json.dumps([device.type if device else "", [name(each) for each in range(count)]]))
"""
"""Older versions of PyTorch have no `torch.accelerator`."""


def _prepare_doctor_parser(parser: CommandParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument(
        "--no-self-test", action="store_true", help="do not record a small program to see that it works"
    )


def _run_doctor(arguments: argparse.Namespace) -> int:
    from stepscope.machine.environment import observations_json
    from stepscope.report.document import json_bytes, stamped

    found = [*_installed(), *_devices(), *_folders()]
    if not arguments.no_self_test:
        found.append(_self_test())
    if arguments.format == "json":
        output.write_output("-", json_bytes(stamped(observations=observations_json(found))))
    else:
        problems = sum(each.verdict == "problem" for each in found)
        result = {0: "Nothing is broken", 1: "1 thing is broken"}.get(problems, f"{problems} things are broken")
        output.print_text("\n".join(text_lines(found, output.width(), result)) + "\n")
    return 1 if any(each.verdict == "problem" for each in found) else 0


def _installed() -> Iterator[Observation]:
    from stepscope import __version__
    from stepscope.machine.observed import Check

    python = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    yield Check("stepscope").fine(f"stepscope {__version__}, with {python}", str(Path(__file__).parents[1]))
    yield scanner()
    check = Check("frameworks")
    for module, name in _FRAMEWORKS.items():
        version = _version(module)
        if version is not None:
            yield check.fine(f"{name} {version} can be recorded", f"{sys.executable}")
    if all(_version(module) is None for module in _FRAMEWORKS):
        yield check.note(
            "No framework is installed beside stepscope",
            f"none of {', '.join(_FRAMEWORKS.values())} in {sys.prefix}",
            "stepscope run records programs of the environment that it is installed in; reading traces needs none.",
            "To record, install stepscope into the environment of your program.",
        )
    yield from _extras()


def _extras() -> Iterator[Observation]:
    from importlib.metadata import requires

    from stepscope.machine.observed import Check

    wanted: dict[str, list[str]] = defaultdict(list)
    for requirement in requires("stepscope") or []:
        if match := _REQUIREMENT.match(requirement):
            wanted[match[2]].append(match[1])
    for extra in sorted(wanted.keys() - set(_NOT_FOR_USERS)):
        check, missing = Check(f"extra-{extra}"), [name for name in wanted[extra] if _version(name) is None]
        if not missing:
            yield check.fine(f"The extra {extra} is installed", ", ".join(wanted[extra]))
        else:
            title = f"The extra {extra} is not installed: pip install 'stepscope[{extra}]'"
            yield check.unknown(title, f"missing: {', '.join(missing)}")


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Observation]:
    from stepscope.machine.environment import Machine
    from stepscope.machine.observed import Check

    check, machine = Check("accelerators"), Machine()
    if _version("torch") is None:
        yield check.unknown("Which accelerators there are is unknown without PyTorch", sys.prefix)
    else:
        yield _accelerators()
    counters = machine.fields("proc/driver/nvidia/params").get("RmProfilingAdminOnly")
    if counters == "1" and os.geteuid() != 0:
        yield Check("counters").note(
            "Hardware counters are only for the administrator",
            "/proc/driver/nvidia/params: RmProfilingAdminOnly: 1",
            "Recordings have all times, but no counters of kernels.",
            "Load the driver with NVreg_RestrictProfilingToAdminUsers=0, or record as root.",
        )


def _accelerators() -> Observation:
    """What a new process sees, since asking the driver may crash one."""
    from stepscope.machine.observed import Check

    check = Check("accelerators")
    done = _ran([sys.executable, "-c", _ASK])
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return check.problem("PyTorch cannot say which accelerators there are", reason, "It fails at its import.", "")
    kind, names = json.loads(done.stdout.splitlines()[-1])
    if not names:
        return check.fine("PyTorch sees no accelerator: programs are recorded on the processor", sys.executable)
    return check.fine(f"PyTorch sees {output.counted(len(names), f'{kind} device')}", ", ".join(names))


def _folders() -> Iterator[Observation]:
    import tempfile

    from stepscope.files import cache_folder
    from stepscope.machine.observed import Check
    from stepscope.record.run_folder import data_folder

    for folder, what in ((data_folder(), "Recorded runs"), (cache_folder(), "Traces that were read")):
        check = Check(f"folder-{what.split()[0].lower()}")
        place = next(each for each in (folder, *folder.parents) if each.exists())
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
            free = shutil.disk_usage(place).free
        except OSError as error:
            yield check.problem(
                f"{what} cannot be kept",
                f"{folder}: {error.strerror}",
                "Without it nothing is kept from one command to the next.",
                "Make it writable, or name others with STEPSCOPE_DATA_DIR and STEPSCOPE_CACHE_DIR.",
            )
        else:
            yield check.fine(f"{what} are kept", f"{folder}, {size(free)} free")


def _self_test() -> Observation:
    """Record a small training in folders of its own and diagnose it; without PyTorch there is nothing to record."""
    import tempfile

    from stepscope.machine.observed import Check

    check = Check("self-test")
    if _version("torch") is None:
        return check.unknown("Recording was not tried", "PyTorch is not installed")
    with tempfile.TemporaryDirectory(prefix="stepscope-doctor-") as place:
        program, report = Path(place) / "train.py", Path(place) / "report.json"
        program.write_text(_PROGRAM)
        words = ["run", "--steps", str(_STEPS), "--name", "doctor", "--no-diagnose", str(program)]
        done = _stepscope(words, place)
        if not done.returncode:
            done = _stepscope(["diagnose", "doctor", "--json", str(report)], place)
        if done.returncode or not report.exists():
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            what = "Recording a small training, or diagnosing it, failed"
            return check.problem(what, reason, "", f"Run it by hand with --debug: stepscope {' '.join(words[:4])} ...")
        steps = len(json.loads(report.read_text())["steps"]["list"])
    if steps != _STEPS:
        return check.problem("Not all steps of a small training were recorded", f"{steps} of {_STEPS}", "", "")
    return check.fine("A small training was recorded and diagnosed", f"{steps} of {_STEPS} steps")


def _stepscope(words: Sequence[str], place: str) -> subprocess.CompletedProcess[str]:
    folders = {f"STEPSCOPE_{name}_DIR": os.path.join(place, name.lower()) for name in ("DATA", "CACHE")}
    return _ran([sys.executable, "-m", "stepscope", *words], {**os.environ, **folders}, place)


def _ran(
    words: Sequence[str], environ: dict[str, str] | None = None, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    import subprocess

    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=_SELF_TEST_S, env=environ, cwd=folder, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {_SELF_TEST_S} s")


_SHELLS: Final = {
    "bash": ('eval "$(stepscope completion bash)"', "~/.bashrc"),
    "zsh": ('eval "$(stepscope completion zsh)"', "~/.zshrc, after compinit"),
    "fish": ("stepscope completion fish | source", "~/.config/fish/config.fish"),
}
_TRACES: Final = {
    "bash": "_stepscope_traces",
    "zsh": "_stepscope_traces",
    "fish": "(stepscope runs names 2>/dev/null; __fish_complete_path (commandline -ct))",
}
_PREAMBLE: Final = {
    "bash": """
_stepscope_traces() {
    compgen -W "$(stepscope runs names 2>/dev/null)" -- "$1"
    compgen -f -- "$1"
}
""",
    "zsh": """
_stepscope_traces() {
    compadd -- ${(f)"$(stepscope runs names 2>/dev/null)"}
    _files
}
""",
    "fish": "",
}
_TAKE_TRACES: Final = ("trace", "paths", "names", "targets")
_TAKE_FILES: Final = ("json", "html", "markdown", "csv", "diff", "capture_trace", "folder")


def _prepare_completion_parser(parser: CommandParser) -> None:
    parser.add_argument("shell", choices=tuple(_SHELLS), help="the shell that you use")


def _run_completion(arguments: argparse.Namespace) -> int:
    import shtab

    from stepscope.commands import parsers

    parser, commands = parsers()
    for action in parser._actions:  # the commands, which the help lists by group instead
        action.help = None if action.help == argparse.SUPPRESS else action.help
    for name, command in commands.items():
        for action in command._actions:
            _complete(action, name, shtab.FILE)
    output.print_text(shtab.complete(parser, arguments.shell, preamble=_PREAMBLE[arguments.shell]) + "\n")
    return 0


def _complete(action: Any, command: str, files: object) -> None:
    """Say what the value of an argument is: a trace or run, a file, a rule, a remedy."""
    if action.dest in _TAKE_TRACES and command not in ("prices", "devices"):
        action.complete = _TRACES
    elif action.dest in _TAKE_FILES:
        action.complete = files
    elif action.choices is None and (values := _values(action.dest, command)):
        action.choices = values


def _values(argument: str, command: str) -> list[str]:
    if (command, argument) in (("diagnose", "rule"), ("explain", "rule"), ("explain", "rules")):
        from stepscope.diagnosis.rules import RULES

        return [rule.id for rule in RULES]
    if argument == "apply":
        from stepscope.record.apply import all_flags

        return sorted(flag.name for flag in all_flags())
    return []


DOCTOR: Final = Command(
    name="doctor",
    help="Say whether stepscope works here: what is installed, devices, permissions, and a recording as a test.",
    prepare_parser=_prepare_doctor_parser,
    run=_run_doctor,
    examples="""\
examples:
  stepscope doctor                  exit code 1 if something is broken
  stepscope doctor --format json    to paste into an issue
""",
)
COMPLETION: Final = Command(
    name="completion",
    help="Print what makes the Tab key complete commands, options, runs and rules in your shell.",
    prepare_parser=_prepare_completion_parser,
    run=_run_completion,
    examples="examples, to add to your shell's start:\n"
    + "".join(f"  {line:<42} in {place}\n" for line, place in _SHELLS.values())
    + "\n  stepscope completion bash          prints the script\n",
)
