"""The page as HTML: what the server sends, and one file that holds the page's script, style and documents."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping
from importlib.resources import files
from typing import Final
from urllib.parse import parse_qsl, quote_plus

from stepscope.view.documents import Options

_HEAD: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""
PAGE: Final = f"""\
{_HEAD}<title>stepscope</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
<div id="page"></div>
<script src="page.js"></script>
</html>
"""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer."""
_ESCAPED: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def bundled(name: str) -> bytes:
    """A file of the built page: page.js or page.css."""
    return files("stepscope.view").joinpath("bundle").joinpath(name).read_bytes()


def address(name: str, options: Options) -> str:
    """Name and options of a document as the page asks for it, in the encoding of URLSearchParams."""
    query = "&".join(f"{_encoded(key)}={_encoded(value)}" for key, value in sorted(options.items()))
    return f"{name}?{query}" if query else name


def with_options(known: str, options: Options) -> str:
    """The address with further options."""
    name, _, query = known.partition("?")
    return address(name, {**dict(parse_qsl(query, keep_blank_values=True)), **options})


def _encoded(text: str) -> str:
    return quote_plus(text, safe="*", errors="replace").replace("~", "%7E")


def page_file(title: str, documents: Mapping[str, bytes]) -> bytes:
    """One HTML file that needs nothing else.

    The documents are data: nothing in them can end their element, since <, > and & are escaped.

    Args:
        documents: JSON by `address`.
    """
    data = ",\n".join(f"{_json_key(key)}:{value.decode().strip()}" for key, value in documents.items())
    embedded = f'<script type="application/json" id="stepscope-documents">{{\n{data.translate(_ESCAPED)}\n}}</script>\n'
    return _whole(title, embedded).encode("utf-8", "backslashreplace")


def framed_page() -> str:
    """The page for a frame of a notebook or an editor: it asks the document around it for its documents."""
    return _whole("stepscope", "")


def _whole(title: str, embedded: str) -> str:
    """The page with its script and style inside; its policy allows only these, by their hashes, and no request."""
    script, style = (bundled(name).decode().replace("</script", "<\\/script") for name in ("page.js", "page.css"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return "".join(
        (
            _HEAD,
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            f"<title>{html.escape(title)}</title>\n",
            '<link rel="icon" href="data:,">\n',
            f"<style>{style}</style>\n",
            '<div id="page"></div>\n',
            embedded,
            f"<script>{script}</script>\n</html>\n",
        )
    )


def _json_key(text: str) -> str:
    from stepscope.report.document import compact_json

    return compact_json(text).decode()


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
