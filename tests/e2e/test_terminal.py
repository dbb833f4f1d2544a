"""Names that would move a terminal's cursor, set its title or turn text around, printed on a real one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.commands import COMMANDS, main
from tests.e2e.conftest import environment
from tests.simulator import write_kineto
from tests.simulator.programs import PROGRAMS

pty = pytest.importorskip("pty")

HOSTILE = "=x\x1b[2J\x1b]0;title\x07\x1b]8;;http://evil.example\x1b\\\x00\x9b31m\x85\u202e\u2066\u200f\rback\x08"
SQL = "select name, lane from operators union select name, lane from device_work"
WORDS: dict[str, list[tuple[str, ...]]] = {
    "diagnose": [("T", "--all"), ("T", "--json", "-"), ("T", "--markdown", "-"), ("T", "--html", "-")],
    "compare": [("T", "T"), ("T", "T", "--json", "-"), ("T", "T", "--markdown", "-")],
    "whatif": [("T",), ("T", "--json", "-")],
    "predict": [("T", "--to", "H100-SXM")],
    "plan": [("T", "--samples", "1000", "--batch-size", "8")],
    "energy": [("T",)],
    "session": [("T",)],
    "lines": [("T",), ("T", "--csv", "-"), ("T", "--json", "-")],
    "modules": [("T",), ("T", "--csv", "-")],
    "query": [("T",), ("T", SQL), ("T", SQL, "--format", "csv"), ("T", SQL, "--format", "csv", "--raw")],
    "export": [("T", "-", "--format", form) for form in ("timeline", "chrome", "folded", "speedscope", "openmetrics")],
    "batch-size": [("T",)],
    "data-parallel": [("T",)],
    "memory": [("T",)],
    **{
        name: [("T",), ("T", "--format", "csv"), ("T", "--format", "csv", "--raw"), ("T", "--format", "json")]
        for name in ("steps", "idle", "operators", "input", "kernels", "roofline")
    },
}
"""Every command that reads a trace, as it prints."""
OTHERS = {
    *("run", "bench", "tune", "sweep", "prices", "runs", "history", "attach", "telemetry", "environment", "devices"),
    *("rules", "explain", "cache", "view", "doctor", "completion"),
    *("mcp", "lsp", "watch", "serving"),
}
"""Those that print none of a trace: only stepscope's own words, or what the user called a run."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose every name is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    plain = write_kineto(PROGRAMS["input_bound_training"](), folder / "plain.json")
    document = json.loads(plain.read_text())
    document["traceName"] = HOSTILE
    for event in document["traceEvents"]:
        arguments = event.setdefault("args", {})
        if event["ph"] == "M":
            arguments |= {name: HOSTILE for name in ("name", "labels") if name in arguments}
        elif not event["name"].startswith("ProfilerStep#"):
            event["name"] = f"{event['name']}{HOSTILE}"
            arguments |= {"Call stack": HOSTILE, "Concrete Inputs": [HOSTILE], "Module Hierarchy": HOSTILE}
    document["deviceProperties"] = [{"id": 0, "name": HOSTILE, "numSms": 132}]
    planted = folder / "planted.json"
    planted.write_text(json.dumps(document))
    return planted


def on_a_terminal(words: tuple[str, ...], **variables: str) -> tuple[str, str]:
    """What a command writes to a terminal that is its standard output, and to standard error."""
    ours, theirs = pty.openpty()
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.extend(_until_it_ends(ours)))
    reader.start()
    error = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, open(theirs, "w", encoding="utf-8") as terminal:
        patch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm-256color", **variables}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", error)
        code = main([*words])
    reader.join(60)
    assert code in (0, 2), error.getvalue()
    return b"".join(said).decode(), error.getvalue()


def _until_it_ends(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # how a terminal ends
        while piece := os.read(terminal, 1 << 16):
            yield piece
    os.close(terminal)


def obeyed(text: str) -> set[str]:
    """The characters that a terminal would obey instead of showing."""
    return {mark for mark in text.replace("\r\n", "").replace("\n", "").replace("\t", "") if not mark.isprintable()}


def test_every_command_is_looked_at() -> None:
    assert {command.name for command in COMMANDS} == WORDS.keys() | OTHERS


@pytest.mark.parametrize("name", WORDS)
def test_nothing_is_obeyed(name: str, trace: Path) -> None:
    for words in WORDS[name]:
        said, error = on_a_terminal((name, *(str(trace) if word == "T" else word for word in words)), NO_COLOR="1")
        assert said or error
        assert obeyed(said) == set(), words
        assert obeyed(error) == set(), words


def test_only_our_own_colours_are_obeyed(trace: Path) -> None:
    said, _ = on_a_terminal(("diagnose", str(trace), "--all"))
    assert "\x1b[" in said
    assert obeyed(said) == {"\x1b"}
    assert all(part.split("m")[0].replace(";", "").isdigit() for part in said.split("\x1b[")[1:])


def test_a_pipe_gets_the_names_as_they_are(trace: Path) -> None:
    command = [sys.executable, "-m", "stepscope", "query", str(trace), SQL, "--format", "csv", "--raw"]
    done = subprocess.run(command, env=environment(), capture_output=True, check=True)
    assert HOSTILE.encode() in done.stdout


def test_a_terminal_gets_the_first_thousand_rows_of_csv(trace: Path) -> None:
    counted = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 1500) select i from n"
    said, error = on_a_terminal(("query", str(trace), counted, "--format", "csv"))
    assert said.split() == ["i", *map(str, range(1, 1001))]
    assert "1,000 of 1,500" in error
