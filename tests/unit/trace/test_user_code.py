"""Which files are the user's code, beside what is no library's."""

from __future__ import annotations

import os

import pytest

from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode

TORCH = "/usr/lib/python3.11/site-packages/torch/nn/functional.py"


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("train.py", True),
        ("/srv/ada/src/model.py", True),
        (TORCH, False),
        ("torch/nn/functional.py", False),
        ("", False),
        (None, False),
    ],
)
def test_by_default_it_is_what_is_no_librarys(file: str | None, is_users: bool) -> None:
    assert (file in DEFAULT_USER_CODE) is is_users


@pytest.mark.parametrize("pattern", ["torch", "torch/", "torch/nn", "nn/functional.py", "*/torch/*", "functional.*"])
def test_patterns_are_folders_files_or_globs_of_the_end_of_a_path(pattern: str) -> None:
    assert TORCH in UserCode(also=(pattern,))
    assert "/srv/ada/train.py" in UserCode(also=(pattern,))


@pytest.mark.parametrize("pattern", ["orch", "functional", "nn.py", "torch/functional.py"])
def test_parts_of_names_do_not_match(pattern: str) -> None:
    assert TORCH not in UserCode(also=(pattern,))


def test_what_is_not_the_users_is_not_whatever_else_is_said() -> None:
    code = UserCode(also=("src",), not_those=("src/utils",))

    assert "/srv/ada/src/model.py" in code
    assert "/srv/ada/src/utils/log.py" not in code


def test_separators_of_windows_are_understood() -> None:
    assert r"C:\work\src\utils\log.py" not in UserCode(not_those=("src/utils",))


def test_variables_hold_several_patterns() -> None:
    variables = {
        "STEPSCOPE_USER_CODE": os.pathsep.join(["megatron", "", "apex"]),
        "STEPSCOPE_NOT_USER_CODE": "src/utils",
    }

    assert UserCode.from_environment(variables) == UserCode(("megatron", "apex"), ("src/utils",))
    assert UserCode.from_environment({}) == DEFAULT_USER_CODE
