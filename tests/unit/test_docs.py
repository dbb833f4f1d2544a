"""The user's guide against the rules it describes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from stepscope.commands import main
from stepscope.diagnosis.rule import SECTIONS, Answers, Limits, Rule, Threshold, rule_index, rule_page
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from tests import api_page, command_page
from tests.quoted_output import PAGES, with_output
from tests.rule_list import LIST, rule_list

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "rules"


class DocumentedRule(Rule):
    """A rule with the page that the test gives it."""

    page = "# What it finds\nSmall kernels.\n\n# What to do\nFuse them."


class UndocumentedRule(Rule):
    page = ""


def finds_nothing(view: View, limits: Limits) -> Answers:
    yield from ()


UNDOCUMENTED = UndocumentedRule("nothing", "Nothing is slow", {}, finds_nothing)
SMALL = DocumentedRule(
    "small",
    "Kernels are small",
    {
        "share": Threshold(0.05, "share", "share of small kernels in the {period}"),
        "length": Threshold(2000, "ns", "a kernel's length"),
        "kernels": Threshold(10, "count", "kernels that are many"),
    },
    finds_nothing,
)


def test_the_page_of_a_rule_that_says_nothing() -> None:
    assert rule_page(UNDOCUMENTED) == "# Nothing is slow\n\nRule `nothing`\n"


def test_a_page() -> None:
    assert rule_page(SMALL) == (
        "# Kernels are small\n\nRule `small`\n\n"
        "## What it finds\nSmall kernels.\n\n## What to do\nFuse them.\n\n"
        "## Thresholds\n\n"
        "| threshold | default | meaning |\n"
        "|---|---|---|\n"
        "| `small.share` | 0.05 (a share: 5%) | share of small kernels in the step |\n"
        "| `small.length` | 2000 ns | a kernel's length |\n"
        "| `small.kernels` | 10 | kernels that are many |\n\n"
        "Set one when diagnosing:\n\n"
        "    stepscope diagnose TRACE --set small.share=0.05\n"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rules_page_is_up_to_date(rule: Rule) -> None:
    page = FOLDER / f"{rule.id}.md"

    assert page.is_file(), "run scripts/generate_docs"
    assert page.read_text(encoding="utf-8") == rule_page(rule), "run scripts/generate_docs"
    headings = re.findall(r"^## (.+)$", rule_page(rule), re.MULTILINE)
    assert headings == [*SECTIONS, "Thresholds"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_is_explained(rule: Rule, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", rule.id]) == 0

    explained = capsys.readouterr().out
    assert rule.id in explained
    assert "What to do" in explained


def test_the_index_is_up_to_date_and_no_page_is_left_over() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == rule_index(RULES), "run scripts/generate_docs"
    assert {path.name for path in FOLDER.iterdir()} == {"README.md", *(f"{rule.id}.md" for rule in RULES)}


def test_every_file_of_the_folder_is_listed() -> None:
    assert LIST.read_text(encoding="utf-8") == rule_list(), "run scripts/generate_docs"
    assert sorted(rule.id for rule in RULES) == sorted(
        path.stem.replace("_", "-") for path in LIST.parent.glob("[a-z]*.py")
    )


def test_the_index_lists_every_rule_once() -> None:
    assert re.findall(r"^\| \[(.+?)\]", rule_index(RULES), re.MULTILINE) == [rule.id for rule in RULES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_output_is_what_the_command_prints(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert "<!-- output of: stepscope " in text
    assert text == with_output(text), "run scripts/generate_docs"


@pytest.mark.parametrize(
    ("page", "written"),
    [(api_page.PAGE, api_page.api_page), (command_page.PAGE, command_page.command_page)],
    ids=["api", "commands"],
)
def test_the_reference_is_of_this_code(page: Path, written: Callable[[], str]) -> None:
    assert page.read_text(encoding="utf-8") == written(), "run scripts/generate_docs"


@pytest.mark.parametrize("name", api_page.MODULES)
def test_everything_public_is_there_and_says_what_it_is(name: str) -> None:
    module = import_module(name)

    for each in module.__all__:
        value = getattr(module, each)
        assert each == "__version__" or inspect.getdoc(value), each
    assert set(module.__all__) <= set(dir(module))
