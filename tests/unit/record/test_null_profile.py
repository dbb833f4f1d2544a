"""What `profile(enabled=False)` gives: the same interface, and nothing behind it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import stepscope
from stepscope.record.profile import NullProfile
from stepscope.record.profile_block import ProfileBlock
from stepscope.record.schedule import RecordOptions

PROGRAM = """
import json, sys
import stepscope
before = set(sys.modules)
with stepscope.profile("nowhere.json.gz", enabled=False, diagnose=True, on_trace_ready=print) as profile:
    for _ in range(3):
        profile.step()
after = set(sys.modules) - before
print(json.dumps(sorted(name for name in after if not name.startswith("stepscope."))))
"""


def test_it_has_everything_a_block_has() -> None:
    block = ProfileBlock("trace.json.gz", None, RecordOptions())
    public = {name for name in dir(block) if not name.startswith("_")}

    assert {name for name in dir(NullProfile()) if not name.startswith("_")} == public


def test_every_call_does_nothing() -> None:
    with stepscope.profile(enabled=False) as profile:
        profile.start()
        profile.step()
        profile.stop()

        assert not profile.enabled
        assert not profile.is_recording
        assert (profile.step_number, profile.traces, profile.problem) == (0, (), None)
        assert profile.diagnosis() is None
        profile.export_chrome_trace("nowhere.json")


def test_exceptions_pass() -> None:
    with pytest.raises(KeyError, match="mine"), stepscope.profile(enabled=False):
        raise KeyError("mine")


def test_nothing_is_imported_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == []
