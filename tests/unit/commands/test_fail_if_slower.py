"""`--fail-if-slower`, the same in every command that has it."""

from __future__ import annotations

import pytest

from stepscope.commands.improve import bench
from stepscope.commands.read import compare
from stepscope.commands.shared.options import Command, CommandParser, exit_code_if_slower
from stepscope.compare import SampleComparison, compare_samples
from stepscope.errors import UsageError


def found(after: float) -> SampleComparison:
    return compare_samples([[100.0] * 3], [[after] * 3])


def test_one_that_is_slower_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [("a", found(102.0)), ("b\x1b[31m", found(103.0)), ("c", found(90.0))]

    assert exit_code_if_slower(0.03, sides) == 1

    assert capsys.readouterr().err == "stepscope: b\\x1b[31m is slower by 3.0 %, --fail-if-slower 3.0 %\n"


def test_nothing_is_said_where_nothing_is_slower_or_nothing_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_if_slower(0.03, [("a", found(102.0))]) == 0
    assert exit_code_if_slower(None, [("a", found(200.0))]) == 0
    assert exit_code_if_slower(0.0, []) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [bench.COMMAND, compare.COMPARE])
@pytest.mark.parametrize(
    ("text", "share"), [("3%", 0.03), ("0.03", 0.03), ("0%", 0.0), ("100%", 1.0), (" 2.5 % ", 0.025)]
)
def test_a_share_is_read_alike_by_both_commands(command: Command, text: str, share: float) -> None:
    parser = CommandParser()
    command.prepare_parser(parser)

    assert parser.parse_args(["a", "b", "--fail-if-slower", text]).fail_if_slower == pytest.approx(share)


@pytest.mark.parametrize("command", [bench.COMMAND, compare.COMPARE])
@pytest.mark.parametrize("text", ["3", "nan", "inf", "-1%", "1e-2", "", "%", "3%%", "101%"])
def test_what_is_no_share_is_refused_by_both_commands(command: Command, text: str) -> None:
    parser = CommandParser()
    command.prepare_parser(parser)

    with pytest.raises(UsageError):
        parser.parse_args(["a", "b", "--fail-if-slower", text])
