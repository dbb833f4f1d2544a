"""Checks a document against the published JSON Schema, and refuses keys that it does not have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

try:
    import jsonschema
except ModuleNotFoundError:  # an environment that was made before it was needed
    jsonschema = None

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "schema" / "stepscope-1.json"
ADDRESS: Final = "https://json-schema.org/draft/2020-12/schema"


def wrong_in(document: dict[str, Any]) -> list[str]:
    """Where a document, as read from JSON, differs from the definition that it comes closest to."""
    if jsonschema is None:
        return []
    schema = _strict()
    names = [each["$ref"].rpartition("/")[2] for each in schema["anyOf"]]
    apart = {each: len(document.keys() ^ set(schema["$defs"][each]["required"])) for each in names}
    closest = [each for each in names if apart[each] == min(apart.values())]
    return min((_errors(document, each) for each in closest), key=len)


def _errors(document: dict[str, Any], name: str) -> list[str]:
    validator = jsonschema.Draft202012Validator({"$defs": _strict()["$defs"], "$ref": f"#/$defs/{name}"})
    return [f"{name} {error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]


@functools.cache
def _strict() -> dict[str, Any]:
    """The schema without room for other keys; the published one is open, since keys may be added."""
    closed: dict[str, Any] = _closed(json.loads(FILE.read_text(encoding="utf-8")))
    return closed


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    more = {"additionalProperties": False} if isinstance(node.get("properties"), dict) and "type" in node else {}
    return {**more, **{key: _closed(value) for key, value in node.items()}}
