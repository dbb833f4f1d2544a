"""Kept answers: printed again while nothing that they depend on changed, and never afterwards."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stepscope
from stepscope.commands import COMMANDS, main
from stepscope.commands.shared import answers, output
from stepscope.machine import devices
from tests.simulator import write_kineto
from tests.simulator.programs import item_every_step
from tests.unit.recording import saved
from tests.unit.waiting_twice import waiting_twice

LONG_AGO_S = 1_700_000_000

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11) or os.name != "posix", reason="answers are not kept here")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small trace, long unchanged, in a folder that is the current one."""
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return settled(write_kineto(item_every_step(), folder / "trace.json.gz"))


def settled(path: Path) -> Path:
    """Make the file's times old, as far as that is possible."""
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return path


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And files settle at once."""
    monkeypatch.setattr(answers, "_hooked", [])
    monkeypatch.setattr(answers, "_SETTLED_NS", -3_600_000_000_000)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that ran, rather than being answered from what was kept."""
    found: list[str] = []
    import stepscope.commands as commands

    run = commands._parsed_and_run

    def noted(words: list[str]) -> int:
        found.append(words[0])
        devices.forget_devices()
        code = run(words)
        answers._hooked.clear()  # as in a new process
        return code

    monkeypatch.setattr(commands, "_parsed_and_run", noted)
    return found


WORDS = ["diagnose", "trace.json.gz"]


