"""The user's guide names everything there is: each command and option, table and column, cause and JSON key."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.analysis.host import CAUSES
from stepscope.commands import COMMANDS
from stepscope.commands.read.export import derived_tables
from stepscope.commands.shared.options import Command, CommandParser
from stepscope.trace import Trace
from stepscope.trace.tables import SCHEMAS

DOCS = Path(__file__).parents[2] / "docs"


def options_of(command: Command) -> list[str]:
    parser = CommandParser()
    command.prepare_parser(parser)
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_and_option_stands_in_the_guide(command: Command) -> None:
    guide = (DOCS / "guide.md").read_text()
    wanted = [f"stepscope {command.name}", *options_of(command)]
    assert [word for word in wanted if word not in guide and word != "--help"] == []


DERIVED = derived_tables()
COLUMNS = {**SCHEMAS, **{name: schema for name, (_, schema) in DERIVED.items()}}


@pytest.mark.parametrize("table", COLUMNS)
def test_every_column_stands_in_the_page_of_tables(table: str) -> None:
    section = (DOCS / "tables.md").read_text().split(f"## {table}\n", 1)[1].split("\n## ", 1)[0]
    assert [column for column in COLUMNS[table] if f"| `{column}` |" not in section] == []


@pytest.mark.parametrize("table", DERIVED)
def test_derived_tables_have_the_columns_they_promise(table: str) -> None:
    make, schema = DERIVED[table]
    assert list(make(Trace.from_tables({})).schema.items()) == [(name, dtype()) for name, dtype in schema.items()]


def test_every_cause_stands_in_the_page_of_idle_time() -> None:
    page = (DOCS / "idle-time.md").read_text()
    assert [cause for cause in CAUSES if f"| {cause} |" not in page] == []


def test_links_between_pages_lead_somewhere() -> None:
    import re

    pages = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    lost = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert lost == []
