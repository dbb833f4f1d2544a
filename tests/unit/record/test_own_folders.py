"""A run of the tests leaves the folders of whoever runs them as they are, and fails where a test does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
RECORDS = """
import subprocess, sys
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.runs import RunIndex

def test_here():
    RunIndex().add(RunFolder.create(None, "before", RunManifest(command=("x",))))

def test_in_another_process():
    program = "from stepscope.record.runs import RunIndex; print([run.name for run in RunIndex().all()])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "['before']\\n"
"""
LEAVES = """
import os
from pathlib import Path

def test_elsewhere():
    place = Path(os.environ["USERS_HOME"], ".local", "share", "stepscope")
    place.mkdir(parents=True, exist_ok=True)
    (place / "left.txt").touch()
"""


def ran(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """A run of one file of tests under the project's conftest, by a user whose home is in the folder."""
    (folder / "tests").mkdir()
    shutil.copy(CONFTEST, folder / "tests" / "conftest.py")
    (folder / "tests" / "test_one.py").write_text(program)
    (folder / "user").mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("STEPSCOPE_", "XDG_"))}
    variables |= {"HOME": str(folder / "user"), "USERS_HOME": str(folder / "user")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'temporary'}", "tests"],
        cwd=folder,
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_what_tests_record_is_not_the_users(tmp_path: Path) -> None:
    done = ran(tmp_path, RECORDS)

    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert [path for path in (tmp_path / "user").rglob("*") if "stepscope" in path.name] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names the user's data folder as Linux does")
def test_a_test_that_writes_into_the_users_folders_fails_the_run(tmp_path: Path) -> None:
    done = ran(tmp_path, LEAVES)

    assert done.returncode == 1, done.stdout
    assert "left.txt" in done.stdout
