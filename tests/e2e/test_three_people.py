"""The transcripts of docs/three-people.md: what they type works, and prints what they quote but for the numbers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tries import TIMES

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "three-people.md").read_text(encoding="utf-8")
NEEDS = {
    "A plain PyTorch script": "torch",
    "A Transformers `Trainer`": "transformers",
    "A trace from a colleague": "polars",
}
ON_A_QUIET_MACHINE = ("A Transformers `Trainer`",)
FEWEST_MEGABYTES = 8
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
_BLOCK = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*[.,]?(?!\.)")


def shape(text: str) -> str:
    """The text with the same number everywhere, on one line."""
    return " ".join(_NUMBER.sub("0", text).split())


def pattern(quoted: str) -> re.Pattern[str]:
    """Finds quoted text with any numbers and units, broken into other lines, and with anything where it has dots."""
    quoted = re.sub(r"(?m)^- B against A: .*(?:\n  .*)*", "- B against A: ...", quoted)  # the verdict is the machine's
    found = re.escape(shape(quoted))
    found = re.sub(r"0\\ (?:ns|us|ms|s)\b", "0\\\\ (?:ns|us|ms|s)", found)
    return re.compile(found.replace(r"\.\.\.", ".*?"))


def typed(section: str) -> Iterator[tuple[str, str]]:
    """Each command of a section with the output that is quoted of it."""
    for block in _BLOCK.findall(section):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, quoted = part.partition("\n")
            yield command, quoted


@pytest.mark.slow
@pytest.mark.parametrize("title", NEEDS)
def test_what_is_typed_prints_what_is_quoted(title: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[title])
    if title in ON_A_QUIET_MACHINE and TIMES == 1:
        pytest.skip("other tests beside it change what is found first: STEPSCOPE_TIMES=2 tries it")
    section = dict(_SECTION.findall(PAGE))[title]
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    for name, text in _FILE.findall(section):
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = environment_of(tmp_path)
    if "benchmarks/long_trace.py" in section:
        words = [REPOSITORY / "benchmarks" / "long_trace.py", "trace.json", str(FEWEST_MEGABYTES)]
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, check=True)

    for command, quoted in typed(section):
        program, *words = shlex.split(re.sub(r"--budget \w+", "--rounds 2", command))
        assert program == "stepscope"
        if words[0] == "bench" and TIMES == 1:
            continue  # more than a minute: STEPSCOPE_TIMES=2 types it, too
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        if words[0] == "compare" and TIMES == 1:
            continue  # two runs of a busy machine may differ by chance only: STEPSCOPE_TIMES=2 compares what is printed
        printed = shape(done.stdout)
        at = 0
        for piece in re.split(r"^\.\.\.\n", quoted, flags=re.MULTILINE):
            found = pattern(piece).search(printed, at)
            assert found, f"{command}: {piece!r} is not in {printed[at:]!r}"
            at = found.end()


def environment_of(home: Path) -> dict[str, str]:
    """The variables of somebody who has never used stepscope."""
    gone = ("STEPSCOPE", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), *sys.path]))
    return {**kept, "HOME": str(home), "PYTHONPATH": path, "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
