"""Build hook: compiles the scanner, native/scanner.cpp, if there is a C++ compiler; the package works without it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "native/scanner.cpp"
PACKAGE = "src/stepscope/readers/kineto"
MOST_SECONDS = 120
IS_WINDOWS = sys.platform == "win32"
HAS_LIMITED_API = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
SUFFIX = ".pyd" if IS_WINDOWS else ".abi3.so"


class ScannerHook(BuildHookInterface):
    """Adds the compiled scanner to wheels and editable installs; quietly goes on where it cannot be compiled."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        target = root / PACKAGE / f"_scanner{SUFFIX}"
        if not compiled(root / SOURCE, target):
            target.unlink(missing_ok=True)  # one from an older source
            return
        build_data["pure_python"] = False
        build_data["artifacts"].append(f"{PACKAGE}/{target.name}")
        build_data["tag"] = f"cp310-abi3-{platform()}"


def compiled(source: Path, target: Path) -> bool:
    """Compile the scanner with the system's compiler, or the one that CXX names; whether that worked."""
    if not HAS_LIMITED_API or os.environ.get("STEPSCOPE_BUILD_SCANNER") == "0":
        return False
    with (
        contextlib.suppress(OSError, subprocess.SubprocessError),
        # beside the target, so that it can be moved; compilers leave other files there, such as .obj and .lib
        tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder,
    ):
        made = Path(folder) / target.name
        if any(runs(command) for command in commands(source, made)):
            os.replace(made, target)
            return True
    return False


def runs(command: list[str]) -> bool:
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run(command, capture_output=True, timeout=MOST_SECONDS).returncode
    )


def commands(source: Path, target: Path) -> list[list[str]]:
    """Return the commands to try, in this order."""
    include = sysconfig.get_path("include")
    if IS_WINDOWS:
        library = str(Path(sys.base_prefix) / "libs")
        options = ["/nologo", "/std:c++17", "/O2", "/EHsc", "/LD", f"/I{include}", str(source), f"/Fe:{target}"]
        return [["cl", *options, f"/Fo:{target.with_suffix('.obj')}", "/link", f"/LIBPATH:{library}"]]
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    options = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", f"-I{include}", str(source), "-o", str(target)]
    if chosen := os.environ.get("CXX"):
        return [[*shlex.split(chosen), *shared, *flags(), *options]]
    return [[name, *shared, *flags(), *options] for name in ("c++", "g++", "clang++")]


def flags() -> list[str]:
    """Return what the user or cibuildwheel adds, such as architectures of macOS or sanitizers."""
    names = ("CPPFLAGS", "CXXFLAGS", "LDFLAGS", *(["ARCHFLAGS"] if sys.platform == "darwin" else []))
    return shlex.split(" ".join(os.environ.get(name, "") for name in names))


def platform() -> str:
    """Return the platform of the wheel's tag; macOS gets the architecture that it was built for."""
    name = sysconfig.get_platform()
    architectures = [each for each in os.environ.get("ARCHFLAGS", "").split() if each != "-arch"]
    if sys.platform == "darwin" and architectures:
        system, release, _ = name.split("-", 2)
        name = f"{system}-{release}-{architectures[0] if len(architectures) == 1 else 'universal2'}"
    return name.replace("-", "_").replace(".", "_")
