"""Runs programs in forked children of one process that has imported torch already, with an error put into an entry.

Reads a job a line from standard input, as JSON: {"program", "folder", "options", "call", "entry", "error", "whole"};
answers with {"code", "out", "err", "hit", "clean"}. `options` are those of `stepscope run`, None for a program that it
did not start; `call` is what the bootstrap is told was imported, once that is so.

A program that is `whole` ends as any program does. The others end after their threads and exit handlers: taking the
modules apart would copy all the memory that they share with this process, half of the time of a run.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Panic(BaseException):
    """As compiled extensions raise them."""


ERRORS = {
    "RuntimeError": lambda: RuntimeError("planted"),
    "MemoryError": lambda: MemoryError(),
    "RecursionError": lambda: RecursionError("planted"),
    "Panic": lambda: Panic("planted"),
    **{
        name: lambda name=name: OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
        for name in ("ENOSPC", "EIO", "EDQUOT", "EROFS", "ENOENT")
    },
}
_PRINT, _OS_EXIT = builtins.print, os._exit


def main() -> None:
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # the first step of an optimizer imports it, and that takes seconds
    import torch.utils.data  # noqa: F401

    if "lightning" in sys.argv:
        import lightning.pytorch  # noqa: F401
    import stepscope.record.bootstrap
    import stepscope.record.profile_block
    import stepscope.record.telemetry.log  # noqa: F401

    gc.collect()
    gc.freeze()  # what stands here is shared with the children: their collector need not copy it
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if not child:
            code = _become(job, folder)
            if job["whole"]:
                sys.exit(code)
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            _OS_EXIT(code)
        code = _ended(child)
        hit = (folder / "hit").read_text().split() if (folder / "hit").exists() else []
        clean = json.loads((folder / "clean").read_text()) if (folder / "clean").exists() else None
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        _PRINT(json.dumps({"code": code, "out": out, "err": err, "hit": sorted(set(hit)), "clean": clean}), flush=True)


def _ended(child: int) -> int:
    until = time.monotonic() + 300  # a program that hangs is killed; a busy machine is waited for
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1000


def _become(job: dict[str, Any], folder: Path) -> int:
    """Run the program and return its exit code."""
    sys.stdin.close()
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    script = folder / "program.py"
    script.write_text(job["program"])
    sys.argv = [str(script)]
    from stepscope import guard
    from stepscope.record import annotations

    hits = os.open(folder / "hit", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    known: set[str] = set()

    def probe(name: str) -> None:
        if name not in known:
            known.add(name)
            os.write(hits, f"{name}\n".encode())
        if name == job["entry"]:
            raise ERRORS[job["error"]]()

    guard.probe = probe
    _AT_BEGIN.update(_settings())
    if job["options"] is not None:
        run = folder / "run"
        run.mkdir(exist_ok=True)
        (run / "run.json").write_text(json.dumps({"command": ["program.py"]}))
        os.environ.update(STEPSCOPE_RUN=str(run), STEPSCOPE_RUN_OPTIONS=json.dumps(job["options"]))
        annotations._IN_RUN = True
        from stepscope.record.bootstrap import was_imported

        if not job["call"]:  # as in a process that imports neither torch nor JAX
            del sys.modules["stepscope.record.controller"]
        else:
            __import__(job["call"])
            was_imported(job["call"])
    code = compile(job["program"], str(script), "exec")
    try:
        exec(code, {"__name__": "__main__", "__file__": str(script)})
    except SystemExit as ended:
        return ended.code
    finally:
        if guard.has_failed():
            (folder / "clean").write_text(json.dumps(_left_behind(guard)))
        sys.stdout.flush()
    return 0


def _settings() -> dict[str, Any]:
    """What a program may not find changed."""
    return {
        "os._exit": os._exit,
        "trace": (sys.gettrace(), threading.gettrace()),
        "profile": sys.getprofile(),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "function modes": _modes(),
    }


def _modes() -> int:
    import torch

    return int(torch._C._len_torch_function_stack())


_AT_BEGIN: dict[str, Any] = {}


def _left_behind(guard: Any) -> list[str]:
    """What of ours still stands in the process."""
    from torch.autograd import profiler
    from torch.utils import data
    from torch.utils.data import dataloader

    from stepscope.record.telemetry import log as telemetry_log

    time.sleep(0.1)  # threads that were told to end do so when they look next
    patched = {
        "print": builtins.print,
        "next": dataloader._BaseDataLoaderIter.__next__,
        "iter": data.DataLoader.__iter__,
        "enable": profiler._enable_profiler,
    }
    found = [name for name, each in patched.items() if getattr(each, "__code__", None) is guard.around(len).__code__]
    found += ["profiler"] if profiler._is_profiler_enabled else []
    now = _settings()
    found += [name for name, each in _AT_BEGIN.items() if now[name] != each]
    found += ["collector"] if not gc.isenabled() else []
    found += ["callbacks" for each in gc.callbacks if "stepscope" in getattr(each, "__module__", "")]
    samplers = [run._sampler for run in telemetry_log._OPEN]
    found += ["sampler" for each in samplers if each is not None and each._thread.is_alive()]
    return found + [f"held {held.what}" for held in guard._held.values() if held.process == os.getpid()]


if __name__ == "__main__":
    main()
