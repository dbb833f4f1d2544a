"""What works on Windows and macOS must work here without what only POSIX has: a stand-in for machines not at hand.

The libraries that stepscope uses are imported first, as they have other code there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SAMPLE = str(Path(__file__).parents[2] / "examples" / "gpt2_per_token_loss_cpu.json.gz")
WITHOUT_POSIX = """
import asyncio, json, os, platform, signal, subprocess, sys, tempfile, uuid, webbrowser
import jinja2, msgspec, numpy, platformdirs.unix, polars, rich.console, scipy.stats, xxhash
import starlette.applications, uvicorn

for name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in (
    "fork forkpty getuid geteuid getgid getegid getpgid getpgrp setsid setpriority getpriority nice statvfs fstatvfs "
    "sched_getaffinity sched_setaffinity register_at_fork mkfifo chown fchmod killpg openpty pread pwrite "
    "posix_fadvise sysconf getloadavg wait3 wait4 uname O_DIRECTORY O_NOFOLLOW O_NOCTTY O_CLOEXEC tcgetpgrp "
    "confstr posix_spawn"
).split():
    if hasattr(os, name):
        delattr(os, name)
for name in (
    "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGTSTP SIGCONT SIGXFSZ SIGXCPU SIGPIPE SIGKILL SIGSTOP setitimer "
    "pthread_sigmask sigwait alarm"
).split():
    if hasattr(signal, name):
        delattr(signal, name)

from stepscope.commands import main

for words in json.loads(sys.argv[1]):
    code = main(words)
    print(f"\\n== {code}", flush=True)
"""
COMMANDS = (
    (["diagnose", SAMPLE], "a step takes"),
    (["diagnose", SAMPLE, "--no-cache"], "a step takes"),
    (["diagnose", SAMPLE, "--html", "page.html"], "a step takes"),
    (["compare", SAMPLE, SAMPLE], "a step takes"),
    (["predict", SAMPLE, "--to", "L4"], "L4"),
    (["lines", SAMPLE], "gpt2_training.py"),
    (["whatif", SAMPLE], "took"),
    (["memory", SAMPLE], "aten::"),
    (["export", SAMPLE, "timeline.json"], ""),
    (["runs"], "There are no runs yet"),
    (["view", SAMPLE, "--no-browser", "--idle-after", "1s"], "http://127.0.0.1:"),
)


def test_commands_need_nothing_of_posix(tmp_path: Path) -> None:
    folders = {f"STEPSCOPE_{name}_DIR": str(tmp_path / name.lower()) for name in ("DATA", "CACHE", "CONFIG")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, json.dumps([words for words, _ in COMMANDS])],
        cwd=tmp_path,
        env={**os.environ, **folders, "PYTHONIOENCODING": "cp1252:replace"},
        capture_output=True,
        encoding="cp1252",
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split("\n== 0\n")
    assert len(outputs) == len(COMMANDS) + 1, done.stdout + done.stderr
    for (words, said), output in zip(COMMANDS, outputs, strict=False):
        assert said in output, words
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
