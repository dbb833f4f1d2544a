"""The beginning of a file of text, told apart from that of a binary one."""

from __future__ import annotations

import re
from typing import Final

_BOM: Final = b"\xef\xbb\xbf"
_DOCUMENT: Final = re.compile(rb"[{\[][\t\n\r -\x7e\x80-\xff]*")
_LOOKED_AT_BYTES: Final = 256


def text_of(head: bytes) -> bytes:
    """The bytes behind a byte-order mark and blanks."""
    return head.lstrip().removeprefix(_BOM).lstrip()


def is_json(head: bytes) -> bool:
    """Whether a file begins like a JSON object or list; unlike binary data it holds no control characters."""
    return _DOCUMENT.fullmatch(text_of(head[:4096])[:_LOOKED_AT_BYTES]) is not None
