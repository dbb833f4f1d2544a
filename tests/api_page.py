"""The reference of the Python interface, docs/api.md, as Markdown made from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "api.md"
MODULES: Final = ("stepscope", "stepscope.remedies")
_HEAD: Final = """# Python interface

What `import stepscope` and `stepscope.remedies` offer; everything else is internal and may change.
`scripts/generate_docs` writes this page from the code. The callbacks for Lightning and Transformers have
[a page of their own](integrations.md).
"""


def api_page() -> str:
    """The whole page."""
    return _HEAD + "".join(_module(name) for name in MODULES)


def _module(name: str) -> str:
    module = import_module(name)
    members = ((each, getattr(module, each)) for each in module.__all__ if not each.startswith("__"))
    return f"\n## `{name}`\n" + "".join(_member(each, value) for each, value in members)


def _member(name: str, value: Any) -> str:
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        methods = [each for each in vars(value).items() if inspect.isfunction(each[1]) and not each[0].startswith("_")]
        text += "\n" + "".join(f"\n- `.{each}{_signature(method)}`{_first_line(method)}" for each, method in methods)
    head = f"class {name}" if inspect.isclass(value) else f"{name}{_signature(value)}"
    return f"\n### `{name}`\n\n    {head}\n\n{_markdown(text)}\n"


def _first_line(value: Any) -> str:
    text = inspect.getdoc(value)
    return f": {text.splitlines()[0]}" if text else ""


def _signature(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)).replace("'", ""))


def _markdown(text: str) -> str:
    """A docstring as Markdown: its sections in bold, their entries as a list."""
    lines, in_section = [], False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line):
            in_section = True
            line = f"**{line[:-1]}**\n"
        elif in_section:
            line = re.sub(r"^    ([\w, *]+): ", r"- `\1`: ", line)
            line = re.sub(r"^ {4,8}(?=\S)", "  ", line)
            in_section = bool(line)
        lines.append(line)
    return "\n".join(lines).strip()
