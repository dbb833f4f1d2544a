"""The reference of the command line, docs/commands.md, as Markdown made from the commands' parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepscope.commands import GROUPS, parsers

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
_HEAD: Final = """# Commands

Every command with its options, as `stepscope COMMAND --help` prints them. [Using stepscope](guide.md) explains what
they are for. `scripts/generate_docs` writes this page from the code.
"""


def command_page() -> str:
    """The whole page."""
    _, found = parsers()
    pieces = [_HEAD]
    for title, commands in GROUPS:
        pieces.append(f"\n## {title[:1].upper()}{title[1:]}\n")
        for command in commands:
            pieces += [
                f"\n### `stepscope {command.name}`\n\n{_sentence(command.help)}\n",
                *_described(found[command.name]),
            ]
            if command.examples:
                pieces.append(f"\n```text\n{command.examples.strip()}\n```\n")
    return "".join(pieces)


def _described(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments as a table for each group, then each subcommand in the same way."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = [
            f"| `{_invocation(formatter, action)}` | {_cell(formatter._expand_help(action))} |\n"
            for action in group._group_actions
            if action.help not in (None, argparse.SUPPRESS) and action.dest not in ("help", "debug")
        ]
        if rows and not isinstance(group._group_actions[0], argparse._SubParsersAction):
            yield f"\n| {group.title or 'options'} | |\n|---|---|\n{''.join(rows)}"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            help_of = {each.dest: each.help or "" for each in action._choices_actions}
            for name, child in action.choices.items():
                yield f"\n#### `{child.prog}`\n\n{_sentence(help_of.get(name, ''))}\n"
                yield from _described(child)


def _invocation(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """The option with its value, such as "--top N", or the argument's name."""
    default = formatter._get_default_metavar_for_optional if action.option_strings else None
    name = action.dest.upper() if default is None else default(action)
    value = formatter._format_args(action, name) if action.nargs != 0 else ""
    return " ".join(filter(None, [", ".join(action.option_strings), value])).replace("|", "\\|")


def _sentence(text: str) -> str:
    text = f"{text[:1].upper()}{text[1:]}"
    return text if text.endswith((".", "?")) or not text else f"{text}."


def _cell(text: str) -> str:
    """Help in a cell of a table: nothing in it is markup."""
    text = " ".join(text.split())
    for character in "\\|<>*_[]`":
        text = text.replace(character, f"\\{character}")
    return text
