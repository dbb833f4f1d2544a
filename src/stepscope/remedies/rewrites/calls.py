"""Calls in a module, and other keywords for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from stepscope.remedies.rewrites.context import Context
from stepscope.remedies.rewrites.kinds import Edit
from stepscope.remedies.rewrites.source_text import Place

_COMMENT = re.compile(r"#[^\r\n]*")


def calls_of(context: Context) -> Iterator[tuple[Place, ast.Call, str | None]]:
    """Every call with the statement it stands in, and its full name where it is torch's."""
    for place, node in context.calls:
        yield place, node, context.names.meaning(node.func, place.scope)


def literal_keywords(call: ast.Call) -> dict[str, ast.expr] | None:
    """The call's keywords; None where some are unpacked from a dictionary, or arguments from a list."""
    if any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(each, ast.Starred) for each in call.args
    ):
        return None
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def is_constant(node: ast.expr | None, *values: object) -> bool:
    """Whether the expression is one of these literals; True is not 1 here."""
    return isinstance(node, ast.Constant) and any(
        node.value == value and type(node.value) is type(value) for value in values
    )


def with_keywords(context: Context, call: ast.Call, added: Mapping[str, str]) -> Edit | None:
    """The edit that adds keywords behind the last argument; None where it is not clear where that ends."""
    source = context.source
    end = source.span(call)[1]
    text = ", ".join(f"{name}={value}" for name, value in added.items())
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not arguments:
        return Edit(end - 1, end - 1, text) if re.search(r"\(\s*\)$", source.text[:end]) else None
    last = max(arguments, key=lambda each: source.span(each)[1])
    start, at = source.span(last)
    rest = _COMMENT.sub("", source.text[at:end]).split()
    if isinstance(last, ast.GeneratorExp) or "".join(rest) not in (")", ",)"):
        return None
    line = source.before(last)
    if line.strip() or not isinstance(last, ast.keyword) or len(arguments) == 1:
        return Edit(at, at, f", {text}")
    # One argument a line: before the last one, so that a comment behind that stays its own.
    return Edit(start, start, "".join(f"{name}={value},{source.line_end}{line}" for name, value in added.items()))
