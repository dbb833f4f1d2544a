"""A hook of MkDocs: links to files of the repository outside docs/ become plain text, as the site has no such pages."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / PurePosixPath(page.file.src_uri)).parent

    def without_outside(match: re.Match[str]) -> str:
        path = match["target"].partition("#")[0]
        if not path.startswith("..") or (folder / path).resolve().is_relative_to(docs):
            return match[0]
        return match["text"]

    return _LINK.sub(without_outside, markdown)