def test_an_answer_is_printed_again_to_the_byte(
    trace: Path, ran: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = [*WORDS, "--json", "a.json", "--markdown", "a.md", "--html", "a.html"]
    said = []
    for _ in range(2):
        assert main(words) == 0
        captured = capfdbinary.readouterr()
        said.append((captured.out, captured.err, *(Path(each).read_bytes() for each in ("a.json", "a.md", "a.html"))))
        for each in ("a.json", "a.md", "a.html"):
            os.unlink(each)

    assert ran == ["diagnose"]
    assert said[0] == said[1]
    assert b"a.html" in said[1][1]


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "trace.json.gz", "--json", "-"],
        ["operators", "trace.json.gz", "--format", "csv"],
        ["lines", "trace.json.gz"],
        ["whatif", "trace.json.gz", "--remove", "python"],
        ["compare", "trace.json.gz", "trace.json.gz"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_only_reads(
    words: list[str], trace: Path, ran: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    main(words)
    first = capfdbinary.readouterr()
    main(words)

    assert capfdbinary.readouterr() == first
    assert len(ran) == 1


def test_which_commands_only_read() -> None:
    assert {command.name for command in COMMANDS if command.only_reads} == {
        "diagnose", "whatif", "compare", "steps", "idle", "operators", "input", "kernels", "roofline", "lines",
        "modules", "memory",
    }  # fmt: skip


def test_the_exit_code_is_kept_and_mistakes_are_not(trace: Path, ran: list[str]) -> None:
    failing = [*WORDS, "--fail-on", "1%"]
    assert [main(failing), main(failing)] == [1, 1]
    assert len(ran) == 1

    mistaken = [*WORDS, "--rule", "no-such-rule"]
    assert [main(mistaken), main(mistaken)] == [2, 2]
    assert len(ran) == 3


def other_bytes(trace: Path) -> None:
    """Other content of the same length, with the old times: only the time of the change tells."""
    data = trace.read_bytes()
    trace.write_bytes(data)
    settled(trace)


def source_changed(trace: Path) -> None:
    for each in recorded_sources(trace):
        place = trace.parent / each
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("pass\n")


def recorded_sources(trace: Path) -> set[str]:
    frames = (event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    names = (re.match(r"(.+\.py)\(\d+\): ", name) for name in frames if isinstance(name, str))
    return {match[1] for match in names if match and not match[1].startswith(("/", "torch"))}


CHANGES: dict[str, Callable[[Path], object]] = {
    "the trace": other_bytes,
    "a file beside it": lambda trace: Path(f"{trace}.lines").write_bytes(b"not lines"),
    "a run around it": lambda trace: (trace.parent / "run.json").write_text("{}"),
    "another rank": lambda trace: (trace.parent / "rank1.json").write_text("{}"),
    "a source file": source_changed,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_what_was_read_or_looked_for(change: Callable[[Path], object], trace: Path, ran: list[str]) -> None:
    main(WORDS)
    main(WORDS)
    assert len(ran) == 1

    change(trace)
    main(WORDS)

    assert len(ran) == 2


def test_a_table_of_devices_that_appears(tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CONFIG_DIR", str(tmp_path))
    words = ["diagnose", saved(tmp_path, waiting_twice()), "--device", "A100-SXM4-40GB"]
    main(words)
    main(words)
    assert len(ran) == 1

    (tmp_path / "devices.toml").write_text("")
    main(words)
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("COLUMNS", "70"), ("NO_COLOR", "1"), ("STEPSCOPE_LIMITS", "rows=20000000"), ("TZ", "Asia/Tokyo")],
)
def test_another_environment(
    name: str, value: str, trace: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(WORDS)
    monkeypatch.setenv(name, value)
    main(WORDS)

    assert len(ran) == 2


def test_another_version_and_other_files_of_the_package(
    trace: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(WORDS)
    with monkeypatch.context() as other:
        other.setattr(answers, "__version__", "0.1.1")
        main(WORDS)
    assert len(ran) == 2

    package = answers.package_state()
    monkeypatch.setattr(answers, "package_state", lambda: [*package[:-1], (package[-1][0] + 1, package[-1][1])])
    main(WORDS)
    assert len(ran) == 3
    assert stepscope.__version__ == "0.1.0"


def test_other_words_and_another_folder(trace: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(WORDS)
    main([*WORDS, "--top", "3"])
    assert len(ran) == 2

    (trace.parent / "below").mkdir()
    monkeypatch.chdir(trace.parent / "below")
    main(["diagnose", "../trace.json.gz"])
    assert len(ran) == 3


@pytest.mark.parametrize("words", [[*WORDS, "--no-cache"], ["diagnose", "-"]])
def test_what_is_never_kept(words: list[str], trace: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with trace.open("rb") as stream:
            monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": stream}))
            main(words)

    assert len(ran) == 2


def test_a_file_that_just_changed_is_asked_again(trace: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_SETTLED_NS", 2_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: os.stat(trace).st_ctime_ns + 1_000_000_000)
    main(WORDS)
    main(WORDS)
    assert len(ran) == 2

    monkeypatch.setattr(time, "time_ns", lambda: os.stat(trace).st_ctime_ns + 3_000_000_000)
    main(WORDS)
    main(WORDS)
    assert len(ran) == 3


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_answer_is_not_used(damage: bytes | None, trace: Path, ran: list[str], tmp_path: Path) -> None:
    main(WORDS)
    [kept] = (tmp_path / "cache/answers").iterdir()
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(bytes(data) if damage is None else damage)

    assert main(WORDS) == 0
    assert len(ran) == 2


def test_a_later_command_of_a_process_keeps_nothing(trace: Path, tmp_path: Path) -> None:
    main(WORDS)
    main([*WORDS, "--top", "3"])

    assert len(list((tmp_path / "cache/answers").iterdir())) == 1


def test_nothing_stays_watched(trace: Path) -> None:
    before = os.stat, os.lstat, sys.stdout, sys.stderr
    main(WORDS)
    main([*WORDS, "--rule", "no-such-rule"])

    assert (os.stat, os.lstat, sys.stdout, sys.stderr) == before
    assert (answers._watching, output.written) == ([], [])


def test_a_folder_that_cannot_be_written_keeps_nothing(trace: Path, ran: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    assert [main(WORDS), main(WORDS)] == [0, 0]
    assert len(ran) == 2


def test_clearing_the_cache_forgets_answers(trace: Path, ran: list[str]) -> None:
    main(WORDS)
    main(["cache", "clear"])
    main(WORDS)

    assert ran == ["diagnose", "cache", "diagnose"]


def test_every_variable_that_reading_commands_ask_for_is_known() -> None:
    """Names of environment variables in the rooms that answers come from."""
    root = Path(stepscope.__file__).parent
    rooms = (
        "trace",
        "readers",
        "analysis",
        "whatif",
        "diagnosis",
        "compare",
        "report",
        "commands/read",
        "commands/shared",
    )
    asked: set[str] = set()
    for path in (path for room in rooms for path in (root / room).rglob("*.py")):
        asked |= set(re.findall(r"os\.(?:environ(?:\.get\(|\[)|getenv\()\s*['\"](\w+)['\"]", path.read_text()))

    assert {name for name in asked if name not in answers.NAMES and not name.startswith(answers.PREFIXES)} <= {
        *("LOCAL_RANK", "TORCHINDUCTOR_CACHE_DIR")  # in the texts of remedies
    }
